//! A running sequence that moves to another decode worker.
//!
//! Owns: the effects of `Order::Migrate`: full blocks leave while the sequence runs, then it is
//! paused, and it either lands there or goes on here. Never: lets two workers run one sequence:
//! once the seal is sent, only the receiver's answer takes it back. Invariant: each `MigrateOrder`
//! is answered by `Stayed`, or by `Prefilled` of the new attempt, which the receiver's landing,
//! `Stayed` or the old attempt's own end follows. The old attempt is a sequence of this worker, the
//! new one is only the name under which its KV leaves: it has no lease and no release here.

use super::{CloseReason, EndedHandoff, Handoffs, ReadyBlocks};
use crate::sequences::{SequenceStage, WorkerSequence};
use crate::{WorkerNote, WorkerOutput};
use cleave_domain::{
    AbandonCause, Failure, HandoffId, MigrateOrder, PrefillTiming, Report, RouterId, Time,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender::{self, HandoffSender};

/// State of one move, keyed by its new attempt. It is kept until no block is being read for it,
/// which may be after the move was aborted.
#[derive(Clone, Debug)]
pub(super) struct OutboundMigration {
    pub(super) order: MigrateOrder,
    pub(super) sender: HandoffSender,
    /// Leading blocks that were given to the sender.
    pub(super) exported: u32,
    pub(super) ordered: Time,
    /// Since when the sequence is paused.
    pub(super) paused_since: Option<Time>,
}

/// Whether the receiver may run the sequence after the sending machine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceiverDoubt {
    /// The receiver does not have the sequence, and never will.
    NotThere,
    /// The receiver may have it.
    MayRunThere,
}

impl OutboundMigration {
    /// Blocks of the sequence that fit at the receiver.
    fn blocks_max(&self) -> u32 {
        blocks_max(&self.order)
    }
}

fn blocks_max(order: &MigrateOrder) -> u32 {
    let blocks = u32::try_from(order.target.blocks.len()).unwrap_or(u32::MAX);
    order.target.present.saturating_add(blocks)
}

