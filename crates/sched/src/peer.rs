//! What comes from and goes to the worker at the other end of a hand-off.
//!
//! Owns: the way from packets and finished copies to the two hand-off machines, and from their
//! outputs to the brain's. Never: judges a frame itself.
//! Packets that must be answered are repeated until they are, since a link may lose one and stand.
//! Invariant: each frame that arrives is answered at once by exactly one `Import` or `Discard`; a
//! frame or seal of a hand-off unknown here is answered by `Abandoned`, and `Abandoned` by nothing.
//! `Abandoned` from a receiver means that nothing has landed, nor will, unless its cause is `Finished`:
//! then the receiver does not know any more.

use crate::close::Close;
use crate::moves::Move;
use crate::past::Trace;
use crate::sequence::{Phase, Stage};
use crate::{Brain, Condition, Export, ExportOutcome, ImportOutcome, Note, Output};
use cleave_domain::{Cause, Failure, HandoffId, Report, Time, TokenId, WorkerRef};
use cleave_kv::handoff::{receiver, sender};
use cleave_kv::{BlockPart, Packet};
use cleave_planner::Predict;
use std::time::Duration;

/// How long the frames of a sealed hand-off may stay away, at least: they left before the seal, and any
/// frame from the same worker shows that its link is slow and has lost nothing.
const FRAMES_WAIT_MIN: Duration = Duration::from_secs(2);
/// The same in times of one block, as the link was measured.
const FRAMES_WAIT_BLOCKS: u32 = 4;

impl Brain {
    // === facts ===

    pub(crate) fn arrived(&mut self, from: WorkerRef, packet: Packet, condition: Condition) {
        let handoff = packet.handoff();
        match packet {
            Packet::Frame {
                block,
                part,
                checksum,
                ..
            } => {
                let input = receiver::Input::Frame {
                    from,
                    block,
                    part,
                    checksum: (condition == Condition::Intact).then_some(checksum),
                };
                if !self.receive(handoff, input) {
                    self.discard(handoff, part);
                    if self.past.trace(handoff) != Some(Trace::Landed) {
                        self.turn_away(handoff, from);
                    }
                }
                self.frames_come(from);
            }
            Packet::Seal(seal) => {
                if !self.receive(handoff, receiver::Input::Seal { from, seal }) {
                    match self.past.trace(handoff) {
                        Some(_) => self.turn_away(handoff, from),
                        None => self.abandon(handoff, from, Cause::Finished),
                    }
                }
            }
            Packet::Stop { .. } => self.stop(handoff, from),
            Packet::Stopped { .. } => {
                self.receive(handoff, receiver::Input::Stopped { from });
                self.release_if_settled(handoff);
            }
            Packet::Landed { .. } => {
                self.send(handoff, sender::Input::Landed { from });
            }
            Packet::Abandoned { cause, .. } => {
                let sent = cause.clone();
                if !self.send(handoff, sender::Input::Abandoned { from, cause: sent }) {
                    self.receive(handoff, receiver::Input::Abandoned { from, cause });
                }
            }
        }
    }

