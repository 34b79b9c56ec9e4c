//! The receiving worker's end.
//!
//! Owns: which bytes of which reserved block have come, the verdict, and the quarantine of blocks
//! that the sender writes to itself.
//! Never: lets a write reach a block for another generation, from another sender, or twice; never
//! depends on the order in which frames and seal arrive.
//! Invariant: `Landed` is said at most once, and only when the seal fits and every byte is in the
//! pool; after `Landed` or `Ended` every frame is discarded. A block may still be written to until
//! [`Receiver::settled`].

use super::{Digest, Writer};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{BlockHash, BlockRef, Cause, Failure, HandoffId, TokenId, WorkerRef};
use std::collections::{BTreeSet, VecDeque};

/// What was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expected {
    /// The attempt.
    pub handoff: HandoffId,
    /// Who alone may write.
    pub sender: WorkerRef,
    /// Leading blocks of the sequence that are here already.
    pub present: u32,
    /// Where the others go, in order.
    pub blocks: Vec<BlockRef>,
    /// Bytes of each block.
    pub block_bytes: u32,
    /// Tokens of each block.
    pub block_tokens: u32,
    /// Tokens of the vocabulary: a seal with another one is damaged, or of another model.
    pub vocab_size: u32,
    /// Tokens of the sequence when it was reserved.
    pub tokens: u32,
    /// Their hash, as in [`Seal::content`].
    pub content: BlockHash,
    /// Who writes the frames to the blocks.
    pub writer: Writer,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// A frame came.
    Frame {
        /// From whom.
        from: WorkerRef,
        /// Where it wants to go.
        block: BlockRef,
        /// Which bytes.
        part: BlockPart,
        /// Their checksum; `None` if what came does not have the checksum that was sent with it.
        checksum: Option<u64>,
    },
    /// The seal came.
    Seal {
        /// From whom.
        from: WorkerRef,
        /// What.
        seal: Seal,
    },
    /// The sender no longer wants it.
    Abandoned {
        /// Who says so.
        from: WorkerRef,
        /// Why.
        cause: Cause,
    },
    /// The write of these bytes is over.
    Imported {
        /// Which.
        part: BlockPart,
        /// Whether they are in the pool; if not, why.
        outcome: Result<(), Failure>,
    },
    /// The link to the sender broke.
    LinkLost,
    /// The worker no longer wants it: the sender is told why.
    GivenUp {
        /// Why.
        cause: Cause,
    },
    /// The sender writes nothing of this any more.
    Stopped {
        /// Who says so.
        from: WorkerRef,
    },
    /// Nothing that the sender still does can reach the blocks.
    Severed,
    /// Nothing came for a while: a sender that was asked to stop is asked again.
    StoodStill,
}

/// What must be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// Write the frame's payload into the pool, then `Imported`.
    Import {
        /// Which frame.
        part: BlockPart,
        /// To where.
        block: BlockRef,
    },
    /// Drop the frame's payload.
    Discard {
        /// Which frame.
        part: BlockPart,
    },
    /// Say this to the sender.
    Send(Packet),
    /// Everything is here.
    Landed {
        /// Output tokens drawn since the reservation; the last one's KV is not here.
        output: Vec<TokenId>,
    },
    /// It will never land; said once.
    Ended(Cause),
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    expected: Expected,
    state: State,
    /// Frames accepted. None overlaps another.
    accepted: BTreeSet<BlockPart>,
    /// For each reserved block, the bytes accepted.
    accepted_bytes: Vec<u32>,
    /// Frames accepted whose write is not over.
    importing: BTreeSet<BlockPart>,
    digest: Digest,
    /// The sender may write to the blocks itself, at any time.
    at_large: bool,
    outputs: VecDeque<Output>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    Receiving { seal: Option<Seal> },
    Landed,
    Ended,
}

/// Where a frame belongs.
enum Place {
    /// Bytes of reserved block `.0` that did not come yet.
    New(usize),
    /// This very frame came before.
    Repeated,
    /// Damaged, overlapping, too much, or not for a block that was reserved.
    Nowhere,
}

impl Receiver {
    /// Expects the blocks of one hand-off.
    pub fn new(expected: Expected) -> Self {
        Self {
            accepted_bytes: vec![0; expected.blocks.len()],
            at_large: expected.writer == Writer::Sender,
            expected,
            state: State::Receiving { seal: None },
            accepted: BTreeSet::new(),
            importing: BTreeSet::new(),
            digest: Digest::default(),
            outputs: VecDeque::new(),
        }
    }

