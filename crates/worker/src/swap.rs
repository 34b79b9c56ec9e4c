//! Host memory for the blocks of swapped sequences.
//!
//! Owns: the copies, each under its hand-off's id. Never decides which sequence is swapped, or when
//! it returns; never copies more in one pass than may be written between two steps. Runs on the
//! engine's thread, so that no copy meets a step or another copy; where the device exposes its
//! blocks a copy waits for no step, since no step under way contains the sequence.
//! Invariant: no more bytes are kept than allowed, and every copy is answered once.

use super::engine::EngineThread;
use cleave_domain::HandoffId;
use cleave_engine::BlockSpan;
use cleave_sched::{SwapOutcome, WorkerInput};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use tracing::error;

/// A swap of one sequence's blocks and state in one direction.
#[derive(Debug)]
pub(crate) struct SwapJob {
    pub(crate) handoff: HandoffId,
    /// Its blocks in the sequence's order, then the pieces of its state.
    spans: Vec<BlockSpan>,
    pub(crate) direction: SwapDirection,
    /// How many of them have been copied.
    copied: usize,
    /// The time spent copying; steps in between do not count.
    took: Duration,
}

/// The result of one pass of a swap.
#[derive(Debug)]
pub(crate) enum SwapProgress {
    /// There is more to copy.
    More(SwapJob),
    Over(WorkerInput),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SwapDirection {
    Out,
    /// Back to the pool.
    In,
}

impl SwapDirection {
    fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::In => "in",
        }
    }
}

impl SwapJob {
    pub(crate) fn new(handoff: HandoffId, spans: Vec<BlockSpan>, direction: SwapDirection) -> Self {
        Self {
            handoff,
            spans,
            direction,
            copied: 0,
            took: Duration::ZERO,
        }
    }

    /// The fact that answers it.
    pub(crate) fn answer(&self, outcome: SwapOutcome) -> WorkerInput {
        let (handoff, took) = (self.handoff, self.took);
        match self.direction {
            SwapDirection::Out => WorkerInput::SwappedOut {
                handoff,
                outcome,
                took,
            },
            SwapDirection::In => WorkerInput::SwappedIn {
                handoff,
                outcome,
                took,
            },
        }
    }
}

/// The blocks of swapped sequences.
#[derive(Debug)]
pub(crate) struct HostSwapPool {
    blocks_by_handoff: BTreeMap<HandoffId, VecDeque<Vec<u8>>>,
    bytes: u64,
    bytes_max: u64,
}

impl HostSwapPool {
    /// Empty; memory is taken only when a block is kept.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            blocks_by_handoff: BTreeMap::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// A buffer for one more block; `None` when the limit is reached.
    fn new_buffer(&self, block_bytes: usize) -> Option<Vec<u8>> {
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
        self.blocks_by_handoff
            .entry(handoff)
            .or_default()
            .push_back(block);
    }

    /// How many blocks of a hand-off are kept.
    fn count(&self, handoff: HandoffId) -> usize {
        self.blocks_by_handoff
            .get(&handoff)
            .map_or(0, VecDeque::len)
    }

    /// Gives up the first block that is kept of a hand-off.
    fn take_first(&mut self, handoff: HandoffId) -> Option<Vec<u8>> {
        let blocks = self.blocks_by_handoff.get_mut(&handoff)?;
        let block = blocks.pop_front()?;
        if blocks.is_empty() {
            self.blocks_by_handoff.remove(&handoff);
        }
        self.bytes -= block.len() as u64;
        Some(block)
    }

    /// Gives up what is kept of a hand-off.
    pub(crate) fn take(&mut self, handoff: HandoffId) -> VecDeque<Vec<u8>> {
        let blocks = self.blocks_by_handoff.remove(&handoff).unwrap_or_default();
        self.bytes -= blocks.iter().map(|block| block.len() as u64).sum::<u64>();
        blocks
    }
}

impl EngineThread {
    /// Copies some of a sequence's blocks out or back in: as many as may be written between two
    /// steps, and at least one. A sequence that cannot be copied whole is dropped.
    pub(crate) fn swap(&mut self, mut swap: SwapJob) -> SwapProgress {
        let began = Instant::now();
        let copied = self.copy(&mut swap);
        swap.took += began.elapsed();
        let outcome = match copied {
            Ok(()) if swap.copied < swap.spans.len() => return SwapProgress::More(swap),
            Ok(()) => SwapOutcome::Copied,
            Err(reason) => {
                let (handoff, direction) = (swap.handoff, swap.direction);
                error!(%handoff, direction = direction.name(), %reason, "cannot swap a sequence");
                drop(self.swap_pool.take(swap.handoff));
                SwapOutcome::Broken
            }
        };
        SwapProgress::Over(swap.answer(outcome))
    }

