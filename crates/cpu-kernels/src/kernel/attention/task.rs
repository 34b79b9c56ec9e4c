//! A task of attention, with the sizes derived from its query rows.
//!
//! Owns: the order of a task's rows, and the position of a head's keys and values in the pool.

use super::{LayerAttention, Queries, head_width, query_heads_per_kv_head};
use crate::kernel::tile::{Tiles, rows_compiled};

/// A task with its derived sizes.
pub(in crate::kernel) struct AttentionTask<'a, T> {
    pub(in crate::kernel) attend: &'a LayerAttention<'a, T>,
    pub(in crate::kernel) queries: Queries<'a>,
    pub(super) group: usize,
    /// Rows per head; rows of the first head come first.
    pub(super) rows: usize,
    pub(in crate::kernel) width: usize,
    /// Register tiles of a head's rows.
    pub(super) cut: Tiles,
    /// Rows per head after rounding tiles up to compiled sizes.
    pub(super) packed_rows: usize,
}

impl<'a, T> AttentionTask<'a, T> {
    pub(super) fn new(
        attend: &'a LayerAttention<'a, T>,
        queries: Queries<'a>,
        tile_rows: usize,
    ) -> Self {
        let group = query_heads_per_kv_head(attend.heads);
        let rows = queries.tokens * group;
        let cut = Tiles::new(rows, tile_rows);
        Self {
            attend,
            queries,
            group,
            rows,
            width: head_width(attend.heads),
            cut,
            packed_rows: match cut.count() {
                1 => rows_compiled(rows, tile_rows),
                count => count * tile_rows,
            },
        }
    }

    pub(super) fn heads_count(&self) -> usize {
        self.queries.kv_heads.len()
    }

    pub(super) fn rows_count(&self) -> usize {
        self.heads_count() * self.rows
    }
}

impl<T> AttentionTask<'_, T> {
    /// First key within the window of a token at this position.
    pub(super) fn first_visible_key(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.attend.window)
    }

    /// Batch row and query head of a task's row.
    pub(super) fn token_and_head(&self, row: usize) -> (usize, usize) {
        let (head, row) = (row / self.rows, row % self.rows);
        let kv_head = self.queries.kv_heads.start + head;
        (
            self.queries.row + row / self.group,
            kv_head * self.group + row % self.group,
        )
    }

    /// Offsets in the pool of a head's keys and values at a position, and the token in its block.
    #[inline(always)]
    pub(in crate::kernel) fn element_offsets(
        &self,
        head: usize,
        position: usize,
    ) -> ([usize; 2], usize) {
        let attend = self.attend;
        let block = self.queries.table[position / attend.block_tokens].0 as usize;
        let head = (self.queries.kv_heads.start + head) * attend.head_elements;
        let start = block * attend.block_elements + head;
        let (keys, values) = attend.layer_offsets;
        (
            [start + keys, start + values],
            position % attend.block_tokens,
        )
    }
}
