//! Transitions that are possible in a state of a small world.
//!
//! Owns: the list of transitions from a state, the usual one first, and their costs. Never: applies
//! one. Invariant: while any message is in flight the first transition is free and no fault; from a
//! state without transitions nothing happens any more.

use super::state::{PendingNotice, SmallWorldPacket, SmallWorldState, SortedPacket};
use super::worlds::{DeliveryOrder, SmallWorld, SmallWorldFault};
use cleave_kv::Packet;

/// One event of a small world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    Submit,
    /// A process is notified of a loss, or starts.
    Notice(PendingNotice),
    /// The next order of a stream reaches its worker.
    ToWorker(usize),
    /// The next message of a stream reaches the router.
    ToRouter(usize),
    Packet(usize),
    /// The router gets the answer about a client's stream.
    Counted(usize),
    /// A late write of a dead process lands.
    Late(usize),
    /// A worker's engine does its next operation.
    Engine(usize),
    /// A drained process ends.
    Exit(usize),
    /// The operator's next command.
    Command,
    /// Time passes to the first deadline, with nothing in flight.
    TimePasses,
    /// Faults, with the packet, worker or client that they hit.
    Lose(usize),
    Duplicate(usize),
    Damage(usize),
    /// A bit flips in a packet, in a worker's next message, or in the next order to a worker.
    Flip(usize),
    FlipReport(usize),
    FlipOrder(usize),
    /// A field of a seal changes behind the link's check.
    ChangeSeal(usize, SealField),
    Misroute(usize, PacketFault),
    Cancel(usize),
    Crash(usize),
    /// The clock of a worker, or of the router (the index after the last worker), jumps.
    Expire(usize),
    Cut(usize, usize),
    Disconnect(usize),
    EngineFault(usize),
    TimePassesEarly,
}

/// How a packet is misrouted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PacketFault {
    /// As if another worker had sent it.
    Sender,
    /// For an earlier generation of its block.
    Generation,
    /// For another block than was reserved.
    Block,
    /// The frame names the other plane.
    Plane,
}

/// A field of a seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SealField {
    Handoff,
    BlocksCount,
    Digest,
    Content,
    Token,
    TokensCount,
    /// The digest of the state, in worlds with states.
    State,
}

impl SealField {
    /// The fields that every seal has.
    pub(super) const ALL: [Self; 6] = [
        Self::Handoff,
        Self::BlocksCount,
        Self::Digest,
        Self::Content,
        Self::Token,
        Self::TokensCount,
    ];
}

/// The cost of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransitionCost {
    Free,
    /// One surprise: a departure from the usual order, in worlds that count them.
    Reorder,
    Fault,
}

impl SmallWorldState {
    /// All possible transitions, the usual one first.
    pub(super) fn moves(&self, small: &SmallWorld) -> Vec<(Transition, TransitionCost)> {
        let mut moves = self.usual(small);
        for (_, cost) in moves.iter_mut().skip(1) {
            *cost = match small.order {
                DeliveryOrder::Any => TransitionCost::Free,
                DeliveryOrder::Usual => TransitionCost::Reorder,
            };
        }
        if moves.is_empty() {
            let tick = self
                .next_deadline()
                .map(|_| (Transition::TimePasses, TransitionCost::Free));
            moves.extend(tick);
            // With nothing in flight a fault could only disturb timers, so none is added.
        } else if small.faults.contains(&SmallWorldFault::TimePassesEarly)
            && self.next_deadline().is_some()
        {
            moves.push((Transition::TimePassesEarly, TransitionCost::Fault));
        }
        if self.surprises_left == 0 {
            moves.retain(|(_, cost)| *cost == TransitionCost::Free);
        } else if self.submitted > 0 && !moves.is_empty() {
            self.faults(small, &mut moves);
        }
        moves
    }

    /// Everything in flight, in the usual order.
    fn usual(&self, small: &SmallWorld) -> Vec<(Transition, TransitionCost)> {
        let mut moves = Vec::new();
        let mut add = |transition| moves.push((transition, TransitionCost::Free));
        if self.submitted < small.requests.len() {
            add(Transition::Submit);
        }
        // The usual time of an operator's command is while a stream generates.
        let command_due = self.submitted > 0 && self.commanded < small.commands.len();
        let generating = self.clients.iter().any(|reader| reader.generates());
        if command_due && generating {
            add(Transition::Command);
        }
        for (index, _) in self.late_writes.iter().enumerate() {
            add(Transition::Late(index));
        }
        for notice in &self.notices {
            if self.may_notice(*notice) {
                add(Transition::Notice(*notice));
            }
        }
        for (index, _) in self.count_answers.iter().enumerate() {
            add(Transition::Counted(index));
        }
        for (worker, process) in self.workers.iter().enumerate() {
            if !process.to_worker.is_empty() && process.body.is_some() {
                add(Transition::ToWorker(worker));
            }
        }
        for (worker, process) in self.workers.iter().enumerate() {
            if !process.to_router.is_empty() {
                add(Transition::ToRouter(worker));
            }
        }
        for index in 0..self.packets.len() {
            if self.is_first_of_its_kind(index) {
                add(Transition::Packet(index));
            }
        }
        for (worker, process) in self.workers.iter().enumerate() {
            let Some(body) = &process.body else { continue };
            if !body.is_idle() {
                add(Transition::Engine(worker));
            } else if body.exiting && process.to_router.is_empty() && !self.sends(worker) {
                add(Transition::Exit(worker));
            }
        }
        if command_due && !generating {
            add(Transition::Command);
        }
        moves
    }

