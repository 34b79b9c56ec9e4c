//! A machine's host memory with swapped blocks.
//!
//! Owns: the copies out and back. Never: accepts that a block was given away while it was read.

use super::{
    BlockIndex, Duration, HandoffId, StageEvent, StageEventOutcome, StageWorld, SwapOutcome,
    WorkerInput, whole,
};

impl StageWorld {
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
            blocks,
            content,
            dropped,
            ..
        } = event
        else {
            panic!("a swap")
        };
        let machine = &mut self.machines[at];
        let read = |block: &BlockIndex| machine.engine.read(*block, whole(0));
        let now: Vec<_> = blocks.iter().map(read).collect();
        assert_eq!(now, content, "given away while it was to be swapped out");
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
            blocks,
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
                assert_eq!(swapped.len(), blocks.len(), "as many as there were");
                for (block, cells) in blocks.iter().zip(swapped) {
                    machine.engine.write(*block, whole(0), &cells);
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
