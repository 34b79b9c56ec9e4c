//! A state of a small world.
//!
//! Owns: the brains, what is under way between them, and the fingerprint. Never: changes by itself.
//! Invariant: what is not shared with another state is what its last move touched; so a copy costs
//! little, and only what was touched is hashed again.

use super::print::Print;
use super::reader::Reader;
use super::small::Small;
use crate::body::{Body, Payload};
use cleave_domain::{BlockRef, Emission, HandoffId, Order, Report, Time, TokenId, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{Condition, Export};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) now: Time,
    pub(super) desk: Rc<Desk>,
    pub(super) seats: Vec<Rc<Seat>>,
    /// Packets under way, in a fixed order.
    pub(super) parcels: Vec<Rc<Sent>>,
    /// One-sided writes of processes that died meanwhile; they may still land.
    pub(super) late: Vec<Rc<Late>>,
    /// What somebody has still to notice.
    pub(super) notices: BTreeSet<Notice>,
    /// (who has not noticed, whom it lost).
    pub(super) lost: BTreeSet<(WorkerRef, WorkerRef)>,
    pub(super) readers: Vec<Rc<Reader>>,
    /// Answers to the router about its clients' streams.
    pub(super) counts: Vec<(HandoffId, Arc<[TokenId]>)>,
    pub(super) submitted: usize,
    pub(super) commanded: usize,
    /// Surprises left.
    pub(super) left: u8,
    /// Faults so far.
    pub(super) faults: u8,
    /// How often they may have hit one flight.
    pub(super) harm: u8,
    /// Something was lost that nobody can notice but by waiting.
    pub(super) silent: bool,
    /// A `Landed` was lost. The receiver told the router too, so it takes another fault to need a timer.
    pub(super) said_twice: bool,
    /// Which seats changed since they were hashed; the desk is the bit after the last.
    pub(super) dirty: u32,
}

/// The router's place.
#[derive(Clone, Debug)]
pub(super) struct Desk {
    pub(super) brain: cleave_router::Brain,
    /// How far its clock is ahead.
    pub(super) skew: Duration,
    /// What its clock said last.
    pub(super) heard: Time,
    pub(super) workers: u32,
    print: u64,
}

/// A worker's place, and its stream with the router.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) life: u64,
    pub(super) body: Option<Body>,
    pub(super) skew: Duration,
    pub(super) heard: Time,
    /// The life that the router is connected with.
    pub(super) connected: Option<WorkerRef>,
    pub(super) to_worker: VecDeque<Rc<(Order, u64)>>,
    pub(super) to_router: VecDeque<Rc<(Word, u64)>>,
    print: u64,
}

/// What a worker says over its stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Word {
    Report(Report),
    Token(HandoffId, Emission),
}

/// A packet under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Parcel {
    pub(super) to: WorkerRef,
    pub(super) from: WorkerRef,
    pub(super) packet: Packet,
    pub(super) payload: Payload,
    pub(super) condition: Condition,
    /// For frames: who wrote it in truth, for which block in truth.
    pub(super) truth: Option<(WorkerRef, BlockRef)>,
}

/// A parcel, and its place among those under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    key: Key,
    pub(super) parcel: Parcel,
}

/// To whom, from whom, frames before what follows them; the last is the print.
type Key = (WorkerRef, WorkerRef, u8, HandoffId, u32, u64);

/// A one-sided write whose process died.
#[derive(Clone, Debug)]
pub(super) struct Late {
    pub(super) from: WorkerRef,
    pub(super) export: Export,
    pub(super) payload: Payload,
}

/// What somebody has still to notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Notice {
    /// A worker: the link to another broke.
    LinkLost { side: WorkerRef, peer: WorkerRef },
    /// A worker: nothing of another can reach it any more.
    Severed { side: WorkerRef, peer: WorkerRef },
    /// The router: a worker is gone.
    WorkerLost(WorkerRef),
    /// A worker: the router is gone.
    RouterLost(WorkerRef),
    /// The process starts again.
    Starts(usize),
    /// The worker connects again, once both sides have noticed the end.
    Meets(usize),
}

impl State {
    /// Nobody is there yet.
    pub(super) fn new(small: &Small) -> Self {
        let desk = Desk {
            brain: cleave_router::Brain::new(small.router()),
            skew: Duration::ZERO,
            heard: Time::ZERO,
            workers: 0,
            print: 0,
        };
        let seat = Seat {
            life: 0,
            body: None,
            skew: Duration::ZERO,
            heard: Time::ZERO,
            connected: None,
            to_worker: VecDeque::new(),
            to_router: VecDeque::new(),
            print: 0,
        };
        Self {
            now: Time::ZERO,
            desk: Rc::new(desk),
            seats: (small.roles.iter())
                .map(|_| Rc::new(seat.clone()))
                .collect(),
            parcels: Vec::new(),
            late: Vec::new(),
            notices: BTreeSet::new(),
            lost: BTreeSet::new(),
            readers: Reader::all(small).into_iter().map(Rc::new).collect(),
            counts: Vec::new(),
            submitted: 0,
            commanded: 0,
            left: small.surprises_max,
            faults: 0,
            harm: 0,
            silent: false,
            said_twice: false,
            dirty: u32::MAX,
        }
    }

