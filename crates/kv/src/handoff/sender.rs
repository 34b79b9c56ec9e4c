//! The sending worker's end.
//!
//! Owns: which blocks were asked to be exported, what became of them, and when to seal.
//! Never: lets go of its blocks while one is being read ([`Sender::settled`]), nor before the
//! receiver has landed or either end gave up.
//! Invariant: the seal is sent after every block left whole and the tokens drawn are known, and every
//! repetition of it is equal to the first; `Done` or `Ended` is said at most once, and never both. `Stopped` is said only when no
//! block is being read, and none will be.

use super::Digest;
use crate::{Packet, Seal};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Cause, Failure, HandoffId, Target, TokenId, WorkerRef,
};
use std::collections::{BTreeSet, VecDeque};

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// A block of the sequence will not change any more. Said in order, once for each block.
    Computed {
        /// Which block of the sequence.
        ordinal: u32,
        /// Where it is.
        from: BlockIndex,
    },
    /// The reading of a block is over.
    Exported {
        /// Which block of the sequence.
        ordinal: u32,
        /// The digest of its frames and its bytes, or why it did not leave.
        outcome: Result<(u64, u64), Failure>,
    },
    /// All of the sequence is computed.
    Sampled {
        /// The hash of the tokens that the receiver was told of, as in [`Seal::content`].
        content: BlockHash,
        /// Tokens drawn since the receiver reserved, `[tokens >= 1]`.
        output: Vec<TokenId>,
    },
    /// The receiver has everything.
    Landed {
        /// Who says so.
        from: WorkerRef,
    },
    /// The receiver no longer wants it.
    Abandoned {
        /// Who says so.
        from: WorkerRef,
        /// Why.
        cause: Cause,
    },
    /// The receiver wants no further write.
    Stop {
        /// Who says so.
        from: WorkerRef,
    },
    /// No answer to the seal came for a while: the seal or the answer may be lost.
    Unanswered,
    /// The link to the receiver broke.
    LinkLost,
    /// The worker no longer wants it: the receiver is told why.
    GivenUp {
        /// Why.
        cause: Cause,
    },
}

/// What must be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// Copy a block out and send it, then `Exported`.
    Export {
        /// From where.
        from: BlockIndex,
        /// Which block of the sequence.
        ordinal: u32,
        /// To where.
        block: BlockRef,
    },
    /// Say this to the receiver.
    Send(Packet),
    /// The receiver has everything.
    Done,
    /// It will never land.
    Ended(Cause),
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    handoff: HandoffId,
    target: Target,
    state: State,
    /// Blocks whose reading is not over.
    exporting: BTreeSet<u32>,
    /// Blocks asked to be exported so far.
    blocks_count: u32,
    bytes: u64,
    digest: Digest,
    /// The receiver waits to hear that nothing is written any more.
    stopping: bool,
    outputs: VecDeque<Output>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    /// The sequence is still being computed.
    Computing,
    /// All is computed; blocks are still leaving.
    Leaving {
        content: BlockHash,
        output: Vec<TokenId>,
    },
    /// Waits for the verdict.
    Sealed(Seal),
    Closed,
}

impl Sender {
    /// Will send the blocks of one hand-off to `target`.
    pub fn new(handoff: HandoffId, target: Target) -> Self {
        Self {
            handoff,
            target,
            state: State::Computing,
            exporting: BTreeSet::new(),
            blocks_count: 0,
            bytes: 0,
            digest: Digest::default(),
            stopping: false,
            outputs: VecDeque::new(),
        }
    }

    /// Who receives.
    pub fn receiver(&self) -> WorkerRef {
        self.target.worker
    }

    /// Bytes that left.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Blocks asked to be exported so far.
    pub fn blocks_count(&self) -> u32 {
        self.blocks_count
    }

    /// Whether the seal was sent and the verdict is still out.
    pub fn sealed(&self) -> bool {
        matches!(self.state, State::Sealed(_))
    }

    /// Whether the verdict is still out.
    pub fn open(&self) -> bool {
        self.state != State::Closed
    }

    /// Whether no block is being read.
    pub fn settled(&self) -> bool {
        self.exporting.is_empty()
    }

    /// Whether this block of the sequence is being read.
    pub fn reads(&self, ordinal: u32) -> bool {
        self.exporting.contains(&ordinal)
    }

