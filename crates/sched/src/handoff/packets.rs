//! Traffic with the worker at the other end of a hand-off.
//!
//! Owns: the way from packets and finished copies to the two hand-off machines, and from their
//! outputs to the brain's. Never: judges a frame itself. Packets that need an answer are repeated
//! until they have one, since a link may lose one and stand. Invariant: each frame that arrives is
//! answered at once by exactly one `Import` or `Discard`; a frame or seal of a hand-off
//! unknown here is answered by `Abandoned`, and `Abandoned` by nothing. `Abandoned` from a receiver
//! means that nothing has landed, nor will, unless its cause is `Finished`: then the receiver has
//! forgotten the hand-off.

use crate::handoff::CloseReason;
use crate::handoff::EndedHandoff;
use crate::handoff::OutboundMigration;
use crate::sequences::{SequencePhase, SequenceStage, WorkerSequence};
use crate::{
    BlockExport, ExportOutcome, ImportOutcome, PayloadCondition, WorkerBrain, WorkerNote,
    WorkerOutput,
};
use cleave_domain::{AbandonCause, Failure, HandoffId, KvUnit, Report, Time, TokenId, WorkerRef};
use cleave_kv::handoff::{receiver, sender};
use cleave_kv::{BlockPart, Packet};
use cleave_planner::Predict;
use std::time::Duration;

/// Shortest time to wait for the frames of a sealed hand-off: they left before the seal, and any
/// frame from the same worker shows that its link is slow and has lost nothing.
const FRAMES_WAIT_MIN: Duration = Duration::from_secs(2);
/// The same, as a multiple of one block's transfer time over the measured link.
const FRAMES_WAIT_BLOCKS: u32 = 4;

impl WorkerBrain {
    // === facts ===

    pub(crate) fn arrived(&mut self, from: WorkerRef, packet: Packet, condition: PayloadCondition) {
        let handoff = packet.handoff();
        match packet {
            Packet::Frame {
                block,
                part,
                checksum,
                ..
            } => {
                let input = receiver::ReceiverInput::Frame {
                    from,
                    block,
                    part,
                    checksum: (condition == PayloadCondition::Intact).then_some(checksum),
                };
                if !self.receive(handoff, input) {
                    self.discard(handoff, part);
                    if self.recently_ended.trace(handoff) != Some(EndedHandoff::Landed) {
                        self.answer_ended_handoff(handoff, from);
                    }
                }
                self.frames_arrived(from);
            }
            Packet::Seal(seal) => {
                if !self.receive(handoff, receiver::ReceiverInput::Seal { from, seal }) {
                    match self.recently_ended.trace(handoff) {
                        Some(_) => self.answer_ended_handoff(handoff, from),
                        None => self.abandon(handoff, from, AbandonCause::Finished),
                    }
                }
            }
            Packet::Stop { .. } => self.stop(handoff, from),
            Packet::Stopped { .. } => {
                self.receive(handoff, receiver::ReceiverInput::Stopped { from });
                self.release_if_settled(handoff);
            }
            Packet::Landed { .. } => {
                self.send(handoff, sender::SenderInput::Landed { from });
            }
            Packet::Abandoned { cause, .. } => {
                let sent = cause.clone();
                if !self.send(
                    handoff,
                    sender::SenderInput::Abandoned { from, cause: sent },
                ) {
                    self.receive(handoff, receiver::ReceiverInput::Abandoned { from, cause });
                }
            }
        }
    }

