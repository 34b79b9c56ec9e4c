//! The receiving end of a hand-off.
//!
//! Owns: the record of the bytes that arrived for each reserved block and for each piece of state
//! and window, the verdict, and the quarantine of blocks that the sender writes to itself.
//! Never: accepts a write for another generation, from another sender, or twice; never depends on
//! the order in which frames and seal arrive.
//! Invariant: `Landed` is emitted at most once, and only when the seal matches and every byte is in
//! the pool; after `Landed` or `Ended` every frame is discarded. A block may still be written to
//! until [`HandoffReceiver::is_settled`].

use super::{HandoffDigest, PoolWriter};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{
    AbandonCause, BlockHash, BlockRef, Capacity, Failure, HandoffId, KvPlane, KvUnit, TokenId,
    WindowTarget, WorkerRef,
};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// The reservation that a hand-off fills.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExpectedHandoff {
    pub handoff: HandoffId,
    /// The only worker that may write.
    pub sender: WorkerRef,
    /// Leading blocks of the sequence that are already here.
    pub present: u32,
    /// The reserved blocks for the others, in order.
    pub blocks: Vec<BlockRef>,
    /// The reserved state slot, where the model has states.
    pub state: Option<BlockRef>,
    /// The reserved blocks of the window plane, where the model has one.
    pub window: Option<WindowTarget>,
    /// The sizes of the planes' units.
    pub capacity: Capacity,
    /// The size of the vocabulary: a seal with another token is damaged, or of another model.
    pub vocab_size: u32,
    /// The length of the sequence at the time of the reservation.
    pub tokens: u32,
    /// The hash of those tokens, as in [`Seal::content`].
    pub content: BlockHash,
    /// The worker that writes the frames to the blocks.
    pub writer: PoolWriter,
}

/// An event for the machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverInput {
    Frame {
        /// The worker that sent it.
        from: WorkerRef,
        /// The block that it names.
        block: BlockRef,
        /// The byte range of the sequence.
        part: BlockPart,
        /// The checksum of the payload; `None` if the payload does not match the checksum sent with
        /// it.
        checksum: Option<u64>,
    },
    Seal {
        /// The worker that sent it.
        from: WorkerRef,
        seal: Seal,
    },
    /// The sender no longer wants the hand-off.
    Abandoned {
        /// The worker that sent it.
        from: WorkerRef,
        cause: AbandonCause,
    },
    /// The write of these bytes has ended.
    Imported {
        part: BlockPart,
        /// `Ok` if they are in the pool.
        outcome: Result<(), Failure>,
    },
    /// The link to the sender broke.
    LinkLost,
    /// This worker no longer wants the hand-off: the reason is sent to the sender.
    GiveUp { cause: AbandonCause },
    /// The sender no longer writes anything of this hand-off.
    Stopped {
        /// The worker that sent it.
        from: WorkerRef,
    },
    /// The sender is fenced: it can no longer reach the blocks.
    Fenced,
    /// No packet arrived for a while: a sender that was sent `Stop` is sent it again.
    Stalled,
}

/// An action for the driver; actions are performed in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverOutput {
    /// Write the payload of the frame into the pool, then report `Imported`.
    Import { part: BlockPart, block: BlockRef },
    /// Drop the payload of the frame.
    Discard { part: BlockPart },
    /// Send this to the sender.
    Send(Packet),
    /// The hand-off has landed.
    Landed {
        /// Output tokens drawn since the reservation; the KV of the last one is not here.
        output: Vec<TokenId>,
    },
    /// The hand-off will never land; emitted once.
    Ended(AbandonCause),
}

/// The receiving end of one hand-off.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HandoffReceiver {
    expected: ExpectedHandoff,
    state: ReceiverState,
    /// The accepted frames, none of which overlaps another.
    accepted: BTreeSet<BlockPart>,
    /// Arrivals in the plane of blocks.
    blocks: PlaneArrival,
    /// The state; without pieces if there is none.
    state_pieces: PlaneArrival,
    /// The pieces of the window's reserved blocks; without pieces if there is no window.
    window_pieces: PlaneArrival,
    /// The accepted frames whose write has not ended.
    importing: BTreeSet<BlockPart>,
    /// Whether the sender may write to the blocks itself at any time.
    sender_may_write: bool,
    outputs: VecDeque<ReceiverOutput>,
}

