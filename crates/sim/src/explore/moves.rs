//! What can happen next in a small world.
//!
//! Owns: the list of moves from a state, the usual one first, and what each costs.
//! Never: makes one. Invariant: while anything is under way the first move costs nothing and is no
//! fault; from a state without moves nothing would ever happen again.

use super::small::{Fault, Order, Small};
use super::state::{Notice, Parcel, Sent, State};
use cleave_kv::Packet;

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// A client asks.
    Submit,
    /// Somebody notices something.
    Notice(Notice),
    /// The next order reaches a worker.
    ToWorker(usize),
    /// The next word reaches the router.
    ToRouter(usize),
    /// A packet arrives.
    Packet(usize),
    /// Who keeps the clients' streams answers the router.
    Counted(usize),
    /// A late write of a dead process lands.
    Late(usize),
    /// A worker's engine does the next thing.
    Engine(usize),
    /// A process that has drained ends.
    Exit(usize),
    /// An operator's next wish.
    Command,
    /// Time passes to the first deadline.
    Tick,
    /// A fault, and what it hits.
    Lose(usize),
    Twice(usize),
    Damage(usize),
    /// Of a packet, of the next word of a worker, of the next order to one.
    Flip(usize),
    FlipWord(usize),
    FlipOrder(usize),
    /// Of a seal.
    Change(usize, Field),
    Astray(usize, Astray),
    Cancel(usize),
    Crash(usize),
    /// Of a worker, or of the router if it is the number after the last.
    Expire(usize),
    Cut(usize, usize),
    Part(usize),
    Break(usize),
    Slow,
}

/// How a packet goes astray.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Astray {
    /// As if written by another worker.
    Sender,
    /// For an earlier generation of its block.
    Generation,
    /// For another block.
    Block,
}

/// A field of a seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Handoff,
    BlocksCount,
    Digest,
    Content,
    Token,
    TokensCount,
}

impl Field {
    pub(super) const ALL: [Self; 6] = [
        Self::Handoff,
        Self::BlocksCount,
        Self::Digest,
        Self::Content,
        Self::Token,
        Self::TokensCount,
    ];
}

/// What a move costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    Nothing,
    /// A departure from the usual order, where those are counted.
    Order,
    Fault,
}

impl State {
    /// What can happen, the usual first.
    pub(super) fn moves(&self, small: &Small) -> Vec<(Move, Cost)> {
        let mut moves = self.usual(small);
        for (_, cost) in moves.iter_mut().skip(1) {
            *cost = match small.order {
                Order::Any => Cost::Nothing,
                Order::Usual => Cost::Order,
            };
        }
        if moves.is_empty() {
            let tick = self.next_deadline().map(|_| (Move::Tick, Cost::Nothing));
            moves.extend(tick);
            // Nothing is under way: what goes wrong now finds nothing to disturb but time.
        } else if small.faults.contains(&Fault::Slow) && self.next_deadline().is_some() {
            moves.push((Move::Slow, Cost::Fault));
        }
        if self.left == 0 {
            moves.retain(|(_, cost)| *cost == Cost::Nothing);
        } else if self.submitted > 0 && !moves.is_empty() {
            self.faults(small, &mut moves);
        }
        moves
    }

    /// What is under way, in the usual order.
    fn usual(&self, small: &Small) -> Vec<(Move, Cost)> {
        let mut moves = Vec::new();
        let mut add = |what| moves.push((what, Cost::Nothing));
        if self.submitted < small.requests.len() {
            add(Move::Submit);
        }
        // The usual time for an operator's wish is while somebody is generating.
        let wished = self.submitted > 0 && self.commanded < small.commands.len();
        let generating = self.readers.iter().any(|reader| reader.generates());
        if wished && generating {
            add(Move::Command);
        }
        for (index, _) in self.late.iter().enumerate() {
            add(Move::Late(index));
        }
        for notice in &self.notices {
            if self.may_notice(*notice) {
                add(Move::Notice(*notice));
            }
        }
        for (index, _) in self.counts.iter().enumerate() {
            add(Move::Counted(index));
        }
        for (worker, seat) in self.seats.iter().enumerate() {
            if !seat.to_worker.is_empty() && seat.body.is_some() {
                add(Move::ToWorker(worker));
            }
        }
        for (worker, seat) in self.seats.iter().enumerate() {
            if !seat.to_router.is_empty() {
                add(Move::ToRouter(worker));
            }
        }
        for index in 0..self.parcels.len() {
            if self.is_first_of_its_kind(index) {
                add(Move::Packet(index));
            }
        }
        for (worker, seat) in self.seats.iter().enumerate() {
            let Some(body) = &seat.body else { continue };
            if !body.is_done() {
                add(Move::Engine(worker));
            } else if body.exiting && seat.to_router.is_empty() && !self.sends(worker) {
                add(Move::Exit(worker));
            }
        }
        if wished && !generating {
            add(Move::Command);
        }
        moves
    }

