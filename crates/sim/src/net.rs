//! The wires: between two workers, and between a router and a worker.
//!
//! Owns: when a message arrives and whether a connection still stands. Never: looks inside one.
//! Invariant: what was sent over a connection that broke never arrives, and a side hears of the
//! break before anything of the next connection.

use crate::dice::Dice;
use crate::world::Wire;
use cleave_domain::{Time, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Net {
    pairs: BTreeMap<(usize, usize), Pair>,
    /// (who has not noticed, whom it lost).
    unnoticed: BTreeSet<(WorkerRef, WorkerRef)>,
    lanes: BTreeMap<(WorkerRef, WorkerRef), Lane>,
    streams: BTreeMap<(usize, usize), Stream>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    epoch: u64,
    down_until: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    sent_until: Time,
    last_arrival: Time,
}

/// A router's connection with a worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stream {
    pub(crate) epoch: u64,
    /// The worker's life, while connected.
    pub(crate) life: Option<WorkerRef>,
    last_to_router: Time,
    last_to_worker: Time,
}

/// Which way on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToRouter,
    ToWorker,
}

/// When a packet leaves and arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Travel {
    pub(crate) sent: Time,
    pub(crate) arrives: Time,
}

impl Net {
    // === between workers ===

    pub(crate) fn epoch(&self, a: usize, b: usize) -> u64 {
        self.pair(a, b).epoch
    }

    pub(crate) fn is_down(&self, a: usize, b: usize, now: Time) -> bool {
        self.pair(a, b).down_until > now
    }

    fn pair(&self, a: usize, b: usize) -> Pair {
        let key = (a.min(b), a.max(b));
        self.pairs.get(&key).copied().unwrap_or_default()
    }

    /// What is under way between the two is lost; nothing gets through until `down_until`.
    pub(crate) fn cut(&mut self, a: usize, b: usize, down_until: Time) {
        let pair = self.pairs.entry((a.min(b), a.max(b))).or_default();
        pair.epoch += 1;
        pair.down_until = pair.down_until.max(down_until);
    }

    /// `side` will have to be told that it lost `peer`; false when it is to be told already.
    pub(crate) fn lose(&mut self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.unnoticed.insert((side, peer))
    }

    pub(crate) fn has_lost(&self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.unnoticed.contains(&(side, peer))
    }

    /// `side` is told now; false when it was before.
    pub(crate) fn notice(&mut self, side: WorkerRef, peer: WorkerRef) -> bool {
        self.unnoticed.remove(&(side, peer))
    }

    /// Takes a packet of so many bytes.
    pub(crate) fn travel(
        &mut self,
        (from, to): (WorkerRef, WorkerRef),
        bytes: u64,
        now: Time,
        (wire, dice): (&Wire, &mut Dice),
    ) -> Travel {
        let lane = self.lanes.entry((from, to)).or_default();
        let takes = Duration::from_nanos(bytes * wire.nanos_per_byte);
        lane.sent_until = lane.sent_until.max(now) + takes;
        let jitter = dice.micros(0, wire.jitter.as_micros() as u64);
        let mut arrives = lane.sent_until + wire.latency + jitter;
        if !dice.chance(wire.overtake) {
            arrives = arrives.max(lane.last_arrival);
            lane.last_arrival = arrives;
        }
        Travel {
            sent: lane.sent_until,
            arrives,
        }
    }

    /// When the last of what was sent one way arrives at the latest.
    pub(crate) fn settled(&self, from: WorkerRef, to: WorkerRef, wire: &Wire) -> Time {
        let lane = self.lanes.get(&(from, to)).copied().unwrap_or_default();
        lane.sent_until + wire.latency + wire.jitter
    }

    // === between router and worker ===

    pub(crate) fn stream(&self, router: usize, worker: usize) -> Stream {
        let key = (router, worker);
        self.streams.get(&key).copied().unwrap_or_default()
    }

    pub(crate) fn connect(&mut self, router: usize, worker: usize, life: WorkerRef) {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.epoch += 1;
        stream.life = Some(life);
    }

    /// What is under way is lost.
    pub(crate) fn disconnect(&mut self, router: usize, worker: usize) {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.epoch += 1;
        stream.life = None;
    }

    /// The worker has closed its side; what it sent still arrives, and this is when the last does.
    pub(crate) fn close(&mut self, router: usize, worker: usize) -> Time {
        let stream = self.streams.entry((router, worker)).or_default();
        stream.life = None;
        stream.last_to_router
    }

    /// When a message that needs `takes` arrives, after all before it.
    pub(crate) fn carry(&mut self, (router, worker): (usize, usize), way: Way, due: Time) -> Time {
        let stream = self.streams.entry((router, worker)).or_default();
        let last = match way {
            Way::ToRouter => &mut stream.last_to_router,
            Way::ToWorker => &mut stream.last_to_worker,
        };
        *last = due.max(*last);
        *last
    }
}