/// The content that arrived for one plane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PlaneArrival {
    /// The bytes accepted for each reserved block, or for each piece of state or window.
    accepted_bytes: Vec<u32>,
    digest: HandoffDigest,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ReceiverState {
    Receiving { seal: Option<Seal> },
    Landed,
    Ended,
}

/// The check of a frame against the reservation and the accepted frames.
enum FramePlacement {
    /// New bytes of a reserved block, or of a piece of the state.
    New,
    /// The same frame was accepted before.
    Duplicate,
    /// Damaged, overlapping, too long, or not for a reserved block.
    Invalid,
}

impl PlaneArrival {
    fn new(units_count: usize) -> Self {
        Self {
            accepted_bytes: vec![0; units_count],
            digest: HandoffDigest::default(),
        }
    }

    /// Counts a frame of the `index`th block or piece.
    fn accept(&mut self, index: u32, part: BlockPart, checksum: u64) {
        self.accepted_bytes[index as usize] += part.len;
        self.digest.add_frame(part, checksum);
    }

    fn bytes(&self) -> u64 {
        self.accepted_bytes.iter().copied().map(u64::from).sum()
    }
}

impl HandoffReceiver {
    pub fn new(expected: ExpectedHandoff) -> Self {
        let pieces = expected.capacity.state_pieces();
        assert_eq!(
            expected.state.is_some(),
            pieces > 0,
            "a slot exactly where the model has states"
        );
        let window_pieces = expected.capacity.window_pieces() as usize;
        assert_eq!(
            expected.window.is_some(),
            window_pieces > 0,
            "window blocks exactly where the model has a window"
        );
        let window_blocks = expected.window.as_ref().map_or(0, |w| w.blocks.len());
        Self {
            window_pieces: PlaneArrival::new(window_blocks * window_pieces),
            blocks: PlaneArrival::new(expected.blocks.len()),
            state_pieces: PlaneArrival::new(pieces as usize),
            sender_may_write: expected.writer == PoolWriter::Sender,
            expected,
            state: ReceiverState::Receiving { seal: None },
            accepted: BTreeSet::new(),
            importing: BTreeSet::new(),
            outputs: VecDeque::new(),
        }
    }

    /// The only worker that may write.
    pub fn sender(&self) -> WorkerRef {
        self.expected.sender
    }

    pub fn bytes(&self) -> u64 {
        self.blocks.bytes() + self.state_pieces.bytes() + self.window_pieces.bytes()
    }

    /// Whether the hand-off has neither landed nor ended.
    pub fn is_open(&self) -> bool {
        matches!(self.state, ReceiverState::Receiving { .. })
    }

    /// Whether the seal arrived and only bytes are missing.
    pub fn is_sealed(&self) -> bool {
        matches!(self.state, ReceiverState::Receiving { seal: Some(_) })
    }

    pub fn has_landed(&self) -> bool {
        self.state == ReceiverState::Landed
    }

    /// Whether the hand-off has ended while the sender may still write to the blocks.
    pub fn is_quarantined(&self) -> bool {
        self.state == ReceiverState::Ended && self.sender_may_write
    }

    /// Whether no write of this worker to a reserved block is in progress.
    pub fn is_idle(&self) -> bool {
        self.importing.is_empty()
    }

    /// Whether no write to a reserved block is in progress or can begin.
    pub fn is_settled(&self) -> bool {
        self.is_idle() && !self.is_quarantined()
    }

