//! A machine's host memory: what was swapped out, block for block.
//!
//! Owns: the copies out and back. Never: forgives a block that was given away while it was read.

use super::{BlockIndex, Duration, Fate, HandoffId, Input, Pending, SwapOutcome, World, whole};

impl World {
    /// Drops what host memory keeps of a sequence, or will.
    pub fn drop_swap(&mut self, at: usize, of: HandoffId) {
        self.machines[at].host.remove(&of);
        for what in self.pending.values_mut() {
            if let Pending::SwapOut {
                at: machine,
                handoff,
                dropped,
                ..
            }
            | Pending::SwapIn {
                at: machine,
                handoff,
                dropped,
                ..
            } = what
                && (*machine, *handoff) == (at, of)
            {
                assert!(!*dropped, "dropped twice");
                *dropped = true;
            }
        }
    }

    pub fn perform_swap_out(&mut self, at: usize, what: Pending, fate: Fate) {
        let Pending::SwapOut {
            handoff,
            blocks,
            content,
            dropped,
            ..
        } = what
        else {
            panic!("a swap")
        };
        let machine = &mut self.machines[at];
        let read = |block: &BlockIndex| machine.engine.read(*block, whole(0));
        let now: Vec<_> = blocks.iter().map(read).collect();
        assert_eq!(now, content, "given away while it was to be swapped out");
        let outcome = match fate {
            Fate::Damaged => SwapOutcome::Broken,
            Fate::Well if dropped => SwapOutcome::Dropped,
            Fate::Well => {
                let before = machine.host.insert(handoff, content);
                assert_eq!(before, None, "swapped out twice");
                SwapOutcome::Copied
            }
        };
        let took = Duration::from_millis(4);
        let input = Input::SwappedOut {
            handoff,
            outcome,
            took,
        };
        self.feed(at, input);
    }

    pub fn perform_swap_in(&mut self, at: usize, what: Pending, fate: Fate) {
        let Pending::SwapIn {
            handoff,
            blocks,
            dropped,
            ..
        } = what
        else {
            panic!("a swap")
        };
        let machine = &mut self.machines[at];
        let outcome = match fate {
            Fate::Damaged => SwapOutcome::Broken,
            Fate::Well if dropped => SwapOutcome::Dropped,
            Fate::Well => {
                let kept = machine.host.remove(&handoff).expect("kept before");
                assert_eq!(kept.len(), blocks.len(), "as many as there were");
                for (block, cells) in blocks.iter().zip(kept) {
                    machine.engine.write(*block, whole(0), &cells);
                }
                SwapOutcome::Copied
            }
        };
        let took = Duration::from_millis(4);
        let input = Input::SwappedIn {
            handoff,
            outcome,
            took,
        };
        self.feed(at, input);
    }
}
