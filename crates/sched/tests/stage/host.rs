//! A machine's host memory with swapped blocks.
//!
//! Owns: the copies out and back. Never: accepts that a block was given away while it was read.

use super::{
    BlockIndex, BlockPart, Duration, HandoffId, StageEvent, StageEventOutcome, StageWorld,
    SwapOutcome, WorkerInput,
};

impl StageWorld {
    /// All blocks of a sequence and all pieces of its state.
    pub fn units(
        &self,
        at: usize,
        blocks: &[BlockIndex],
        state: Option<BlockIndex>,
    ) -> Vec<(BlockPart, BlockIndex)> {
        let capacity = self.machines[at].brain.limits().capacity;
        let units = capacity.units(blocks, state);
        units
            .map(|(unit, block)| (self.whole_unit(at, unit), block))
            .collect()
    }

    pub fn read_units(&self, at: usize, units: &[(BlockPart, BlockIndex)]) -> Vec<Vec<u64>> {
        let engine = &self.machines[at].engine;
        let read = |(part, block): &(BlockPart, BlockIndex)| engine.read(*block, *part);
        units.iter().map(read).collect()
    }

    /// Drops the swapped blocks of a sequence, also those being copied.
    pub fn drop_swap(&mut self, at: usize, of: HandoffId) {
        self.machines[at].host.remove(&of);
        for event in self.pending.values_mut() {
            if let StageEvent::SwapOut {
                at: machine,
                handoff,
                dropped,
                ..
            }
            | StageEvent::SwapIn {
                at: machine,
                handoff,
                dropped,
                ..
            } = event
                && (*machine, *handoff) == (at, of)
            {
                assert!(!*dropped, "dropped twice");
                *dropped = true;
            }
        }
    }

    pub fn perform_swap_out(
        &mut self,
        at: usize,
        event: StageEvent,
        event_outcome: StageEventOutcome,
    ) {
        let StageEvent::SwapOut {
            handoff,
            units,
            content,
            dropped,
            ..
        } = event
        else {
            panic!("a swap")
        };
        let now = self.read_units(at, &units);
        assert_eq!(now, content, "given away while it was to be swapped out");
        let machine = &mut self.machines[at];
        let outcome = match event_outcome {
            StageEventOutcome::Damaged => SwapOutcome::Broken,
            StageEventOutcome::Well if dropped => SwapOutcome::Dropped,
            StageEventOutcome::Well => {
                let before = machine.host.insert(handoff, content);
                assert_eq!(before, None, "swapped out twice");
                SwapOutcome::Copied
            }
        };
        let took = Duration::from_millis(4);
        let input = WorkerInput::SwappedOut {
            handoff,
            outcome,
            took,
        };
        self.feed(at, input);
    }

    pub fn perform_swap_in(
        &mut self,
        at: usize,
        event: StageEvent,
        event_outcome: StageEventOutcome,
    ) {
        let StageEvent::SwapIn {
            handoff,
            units,
            dropped,
            ..
        } = event
        else {
            panic!("a swap")
        };
        let machine = &mut self.machines[at];
        let outcome = match event_outcome {
            StageEventOutcome::Damaged => SwapOutcome::Broken,
            StageEventOutcome::Well if dropped => SwapOutcome::Dropped,
            StageEventOutcome::Well => {
                let swapped = machine.host.remove(&handoff).expect("kept before");
                assert_eq!(swapped.len(), units.len(), "as many as there were");
                for ((part, block), cells) in units.iter().zip(swapped) {
                    machine.engine.write(*block, *part, &cells);
                }
                SwapOutcome::Copied
            }
        };
        let took = Duration::from_millis(4);
        let input = WorkerInput::SwappedIn {
            handoff,
            outcome,
            took,
        };
        self.feed(at, input);
    }
}
