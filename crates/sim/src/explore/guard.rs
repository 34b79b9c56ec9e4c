//! The guards, and worlds without one of them.
//!
//! Owns: for each guard the lie at a brain's boundary that takes it away: a fact that never reaches
//! the brain, or reaches it changed, so that the brain finds nothing to refuse. Never: a switch in a
//! brain. Invariant: with no guard missing, nothing is changed.

use super::small::Small;
use super::state::{Parcel, State, Word};
use cleave_domain::{BlockIndex, BlockRef, Cause, Generation, Order, Report, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{Condition, Input, Output};
use std::fmt;

/// What keeps the protocol from going wrong; see `explore` for which properties break without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A frame for another generation of its block is refused.
    Generation,
    /// A frame for another block than was reserved is refused.
    Place,
    /// A packet from anybody but the hand-off's own peer is refused.
    Sender,
    /// A one-sided writer's blocks are kept until it has stopped.
    Quarantine,
    /// A word of a worker's earlier life is not taken for its present one's.
    Incarnation,
    /// The router renews what it wants.
    Renewal,
    /// The decode leg is reserved before the prefill leg starts.
    SecondLeg,
    /// A frame or seal of an unknown hand-off is answered.
    UnknownAnswered,
    /// What a lost router wanted ends.
    RouterLost,
    /// What was under way on a lost link is given up.
    LinkLost,
    /// The router cancels the sender once the receiver has landed.
    LandedCancels,
    /// A fenced attempt gives its client nothing more.
    Fence,
    /// After the seal's link broke the old attempt does not run on.
    RunOn,
}

impl Guard {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Generation,
        Self::Place,
        Self::Sender,
        Self::Quarantine,
        Self::Incarnation,
        Self::Renewal,
        Self::SecondLeg,
        Self::UnknownAnswered,
        Self::RouterLost,
        Self::LinkLost,
        Self::LandedCancels,
        Self::Fence,
        Self::RunOn,
    ];
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl State {
    /// An order on its way into a worker; `None` if it never gets there.
    pub(super) fn order_heard(
        &mut self,
        small: &Small,
        worker: usize,
        order: Order,
    ) -> Option<Order> {
        match (small.without, &order) {
            (Some(Guard::Renewal), Order::Renew { .. }) => None,
            (Some(Guard::SecondLeg), Order::Reserve(reserve)) => {
                let tokens = reserve.request.prompt.len() + reserve.request.generated.len();
                let block = |index| BlockRef {
                    block: BlockIndex(index),
                    generation: Generation(0),
                };
                let report = Report::Reserved {
                    handoff: reserve.handoff,
                    present: 0,
                    blocks: (0..tokens.div_ceil(2) as u32).map(block).collect(),
                };
                self.say_to_router(worker, Word::Report(report));
                None
            }
            _ => Some(order),
        }
    }

    /// A packet on its way into a worker.
    pub(super) fn packet_heard(&self, small: &Small, parcel: &mut Parcel) -> Heard {
        let Some(body) = self.body(parcel.to) else {
            return Heard::Yes;
        };
        let handoff = parcel.packet.handoff();
        match small.without {
            Some(Guard::Sender) => {
                if let Some(sender) = body.sender_of(handoff) {
                    parcel.from = sender;
                }
            }
            Some(Guard::Generation) => {
                if let Packet::Frame { block, .. } = &mut parcel.packet
                    && let Some((holder, generation)) = body.reserved_for(block.block)
                    && holder == handoff
                {
                    block.generation = generation;
                }
            }
            Some(Guard::Place) => {
                if let Packet::Frame { block, part, .. } = &mut parcel.packet
                    && let Some(right) = body.reserved_at(handoff, part.ordinal)
                {
                    *block = right;
                }
            }
            Some(Guard::UnknownAnswered) => {
                let known = body.brain.handoffs().any(|known| known == handoff);
                let asks = matches!(parcel.packet, Packet::Frame { .. } | Packet::Seal(_));
                if asks && !known {
                    return Heard::No;
                }
            }
            _ => {}
        }
        Heard::Yes
    }

    /// Another fact on its way into a worker; `None` if it never gets there.
    pub(super) fn fact_heard(&self, small: &Small, worker: usize, input: Input) -> Option<Input> {
        match (small.without, &input) {
            (Some(Guard::RouterLost), Input::RouterLost { .. })
            | (Some(Guard::LinkLost), Input::LinkLost { .. }) => None,
            (Some(Guard::Incarnation), Input::Severed { peer }) => {
                let peer = self.present_life(*peer);
                Some(Input::Severed { peer })
            }
            (Some(Guard::RunOn), Input::LinkLost { peer }) => {
                let body = self.seats[worker].body.as_ref()?;
                // A move's new attempt is no hand-off of its own at its source.
                let moves = |handoff| !body.brain.handoffs().any(|known| known == handoff);
                let mut sealed = body.sealed.iter();
                let sealed = sealed.find(|(handoff, to)| *to == peer && moves(**handoff));
                let Some((handoff, _)) = sealed else {
                    return Some(input);
                };
                let packet = Packet::Abandoned {
                    handoff: *handoff,
                    cause: Cause::Cancelled,
                };
                Some(Input::Arrived {
                    from: *peer,
                    packet,
                    condition: Condition::Intact,
                })
            }
            _ => Some(input),
        }
    }

    /// What a worker has just said, answered by a lie if that takes a guard away.
    pub(super) fn said(&self, small: &Small, output: &Output) -> Option<Input> {
        match (small.without, output) {
            (Some(Guard::Quarantine), Output::Send { to, packet }) => {
                let Packet::Stop { handoff } = packet else {
                    return None;
                };
                Some(Input::Arrived {
                    from: *to,
                    packet: Packet::Stopped { handoff: *handoff },
                    condition: Condition::Intact,
                })
            }
            _ => None,
        }
    }

    /// A fact on its way into the router.
    pub(super) fn router_heard(
        &self,
        small: &Small,
        input: cleave_router::Input,
    ) -> cleave_router::Input {
        match (small.without, input) {
            (Some(Guard::Incarnation), cleave_router::Input::WorkerLost { worker }) => {
                let worker = self.present_life(worker);
                cleave_router::Input::WorkerLost { worker }
            }
            (_, input) => input,
        }
    }

    /// Whether what the router says after this fact reaches the worker.
    pub(super) fn order_leaves(small: &Small, after: Option<&Report>, order: &Order) -> Heard {
        let cancels = matches!(
            (after, order),
            (Some(Report::Landed { .. }), Order::Cancel { .. })
        );
        match small.without {
            Some(Guard::LandedCancels) if cancels => Heard::No,
            _ => Heard::Yes,
        }
    }

    fn present_life(&self, of: WorkerRef) -> WorkerRef {
        let body = self.seats[crate::run::index(of)].body.as_ref();
        body.map_or(of, |body| body.me)
    }
}

/// Whether something reaches whom it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Yes,
    No,
}
