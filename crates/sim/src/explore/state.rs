//! A state of a small world.
//!
//! Owns: the brains, all messages in flight, and the fingerprint. Never: changes by itself.
//! Invariant: states share every part that their transitions did not touch, so a copy is cheap, and
//! only changed parts are hashed again.

use super::client::SmallWorldClient;
use super::hasher::StateHasher;
use super::worlds::SmallWorld;
use cleave_domain::{
    BlockRef, Emission, HandoffId, KvPlane, KvUnit, Order, Report, Time, TokenId, WorkerRef,
};
use cleave_kv::Packet;
use cleave_sched::{BlockExport, PayloadCondition};
use cleave_testkit::{CellWorker, FrameCells};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug)]
pub(super) struct SmallWorldState {
    pub(super) now: Time,
    pub(super) router: Rc<SmallWorldRouter>,
    pub(super) workers: Vec<Rc<SmallWorldWorker>>,
    /// Packets in flight, in a canonical order.
    pub(super) packets: Vec<Rc<SortedPacket>>,
    /// One-sided writes in flight of processes that died; they may still land.
    pub(super) late_writes: Vec<Rc<LateWrite>>,
    /// Losses and starts of which a process is still to be notified.
    pub(super) notices: BTreeSet<PendingNotice>,
    /// Lost links that one side has not noticed: (side, peer).
    pub(super) links_lost: BTreeSet<(WorkerRef, WorkerRef)>,
    pub(super) clients: Vec<Rc<SmallWorldClient>>,
    /// Answers in flight to the router about its clients' streams.
    pub(super) count_answers: Vec<(HandoffId, Arc<[TokenId]>)>,
    pub(super) submitted: usize,
    pub(super) commanded: usize,
    pub(super) surprises_left: u8,
    pub(super) faults: u8,
    /// Failures that one flight may have had: a fault may hit it twice.
    pub(super) failures_possible: u8,
    /// A loss occurred that only a timeout can detect.
    pub(super) needs_timer: bool,
    /// A `Landed` was lost. The receiver reports it to the router too, so only another fault makes
    /// a timer necessary.
    pub(super) landed_lost: bool,
    /// Workers that changed since they were hashed, by bit; the router is the bit after the last.
    pub(super) dirty: u32,
}

#[derive(Clone, Debug)]
pub(super) struct SmallWorldRouter {
    pub(super) brain: cleave_router::RouterBrain,
    /// How far its clock is ahead of the common one.
    pub(super) skew: Duration,
    /// The time of its last input, by its clock.
    pub(super) last_input_at: Time,
    pub(super) workers: u32,
    print: u64,
}

/// A worker process, and its stream with the router.
#[derive(Clone, Debug)]
pub(super) struct SmallWorldWorker {
    pub(super) incarnation: u64,
    pub(super) body: Option<CellWorker>,
    pub(super) skew: Duration,
    pub(super) last_input_at: Time,
    /// The life that the router is connected to.
    pub(super) connected: Option<WorkerRef>,
    pub(super) to_worker: VecDeque<Rc<(Order, u64)>>,
    pub(super) to_router: VecDeque<Rc<(SmallWorldMessage, u64)>>,
    print: u64,
}

/// A message of a worker to its router.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum SmallWorldMessage {
    Report(Report),
    Token(HandoffId, Emission),
}

/// A packet in flight between workers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SmallWorldPacket {
    pub(super) to: WorkerRef,
    pub(super) from: WorkerRef,
    pub(super) packet: Packet,
    pub(super) payload: FrameCells,
    pub(super) condition: PayloadCondition,
    /// The true writer and block of a frame, whatever its header says.
    pub(super) written_for: Option<(WorkerRef, KvPlane, BlockRef)>,
}

/// A packet with its sort key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SortedPacket {
    key: PacketSortKey,
    pub(super) envelope: SmallWorldPacket,
}

/// Receiver, sender, kind (frames first), hand-off, block or piece, hash.
type PacketSortKey = (WorkerRef, WorkerRef, u8, HandoffId, KvUnit, u64);

/// A one-sided write in flight whose process has died.
#[derive(Clone, Debug)]
pub(super) struct LateWrite {
    pub(super) from: WorkerRef,
    pub(super) export: BlockExport,
    pub(super) payload: FrameCells,
}

/// An event that a process has not noticed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum PendingNotice {
    /// A worker's link to another is lost.
    LinkLost { side: WorkerRef, peer: WorkerRef },
    /// A dead worker can write nothing more to this one.
    PeerFenced { side: WorkerRef, peer: WorkerRef },
    /// The router loses a worker's stream.
    WorkerLost(WorkerRef),
    /// A worker loses the router's stream.
    RouterLost(WorkerRef),
    /// A process starts again.
    WorkerStarts(usize),
    /// A worker connects again, once both sides have noticed the loss.
    Reconnects(usize),
}