    /// Takes in what happened.
    pub fn handle(&mut self, input: Input) {
        let receiver = self.target.worker;
        match input {
            Input::Computed { ordinal, from } => self.computed(ordinal, from),
            Input::Exported { ordinal, outcome } => self.exported(ordinal, outcome),
            Input::Sampled { content, output } => {
                if self.state == State::Computing {
                    self.state = State::Leaving { content, output };
                    self.seal_if_whole();
                }
            }
            Input::Landed { from } if from == receiver => self.landed(),
            Input::Abandoned { from, cause } if from == receiver => self.end(cause),
            Input::Stop { from } if from == receiver => self.stop(),
            Input::Landed { .. } | Input::Abandoned { .. } | Input::Stop { .. } => {}
            Input::Unanswered => {
                if let State::Sealed(seal) = &self.state {
                    let packet = Packet::Seal(seal.clone());
                    self.outputs.push_back(Output::Send(packet));
                }
            }
            Input::LinkLost => self.end(Cause::Failed(Failure::LinkLost)),
            Input::GivenUp { cause } => self.give_up(cause),
        }
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Asserts the invariant.
    pub fn check(&self) {
        if self.sealed() {
            assert!(self.settled(), "sealed with blocks unsent");
        }
        let target = self.target.present..self.target.present + self.blocks_count;
        assert!(self.exporting.iter().all(|i| target.contains(i)));
        assert!(self.blocks_count as usize <= self.target.blocks.len());
        if self.stopping {
            assert!(!self.open() && !self.settled(), "an answer is due");
        }
    }

    fn computed(&mut self, ordinal: u32, from: BlockIndex) {
        let Some(i) = ordinal.checked_sub(self.target.present) else {
            return;
        };
        if !self.open() || i < self.blocks_count {
            return;
        }
        match self.target.blocks.get(i as usize) {
            Some(block) if i == self.blocks_count => {
                self.blocks_count += 1;
                self.exporting.insert(ordinal);
                self.outputs.push_back(Output::Export {
                    from,
                    ordinal,
                    block: *block,
                });
            }
            // More than was reserved, or out of order.
            _ => self.give_up(Cause::Failed(Failure::Rejected)),
        }
    }

    fn exported(&mut self, ordinal: u32, outcome: Result<(u64, u64), Failure>) {
        if !self.exporting.remove(&ordinal) {
            return;
        }
        match outcome {
            _ if !self.open() => self.stopped_if_settled(),
            Ok((digest, bytes)) => {
                self.digest.merge(digest);
                self.bytes += bytes;
                self.seal_if_whole();
            }
            Err(failure) => self.give_up(Cause::Failed(failure)),
        }
    }

    /// The receiver ended before it landed, and does not let its blocks go before it is answered.
    fn stop(&mut self) {
        self.end(Cause::Cancelled);
        self.stopping = true;
        self.stopped_if_settled();
    }

    fn stopped_if_settled(&mut self) {
        if self.stopping && self.exporting.is_empty() {
            self.stopping = false;
            let handoff = self.handoff;
            let packet = Packet::Stopped { handoff };
            self.outputs.push_back(Output::Send(packet));
        }
    }

    fn landed(&mut self) {
        match self.state {
            State::Sealed(_) => {
                self.state = State::Closed;
                self.outputs.push_back(Output::Done);
            }
            // Nothing can have landed before it was sealed.
            State::Computing | State::Leaving { .. } => {
                self.give_up(Cause::Failed(Failure::Corrupt));
            }
            State::Closed => {}
        }
    }

    fn seal_if_whole(&mut self) {
        if let State::Leaving { content, output } = &mut self.state
            && self.exporting.is_empty()
        {
            let (handoff, blocks_count) = (self.handoff, self.blocks_count);
            let (content, output) = (*content, std::mem::take(output));
            let seal = Seal {
                handoff,
                blocks_count,
                digest: self.digest.close(handoff, blocks_count, content, &output),
                content,
                output,
            };
            self.state = State::Sealed(seal.clone());
            self.outputs.push_back(Output::Send(Packet::Seal(seal)));
        }
    }

    fn give_up(&mut self, cause: Cause) {
        if self.open() {
            let handoff = self.handoff;
            let packet = Packet::Abandoned {
                handoff,
                cause: cause.clone(),
            };
            self.outputs.push_back(Output::Send(packet));
            self.end(cause);
        }
    }

    /// Ends without telling the receiver: it knows, or cannot be told.
    fn end(&mut self, cause: Cause) {
        if self.open() {
            self.state = State::Closed;
            self.outputs.push_back(Output::Ended(cause));
        }
    }
}
