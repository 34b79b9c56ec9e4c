//! Blocks in host memory, kept for sequences that gave theirs up.
//!
//! Owns: the copies, each under its hand-off's name. Never: decides who gives up blocks, or when they
//! come back; copies more in one go than may be written between two steps. Lives on the engine's
//! thread, so that no copy meets a step or another copy; where a device has its blocks beside the engine a copy waits
//! for no step, since no step under way has the sequence.
//! Invariant: no more bytes are kept than were allowed, and every copy asked for is answered once.

use super::engine::Bench;
use cleave_domain::{BlockIndex, HandoffId};
use cleave_engine::BlockSpan;
use cleave_sched::{Input, SwapOutcome};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use tracing::error;

/// A sequence's blocks, to be copied one way.
#[derive(Debug)]
pub(crate) struct Swap {
    pub(crate) handoff: HandoffId,
    /// In the sequence's order.
    pub(crate) blocks: Vec<BlockIndex>,
    pub(crate) way: Way,
    /// Of those, how many have been copied.
    copied: usize,
    /// How long that took; steps in between are not in it.
    took: Duration,
}

/// What came of one go at a copy.
#[derive(Debug)]
pub(crate) enum Progress {
    /// There is more to copy.
    More(Swap),
    /// It is over.
    Over(Input),
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To host memory.
    Out,
    /// Back to the pool.
    In,
}

impl Swap {
    pub(crate) fn new(handoff: HandoffId, blocks: Vec<BlockIndex>, way: Way) -> Self {
        Self {
            handoff,
            blocks,
            way,
            copied: 0,
            took: Duration::ZERO,
        }
    }

    /// The fact that answers it.
    pub(crate) fn answer(&self, outcome: SwapOutcome) -> Input {
        let (handoff, took) = (self.handoff, self.took);
        match self.way {
            Way::Out => Input::SwappedOut {
                handoff,
                outcome,
                took,
            },
            Way::In => Input::SwappedIn {
                handoff,
                outcome,
                took,
            },
        }
    }
}

/// What is kept.
#[derive(Debug)]
pub(crate) struct Cellar {
    kept: BTreeMap<HandoffId, VecDeque<Vec<u8>>>,
    bytes: u64,
    bytes_max: u64,
}

impl Cellar {
    /// Empty; takes memory only when something is kept.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            kept: BTreeMap::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Room for one more block; `None` when there is none.
    fn room(&self, block_bytes: usize) -> Option<Vec<u8>> {
        let bytes = self.bytes.checked_add(block_bytes as u64)?;
        if bytes > self.bytes_max {
            return None;
        }
        let mut block = Vec::new();
        block.try_reserve_exact(block_bytes).ok()?;
        block.resize(block_bytes, 0);
        Some(block)
    }

    fn keep(&mut self, handoff: HandoffId, block: Vec<u8>) {
        self.bytes += block.len() as u64;
        self.kept.entry(handoff).or_default().push_back(block);
    }

    /// How many blocks of a hand-off are kept.
    fn count(&self, handoff: HandoffId) -> usize {
        self.kept.get(&handoff).map_or(0, VecDeque::len)
    }

    /// Gives up the first block that is kept of a hand-off.
    fn take_first(&mut self, handoff: HandoffId) -> Option<Vec<u8>> {
        let blocks = self.kept.get_mut(&handoff)?;
        let block = blocks.pop_front()?;
        if blocks.is_empty() {
            self.kept.remove(&handoff);
        }
        self.bytes -= block.len() as u64;
        Some(block)
    }

    /// Gives up what is kept of a hand-off.
    pub(crate) fn take(&mut self, handoff: HandoffId) -> VecDeque<Vec<u8>> {
        let blocks = self.kept.remove(&handoff).unwrap_or_default();
        self.bytes -= blocks.iter().map(|block| block.len() as u64).sum::<u64>();
        blocks
    }
}

impl Bench {
    /// Copies some of a sequence's blocks out or back in: as many as may be written between two
    /// steps, and one at least. What cannot be copied whole is not kept.
    pub(crate) fn swap(&mut self, mut swap: Swap) -> Progress {
        let began = Instant::now();
        let copied = self.copy(&mut swap);
        swap.took += began.elapsed();
        let outcome = match copied {
            Ok(()) if swap.copied < swap.blocks.len() => return Progress::More(swap),
            Ok(()) => SwapOutcome::Copied,
            Err(reason) => {
                let (handoff, way) = (swap.handoff, swap.way);
                error!(%handoff, ?way, %reason, "cannot swap a sequence");
                drop(self.cellar.take(swap.handoff));
                SwapOutcome::Broken
            }
        };
        Progress::Over(swap.answer(outcome))
    }

