//! Every invariant of a worker's brain, asserted.
//!
//! Owns: those that hold between its machines; each machine asserts its own. Never: runs in
//! production by itself, because it walks all state.
//! Invariant: the numbers are those of docs/design/invariants.md.

use crate::machines::WorkerMachines;
use crate::sequences::WorkerSequence;

impl WorkerMachines {
    /// Asserts the invariants of each machine, and those between them.
    pub(crate) fn check(&self) {
        self.forecast.check();
        self.sequences.check();
        self.memory.check(self.sequences.iter());
        self.peers.check(&self.sequences);
        self.steps.check(self.context.limits());
        for sequence in self.sequences.iter() {
            sequence.check(self.context.block_tokens());
            let is_read = self.peers.reads_for_move(sequence.handoff());
            assert!(
                !sequence.closing() || !sequence.settled() || is_read,
                "a closing sequence was not released although nothing touches its blocks"
            );
        }
        self.check_limits();
        self.check_steps();
        if self.steps.is_empty() {
            self.check_idle();
        }
    }

    fn check_limits(&self) {
        let limits = self.context.limits();
        let capacity = &limits.capacity;
        let queue = capacity.slots_count + limits.queue_max;
        let decoding = self.sequences.iter().filter(|s| s.decodes_here()).count();
        assert!(
            decoding <= queue as usize,
            "more decode legs than slots and queue allow"
        );
        let queued = |s: &&WorkerSequence| !s.decodes_here() && s.times.started.is_none();
        let queued = self.sequences.iter().filter(queued).count();
        assert!(
            queued <= limits.queue_max as usize,
            "more prompts are queued than queue_max"
        );
        assert!(
            self.sequences.blocks_swapped() <= u64::from(limits.swap_blocks),
            "more blocks are swapped than swap_blocks"
        );
    }

    /// Asserts that the steps hold the sequences that are in steps, and write to blocks of theirs.
    fn check_steps(&self) {
        let mut placed = self.steps.placed();
        for sequence in self.sequences.iter() {
            let handoff = sequence.handoff();
            let (steps, tokens) = placed.remove(&handoff).unwrap_or_default();
            assert_eq!(
                sequence.steps_count(),
                steps,
                "steps_count of {handoff} is wrong"
            );
            if steps > 0 && !sequence.closing() {
                self.check_written(sequence, tokens);
            }
        }
        // A sequence in a step stays until the step is over.
        assert!(
            placed.is_empty(),
            "a step holds unknown sequences: {placed:?}"
        );
    }

    /// Asserts that no sequence can run: all wait for their KV, their peer or blocks.
    fn check_idle(&self) {
        // A victim's blocks may first have to be read to their end.
        let copied = self.sequences.iter().any(|s| s.swapping())
            || self.peers.reads_for_any_move()
            || self.memory.is_offloading();
        let waits =
            |s: &WorkerSequence| s.starved() || s.lacks_state() && self.peers.reads_any_block(s);
        assert!(
            copied || self.sequences.active().all(waits),
            "the engine is idle although an active sequence could run"
        );
    }

    /// Asserts that the blocks to which steps under way write `tokens` tokens exist, are not shared
    /// through the pool, and are read by nobody.
    fn check_written(&self, sequence: &WorkerSequence, tokens: u32) {
        let size = self.context.block_tokens();
        let first = sequence.kv.computed() / size;
        let end = (sequence.kv.computed() + tokens).div_ceil(size);
        assert!(
            end as usize <= sequence.kv.table().len(),
            "a step writes past the sequence's blocks"
        );
        assert!(
            sequence.kv.published() <= first,
            "a step writes to a published block"
        );
        assert!(
            !self.peers.reads_blocks(sequence, first..end),
            "a step writes to a block or state that is being read: {sequence:?}"
        );
    }
}