    pub fn handle(&mut self, input: ReceiverInput) {
        let sender = self.expected.sender;
        match input {
            ReceiverInput::Frame { from, part, .. } if from != sender || !self.is_open() => {
                self.outputs.push_back(ReceiverOutput::Discard { part });
            }
            ReceiverInput::Frame {
                block,
                part,
                checksum,
                ..
            } => self.handle_frame(block, part, checksum),
            ReceiverInput::Seal { from, seal } if from == sender => self.handle_seal(seal),
            ReceiverInput::Abandoned { from, cause } if from == sender => self.end(cause),
            ReceiverInput::Seal { .. } | ReceiverInput::Abandoned { .. } => {}
            ReceiverInput::Imported { part, outcome } => self.handle_imported(part, outcome),
            ReceiverInput::LinkLost => self.end(AbandonCause::Failed(Failure::LinkLost)),
            ReceiverInput::GiveUp { cause } => self.abandon(cause),
            // A `Stopped` that was not requested refers to something else.
            ReceiverInput::Stopped { from } if from == sender && !self.is_open() => {
                self.sender_may_write = false
            }
            ReceiverInput::Stopped { .. } => {}
            ReceiverInput::Fenced => {
                self.sender_may_write = false;
                self.end(AbandonCause::Failed(Failure::LinkLost));
            }
            ReceiverInput::Stalled => self.send_stop_if_quarantined(),
        }
    }

    /// The next action, if any.
    pub fn poll(&mut self) -> Option<ReceiverOutput> {
        self.outputs.pop_front()
    }

    pub fn check(&self) {
        let mut bytes = [&self.blocks, &self.state_pieces, &self.window_pieces]
            .map(|plane| vec![0; plane.accepted_bytes.len()]);
        let mut last = None;
        for part in &self.accepted {
            let (unit, end) = (part.unit(), part.offset + part.len);
            let [blocks, pieces, window] = &mut bytes;
            let plane = match unit.plane {
                KvPlane::Blocks => blocks,
                KvPlane::State => pieces,
                KvPlane::Window => window,
            };
            plane[(unit.ordinal - self.first_unit(unit.plane)) as usize] += part.len;
            if let Some((before, end_before)) = last {
                assert!(unit > before || part.offset >= end_before, "overlap");
            }
            assert!(end <= self.expected.capacity.unit_bytes(unit), "too long");
            last = Some((unit, end));
        }
        let [blocks, pieces, window] = bytes;
        assert_eq!(
            window, self.window_pieces.accepted_bytes,
            "bytes of a window"
        );
        assert_eq!(blocks, self.blocks.accepted_bytes, "bytes of blocks");
        assert_eq!(pieces, self.state_pieces.accepted_bytes, "bytes of a state");
        assert!(self.importing.is_subset(&self.accepted), "unasked import");
        if self.state == ReceiverState::Landed {
            assert!(self.is_settled(), "landed before the last import");
        }
        if self.expected.writer == PoolWriter::Receiver {
            assert!(!self.sender_may_write, "the sender cannot write");
        }
    }

    fn handle_frame(&mut self, block: BlockRef, part: BlockPart, checksum: Option<u64>) {
        match (self.placement(block, part), checksum) {
            (FramePlacement::New, Some(checksum)) => {
                let index = part.ordinal - self.first_unit(part.plane);
                let plane = match part.plane {
                    KvPlane::Blocks => &mut self.blocks,
                    KvPlane::State => &mut self.state_pieces,
                    KvPlane::Window => &mut self.window_pieces,
                };
                plane.accept(index, part, checksum);
                self.accepted.insert(part);
                self.importing.insert(part);
                self.outputs
                    .push_back(ReceiverOutput::Import { part, block });
            }
            (FramePlacement::Duplicate, _) => {
                self.outputs.push_back(ReceiverOutput::Discard { part })
            }
            (FramePlacement::Invalid, _) | (FramePlacement::New, None) => {
                self.outputs.push_back(ReceiverOutput::Discard { part });
                self.abandon(AbandonCause::Failed(Failure::Corrupt));
            }
        }
    }

    fn placement(&self, block: BlockRef, part: BlockPart) -> FramePlacement {
        let BlockPart { offset, len, .. } = part;
        let unit = part.unit();
        let end = offset.checked_add(len);
        if self.target(unit) != Some(block)
            || len == 0
            || end.is_none_or(|end| end > self.expected.capacity.unit_bytes(unit))
        {
            return FramePlacement::Invalid;
        }
        if self.accepted.contains(&part) {
            return FramePlacement::Duplicate;
        }
        // Accepted frames do not overlap, so only the neighbours can overlap this one.
        let here = |len| BlockPart { len, ..part };
        let before = self.accepted.range(..here(0)).next_back();
        let after = self.accepted.range(here(0)..).next();
        let overlaps = |other: &BlockPart| {
            other.unit() == unit && other.offset < offset + len && offset < other.offset + other.len
        };
        if before.is_some_and(overlaps) || after.is_some_and(overlaps) {
            FramePlacement::Invalid
        } else {
            FramePlacement::New
        }
    }

