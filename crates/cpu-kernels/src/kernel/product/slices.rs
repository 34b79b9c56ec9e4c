//! Slices of the inner dimension, cut into blocks.
//!
//! Invariant: blocks are in order, cover all steps, and none is part of two slices.

use super::BLOCK_STEPS;
use std::ops::Range;

/// A block of the inner dimension.
#[derive(Clone, Debug)]
pub struct SliceBlock {
    pub slice: usize,
    pub steps: Range<usize>,
    /// Steps of the whole slice.
    pub slice_steps: Range<usize>,
    pub begins_slice: bool,
    pub ends_slice: bool,
}

/// All blocks of a product, slice by slice.
pub struct SliceBlocks<'a> {
    ends: &'a [usize],
    slice: usize,
    /// First step of the slice, and of the next block.
    start: usize,
    next: usize,
}

impl<'a> SliceBlocks<'a> {
    /// Blocks of slices that end at these steps.
    #[inline(always)]
    pub fn new(ends: &'a [usize]) -> Self {
        Self {
            ends,
            slice: 0,
            start: 0,
            next: 0,
        }
    }
}

impl Iterator for SliceBlocks<'_> {
    type Item = SliceBlock;

    #[inline(always)]
    fn next(&mut self) -> Option<SliceBlock> {
        let end = *self.ends.get(self.slice)?;
        let steps = self.next..end.min(self.next + BLOCK_STEPS);
        let block = SliceBlock {
            slice: self.slice,
            slice_steps: self.start..end,
            begins_slice: steps.start == self.start,
            ends_slice: steps.end == end,
            steps,
        };
        self.next = block.steps.end;
        if block.ends_slice {
            self.slice += 1;
            self.start = end;
        }
        Some(block)
    }
}