    fn copy(&mut self, swap: &mut Swap) -> Result<(), String> {
        if swap.way == Way::In {
            let kept = self.cellar.count(swap.handoff) + swap.copied;
            let wanted = swap.blocks.len();
            if kept != wanted {
                return Err(format!("{kept} blocks are kept in place of {wanted}"));
            }
        }
        let block_bytes = u64::from(self.limits.block_bytes.max(1));
        let most = (self.limits.write_bytes_max / block_bytes).max(1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let rest: Vec<BlockIndex> = swap.blocks[swap.copied..]
            .iter()
            .copied()
            .take(most)
            .collect();
        for block in rest {
            match swap.way {
                Way::Out => self.copy_out(swap.handoff, block)?,
                Way::In => self.copy_in(swap.handoff, block)?,
            }
            swap.copied += 1;
        }
        Ok(())
    }

    fn copy_out(&mut self, handoff: HandoffId, block: BlockIndex) -> Result<(), String> {
        let room = self.cellar.room(self.limits.block_bytes as usize);
        let mut bytes = room.ok_or("host memory for swapping is used up")?;
        let blocks = self.blocks.clone();
        let read = self.guarded(|engine| match blocks {
            Some(blocks) => blocks
                .read(&mut [(whole(block, bytes.len()), &mut bytes[..])])
                .map(drop),
            None => engine.read_block(block, 0, &mut bytes),
        });
        read?.map_err(|error| self.failed(&error))?;
        self.cellar.keep(handoff, bytes);
        Ok(())
    }

    fn copy_in(&mut self, handoff: HandoffId, block: BlockIndex) -> Result<(), String> {
        let kept = self.cellar.take_first(handoff);
        let bytes = kept.ok_or("a kept block is gone")?;
        let blocks = self.blocks.clone();
        let written = self.guarded(|engine| match blocks {
            Some(blocks) => blocks.write(&[(whole(block, bytes.len()), &bytes[..])]),
            None => engine.write_block(block, 0, &bytes),
        });
        written?.map_err(|error| self.failed(&error))
    }
}

fn whole(block: BlockIndex, len: usize) -> BlockSpan {
    BlockSpan {
        block,
        offset: 0,
        len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Pulse;
    use crate::worker::StepTime;
    use crate::worker::engine::EngineLimits;
    use crate::worker::porter::tests::{BLOCK, Shelf as DeviceShelf};
    use cleave_domain::{FlightId, StepPlan, StepResult};
    use cleave_engine::{DeviceBlocks, Engine, EngineDescription, EngineError};
    use std::sync::Arc;
    use std::time::Duration;

    /// Blocks and nothing else.
    struct Shelf {
        blocks: Vec<[u8; BLOCK]>,
    }

    impl Engine for Shelf {
        fn describe(&self) -> &EngineDescription {
            unreachable!("nobody asks a shelf")
        }

        fn step(&mut self, _: &StepPlan) -> Result<StepResult, EngineError> {
            unreachable!("a shelf takes no steps")
        }

        fn read_block(&self, at: BlockIndex, _: usize, out: &mut [u8]) -> Result<(), EngineError> {
            let found = self.blocks.get(at.0 as usize);
            out.copy_from_slice(found.ok_or(EngineError::Plan("no such block".into()))?);
            Ok(())
        }

        fn write_block(&mut self, at: BlockIndex, _: usize, b: &[u8]) -> Result<(), EngineError> {
            self.blocks[at.0 as usize].copy_from_slice(b);
            Ok(())
        }

        fn copy_blocks(&mut self, _: &[(BlockIndex, BlockIndex)]) -> Result<(), EngineError> {
            unreachable!("nobody copies here")
        }
    }

    fn bench(swap_bytes_max: usize) -> Bench {
        bench_with(swap_bytes_max, usize::MAX)
    }

    fn bench_with(swap_bytes_max: usize, write_bytes_max: usize) -> Bench {
        let blocks = (0..6).map(|i| [i; BLOCK]).collect();
        bench_of(
            (Box::new(Shelf { blocks }), None),
            (swap_bytes_max, write_bytes_max),
        )
    }

    fn bench_of(
        engine: (Box<dyn Engine>, Option<Arc<dyn DeviceBlocks>>),
        (swap_bytes_max, write_bytes_max): (usize, usize),
    ) -> Bench {
        let limits = EngineLimits {
            block_bytes: BLOCK as u32,
            write_bytes_max: write_bytes_max as u64,
            swap_bytes_max: swap_bytes_max as u64,
            time: StepTime::Measured,
        };
        let pulse = Arc::new(Pulse::new(Duration::MAX));
        Bench::new(engine, limits, pulse)
    }

    fn swap(flight: u64, way: Way, blocks: &[u32]) -> Swap {
        let handoff = HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let blocks = blocks.iter().copied().map(BlockIndex).collect();
        Swap::new(handoff, blocks, way)
    }

    /// Of a copy that is over in one go.
    fn outcome(progress: Progress) -> SwapOutcome {
        match progress {
            Progress::Over(
                Input::SwappedOut { outcome, .. } | Input::SwappedIn { outcome, .. },
            ) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// The goes that a copy takes.
    fn goes(bench: &mut Bench, mut swap: Swap) -> usize {
        for count in 1.. {
            match bench.swap(swap) {
                Progress::More(rest) => swap = rest,
                over @ Progress::Over(_) => {
                    assert_eq!(outcome(over), SwapOutcome::Copied);
                    return count;
                }
            }
        }
        unreachable!("copies end")
    }

    #[test]
    fn lesson_26_a_copy_is_made_in_goes_of_what_may_be_written_between_steps() {
        let mut bench = bench_with(5 * BLOCK, 2 * BLOCK);
        assert_eq!(goes(&mut bench, swap(1, Way::Out, &[0, 1, 2, 3, 4])), 3);
        assert_eq!(goes(&mut bench, swap(1, Way::In, &[5, 4, 3, 2, 1])), 3);
        let mut bytes = [0; BLOCK];
        let read = bench.guarded(|engine| engine.read_block(BlockIndex(5), 0, &mut bytes));
        read.unwrap().unwrap();
        assert_eq!(bytes, [0; BLOCK], "the first is where it was put");
        // All of it is free again; and one block is copied whatever the limit.
        assert_eq!(bench.cellar.bytes, 0);
        let mut bench = bench_with(5 * BLOCK, 0);
        assert_eq!(goes(&mut bench, swap(1, Way::Out, &[0, 1])), 2);
    }

    /// The engine has no block to give: it would have to wait for its steps.
    #[test]
    fn blocks_beside_the_engine_were_copied_through_it() {
        let blocks = (0..6).map(|i| [i; BLOCK]).collect();
        let beside = Arc::new(DeviceShelf::of(blocks));
        let engine = Shelf { blocks: Vec::new() };
        let shared: Arc<dyn DeviceBlocks> = Arc::clone(&beside) as _;
        let mut bench = bench_of((Box::new(engine), Some(shared)), (4 * BLOCK, usize::MAX));
        let out = bench.swap(swap(1, Way::Out, &[5, 2]));
        assert_eq!(outcome(out), SwapOutcome::Copied);
        let back = bench.swap(swap(1, Way::In, &[0, 1]));
        assert_eq!(outcome(back), SwapOutcome::Copied);
        assert_eq!(beside.contents()[..2], [[5; BLOCK], [2; BLOCK]]);
    }

    #[test]
    fn what_was_swapped_out_comes_back_elsewhere_and_unchanged() {
        let mut bench = bench(4 * BLOCK);
        let out = bench.swap(swap(1, Way::Out, &[5, 2]));
        assert_eq!(outcome(out), SwapOutcome::Copied);
        let back = bench.swap(swap(1, Way::In, &[0, 1]));
        assert_eq!(outcome(back), SwapOutcome::Copied);
        for (block, content) in [(0, 5), (1, 2), (5, 5)] {
            let mut bytes = [0; BLOCK];
            let read = bench.guarded(|engine| engine.read_block(BlockIndex(block), 0, &mut bytes));
            read.unwrap().unwrap();
            assert_eq!(bytes, [content; BLOCK]);
        }
        // It came back once.
        let again = bench.swap(swap(1, Way::In, &[0, 1]));
        assert_eq!(outcome(again), SwapOutcome::Broken);
    }

    #[test]
    fn host_memory_has_a_limit_and_what_does_not_fit_leaves_nothing() {
        let mut bench = bench(3 * BLOCK);
        let first = bench.swap(swap(1, Way::Out, &[0, 1]));
        assert_eq!(outcome(first), SwapOutcome::Copied);
        let second = bench.swap(swap(2, Way::Out, &[2, 3]));
        assert_eq!(outcome(second), SwapOutcome::Broken);
        let unreadable = bench.swap(swap(3, Way::Out, &[9]));
        assert_eq!(outcome(unreadable), SwapOutcome::Broken);
        assert_eq!(bench.cellar.take(swap(1, Way::In, &[]).handoff).len(), 2);
        let third = bench.swap(swap(2, Way::Out, &[2, 3, 4]));
        assert_eq!(
            outcome(third),
            SwapOutcome::Copied,
            "all of it is free again"
        );
    }
}
