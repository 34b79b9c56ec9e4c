//! How a product is divided among threads.
//!
//! Invariant: which division is chosen changes no bit of the result, only who computes it.

use crate::kernel::product::{PANEL, Piece, Product};
use crate::kernel::tile::Tiles;
use std::ops::Range;

/// Words of weights times register tiles below which a product is not worth dividing.
const PIECE_WORDS: usize = 16384;
/// Tasks per thread that a divided product should have, so that a thread that lost its core to
/// somebody else holds up the others by little.
const TASKS_PER_THREAD: usize = 4;

/// How a product is divided: runs of panels, and runs of tiles when panels are too few.
pub(crate) struct Grid {
    panels: usize,
    panels_each: usize,
    tiles: usize,
    tiles_each: usize,
}

impl Grid {
    pub(crate) fn new(product: &Product<'_>, cut: Tiles, threads: usize) -> Self {
        let (panels, tiles) = (product.columns.div_ceil(PANEL), cut.count());
        let panel_words = product.steps * PANEL * tiles;
        let panels_each = if threads == 1 {
            panels.max(1)
        } else {
            PIECE_WORDS.div_ceil(panel_words.max(1))
        };
        let runs = panels.div_ceil(panels_each).max(1);
        let wanted = if panel_words * panels < PIECE_WORDS * threads {
            1
        } else {
            (TASKS_PER_THREAD * threads).div_ceil(runs)
        };
        Self {
            panels,
            panels_each,
            tiles,
            tiles_each: tiles.div_ceil(wanted.min(tiles.max(1))).max(1),
        }
    }

    fn tile_runs(&self) -> usize {
        self.tiles.div_ceil(self.tiles_each)
    }

    pub(crate) fn tasks_count(&self) -> usize {
        self.panels.div_ceil(self.panels_each) * self.tile_runs()
    }

    pub(crate) fn piece(&self, task: usize) -> Piece {
        Piece {
            panels: piece(task / self.tile_runs(), self.panels_each, self.panels),
            tiles: piece(task % self.tile_runs(), self.tiles_each, self.tiles),
        }
    }
}

/// The `index`-th run of `each` out of `count`.
pub(crate) fn piece(index: usize, each: usize, count: usize) -> Range<usize> {
    index * each..((index + 1) * each).min(count)
}
