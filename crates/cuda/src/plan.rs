//! The division of attention's work into items for the device.
//!
//! Owns: segments, tiles of packed rows, and the assignment of spans of keys to items, as
//! `kernels/attend/attend.cuh` describes.
//! Never: touches the device.
//! Invariant: every packed row sees each of its spans in exactly one item. How keys are cut into
//! spans depends on their positions alone, so the cut into items changes no bit of a result.

use cleave_engine::ops::{Batch, BatchSegment};
use std::ops::Range;

/// The number of keys of one span: `SPAN_KEYS` of the kernels.
pub(crate) const SPAN_KEYS: usize = 512;
/// Packed rows of a tile in a segment that has no more rows than this: `DECODE_ROWS` of the
/// kernels.
pub(crate) const DECODE_ROWS: usize = 16;
/// Packed rows of any other tile: `PREFILL_ROWS` of the kernels.
pub(crate) const PREFILL_ROWS: usize = 64;
/// Floats of a state before its values: `STATE_HEADER` of the kernels.
pub(crate) const STATE_HEADER: usize = 4;

/// Mirrors `AttendSegment` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SegmentEntry {
    pub(crate) row: u32,
    pub(crate) rows: u32,
    pub(crate) position: u32,
    pub(crate) table: u32,
}

/// Mirrors `AttendItem` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct AttentionItem {
    pub(crate) segment: u32,
    pub(crate) row: u32,
    pub(crate) span_first: u32,
    pub(crate) span_end: u32,
    pub(crate) parts: u32,
    pub(crate) states: u32,
    pub(crate) arrival: u32,
    pub(crate) padding: u32,
}

/// The input of the cut besides the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionPlanShape {
    /// Query heads for each KV head.
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    /// Sliding window in tokens, see `Attention::window`.
    pub(crate) window: Option<usize>,
    /// Thread blocks that the device runs at once.
    pub(crate) blocks_count: usize,
    /// Whether there is a kernel for tiles of `PREFILL_ROWS`; without it all tiles have
    /// `DECODE_ROWS`.
    pub(crate) has_prefill: bool,
}

/// The items of one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CudaAttentionPlan {
    /// Items for the kernel of few rows.
    pub(crate) decode: Vec<AttentionItem>,
    /// Items for the kernel of many rows.
    pub(crate) prefill: Vec<AttentionItem>,
    /// Row states in the workspace.
    pub(crate) states_count: usize,
    /// Counters in the workspace.
    pub(crate) arrivals_count: usize,
}

/// Packed rows of one segment that are computed together.
#[derive(Clone, Debug)]
struct AttentionTile {
    segment: usize,
    rows: Range<usize>,
    spans: Range<usize>,
    is_decode: bool,
}

/// Returns the batch's segments as kernels read them.
pub(crate) fn segments(batch: &Batch) -> Vec<SegmentEntry> {
    let entry = |segment: &BatchSegment| SegmentEntry {
        row: segment.rows.start as u32,
        rows: segment.rows.len() as u32,
        position: segment.position as u32,
        table: segment.blocks.start as u32,
    };
    batch.segments.iter().map(entry).collect()
}

impl CudaAttentionPlan {
    /// Cuts a batch into items.
    pub(crate) fn new(batch: &Batch, shape: &AttentionPlanShape) -> Self {
        let segments = batch.segments.iter().enumerate();
        let tiles: Vec<AttentionTile> = segments
            .flat_map(|(index, segment)| tiles(index, segment, shape))
            .collect();
        // An item has at most one thread block's share of the spans, so that every block has work.
        // Shorter ones would cost more ways of states through memory, and more waits at their ends.
        let spans: usize = tiles.iter().map(|tile| tile.spans.len()).sum();
        let spans_max = (spans * shape.kv_heads).div_ceil(shape.blocks_count).max(1);
        let mut plan = Self::default();
        for tile in tiles {
            let parts = tile.spans.len().div_ceil(spans_max);
            plan.add_tile(&tile, parts, shape.kv_heads);
        }
        // The longest items start first, so that no block begins a long one when the others are
        // done. Equal ones stay in order: the sort is stable.
        let longest_first =
            |item: &AttentionItem| std::cmp::Reverse(item.span_end - item.span_first);
        plan.decode.sort_by_key(longest_first);
        plan.prefill.sort_by_key(longest_first);
        plan
    }