impl SmallWorldState {
    /// The state before any worker has started.
    pub(super) fn new(small: &SmallWorld) -> Self {
        let router = SmallWorldRouter {
            brain: cleave_router::RouterBrain::new(small.router_limits()),
            skew: Duration::ZERO,
            last_input_at: Time::ZERO,
            workers: 0,
            print: 0,
        };
        let process = SmallWorldWorker {
            incarnation: 0,
            body: None,
            skew: Duration::ZERO,
            last_input_at: Time::ZERO,
            connected: None,
            to_worker: VecDeque::new(),
            to_router: VecDeque::new(),
            print: 0,
        };
        Self {
            now: Time::ZERO,
            router: Rc::new(router),
            workers: (small.roles.iter())
                .map(|_| Rc::new(process.clone()))
                .collect(),
            packets: Vec::new(),
            late_writes: Vec::new(),
            notices: BTreeSet::new(),
            links_lost: BTreeSet::new(),
            clients: SmallWorldClient::all(small)
                .into_iter()
                .map(Rc::new)
                .collect(),
            count_answers: Vec::new(),
            submitted: 0,
            commanded: 0,
            surprises_left: small.surprises_max,
            faults: 0,
            failures_possible: 0,
            needs_timer: false,
            landed_lost: false,
            dirty: u32::MAX,
        }
    }

    pub(super) fn worker_mut(&mut self, worker: usize) -> &mut SmallWorldWorker {
        self.dirty |= 1 << worker;
        Rc::make_mut(&mut self.workers[worker])
    }

    pub(super) fn router_mut(&mut self) -> &mut SmallWorldRouter {
        self.dirty |= 1 << self.workers.len();
        Rc::make_mut(&mut self.router)
    }

    pub(super) fn client_mut(&mut self, index: usize) -> &mut SmallWorldClient {
        Rc::make_mut(&mut self.clients[index])
    }

    /// The worker in exactly this life, if it runs.
    pub(super) fn body(&self, worker: WorkerRef) -> Option<&CellWorker> {
        let body = self.workers[crate::run::worker_index(worker)]
            .body
            .as_ref()?;
        (body.worker == worker).then_some(body)
    }

    /// Adds a packet to those in flight.
    pub(super) fn add_packet(&mut self, envelope: SmallWorldPacket) {
        let key = envelope.key();
        let at = self.packets.partition_point(|other| other.key <= key);
        self.packets
            .insert(at, Rc::new(SortedPacket { key, envelope }));
    }

    /// Equal for equal states; distinct states collide only by chance.
    pub(super) fn fingerprint(&mut self) -> u64 {
        for worker in 0..self.workers.len() {
            if self.dirty & 1 << worker != 0 {
                Rc::make_mut(&mut self.workers[worker]).update_hash();
            }
        }
        if self.dirty & 1 << self.workers.len() != 0 {
            Rc::make_mut(&mut self.router).update_hash();
        }
        self.dirty = 0;
        let mut print = StateHasher::default();
        // Of the time only the age of a waiting brain's last input matters.
        let router = &self.router;
        router.print.hash(&mut print);
        if router.brain.deadline().is_some() {
            (self.now + router.skew)
                .since(router.last_input_at)
                .hash(&mut print);
        }
        for process in &self.workers {
            process.print.hash(&mut print);
            let deadline = process.body.as_ref().and_then(|body| body.brain.deadline());
            if deadline.is_some() {
                (self.now + process.skew)
                    .since(process.last_input_at)
                    .hash(&mut print);
            }
        }
        for envelope in &self.packets {
            envelope.key.5.hash(&mut print);
        }
        for late in &self.late_writes {
            let BlockExport {
                handoff,
                plane,
                block,
                ..
            } = late.export;
            (late.from, handoff, plane, block).hash(&mut print);
        }
        self.notices.hash(&mut print);
        self.links_lost.hash(&mut print);
        self.count_answers.hash(&mut print);
        for reader in &self.clients {
            reader.hash.hash(&mut print);
        }
        (
            self.submitted,
            self.commanded,
            self.faults,
            self.failures_possible,
            self.needs_timer,
            self.landed_lost,
        )
            .hash(&mut print);
        print.finish()
    }
}

impl SmallWorldRouter {
    fn update_hash(&mut self) {
        let mut print = StateHasher::default();
        self.brain.fingerprint(&mut print);
        self.print = print.finish();
    }
}

impl SmallWorldWorker {
    fn update_hash(&mut self) {
        let mut print = StateHasher::default();
        (self.incarnation, self.connected).hash(&mut print);
        if let Some(body) = &self.body {
            body.brain.fingerprint(&mut print);
            body.feed(&mut print);
        }
        for order in &self.to_worker {
            order.1.hash(&mut print);
        }
        print.write_u64(0);
        for message in &self.to_router {
            message.1.hash(&mut print);
        }
        self.print = print.finish();
    }
}

impl SmallWorldPacket {
    /// Whether the packet ends a quarantine, or asks for its end.
    pub(super) fn is_about_writes(&self) -> bool {
        matches!(self.packet, Packet::Stop { .. } | Packet::Stopped { .. })
    }

    fn key(&self) -> PacketSortKey {
        let first = KvUnit::block(0);
        let (rank, unit) = match &self.packet {
            Packet::Frame { part, .. } => (0, part.unit()),
            Packet::Seal(_) => (1, first),
            Packet::Landed { .. } => (2, first),
            Packet::Abandoned { .. } => (3, first),
            Packet::Stop { .. } => (4, first),
            Packet::Stopped { .. } => (5, first),
        };
        let mut print = StateHasher::default();
        self.hash(&mut print);
        let handoff = self.packet.handoff();
        (self.to, self.from, rank, handoff, unit, print.finish())
    }
}
