//! Protocol guards, and worlds without one of them.
//!
//! Owns: for each guard the change at a brain's boundary that disables it: an input that never
//! reaches the brain, or reaches it altered, so that the brain finds nothing to refuse. Never: a
//! switch in a brain. Invariant: with no guard missing, nothing is changed.

use super::state::{SmallWorldMessage, SmallWorldPacket, SmallWorldState};
use super::workers::other_plane;
use super::worlds::SmallWorld;
use cleave_domain::{AbandonCause, BlockIndex, BlockRef, Generation, Order, Report, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{PayloadCondition, WorkerInput, WorkerOutput};
use std::fmt;

/// A rule that keeps the protocol safe; the module `explore` names the properties that break
/// without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A frame for another generation of its block is refused.
    Generation,
    /// A frame for another block than was reserved is refused.
    Place,
    /// A frame for another plane than its block or slot is of is refused.
    Plane,
    /// A packet from anybody but the hand-off's own peer is refused.
    Sender,
    /// A one-sided writer's blocks stay in quarantine until it has stopped.
    Quarantine,
    /// A message of a worker's earlier life is not taken for its present one's.
    Incarnation,
    /// The router renews the leases of its hand-offs.
    Renewal,
    /// The decode leg is reserved before the prefill leg starts.
    SecondLeg,
    /// A frame or seal of an unknown hand-off is answered.
    UnknownAnswered,
    /// Hand-offs of a lost router end.
    RouterLost,
    /// Hand-offs over a lost link end.
    LinkLost,
    /// The router cancels the sender once the receiver has landed.
    LandedCancels,
    /// A fenced attempt delivers nothing more to its client.
    Fence,
    /// After the seal's link broke, the old attempt does not continue.
    RunOn,
}

impl Guard {
    pub const ALL: [Self; 14] = [
        Self::Generation,
        Self::Place,
        Self::Plane,
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

impl SmallWorldState {
    /// Filters an order before a worker handles it; `None` if it never arrives.
    pub(super) fn filter_order(
        &mut self,
        small: &SmallWorld,
        worker: usize,
        order: Order,
    ) -> Option<Order> {
        match (small.missing_guard, &order) {
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
                    state: None,
                    window: None,
                };
                self.send_to_router(worker, SmallWorldMessage::Report(report));
                None
            }
            _ => Some(order),
        }
    }

    /// Filters or alters a packet before a worker handles it.
    pub(super) fn filter_packet(
        &self,
        small: &SmallWorld,
        envelope: &mut SmallWorldPacket,
    ) -> MessageFate {
        let Some(body) = self.body(envelope.to) else {
            return MessageFate::Delivered;
        };
        let handoff = envelope.packet.handoff();
        match small.missing_guard {
            Some(Guard::Sender) => {
                if let Some(sender) = body.sender_of(handoff) {
                    envelope.from = sender;
                }
            }
            Some(Guard::Generation) => {
                if let Packet::Frame { block, part, .. } = &mut envelope.packet
                    && let Some((holder, generation)) = body.reserved_for(part.plane, block.block)
                    && holder == handoff
                {
                    block.generation = generation;
                }
            }
            Some(Guard::Place) => {
                if let Packet::Frame { block, part, .. } = &mut envelope.packet
                    && let Some(right) = body.reserved_at(handoff, part.unit())
                {
                    *block = right;
                }
            }
            Some(Guard::Plane) => {
                if let Packet::Frame { block, part, .. } = &mut envelope.packet {
                    let is_for = |plane| {
                        body.reserved_for(plane, block.block) == Some((handoff, block.generation))
                    };
                    let other = other_plane(part.plane);
                    if !is_for(part.plane) && is_for(other) {
                        part.plane = other;
                    }
                }
            }
            Some(Guard::UnknownAnswered) => {
                let is_known = body.brain.handoffs().any(|held| held == handoff);
                let asks = matches!(envelope.packet, Packet::Frame { .. } | Packet::Seal(_));
                if asks && !is_known {
                    return MessageFate::Lost;
                }
            }
            _ => {}
        }
        MessageFate::Delivered
    }

    /// Filters another input of a worker; `None` if it never arrives.
    pub(super) fn filter_input(
        &self,
        small: &SmallWorld,
        worker: usize,
        input: WorkerInput,
    ) -> Option<WorkerInput> {
        match (small.missing_guard, &input) {
            (Some(Guard::RouterLost), WorkerInput::RouterLost { .. })
            | (Some(Guard::LinkLost), WorkerInput::LinkLost { .. }) => None,
            (Some(Guard::Incarnation), WorkerInput::Fenced { peer }) => {
                let peer = self.present_life(*peer);
                Some(WorkerInput::Fenced { peer })
            }
            (Some(Guard::RunOn), WorkerInput::LinkLost { peer }) => {
                let body = self.workers[worker].body.as_ref()?;
                // A migration's new attempt has no hand-off of its own at its source.
                let moves = |handoff| !body.brain.handoffs().any(|held| held == handoff);
                let mut sealed = body.sealed.iter();
                let sealed = sealed.find(|(handoff, to)| *to == peer && moves(**handoff));
                let Some((handoff, _)) = sealed else {
                    return Some(input);
                };
                let packet = Packet::Abandoned {
                    handoff: *handoff,
                    cause: AbandonCause::Cancelled,
                };
                Some(WorkerInput::Arrived {
                    from: *peer,
                    packet,
                    condition: PayloadCondition::Intact,
                })
            }
            _ => Some(input),
        }
    }

    /// A forged answer to a worker's output, if that disables the missing guard.
    pub(super) fn forged_answer(
        &self,
        small: &SmallWorld,
        output: &WorkerOutput,
    ) -> Option<WorkerInput> {
        match (small.missing_guard, output) {
            (Some(Guard::Quarantine), WorkerOutput::Send { to, packet }) => {
                let Packet::Stop { handoff } = packet else {
                    return None;
                };
                Some(WorkerInput::Arrived {
                    from: *to,
                    packet: Packet::Stopped { handoff: *handoff },
                    condition: PayloadCondition::Intact,
                })
            }
            _ => None,
        }
    }

    /// Filters an input of the router.
    pub(super) fn filter_router_input(
        &self,
        small: &SmallWorld,
        input: cleave_router::RouterInput,
    ) -> cleave_router::RouterInput {
        match (small.missing_guard, input) {
            (Some(Guard::Incarnation), cleave_router::RouterInput::WorkerLost { worker }) => {
                let worker = self.present_life(worker);
                cleave_router::RouterInput::WorkerLost { worker }
            }
            (_, input) => input,
        }
    }

    /// Whether the router's order after this report is sent.
    pub(super) fn filter_sent_order(
        small: &SmallWorld,
        after: Option<&Report>,
        order: &Order,
    ) -> MessageFate {
        let cancels = matches!(
            (after, order),
            (Some(Report::Landed { .. }), Order::Cancel { .. })
        );
        match small.missing_guard {
            Some(Guard::LandedCancels) if cancels => MessageFate::Lost,
            _ => MessageFate::Delivered,
        }
    }

    fn present_life(&self, of: WorkerRef) -> WorkerRef {
        let body = self.workers[crate::run::worker_index(of)].body.as_ref();
        body.map_or(of, |body| body.worker)
    }
}

/// Whether a message reaches its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageFate {
    Delivered,
    Lost,
}