    /// The one who may write.
    pub fn sender(&self) -> WorkerRef {
        self.expected.sender
    }

    /// Bytes accepted.
    pub fn bytes(&self) -> u64 {
        self.accepted_bytes.iter().copied().map(u64::from).sum()
    }

    /// Whether the verdict is still out.
    pub fn open(&self) -> bool {
        matches!(self.state, State::Receiving { .. })
    }

    /// Whether the seal came and the verdict is still out: then only bytes are missing.
    pub fn sealed(&self) -> bool {
        matches!(self.state, State::Receiving { seal: Some(_) })
    }

    /// Whether everything came.
    pub fn landed(&self) -> bool {
        self.state == State::Landed
    }

    /// Whether it is over, and the sender may still write to the blocks.
    pub fn quarantined(&self) -> bool {
        self.state == State::Ended && self.at_large
    }

    /// Whether no write of this worker's to a reserved block is under way.
    pub fn idle(&self) -> bool {
        self.importing.is_empty()
    }

    /// Whether no write to a reserved block is under way, nor can be.
    pub fn settled(&self) -> bool {
        self.idle() && !self.quarantined()
    }

    /// Takes in what happened.
    pub fn handle(&mut self, input: Input) {
        let sender = self.expected.sender;
        match input {
            Input::Frame { from, part, .. } if from != sender || !self.open() => {
                self.outputs.push_back(Output::Discard { part });
            }
            Input::Frame {
                block,
                part,
                checksum,
                ..
            } => self.frame(block, part, checksum),
            Input::Seal { from, seal } if from == sender => self.seal(seal),
            Input::Abandoned { from, cause } if from == sender => self.end(cause),
            Input::Seal { .. } | Input::Abandoned { .. } => {}
            Input::Imported { part, outcome } => self.imported(part, outcome),
            Input::LinkLost => self.end(Cause::Failed(Failure::LinkLost)),
            Input::GivenUp { cause } => self.give_up(cause),
            // Whoever says that it stopped before it was asked says it of something else.
            Input::Stopped { from } if from == sender && !self.open() => self.at_large = false,
            Input::Stopped { .. } => {}
            Input::Severed => {
                self.at_large = false;
                self.end(Cause::Failed(Failure::LinkLost));
            }
            Input::StoodStill => self.ask_to_stop(),
        }
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Asserts the invariant.
    pub fn check(&self) {
        let mut bytes = vec![0; self.accepted_bytes.len()];
        let mut last = None;
        for part in &self.accepted {
            bytes[(part.ordinal - self.expected.present) as usize] += part.len;
            if let Some((ordinal, end)) = last {
                assert!(part.ordinal > ordinal || part.offset >= end, "overlap");
            }
            last = Some((part.ordinal, part.offset + part.len));
        }
        assert_eq!(bytes, self.accepted_bytes, "bytes accepted");
        let size = self.expected.block_bytes;
        assert!(
            bytes.iter().all(|bytes| *bytes <= size),
            "more than a block"
        );
        assert!(self.importing.is_subset(&self.accepted), "unasked import");
        if self.state == State::Landed {
            assert!(self.settled(), "landed before the last import");
        }
        if self.expected.writer == Writer::Receiver {
            assert!(!self.at_large, "the sender cannot write");
        }
    }

    fn frame(&mut self, block: BlockRef, part: BlockPart, checksum: Option<u64>) {
        match (self.place(block, part), checksum) {
            (Place::New(i), Some(checksum)) => {
                self.accepted_bytes[i] += part.len;
                self.accepted.insert(part);
                self.importing.insert(part);
                self.digest.add(part, checksum);
                self.outputs.push_back(Output::Import { part, block });
            }
            (Place::Repeated, _) => self.outputs.push_back(Output::Discard { part }),
            (Place::Nowhere, _) | (Place::New(_), None) => {
                self.outputs.push_back(Output::Discard { part });
                self.give_up(Cause::Failed(Failure::Corrupt));
            }
        }
    }

    fn place(&self, block: BlockRef, part: BlockPart) -> Place {
        let BlockPart {
            ordinal,
            offset,
            len,
        } = part;
        let index = ordinal.checked_sub(self.expected.present);
        let Some(i) = index.and_then(|index| usize::try_from(index).ok()) else {
            return Place::Nowhere;
        };
        let end = offset.checked_add(len);
        if self.expected.blocks.get(i) != Some(&block)
            || len == 0
            || end.is_none_or(|end| end > self.expected.block_bytes)
        {
            return Place::Nowhere;
        }
        if self.accepted.contains(&part) {
            return Place::Repeated;
        }
        // Accepted frames do not overlap, so only the neighbours can.
        let here = |len| BlockPart {
            ordinal,
            offset,
            len,
        };
        let before = self.accepted.range(..here(0)).next_back();
        let after = self.accepted.range(here(0)..).next();
        let overlaps = |other: &BlockPart| {
            other.ordinal == ordinal
                && other.offset < offset + len
                && offset < other.offset + other.len
        };
        if before.is_some_and(overlaps) || after.is_some_and(overlaps) {
            Place::Nowhere
        } else {
            Place::New(i)
        }
    }

    fn seal(&mut self, seal: Seal) {
        match &mut self.state {
            State::Receiving { seal: known @ None } => {
                *known = Some(seal);
                self.judge();
            }
            State::Receiving { seal: Some(known) } if *known != seal => {
                self.give_up(Cause::Failed(Failure::Corrupt));
            }
            // A repeated seal means that the answer may be lost.
            State::Landed => self.answer_landed(),
            State::Ended => self.answer_abandoned(Cause::Cancelled),
            State::Receiving { .. } => {}
        }
    }

    fn imported(&mut self, part: BlockPart, outcome: Result<(), Failure>) {
        self.importing.remove(&part);
        match outcome {
            Ok(()) => self.judge(),
            Err(failure) => self.give_up(Cause::Failed(failure)),
        }
    }

    /// Lands once seal, blocks and digest agree; fails once they no longer can.
    fn judge(&mut self) {
        let State::Receiving { seal: Some(seal) } = &self.state else {
            return;
        };
        let vocab_size = self.expected.vocab_size;
        let foreign = seal.output.iter().any(|token| *token >= vocab_size);
        let Some(blocks) = self.blocks_due(seal).filter(|_| !foreign) else {
            return self.give_up(Cause::Failed(Failure::Corrupt));
        };
        let (due, rest) = self.accepted_bytes.split_at(blocks);
        if rest.iter().any(|bytes| *bytes > 0) {
            return self.give_up(Cause::Failed(Failure::Corrupt));
        }
        if due.iter().any(|bytes| *bytes < self.expected.block_bytes) {
            return;
        }
        if seal.digest != self.digest_due(seal) || seal.content != self.expected.content {
            return self.give_up(Cause::Failed(Failure::Corrupt));
        }
        if self.settled() {
            let output = seal.output.clone();
            self.state = State::Landed;
            // It sealed after its last write.
            self.at_large = false;
            self.answer_landed();
            self.outputs.push_back(Output::Landed { output });
        }
    }

    /// The digest that this seal has to carry.
    fn digest_due(&self, seal: &Seal) -> u64 {
        self.digest
            .close(seal.handoff, seal.blocks_count, seal.content, &seal.output)
    }

    /// How many of the reserved blocks the seal speaks of; `None` if it speaks of others.
    fn blocks_due(&self, seal: &Seal) -> Option<usize> {
        let drawn = u32::try_from(seal.output.len()).ok()?.checked_sub(1)?;
        let position = self.expected.tokens.checked_add(drawn)?;
        let blocks = position.div_ceil(self.expected.block_tokens);
        let due = blocks.checked_sub(self.expected.present)?;
        let reserved = self.expected.blocks.len();
        let fits = due == seal.blocks_count && due as usize <= reserved;
        fits.then_some(due as usize)
    }

    fn answer_landed(&mut self) {
        let handoff = self.expected.handoff;
        let packet = Packet::Landed { handoff };
        self.outputs.push_back(Output::Send(packet));
    }

    fn answer_abandoned(&mut self, cause: Cause) {
        let handoff = self.expected.handoff;
        let packet = Packet::Abandoned { handoff, cause };
        self.outputs.push_back(Output::Send(packet));
    }

    fn give_up(&mut self, cause: Cause) {
        if self.open() {
            self.answer_abandoned(cause.clone());
            self.end(cause);
        }
    }

    /// Ends without telling the sender: it knows, or cannot be told.
    fn end(&mut self, cause: Cause) {
        if self.open() {
            self.state = State::Ended;
            self.ask_to_stop();
            self.outputs.push_back(Output::Ended(cause));
        }
    }

    fn ask_to_stop(&mut self) {
        if self.quarantined() {
            let handoff = self.expected.handoff;
            let packet = Packet::Stop { handoff };
            self.outputs.push_back(Output::Send(packet));
        }
    }
}
