//! The prefill worker's end.
//!
//! Owns: which blocks were asked to be exported, what became of them, and when to seal.
//! Never: lets go of its blocks while one is being read ([`Sender::settled`]), nor before the
//! receiver has landed or either end gave up.
//! Invariant: the seal is sent at most once, after every block left whole and the first token is
//! known; `Done` or `Ended` is said at most once, and never both.

use super::Digest;
use crate::{Packet, Seal};
use cleave_domain::{BlockIndex, BlockRef, Cause, Failure, HandoffId, Target, TokenId, WorkerRef};
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
    outputs: VecDeque<Output>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    /// The sequence is still being computed.
    Computing,
    /// All is computed; blocks are still leaving.
    Leaving {
        output: Vec<TokenId>,
    },
    /// Waits for the verdict.
    Sealed,
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
        self.state == State::Sealed
    }

    /// Whether the verdict is still out.
    pub fn open(&self) -> bool {
        self.state != State::Closed
    }

    /// Whether no block is being read.
    pub fn settled(&self) -> bool {
        self.exporting.is_empty()
    }

    /// Takes in what happened.
    pub fn handle(&mut self, input: Input) {
        let receiver = self.target.worker;
        match input {
            Input::Computed { ordinal, from } => self.computed(ordinal, from),
            Input::Exported { ordinal, outcome } => self.exported(ordinal, outcome),
            Input::Sampled { output } => {
                if self.state == State::Computing {
                    self.state = State::Leaving { output };
                    self.seal_if_whole();
                }
            }
            Input::Landed { from } if from == receiver => self.landed(),
            Input::Abandoned { from, cause } if from == receiver => self.end(cause),
            Input::Landed { .. } | Input::Abandoned { .. } => {}
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
        if self.state == State::Sealed {
            assert!(self.settled(), "sealed with blocks unsent");
        }
        let target = self.target.present..self.target.present + self.blocks_count;
        assert!(self.exporting.iter().all(|i| target.contains(i)));
        assert!(self.blocks_count as usize <= self.target.blocks.len());
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
        if !self.exporting.remove(&ordinal) || !self.open() {
            return;
        }
        match outcome {
            Ok((digest, bytes)) => {
                self.digest.merge(digest);
                self.bytes += bytes;
                self.seal_if_whole();
            }
            Err(failure) => self.give_up(Cause::Failed(failure)),
        }
    }

    fn landed(&mut self) {
        match self.state {
            State::Sealed => {
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
        if let State::Leaving { output } = &mut self.state
            && self.exporting.is_empty()
        {
            let output = std::mem::take(output);
            self.state = State::Sealed;
            self.outputs.push_back(Output::Send(Packet::Seal(Seal {
                handoff: self.handoff,
                blocks_count: self.blocks_count,
                digest: self.digest.value(),
                content: cleave_domain::BlockHash::default(),
                output,
            })));
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