    pub(super) fn may_notice(&self, notice: Notice) -> bool {
        match notice {
            // A write under way would make it untrue.
            Notice::Severed { peer, .. } => self.late.iter().all(|late| late.from != peer),
            Notice::Meets(worker) => !self.notices.iter().any(|other| match other {
                Notice::WorkerLost(who) | Notice::RouterLost(who) => {
                    crate::run::index(*who) == worker
                }
                _ => false,
            }),
            _ => true,
        }
    }

    fn sends(&self, worker: usize) -> bool {
        let from = |sent: &Sent| crate::run::index(sent.parcel.from);
        self.parcels.iter().any(|sent| from(sent) == worker)
    }

    /// Equal packets lie side by side, and it makes no difference which of them arrives.
    fn is_first_of_its_kind(&self, index: usize) -> bool {
        index == 0 || self.parcels[index] != self.parcels[index - 1]
    }

    fn faults(&self, small: &Small, moves: &mut Vec<(Move, Cost)>) {
        let workers = self.seats.len();
        let may = |fault| small.faults.contains(&fault);
        let mut add = |what| moves.push((what, Cost::Fault));
        for index in 0..self.parcels.len() {
            if !self.is_first_of_its_kind(index) {
                continue;
            }
            let is_frame = matches!(self.parcels[index].parcel.packet, Packet::Frame { .. });
            if may(Fault::Lose) {
                add(Move::Lose(index));
            }
            if may(Fault::Twice) {
                add(Move::Twice(index));
            }
            if may(Fault::Damage) && is_frame {
                add(Move::Damage(index));
            }
            if may(Fault::Flip) {
                add(Move::Flip(index));
            }
            let is_seal = matches!(self.parcels[index].parcel.packet, Packet::Seal(_));
            if may(Fault::Change) && is_seal {
                let changes = Field::ALL.map(|field| Move::Change(index, field));
                changes.into_iter().for_each(&mut add);
            }
            if may(Fault::Astray) {
                add(Move::Astray(index, Astray::Sender));
                if is_frame {
                    add(Move::Astray(index, Astray::Generation));
                    add(Move::Astray(index, Astray::Block));
                }
            }
        }
        for (index, reader) in self.readers.iter().enumerate() {
            if may(Fault::Cancel) && reader.submitted && reader.ending.is_none() {
                add(Move::Cancel(index));
            }
        }
        for worker in 0..workers {
            let Some(body) = &self.seats[worker].body else {
                continue;
            };
            let seat = &self.seats[worker];
            if may(Fault::Flip) && !seat.to_worker.is_empty() {
                add(Move::FlipOrder(worker));
            }
            if may(Fault::Flip) && !seat.to_router.is_empty() {
                add(Move::FlipWord(worker));
            }
            if may(Fault::Crash) {
                add(Move::Crash(worker));
            }
            if may(Fault::Expire) && body.brain.deadline().is_some() {
                add(Move::Expire(worker));
            }
            if may(Fault::Part) && self.seats[worker].connected == Some(body.me) {
                add(Move::Part(worker));
            }
            if may(Fault::Break) && !body.is_done() {
                add(Move::Break(worker));
            }
            for other in worker + 1..workers {
                if may(Fault::Cut) && self.talk(worker, other) {
                    add(Move::Cut(worker, other));
                }
            }
        }
        if may(Fault::Expire) && self.desk.brain.deadline().is_some() {
            add(Move::Expire(workers));
        }
    }

    /// Whether the two may have anything to do with each other: else a cut cuts nothing.
    fn talk(&self, a: usize, b: usize) -> bool {
        let busy = |worker: usize| {
            let body = self.seats[worker].body.as_ref();
            body.is_some_and(|body| !body.brain.idle())
        };
        let between = |sent: &Sent| {
            let Parcel { from, to, .. } = &sent.parcel;
            let (from, to) = (crate::run::index(*from), crate::run::index(*to));
            (from, to) == (a, b) || (from, to) == (b, a)
        };
        (busy(a) && busy(b)) || self.parcels.iter().any(|sent| between(sent))
    }
}