    fn copy(&mut self, swap: &mut SwapJob) -> Result<(), String> {
        if swap.direction == SwapDirection::In {
            let present_count = self.swap_pool.count(swap.handoff) + swap.copied;
            let expected_count = swap.spans.len();
            if present_count != expected_count {
                return Err(format!(
                    "{present_count} blocks are in host memory in place of {expected_count}"
                ));
            }
        }
        let block_bytes = u64::from(self.limits.capacity.block_bytes.max(1));
        let most = (self.limits.write_bytes_max / block_bytes).max(1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let rest: Vec<BlockSpan> = swap.spans[swap.copied..]
            .iter()
            .copied()
            .take(most)
            .collect();
        for span in rest {
            match swap.direction {
                SwapDirection::Out => self.copy_out(swap.handoff, span)?,
                SwapDirection::In => self.copy_in(swap.handoff, span)?,
            }
            swap.copied += 1;
        }
        Ok(())
    }

    fn copy_out(&mut self, handoff: HandoffId, span: BlockSpan) -> Result<(), String> {
        let buffer = self.swap_pool.new_buffer(span.len);
        let mut bytes = buffer.ok_or("host memory for swapping is used up")?;
        self.read_span(span, &mut bytes)?;
        self.swap_pool.keep(handoff, bytes);
        Ok(())
    }

    fn copy_in(&mut self, handoff: HandoffId, span: BlockSpan) -> Result<(), String> {
        let swapped = self.swap_pool.take_first(handoff);
        let bytes = swapped.ok_or("a swapped block is not in host memory")?;
        self.write_span(span, &bytes)
    }

    /// Copies a span of the pool to host memory, past the engine where the device allows it.
    pub(crate) fn read_span(&mut self, span: BlockSpan, bytes: &mut [u8]) -> Result<(), String> {
        let blocks = self.blocks.clone();
        let read = self.catch_engine_panic(|engine| match blocks {
            Some(blocks) => blocks.read(&mut [(span, bytes)]).map(drop),
            None => engine.read_block(span, bytes),
        });
        read?.map_err(|error| self.note_error(&error))
    }

    /// Copies a span from host memory into the pool, past the engine where the device allows it.
    pub(crate) fn write_span(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), String> {
        let blocks = self.blocks.clone();
        let written = self.catch_engine_panic(|engine| match blocks {
            Some(blocks) => blocks.write(&[(span, bytes)]),
            None => engine.write_block(span, bytes),
        });
        written?.map_err(|error| self.note_error(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepTime;
    use crate::engine::EngineHostLimits;
    use crate::kv_copier::tests::{BLOCK, HostMemoryBlocks as DeviceShelf, capacity};
    use cleave_domain::{BlockIndex, FlightId, KvPlane, StepPlan, StepResult};
    use cleave_engine::{DeviceBlocks, Engine, EngineDescription, EngineError};
    use cleave_fleet::HealthMonitor;
    use std::sync::Arc;
    use std::time::Duration;

    /// An engine that has blocks and runs no steps.
    struct BlocksOnlyEngine {
        blocks: Vec<[u8; BLOCK]>,
    }

    impl Engine for BlocksOnlyEngine {
        fn describe(&self) -> &EngineDescription {
            unreachable!("nobody asks a shelf")
        }

        fn step(&mut self, _: &StepPlan) -> Result<StepResult, EngineError> {
            unreachable!("a shelf takes no steps")
        }

        fn read_block(&self, at: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
            let found = self.blocks.get(at.block.0 as usize);
            out.copy_from_slice(found.ok_or(EngineError::Plan("no such block".into()))?);
            Ok(())
        }

        fn write_block(&mut self, at: BlockSpan, b: &[u8]) -> Result<(), EngineError> {
            self.blocks[at.block.0 as usize].copy_from_slice(b);
            Ok(())
        }

        fn copy_blocks(
            &mut self,
            _: KvPlane,
            _: &[(BlockIndex, BlockIndex)],
        ) -> Result<(), EngineError> {
            unreachable!("nobody copies here")
        }
    }

    fn engine_thread(swap_bytes_max: usize) -> EngineThread {
        engine_thread_with(swap_bytes_max, usize::MAX)
    }

    fn engine_thread_with(swap_bytes_max: usize, write_bytes_max: usize) -> EngineThread {
        let blocks = (0..6).map(|i| [i; BLOCK]).collect();
        engine_thread_of(
            Box::new(BlocksOnlyEngine { blocks }),
            None,
            swap_bytes_max,
            write_bytes_max,
        )
    }

    fn engine_thread_of(
        engine: Box<dyn Engine>,
        blocks: Option<Arc<dyn DeviceBlocks>>,
        swap_bytes_max: usize,
        write_bytes_max: usize,
    ) -> EngineThread {
        let limits = EngineHostLimits {
            capacity: capacity(BLOCK as u32),
            write_bytes_max: write_bytes_max as u64,
            swap_bytes_max: swap_bytes_max as u64,
            time: StepTime::Measured,
        };
        let monitor = Arc::new(HealthMonitor::new(Duration::MAX));
        EngineThread::new(engine, blocks, limits, monitor)
    }

    fn swap(flight: u64, direction: SwapDirection, blocks: &[u32]) -> SwapJob {
        let handoff = HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let span = |block: &u32| BlockSpan::of_block(BlockIndex(*block), 0, BLOCK);
        let spans = blocks.iter().map(span).collect();
        SwapJob::new(handoff, spans, direction)
    }

    /// The outcome of a swap that takes one pass.
    fn outcome(progress: SwapProgress) -> SwapOutcome {
        match progress {
            SwapProgress::Over(
                WorkerInput::SwappedOut { outcome, .. } | WorkerInput::SwappedIn { outcome, .. },
            ) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// The number of passes that a swap takes.
    fn passes_count(engine_thread: &mut EngineThread, mut swap: SwapJob) -> usize {
        for count in 1.. {
            match engine_thread.swap(swap) {
                SwapProgress::More(rest) => swap = rest,
                over @ SwapProgress::Over(_) => {
                    assert_eq!(outcome(over), SwapOutcome::Copied);
                    return count;
                }
            }
        }
        unreachable!("copies end")
    }

    // Lesson: 26.
    #[test]
    fn a_swap_pass_writes_at_most_the_limit_between_steps() {
        let mut engine_thread = engine_thread_with(5 * BLOCK, 2 * BLOCK);
        assert_eq!(
            passes_count(
                &mut engine_thread,
                swap(1, SwapDirection::Out, &[0, 1, 2, 3, 4])
            ),
            3
        );
        assert_eq!(
            passes_count(
                &mut engine_thread,
                swap(1, SwapDirection::In, &[5, 4, 3, 2, 1])
            ),
            3
        );
        let mut bytes = [0; BLOCK];
        let read = engine_thread.catch_engine_panic(|engine| {
            engine.read_block(BlockSpan::of_block(BlockIndex(5), 0, BLOCK), &mut bytes)
        });
        read.unwrap().unwrap();
        assert_eq!(bytes, [0; BLOCK], "the first is where it was put");
        // All memory is free again; and one block is copied whatever the limit.
        assert_eq!(engine_thread.swap_pool.bytes, 0);
        let mut engine_thread = engine_thread_with(5 * BLOCK, 0);
        assert_eq!(
            passes_count(&mut engine_thread, swap(1, SwapDirection::Out, &[0, 1])),
            2
        );
    }

    /// The engine has no block to give: a copy through it would fail.
    #[test]
    fn device_blocks_are_swapped_without_the_engine() {
        let blocks = (0..6).map(|i| [i; BLOCK]).collect();
        let beside = Arc::new(DeviceShelf::of(blocks));
        let engine = BlocksOnlyEngine { blocks: Vec::new() };
        let shared: Arc<dyn DeviceBlocks> = Arc::clone(&beside) as _;
        let mut engine_thread =
            engine_thread_of(Box::new(engine), Some(shared), 4 * BLOCK, usize::MAX);
        let out = engine_thread.swap(swap(1, SwapDirection::Out, &[5, 2]));
        assert_eq!(outcome(out), SwapOutcome::Copied);
        let back = engine_thread.swap(swap(1, SwapDirection::In, &[0, 1]));
        assert_eq!(outcome(back), SwapOutcome::Copied);
        assert_eq!(beside.contents()[..2], [[5; BLOCK], [2; BLOCK]]);
    }

    #[test]
    fn swapped_blocks_return_unchanged_to_other_indices() {
        let mut engine_thread = engine_thread(4 * BLOCK);
        let out = engine_thread.swap(swap(1, SwapDirection::Out, &[5, 2]));
        assert_eq!(outcome(out), SwapOutcome::Copied);
        let back = engine_thread.swap(swap(1, SwapDirection::In, &[0, 1]));
        assert_eq!(outcome(back), SwapOutcome::Copied);
        for (block, content) in [(0, 5), (1, 2), (5, 5)] {
            let mut bytes = [0; BLOCK];
            let read = engine_thread.catch_engine_panic(|engine| {
                engine.read_block(BlockSpan::of_block(BlockIndex(block), 0, BLOCK), &mut bytes)
            });
            read.unwrap().unwrap();
            assert_eq!(bytes, [content; BLOCK]);
        }
        // It came back once.
        let again = engine_thread.swap(swap(1, SwapDirection::In, &[0, 1]));
        assert_eq!(outcome(again), SwapOutcome::Broken);
    }

    #[test]
    fn a_swap_over_the_memory_limit_keeps_nothing() {
        let mut engine_thread = engine_thread(3 * BLOCK);
        let first = engine_thread.swap(swap(1, SwapDirection::Out, &[0, 1]));
        assert_eq!(outcome(first), SwapOutcome::Copied);
        let second = engine_thread.swap(swap(2, SwapDirection::Out, &[2, 3]));
        assert_eq!(outcome(second), SwapOutcome::Broken);
        let unreadable = engine_thread.swap(swap(3, SwapDirection::Out, &[9]));
        assert_eq!(outcome(unreadable), SwapOutcome::Broken);
        assert_eq!(
            engine_thread
                .swap_pool
                .take(swap(1, SwapDirection::In, &[]).handoff)
                .len(),
            2
        );
        let third = engine_thread.swap(swap(2, SwapDirection::Out, &[2, 3, 4]));
        assert_eq!(
            outcome(third),
            SwapOutcome::Copied,
            "all of it is free again"
        );
    }
}