impl Handoffs<'_> {
    // === the order ===

    pub(crate) fn migrate(&mut self, router: RouterId, order: MigrateOrder) {
        let handoff = order.handoff;
        let existing = self.peers.outbound(handoff);
        let repeated = existing.is_some_and(|existing| existing.order == order)
            || self.peers.ended(handoff) == Some(EndedHandoff::Ended);
        let own = handoff.flight.router() == router;
        if own && repeated {
            return self.context.note(WorkerNote::Repeated { handoff });
        }
        if self.may_move(router, &order) {
            return self.start_move(order);
        }
        if own && existing.is_none() {
            self.peers.remember(handoff, EndedHandoff::Ended);
        }
        self.report_move_aborted(router, handoff, Failure::Rejected);
    }

    /// Whether the sequence can move as the order says.
    fn may_move(&self, router: RouterId, order: &MigrateOrder) -> bool {
        let MigrateOrder {
            handoff,
            of,
            ref target,
            tokens,
        } = *order;
        let size = self.context.block_tokens();
        let is_taken = self.peers.outbound(handoff).is_some() || self.sequences.contains(handoff);
        let sequence = self.sequences.get(of).filter(|s| s.router == router);
        sequence.is_some_and(|sequence| {
            // A token that is drawn but not run needs no block there.
            let needed = tokens.max(sequence.len() - 1).div_ceil(size);
            !is_taken
                && self.peers.ended(handoff).is_none()
                && target.worker.worker != self.context.limits().me.worker
                && target.state.is_some() == sequence.kv.state().is_some()
                && self.context.limits().fits_window(target, tokens)
                && sequence.decodes_next()
                && sequence.moving.is_none()
                && (sequence.prompt_count()..=sequence.len()).contains(&tokens)
                && u64::from(target.present) * u64::from(size) <= u64::from(tokens)
                && needed <= blocks_max(order)
        })
    }

    fn start_move(&mut self, order: MigrateOrder) {
        let (handoff, of) = (order.handoff, order.of);
        if let Some(sequence) = self.sequences.get_mut(of) {
            sequence.moving = Some(handoff);
        }
        let sender = HandoffSender::new(
            handoff,
            order.target.clone(),
            &self.context.limits().capacity,
        );
        let started = OutboundMigration {
            order,
            sender,
            exported: 0,
            ordered: self.context.now(),
            paused_since: None,
        };
        self.peers.begin_move(started);
        self.advance_move(of);
    }

    // === leaving ===

    /// Sends the blocks of a moving sequence that will not change any more, and pauses it when it
    /// is time.
    pub(crate) fn advance_move(&mut self, of: HandoffId) {
        self.export_move(of, ReadyBlocks::FullBlocks);
        if self.may_pause(of) {
            self.pause(of);
        }
    }

    /// Whether to pause now: all full blocks have left, or the next token would need a block that
    /// the receiver did not reserve; and there is a token for the seal.
    fn may_pause(&self, of: HandoffId) -> bool {
        let size = self.context.block_tokens();
        self.sequence_that_moves(of)
            .is_some_and(|(sequence, outbound)| {
                let full = sequence.kv.computed() / size;
                let left = outbound.exported >= full && outbound.sender.is_settled();
                let is_full = sequence.len().div_ceil(size) > outbound.blocks_max();
                sequence.len() > outbound.order.tokens && (left || is_full)
            })
    }

    /// A sequence that moves and could be paused now.
    fn sequence_that_moves(&self, of: HandoffId) -> Option<(&WorkerSequence, &OutboundMigration)> {
        let sequence = self.sequences.get(of)?;
        let outbound = self.peers.outbound(sequence.moving?)?;
        let stands = sequence.decodes_next() && !sequence.stepping();
        (stands && sequence.has_current_state()).then_some((sequence, outbound))
    }

    /// Pauses a moving sequence that would have to take another's block: it leaves anyway.
    pub(crate) fn pause_early(&mut self, of: HandoffId) -> bool {
        let able = self.sequence_that_moves(of);
        let able = able.is_some_and(|(s, outbound)| s.len() > outbound.order.tokens);
        if able {
            self.pause(of);
        }
        able
    }

    fn pause(&mut self, of: HandoffId) {
        let now = self.context.now();
        let Some(sequence) = self.sequences.get_mut(of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(outbound) = self.peers.outbound_mut(handoff) else {
            return;
        };
        outbound.paused_since = Some(now);
        let (received, drawn) = sequence.tokens.split_at(outbound.order.tokens as usize);
        let content = block_hash(sequence.request.cache_scope(), None, received);
        let output = drawn.to_vec();
        let router = sequence.router;
        self.sequences.pause(of);
        self.context.changed();
        self.context.report(
            router,
            Report::Prefilled {
                handoff,
                timing: PrefillTiming::default(),
            },
        );
        self.export_move(of, ReadyBlocks::All);
        self.export_state(handoff, of);
        self.send(handoff, sender::SenderInput::Sampled { content, output });
    }

    // === how it ends ===

    /// Feeds the sending end of a move; the caller then calls [`Handoffs::forget_move`].
    pub(super) fn send_move(&mut self, handoff: HandoffId, input: sender::SenderInput) {
        let Some(outbound) = self.peers.outbound_mut(handoff) else {
            return;
        };
        // A receiver that does not know the seal may have forgotten that the sequence landed.
        let unknown = matches!(
            &input,
            sender::SenderInput::LinkLost
                | sender::SenderInput::Abandoned {
                    cause: AbandonCause::Finished,
                    ..
                }
        );
        let doubt = if outbound.sender.is_sealed() && unknown {
            ReceiverDoubt::MayRunThere
        } else {
            ReceiverDoubt::NotThere
        };
        let since = outbound.ordered;
        outbound.sender.handle(input);
        let ended = self.peers.emit_sender_outputs(
            self.context,
            self.sequences,
            self.forecast,
            handoff,
            since,
        );
        match ended {
            Some(sender::SenderOutput::Done) => self.moved(handoff),
            Some(sender::SenderOutput::Ended(cause)) => self.ended_move(handoff, doubt, cause),
            _ => {}
        }
        self.watch(handoff);
    }

    fn moved(&mut self, handoff: HandoffId) {
        let Some(outbound) = self.peers.outbound(handoff) else {
            return;
        };
        let of = outbound.order.of;
        let took = self.context.now().since(outbound.ordered);
        let paused_for = self
            .context
            .now()
            .since(outbound.paused_since.unwrap_or(self.context.now()));
        let (bytes, blocks) = (outbound.sender.bytes(), outbound.sender.blocks_count());
        if let Some(sequence) = self.sequences.get_mut(of) {
            sequence.moving = None;
        }
        self.context.emit(WorkerOutput::Forget { handoff });
        self.context.note(WorkerNote::MigratedOut {
            handoff,
            bytes,
            blocks,
            took,
            still: paused_for,
        });
        self.close(of, CloseReason::HandedOff);
    }

    /// Resumes the sequence here, unless the receiver may run it.
    fn ended_move(&mut self, handoff: HandoffId, doubt: ReceiverDoubt, cause: AbandonCause) {
        let Some(of) = self
            .peers
            .outbound(handoff)
            .map(|outbound| outbound.order.of)
        else {
            return;
        };
        let Some(sequence) = self.sequences.get_mut(of) else {
            return;
        };
        if sequence.moving != Some(handoff) {
            return;
        }
        sequence.moving = None;
        if doubt == ReceiverDoubt::MayRunThere {
            self.context.emit(WorkerOutput::Forget { handoff });
            return self.close(of, CloseReason::Failed(Failure::LinkLost));
        }
        let router = sequence.router;
        if sequence.stage() == SequenceStage::Paused {
            self.sequences.activate(of);
        }
        self.context.changed();
        let failure = match cause {
            AbandonCause::Failed(failure) => failure,
            AbandonCause::Finished | AbandonCause::Cancelled => Failure::Rejected,
        };
        self.context.emit(WorkerOutput::Forget { handoff });
        self.report_move_aborted(router, handoff, failure);
    }

    /// Aborts a move, if there is one and its seal is not sent.
    pub(crate) fn abort_move(&mut self, of: HandoffId, failure: Failure) {
        let moving = self.sequences.get(of).and_then(|s| s.moving);
        if let Some(handoff) = moving.filter(|handoff| !self.is_sealed(*handoff)) {
            let cause = AbandonCause::Failed(failure);
            self.send(handoff, sender::SenderInput::GiveUp { cause });
        }
    }

    /// Handles a router's cancel of a move. Once the seal is sent, only the receiver can decline.
    pub(super) fn cancel_move(&mut self, router: RouterId, handoff: HandoffId) {
        let of = self
            .peers
            .outbound(handoff)
            .map(|outbound| outbound.order.of);
        let own = |of: &HandoffId| {
            let sequence = self.sequences.get(*of);
            sequence.is_some_and(|s| s.router == router && s.moving == Some(handoff))
        };
        if let Some(of) = of.filter(own) {
            self.abort_move(of, Failure::Rejected);
        }
    }

    /// Ends the move of a sequence that is over here. A sealed move may have landed, so it is not
    /// reported as aborted.
    pub(super) fn close_move(&mut self, of: HandoffId, cause: AbandonCause) {
        let Some(sequence) = self.sequences.get_mut(of) else {
            return;
        };
        let Some(handoff) = sequence.moving.take() else {
            return;
        };
        let router = sequence.router;
        let sealed = self.is_sealed(handoff);
        self.peers.forget(handoff);
        self.send_move(handoff, sender::SenderInput::GiveUp { cause });
        self.context.emit(WorkerOutput::Forget { handoff });
        if !sealed {
            self.report_move_aborted(router, handoff, Failure::Rejected);
        }
        self.forget_move(handoff);
    }

    fn report_move_aborted(&mut self, router: RouterId, handoff: HandoffId, failure: Failure) {
        let noted_failure = failure.clone();
        self.context
            .report(router, Report::MigrationAborted { handoff, failure });
        self.context.note(WorkerNote::MigrationAborted {
            handoff,
            failure: noted_failure,
        });
    }

    /// Drops the state of a move that is over, once no block is being read for it.
    pub(super) fn forget_move(&mut self, handoff: HandoffId) {
        if let Some(of) = self.peers.end_move(handoff) {
            self.context.changed();
            self.release_if_settled(of);
        }
    }

    fn is_sealed(&self, handoff: HandoffId) -> bool {
        let outbound = self.peers.outbound(handoff);
        outbound.is_some_and(|outbound| outbound.sender.is_sealed())
    }
}
