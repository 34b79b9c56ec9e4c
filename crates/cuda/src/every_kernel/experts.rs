//! Recipes of the kernels for mixtures of experts.

use super::{KernelBench, element_bytes, half_floats};
use crate::args::{
    CombineArgs, ExpertLogitsArgs, ExpertMatmulArgs, ExpertMatmulPlainArgs, ExpertPieceArgs,
    ExpertRowsArgs, ExpertSortArgs, MatmulArgs, MatmulPlainArgs, RouteArgs, slice_ends,
};

/// Experts, and those of each row.
const COUNT: usize = 70;
const CHOSEN: usize = 3;
/// Rows of the piece, which begins at row 2 of 37, and words of its masks.
const ROWS: usize = 35;
const WORDS: usize = 2;

pub(super) fn run(bench: &KernelBench, name: &str) {
    match name {
        "experts_route" => route(bench, name),
        "experts_sort" => sort(bench, name),
        _ if name.starts_with("experts_logits_") => logits(bench, name),
        _ if name.starts_with("experts_combine_") => combine(bench, name),
        _ if name.starts_with("experts_plain_") => plain(bench, name),
        _ => tiled(bench, name),
    }
}

/// A piece that is launched for more rows than there are.
fn piece(bench: &KernelBench) -> ExpertPieceArgs {
    ExpertPieceArgs {
        rows_count: bench.of(&[ROWS as u32 + 2]),
        first: 2,
        most: ROWS as u32 + 10,
    }
}

fn logits(bench: &KernelBench, name: &str) {
    for (width, is_tiled, blocks) in [(264, 0, 700), (264, 1, 30), (41, 0, 700), (41, 1, 30)] {
        let columns = COUNT + 1;
        let args = ExpertLogitsArgs {
            x: bench.stored(name, (ROWS + 2) * width),
            weights: bench.floats(columns * width),
            bias: bench.floats(columns),
            logits: bench.zeros(ROWS * columns * 4),
            piece: piece(bench),
            columns: columns as u32,
            width: width as u32,
            is_tiled,
            padding: 0,
        };
        bench.launch(name, [blocks, 1, 1], args);
    }
}

fn route(bench: &KernelBench, name: &str) {
    for (groups, groups_chosen, score, rule) in [(0, 0, 0, 0), (7, 3, 1, 1), (5, 2, 2, 2)] {
        let args = RouteArgs {
            logits: bench.floats(ROWS * (COUNT + 1)),
            choice_bias: bench.floats(COUNT),
            experts: bench.zeros(ROWS * CHOSEN * 4),
            weights: bench.zeros(ROWS * CHOSEN * 4),
            shared_weights: bench.zeros(ROWS * 4),
            masks: bench.zeros(COUNT * WORDS * 4),
            piece: piece(bench),
            columns: COUNT as u32 + 1,
            count: COUNT as u32,
            chosen: CHOSEN as u32,
            words: WORDS as u32,
            score,
            rule,
            groups,
            groups_chosen,
            is_two_best: 1,
            epsilon: 1e-6,
            scale: 2.0,
            padding: 0,
        };
        bench.launch(name, [WORDS as u32, 1, 1], args);
    }
}

/// Experts of a row: three in a row of them, another first one for each row.
fn experts_of(row: usize) -> [u32; CHOSEN] {
    let first = row * 7 % (COUNT - CHOSEN);
    [first, first + 1, first + 2].map(|expert| expert as u32)
}

fn sort(bench: &KernelBench, name: &str) {
    let mut masks = vec![0u32; COUNT * WORDS];
    let mut experts = Vec::new();
    for row in 0..ROWS {
        for expert in experts_of(row) {
            masks[expert as usize * WORDS + row / 32] |= 1 << (row % 32);
            experts.push(expert);
        }
    }
    let args = ExpertSortArgs {
        masks: bench.of(&masks),
        experts: bench.of(&experts),
        places: bench.zeros(ROWS * CHOSEN * 4),
        rows_of: bench.zeros(ROWS * CHOSEN * 4),
        // No expert has more rows than a tile.
        tiles: bench.zeros(COUNT * 16),
        tiles_count: bench.zeros(4),
        first_row: 2,
        count: COUNT as u32,
        chosen: CHOSEN as u32,
        words: WORDS as u32,
        tile_rows: 8,
        padding: 0,
    };
    bench.launch(name, [COUNT as u32, 1, 1], args);
}

