// Matrix products for many rows on Hopper's tensor cores: warpgroups multiply from shared memory (wgmma, sm_90a alone).
//
// Owns: the entry for tiles of 128 rows by blocks that copy for themselves, and the time when a stage's place is free
// again. Where the driver makes tensor maps, cluster.cu is faster.
// Never: adds in another order than matmul_many*: steps of 16, spans from zero, spans added as
// `SliceTree` says. The chip decides whether a step of 16 itself rounds as mma's does, and the host compares
// both before it uses this kernel.
//
// mma.sync reaches some five eighths of the speed of Hopper's tensor cores (arXiv:2402.13499). A stage of 64 elements
// is 2 · 128 · 128 · 64 operations, 512 cycles of a multiprocessor's 4096 a cycle, in which each of two warpgroups
// reads 8 KB of weights and 16 KB of rows from shared memory, and the copies write 32 KB. Two stages are being
// multiplied at any time, so that the tensor cores do not wait for a barrier.
#include "product.cuh"

namespace matmul {

using Wide128 = Shape<Bf16Weights, 128, 128, 8, 1, 64, 6>;

// Bytes of a row of an operand, and of the part that one product takes.
constexpr u32 WIDE_ROW = 128, WIDE_STEP = 32;
// Columns of the tile that a warpgroup has.
constexpr u32 GROUP_COLUMNS = 64;

template <class S> DEVICE void multiply_wide(const MatmulArgs& args, u8* shared) {
    static_assert(S::WARP_COLUMNS == 16 && S::WARP_ROWS == 128 && S::DEPTH * 2 == WIDE_ROW, "the shape of wgmma's operands");
    const Work work = work_of<S>(args);
    const u32 warp = threadIdx.x / 32;
    // One stage less than there are places: the last stage but one is still being multiplied when
    // the next copy begins.
    const AllRows rows;
    Feed<S, AllRows, S::STAGES - 2> feed(args, rows, work, shared);
    u32 slot = 0;
    for (u32 index = blockIdx.x; index < work.units; index += gridDim.x) {
        const Unit unit = unit_of<S>(args, work, index);
        SliceTree<Sums<S>> tree(sums_at<S>(args, blockIdx.x, WAITING_MOST), sums_stride<S>());
        for (Span span = unit.span;; span = next_span(args, span)) {
            Sums<S> sums;
            sums.clear();
            for (u32 depth = span.begin; depth < span.end; depth += S::DEPTH) {
                cp_async_wait<S::STAGES - 3>();
                wgmma_fence_shared();
                sync_block();
                const u8* weights = shared + slot * S::STAGE_BYTES + warp / 4 * GROUP_COLUMNS * WIDE_ROW;
                const u8* rows = shared + slot * S::STAGE_BYTES + S::X_OFFSET;
                wgmma_begin();
#pragma unroll
                for (u32 step = 0; step < S::DEPTH / 16; step++) {
                    const bool keeps = step > 0 || depth > span.begin;
                    wgmma_bf16(sums.of[0], weights + step * WIDE_STEP, rows + step * WIDE_STEP, keeps);
                }
                wgmma_commit();
                wgmma_wait<1>();
                // All warps have passed the barrier, so they have finished the last stage but one.
                feed.fill();
                slot = Feed<S, AllRows>::after(slot);
            }
            wgmma_take(sums.of[0]);
            tree.add(args, span, sums);
            if (span.end == args.width) break;
        }
        store_out<S>(args, tree.last, {unit.first_column + warp * 16, unit.first_row, work.rows, args.bias});
    }
    cp_async_wait<0>();
}

}  // namespace matmul

extern "C" KERNEL(256, 1) matmul_wide128_bf16(GRID_CONSTANT const MatmulArgs args) {
    DYNAMIC_SHARED(u8, shared);
    start_kernel();
    matmul::multiply_wide<matmul::Wide128>(args, shared);
}
