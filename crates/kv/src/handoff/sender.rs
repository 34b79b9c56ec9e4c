//! The sending end of a hand-off.
//!
//! Owns: the record of the blocks to export, their outcomes, and the time of the seal. Never:
//! releases its blocks while one is being read ([`HandoffSender::is_settled`]), nor before the
//! receiver has landed or either end gave up. Invariant: the seal is sent after every block was
//! exported whole and the drawn tokens are known, and every repetition of it equals the first;
//! `Done` or `Ended` is emitted at most once, and never both. `Stopped` is sent only when
//! no block is being read, and none will be.

use super::HandoffDigest;
use crate::{Packet, Seal};
use cleave_domain::{
    AbandonCause, BlockHash, BlockIndex, BlockRef, Failure, HandoffId, HandoffTarget, KvUnit,
    TokenId, WorkerRef,
};
use std::collections::{BTreeSet, VecDeque};

/// An event for the machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderInput {
    /// A block of the sequence is final. Reported in order, once for each block.
    Computed {
        /// The block of the sequence.
        unit: KvUnit,
        /// The block in the pool.
        from: BlockIndex,
    },
    /// The export of a block has ended.
    Exported {
        /// The block of the sequence.
        unit: KvUnit,
        /// The digest and the number of bytes of its frames, or the failure.
        outcome: Result<(u64, u64), Failure>,
    },
    /// The whole sequence is computed.
    Sampled {
        /// The hash of the tokens that the receiver knows, as in [`Seal::content`].
        content: BlockHash,
        /// Tokens drawn since the reservation, `[tokens >= 1]`.
        output: Vec<TokenId>,
    },
    /// The hand-off has landed.
    Landed {
        /// The worker that sent it.
        from: WorkerRef,
    },
    /// The receiver no longer wants the hand-off.
    Abandoned {
        /// The worker that sent it.
        from: WorkerRef,
        cause: AbandonCause,
    },
    /// The receiver asks for an end of all writes.
    Stop {
        /// The worker that sent it.
        from: WorkerRef,
    },
    /// The seal is not answered for a while: the seal or the answer may be lost.
    Unanswered,
    /// The link to the receiver broke.
    LinkLost,
    /// This worker no longer wants the hand-off: the reason is sent to the receiver.
    GiveUp { cause: AbandonCause },
}

/// An action for the driver; actions are performed in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderOutput {
    /// Read a block and send it, then report `Exported`.
    Export {
        /// The block of this pool.
        from: BlockIndex,
        /// The block of the sequence.
        unit: KvUnit,
        /// The block of the receiver's pool.
        block: BlockRef,
    },
    /// Send this to the receiver.
    Send(Packet),
    /// The hand-off has landed.
    Done,
    /// The hand-off will never land.
    Ended(AbandonCause),
}

/// The sending end of one hand-off.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HandoffSender {
    handoff: HandoffId,
    target: HandoffTarget,
    state: SenderState,
    /// The blocks whose export has not ended.
    exporting: BTreeSet<KvUnit>,
    /// The number of blocks given to export so far.
    blocks_count: u32,
    bytes: u64,
    digest: HandoffDigest,
    /// Whether the receiver waits for `Stopped`.
    stop_requested: bool,
    outputs: VecDeque<SenderOutput>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum SenderState {
    /// The sequence is still being computed.
    Computing,
    /// The sequence is computed; exports are still in progress.
    Exporting {
        content: BlockHash,
        output: Vec<TokenId>,
    },
    /// The seal was sent; the verdict is awaited.
    Sealed(Seal),
    Closed,
}

impl HandoffSender {
    pub fn new(handoff: HandoffId, target: HandoffTarget) -> Self {
        Self {
            handoff,
            target,
            state: SenderState::Computing,
            exporting: BTreeSet::new(),
            blocks_count: 0,
            bytes: 0,
            digest: HandoffDigest::default(),
            stop_requested: false,
            outputs: VecDeque::new(),
        }
    }

    pub fn receiver(&self) -> WorkerRef {
        self.target.worker
    }

    /// The number of bytes exported.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of blocks given to export so far.
    pub fn blocks_count(&self) -> u32 {
        self.blocks_count
    }

    /// Whether the seal was sent and the verdict is awaited.
    pub fn is_sealed(&self) -> bool {
        matches!(self.state, SenderState::Sealed(_))
    }

    /// Whether the hand-off has neither landed nor ended.
    pub fn is_open(&self) -> bool {
        self.state != SenderState::Closed
    }

    /// Whether no block is being read.
    pub fn is_settled(&self) -> bool {
        self.exporting.is_empty()
    }

    /// Whether this block of the sequence is being read.
    pub fn is_reading(&self, unit: KvUnit) -> bool {
        self.exporting.contains(&unit)
    }

