//! How a product is divided among threads.
//!
//! Invariant: which division is chosen changes no bit of the result, only who computes it.

use crate::kernel::product::Piece;
use crate::kernel::tile::Tiles;
use std::ops::Range;

/// Words of weights times register tiles below which a product is not worth dividing.
const PIECE_WORDS: usize = 16384;
/// Tasks per thread that a divided product should have, so that a thread that lost its core to
/// somebody else holds up the others by little.
const TASKS_PER_THREAD: usize = 8;

/// How a product is divided: runs of panels, each read once, and runs of tiles where panels are too few.
pub(crate) struct Grid {
    panels: usize,
    panels_each: usize,
    tiles: usize,
    tiles_each: usize,
}

impl Grid {
    /// For panels of `panel_words` words.
    pub(crate) fn new((panels, panel_words): (usize, usize), cut: Tiles, threads: usize) -> Self {
        let tiles = cut.count();
        let whole = Self {
            panels,
            panels_each: panels.max(1),
            tiles,
            tiles_each: tiles.max(1),
        };
        let words = panel_words * tiles * panels;
        if threads == 1 || words < PIECE_WORDS * threads {
            return whole;
        }
        let wanted = TASKS_PER_THREAD * threads;
        let least = PIECE_WORDS.div_ceil(panel_words * tiles);
        let panels_each = (panels / wanted).max(least);
        let tile_runs = wanted.div_ceil(panels.div_ceil(panels_each)).min(tiles);
        // Where there are so many panels that no run is much longer than others, tiles stay together.
        let tile_runs = match panels >= wanted {
            true => 1,
            false => tile_runs,
        };
        Self {
            panels_each,
            tiles_each: tiles.div_ceil(tile_runs),
            ..whole
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