    /// The ordinal of the first block or piece of a plane that is taken.
    fn first_unit(&self, plane: KvPlane) -> u32 {
        match plane {
            KvPlane::Blocks => self.expected.present,
            KvPlane::State => 0,
            KvPlane::Window => {
                let first = self.expected.window.as_ref().map_or(0, |w| w.first);
                first * self.expected.capacity.window_pieces()
            }
        }
    }

    /// The block or slot into which a block or piece is to be written.
    fn target(&self, unit: KvUnit) -> Option<BlockRef> {
        let index = unit.ordinal.checked_sub(self.first_unit(unit.plane))?;
        match unit.plane {
            KvPlane::Blocks => {
                let index = usize::try_from(index).ok()?;
                self.expected.blocks.get(index).copied()
            }
            KvPlane::Window => {
                let block = index.checked_div(self.expected.capacity.window_pieces())?;
                let window = self.expected.window.as_ref()?;
                window.blocks.get(block as usize).copied()
            }
            KvPlane::State => {
                let exists = unit.ordinal < self.expected.capacity.state_pieces();
                self.expected.state.filter(|_| exists)
            }
        }
    }

    fn handle_seal(&mut self, seal: Seal) {
        match &mut self.state {
            ReceiverState::Receiving {
                seal: received @ None,
            } => {
                *received = Some(seal);
                self.land_or_fail();
            }
            ReceiverState::Receiving {
                seal: Some(received),
            } if *received != seal => {
                self.abandon(AbandonCause::Failed(Failure::Corrupt));
            }
            // The sender repeats a seal if the answer may be lost.
            ReceiverState::Landed => self.send_landed(),
            ReceiverState::Ended => self.send_abandoned(AbandonCause::Cancelled),
            ReceiverState::Receiving { .. } => {}
        }
    }

    fn handle_imported(&mut self, part: BlockPart, outcome: Result<(), Failure>) {
        self.importing.remove(&part);
        match outcome {
            Ok(()) => self.land_or_fail(),
            Err(failure) => self.abandon(AbandonCause::Failed(failure)),
        }
    }

    /// Lands once seal, blocks and digest agree; fails once they no longer can.
    fn land_or_fail(&mut self) {
        let ReceiverState::Receiving { seal: Some(seal) } = &self.state else {
            return;
        };
        let vocab_size = self.expected.vocab_size;
        let foreign = seal.output.iter().any(|token| *token >= vocab_size);
        let Some(blocks) = self.sealed_blocks(seal).filter(|_| !foreign) else {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        };
        if seal.state.is_some() != self.expected.state.is_some() {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        }
        let Some(window) = self.sealed_window(seal) else {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        };
        let others = self.window_pieces.accepted_bytes.iter().enumerate();
        let mut others = others.filter(|(index, _)| !window.contains(index));
        if others.any(|(_, bytes)| *bytes > 0) {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        }
        let (due, rest) = self.blocks.accepted_bytes.split_at(blocks);
        if rest.iter().any(|bytes| *bytes > 0) {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        }
        let block_bytes = self.expected.capacity.block_bytes;
        if due.iter().any(|bytes| *bytes < block_bytes)
            || !self.has_whole_state()
            || !self.has_whole_window(window)
        {
            return;
        }
        let state = seal.state.map(|_| self.state_pieces.digest.value());
        if seal.digest != self.expected_digest(seal)
            || seal.state != state
            || seal
                .window
                .is_some_and(|sent| sent.digest != self.window_pieces.digest.value())
            || seal.content != self.expected.content
        {
            return self.abandon(AbandonCause::Failed(Failure::Corrupt));
        }
        if self.is_settled() {
            let output = seal.output.clone();
            self.state = ReceiverState::Landed;
            // The sender sealed after its last write.
            self.sender_may_write = false;
            self.send_landed();
            self.outputs.push_back(ReceiverOutput::Landed { output });
        }
    }

