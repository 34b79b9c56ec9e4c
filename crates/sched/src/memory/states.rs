//! The state of a sequence, where the model has layers with a state.
//!
//! Owns: the slots that one sequence holds, what is known of their content, and the recovery of
//! sequences whose state was lost.
//! Never: takes the live slot: [`cleave_kv::KvPools::secure`] does, together with the blocks.
//! Invariant: a sequence with blocks, held or reserved, has a live slot, and no other has one; a
//! step reads a state of exactly the tokens before its segment.

use crate::WorkerBrain;
use crate::batch::StepBuilder;
use crate::sequences::WorkerSequence;
use cleave_domain::{BlockRef, Failure, HandoffId, KvPlane, KvUnit, SegmentState};
use cleave_kv::handoff::sender::{self, HandoffSender};
use cleave_kv::{PlanePool, SecuredState, snapshot_hash};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SequenceState {
    /// The slot that its steps read and write.
    pub(crate) live: BlockRef,
    /// The tokens whose state is in the live slot; `None` if its content is undefined.
    at: Option<u32>,
    /// The snapshot from which its first step begins; held until that step has succeeded.
    restore: Option<BlockRef>,
    /// Tokens after which a snapshot may serve other prompts, ascending; 0 for none.
    snapshot_points: [u32; 2],
    /// The slot that gets a snapshot in the step under way.
    taking: Option<BlockRef>,
}

/// Slots of a sequence that a finished step no longer needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpareSlots {
    /// The snapshot that the step began from.
    restored: Option<BlockRef>,
    /// The snapshot that the step took.
    taken: Option<BlockRef>,
}

impl SequenceState {
    pub(crate) fn new(secured: SecuredState, snapshot_points: [u32; 2]) -> Self {
        let SecuredState { live, restore, .. } = secured;
        Self {
            live,
            at: None,
            restore,
            snapshot_points,
            taking: None,
        }
    }

    /// The slots that it holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockRef> + use<> {
        std::iter::once(self.live)
            .chain(self.restore)
            .chain(self.taking)
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
    /// slots that are needed no more.
    #[must_use]
    fn reached(&mut self, computed: u32) -> SpareSlots {
        self.at = Some(computed);
        SpareSlots {
            restored: self.restore.take(),
            taken: self.taking.take(),
        }
    }

    /// A step that wrote to the live slot failed. Gives the slot of the snapshot that it took,
    /// which is of nothing.
    #[must_use]
    pub(crate) fn lose(&mut self) -> Option<BlockRef> {
        self.at = None;
        self.taking.take()
    }

    /// The places for snapshots within the next `tokens` tokens.
    fn points_within(self, computed: u32, tokens: u32) -> impl Iterator<Item = u32> {
        let within = move |point: &u32| (computed + 1..=computed + tokens).contains(point);
        self.snapshot_points.into_iter().filter(within)
    }

    /// The state of a segment that begins at `position`.
    pub(crate) fn segment(&self, position: u32) -> SegmentState {
        let first = self.restore.filter(|_| position > 0);
        SegmentState {
            slot: self.live.block,
            restore: first.map(|snapshot| snapshot.block),
            snapshot: self.taking.map(|snapshot| snapshot.block),
        }
    }
}

impl WorkerSequence {
    /// Where this prompt's snapshots may serve others, as far as they are not reused here: at its
    /// last block boundary, for equal prompts, and where its text leaves that of an earlier prompt,
    /// after `known_blocks` blocks. None in generated text, which hardly repeats.
    pub(crate) fn snapshot_points(&self, known_blocks: u32, block_tokens: u32) -> [u32; 2] {
        let last = (self.prompt_count() - 1) / block_tokens * block_tokens;
        let junction = known_blocks * block_tokens;
        let useful = |point: u32| if point > self.computed { point } else { 0 };
        if junction < last {
            [useful(junction), useful(last)]
        } else {
            [0, useful(last)]
        }
    }

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
        let SpareSlots { restored, taken } = state.reached(sequence.computed);
        restored.into_iter().for_each(|slot| states.release(slot));
        if let Some(slot) = taken {
            let size = self.context.block_tokens();
            assert!(
                sequence.computed.is_multiple_of(size),
                "a snapshot within a block: {sequence:?}"
            );
            let prefix = sequence.hashes[(sequence.computed / size) as usize - 1];
            states.set_content(slot, snapshot_hash(prefix));
            states.release(slot);
        }
    }

    /// Cuts a chunk of `tokens` tokens at the first place where a snapshot is to be taken, and
    /// takes a slot for it. The chunk stays whole if the snapshot exists already or no slot is
    /// free.
    pub(crate) fn cut_at_snapshot(&mut self, handoff: HandoffId, tokens: u32) -> u32 {
        let size = self.context.block_tokens();
        let sequence = self.sequences.get_mut(&handoff);
        let (Some(sequence), Some(states)) = (sequence, &mut self.pools.states) else {
            return tokens;
        };
        let computed = sequence.computed;
        let points = sequence.state.into_iter();
        let points: Vec<u32> = points
            .flat_map(|state| state.points_within(computed, tokens))
            .collect();
        for point in points {
            sequence.extend_hashes(size);
            let prefix = sequence.hashes[(point / size) as usize - 1];
            if states.contains(snapshot_hash(prefix)) {
                continue;
            }
            let Some(slot) = states.take() else {
                return tokens;
            };
            if let Some(state) = &mut sequence.state {
                state.taking = Some(slot);
            }
            return point - computed;
        }
        tokens
    }

    /// Gives the sender of a hand-off the state of sequence `of`, which no step changes any more.
    pub(crate) fn export_state(&mut self, handoff: HandoffId, of: HandoffId) {
        let Some(state) = self.sequences.get(&of).and_then(|s| s.state) else {
            return;
        };
        let from = state.live.block;
        for ordinal in 0..self.context.limits().capacity.state_pieces() {
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