    pub(super) fn seat(&mut self, worker: usize) -> &mut Seat {
        self.dirty |= 1 << worker;
        Rc::make_mut(&mut self.seats[worker])
    }

    pub(super) fn desk(&mut self) -> &mut Desk {
        self.dirty |= 1 << self.seats.len();
        Rc::make_mut(&mut self.desk)
    }

    pub(super) fn reader(&mut self, index: usize) -> &mut Reader {
        Rc::make_mut(&mut self.readers[index])
    }

    /// The body of exactly this life, if it is alive.
    pub(super) fn body(&self, who: WorkerRef) -> Option<&Body> {
        let body = self.seats[crate::run::index(who)].body.as_ref()?;
        (body.me == who).then_some(body)
    }

    /// Puts a packet among those under way.
    pub(super) fn put(&mut self, parcel: Parcel) {
        let key = parcel.key();
        let at = self.parcels.partition_point(|other| other.key <= key);
        self.parcels.insert(at, Rc::new(Sent { key, parcel }));
    }

    /// The same for the same state, and for another only by chance.
    pub(super) fn print(&mut self) -> u64 {
        for worker in 0..self.seats.len() {
            if self.dirty & 1 << worker != 0 {
                Rc::make_mut(&mut self.seats[worker]).reprint();
            }
        }
        if self.dirty & 1 << self.seats.len() != 0 {
            Rc::make_mut(&mut self.desk).reprint();
        }
        self.dirty = 0;
        let mut print = Print::default();
        // Of the time, only how long ago a brain that waits for some of it was told.
        let desk = &self.desk;
        desk.print.hash(&mut print);
        if desk.brain.deadline().is_some() {
            (self.now + desk.skew).since(desk.heard).hash(&mut print);
        }
        for seat in &self.seats {
            seat.print.hash(&mut print);
            let deadline = seat.body.as_ref().and_then(|body| body.brain.deadline());
            if deadline.is_some() {
                (self.now + seat.skew).since(seat.heard).hash(&mut print);
            }
        }
        for parcel in &self.parcels {
            parcel.key.5.hash(&mut print);
        }
        for late in &self.late {
            let Export { handoff, block, .. } = late.export;
            (late.from, handoff, block).hash(&mut print);
        }
        self.notices.hash(&mut print);
        self.lost.hash(&mut print);
        self.counts.hash(&mut print);
        for reader in &self.readers {
            reader.print.hash(&mut print);
        }
        (
            self.submitted,
            self.commanded,
            self.faults,
            self.harm,
            self.silent,
            self.said_twice,
        )
            .hash(&mut print);
        print.finish()
    }
}

impl Desk {
    fn reprint(&mut self) {
        let mut print = Print::default();
        self.brain.fingerprint(&mut print);
        self.print = print.finish();
    }
}

impl Seat {
    fn reprint(&mut self) {
        let mut print = Print::default();
        (self.life, self.connected).hash(&mut print);
        if let Some(body) = &self.body {
            body.brain.fingerprint(&mut print);
            body.feed(&mut print);
        }
        for order in &self.to_worker {
            order.1.hash(&mut print);
        }
        print.write_u64(0);
        for word in &self.to_router {
            word.1.hash(&mut print);
        }
        self.print = print.finish();
    }
}

impl Parcel {
    /// Whether it ends a quarantine, or asks for its end.
    pub(super) fn is_about_writes(&self) -> bool {
        matches!(self.packet, Packet::Stop { .. } | Packet::Stopped { .. })
    }

    fn key(&self) -> Key {
        let (rank, ordinal) = match &self.packet {
            Packet::Frame { part, .. } => (0, part.ordinal),
            Packet::Seal(_) => (1, 0),
            Packet::Landed { .. } => (2, 0),
            Packet::Abandoned { .. } => (3, 0),
            Packet::Stop { .. } => (4, 0),
            Packet::Stopped { .. } => (5, 0),
        };
        let mut print = Print::default();
        self.hash(&mut print);
        let handoff = self.packet.handoff();
        (self.to, self.from, rank, handoff, ordinal, print.finish())
    }
}
