//! The state of a sequence, where the model has layers with a state.
//!
//! Owns: the slots that one sequence holds, what is known of their content, and the recovery of
//! sequences whose state was lost.
//! Never: takes the live slot: [`cleave_kv::KvPools::secure`] does, together with the blocks.
//! Invariant: a sequence with blocks, held or reserved, has a live slot, and no other has one; a
//! step reads a state of exactly the tokens before its segment.

use crate::WorkerBrain;
use crate::plan::StepBuilder;
use crate::sequence::WorkerSequence;
use cleave_domain::{BlockRef, Failure, HandoffId, KvPlane, KvUnit, SegmentState};
use cleave_kv::handoff::sender::{self, HandoffSender};
use cleave_kv::{PlanePool, SecuredState};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SequenceState {
    /// The slot that its steps read and write.
    pub(crate) live: BlockRef,
    /// The tokens whose state is in the live slot; `None` if its content is undefined.
    at: Option<u32>,
    /// The snapshot from which its first step begins; held until that step has succeeded.
    restore: Option<BlockRef>,
}

impl SequenceState {
    pub(crate) fn new(secured: SecuredState) -> Self {
        let SecuredState { live, restore, .. } = secured;
        Self {
            live,
            at: None,
            restore,
        }
    }

    /// The slots that it holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockRef> + use<> {
        std::iter::once(self.live).chain(self.restore)
    }

    /// Returns every slot to the pool.
    pub(crate) fn release(self, states: &mut PlanePool) {
        self.held().for_each(|slot| states.release(slot));
    }

    /// Whether the live slot has the state after `computed` tokens.
    pub(crate) fn is_at(&self, computed: u32) -> bool {
        self.at == Some(computed)
    }

    /// Whether a step can begin after `computed` tokens: an empty state needs no slot's content.
    fn is_ready(&self, computed: u32) -> bool {
        computed == 0 || self.is_at(computed) || self.restore.is_some()
    }

    /// The live slot has the state after `computed` tokens: they were run, or it arrived. Gives the
    /// snapshot that is needed no more.
    #[must_use]
    pub(crate) fn reached(&mut self, computed: u32) -> Option<BlockRef> {
        self.at = Some(computed);
        self.restore.take()
    }

    /// A step that wrote to the live slot failed.
    pub(crate) fn lose(&mut self) {
        self.at = None;
    }

    /// The state of a segment that begins at `position`.
    pub(crate) fn segment(&self, position: u32) -> SegmentState {
        let first = self.restore.filter(|_| position > 0);
        SegmentState {
            slot: self.live.block,
            restore: first.map(|snapshot| snapshot.block),
            snapshot: None,
        }
    }
}

impl WorkerSequence {
    /// Whether no step can go on from the state that it has: a step failed after it had changed it.
    pub(crate) fn lacks_state(&self) -> bool {
        self.state
            .is_some_and(|state| !state.is_ready(self.computed))
    }

    /// Whether its state, if it has one, is in its slot: it can be copied from there.
    pub(crate) fn has_current_state(&self) -> bool {
        self.state.is_none_or(|state| state.is_at(self.computed))
    }
}

impl WorkerBrain {
    /// Records that a sequence's live slot has the state of all its computed tokens.
    pub(crate) fn state_reached(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let (Some(state), Some(states)) = (&mut sequence.state, &mut self.pools.states) else {
            return;
        };
        if let Some(snapshot) = state.reached(sequence.computed) {
            states.release(snapshot);
        }
    }

    /// Gives the sender of a hand-off the state of sequence `of`, which no step changes any more.
    pub(crate) fn export_state(&mut self, handoff: HandoffId, of: HandoffId) {
        let Some(state) = self.sequences.get(&of).and_then(|s| s.state) else {
            return;
        };
        let from = state.live.block;
        for ordinal in 0..self.limits.capacity.state_pieces() {
            let plane = KvPlane::State;
            let unit = KvUnit { plane, ordinal };
            self.send(handoff, sender::SenderInput::Computed { unit, from });
        }
    }

    /// Takes everything from sequences without a state to go on from; they compute their tokens
    /// again, and what they have sent stays valid. One whose blocks are being read waits for that.
    pub(crate) fn recompute_lost_states(&mut self, draft: &mut StepBuilder) {
        let lost = self.active_where(|s| !s.stepping() && s.lacks_state());
        for rank in lost {
            let handoff = rank.handoff;
            let failure = Failure::Engine("a step failed, and the state with it".to_owned());
            self.abort_move(handoff, failure);
            if self.blocks_are_read(handoff) {
                draft.waiting.push(handoff);
            } else {
                self.preempt(handoff);
            }
        }
    }

    /// Whether a block or the state of the sequence is being read for a hand-off or a move.
    pub(crate) fn blocks_are_read(&self, of: HandoffId) -> bool {
        let sequence = self.sequences.get(&of);
        let sender = sequence.and_then(|s| s.outgoing.as_ref());
        self.read_for_a_move(of) || sender.is_some_and(|sender| !sender.is_settled())
    }

    /// Whether a piece of the sequence's state is being read.
    pub(crate) fn state_is_read(&self, sequence: &WorkerSequence) -> bool {
        let of = sequence.rank.handoff;
        let moves = self
            .moves
            .values()
            .filter(|outbound| outbound.order.of == of);
        let senders = moves.map(|outbound| &outbound.sender);
        let mut senders = senders.chain(&sequence.outgoing);
        senders.any(HandoffSender::is_reading_state)
    }
}
