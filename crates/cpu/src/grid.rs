//! Division of a product among threads.
//!
//! Invariant: the division changes no bit of the result, only the thread that computes it.

use cleave_cpu_kernels::kernel::product::ProductPiece;
use cleave_cpu_kernels::kernel::tile::Tiles;
use std::ops::Range;

/// Words of weights times register tiles per thread below which dividing a product does not pay.
const PIECE_WORDS: usize = 16384;
/// Tasks per thread of a divided product, so that a thread that loses its core delays the others
/// only a little.
const TASKS_PER_THREAD: usize = 8;

/// Division of a product into runs of panels, each read once, and into runs of tiles if panels are
/// too few.
pub(crate) struct ProductGrid {
    panels: usize,
    panels_per_task: usize,
    tiles: usize,
    tiles_per_task: usize,
}

impl ProductGrid {
    /// Divides a product with panels of `panel_words` words.
    pub(crate) fn new(panels: usize, panel_words: usize, cut: Tiles, threads: usize) -> Self {
        let tiles = cut.count();
        let whole = Self {
            panels,
            panels_per_task: panels.max(1),
            tiles,
            tiles_per_task: tiles.max(1),
        };
        let words = panel_words * tiles * panels;
        if threads == 1 || words < PIECE_WORDS * threads {
            return whole;
        }
        let tasks_target = TASKS_PER_THREAD * threads;
        let least = PIECE_WORDS.div_ceil(panel_words * tiles);
        let panels_each = (panels / tasks_target).max(least);
        let tile_runs = tasks_target
            .div_ceil(panels.div_ceil(panels_each))
            .min(tiles);
        // With many panels, runs are about equally long, and tiles stay together.
        let tile_runs = if panels >= tasks_target { 1 } else { tile_runs };
        Self {
            panels_per_task: panels_each,
            tiles_per_task: tiles.div_ceil(tile_runs),
            ..whole
        }
    }

    fn tile_runs(&self) -> usize {
        self.tiles.div_ceil(self.tiles_per_task)
    }

    pub(crate) fn tasks_count(&self) -> usize {
        self.panels.div_ceil(self.panels_per_task) * self.tile_runs()
    }

    pub(crate) fn piece(&self, task: usize) -> ProductPiece {
        ProductPiece {
            panels: run_range(task / self.tile_runs(), self.panels_per_task, self.panels),
            tiles: run_range(task % self.tile_runs(), self.tiles_per_task, self.tiles),
        }
    }
}

/// Range of the `index`-th run of `each` out of `count`.
pub(crate) fn run_range(index: usize, each: usize, count: usize) -> Range<usize> {
    index * each..((index + 1) * each).min(count)
}
