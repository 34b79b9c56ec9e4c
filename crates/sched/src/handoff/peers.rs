//! Open business with other workers: moves to them, and what is awaited from them.
//!
//! Owns: sequences that leave, deadlines of hand-offs that only wait for their peer, packets to
//! repeat, the hand-offs that ended lately, and the peers that can write nothing here any more.
//! Never: ends a sequence or a move: it states which one makes no progress.
//! Invariant: a hand-off has a stall deadline exactly while only its peer can make progress, and
//! repetitions exactly while its last packet is one that the peer answers; no hand-off is a
//! sequence and a move.

use super::{EndedHandoff, FencedPeers, OutboundMigration, RecentlyEnded, Resends};
use crate::context::WorkerContext;
use crate::deadline::Deadlines;
use crate::forecast::WorkForecast;
use crate::sequences::{SequenceTable, WorkerSequence};
use crate::{BlockExport, WorkerNote, WorkerOutput};
use cleave_domain::{AbandonCause, HandoffId, KvUnit, Time, WorkerRef};
use cleave_kv::Packet;
use cleave_kv::handoff::receiver::{HandoffReceiver, ReceiverInput, ReceiverOutput};
use cleave_kv::handoff::sender::{HandoffSender, SenderInput, SenderOutput};
use cleave_planner::Predict;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::time::Duration;

/// Shortest time to wait for the frames of a sealed hand-off: they left before the seal, and any
/// frame from the same worker shows that its link is slow and has lost nothing.
const FRAMES_WAIT_MIN: Duration = Duration::from_secs(2);
/// The same, as a multiple of one block's transfer time over the measured link.
const FRAMES_WAIT_BLOCKS: u32 = 4;
/// A transfer of fewer blocks measures the link's latency rather than its bandwidth.
const BLOCKS_LEAST: u64 = 4;

/// Moves to other workers, and deadlines and memory of all hand-offs with them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerTraffic {
    /// Sequences that leave for other decode workers, by the attempt under which they leave.
    moves: BTreeMap<HandoffId, OutboundMigration>,
    /// Deadlines of hand-offs that only wait for their peer, or for an answer from it.
    stalls: Deadlines,
    /// Packets that are sent again until they are answered.
    resends: Resends,
    /// Hand-offs that ended lately, to recognise repeated orders and late packets.
    recently_ended: RecentlyEnded,
    /// Workers that can write nothing here any more.
    fenced: FencedPeers,
}

impl PeerTraffic {
    // === waiting ===

    /// Rearms the stall deadline after progress: a hand-off that only waits for its peer has its
    /// full time again.
    pub(super) fn watch(
        &mut self,
        context: &WorkerContext,
        sequences: &SequenceTable,
        forecast: &WorkForecast,
        handoff: HandoffId,
    ) {
        let (now, limits) = (context.now(), context.limits());
        if self.awaits_answer(sequences, handoff) {
            self.resends.begin(handoff, now, limits.stall_max)
        } else {
            self.resends.end(handoff)
        }
        if !self.waits_for_peer(sequences, handoff) {
            return self.stalls.remove(handoff);
        }
        // The reads of a paused sequence may queue behind a step, and the longest legal step is no
        // reason to abort its move; but they may also wait for credit that never comes, so they
        // have a limit.
        let unread = |outbound: &OutboundMigration| !outbound.sender.is_settled();
        let own = if self.moves.get(&handoff).is_some_and(unread) {
            limits.step_max
        } else {
            Duration::ZERO
        };
        let wait = frames_wait(context, sequences.get(handoff), forecast);
        let wait = wait.unwrap_or(limits.stall_max);
        self.stalls.set(handoff, now + wait + own);
    }

    /// Extends the deadlines of a peer's sealed hand-offs after a frame: its link works, and their
    /// frames may be behind this one.
    pub(super) fn frames_arrived(
        &mut self,
        context: &WorkerContext,
        sequences: &SequenceTable,
        forecast: &WorkForecast,
        peer: WorkerRef,
    ) {
        let waits = |handoff: &HandoffId| {
            let receiver = sequences.get(*handoff).and_then(|s| s.incoming.as_ref());
            receiver.is_some_and(|receiver| receiver.is_sealed() && receiver.sender() == peer)
        };
        let waiting = self.stalls.iter().map(|(handoff, _)| handoff);
        let waiting: Vec<_> = waiting.filter(waits).collect();
        for handoff in waiting {
            self.watch(context, sequences, forecast, handoff);
        }
    }

