//! A running sequence that moves to another decode worker.
//!
//! Owns: the effects of `Order::Migrate`: full blocks leave while the sequence runs, then it is
//! paused, and it either lands there or goes on here. Never: lets two workers run one sequence:
//! once the seal is sent, only the receiver's answer takes it back. Invariant: each `MigrateOrder`
//! is answered by `Stayed`, or by `Prefilled` of the new attempt, which the receiver's landing,
//! `Stayed` or the old attempt's own end follows. The old attempt is a sequence of this worker, the
//! new one is only the name under which its KV leaves: it has no lease and no release here.

use crate::batch::ReadyBlocks;
use crate::handoff::CloseReason;
use crate::handoff::EndedHandoff;
use crate::sequences::{SequenceStage, WorkerSequence};
use crate::{WorkerBrain, WorkerNote, WorkerOutput};
use cleave_domain::{
    AbandonCause, Failure, HandoffId, KvUnit, MigrateOrder, PrefillTiming, Report, RouterId, Time,
    WorkerRef,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender::{self, HandoffSender};

/// State of one move, keyed by its new attempt. It is kept until no block is being read for it,
/// which may be after the move was aborted.
#[derive(Clone, Debug)]
pub(crate) struct OutboundMigration {
    pub(crate) order: MigrateOrder,
    pub(crate) sender: HandoffSender,
    /// Leading blocks that were given to the sender.
    pub(crate) exported: u32,
    pub(crate) ordered: Time,
    /// Since when the sequence is paused.
    pub(crate) paused_since: Option<Time>,
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

impl WorkerBrain {
    // === the order ===

    pub(crate) fn migrate(&mut self, router: RouterId, order: MigrateOrder) {
        let handoff = order.handoff;
        let existing = self.moves.get(&handoff);
        let repeated = existing.is_some_and(|existing| existing.order == order)
            || self.recently_ended.trace(handoff) == Some(EndedHandoff::Ended);
        let own = handoff.flight.router() == router;
        if own && repeated {
            return self.context.note(WorkerNote::Repeated { handoff });
        }
        if self.may_move(router, &order) {
            return self.start_move(order);
        }
        if own && existing.is_none() {
            self.recently_ended.add(handoff, EndedHandoff::Ended);
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
        let is_taken = self.moves.contains_key(&handoff) || self.sequences.contains_key(&handoff);
        let sequence = self.sequences.get(&of).filter(|s| s.router == router);
        sequence.is_some_and(|sequence| {
            // A token that is drawn but not run needs no block there.
            let needed = tokens.max(sequence.len() - 1).div_ceil(size);
            !is_taken
                && self.recently_ended.trace(handoff).is_none()
                && target.worker.worker != self.context.limits().me.worker
                && target.state.is_some() == sequence.state.is_some()
                && sequence.decodes_next()
                && sequence.moving.is_none()
                && (sequence.prompt_count()..=sequence.len()).contains(&tokens)
                && u64::from(target.present) * u64::from(size) <= u64::from(tokens)
                && needed <= blocks_max(order)
        })
    }

    fn start_move(&mut self, order: MigrateOrder) {
        let (handoff, of) = (order.handoff, order.of);
        if let Some(sequence) = self.sequences.get_mut(&of) {
            sequence.moving = Some(handoff);
        }
        let sender = HandoffSender::new(
            handoff,
            order.target.clone(),
            self.context.limits().capacity.state_pieces(),
        );
        let started = OutboundMigration {
            order,
            sender,
            exported: 0,
            ordered: self.context.now(),
            paused_since: None,
        };
        self.moves.insert(handoff, started);
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

    fn export_move(&mut self, of: HandoffId, ready: ReadyBlocks) {
        let size = self.context.block_tokens();
        let Some(sequence) = self.sequences.get(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(outbound) = self.moves.get_mut(&handoff) else {
            return;
        };
        // A paused sequence has sent its last block too.
        let done = ready.blocks(sequence.computed, size).max(outbound.exported);
        let new = outbound.exported..done;
        outbound.exported = done;
        let table = &sequence.table[new.start as usize..new.end as usize];
        let blocks: Vec<_> = new.zip(table.iter().map(|block| block.block)).collect();
        for (ordinal, from) in blocks {
            let unit = KvUnit::block(ordinal);
            self.send(handoff, sender::SenderInput::Computed { unit, from });
        }
    }

    /// Whether to pause now: all full blocks have left, or the next token would need a block that
    /// the receiver did not reserve; and there is a token for the seal.
    fn may_pause(&self, of: HandoffId) -> bool {
        let size = self.context.block_tokens();
        self.sequence_that_moves(of)
            .is_some_and(|(sequence, outbound)| {
                let full = sequence.computed / size;
                let left = outbound.exported >= full && outbound.sender.is_settled();
                let is_full = sequence.len().div_ceil(size) > outbound.blocks_max();
                sequence.len() > outbound.order.tokens && (left || is_full)
            })
    }

    /// A sequence that moves and could be paused now.
    fn sequence_that_moves(&self, of: HandoffId) -> Option<(&WorkerSequence, &OutboundMigration)> {
        let sequence = self.sequences.get(&of)?;
        let outbound = self.moves.get(&sequence.moving?)?;
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
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(outbound) = self.moves.get_mut(&handoff) else {
            return;
        };
        outbound.paused_since = Some(now);
        let (received, drawn) = sequence.tokens.split_at(outbound.order.tokens as usize);
        let content = block_hash(sequence.request.cache_salt, None, received);
        let output = drawn.to_vec();
        let router = sequence.router;
        sequence.stage = SequenceStage::Paused;
        self.active.remove(&sequence.rank);
        sequence.free_slot(&mut self.slots_free);
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

    /// Feeds the sending end of a move; the caller then calls [`WorkerBrain::forget_move`].
    pub(crate) fn send_move(&mut self, handoff: HandoffId, input: sender::SenderInput) {
        let Some(outbound) = self.moves.get_mut(&handoff) else {
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
        let outcome = self.emit_sender_outputs(handoff, since);
        match outcome {
            Some(sender::SenderOutput::Done) => self.moved(handoff),
            Some(sender::SenderOutput::Ended(cause)) => self.ended_move(handoff, doubt, cause),
            _ => {}
        }
        self.watch(handoff);
    }

    fn moved(&mut self, handoff: HandoffId) {
        let Some(outbound) = self.moves.get(&handoff) else {
            return;
        };
        let of = outbound.order.of;
        let took = self.context.now().since(outbound.ordered);
        let paused_for = self
            .context
            .now()
            .since(outbound.paused_since.unwrap_or(self.context.now()));
        let (bytes, blocks) = (outbound.sender.bytes(), outbound.sender.blocks_count());
        if let Some(sequence) = self.sequences.get_mut(&of) {
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
        let Some(of) = self.moves.get(&handoff).map(|outbound| outbound.order.of) else {
            return;
        };
        let Some(sequence) = self.sequences.get_mut(&of) else {
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
        if sequence.stage == SequenceStage::Paused {
            sequence.stage = SequenceStage::Active;
            self.active.insert(sequence.rank);
        }
        let router = sequence.router;
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
        let moving = self.sequences.get(&of).and_then(|s| s.moving);
        let unsealed = |handoff: &HandoffId| !self.moves[handoff].sender.is_sealed();
        if let Some(handoff) = moving.filter(unsealed) {
            let cause = AbandonCause::Failed(failure);
            self.send(handoff, sender::SenderInput::GiveUp { cause });
        }
    }

    /// Handles a router's cancel of a move. Once the seal is sent, only the receiver can decline.
    pub(crate) fn cancel_move(&mut self, router: RouterId, handoff: HandoffId) {
        let of = self.moves.get(&handoff).map(|outbound| outbound.order.of);
        let own = |of: &HandoffId| {
            let sequence = self.sequences.get(of);
            sequence.is_some_and(|s| s.router == router && s.moving == Some(handoff))
        };
        if let Some(of) = of.filter(own) {
            self.abort_move(of, Failure::Rejected);
        }
    }

    /// Ends the move of a sequence that is over here. A sealed move may have landed, so it is not
    /// reported as aborted.
    pub(crate) fn close_move(&mut self, of: HandoffId, cause: AbandonCause) {
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving.take() else {
            return;
        };
        let router = sequence.router;
        let sealed = self.moves[&handoff].sender.is_sealed();
        self.stalls.remove(handoff);
        self.resends.end(handoff);
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
    pub(crate) fn forget_move(&mut self, handoff: HandoffId) {
        let Some(outbound) = self.moves.get(&handoff) else {
            return;
        };
        if outbound.sender.is_open() || !outbound.sender.is_settled() {
            return;
        }
        let of = outbound.order.of;
        self.moves.remove(&handoff);
        self.recently_ended.add(handoff, EndedHandoff::Ended);
        self.context.changed();
        self.release_if_settled(of);
    }

    // === looking ===

    /// Whether a block of the sequence is being read for a move, which may be over.
    pub(crate) fn read_for_a_move(&self, of: HandoffId) -> bool {
        let mut moves = self.moves.values();
        moves.any(|outbound| outbound.order.of == of && !outbound.sender.is_settled())
    }

    /// Whether the block that the sequence writes to next, or its state, is being read for a move
    /// that is over.
    pub(crate) fn last_block_is_read(&self, sequence: &WorkerSequence) -> bool {
        let unit = KvUnit::block(sequence.computed / self.context.block_tokens());
        let mut moves = self.moves.values();
        moves.any(|outbound| {
            let of_sequence = outbound.order.of == sequence.rank.handoff;
            of_sequence && (outbound.sender.is_reading(unit) || outbound.sender.is_reading_state())
        })
    }

    /// Open moves to `peer`.
    pub(crate) fn moves_to(&self, peer: WorkerRef) -> Vec<HandoffId> {
        let open = self.moves.iter().filter(|(_, outbound)| {
            outbound.sender.is_open() && outbound.sender.receiver() == peer
        });
        open.map(|(handoff, _)| *handoff).collect()
    }
}
