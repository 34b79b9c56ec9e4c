// Rows times a weight matrix, `out[r] = W · x[r] + bias`: the contract between the host and the
// kernels.
//
// Owns: the arguments, and the cut of slices of the inner dimension into spans.
// Never: computes.
// Invariant: an output element is summed in spans of the inner dimension, each from zero in steps of 16 in order.
// A slice's spans are added up in order, and the slices' sums as a balanced binary tree; the bias comes last. (Where
// groups have scales, a span is summed group by group, each from zero; where columns have, each span's sum is scaled,
// so that a matrix with some of the slices gives a part of the tree.) The model says where slices end, and where their
// spans begin depends on the matrix's shape only, so a row gives the same bits from every tensor-core kernel here,
// however many rows there are.
//
// The host's part for the tensor-core kernels (`matmul_few*`, `matmul_many*`, and Hopper's `matmul_wide*` and
// `matmul_cluster*`, which take bf16 alone):
// - `span_width` is `span_width_of(columns, slice_ends, slices)` of the whole product, the same for every launch with
//   this matrix, and for every matrix that has some of the product's slices.
// - `slices` is 1, 2, 4 or 8. Slices are multiples of 16 elements, and of a chunk and a group of the format; one alone
//   may have any width that the kernel takes.
// - `width` is a multiple of 8 (see WeightLayout for other formats), and weights and rows begin at multiples of 16
//   bytes. A bf16 matrix of any other width goes to `matmul_plain_bf16`, for any number of rows, so that one kernel
//   family multiplies a matrix at all batch sizes.
// - The kernel is chosen by the bucket's rows, see the entries. Each takes any number of rows and
//   gives the right result; another choice is only slower.
// - Workspace, with more than one slice: blocks × WAITING_MOST × (tile columns × tile rows) floats in `sums`.
// - The grid is any number of blocks; as many as fit the device at once is best: the kernels walk their tiles
//   with the grid's stride and have the next tile's copies under way while they finish one. cluster* take whole
//   clusters of them.
//
// WeightLayout, as the host packs it when it loads a matrix. All are (columns, width), rows of the matrix one after
// the other, and within each 16 elements of a row (32 for int4) ordered so that a lane gets what it multiplies with
// one load:
// - fp8 (e4m3) and int8 (two's complement): a byte each; bytes 4c .. 4c + 3 of a 16 are its elements 2c, 2c + 1,
//   2c + 8, 2c + 9. `width` is a multiple of 16.
// - int4, without sign: 16 bytes hold 32 elements, four words; of word c, bits 4i .. 4i + 3 are, for i = 0 .. 3,
//   element 2c + 8i, and for i = 4 .. 7 element 2c + 1 + 8 (i - 4). `width` is a multiple of 32.
// - fp4 (e2m1): as int4.
// Scales: `column_scales`, (columns) f32, multiplies a column's sum of each span; or `group_scales`, (groups,
// columns rounded up to 4) words, for groups of 32, 64 or 128 elements of the inner dimension, of which `width` is a
// multiple (for nvfp4, of 16): an f32 that multiplies the group's sum. For int4 without its lowest byte, so exact for
// scales that were f16 or bf16: that byte is the zero point, 0 to 15, which is subtracted from the elements.
#pragma once
#include "expert_rows.cuh"
#include "prims.cuh"

// The most slices of the inner dimension.
constexpr u32 SLICES_MOST = 8;

struct MatmulArgs {
    // (columns, width): bf16 as checkpoints store it, or see WeightLayout.
    const void* weights;
    // At most one of the two is given.
    const float* column_scales;
    const u32* group_scales;
    // (rows, width).
    const bf16* x;
    // (columns), or null.
    const float* bias;
    // (rows, columns), bf16 or f32.
    void* out;
    // Rows that there are, on the device; at most what the workspace was made for.
    const u32* rows_count;
    float* sums;
    u32 columns;
    u32 width;
    // The spans of a slice: `span_width` each but the last. A multiple of SPAN_UNIT.
    u32 span_width;
    // log2 of a group's elements: 4 to 7, if there are `group_scales`.
    u32 group_shift;
    // 1 if `out` is f32, 0 if bf16.
    u32 is_out_f32;
    u32 slices;
    // The end of each slice; the last is `width`.
    u32 slice_ends[SLICES_MOST];
};

// Arguments of products of several experts; see `experts_*` for the host's part.
struct ExpertMatmulArgs {
    // The first expert's. `out` has a row for each place, and `rows_count` is not read.
    MatmulArgs product;
    ExpertRows rows;
};

// Arguments of the plain kernels.
struct MatmulPlainArgs {
    // (columns, width) and (rows, width) of T.
    const void* weights;
    const void* x;
    const float* bias;
    // (rows, columns) of T, or f32.
    void* out;
    const u32* rows_count;
    u32 columns;
    u32 width;
    u32 is_out_f32;
    u32 slices;
    // The end of each slice; the last is `width`, and the others are multiples of 16.
    u32 slice_ends[SLICES_MOST];
};

struct ExpertMatmulPlainArgs {
    // As in ExpertMatmulArgs.
    MatmulPlainArgs product;
    ExpertRows rows;
};

namespace matmul {

// Spans begin at multiples of this.
constexpr u32 SPAN_UNIT = 128;
// Columns of a tile of the kernels for few rows.
constexpr u32 FEW_COLUMNS = 64;
// Blocks that fill an H200: two on each of 132 multiprocessors. Part of the arithmetic, so the same everywhere.
constexpr u32 BLOCKS_FILLED = 264;
// The most spans of a slice.
constexpr u32 SPANS_MOST = 16;
// The least spans of all slices together, where a span still has two units: blocks that all read their rows at one
// distance from the rows' beginnings would crowd into the same parts of the memory.
constexpr u32 SPANS_LEAST = 4;
// Sums of slices that may wait at once for their neighbours' in memory.
constexpr u32 WAITING_MOST = 3;

CONSTANT_DEVICE u32 divided_up(u32 a, u32 b) { return (a + b - 1) / b; }

// The width of a span: of the numbers of spans, the one with which the busiest of BLOCKS_FILLED blocks would read least
// if each took single spans of tiles of FEW_COLUMNS columns. More are taken only where they save a 25th. A span has at
// least two units, unless a slice has one alone. No kernel takes single spans today; the rule stays because bits depend
// on it.
CONSTANT_DEVICE u32 span_width_of(u32 columns, const u32* slice_ends, u32 slices) {
    const u32 tiles = divided_up(columns, FEW_COLUMNS);
    u32 units = 0;
    for (u32 slice = 0; slice < slices; slice++) {
        const u32 of_slice = divided_up(slice_ends[slice] - (slice == 0 ? 0 : slice_ends[slice - 1]), SPAN_UNIT);
        units = of_slice > units ? of_slice : units;
    }
    const u32 most = units / 2 < SPANS_MOST ? units / 2 : SPANS_MOST, wanted = divided_up(SPANS_LEAST, slices);
    const u32 least = most < 1 ? 1 : most < wanted ? most : wanted;
    u32 best = 0, best_cost = 0;
    for (u32 spans = least; spans == least || spans <= most; spans++) {
        const u32 length = divided_up(units, spans);
        const u32 cost = divided_up(tiles * slices * divided_up(units, length), BLOCKS_FILLED) * length;
        if (spans == least || cost * 25 <= best_cost * 24) {
            best = length;
            best_cost = cost;
        }
    }
    return best * SPAN_UNIT;
}

}  // namespace matmul