    /// A hand-off that made no progress until its deadline, if any. One whose deadline is noticed
    /// long after it passed waits once more: a process that was suspended cannot tell its own
    /// silence from its peer's, and the frames may lie unread.
    pub(super) fn next_stalled(
        &mut self,
        context: &WorkerContext,
        sequences: &SequenceTable,
        forecast: &WorkForecast,
    ) -> Option<HandoffId> {
        let now = context.now();
        loop {
            let due = self.stalls.next()?;
            let handoff = self.stalls.pop_passed(now)?;
            let wait = frames_wait(context, sequences.get(handoff), forecast);
            match wait.filter(|wait| now.since(due) >= *wait / 4) {
                Some(wait) => self.stalls.set(handoff, now + wait),
                None => return Some(handoff),
            }
        }
    }

    /// Ends what is awaited for a hand-off.
    pub(super) fn forget(&mut self, handoff: HandoffId) {
        self.stalls.remove(handoff);
        self.resends.end(handoff);
    }

    /// Whether the last packet that this end sent is one that the other end answers.
    fn awaits_answer(&self, sequences: &SequenceTable, handoff: HandoffId) -> bool {
        if let Some(outbound) = self.moves.get(&handoff) {
            return outbound.sender.is_sealed();
        }
        sequences.get(handoff).is_some_and(|sequence| {
            let sealed = sequence.outgoing.as_ref().is_some_and(|s| s.is_sealed());
            if sequence.closing() {
                sequence.quarantined()
            } else {
                sealed
            }
        })
    }

    fn waits_for_peer(&self, sequences: &SequenceTable, handoff: HandoffId) -> bool {
        if let Some(outbound) = self.moves.get(&handoff) {
            return outbound.sender.is_open() && outbound.paused_since.is_some();
        }
        sequences.get(handoff).is_some_and(|sequence| {
            if sequence.closing() {
                sequence.quarantined()
            } else {
                sequence.waits_for_peer()
            }
        })
    }

    // === packets ===

    /// Repeats unanswered packets. That is no progress, so stall deadlines stay.
    pub(crate) fn resend_due(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
    ) {
        let stall_max = context.limits().stall_max;
        while let Some(handoff) = self.resends.next_due(context.now(), stall_max) {
            self.resend(context, sequences, handoff);
        }
    }

    fn resend(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        handoff: HandoffId,
    ) {
        if let Some(sender) = self.sender_mut(sequences, handoff) {
            sender.handle(SenderInput::Unanswered);
            let to = sender.receiver();
            while let Some(SenderOutput::Send(packet)) = sender.poll() {
                context.emit(WorkerOutput::Send { to, packet });
            }
            return;
        }
        let receiver = sequences.get_mut(handoff);
        let Some(receiver) = receiver.and_then(|s| s.incoming.as_mut()) else {
            return;
        };
        receiver.handle(ReceiverInput::Stalled);
        let to = receiver.sender();
        while let Some(ReceiverOutput::Send(packet)) = receiver.poll() {
            context.emit(WorkerOutput::Send { to, packet });
        }
    }

    /// Emits the outputs of a hand-off's sending end; returns how it ended, if it did. `since` is
    /// the time at which it began.
    pub(super) fn emit_sender_outputs(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        forecast: &mut WorkForecast,
        handoff: HandoffId,
        since: Time,
    ) -> Option<SenderOutput> {
        let now = context.now();
        let mut ended = None;
        while let Some(sender) = self.sender_mut(sequences, handoff)
            && let Some(output) = sender.poll()
        {
            let to = sender.receiver();
            let (bytes, blocks) = (sender.bytes(), sender.blocks_count());
            match output {
                SenderOutput::Export { from, unit, block } => {
                    if let Some(sequence) = sequences.get_mut(handoff) {
                        sequence.times.sending.get_or_insert(now);
                    }
                    context.emit(WorkerOutput::Export(BlockExport {
                        handoff,
                        to,
                        plane: unit.plane,
                        from,
                        ordinal: unit.ordinal,
                        block,
                    }));
                }
                SenderOutput::Send(packet) => {
                    if matches!(packet, Packet::Seal(_)) {
                        measure_link(context, sequences.get(handoff), forecast);
                        context.note(WorkerNote::Sealed {
                            handoff,
                            bytes,
                            blocks,
                            took: now.since(since),
                        });
                    }
                    context.emit(WorkerOutput::Send { to, packet });
                }
                SenderOutput::Done | SenderOutput::Ended(_) => ended = Some(output),
            }
        }
        ended
    }