    /// Whether every byte of the state was accepted, if there is one.
    fn has_whole_state(&self) -> bool {
        let whole = |(ordinal, bytes): (u32, &u32)| {
            let plane = KvPlane::State;
            *bytes == self.expected.capacity.unit_bytes(KvUnit { plane, ordinal })
        };
        (0..).zip(&self.state_pieces.accepted_bytes).all(whole)
    }

    /// Whether every byte of these pieces of the window was accepted.
    fn has_whole_window(&self, mut due: Range<usize>) -> bool {
        let first = self.first_unit(KvPlane::Window);
        due.all(|index| {
            let plane = KvPlane::Window;
            let ordinal = first + u32::try_from(index).expect("pieces are counted in 32 bits");
            let bytes = self.expected.capacity.unit_bytes(KvUnit { plane, ordinal });
            self.window_pieces.accepted_bytes[index] == bytes
        })
    }

    /// The pieces of the window that the seal covers, among the reserved ones; `None` if it does
    /// not match the reservation, or leaves out what the next token reads.
    fn sealed_window(&self, seal: &Seal) -> Option<Range<usize>> {
        let (sent, expected) = match (seal.window, &self.expected.window) {
            (None, None) => return Some(0..0),
            (Some(sent), Some(expected)) => (sent, expected),
            _ => return None,
        };
        let capacity = &self.expected.capacity;
        let position = self.sealed_position(seal)?;
        let end = position.div_ceil(capacity.block_tokens);
        let live = capacity.window()?.first_block(position).min(end);
        let reserved = u32::try_from(expected.blocks.len()).ok()?;
        let covers_live = (expected.first..=live).contains(&sent.first);
        let fits = end.checked_sub(expected.first)? <= reserved;
        let index = |block: u32| ((block - expected.first) * capacity.window_pieces()) as usize;
        (covers_live && fits).then(|| index(sent.first)..index(end))
    }

    /// The tokens whose KV the seal covers.
    fn sealed_position(&self, seal: &Seal) -> Option<u32> {
        let drawn = u32::try_from(seal.output.len()).ok()?.checked_sub(1)?;
        self.expected.tokens.checked_add(drawn)
    }

    /// The digest that this seal must carry.
    fn expected_digest(&self, seal: &Seal) -> u64 {
        self.blocks.digest.seal_digest(seal)
    }

    /// The number of reserved blocks that the seal covers; `None` if it does not match the
    /// reservation.
    fn sealed_blocks(&self, seal: &Seal) -> Option<usize> {
        let position = self.sealed_position(seal)?;
        let blocks = position.div_ceil(self.expected.capacity.block_tokens);
        let due = blocks.checked_sub(self.expected.present)?;
        let reserved = self.expected.blocks.len();
        let fits = due == seal.blocks_count && due as usize <= reserved;
        fits.then_some(due as usize)
    }

    fn send_landed(&mut self) {
        let handoff = self.expected.handoff;
        let packet = Packet::Landed { handoff };
        self.outputs.push_back(ReceiverOutput::Send(packet));
    }

    fn send_abandoned(&mut self, cause: AbandonCause) {
        let handoff = self.expected.handoff;
        let packet = Packet::Abandoned { handoff, cause };
        self.outputs.push_back(ReceiverOutput::Send(packet));
    }

    fn abandon(&mut self, cause: AbandonCause) {
        if self.is_open() {
            self.send_abandoned(cause.clone());
            self.end(cause);
        }
    }

    /// Ends without a packet to the sender, which knows of the end or cannot be reached.
    fn end(&mut self, cause: AbandonCause) {
        if self.is_open() {
            self.state = ReceiverState::Ended;
            self.send_stop_if_quarantined();
            self.outputs.push_back(ReceiverOutput::Ended(cause));
        }
    }

    fn send_stop_if_quarantined(&mut self) {
        if self.is_quarantined() {
            let handoff = self.expected.handoff;
            let packet = Packet::Stop { handoff };
            self.outputs.push_back(ReceiverOutput::Send(packet));
        }
    }
}
