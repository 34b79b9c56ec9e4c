// A peer: FlashInfer's attention over paged KV, without Python, on the shapes that our own attention is measured on.
//
// Owns: decode (its kernel for that, and its prefill kernel, which it advises where query heads share keys; the
// faster counts) and prefill, with what it plans beforehand outside the time, as a server would have it.
// Never: ships. Built against the headers in FlashInfer's Python package, by build.sh --flashinfer.
// Invariant: names of labs and shapes are those of crates/cuda/benches/operations.rs, so that the report finds pairs.
#include "lab.h"

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include <numeric>

namespace {

namespace fi = flashinfer;

using Element = __nv_bfloat16;
using Pages = fi::paged_kv_t<Element, int32_t>;
using DecodeParams = fi::BatchDecodeParams<Element, Element, Element, int32_t>;
using PrefillParams = fi::BatchPrefillPagedParams<Element, Element, Element, int32_t>;
using Attention = fi::DefaultAttention<false, false, false, false>;

constexpr auto PLAIN = fi::PosEncodingMode::kNone;
constexpr uint32_t QUERY_HEADS = 32, KV_HEADS = 8, DIM = 128, PAGE_TOKENS = 16;
constexpr uint32_t TOKEN_ELEMENTS = KV_HEADS * DIM;
constexpr size_t WORKSPACE_BYTES = size_t(256) << 20;
// Keys and values of all sets together, at least: many times the cache.
constexpr size_t SETS_BYTES = size_t(1) << 30;

struct Shape {
    uint32_t batch;
    uint32_t context;
    // Rows of each sequence, its last ones.
    uint32_t rows;
};

// Everything that one shape's calls read and write.
struct Bench {
    Shape shape;
    uint32_t pages_each;
    size_t set_elements;
    size_t sets;
    Element* keys;
    Element* values;
    Element* queries;
    Element* out;
    std::vector<int32_t> starts;
    std::vector<int32_t> row_starts;
    int32_t *indices, *starts_there, *last_lengths, *row_starts_there;
    void *floats, *ints, *pinned_ints;

    explicit Bench(Shape of) : shape(of), pages_each((of.context + PAGE_TOKENS - 1) / PAGE_TOKENS) {
        const size_t pages = size_t(of.batch) * pages_each;
        set_elements = pages * PAGE_TOKENS * TOKEN_ELEMENTS;
        sets = std::max<size_t>(1, SETS_BYTES / (4 * set_elements));
        keys = reinterpret_cast<Element*>(lab::device_noise(sets * set_elements, 1));
        values = reinterpret_cast<Element*>(lab::device_noise(sets * set_elements, 2));
        const size_t query_elements = size_t(of.batch) * of.rows * QUERY_HEADS * DIM;
        queries = reinterpret_cast<Element*>(lab::device_noise(query_elements, 3));
        out = lab::device_zeros<Element>(query_elements);
        for (uint32_t i = 0; i <= of.batch; i++) {
            starts.push_back(int32_t(i * pages_each));
            row_starts.push_back(int32_t(i * of.rows));
        }
        // Pages in no order, as they are after a while of serving.
        std::vector<int32_t> order(pages);
        std::iota(order.begin(), order.end(), 0);
        for (size_t i = pages; i > 1; i--) std::swap(order[i - 1], order[lab::mixed(i) % i]);
        indices = lab::to_device(order);
        starts_there = lab::to_device(starts);
        row_starts_there = lab::to_device(row_starts);
        last_lengths = lab::to_device(std::vector<int32_t>(of.batch, int32_t((of.context - 1) % PAGE_TOKENS + 1)));
        floats = lab::device_zeros<uint8_t>(WORKSPACE_BYTES);
        ints = lab::device_zeros<uint8_t>(WORKSPACE_BYTES);
        LAB_CHECK(cudaMallocHost(&pinned_ints, WORKSPACE_BYTES));
    }

    ~Bench() {
        for (void* memory : {(void*)keys, (void*)values, (void*)queries, (void*)out, (void*)indices, (void*)starts_there,
                             (void*)row_starts_there, (void*)last_lengths, floats, ints}) {
            LAB_CHECK(cudaFree(memory));
        }
        LAB_CHECK(cudaFreeHost(pinned_ints));
    }

    Pages cache(int turn) const {
        const size_t offset = size_t(turn) % sets * set_elements;
        return Pages(KV_HEADS, PAGE_TOKENS, DIM, shape.batch, fi::QKVLayout::kHND, keys + offset, values + offset, indices,
                     starts_there, last_lengths);
    }

    template <class T> T* planned(int64_t offset) const { return fi::GetPtrFromBaseOffset<T>(ints, offset); }
    template <class T> T* partial(int64_t offset) const { return fi::GetPtrFromBaseOffset<T>(floats, offset); }