    pub(crate) fn link_lost(&mut self, peer: WorkerRef) {
        self.learner.link_lost(peer.worker);
        let with_peer = self
            .sequences
            .iter()
            .filter(|(_, s)| s.peer() == Some(peer));
        let handoffs: Vec<_> = with_peer.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            if !self.send(handoff, sender::Input::LinkLost) {
                self.receive(handoff, receiver::Input::LinkLost);
            }
        }
        for handoff in self.moves_to(peer) {
            self.send(handoff, sender::Input::LinkLost);
        }
    }

    /// What is under way with it will not come, and it can write to nothing any more.
    pub(crate) fn cut_off(&mut self, peer: WorkerRef) {
        self.link_lost(peer);
        self.severed.add(peer);
        let from_peer = self.sequences.iter().filter(|(_, s)| {
            let receiver = s.incoming.as_ref();
            receiver.is_some_and(|receiver| receiver.sender() == peer && receiver.quarantined())
        });
        let handoffs: Vec<_> = from_peer.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            self.receive(handoff, receiver::Input::Severed);
            self.release_if_settled(handoff);
        }
    }

    /// A receiver waits to hear that nothing more is written. What never came here must not begin
    /// after it was told so.
    fn stop(&mut self, handoff: HandoffId, from: WorkerRef) {
        let sends_there = self
            .sender(handoff)
            .is_some_and(|sender| sender.receiver() == from);
        if sends_there {
            self.send(handoff, sender::Input::Stop { from });
            return self.release_if_settled(handoff);
        }
        if !self.sequences.contains_key(&handoff) && !self.moves.contains_key(&handoff) {
            self.past.add(handoff, Trace::Stopped);
        }
        let packet = Packet::Stopped { handoff };
        self.say(Output::Send { to: from, packet });
    }

    pub(crate) fn exported(&mut self, handoff: HandoffId, ordinal: u32, outcome: ExportOutcome) {
        let outcome = match outcome {
            ExportOutcome::Sent { digest, bytes } => Ok((digest, bytes)),
            ExportOutcome::Dropped => Err(Failure::LinkLost),
            ExportOutcome::Broken => Err(Failure::Engine("a block could not be read".into())),
        };
        self.send(handoff, sender::Input::Exported { ordinal, outcome });
        match self.moves.get(&handoff).map(|leaving| leaving.order.of) {
            // It may have been the last full block.
            Some(of) => self.leave(of),
            None => self.release_if_settled(handoff),
        }
    }

    pub(crate) fn imported(&mut self, handoff: HandoffId, part: BlockPart, outcome: ImportOutcome) {
        let outcome = match outcome {
            ImportOutcome::Written => Ok(()),
            ImportOutcome::Dropped | ImportOutcome::Damaged => Err(Failure::Corrupt),
            ImportOutcome::Broken => Err(Failure::Engine("a block could not be written".into())),
        };
        self.receive(handoff, receiver::Input::Imported { part, outcome });
        self.release_if_settled(handoff);
    }

    // === the machines ===

    /// Tells the receiving end of a hand-off; false if there is none here.
    pub(crate) fn receive(&mut self, handoff: HandoffId, input: receiver::Input) -> bool {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return false;
        };
        let Some(receiver) = &mut sequence.incoming else {
            return false;
        };
        let from = receiver.sender();
        // A repeated seal brings nothing that was missing.
        let progress = !(receiver.sealed() && matches!(input, receiver::Input::Seal { .. }));
        receiver.handle(input);
        if receiver.sealed() {
            sequence.times.sealed.get_or_insert(self.now);
        }
        let mut outputs = Vec::new();
        while let Some(output) = receiver.poll() {
            outputs.push(output);
        }
        for output in outputs {
            match output {
                receiver::Output::Import { part, block } => self.say(Output::Import {
                    handoff,
                    part,
                    block,
                }),
                receiver::Output::Discard { part } => self.discard(handoff, part),
                receiver::Output::Send(packet) => self.say(Output::Send { to: from, packet }),
                receiver::Output::Landed { output } => self.landed(handoff, &output),
                receiver::Output::Ended(cause) => self.close(handoff, Close::by_peer(cause)),
            }
        }
        if progress {
            self.watch(handoff);
        }
        true
    }

    /// Tells the sending end of a hand-off, of a prompt or of a sequence that moves; false if there
    /// is none here.
    pub(crate) fn send(&mut self, handoff: HandoffId, input: sender::Input) -> bool {
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
        let since = sequence.times.sending.unwrap_or(self.now);
        match self.say_sent(handoff, since) {
            Some(sender::Output::Done) => self.close(handoff, Close::HandedOn),
            Some(sender::Output::Ended(cause)) => self.close(handoff, Close::by_peer(cause)),
            _ => {}
        }
        self.watch(handoff);
        true
    }

    /// Says what the sending end of a hand-off wants done; gives back how it ended, if it did.
    /// `since` is when it began.
    pub(crate) fn say_sent(&mut self, handoff: HandoffId, since: Time) -> Option<sender::Output> {
        let now = self.now;
        let mut ended = None;
        while let Some(sender) = self.sender_mut(handoff)
            && let Some(output) = sender.poll()
        {
            let to = sender.receiver();
            let (bytes, blocks) = (sender.bytes(), sender.blocks_count());
            match output {
                sender::Output::Export {
                    from,
                    ordinal,
                    block,
                } => {
                    if let Some(sequence) = self.sequences.get_mut(&handoff) {
                        sequence.times.sending.get_or_insert(now);
                    }
                    self.say(Output::Export(Export {
                        handoff,
                        to,
                        from,
                        ordinal,
                        block,
                    }));
                }
                sender::Output::Send(packet) => {
                    if matches!(packet, Packet::Seal(_)) {
                        self.measure_link(handoff);
                        self.note(Note::Sealed {
                            handoff,
                            bytes,
                            blocks,
                            took: now.since(since),
                        });
                    }
                    self.say(Output::Send { to, packet });
                }
                sender::Output::Done | sender::Output::Ended(_) => ended = Some(output),
            }
        }
        ended
    }

    fn sender(&self, handoff: HandoffId) -> Option<&sender::Sender> {
        match self.moves.get(&handoff) {
            Some(leaving) => Some(&leaving.sender),
            None => self.sequences.get(&handoff)?.outgoing.as_ref(),
        }
    }

    fn sender_mut(&mut self, handoff: HandoffId) -> Option<&mut sender::Sender> {
        match self.moves.get_mut(&handoff) {
            Some(leaving) => Some(&mut leaving.sender),
            None => self.sequences.get_mut(&handoff)?.outgoing.as_mut(),
        }
    }

    /// Everything is here: the sequence goes on where the other worker left it.
    fn landed(&mut self, handoff: HandoffId, output: &[TokenId]) {
        let now = self.now;
        let context = self.limits.capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.tokens.extend_from_slice(output);
        sequence.computed = sequence.len() - 1;
        sequence.phase = Phase::Decode;
        sequence.stage = Stage::Active;
        sequence.peered = false;
        let first = sequence.times.sealed.unwrap_or(now);
        sequence.pace.begin(first, now, sequence.output_count());
        self.active.insert(sequence.rank);
        let (router, times) = (sequence.router, sequence.times);
        let present = sequence.published;
        let bytes = sequence.incoming.as_ref().map_or(0, |r| r.bytes());
        let blocks = sequence.len().saturating_sub(1);
        let blocks = blocks.div_ceil(self.limits.capacity.block_tokens) - present;
        let ended = sequence.ended(context);
        self.publish(handoff);
        self.stirred = true;
        self.say(Output::Forget { handoff });
        self.note(Note::Landed {
            handoff,
            bytes,
            blocks,
            took: now.since(times.accepted),
            exposed: now.since(times.sealed.unwrap_or(now)),
        });
        self.tell(router, Report::Landed { handoff });
        if let Some(reason) = ended {
            self.close(handoff, Close::Finished(reason));
        }
    }

    /// This end no longer knows, or never knew, what the peer has. What had landed here is said to
    /// have landed: a sender that heard otherwise might run it once more.
    fn turn_away(&mut self, handoff: HandoffId, to: WorkerRef) {
        match self.past.trace(handoff) {
            Some(Trace::Landed) => {
                let packet = Packet::Landed { handoff };
                self.say(Output::Send { to, packet });
            }
            _ => self.abandon(handoff, to, Cause::Cancelled),
        }
    }

    /// Answers a packet of a hand-off that is not here. A seal that is repeated for very long may be of
    /// one that landed and was forgotten: `Finished` does not deny that.
    fn abandon(&mut self, handoff: HandoffId, to: WorkerRef, cause: Cause) {
        let packet = Packet::Abandoned { handoff, cause };
        self.say(Output::Send { to, packet });
    }

    fn discard(&mut self, handoff: HandoffId, part: BlockPart) {
        self.say(Output::Discard { handoff, part });
        self.note(Note::FrameDiscarded { handoff });
    }

    /// Something moved: a hand-off that only waits for its peer has its full patience again.
    pub(crate) fn watch(&mut self, handoff: HandoffId) {
        match self.awaits_answer(handoff) {
            true => self.resends.begin(handoff, self.now, self.limits.stall_max),
            false => self.resends.end(handoff),
        }
        if !self.waits_for_peer(handoff) {
            return self.stalls.end(handoff);
        }
        // The reads of a sequence that stands still may queue behind a step, and the longest legal one
        // is no reason to take its move back; but they may also wait for credit that never comes.
        let unread = |leaving: &Move| !leaving.sender.settled();
        let own = match self.moves.get(&handoff).is_some_and(unread) {
            true => self.limits.step_max,
            false => Duration::ZERO,
        };
        let patience = self.frames_wait(handoff).unwrap_or(self.limits.stall_max);
        self.stalls.set(handoff, self.now + patience + own);
    }

    /// How long frames may stay away of a hand-off whose seal is here; `None` if it waits for something
    /// else.
    fn frames_wait(&self, handoff: HandoffId) -> Option<Duration> {
        let receiver = self.sequences.get(&handoff)?.incoming.as_ref()?;
        let sealed = receiver.sealed().then_some(receiver)?;
        let block_bytes = u64::from(self.limits.capacity.block_bytes);
        let prices = self.learner.prices();
        let block = prices.transfer(sealed.sender().worker, block_bytes);
        let wait = FRAMES_WAIT_MIN.max(block.saturating_mul(FRAMES_WAIT_BLOCKS));
        Some(wait.min(self.limits.stall_max))
    }

    /// A frame came from `peer`: its link moves on, and what it has still to bring may be behind this.
    fn frames_come(&mut self, peer: WorkerRef) {
        let waits = |handoff: &HandoffId| {
            let receiver = self
                .sequences
                .get(handoff)
                .and_then(|s| s.incoming.as_ref());
            receiver.is_some_and(|receiver| receiver.sealed() && receiver.sender() == peer)
        };
        let waiting = self.stalls.iter().map(|(handoff, _)| handoff);
        let waiting: Vec<_> = waiting.filter(waits).collect();
        for handoff in waiting {
            self.watch(handoff);
        }
    }

    /// Whether the last packet that this end sent is one that the other end answers.
    pub(crate) fn awaits_answer(&self, handoff: HandoffId) -> bool {
        if let Some(leaving) = self.moves.get(&handoff) {
            return leaving.sender.sealed();
        }
        self.sequences.get(&handoff).is_some_and(|sequence| {
            let sealed = sequence.outgoing.as_ref().is_some_and(|s| s.sealed());
            match sequence.closing() {
                true => sequence.quarantined(),
                false => sealed,
            }
        })
    }

    /// Sends again what was not answered. That is no progress, so the hand-off's patience goes on.
    pub(crate) fn resend(&mut self, handoff: HandoffId) {
        if let Some(sender) = self.sender_mut(handoff) {
            sender.handle(sender::Input::Unanswered);
            let to = sender.receiver();
            while let Some(sender::Output::Send(packet)) =
                self.sender_mut(handoff).and_then(sender::Sender::poll)
            {
                self.say(Output::Send { to, packet });
            }
            return;
        }
        let receiver = self.sequences.get_mut(&handoff);
        let Some(receiver) = receiver.and_then(|s| s.incoming.as_mut()) else {
            return;
        };
        receiver.handle(receiver::Input::StoodStill);
        let to = receiver.sender();
        while let Some(receiver::Output::Send(packet)) = receiver.poll() {
            self.outputs.push_back(Output::Send { to, packet });
        }
    }

    pub(crate) fn waits_for_peer(&self, handoff: HandoffId) -> bool {
        if let Some(leaving) = self.moves.get(&handoff) {
            return leaving.sender.open() && leaving.still.is_some();
        }
        self.sequences.get(&handoff).is_some_and(|sequence| {
            if sequence.closing() {
                sequence.quarantined()
            } else {
                sequence.waits_for_peer()
            }
        })
    }

    /// Nothing came for too long.
    pub(crate) fn stalled(&mut self, handoff: HandoffId) {
        let lost = Close::Failed(Failure::LinkLost);
        match self.moves.get(&handoff) {
            // Nobody can tell whether it runs there.
            Some(leaving) if leaving.sender.sealed() => self.close(leaving.order.of, lost),
            Some(leaving) => self.stay(leaving.order.of, Failure::LinkLost),
            None if self.sequences.get(&handoff).is_some_and(|s| s.closing()) => {
                self.receive(handoff, receiver::Input::StoodStill);
            }
            None => self.close(handoff, lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::audit::tests::limits;
    use crate::past::Trace;
    use crate::{Brain, Condition, Input, Output};
    use cleave_domain::{
        BlockHash, Cause, FlightId, HandoffId, Incarnation, Time, WorkerId, WorkerRef,
    };
    use cleave_kv::{Packet, Seal};

    /// How a seal of a hand-off that is not here is answered.
    fn answer(brain: &mut Brain, handoff: HandoffId) -> Packet {
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
        });
        let condition = Condition::Intact;
        let input = Input::Arrived {
            from,
            packet,
            condition,
        };
        brain.handle(Time::ZERO, input);
        let mut sent = None;
        while let Some(output) = brain.poll() {
            if let Output::Send { packet, .. } = output {
                sent = Some(packet);
            }
        }
        sent.expect("an answer")
    }

    #[test]
    fn an_unknown_seal_is_not_denied_to_have_landed() {
        let mut brain = Brain::new(limits());
        let [unknown, over, landed] = [1, 2, 3].map(|flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        });
        brain.past.add(over, Trace::Over);
        let keep = brain.limits.stall_max * 2;
        brain.past.add_landed(landed, Time::ZERO, keep);
        let abandoned = |handoff, cause| Packet::Abandoned { handoff, cause };
        assert_eq!(
            answer(&mut brain, unknown),
            abandoned(unknown, Cause::Finished)
        );
        assert_eq!(answer(&mut brain, over), abandoned(over, Cause::Cancelled));
        let handoff = landed;
        assert_eq!(answer(&mut brain, landed), Packet::Landed { handoff });
    }
}
