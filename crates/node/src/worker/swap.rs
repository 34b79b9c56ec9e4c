//! Blocks in host memory, kept for sequences that gave theirs up.
//!
//! Owns: the copies, each under its hand-off's name. Never: decides who gives up blocks, or when they
//! come back. Lives on the engine's thread, so that no copy meets a step or another copy.
//! Invariant: no more bytes are kept than were allowed, and every copy asked for is answered once.

use super::engine::Bench;
use cleave_domain::{BlockIndex, HandoffId};
use cleave_sched::{Input, SwapOutcome};
use std::collections::BTreeMap;
use std::time::Instant;
use tracing::error;

/// A sequence's blocks, to be copied one way.
#[derive(Debug)]
pub(crate) struct Swap {
    pub(crate) handoff: HandoffId,
    /// In the sequence's order.
    pub(crate) blocks: Vec<BlockIndex>,
    pub(crate) way: Way,
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
    /// The fact that answers it.
    pub(crate) fn answer(&self, outcome: SwapOutcome, began: Instant) -> Input {
        let (handoff, took) = (self.handoff, began.elapsed());
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
    kept: BTreeMap<HandoffId, Vec<Vec<u8>>>,
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
        self.kept.entry(handoff).or_default().push(block);
    }

    /// Gives up what is kept of a hand-off.
    pub(crate) fn take(&mut self, handoff: HandoffId) -> Vec<Vec<u8>> {
        let blocks = self.kept.remove(&handoff).unwrap_or_default();
        self.bytes -= blocks.iter().map(|block| block.len() as u64).sum::<u64>();
        blocks
    }
}

impl Bench {
    /// Copies a sequence's blocks out or back in. What cannot be copied whole is not kept.
    pub(crate) fn swap(&mut self, swap: &Swap) -> Input {
        let began = Instant::now();
        let copied = match swap.way {
            Way::Out => self.swap_out(swap),
            Way::In => self.swap_in(swap),
        };
        let outcome = match copied {
            Ok(()) => SwapOutcome::Copied,
            Err(reason) => {
                let (handoff, way) = (swap.handoff, swap.way);
                error!(%handoff, ?way, %reason, "cannot swap a sequence");
                drop(self.cellar.take(swap.handoff));
                SwapOutcome::Broken
            }
        };
        swap.answer(outcome, began)
    }

    fn swap_out(&mut self, swap: &Swap) -> Result<(), String> {
        for block in &swap.blocks {
            let room = self.cellar.room(self.limits.block_bytes as usize);
            let mut bytes = room.ok_or("host memory for swapping is used up")?;
            let read = self.guarded(|engine| engine.read_block(*block, 0, &mut bytes));
            read?.map_err(|error| error.to_string())?;
            self.cellar.keep(swap.handoff, bytes);
        }
        Ok(())
    }

    fn swap_in(&mut self, swap: &Swap) -> Result<(), String> {
        let kept = self.cellar.take(swap.handoff);
        if kept.len() != swap.blocks.len() {
            let (kept, wanted) = (kept.len(), swap.blocks.len());
            return Err(format!("{kept} blocks are kept in place of {wanted}"));
        }
        for (block, bytes) in swap.blocks.iter().zip(&kept) {
            let written = self.guarded(|engine| engine.write_block(*block, 0, bytes));
            written?.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}
