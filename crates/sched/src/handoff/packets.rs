//! Traffic with the worker at the other end of a hand-off.
//!
//! Owns: the way from packets and finished copies to the two hand-off machines, and from their
//! outputs to the brain's. Never: judges a frame itself. Packets that need an answer are repeated
//! until they have one, since a link may lose one and stand.
//! Invariant: each frame that arrives is answered at once by exactly one `Import` or `Discard`; a
//! frame or seal of a hand-off unknown here is answered by `Abandoned`, and `Abandoned` by nothing.
//! `Abandoned` from a receiver means that nothing has landed, nor will, unless its cause is
//! `Finished`: then the receiver has forgotten the hand-off.

use super::{CloseReason, EndedHandoff, Handoffs};
use crate::sequences::{SequencePhase, WorkerSequence};
use crate::{ExportOutcome, ImportOutcome, PayloadCondition, WorkerNote, WorkerOutput};
use cleave_domain::{AbandonCause, Failure, HandoffId, KvUnit, Report, TokenId, WorkerRef};
use cleave_kv::handoff::{receiver, sender};
use cleave_kv::{BlockPart, Packet};

impl Handoffs<'_> {
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
                    if self.peers.ended(handoff) != Some(EndedHandoff::Landed) {
                        self.peers.answer_ended(self.context, handoff, from);
                    }
                }
                self.peers
                    .frames_arrived(self.context, self.sequences, self.forecast, from);
            }
            Packet::Seal(seal) => {
                if !self.receive(handoff, receiver::ReceiverInput::Seal { from, seal }) {
                    match self.peers.ended(handoff) {
                        Some(_) => self.peers.answer_ended(self.context, handoff, from),
                        None => self.answer_unknown(handoff, from),
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
        let with_peer = |s: &WorkerSequence| s.peer() == Some(peer);
        let handoffs = self.sequences.handoffs_where(with_peer);
        for handoff in handoffs {
            if !self.send(handoff, sender::SenderInput::LinkLost) {
                self.receive(handoff, receiver::ReceiverInput::LinkLost);
            }
        }
        for handoff in self.peers.moves_to(peer) {
            self.send(handoff, sender::SenderInput::LinkLost);
        }
    }

    /// Fences a peer: its packets under way will not come, and it can write to nothing any more.
    pub(crate) fn fenced(&mut self, peer: WorkerRef) {
        self.link_lost(peer);
        self.peers.fence(peer);
        let from_peer = |s: &WorkerSequence| {
            let receiver = s.incoming.as_ref();
            receiver.is_some_and(|receiver| receiver.sender() == peer && receiver.is_quarantined())
        };
        let handoffs = self.sequences.handoffs_where(from_peer);
        for handoff in handoffs {
            self.receive(handoff, receiver::ReceiverInput::Fenced);
            self.release_if_settled(handoff);
        }
    }

    /// Answers a receiver that waits until nothing more is written. A hand-off that never came here
    /// must not begin after this answer.
    fn stop(&mut self, handoff: HandoffId, from: WorkerRef) {
        let sender = self.peers.sender(self.sequences, handoff);
        if sender.is_some_and(|sender| sender.receiver() == from) {
            self.send(handoff, sender::SenderInput::Stop { from });
            return self.release_if_settled(handoff);
        }
        if sender.is_none() && !self.sequences.contains(handoff) {
            self.peers
                .remember(handoff, EndedHandoff::StoppedBeforeStart);
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
        match self
            .peers
            .outbound(handoff)
            .map(|outbound| outbound.order.of)
        {
            // The export may have been the last full block.
            Some(of) => self.advance_move(of),
            None => {
                // A sequence whose state was lost may have waited for this read.
                let sequence = self.sequences.get(handoff);
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
        let Some(sequence) = self.sequences.get_mut(handoff) else {
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
        if self.peers.outbound(handoff).is_some() {
            self.send_move(handoff, input);
            self.forget_move(handoff);
            return true;
        }
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return false;
        };
        let Some(sender) = &mut sequence.outgoing else {
            return false;
        };
        sender.handle(input);
        let since = sequence.times.sending.unwrap_or(self.context.now());
        let ended = self.peers.emit_sender_outputs(
            self.context,
            self.sequences,
            self.forecast,
            handoff,
            since,
        );
        match ended {
            Some(sender::SenderOutput::Done) => self.close(handoff, CloseReason::HandedOff),
            Some(sender::SenderOutput::Ended(cause)) => {
                self.close(handoff, CloseReason::from_peer_cause(cause))
            }
            _ => {}
        }
        self.watch(handoff);
        true
    }

    /// Lets the sequence decode here from where the other worker left it: all of its KV has
    /// arrived.
    fn landed(&mut self, handoff: HandoffId, output: &[TokenId]) {
        let now = self.context.now();
        let context = self.context.limits().capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        sequence.tokens.extend_from_slice(output);
        sequence.kv.arrived(sequence.len() - 1);
        sequence.phase = SequencePhase::Decode;
        sequence.peer_state_open = false;
        let first = sequence.times.sealed.unwrap_or(now);
        sequence
            .client_timing
            .first_token(first, now, sequence.output_count());
        let (router, times) = (sequence.router, sequence.times);
        let present = sequence.kv.published();
        let bytes = sequence.incoming.as_ref().map_or(0, |r| r.bytes());
        let blocks = sequence.len().saturating_sub(1);
        let blocks = blocks.div_ceil(self.context.block_tokens()) - present;
        let ended = sequence.finish_reason(context);
        self.memory.state_reached(sequence);
        // The sender may have given up window blocks that were live at the reservation.
        self.memory.slide(sequence);
        self.memory.publish(sequence);
        self.sequences.activate(handoff);
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

    /// Answers a packet of a hand-off that is not here. A seal that is repeated for very long may
    /// be of one that landed and was forgotten: `Finished` does not deny that.
    fn answer_unknown(&mut self, handoff: HandoffId, to: WorkerRef) {
        let cause = AbandonCause::Finished;
        let packet = Packet::Abandoned { handoff, cause };
        self.context.emit(WorkerOutput::Send { to, packet });
    }

    fn discard(&mut self, handoff: HandoffId, part: BlockPart) {
        self.context.emit(WorkerOutput::Discard { handoff, part });
        self.context.note(WorkerNote::FrameDiscarded { handoff });
    }

    pub(super) fn watch(&mut self, handoff: HandoffId) {
        self.peers
            .watch(self.context, self.sequences, self.forecast, handoff);
    }

    /// Ends hand-offs that made no progress until their deadline.
    pub(crate) fn end_stalled(&mut self) {
        while let Some(handoff) =
            self.peers
                .next_stalled(self.context, self.sequences, self.forecast)
        {
            self.stalled(handoff);
        }
    }

    /// Ends, or aborts the move of, a hand-off that made no progress until its deadline.
    fn stalled(&mut self, handoff: HandoffId) {
        let lost = CloseReason::Failed(Failure::LinkLost);
        match self.peers.outbound(handoff) {
            // The seal was sent, so the receiver may be running the sequence: ending it here is the
            // only way that never runs it twice.
            Some(outbound) if outbound.sender.is_sealed() => self.close(outbound.order.of, lost),
            Some(outbound) => self.abort_move(outbound.order.of, Failure::LinkLost),
            None if self.sequences.get(handoff).is_some_and(|s| s.closing()) => {
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
            window: None,
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
        brain.machines.peers.remember(over, EndedHandoff::Ended);
        brain
            .machines
            .peers
            .remember_landed(landed, &brain.machines.context);
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