    pub(super) fn sender<'a>(
        &'a self,
        sequences: &'a SequenceTable,
        handoff: HandoffId,
    ) -> Option<&'a HandoffSender> {
        match self.moves.get(&handoff) {
            Some(outbound) => Some(&outbound.sender),
            None => sequences.get(handoff)?.outgoing.as_ref(),
        }
    }

    fn sender_mut<'a>(
        &'a mut self,
        sequences: &'a mut SequenceTable,
        handoff: HandoffId,
    ) -> Option<&'a mut HandoffSender> {
        match self.moves.get_mut(&handoff) {
            Some(outbound) => Some(&mut outbound.sender),
            None => sequences.get_mut(handoff)?.outgoing.as_mut(),
        }
    }

    /// Answers a peer about a hand-off that is over or unknown here. One that had landed is
    /// confirmed as landed: a sender with another answer might run the sequence again.
    pub(super) fn answer_ended(
        &self,
        context: &mut WorkerContext,
        handoff: HandoffId,
        to: WorkerRef,
    ) {
        let packet = match self.ended(handoff) {
            Some(EndedHandoff::Landed) => Packet::Landed { handoff },
            _ => Packet::Abandoned {
                handoff,
                cause: AbandonCause::Cancelled,
            },
        };
        context.emit(WorkerOutput::Send { to, packet });
    }

    // === moves ===

    pub(super) fn begin_move(&mut self, outbound: OutboundMigration) {
        self.moves.insert(outbound.order.handoff, outbound);
    }

    pub(super) fn outbound(&self, handoff: HandoffId) -> Option<&OutboundMigration> {
        self.moves.get(&handoff)
    }

    pub(super) fn outbound_mut(&mut self, handoff: HandoffId) -> Option<&mut OutboundMigration> {
        self.moves.get_mut(&handoff)
    }

    /// Drops a move that is over, once no block is being read for it; returns the sequence that
    /// moved.
    pub(super) fn end_move(&mut self, handoff: HandoffId) -> Option<HandoffId> {
        let outbound = self.moves.get(&handoff)?;
        if outbound.sender.is_open() || !outbound.sender.is_settled() {
            return None;
        }
        let of = outbound.order.of;
        self.moves.remove(&handoff);
        self.remember(handoff, EndedHandoff::Ended);
        Some(of)
    }

    /// Whether a sequence leaves under this attempt.
    pub(crate) fn is_move(&self, handoff: HandoffId) -> bool {
        self.moves.contains_key(&handoff)
    }

    /// Open moves to `peer`.
    pub(super) fn moves_to(&self, peer: WorkerRef) -> Vec<HandoffId> {
        let open = self.moves.iter().filter(|(_, outbound)| {
            outbound.sender.is_open() && outbound.sender.receiver() == peer
        });
        open.map(|(handoff, _)| *handoff).collect()
    }

    /// The sending ends of a sequence: of its moves, which may be over, and of its prompt.
    fn senders_of<'a>(
        &'a self,
        sequence: &'a WorkerSequence,
    ) -> impl Iterator<Item = &'a HandoffSender> {
        let of = sequence.handoff();
        let moves = self.moves.values();
        let moves = moves.filter(move |outbound| outbound.order.of == of);
        moves
            .map(|outbound| &outbound.sender)
            .chain(&sequence.outgoing)
    }

    /// Whether a block of the sequence is being read for a move, which may be over.
    pub(crate) fn reads_for_move(&self, of: HandoffId) -> bool {
        let mut moves = self.moves.values();
        moves.any(|outbound| outbound.order.of == of && !outbound.sender.is_settled())
    }

    /// Whether any block is being read for a move.
    pub(crate) fn reads_for_any_move(&self) -> bool {
        let mut moves = self.moves.values();
        moves.any(|outbound| !outbound.sender.is_settled())
    }

    /// Whether the block that the sequence writes to next, or its state, is being read for a move
    /// that is over.
    pub(crate) fn reads_last_block(&self, sequence: &WorkerSequence, block_tokens: u32) -> bool {
        let ordinal = sequence.kv.computed() / block_tokens;
        let mut moves = self.moves.values();
        moves.any(|outbound| {
            let of_sequence = outbound.order.of == sequence.handoff();
            of_sequence && is_reading(&outbound.sender, ordinal..ordinal + 1)
        })
    }

    /// Whether a block or the state of the sequence is being read for a hand-off or a move.
    pub(crate) fn reads_any_block(&self, sequence: &WorkerSequence) -> bool {
        self.senders_of(sequence).any(|sender| !sender.is_settled())
    }

    /// Whether one of these blocks of the sequence, or its state, is being read.
    pub(crate) fn reads_blocks(&self, sequence: &WorkerSequence, ordinals: Range<u32>) -> bool {
        let mut senders = self.senders_of(sequence);
        senders.any(|sender| is_reading(sender, ordinals.clone()))
    }

    // === memory ===

    /// How the hand-off ended, if it was here lately.
    pub(crate) fn ended(&self, handoff: HandoffId) -> Option<EndedHandoff> {
        self.recently_ended.trace(handoff)
    }

    /// Remembers a hand-off that is over and did not land.
    pub(crate) fn remember(&mut self, handoff: HandoffId, end: EndedHandoff) {
        self.recently_ended.add(handoff, end);
    }

    /// Remembers a hand-off that landed and is over.
    pub(super) fn remember_landed(&mut self, handoff: HandoffId, context: &WorkerContext) {
        // The sender repeats its seal for up to its stall limit, and may have begun late.
        let keep = context.limits().stall_max * 2;
        self.recently_ended.add_landed(handoff, context.now(), keep);
    }

    pub(super) fn fence(&mut self, peer: WorkerRef) {
        self.fenced.add(peer);
    }

    /// Whether this worker can write nothing here any more.
    pub(crate) fn is_fenced(&self, peer: WorkerRef) -> bool {
        self.fenced.covers(peer)
    }

    // === looking ===

    /// When a hand-off stalls, or a packet is repeated.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let all = [self.stalls.next(), self.resends.next()];
        all.into_iter().flatten().min()
    }

    pub(crate) fn hash_moves(&self, hasher: &mut impl Hasher) {
        for (handoff, outbound) in &self.moves {
            (handoff, &outbound.order, &outbound.sender).hash(hasher);
            (outbound.exported, outbound.paused_since.is_some()).hash(hasher);
        }
        self.recently_ended.hash(hasher);
    }

    /// Time left of each stall deadline.
    pub(crate) fn stalls(&self, now: Time) -> impl Iterator<Item = (HandoffId, Duration)> + '_ {
        let stalls = self.stalls.iter();
        stalls.map(move |(handoff, until)| (handoff, until.since(now)))
    }

    pub(crate) fn hash_resends(&self, now: Time, hasher: &mut impl Hasher) {
        for (handoff, due, span) in self.resends.iter() {
            (handoff, due.map(|due| due.since(now)), span).hash(hasher);
        }
    }

    pub(crate) fn fenced(&self) -> &FencedPeers {
        &self.fenced
    }

    /// Asserts that a move is open exactly as long as its sequence names it, and is dropped once
    /// nothing is left of it; and that exactly those wait that should.
    pub(crate) fn check(&self, sequences: &SequenceTable) {
        for (handoff, outbound) in &self.moves {
            assert_eq!(*handoff, outbound.order.handoff);
            outbound.sender.check();
            let sequence = sequences.get(outbound.order.of);
            let named = sequence.is_some_and(|s| s.moving == Some(*handoff));
            assert_eq!(
                named,
                outbound.sender.is_open(),
                "a move is open without its sequence, or the reverse: {outbound:?}"
            );
            let read = !outbound.sender.is_settled();
            assert!(
                named || read,
                "a finished move was not dropped: {outbound:?}"
            );
            assert!(
                sequence.is_some() || !read,
                "a move reads blocks of a released sequence"
            );
            assert!(
                !sequences.contains(*handoff),
                "a hand-off is both a sequence and a move"
            );
        }
        for sequence in sequences.iter() {
            let is_known = |handoff| self.moves.contains_key(&handoff);
            assert!(
                sequence.moving.is_none_or(is_known),
                "a sequence names a move that does not exist"
            );
        }
        let mut all: Vec<_> = sequences.handoffs().collect();
        all.extend(self.moves.keys());
        all.sort_unstable();
        let all = all.into_iter();
        let waits = |handoff: &HandoffId| self.waits_for_peer(sequences, *handoff);
        self.stalls.check(all.clone().filter(waits));
        let asks = |handoff: &HandoffId| self.awaits_answer(sequences, *handoff);
        self.resends.check(all.filter(asks));
    }
}

