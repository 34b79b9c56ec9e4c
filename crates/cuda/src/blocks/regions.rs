//! Where blocks of both planes, probe and state slots lie in a pool's memory.
//!
//! Owns: that layout. Never: allocates. Invariant: regions do not overlap, and the size is a
//! multiple of the driver's unit of allocation, so that sharing the pool shares nothing else.

use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::BlockSpan;
use cleave_engine::ops::{KvPoolShape, PoolPlane};
use std::ops::Range;

/// The size of the copy that measures the speed, in bytes.
pub(super) const PROBE_BYTES: usize = 1 << 20;
/// The driver's unit of allocation in bytes: a handle opens whole units.
const GRANULE_BYTES: usize = 2 << 20;
/// The alignment of the probe's bytes, and thereby of the first state slot.
const PROBE_ALIGNMENT: usize = 256;

/// The regions of a pool's memory: the blocks, those of the window plane, the bytes that a speed
/// test overwrites, and the state slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolRegions {
    pub(super) blocks: PoolPlane,
    pub(super) windows: PoolPlane,
    pub(super) states: PoolPlane,
    /// The first byte of the window plane.
    windows_first: usize,
    pub(super) probe_first: usize,
    /// The size of the pool in bytes.
    bytes: usize,
}

impl PoolRegions {
    /// Returns the regions of a pool of this shape; `None` if the sizes overflow.
    pub(crate) fn of(shape: &KvPoolShape) -> Option<Self> {
        let [blocks, windows, states] =
            [KvPlane::Blocks, KvPlane::Window, KvPlane::State].map(|plane| shape.plane(plane));
        Self::new(blocks, windows, states)
    }

    /// Returns the regions for these blocks and slots; `None` if the sizes overflow.
    pub(super) fn new(blocks: PoolPlane, windows: PoolPlane, states: PoolPlane) -> Option<Self> {
        let windows_first = blocks
            .bytes_total()?
            .checked_next_multiple_of(PROBE_ALIGNMENT)?;
        let probe_first = windows_first
            .checked_add(windows.bytes_total()?)?
            .checked_next_multiple_of(PROBE_ALIGNMENT)?;
        let end = probe_first
            .checked_add(PROBE_BYTES)?
            .checked_add(states.bytes_total()?)?;
        let bytes = end.checked_next_multiple_of(GRANULE_BYTES)?;
        (bytes < usize::MAX / 2).then_some(Self {
            blocks,
            windows,
            states,
            windows_first,
            probe_first,
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn plane(&self, plane: KvPlane) -> PoolPlane {
        match plane {
            KvPlane::Blocks => self.blocks,
            KvPlane::Window => self.windows,
            KvPlane::State => self.states,
        }
    }

    /// Returns the bytes of a span in the pool; `None` if the span is outside its plane.
    pub(super) fn range(&self, span: &BlockSpan) -> Option<Range<usize>> {
        let range = self.plane(span.plane).range(span)?;
        let first = self.first(span.plane);
        Some(first + range.start..first + range.end)
    }

    /// Returns the first byte of a plane.
    pub(crate) fn first(&self, plane: KvPlane) -> usize {
        match plane {
            KvPlane::Blocks => 0,
            KvPlane::Window => self.windows_first,
            KvPlane::State => self.probe_first + PROBE_BYTES,
        }
    }

    /// Returns the bytes of a whole block or slot in the pool.
    ///
    /// # Panics
    /// If there is no such block or slot.
    pub(crate) fn whole(&self, plane: KvPlane, block: BlockIndex) -> Range<usize> {
        self.expect_range(&BlockSpan {
            plane,
            block,
            offset: 0,
            len: self.plane(plane).bytes,
        })
    }

    /// Returns the bytes of a span in the pool.
    ///
    /// # Panics
    /// If the span is outside its plane.
    pub(crate) fn expect_range(&self, span: &BlockSpan) -> Range<usize> {
        self.range(span)
            .expect("the engine names spans of the pool")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_regions_do_not_overlap() {
        let plane = |count, bytes| PoolPlane { count, bytes };
        let regions = PoolRegions::new(plane(3, 100), plane(2, 60), plane(2, 40)).unwrap();
        assert_eq!(regions.whole(KvPlane::Blocks, BlockIndex(2)), 200..300);
        assert_eq!(regions.whole(KvPlane::Window, BlockIndex(1)), 572..632);
        assert_eq!(regions.probe_first, 768);
        let states = 768 + PROBE_BYTES;
        let last = regions.whole(KvPlane::State, BlockIndex(1));
        assert_eq!(last, states + 40..states + 80);
        assert_eq!(regions.bytes(), GRANULE_BYTES);
        let none = PoolPlane::default();
        let none = PoolRegions::new(plane(3, 100), none, none).unwrap();
        assert_eq!((none.probe_first, none.bytes()), (512, GRANULE_BYTES));
        for (blocks, states) in [
            (plane(usize::MAX, 2), plane(0, 0)),
            (plane(1, usize::MAX - 7), plane(0, 0)),
            (plane(1, 1), plane(2, usize::MAX / 2)),
            (plane(1, 1), plane(1, usize::MAX / 2)),
        ] {
            assert_eq!(PoolRegions::new(blocks, PoolPlane::default(), states), None);
            assert_eq!(PoolRegions::new(blocks, states, PoolPlane::default()), None);
        }
    }
}
