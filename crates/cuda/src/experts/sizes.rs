//! The sizes of a mixture's work, as far as the host knows them, and the place of each intermediate
//! result in the workspace.
//!
//! Owns: how many rows are computed at once, and the layout of the workspace.
//! Never: touches the device.
//! Invariant: the layout depends on sizes alone, so that a recorded step finds what it left.

use cleave_engine::ops::{ExpertsSpec, ModelSpec, Precision};

/// The alignment of each part of the workspace in bytes.
const ALIGNMENT: usize = 256;
/// Bytes of the experts' results that wait for their sum: pieces of more rows are computed one
/// after the other.
const PIECE_BYTES: usize = 192 << 20;
/// The most rows of a piece: one bit for each lane of a word, and a word for each thread of
/// `experts_sort`.
const PIECE_ROWS_MAX: usize = 32 * 256;
/// Rows of a piece are a multiple of this, which a word of the masks has.
pub(super) const MASK_ROWS: usize = 32;
/// Bytes of a number or of an f32.
const WORD: usize = size_of::<u32>();
/// The places of the smallest tile.
const TILE_ROWS_MIN: usize = 8;
/// Bytes of an `ExpertTile` of the kernels.
const TILE_BYTES: usize = 16;

/// The rows of a piece of a step, and the experts that they may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceSizes {
    /// Rows that are launched, at least 1.
    pub(crate) rows: usize,
    pub(crate) count: usize,
    /// Experts of each row.
    pub(crate) chosen: usize,
}

impl PieceSizes {
    /// Returns the most uses of an expert by a row.
    pub(crate) fn places_max(&self) -> usize {
        self.rows * self.chosen
    }

    /// Returns the most experts that rows use.
    fn touched_max(&self) -> usize {
        self.count.min(self.places_max())
    }

    /// Returns the mean number of rows of an expert that has some, rounded up.
    pub(crate) fn rows_of_expert(&self) -> usize {
        self.places_max().div_ceil(self.touched_max())
    }

    /// Returns the most tiles of `tile_rows` places: every expert's last one may have one place.
    pub(crate) fn tiles_max(&self, tile_rows: usize) -> usize {
        let touched = self.touched_max();
        touched + (self.places_max() - touched) / tile_rows
    }
}

/// A mixture and the rows that it is launched for.
#[derive(Clone, Copy, Debug)]
pub(super) struct MixtureSizes {
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) spec: ExpertsSpec,
    pub(super) precision: Precision,
    /// Columns of the router: the experts, and the gate of a shared one.
    pub(super) router_columns: usize,
}

impl MixtureSizes {
    /// Returns the most rows that are computed at once.
    pub(super) fn piece_rows(&self) -> usize {
        let element = self.precision.element_bytes();
        let of_place = self.hidden * size_of::<f32>() + 3 * self.spec.expert.width * element;
        let rows = PIECE_BYTES / (self.spec.chosen * of_place);
        let rows = rows.clamp(MASK_ROWS, PIECE_ROWS_MAX) / MASK_ROWS * MASK_ROWS;
        rows.min(self.rows)
    }

    /// Returns the pieces' first rows and sizes.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (usize, PieceSizes)> {
        let (each, all, spec) = (self.piece_rows(), self.rows, self.spec);
        (0..all).step_by(each.max(1)).map(move |first| {
            let rows = each.min(all - first);
            let (count, chosen) = (spec.count, spec.chosen);
            let sizes = PieceSizes {
                rows,
                count,
                chosen,
            };
            (first, sizes)
        })
    }
}