    pub(super) fn may_notice(&self, notice: PendingNotice) -> bool {
        match notice {
            // A fence is true only when no write of the dead peer is in flight.
            PendingNotice::PeerFenced { peer, .. } => {
                self.late_writes.iter().all(|late| late.from != peer)
            }
            PendingNotice::Reconnects(worker) => !self.notices.iter().any(|other| match other {
                PendingNotice::WorkerLost(worker_ref) | PendingNotice::RouterLost(worker_ref) => {
                    crate::run::worker_index(*worker_ref) == worker
                }
                _ => false,
            }),
            _ => true,
        }
    }

    fn sends(&self, worker: usize) -> bool {
        let from = |sent: &SortedPacket| crate::run::worker_index(sent.envelope.from);
        self.packets.iter().any(|sent| from(sent) == worker)
    }

    /// Equal packets are adjacent and interchangeable: one of them stands for all.
    fn is_first_of_its_kind(&self, index: usize) -> bool {
        index == 0 || self.packets[index] != self.packets[index - 1]
    }

    fn faults(&self, small: &SmallWorld, moves: &mut Vec<(Transition, TransitionCost)>) {
        let workers = self.workers.len();
        let may = |fault| small.faults.contains(&fault);
        let mut add = |transition| moves.push((transition, TransitionCost::Fault));
        for index in 0..self.packets.len() {
            if !self.is_first_of_its_kind(index) {
                continue;
            }
            let is_frame = matches!(self.packets[index].envelope.packet, Packet::Frame { .. });
            if may(SmallWorldFault::Lose) {
                add(Transition::Lose(index));
            }
            if may(SmallWorldFault::Duplicate) {
                add(Transition::Duplicate(index));
            }
            if may(SmallWorldFault::Damage) && is_frame {
                add(Transition::Damage(index));
            }
            if may(SmallWorldFault::Flip) {
                add(Transition::Flip(index));
            }
            let is_seal = matches!(self.packets[index].envelope.packet, Packet::Seal(_));
            if may(SmallWorldFault::ChangeSeal) && is_seal {
                let changes = SealField::ALL.map(|field| Transition::ChangeSeal(index, field));
                changes.into_iter().for_each(&mut add);
                if small.states.is_some() {
                    add(Transition::ChangeSeal(index, SealField::State));
                }
            }
            if may(SmallWorldFault::Misroute) {
                add(Transition::Misroute(index, PacketFault::Sender));
                if is_frame {
                    add(Transition::Misroute(index, PacketFault::Generation));
                    add(Transition::Misroute(index, PacketFault::Block));
                    if small.states.is_some() {
                        add(Transition::Misroute(index, PacketFault::Plane));
                    }
                }
            }
        }
        for (index, reader) in self.clients.iter().enumerate() {
            if may(SmallWorldFault::Cancel) && reader.submitted && reader.ending.is_none() {
                add(Transition::Cancel(index));
            }
        }
        for worker in 0..workers {
            let Some(body) = &self.workers[worker].body else {
                continue;
            };
            let process = &self.workers[worker];
            if may(SmallWorldFault::Flip) && !process.to_worker.is_empty() {
                add(Transition::FlipOrder(worker));
            }
            if may(SmallWorldFault::Flip) && !process.to_router.is_empty() {
                add(Transition::FlipReport(worker));
            }
            if may(SmallWorldFault::Crash) {
                add(Transition::Crash(worker));
            }
            if may(SmallWorldFault::Expire) && body.brain.deadline().is_some() {
                add(Transition::Expire(worker));
            }
            if may(SmallWorldFault::Disconnect)
                && self.workers[worker].connected == Some(body.worker)
            {
                add(Transition::Disconnect(worker));
            }
            if may(SmallWorldFault::EngineFault) && !body.is_idle() {
                add(Transition::EngineFault(worker));
            }
            for other in worker + 1..workers {
                if may(SmallWorldFault::Cut) && self.talk(worker, other) {
                    add(Transition::Cut(worker, other));
                }
            }
        }
        if may(SmallWorldFault::Expire) && self.router.brain.deadline().is_some() {
            add(Transition::Expire(workers));
        }
    }

    /// Whether two workers share work or packets; otherwise a cut has no effect.
    fn talk(&self, a: usize, b: usize) -> bool {
        let busy = |worker: usize| {
            let body = self.workers[worker].body.as_ref();
            body.is_some_and(|body| !body.brain.idle())
        };
        let between = |sent: &SortedPacket| {
            let SmallWorldPacket { from, to, .. } = &sent.envelope;
            let (from, to) = (
                crate::run::worker_index(*from),
                crate::run::worker_index(*to),
            );
            (from, to) == (a, b) || (from, to) == (b, a)
        };
        (busy(a) && busy(b)) || self.packets.iter().any(|sent| between(sent))
    }
}
