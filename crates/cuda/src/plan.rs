//! How attention's work is cut for the device.
//!
//! Owns: segments, tiles of packed rows, and which spans of keys go to which item, as
//! `kernels/attend/attend.cuh` tells.
//! Never: touches the device.
//! Invariant: every packed row sees each of its spans in exactly one item. How keys are cut into spans depends on
//! their positions alone, so the cut into items changes no bit of a result.

use cleave_engine::ops::{Batch, BatchSegment};
use std::ops::Range;

/// Keys of one span: `SPAN_KEYS` of the kernels.
pub(crate) const SPAN_KEYS: usize = 512;
/// Packed rows of a tile of a segment that has no more than those: `DECODE_ROWS`.
pub(crate) const DECODE_ROWS: usize = 16;
/// Packed rows of any other tile: `PREFILL_ROWS`.
pub(crate) const PREFILL_ROWS: usize = 64;
/// Floats of a state before its values: `STATE_HEADER`.
pub(crate) const STATE_HEADER: usize = 4;

/// `AttendSegment` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SegmentEntry {
    pub(crate) row: u32,
    pub(crate) rows: u32,
    pub(crate) position: u32,
    pub(crate) table: u32,
}

/// `AttendItem` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Item {
    pub(crate) segment: u32,
    pub(crate) row: u32,
    pub(crate) span_first: u32,
    pub(crate) span_end: u32,
    pub(crate) parts: u32,
    pub(crate) states: u32,
    pub(crate) arrival: u32,
    pub(crate) padding: u32,
}

/// What the cut depends on besides the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanShape {
    /// Query heads of a KV head.
    pub(crate) group: usize,
    /// KV heads.
    pub(crate) kv_heads: usize,
    /// See `Attention::window`.
    pub(crate) window: Option<usize>,
    /// Blocks that the device runs at once.
    pub(crate) blocks_count: usize,
    /// Whether there is a kernel for tiles of `PREFILL_ROWS`; else all tiles are of `DECODE_ROWS`.
    pub(crate) has_prefill: bool,
}

/// One batch, cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AttentionPlan {
    /// For the kernel of few rows.
    pub(crate) decode: Vec<Item>,
    /// For the kernel of many.
    pub(crate) prefill: Vec<Item>,
    /// Row states in the workspace.
    pub(crate) states_count: usize,
    /// Counters in the workspace.
    pub(crate) arrivals_count: usize,
}

/// Packed rows of one segment that are computed together.
#[derive(Clone, Debug)]
struct Tile {
    segment: usize,
    rows: Range<usize>,
    spans: Range<usize>,
    is_decode: bool,
}

/// The batch's segments as kernels read them.
pub(crate) fn segments(batch: &Batch) -> Vec<SegmentEntry> {
    let entry = |segment: &BatchSegment| SegmentEntry {
        row: segment.rows.start as u32,
        rows: segment.rows.len() as u32,
        position: segment.position as u32,
        table: segment.blocks.start as u32,
    };
    batch.segments.iter().map(entry).collect()
}

impl AttentionPlan {
    /// Cuts a batch.
    pub(crate) fn new(batch: &Batch, shape: &PlanShape) -> Self {
        let segments = batch.segments.iter().enumerate();
        let tiles: Vec<Tile> = segments.flat_map(|entry| tiles(entry, shape)).collect();
        // With blocks for everybody several times over, states on their way through memory gain nothing.
        let is_full = tiles.len() * shape.kv_heads >= 4 * shape.blocks_count;
        let items = tiles.len() * shape.kv_heads;
        let mut plan = Self::default();
        for tile in tiles {
            let spans = tile.spans.len();
            let parts = match is_full {
                true => 1,
                // So many items that each block has a few, and not more states than that takes.
                false => spans.min((4 * shape.blocks_count).div_ceil(items)),
            };
            plan.add(&tile, parts, shape.kv_heads);
        }
        // The last to start are the short ones. Equal ones stay in order.
        let longest_first = |item: &Item| std::cmp::Reverse(item.span_end - item.span_first);
        plan.decode.sort_by_key(longest_first);
        plan.prefill.sort_by_key(longest_first);
        plan
    }