    fn add_tile(&mut self, tile: &AttentionTile, parts: usize, kv_heads: usize) {
        let spans = tile.spans.len();
        let each = spans.div_ceil(parts.max(1)).max(1);
        let parts = spans.div_ceil(each);
        let (states, arrival) = (self.states_count, self.arrivals_count);
        // Parts of one tile write their states to memory; the one that arrives last merges them.
        if parts > 1 {
            self.states_count += kv_heads * spans * tile.rows.len();
            self.arrivals_count += kv_heads;
        }
        let items = if tile.is_decode {
            &mut self.decode
        } else {
            &mut self.prefill
        };
        for part in 0..parts {
            let first = tile.spans.start + part * each;
            items.push(AttentionItem {
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
    index: usize,
    segment: &BatchSegment,
    shape: &AttentionPlanShape,
) -> impl Iterator<Item = AttentionTile> {
    let AttentionPlanShape {
        group,
        window,
        has_prefill,
        ..
    } = *shape;
    let packed = segment.rows.len() * group;
    let is_decode = packed <= DECODE_ROWS || !has_prefill;
    let each = if is_decode { DECODE_ROWS } else { PREFILL_ROWS };
    let position = segment.position;
    (0..packed).step_by(each).map(move |first| {
        let rows = first..(first + each).min(packed);
        let first_position = position + rows.start / group;
        let last_position = position + (rows.end - 1) / group;
        // The tile's first row sees the farthest back: spans before its window are left out.
        let first_visible = window.map_or(0, |window| (first_position + 1).saturating_sub(window));
        AttentionTile {
            segment: index,
            rows,
            spans: first_visible / SPAN_KEYS..last_position / SPAN_KEYS + 1,
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
                state: None,
            });
            row += rows;
        }
        batch
    }

    proptest! {
        /// Each packed row has each span that it sees exactly once; two tiles share no state and no
        /// counter.
        #[test]
        fn every_packed_row_is_paired_with_each_span_once(
            segments in prop::collection::vec((0usize..6000, 1usize..90), 1..12),
            group in 1usize..9,
            kv_heads in 1usize..9,
            window in prop::option::of(1usize..3000),
            blocks_count in 1usize..300,
            has_prefill: bool,
        ) {
            let batch = batch(&segments);
            let shape = AttentionPlanShape { group, kv_heads, window, blocks_count, has_prefill };
            let plan = CudaAttentionPlan::new(&batch, &shape);
            prop_assert!(has_prefill || plan.prefill.is_empty());
            let mut counts: BTreeMap<(u32, usize, usize), usize> = BTreeMap::new();
            let mut states: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
            for (items, each) in [(&plan.decode, DECODE_ROWS), (&plan.prefill, PREFILL_ROWS)] {
                for item in items {
                    let (position, rows) = segments[item.segment as usize];
                    let first = item.row as usize;
                    for row in first..(first + each).min(rows * group) {
                        for span in item.span_first..item.span_end {
                            *counts.entry((item.segment, row, span as usize)).or_default() += 1;
                        }
                        let at = position + row / group;
                        let least = window.map_or(0, |window| (at + 1).saturating_sub(window));
                        for span in least / SPAN_KEYS..=at / SPAN_KEYS {
                            counts.entry((item.segment, row, span)).or_default();
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
            prop_assert!(counts.values().all(|count| *count == 1));
            let rows: usize = segments.iter().map(|(_, rows)| rows * group).sum();
            let found: std::collections::BTreeSet<_> = counts.keys().map(|(s, r, _)| (s, r)).collect();
            prop_assert_eq!(found.len(), rows);
        }
    }
}
