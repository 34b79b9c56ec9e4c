//! The network: links between two workers, and streams between a router and a worker.
//!
//! Owns: arrival times, and whether a connection is up. Never: looks inside a message. Invariant:
//! nothing sent over a connection that broke arrives, and a side is notified of the break before
//! anything of the next connection.

use crate::world::LinkBehaviour;
use cleave_domain::{SplitMix64, Time, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct SimNetwork {
    pairs: BTreeMap<(usize, usize), WorkerPairLink>,
    /// Lost links that one side has not noticed: (side, peer).
    losses_unnoticed: BTreeSet<(WorkerRef, WorkerRef)>,
    packet_lanes: BTreeMap<(WorkerRef, WorkerRef), PacketLane>,
    streams: BTreeMap<(usize, usize), RouterStream>,
}

#[derive(Clone, Copy, Debug, Default)]
struct WorkerPairLink {
    epoch: u64,
    down_until: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct PacketLane {
    sent_until: Time,
    last_arrival: Time,
}

/// A router's connection with a worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RouterStream {
    pub(crate) epoch: u64,
    /// The connected life of the worker.
    pub(crate) worker: Option<WorkerRef>,
    last_to_router: Time,
    last_to_worker: Time,
}

/// The direction of a message on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamDirection {
    ToRouter,
    ToWorker,
}

/// The times at which a packet leaves and arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PacketTimes {
    pub(crate) sent: Time,
    pub(crate) arrives: Time,
}

impl SimNetwork {
    // === between workers ===

    pub(crate) fn epoch(&self, a: usize, b: usize) -> u64 {
        self.pair(a, b).epoch
    }

    pub(crate) fn is_down(&self, a: usize, b: usize, now: Time) -> bool {
        self.pair(a, b).down_until > now
    }

    fn pair(&self, a: usize, b: usize) -> WorkerPairLink {
        let key = (a.min(b), a.max(b));
        self.pairs.get(&key).copied().unwrap_or_default()
    }

    /// Packets in flight between the two are lost; nothing gets through until `down_until`.
    pub(crate) fn cut(&mut self, a: usize, b: usize, down_until: Time) {
        let pair = self.pairs.entry((a.min(b), a.max(b))).or_default();
        pair.epoch += 1;
        pair.down_until = pair.down_until.max(down_until);
    }

    /// `side` is to be notified that it lost `peer`; false if that is pending already.
    pub(crate) fn mark_lost(&mut self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.losses_unnoticed.insert((side, peer))
    }

    pub(crate) fn has_lost(&self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.losses_unnoticed.contains(&(side, peer))
    }

    /// `side` is notified now; false if it was before.
    pub(crate) fn take_loss(&mut self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.losses_unnoticed.remove(&(side, peer))
    }

    /// Sends a packet of this many bytes.
    pub(crate) fn send(
        &mut self,
        from: WorkerRef,
        to: WorkerRef,
        bytes: u64,
        now: Time,
        link: &LinkBehaviour,
        rng: &mut SplitMix64,
    ) -> PacketTimes {
        let lane = self.packet_lanes.entry((from, to)).or_default();
        let takes = Duration::from_nanos(bytes * link.nanos_per_byte);
        lane.sent_until = lane.sent_until.max(now) + takes;
        let jitter = rng.micros(0, link.jitter.as_micros() as u64);
        let mut arrives = lane.sent_until + link.latency + jitter;
        // Without overtaking a packet arrives after all before it on its lane.
        if !rng.chance(link.overtake) {
            arrives = arrives.max(lane.last_arrival);
            lane.last_arrival = arrives;
        }
        PacketTimes {
            sent: lane.sent_until,
            arrives,
        }
    }

    /// The latest arrival of anything sent in this direction.
    pub(crate) fn last_arrival_max(
        &self,
        from: WorkerRef,
        to: WorkerRef,
        wire: &LinkBehaviour,
    ) -> Time {
        let lane = self
            .packet_lanes
            .get(&(from, to))
            .copied()
            .unwrap_or_default();
        lane.sent_until + wire.latency + wire.jitter
    }

    // === between router and worker ===

    pub(crate) fn stream(&self, router: usize, worker: usize) -> RouterStream {
        let key = (router, worker);
        self.streams.get(&key).copied().unwrap_or_default()
    }

    pub(crate) fn connect(&mut self, router: usize, worker: usize, worker_ref: WorkerRef) {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.epoch += 1;
        stream.worker = Some(worker_ref);
    }

    /// Messages in flight are lost.
    pub(crate) fn disconnect(&mut self, router: usize, worker: usize) {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.epoch += 1;
        stream.worker = None;
    }

    /// The worker has closed its side; its messages still arrive, the last one at the time given.
    pub(crate) fn close_worker_side(&mut self, router: usize, worker: usize) -> Time {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.worker = None;
        stream.last_to_router
    }

    /// The arrival of a message due at `due`, after all messages before it.
    pub(crate) fn deliver_at(
        &mut self,
        router: usize,
        worker: usize,
        direction: StreamDirection,
        due: Time,
    ) -> Time {
        let stream = self.streams.entry((router, worker)).or_default();
        let last = match direction {
            StreamDirection::ToRouter => &mut stream.last_to_router,
            StreamDirection::ToWorker => &mut stream.last_to_worker,
        };
        *last = due.max(*last);
        *last
    }
}