    lab::Timing decode() {
        fi::DecodePlanInfo plan;
        const auto estimate = fi::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<QUERY_HEADS / KV_HEADS, DIM, PLAIN, Attention, DecodeParams>;
        LAB_CHECK((fi::DecodePlan<DIM, PLAIN, Attention, DecodeParams>(floats, WORKSPACE_BYTES, ints, pinned_ints, WORKSPACE_BYTES, plan,
                                                                       starts.data(), shape.batch, QUERY_HEADS, PAGE_TOKENS, false, nullptr, estimate)));
        LAB_CHECK(cudaDeviceSynchronize());
        return lab::time([&](int turn, cudaStream_t stream) {
            DecodeParams params(queries, nullptr, cache(turn), out, nullptr, nullptr, QUERY_HEADS, QUERY_HEADS * DIM, DIM, -1, 0.0f, 0.088388f, 1.0f, 1e4f);
            params.padded_batch_size = uint32_t(plan.padded_batch_size);
            params.request_indices = planned<int32_t>(plan.request_indices_offset);
            params.kv_tile_indices = planned<int32_t>(plan.kv_tile_indices_offset);
            params.o_indptr = planned<int32_t>(plan.o_indptr_offset);
            params.kv_chunk_size_ptr = planned<int32_t>(plan.kv_chunk_size_ptr_offset);
            params.partition_kv = plan.split_kv;
            auto* sums = plan.split_kv ? partial<Element>(plan.v_offset) : nullptr;
            auto* scores = plan.split_kv ? partial<float>(plan.s_offset) : nullptr;
            LAB_CHECK((fi::BatchDecodeWithPagedKVCacheDispatched<DIM, PLAIN, Attention>(params, sums, scores, false, stream)));
        });
    }

    lab::Timing prefill() {
        fi::PrefillPlanInfo plan;
        LAB_CHECK(fi::PrefillPlan<int32_t>(floats, WORKSPACE_BYTES, ints, pinned_ints, WORKSPACE_BYTES, plan, row_starts.data(), starts.data(),
                                           shape.batch * shape.rows, shape.batch, QUERY_HEADS, KV_HEADS, DIM, DIM, PAGE_TOKENS, false, 2, -1, -1,
                                           false, 0, 0, nullptr));
        LAB_CHECK(cudaDeviceSynchronize());
        return lab::time([&](int turn, cudaStream_t stream) {
            PrefillParams params(queries, cache(turn), nullptr, row_starts_there, nullptr, nullptr, out, nullptr, nullptr, QUERY_HEADS,
                                 QUERY_HEADS * DIM, DIM, -1, 0.0f, 0.088388f, 1.0f, 1e4f);
            params.padded_batch_size = uint32_t(plan.padded_batch_size);
            params.max_total_num_rows = uint32_t(plan.total_num_rows);
            params.request_indices = planned<int32_t>(plan.request_indices_offset);
            params.qo_tile_indices = planned<int32_t>(plan.qo_tile_indices_offset);
            params.kv_tile_indices = planned<int32_t>(plan.kv_tile_indices_offset);
            params.o_indptr = planned<int32_t>(plan.o_indptr_offset);
            params.kv_chunk_size_ptr = planned<int32_t>(plan.kv_chunk_size_ptr_offset);
            params.partition_kv = plan.split_kv;
            if (plan.split_kv) params.merge_indptr = planned<int32_t>(plan.merge_indptr_offset);
            auto* sums = plan.split_kv ? partial<Element>(plan.v_offset) : nullptr;
            auto* scores = plan.split_kv ? partial<float>(plan.s_offset) : nullptr;
            DISPATCH_CTA_TILE_Q(plan.cta_tile_q, TILE, {
                LAB_CHECK((fi::BatchPrefillWithPagedKVCacheDispatched<TILE, DIM, DIM, PLAIN, false, fi::MaskMode::kCausal, Attention>(
                    params, sums, scores, false, stream)));
            });
        });
    }
};

std::string told(Shape shape) {
    const std::string heads = ", 32/8 heads of 128";
    if (shape.rows == 1) return "batch " + std::to_string(shape.batch) + ", context " + std::to_string(shape.context) + heads;
    return "tokens " + std::to_string(shape.rows) + heads;
}

void decode(uint32_t batch, uint32_t context) {
    const Shape shape = {batch, context, 1};
    Bench bench(shape);
    lab::Result result;
    result.lab = "attend";
    result.variant = "flashinfer:decode";
    result.shape = told(shape);
    result.bytes = double(batch) * context * TOKEN_ELEMENTS * 2 * sizeof(Element);
    const lab::Timing own = bench.decode(), shared = bench.prefill();
    result.timing = own.median < shared.median ? own : shared;
    lab::report(result);
}

void prefill(uint32_t tokens) {
    const Shape shape = {1, tokens, tokens};
    Bench bench(shape);
    lab::Result result;
    result.lab = "attend";
    result.variant = "flashinfer:prefill";
    result.shape = told(shape);
    result.operations = 4.0 * QUERY_HEADS * DIM * (double(tokens) * (tokens + 1) / 2);
    result.timing = bench.prefill();
    lab::report(result);
}

}  // namespace

int main() {
    for (uint32_t context : {1024u, 8192u}) {
        for (uint32_t batch : {1u, 8u, 32u, 128u}) decode(batch, context);
    }
    for (uint32_t tokens : {2048u, 8192u, 32768u}) prefill(tokens);
}