fn combine(bench: &KernelBench, name: &str) {
    for width in [264, 41] {
        let places: Vec<u32> = (0..ROWS * CHOSEN).rev().map(|place| place as u32).collect();
        let args = CombineArgs {
            outputs: bench.floats(ROWS * CHOSEN * width),
            places: bench.of(&places),
            weights: bench.floats(ROWS * CHOSEN),
            shared: bench.floats((ROWS + 2) * width),
            shared_weights: bench.floats(ROWS),
            out: bench.zeros((ROWS + 2) * width * element_bytes(name)),
            piece: piece(bench),
            chosen: CHOSEN as u32,
            width: width as u32,
        };
        bench.launch(name, [ROWS as u32 + 10, 1, 1], args);
    }
}

/// Two experts of four, with a full tile of rows and one row, and one row; and whether rows lie
/// where a list says.
struct SortedRecipe {
    places: usize,
    rows: ExpertRowsArgs,
}

fn sorted(bench: &KernelBench, tile_rows: usize, stride: usize, has_list: bool) -> SortedRecipe {
    let first = tile_rows as u32 + 1;
    // Expert, its first place and its last, and its first tile.
    let tiles: [[u32; 4]; 3] = [[1, 0, first, 0], [1, 0, first, 0], [3, first, first + 1, 2]];
    let places = first as usize + 1;
    let rows_of: Vec<u32> = (0..places as u32).rev().collect();
    SortedRecipe {
        places,
        rows: ExpertRowsArgs {
            tiles: bench.of(&tiles),
            tiles_count: bench.of(&[3]),
            rows_of: if has_list { bench.of(&rows_of) } else { 0 },
            stride: stride as u64,
        },
    }
}

fn plain(bench: &KernelBench, name: &str) {
    let (columns, width, experts) = (70, 45, 4);
    for has_list in [true, false] {
        let stride = columns * width * element_bytes(name);
        let sorted = sorted(bench, 64, stride, has_list);
        let args = ExpertMatmulPlainArgs {
            product: MatmulPlainArgs {
                weights: bench.stored(name, experts * columns * width),
                x: bench.stored(name, sorted.places * width),
                // Experts' biases lie as far from each other as their weights.
                bias: bench.floats(experts * stride / 4),
                out: bench.zeros(sorted.places * columns * 4),
                rows_count: 0,
                columns: columns as u32,
                width: width as u32,
                is_out_f32: 1,
                slices: 1,
                slice_ends: slice_ends([width].into_iter()),
            },
            rows: sorted.rows,
        };
        bench.launch(name, [2, 1, 1], args);
    }
}

/// Each expert's parts lie behind each other: weights, scales, bias.
fn tiled(bench: &KernelBench, name: &str) {
    const SPAN_WIDTH: usize = 128;
    const BLOCKS: u32 = 3;
    let rest = name.trim_start_matches("experts_");
    let rest = rest.trim_start_matches("many");
    let (tile_rows, format) = rest.split_once('_').unwrap();
    let tile_rows: usize = tile_rows.parse().unwrap();
    let (columns, ends, experts): (usize, [usize; 2], usize) = (131, [64, 288], 4);
    let width = ends[1];
    let tile_columns = if format == "bf16" && tile_rows <= 32 {
        64
    } else {
        128
    };
    let weight_bytes = match format {
        "bf16" => columns * width * 2,
        "int4" | "fp4" | "nvfp4" => columns * width / 2,
        _ => columns * width,
    };
    let group_shift = if format == "nvfp4" { 4 } else { 5 };
    let group_words = (width >> group_shift) * columns.next_multiple_of(4);
    // As far apart as all of an expert's parts are long.
    let stride = (weight_bytes + group_words * 4 + columns * 4).next_multiple_of(256);
    for has_list in [true, false] {
        let sorted = sorted(bench, tile_rows, stride, has_list);
        let floats = bench.floats(experts * stride / 4);
        let args = ExpertMatmulArgs {
            product: MatmulArgs {
                weights: match format {
                    "bf16" => bench.of(&half_floats(&bench.numbers(experts * stride / 2))),
                    _ => bench.bytes(experts * stride),
                },
                column_scales: match format {
                    "fp8" | "int8" => floats,
                    _ => 0,
                },
                group_scales: match format {
                    "bf16" | "fp8" | "int8" => 0,
                    _ => floats,
                },
                x: bench.of(&half_floats(&bench.numbers(sorted.places * width))),
                bias: floats,
                out: bench.zeros(sorted.places * columns * 2),
                rows_count: 0,
                sums: bench.zeros(3 * BLOCKS as usize * tile_columns * tile_rows * 4),
                columns: columns as u32,
                width: width as u32,
                span_width: SPAN_WIDTH as u32,
                group_shift,
                is_out_f32: 0,
                slices: 2,
                slice_ends: slice_ends(ends.into_iter()),
            },
            rows: sorted.rows,
        };
        bench.launch(name, [BLOCKS, 1, 1], args);
    }
}