    fn add(&mut self, tile: &Tile, parts: usize, kv_heads: usize) {
        let spans = tile.spans.len();
        let each = spans.div_ceil(parts.max(1)).max(1);
        let parts = spans.div_ceil(each);
        let (states, arrival) = (self.states_count, self.arrivals_count);
        if parts > 1 {
            self.states_count += kv_heads * spans * tile.rows.len();
            self.arrivals_count += kv_heads;
        }
        let items = match tile.is_decode {
            true => &mut self.decode,
            false => &mut self.prefill,
        };
        for part in 0..parts {
            let first = tile.spans.start + part * each;
            items.push(Item {
                segment: tile.segment as u32,
                row: tile.rows.start as u32,
                span_first: first as u32,
                span_end: (first + each).min(tile.spans.end) as u32,
                parts: parts as u32,
                states: states as u32,
                arrival: arrival as u32,
                padding: 0,
            });
        }
    }
}

fn tiles(
    (index, segment): (usize, &BatchSegment),
    shape: &PlanShape,
) -> impl Iterator<Item = Tile> {
    let PlanShape {
        group,
        window,
        has_prefill,
        ..
    } = *shape;
    let packed = segment.rows.len() * group;
    let is_decode = packed <= DECODE_ROWS || !has_prefill;
    let each = match is_decode {
        true => DECODE_ROWS,
        false => PREFILL_ROWS,
    };
    let position = segment.position;
    (0..packed).step_by(each).map(move |first| {
        let rows = first..(first + each).min(packed);
        let first_position = position + rows.start / group;
        let last_position = position + (rows.end - 1) / group;
        let first_seen = window.map_or(0, |window| (first_position + 1).saturating_sub(window));
        Tile {
            segment: index,
            rows,
            spans: first_seen / SPAN_KEYS..last_position / SPAN_KEYS + 1,
            is_decode,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn batch(segments: &[(usize, usize)]) -> Batch {
        let mut batch = Batch::default();
        let mut row = 0;
        for (position, rows) in segments {
            batch.segments.push(BatchSegment {
                rows: row..row + rows,
                position: *position,
                blocks: 0..0,
            });
            row += rows;
        }
        batch
    }

    proptest! {
        /// Each packed row with each span that it sees, once; states and counters of two tiles apart.
        #[test]
        fn every_row_sees_each_of_its_spans_once(
            segments in prop::collection::vec((0usize..6000, 1usize..90), 1..12),
            group in 1usize..9,
            kv_heads in 1usize..9,
            window in prop::option::of(1usize..3000),
            blocks_count in 1usize..300,
            has_prefill: bool,
        ) {
            let batch = batch(&segments);
            let shape = PlanShape { group, kv_heads, window, blocks_count, has_prefill };
            let plan = AttentionPlan::new(&batch, &shape);
            prop_assert!(has_prefill || plan.prefill.is_empty());
            let mut seen: BTreeMap<(u32, usize, usize), usize> = BTreeMap::new();
            let mut states: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
            for (items, each) in [(&plan.decode, DECODE_ROWS), (&plan.prefill, PREFILL_ROWS)] {
                for item in items {
                    let (position, rows) = segments[item.segment as usize];
                    let first = item.row as usize;
                    for row in first..(first + each).min(rows * group) {
                        for span in item.span_first..item.span_end {
                            *seen.entry((item.segment, row, span as usize)).or_default() += 1;
                        }
                        let at = position + row / group;
                        let least = window.map_or(0, |window| (at + 1).saturating_sub(window));
                        for span in least / SPAN_KEYS..=at / SPAN_KEYS {
                            seen.entry((item.segment, row, span)).or_default();
                        }
                    }
                    if item.parts > 1 {
                        let tile = (item.segment, item.row);
                        prop_assert_eq!(*states.entry(item.states).or_insert(tile), tile);
                        prop_assert!((item.states as usize) < plan.states_count);
                        prop_assert!(item.arrival as usize + kv_heads <= plan.arrivals_count);
                    }
                }
            }
            prop_assert!(seen.values().all(|count| *count == 1));
            let rows: usize = segments.iter().map(|(_, rows)| rows * group).sum();
            let found: std::collections::BTreeSet<_> = seen.keys().map(|(s, r, _)| (s, r)).collect();
            prop_assert_eq!(found.len(), rows);
        }
    }
}