/// Offsets of the parts of the workspace, in bytes. Parts of a piece are used by one after the
/// other; the shared expert's have all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkspaceLayout {
    /// `(rows, router columns)`, f32.
    pub(super) logits: usize,
    /// `(rows, chosen)`: experts, their weights, and their places.
    pub(super) experts: usize,
    pub(super) weights: usize,
    pub(super) places: usize,
    /// `(rows)`, f32.
    pub(super) shared_weights: usize,
    /// `(count, words)`.
    pub(super) masks: usize,
    /// `(places)`.
    pub(super) rows_of: usize,
    pub(super) tiles: usize,
    pub(super) tiles_count: usize,
    /// `(places, 2 × width)`, `(places, width)` and `(places, hidden)`; the last is f32.
    pub(super) gate_up: usize,
    pub(super) gated: usize,
    pub(super) outputs: usize,
    /// The same of the shared expert, for all rows.
    pub(super) shared_gate_up: usize,
    pub(super) shared_gated: usize,
    pub(super) shared_outputs: usize,
    /// Size of the workspace.
    pub(super) bytes: usize,
}

impl WorkspaceLayout {
    pub(super) fn new(sizes: &MixtureSizes, tile_rows: usize) -> Self {
        let MixtureSizes {
            rows,
            hidden,
            spec,
            precision,
            router_columns,
        } = *sizes;
        let piece = PieceSizes {
            rows: sizes.piece_rows(),
            count: spec.count,
            chosen: spec.chosen,
        };
        let (element, places) = (precision.element_bytes(), piece.places_max());
        let width = spec.expert.width;
        let shared_width = spec.shared.map_or(0, |shared| shared.mlp.width);
        let shared_rows = if shared_width > 0 { rows } else { 0 };
        let mut used = 0;
        let mut take = |bytes: usize| {
            let at = used;
            used += bytes.next_multiple_of(ALIGNMENT);
            at
        };
        Self {
            logits: take(piece.rows * router_columns * WORD),
            experts: take(places * WORD),
            weights: take(places * WORD),
            places: take(places * WORD),
            shared_weights: take(piece.rows * WORD),
            masks: take(spec.count * piece.rows.div_ceil(MASK_ROWS) * WORD),
            rows_of: take(places * WORD),
            tiles: take(piece.tiles_max(tile_rows) * TILE_BYTES),
            tiles_count: take(WORD),
            gate_up: take(places * 2 * width * element),
            gated: take(places * width * element),
            outputs: take(places * hidden * WORD),
            shared_gate_up: take(shared_rows * 2 * shared_width * element),
            shared_gated: take(shared_rows * shared_width * element),
            shared_outputs: take(shared_rows * hidden * WORD),
            bytes: used,
        }
    }
}

/// Returns an upper bound of the memory for the experts of a step of so many rows, 0 for a model
/// without experts.
pub fn experts_workspace_bytes(spec: &ModelSpec, rows: usize, precision: Precision) -> u64 {
    let layers = spec.layers.iter().filter_map(|layer| layer.experts());
    let bytes = layers.map(|experts| {
        let has_gate = experts.shared.is_some_and(|shared| shared.has_gate);
        let sizes = MixtureSizes {
            rows,
            hidden: spec.hidden_size,
            spec: *experts,
            precision,
            router_columns: experts.count + usize::from(has_gate),
        };
        WorkspaceLayout::new(&sizes, TILE_ROWS_MIN).bytes
    });
    // Memory grows by doubling, and while it does there are two of it.
    let most = bytes.max().map_or(0, usize::next_power_of_two);
    (most + most / 2) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However rows choose, their tiles fit the list that the host made for them.
        #[test]
        fn tiles_of_any_choice_fit_their_list(
            rows in 1usize..40,
            count in 1usize..20,
            tile_rows in prop::sample::select(vec![8usize, 16, 64]),
            seed: u64,
        ) {
            let chosen = (seed % count as u64) as usize + 1;
            let mut rows_of = vec![0usize; count];
            for row in 0..rows {
                for use_index in 0..chosen {
                    let skew = (seed >> (row % 32)) as usize % count;
                    rows_of[(skew + use_index) % count] += 1;
                }
            }
            let tiles: usize = rows_of.iter().map(|rows| rows.div_ceil(tile_rows)).sum();
            let sizes = PieceSizes { rows, count, chosen };
            prop_assert!(tiles <= sizes.tiles_max(tile_rows));
        }
    }
}