    pub(crate) fn link_lost(&mut self, peer: WorkerRef) {
        self.forecast.link_lost(peer.worker);
        let with_peer = self
            .sequences
            .iter()
            .filter(|(_, s)| s.peer() == Some(peer));
        let handoffs: Vec<_> = with_peer.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            if !self.send(handoff, sender::SenderInput::LinkLost) {
                self.receive(handoff, receiver::ReceiverInput::LinkLost);
            }
        }
        for handoff in self.moves_to(peer) {
            self.send(handoff, sender::SenderInput::LinkLost);
        }
    }

    /// Fences a peer: its packets under way will not come, and it can write to nothing any more.
    pub(crate) fn cut_off(&mut self, peer: WorkerRef) {
        self.link_lost(peer);
        self.fenced.add(peer);
        let from_peer = self.sequences.iter().filter(|(_, s)| {
            let receiver = s.incoming.as_ref();
            receiver.is_some_and(|receiver| receiver.sender() == peer && receiver.is_quarantined())
        });
        let handoffs: Vec<_> = from_peer.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            self.receive(handoff, receiver::ReceiverInput::Fenced);
            self.release_if_settled(handoff);
        }
    }

    /// Answers a receiver that waits until nothing more is written. A hand-off that never came here
    /// must not begin after this answer.
    fn stop(&mut self, handoff: HandoffId, from: WorkerRef) {
        let sends_there = self
            .sender(handoff)
            .is_some_and(|sender| sender.receiver() == from);
        if sends_there {
            self.send(handoff, sender::SenderInput::Stop { from });
            return self.release_if_settled(handoff);
        }
        if !self.sequences.contains_key(&handoff) && !self.moves.contains_key(&handoff) {
            self.recently_ended
                .add(handoff, EndedHandoff::StoppedBeforeStart);
        }
        let packet = Packet::Stopped { handoff };
        self.context.emit(WorkerOutput::Send { to: from, packet });
    }

    pub(crate) fn exported(&mut self, handoff: HandoffId, unit: KvUnit, outcome: ExportOutcome) {
        let outcome = match outcome {
            ExportOutcome::Sent { digest, bytes } => Ok((digest, bytes)),
            ExportOutcome::Dropped => Err(Failure::LinkLost),
            ExportOutcome::Broken => Err(Failure::Engine("a block could not be read".into())),
        };
        self.send(handoff, sender::SenderInput::Exported { unit, outcome });
        match self.moves.get(&handoff).map(|outbound| outbound.order.of) {
            // The export may have been the last full block.
            Some(of) => self.advance_move(of),
            None => {
                // A sequence whose state was lost may have waited for this read.
                let sequence = self.sequences.get(&handoff);
                let lacks_state = sequence.is_some_and(WorkerSequence::lacks_state);
                self.context.changed_if(lacks_state);
                self.release_if_settled(handoff);
            }
        }
    }

    pub(crate) fn imported(&mut self, handoff: HandoffId, part: BlockPart, outcome: ImportOutcome) {
        let outcome = match outcome {
            ImportOutcome::Written => Ok(()),
            ImportOutcome::Dropped | ImportOutcome::Damaged => Err(Failure::Corrupt),
            ImportOutcome::Broken => Err(Failure::Engine("a block could not be written".into())),
        };
        self.receive(handoff, receiver::ReceiverInput::Imported { part, outcome });
        self.release_if_settled(handoff);
    }

    // === the machines ===

    /// Feeds the receiving end of a hand-off; false if there is none here.
    pub(crate) fn receive(&mut self, handoff: HandoffId, input: receiver::ReceiverInput) -> bool {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return false;
        };
        let Some(receiver) = &mut sequence.incoming else {
            return false;
        };
        let from = receiver.sender();
        // A repeated seal brings nothing new, so it extends no deadline.
        let progress =
            !(receiver.is_sealed() && matches!(input, receiver::ReceiverInput::Seal { .. }));
        receiver.handle(input);
        if receiver.is_sealed() {
            sequence.times.sealed.get_or_insert(self.context.now());
        }
        let mut outputs = Vec::new();
        while let Some(output) = receiver.poll() {
            outputs.push(output);
        }
        for output in outputs {
            match output {
                receiver::ReceiverOutput::Import { part, block } => {
                    self.context.emit(WorkerOutput::Import {
                        handoff,
                        part,
                        block,
                    })
                }
                receiver::ReceiverOutput::Discard { part } => self.discard(handoff, part),
                receiver::ReceiverOutput::Send(packet) => {
                    self.context.emit(WorkerOutput::Send { to: from, packet })
                }
                receiver::ReceiverOutput::Landed { output } => self.landed(handoff, &output),
                receiver::ReceiverOutput::Ended(cause) => {
                    self.close(handoff, CloseReason::from_peer_cause(cause))
                }
            }
        }
        if progress {
            self.watch(handoff);
        }
        true
    }

    /// Feeds the sending end of a hand-off, of a prompt or of a moving sequence; false if there is
    /// none here.
    pub(crate) fn send(&mut self, handoff: HandoffId, input: sender::SenderInput) -> bool {
        if self.moves.contains_key(&handoff) {
            self.send_move(handoff, input);
            self.forget_move(handoff);
            return true;
        }
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return false;
        };
        let Some(sender) = &mut sequence.outgoing else {
            return false;
        };
        sender.handle(input);
        let since = sequence.times.sending.unwrap_or(self.context.now());
        match self.emit_sender_outputs(handoff, since) {
            Some(sender::SenderOutput::Done) => self.close(handoff, CloseReason::HandedOff),
            Some(sender::SenderOutput::Ended(cause)) => {
                self.close(handoff, CloseReason::from_peer_cause(cause))
            }
            _ => {}
        }
        self.watch(handoff);
        true
    }

    /// Emits the outputs of a hand-off's sending end; returns how it ended, if it did. `since` is
    /// the time at which it began.
    pub(crate) fn emit_sender_outputs(
        &mut self,
        handoff: HandoffId,
        since: Time,
    ) -> Option<sender::SenderOutput> {
        let now = self.context.now();
        let mut ended = None;
        while let Some(sender) = self.sender_mut(handoff)
            && let Some(output) = sender.poll()
        {
            let to = sender.receiver();
            let (bytes, blocks) = (sender.bytes(), sender.blocks_count());
            match output {
                sender::SenderOutput::Export { from, unit, block } => {
                    if let Some(sequence) = self.sequences.get_mut(&handoff) {
                        sequence.times.sending.get_or_insert(now);
                    }
                    self.context.emit(WorkerOutput::Export(BlockExport {
                        handoff,
                        to,
                        plane: unit.plane,
                        from,
                        ordinal: unit.ordinal,
                        block,
                    }));
                }
                sender::SenderOutput::Send(packet) => {
                    if matches!(packet, Packet::Seal(_)) {
                        self.measure_link(handoff);
                        self.context.note(WorkerNote::Sealed {
                            handoff,
                            bytes,
                            blocks,
                            took: now.since(since),
                        });
                    }
                    self.context.emit(WorkerOutput::Send { to, packet });
                }
                sender::SenderOutput::Done | sender::SenderOutput::Ended(_) => ended = Some(output),
            }
        }
        ended
    }

    fn sender(&self, handoff: HandoffId) -> Option<&sender::HandoffSender> {
        match self.moves.get(&handoff) {
            Some(outbound) => Some(&outbound.sender),
            None => self.sequences.get(&handoff)?.outgoing.as_ref(),
        }
    }

    fn sender_mut(&mut self, handoff: HandoffId) -> Option<&mut sender::HandoffSender> {
        match self.moves.get_mut(&handoff) {
            Some(outbound) => Some(&mut outbound.sender),
            None => self.sequences.get_mut(&handoff)?.outgoing.as_mut(),
        }
    }

    /// Lets the sequence decode here from where the other worker left it: all of its KV has
    /// arrived.
    fn landed(&mut self, handoff: HandoffId, output: &[TokenId]) {
        let now = self.context.now();
        let context = self.context.limits().capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.tokens.extend_from_slice(output);
        sequence.computed = sequence.len() - 1;
        sequence.phase = SequencePhase::Decode;
        sequence.stage = SequenceStage::Active;
        sequence.peer_state_open = false;
        let first = sequence.times.sealed.unwrap_or(now);
        sequence
            .client_timing
            .first_token(first, now, sequence.output_count());
        self.active.insert(sequence.rank);
        let (router, times) = (sequence.router, sequence.times);
        let present = sequence.published;
        let bytes = sequence.incoming.as_ref().map_or(0, |r| r.bytes());
        let blocks = sequence.len().saturating_sub(1);
        let blocks = blocks.div_ceil(self.context.block_tokens()) - present;
        let ended = sequence.finish_reason(context);
        self.state_reached(handoff);
        self.publish(handoff);
        self.context.changed();
        self.context.emit(WorkerOutput::Forget { handoff });
        self.context.note(WorkerNote::Landed {
            handoff,
            bytes,
            blocks,
            took: now.since(times.accepted),
            exposed: now.since(times.sealed.unwrap_or(now)),
        });
        self.context.report(router, Report::Landed { handoff });
        if let Some(reason) = ended {
            self.close(handoff, CloseReason::Finished(reason));
        }
    }

    /// Answers a peer about a hand-off that is over or unknown here. One that had landed is
    /// confirmed as landed: a sender with another answer might run the sequence again.
    fn answer_ended_handoff(&mut self, handoff: HandoffId, to: WorkerRef) {
        match self.recently_ended.trace(handoff) {
            Some(EndedHandoff::Landed) => {
                let packet = Packet::Landed { handoff };
                self.context.emit(WorkerOutput::Send { to, packet });
            }
            _ => self.abandon(handoff, to, AbandonCause::Cancelled),
        }
    }

    /// Answers a packet of a hand-off that is not here. A seal that is repeated for very long may
    /// be of one that landed and was forgotten: `Finished` does not deny that.
    fn abandon(&mut self, handoff: HandoffId, to: WorkerRef, cause: AbandonCause) {
        let packet = Packet::Abandoned { handoff, cause };
        self.context.emit(WorkerOutput::Send { to, packet });
    }

    fn discard(&mut self, handoff: HandoffId, part: BlockPart) {
        self.context.emit(WorkerOutput::Discard { handoff, part });
        self.context.note(WorkerNote::FrameDiscarded { handoff });
    }

    /// Rearms the stall deadline after progress: a hand-off that only waits for its peer has its
    /// full time again.
    pub(crate) fn watch(&mut self, handoff: HandoffId) {
        if self.awaits_answer(handoff) {
            self.resends
                .begin(handoff, self.context.now(), self.context.limits().stall_max)
        } else {
            self.resends.end(handoff)
        }
        if !self.waits_for_peer(handoff) {
            return self.stalls.remove(handoff);
        }
        // The reads of a paused sequence may queue behind a step, and the longest legal step is no
        // reason to abort its move; but they may also wait for credit that never comes, so they
        // have a limit.
        let unread = |outbound: &OutboundMigration| !outbound.sender.is_settled();
        let own = if self.moves.get(&handoff).is_some_and(unread) {
            self.context.limits().step_max
        } else {
            Duration::ZERO
        };
        let wait = self
            .frames_wait(handoff)
            .unwrap_or(self.context.limits().stall_max);
        self.stalls.set(handoff, self.context.now() + wait + own);
    }

    /// How long to wait for frames of a hand-off whose seal is here; `None` if it waits for
    /// something else.
    fn frames_wait(&self, handoff: HandoffId) -> Option<Duration> {
        let receiver = self.sequences.get(&handoff)?.incoming.as_ref()?;
        let sealed = receiver.is_sealed().then_some(receiver)?;
        let block_bytes = u64::from(self.context.limits().capacity.block_bytes);
        let prices = self.forecast.prices();
        let block = prices.transfer(sealed.sender().worker, block_bytes);
        let wait = FRAMES_WAIT_MIN.max(block.saturating_mul(FRAMES_WAIT_BLOCKS));
        Some(wait.min(self.context.limits().stall_max))
    }

    /// Extends a deadline that was noticed long after it passed. A process that was suspended
    /// cannot tell its own silence from its peer's: the frames may lie unread. A deadline that is
    /// noticed in time ends the hand-off.
    pub(crate) fn waits_once_more(&mut self, handoff: HandoffId, due: Time) -> bool {
        let Some(wait) = self.frames_wait(handoff) else {
            return false;
        };
        let was_suspended = self.context.now().since(due) >= wait / 4;
        if was_suspended {
            self.stalls.set(handoff, self.context.now() + wait);
        }
        was_suspended
    }

    /// Extends the deadlines of a peer's sealed hand-offs after a frame: its link works, and their
    /// frames may be behind this one.
    fn frames_arrived(&mut self, peer: WorkerRef) {
        let waits = |handoff: &HandoffId| {
            let receiver = self
                .sequences
                .get(handoff)
                .and_then(|s| s.incoming.as_ref());
            receiver.is_some_and(|receiver| receiver.is_sealed() && receiver.sender() == peer)
        };
        let waiting = self.stalls.iter().map(|(handoff, _)| handoff);
        let waiting: Vec<_> = waiting.filter(waits).collect();
        for handoff in waiting {
            self.watch(handoff);
        }
    }

    /// Whether the last packet that this end sent is one that the other end answers.
    pub(crate) fn awaits_answer(&self, handoff: HandoffId) -> bool {
        if let Some(outbound) = self.moves.get(&handoff) {
            return outbound.sender.is_sealed();
        }
        self.sequences.get(&handoff).is_some_and(|sequence| {
            let sealed = sequence.outgoing.as_ref().is_some_and(|s| s.is_sealed());
            if sequence.closing() {
                sequence.quarantined()
            } else {
                sealed
            }
        })
    }

    /// Repeats an unanswered packet. That is no progress, so the hand-off's stall deadline stays.
    pub(crate) fn resend(&mut self, handoff: HandoffId) {
        if let Some(sender) = self.sender_mut(handoff) {
            sender.handle(sender::SenderInput::Unanswered);
            let to = sender.receiver();
            while let Some(sender::SenderOutput::Send(packet)) = self
                .sender_mut(handoff)
                .and_then(sender::HandoffSender::poll)
            {
                self.context.emit(WorkerOutput::Send { to, packet });
            }
            return;
        }
        let receiver = self.sequences.get_mut(&handoff);
        let Some(receiver) = receiver.and_then(|s| s.incoming.as_mut()) else {
            return;
        };
        receiver.handle(receiver::ReceiverInput::Stalled);
        let to = receiver.sender();
        while let Some(receiver::ReceiverOutput::Send(packet)) = receiver.poll() {
            self.context.emit(WorkerOutput::Send { to, packet });
        }
    }

    pub(crate) fn waits_for_peer(&self, handoff: HandoffId) -> bool {
        if let Some(outbound) = self.moves.get(&handoff) {
            return outbound.sender.is_open() && outbound.paused_since.is_some();
        }
        self.sequences.get(&handoff).is_some_and(|sequence| {
            if sequence.closing() {
                sequence.quarantined()
            } else {
                sequence.waits_for_peer()
            }
        })
    }

    /// Ends, or aborts the move of, a hand-off that made no progress until its deadline.
    pub(crate) fn stalled(&mut self, handoff: HandoffId) {
        let lost = CloseReason::Failed(Failure::LinkLost);
        match self.moves.get(&handoff) {
            // The seal was sent, so the receiver may be running the sequence: ending it here is the
            // only way that never runs it twice.
            Some(outbound) if outbound.sender.is_sealed() => self.close(outbound.order.of, lost),
            Some(outbound) => self.abort_move(outbound.order.of, Failure::LinkLost),
            None if self.sequences.get(&handoff).is_some_and(|s| s.closing()) => {
                self.receive(handoff, receiver::ReceiverInput::Stalled);
            }
            None => self.close(handoff, lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::handoff::EndedHandoff;
    use crate::report::audit_tests::limits;
    use crate::{PayloadCondition, WorkerBrain, WorkerInput, WorkerOutput};
    use cleave_domain::{
        AbandonCause, BlockHash, FlightId, HandoffId, Incarnation, Time, WorkerId, WorkerRef,
    };
    use cleave_kv::{Packet, Seal};

    /// The answer to a seal of a hand-off that is not here.
    fn answer(brain: &mut WorkerBrain, handoff: HandoffId) -> Packet {
        let from = WorkerRef {
            worker: WorkerId(2),
            incarnation: Incarnation(1),
        };
        let packet = Packet::Seal(Seal {
            handoff,
            blocks_count: 1,
            digest: 0,
            content: BlockHash([0; 16]),
            output: vec![1],
            state: None,
        });
        let condition = PayloadCondition::Intact;
        let input = WorkerInput::Arrived {
            from,
            packet,
            condition,
        };
        brain.handle(Time::ZERO, input);
        let mut sent = None;
        while let Some(output) = brain.poll() {
            if let WorkerOutput::Send { packet, .. } = output {
                sent = Some(packet);
            }
        }
        sent.expect("an answer")
    }

    #[test]
    fn an_unknown_seal_is_answered_finished_not_cancelled() {
        let mut brain = WorkerBrain::new(limits());
        let [unknown, over, landed] = [1, 2, 3].map(|flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        });
        brain.recently_ended.add(over, EndedHandoff::Ended);
        let keep = brain.limits().stall_max * 2;
        brain.recently_ended.add_landed(landed, Time::ZERO, keep);
        let abandoned = |handoff, cause| Packet::Abandoned { handoff, cause };
        assert_eq!(
            answer(&mut brain, unknown),
            abandoned(unknown, AbandonCause::Finished)
        );
        assert_eq!(
            answer(&mut brain, over),
            abandoned(over, AbandonCause::Cancelled)
        );
        let handoff = landed;
        assert_eq!(answer(&mut brain, landed), Packet::Landed { handoff });
    }
}
