//! The state of a sequence, where the model has layers with a state.
//!
//! Owns: the slots that one sequence holds, and what is known of their content.
//! Never: takes the live slot: [`cleave_kv::KvPools::secure`] does, together with the blocks.
//! Invariant: a sequence with blocks, held or reserved, has a live slot, and no other has one; a
//! step reads a state of exactly the tokens before its segment.

use super::{KvMemory, SequenceWindow};
use crate::sequences::WorkerSequence;
use cleave_domain::{BlockRef, SegmentState};
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
    pub(super) fn release(self, states: &mut PlanePool) {
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
    fn lose(&mut self) -> Option<BlockRef> {
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

impl SequenceState {
    /// The state of a segment behind one that is under way: that one restores and copies for it.
    pub(crate) fn segment_ahead(&self) -> SegmentState {
        SegmentState {
            slot: self.live.block,
            restore: None,
            snapshot: None,
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
        let useful = |point: u32| if point > self.kv.computed { point } else { 0 };
        if junction < last {
            [useful(junction), useful(last)]
        } else {
            [0, useful(last)]
        }
    }

    /// Whether no step can go on from the state or window that it has, and none is on its way: a
    /// step failed after it had changed the state, or a fetch failed.
    pub(crate) fn lacks_state(&self) -> bool {
        let lacks = |state: SequenceState| !state.is_ready(self.kv.computed);
        let window = self.kv.window.as_ref();
        let lacks = self.kv.state.is_some_and(lacks) || window.is_some_and(SequenceWindow::is_lost);
        self.kv.fetch.is_none() && lacks
    }

    /// Whether its state, if it has one, is in its slot: it can be copied from there.
    pub(crate) fn has_current_state(&self) -> bool {
        self.kv
            .state
            .is_none_or(|state| state.is_at(self.kv.computed))
    }
}

impl KvMemory {
    /// Records that a sequence's live slot has the state of all its computed tokens.
    pub(crate) fn state_reached(&mut self, sequence: &mut WorkerSequence) {
        let (Some(state), Some(states)) = (&mut sequence.kv.state, &mut self.pools.states) else {
            return;
        };
        let SpareSlots { restored, taken } = state.reached(sequence.kv.computed);
        restored.into_iter().for_each(|slot| states.release(slot));
        if let Some(slot) = taken {
            let size = self.block_tokens;
            assert!(
                sequence.kv.computed.is_multiple_of(size),
                "a snapshot within a block: {sequence:?}"
            );
            let prefix = sequence.kv.hashes[(sequence.kv.computed / size) as usize - 1];
            states.set_content(slot, snapshot_hash(prefix));
            states.release(slot);
        }
    }

    /// Takes the snapshot from which a sequence would begin, because it begins later.
    pub(super) fn drop_restore(&mut self, sequence: &mut WorkerSequence) {
        if let (Some(state), Some(states)) = (&mut sequence.kv.state, &mut self.pools.states) {
            let restored = state.restore.take();
            restored.into_iter().for_each(|slot| states.release(slot));
        }
    }

    /// Records that a step failed which may have changed the state of a sequence. Unlike a block's,
    /// the content of a state's slot is that of its last tokens alone.
    pub(crate) fn state_lost(&mut self, sequence: &mut WorkerSequence) {
        if let (Some(state), Some(states)) = (&mut sequence.kv.state, &mut self.pools.states) {
            let spare = state.lose();
            spare.into_iter().for_each(|slot| states.release(slot));
        }
    }

    /// Cuts a chunk of `tokens` tokens at the first place where a snapshot is to be taken, and
    /// takes a slot for it. The chunk stays whole if the snapshot exists already or no slot is
    /// free.
    pub(crate) fn cut_at_snapshot(&mut self, sequence: &mut WorkerSequence, tokens: u32) -> u32 {
        let size = self.block_tokens;
        let Some(states) = &mut self.pools.states else {
            return tokens;
        };
        let computed = sequence.kv.computed;
        let points = sequence.kv.state.into_iter();
        let points: Vec<u32> = points
            .flat_map(|state| state.points_within(computed, tokens))
            .collect();
        for point in points {
            sequence.extend_hashes(size);
            let prefix = sequence.kv.hashes[(point / size) as usize - 1];
            if states.contains(snapshot_hash(prefix)) {
                continue;
            }
            let Some(slot) = states.take() else {
                return tokens;
            };
            if let Some(state) = &mut sequence.kv.state {
                state.taking = Some(slot);
            }
            return point - computed;
        }
        tokens
    }
}