    pub fn handle(&mut self, input: SenderInput) {
        let receiver = self.target.worker;
        match input {
            SenderInput::Computed { unit, from } => self.handle_computed(unit, from),
            SenderInput::Exported { unit, outcome } => self.handle_exported(unit, outcome),
            SenderInput::Sampled { content, output } => {
                if self.state == SenderState::Computing {
                    self.state = SenderState::Exporting { content, output };
                    self.send_seal_if_exported();
                }
            }
            SenderInput::Landed { from } if from == receiver => self.handle_landed(),
            SenderInput::Abandoned { from, cause } if from == receiver => self.end(cause),
            SenderInput::Stop { from } if from == receiver => self.handle_stop(),
            SenderInput::Landed { .. }
            | SenderInput::Abandoned { .. }
            | SenderInput::Stop { .. } => {}
            SenderInput::Unanswered => {
                if let SenderState::Sealed(seal) = &self.state {
                    let packet = Packet::Seal(seal.clone());
                    self.outputs.push_back(SenderOutput::Send(packet));
                }
            }
            SenderInput::LinkLost => self.end(AbandonCause::Failed(Failure::LinkLost)),
            SenderInput::GiveUp { cause } => self.abandon(cause),
        }
    }

    /// The next action, if any.
    pub fn poll(&mut self) -> Option<SenderOutput> {
        self.outputs.pop_front()
    }

    pub fn check(&self) {
        if self.is_sealed() {
            assert!(self.is_settled(), "sealed with blocks unsent");
        }
        let target = self.target.present..self.target.present + self.blocks_count;
        let expected = |unit: &KvUnit| target.contains(&unit.ordinal);
        assert!(self.exporting.iter().all(expected));
        assert!(self.blocks_count as usize <= self.target.blocks.len());
        if self.stop_requested {
            assert!(!self.is_open() && !self.is_settled(), "an answer is due");
        }
    }

    fn handle_computed(&mut self, unit: KvUnit, from: BlockIndex) {
        let Some(i) = unit.ordinal.checked_sub(self.target.present) else {
            return;
        };
        if !self.is_open() || i < self.blocks_count {
            return;
        }
        match self.target.blocks.get(i as usize) {
            Some(block) if i == self.blocks_count => {
                self.blocks_count += 1;
                self.exporting.insert(unit);
                self.outputs.push_back(SenderOutput::Export {
                    from,
                    unit,
                    block: *block,
                });
            }
            // More blocks than reserved, or out of order.
            _ => self.abandon(AbandonCause::Failed(Failure::Rejected)),
        }
    }

    fn handle_exported(&mut self, unit: KvUnit, outcome: Result<(u64, u64), Failure>) {
        if !self.exporting.remove(&unit) {
            return;
        }
        match outcome {
            _ if !self.is_open() => self.send_stopped_if_settled(),
            Ok((digest, bytes)) => {
                self.digest.merge(digest);
                self.bytes += bytes;
                self.send_seal_if_exported();
            }
            Err(failure) => self.abandon(AbandonCause::Failed(failure)),
        }
    }

    /// Handles a `Stop`: the receiver ended before it landed, and keeps its blocks in quarantine
    /// until it is answered.
    fn handle_stop(&mut self) {
        self.end(AbandonCause::Cancelled);
        self.stop_requested = true;
        self.send_stopped_if_settled();
    }

    fn send_stopped_if_settled(&mut self) {
        if self.stop_requested && self.exporting.is_empty() {
            self.stop_requested = false;
            let handoff = self.handoff;
            let packet = Packet::Stopped { handoff };
            self.outputs.push_back(SenderOutput::Send(packet));
        }
    }

    fn handle_landed(&mut self) {
        match self.state {
            SenderState::Sealed(_) => {
                self.state = SenderState::Closed;
                self.outputs.push_back(SenderOutput::Done);
            }
            // A hand-off cannot land before its seal.
            SenderState::Computing | SenderState::Exporting { .. } => {
                self.abandon(AbandonCause::Failed(Failure::Corrupt));
            }
            SenderState::Closed => {}
        }
    }

    fn send_seal_if_exported(&mut self) {
        if let SenderState::Exporting { content, output } = &mut self.state
            && self.exporting.is_empty()
        {
            let (handoff, blocks_count) = (self.handoff, self.blocks_count);
            let (content, output) = (*content, std::mem::take(output));
            let seal = Seal {
                handoff,
                blocks_count,
                digest: self
                    .digest
                    .seal_digest(handoff, blocks_count, content, &output),
                content,
                output,
                state: None,
            };
            self.state = SenderState::Sealed(seal.clone());
            self.outputs
                .push_back(SenderOutput::Send(Packet::Seal(seal)));
        }
    }

    fn abandon(&mut self, cause: AbandonCause) {
        if self.is_open() {
            let handoff = self.handoff;
            let packet = Packet::Abandoned {
                handoff,
                cause: cause.clone(),
            };
            self.outputs.push_back(SenderOutput::Send(packet));
            self.end(cause);
        }
    }

    /// Ends without a packet to the receiver, which knows of the end or cannot be reached.
    fn end(&mut self, cause: AbandonCause) {
        if self.is_open() {
            self.state = SenderState::Closed;
            self.outputs.push_back(SenderOutput::Ended(cause));
        }
    }
}
