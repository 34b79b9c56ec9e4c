//! The sending end of a hand-off.
//!
//! Owns: the record of the blocks to export, their outcomes, and the time of the seal. Never:
//! releases its blocks while one is being read ([`HandoffSender::is_settled`]), nor before the
//! receiver has landed or either end gave up. Invariant: the seal is sent after every block was
//! exported whole and the drawn tokens are known, and every repetition of it equals the first;
//! `Done` or `Ended` is emitted at most once, and never both. `Stopped` is sent only when
//! no block is being read, and none will be.

use super::HandoffDigest;
use crate::{Packet, Seal, SealedWindow};
use cleave_domain::{
    AbandonCause, BlockHash, BlockIndex, BlockRef, Capacity, Failure, HandoffId, HandoffTarget,
    KvPlane, KvUnit, TokenId, WorkerRef,
};
use std::collections::{BTreeSet, VecDeque};

/// An event for the machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderInput {
    /// A block of the sequence, or a piece of its state or window, is final. Reported in order
    /// within each plane, once for each; of the window, from the first block on that is still here.
    Computed {
        /// The block or piece.
        unit: KvUnit,
        /// The block or slot in the pool.
        from: BlockIndex,
    },
    /// The export of a block or piece has ended.
    Exported {
        /// The block or piece.
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
    /// Read a block, or a piece of a state, and send it, then report `Exported`.
    Export {
        /// The block or slot of this pool.
        from: BlockIndex,
        /// The block or piece.
        unit: KvUnit,
        /// The block or slot of the receiver's pool.
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
    /// The blocks and pieces whose export has not ended.
    exporting: BTreeSet<KvUnit>,
    /// The number of blocks given to export so far.
    blocks_count: u32,
    /// The number of pieces of the state, and of those given to export so far.
    pieces_due: u32,
    pieces_count: u32,
    window: WindowSent,
    bytes: u64,
    /// The digest over the frames of blocks, and that over the frames of the state.
    digest: HandoffDigest,
    state_digest: HandoffDigest,
    /// Whether the receiver waits for `Stopped`.
    stop_requested: bool,
    outputs: VecDeque<SenderOutput>,
}

/// The record of the window plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct WindowSent {
    /// The pieces of one block; 0 without such a plane.
    pieces: u32,
    /// The ordinal of the first block given to export; `None` before it.
    first: Option<u32>,
    /// The number of pieces given to export so far.
    count: u32,
    digest: HandoffDigest,
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
    /// # Panics
    /// If the target lacks a slot or a window that the model has, or has one that it has not.
    pub fn new(handoff: HandoffId, target: HandoffTarget, capacity: &Capacity) -> Self {
        let state_pieces = capacity.state_pieces();
        assert_eq!(
            target.state.is_some(),
            state_pieces > 0,
            "a slot exactly where the model has states"
        );
        let window = WindowSent {
            pieces: capacity.window_pieces(),
            first: None,
            count: 0,
            digest: HandoffDigest::default(),
        };
        assert_eq!(
            target.window.is_some(),
            window.pieces > 0,
            "window blocks exactly where the model has a window"
        );
        Self {
            handoff,
            target,
            state: SenderState::Computing,
            exporting: BTreeSet::new(),
            blocks_count: 0,
            pieces_due: state_pieces,
            pieces_count: 0,
            window,
            bytes: 0,
            digest: HandoffDigest::default(),
            state_digest: HandoffDigest::default(),
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

    /// Whether this block of the sequence, or piece of its state, is being read.
    pub fn is_reading(&self, unit: KvUnit) -> bool {
        self.exporting.contains(&unit)
    }

    /// Whether a piece of a block of the window is being read.
    pub fn is_reading_window(&self, ordinal: u32) -> bool {
        let pieces = self.window.pieces;
        let of_block = |unit: &KvUnit| {
            unit.plane == KvPlane::Window && unit.ordinal.checked_div(pieces) == Some(ordinal)
        };
        self.exporting.iter().any(of_block)
    }

    /// Whether a piece of the state is being read.
    pub fn is_reading_state(&self) -> bool {
        self.exporting
            .iter()
            .any(|unit| unit.plane == KvPlane::State)
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
            assert_eq!(
                self.pieces_count, self.pieces_due,
                "sealed without the state"
            );
        }
        let target = self.target.present..self.target.present + self.blocks_count;
        let expected = |unit: &KvUnit| match unit.plane {
            KvPlane::Blocks => target.contains(&unit.ordinal),
            KvPlane::State => unit.ordinal < self.pieces_count,
            KvPlane::Window => {
                let first = self.window.first.unwrap_or(0) * self.window.pieces;
                (first..first + self.window.count).contains(&unit.ordinal)
            }
        };
        assert!(self.exporting.iter().all(expected));
        assert!(self.blocks_count as usize <= self.target.blocks.len());
        if self.stop_requested {
            assert!(!self.is_open() && !self.is_settled(), "an answer is due");
        }
    }

    fn handle_computed(&mut self, unit: KvUnit, from: BlockIndex) {
        let index = match unit.plane {
            KvPlane::Blocks => unit.ordinal.checked_sub(self.target.present),
            KvPlane::State => Some(unit.ordinal),
            KvPlane::Window => self.window_index(unit),
        };
        let Some(i) = index else {
            return;
        };
        let (next, target) = match unit.plane {
            KvPlane::Window => {
                let block = unit.ordinal / self.window.pieces;
                let window = self.target.window.as_ref();
                let target = window.and_then(|window| {
                    let index = block.checked_sub(window.first)?;
                    window.blocks.get(index as usize).copied()
                });
                (&mut self.window.count, target)
            }
            KvPlane::Blocks => {
                let block = self.target.blocks.get(i as usize).copied();
                (&mut self.blocks_count, block)
            }
            KvPlane::State => {
                let exists = i < self.pieces_due;
                let slot = self.target.state.filter(|_| exists);
                (&mut self.pieces_count, slot)
            }
        };
        if self.state == SenderState::Closed || i < *next {
            return;
        }
        match target {
            Some(block) if i == *next => {
                *next += 1;
                self.exporting.insert(unit);
                self.outputs
                    .push_back(SenderOutput::Export { from, unit, block });
            }
            // More than was reserved, or out of order.
            _ => self.abandon(AbandonCause::Failed(Failure::Rejected)),
        }
    }

    /// The place of a piece among those of the window that are sent, which begin with the first
    /// one reported; `None` if the receiver takes no piece of its block.
    fn window_index(&mut self, unit: KvUnit) -> Option<u32> {
        let block = unit.ordinal.checked_div(self.window.pieces)?;
        let taken_from = self.target.window.as_ref()?.first;
        if block < taken_from {
            return None;
        }
        let first = *self.window.first.get_or_insert(block);
        unit.ordinal.checked_sub(first * self.window.pieces)
    }

    fn handle_exported(&mut self, unit: KvUnit, outcome: Result<(u64, u64), Failure>) {
        if !self.exporting.remove(&unit) {
            return;
        }
        match outcome {
            _ if !self.is_open() => self.send_stopped_if_settled(),
            Ok((digest, bytes)) => {
                match unit.plane {
                    KvPlane::Blocks => self.digest.merge(digest),
                    KvPlane::State => self.state_digest.merge(digest),
                    KvPlane::Window => self.window.digest.merge(digest),
                }
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

    /// Seals once nothing is left to send: every block that was computed, and the whole state.
    fn send_seal_if_exported(&mut self) {
        if let SenderState::Exporting { content, output } = &mut self.state
            && self.exporting.is_empty()
            && self.pieces_count == self.pieces_due
        {
            let mut seal = Seal {
                handoff: self.handoff,
                blocks_count: self.blocks_count,
                digest: 0,
                content: *content,
                output: std::mem::take(output),
                state: (self.pieces_due > 0).then(|| self.state_digest.value()),
                window: (self.window.pieces > 0).then(|| SealedWindow {
                    first: self
                        .window
                        .first
                        .unwrap_or(self.target.present + self.blocks_count),
                    digest: self.window.digest.value(),
                }),
            };
            seal.digest = self.digest.seal_digest(&seal);
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
