//! The rows of one forward pass.
//!
//! Owns: which tokens run, and where each of them lies.
//! Invariant: the segments' tokens follow one another, without gaps.

use cleave_domain::{BlockIndex, KvPlane, TokenId};
use std::ops::Range;

/// The rows of one forward pass: every segment's tokens one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token of each row, `(rows)`; ignored for rows in `fed_rows`.
    pub tokens: Vec<TokenId>,
    /// Rows whose token is the result of the last draw, in row order; only if [`Ops::can_draw`].
    pub fed_rows: Vec<FedRow>,
    /// Position of each row in its sequence, `(rows)`.
    pub positions: Vec<u32>,
    /// Segments in row order; together they cover every row.
    pub segments: Vec<BatchSegment>,
    /// Block tables of all segments, one after the other; then, if the model has a window plane,
    /// those of that plane in the same order, each as long as the other of its segment.
    pub blocks: Vec<BlockIndex>,
    /// Where the tables of the window plane begin; `None` without that plane.
    pub windows_start: Option<usize>,
}

impl Batch {
    /// Number of rows: one for each token.
    pub fn rows_count(&self) -> usize {
        self.tokens.len()
    }

    /// A segment's block table in a plane: block `i` holds positions `i × block_tokens ..`. In
    /// place of a block that the sequence gave up, it has the first one of its window: kernels
    /// walk keys in tiles, and read and mask those of a tile that are before the window.
    pub fn table(&self, segment: &BatchSegment, plane: KvPlane) -> &[BlockIndex] {
        let start = self.tables_start(plane);
        &self.blocks[start + segment.blocks.start..start + segment.blocks.end]
    }

    /// Where the tables of a plane begin in [`Batch::blocks`].
    ///
    /// # Panics
    /// If the batch has no such plane.
    pub fn tables_start(&self, plane: KvPlane) -> usize {
        match plane {
            KvPlane::Blocks => 0,
            KvPlane::Window => self.windows_start.expect("a plane of the pool"),
            KvPlane::State => unreachable!("states have no tables"),
        }
    }
}

/// A row whose token the host does not know yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FedRow {
    /// Row of the batch.
    pub row: u32,
    /// Row of the last [`Ops::queue_draw`] whose token it takes. If that draw failed because its
    /// logits were not finite, any token of the table will do: the row's result is never reported.
    pub draw_row: u32,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSegment {
    /// Rows in the batch; row `rows.start + i` is at `position + i`.
    pub rows: Range<usize>,
    /// Position of the first row. Keys and values of `0..position` are already in the pool.
    pub position: usize,
    /// Block table in the plane of blocks, a range of [`Batch::blocks`]; covers
    /// `position + rows.len()` tokens. No other segment stores rows in the blocks that this one
    /// stores its rows in.
    pub blocks: Range<usize>,
    /// Slot of the sequence's state, where the model has one: the state after `position` tokens,
    /// which the segment's rows replace. No other segment has this slot.
    pub state: Option<BlockIndex>,
}
