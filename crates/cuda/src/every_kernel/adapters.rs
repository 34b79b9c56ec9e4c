//! Recipes of the kernels for adapters.

use super::{KernelBench, element_bytes};
use crate::args::{
    AdapterRowsArgs, DeviceAddress, DevicePlace, DeviceTile, ExpandArgs, ShrinkArgs,
};

/// Rows of the step, and the most ranks of its adapters.
const ROWS: usize = 23;
const RANKS_MAX: usize = 13;
/// Products of the model, of which the second is computed.
const PRODUCTS: usize = 2;

/// Mirrors `AdapterChange` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct RecipeChange {
    shrink: DeviceAddress,
    expand: DeviceAddress,
    ranks: u32,
    padding: u32,
}

pub(super) fn run(bench: &KernelBench, name: &str) {
    for width in [264, 41] {
        if name.starts_with("adapt_shrink_") {
            for is_tiled in [0, 1] {
                shrink(bench, name, width, is_tiled);
            }
        } else {
            expand(bench, name, width);
        }
    }
}

/// The table of one adapter with so many ranks, whose first product it leaves as it is.
fn table(bench: &KernelBench, ranks: usize, width: usize) -> DeviceAddress {
    let nothing = RecipeChange {
        shrink: 0,
        expand: 0,
        ranks: 0,
        padding: 0,
    };
    let change = RecipeChange {
        shrink: bench.floats(ranks * width),
        expand: bench.floats(ranks * width),
        ranks: ranks as u32,
        padding: 0,
    };
    let changes: [RecipeChange; PRODUCTS] = [nothing, change];
    bench.of(&changes)
}

/// Ten rows of an adapter with all ranks, three of one with five, and the others without.
fn rows(bench: &KernelBench, width: usize) -> (AdapterRowsArgs, usize, usize) {
    let adapters =
        [(10, RANKS_MAX), (3, 5)].map(|(rows, ranks)| (rows, table(bench, ranks, width)));
    let (mut places, mut tiles) = (Vec::new(), Vec::new());
    for (count, changes) in adapters {
        for first in (0..count).step_by(8) {
            let place = places.len() as u32;
            let rows = first..(first + 8).min(count);
            tiles.push(DeviceTile {
                first: place,
                end: place + rows.len() as u32,
            });
            places.extend(rows.map(|_| changes));
        }
    }
    let places: Vec<DevicePlace> = (0..)
        .zip(places)
        .map(|(place, changes)| DevicePlace {
            changes,
            row: place * 7 % ROWS as u32,
            padding: 0,
        })
        .collect();
    let args = AdapterRowsArgs {
        places: bench.of(&places),
        tiles: bench.of(&tiles),
        counts: bench.of(&[places.len() as u32, tiles.len() as u32]),
        product: 1,
        ranks_most: RANKS_MAX as u32,
    };
    (args, places.len(), tiles.len())
}

fn shrink(bench: &KernelBench, name: &str, width: usize, is_tiled: u32) {
    let (rows, places, _) = rows(bench, width);
    let args = ShrinkArgs {
        x: bench.stored(name, ROWS * width),
        shrunk: bench.zeros(places * RANKS_MAX * 4),
        rows,
        width: width as u32,
        is_tiled,
    };
    // More places are launched than there are.
    let warps = (places + 5) * RANKS_MAX;
    bench.launch(name, [warps.div_ceil(4) as u32, 1, 1], args);
}

fn expand(bench: &KernelBench, name: &str, width: usize) {
    let (rows, places, tiles) = rows(bench, width);
    let args = ExpandArgs {
        shrunk: bench.floats(places * RANKS_MAX),
        out: bench.zeros(ROWS * width * element_bytes(name)),
        rows,
        width: width as u32,
        padding: 0,
    };
    let each = if width.is_multiple_of(8) { 1024 } else { 128 };
    let columns = width.div_ceil(each) as u32;
    bench.launch(name, [tiles as u32 + 2, columns, 1], args);
}