/// Whether a block with one of these ordinals is being read, of either plane, or the state.
fn is_reading(sender: &HandoffSender, mut ordinals: Range<u32>) -> bool {
    let reads =
        |ordinal| sender.is_reading(KvUnit::block(ordinal)) || sender.is_reading_window(ordinal);
    ordinals.any(reads) || sender.is_reading_state()
}

/// How long to wait for frames of a hand-off whose seal is here; `None` if it waits for something
/// else.
fn frames_wait(
    context: &WorkerContext,
    sequence: Option<&WorkerSequence>,
    forecast: &WorkForecast,
) -> Option<Duration> {
    let receiver = sequence?.incoming.as_ref()?;
    let sealed: &HandoffReceiver = receiver.is_sealed().then_some(receiver)?;
    let limits = context.limits();
    let block_bytes = u64::from(limits.capacity.block_bytes);
    let prices = forecast.prices();
    let block = prices.transfer(sealed.sender().worker, block_bytes);
    let wait = FRAMES_WAIT_MIN.max(block.saturating_mul(FRAMES_WAIT_BLOCKS));
    Some(wait.min(limits.stall_max))
}

/// Learns the link's price: all that was left of a prompt when its last token was drawn has been
/// sent.
fn measure_link(
    context: &WorkerContext,
    sequence: Option<&WorkerSequence>,
    forecast: &mut WorkForecast,
) {
    let Some(sequence) = sequence else {
        return;
    };
    let (Some((drawn, before)), Some(sender)) = (sequence.times.drawn, &sequence.outgoing) else {
        return;
    };
    let bytes = sender.bytes().saturating_sub(before);
    if bytes >= BLOCKS_LEAST * u64::from(context.limits().capacity.block_bytes) {
        let took = context.now().since(drawn);
        forecast.observe_transfer(sender.receiver().worker, bytes, took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerLimits;
    use crate::sequences::sample::sequence;
    use crate::test_worker::{MS, PEER, handoff, limits};
    use cleave_domain::{BlockHash, Failure, HandoffTarget, MigrateOrder};

    struct Fixture {
        context: WorkerContext,
        sequences: SequenceTable,
        forecast: WorkForecast,
        peers: PeerTraffic,
    }

    fn sender(number: u64) -> HandoffSender {
        let target = HandoffTarget {
            worker: PEER,
            present: 0,
            blocks: Vec::new(),
            state: None,
            window: None,
        };
        HandoffSender::new(
            handoff(number),
            target,
            &crate::test_worker::limits().capacity,
        )
    }

    impl Fixture {
        fn new(limits: WorkerLimits) -> Self {
            Self {
                sequences: SequenceTable::new(&limits),
                forecast: WorkForecast::new(&limits),
                peers: PeerTraffic::default(),
                context: WorkerContext::new(limits),
            }
        }

        /// Adds a sequence whose seal was sent, and is not answered.
        fn add_sealed(&mut self, number: u64) {
            let mut sequence = sequence(number, 0);
            let mut sender = sender(number);
            let (content, output) = (BlockHash([0; 16]), vec![1]);
            sender.handle(SenderInput::Sampled { content, output });
            while sender.poll().is_some() {}
            assert!(sender.is_sealed());
            sequence.outgoing = Some(sender);
            let until = self.context.now() + MS * 1000;
            self.sequences.add(sequence, until);
            self.watch(number);
            self.peers.check(&self.sequences);
        }

        fn watch(&mut self, number: u64) {
            let number = handoff(number);
            let (context, forecast) = (&self.context, &self.forecast);
            self.peers.watch(context, &self.sequences, forecast, number);
        }

        fn next_stalled(&mut self) -> Option<HandoffId> {
            let (context, forecast) = (&self.context, &self.forecast);
            self.peers.next_stalled(context, &self.sequences, forecast)
        }

        /// Packets sent again by the time `at`.
        fn resent(&mut self, at: Duration) -> usize {
            self.context.advance(Time::ZERO + at);
            let (context, sequences) = (&mut self.context, &mut self.sequences);
            self.peers.resend_due(context, sequences);
            let outputs = std::iter::from_fn(|| context.poll());
            let seals = outputs.filter(|output| {
                let packet = |packet: &Packet| matches!(packet, Packet::Seal(_));
                matches!(output, WorkerOutput::Send { packet: sent, .. } if packet(sent))
            });
            seals.count()
        }
    }

    #[test]
    fn a_hand_off_without_progress_stalls_once() {
        let mut fixture = Fixture::new(limits());
        let stall_max = fixture.context.limits().stall_max;
        fixture.add_sealed(1);
        let end = Time::ZERO + stall_max;
        fixture.context.advance(end - Duration::from_nanos(1));
        assert_eq!(fixture.next_stalled(), None);
        fixture.context.advance(end);
        assert_eq!(fixture.next_stalled(), Some(handoff(1)));
        assert_eq!(fixture.next_stalled(), None);
        fixture.watch(1);
        fixture.peers.check(&fixture.sequences);
        assert_eq!(fixture.next_stalled(), None, "it has its full time again");
    }

    #[test]
    fn an_unanswered_seal_is_sent_again() {
        let mut fixture = Fixture::new(limits());
        fixture.add_sealed(1);
        // A sixteenth of the stall limit of 10 s, then twice as long.
        let sent = [624, 625, 1874, 1875].map(|millis| fixture.resent(MS * millis));
        assert_eq!(sent, [0, 1, 0, 1]);
        fixture.peers.forget(handoff(1));
        assert_eq!(fixture.resent(MS * 100_000), 0);
        assert_eq!(fixture.peers.deadline(), None);
    }

    #[test]
    fn a_move_is_kept_until_it_is_over() {
        let mut fixture = Fixture::new(limits());
        let mut moving = sequence(1, 20);
        moving.moving = Some(handoff(2));
        fixture.sequences.add(moving.activated(), Time::ZERO);
        fixture.peers.begin_move(OutboundMigration {
            order: MigrateOrder {
                handoff: handoff(2),
                of: handoff(1),
                target: HandoffTarget {
                    worker: PEER,
                    present: 0,
                    blocks: Vec::new(),
                    state: None,
                    window: None,
                },
                tokens: 20,
            },
            sender: sender(2),
            exported: 0,
            ordered: Time::ZERO,
            paused_since: None,
        });
        fixture.peers.check(&fixture.sequences);
        assert_eq!(fixture.peers.moves_to(PEER), [handoff(2)]);
        assert_eq!(fixture.peers.end_move(handoff(2)), None, "it is open");
        let cause = AbandonCause::Failed(Failure::Rejected);
        let outbound = fixture.peers.outbound_mut(handoff(2));
        let outbound = outbound.expect("it began");
        outbound.sender.handle(SenderInput::GiveUp { cause });
        assert_eq!(fixture.peers.end_move(handoff(2)), Some(handoff(1)));
        let ended = fixture.peers.ended(handoff(2));
        assert_eq!(ended, Some(EndedHandoff::Ended));
        assert!(!fixture.peers.is_move(handoff(2)));
    }

    #[test]
    #[should_panic(expected = "deadline are wrong")]
    fn a_hand_off_that_waits_without_a_deadline_is_found() {
        let mut fixture = Fixture::new(limits());
        fixture.add_sealed(1);
        fixture.peers.stalls.remove(handoff(1));
        fixture.peers.check(&fixture.sequences);
    }
}
