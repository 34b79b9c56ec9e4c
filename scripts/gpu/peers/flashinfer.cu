// A peer: FlashInfer's attention over paged KV, without Python, on the shapes of our own attention's measurements.
//
// Owns: decode (its kernel for that, and its prefill kernel, which it advises if query heads share keys; the faster
// counts) and prefill. Its planning is outside the time, as in a server.
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

#include <memory>
#include <numeric>

namespace {

namespace fi = flashinfer;

using lab::Buffer;

using Element = __nv_bfloat16;
using Pages = fi::paged_kv_t<Element, int32_t>;
using DecodeParams = fi::BatchDecodeParams<Element, Element, Element, int32_t>;
using PrefillParams = fi::BatchPrefillPagedParams<Element, Element, Element, int32_t>;
using Attention = fi::DefaultAttention<false, false, false, false>;

constexpr auto PLAIN = fi::PosEncodingMode::kNone;
constexpr uint32_t QUERY_HEADS = 32, KV_HEADS = 8, DIM = 128, PAGE_TOKENS = 16;
constexpr uint32_t TOKEN_ELEMENTS = KV_HEADS * DIM;
constexpr size_t WORKSPACE_BYTES = size_t(256) << 20;
// The smallest size of the keys and values of all sets together: many times the cache.
constexpr size_t SETS_BYTES = size_t(1) << 30;

struct Shape {
    uint32_t batch;
    uint32_t context;
    // The rows of each sequence, its last ones.
    uint32_t rows;
};

// The memory that one shape's calls read and write.
struct Bench {
    Shape shape;
    uint32_t pages_each;
    size_t set_elements;
    size_t sets;
    std::vector<int32_t> starts;
    std::vector<int32_t> row_starts;
    std::unique_ptr<Buffer<bf16>> keys, values, queries, out;
    std::unique_ptr<Buffer<int32_t>> indices, starts_there, row_starts_there, last_lengths;
    Buffer<u8> floats{WORKSPACE_BYTES}, ints{WORKSPACE_BYTES};
    void* pinned_ints;

    explicit Bench(Shape of) : shape(of), pages_each((of.context + PAGE_TOKENS - 1) / PAGE_TOKENS) {
        const size_t pages = size_t(of.batch) * pages_each;
        set_elements = pages * PAGE_TOKENS * TOKEN_ELEMENTS;
        sets = std::max<size_t>(1, SETS_BYTES / (4 * set_elements));
        const size_t query_elements = size_t(of.batch) * of.rows * QUERY_HEADS * DIM;
        keys = noise(sets * set_elements, 1);
        values = noise(sets * set_elements, 2);
        queries = noise(query_elements, 3);
        out.reset(new Buffer<bf16>(query_elements));
        for (uint32_t i = 0; i <= of.batch; i++) {
            starts.push_back(int32_t(i * pages_each));
            row_starts.push_back(int32_t(i * of.rows));
        }
        // Pages are in random order, as after a while of serving.
        std::vector<int32_t> order(pages);
        std::iota(order.begin(), order.end(), 0);
        for (size_t i = pages; i > 1; i--) std::swap(order[i - 1], order[(u64(i) * 2654435761u >> 7) % i]);
        const std::vector<int32_t> lengths(of.batch, int32_t((of.context - 1) % PAGE_TOKENS + 1));
        indices.reset(new Buffer<int32_t>(order));
        starts_there.reset(new Buffer<int32_t>(starts));
        row_starts_there.reset(new Buffer<int32_t>(row_starts));
        last_lengths.reset(new Buffer<int32_t>(lengths));
        lab::check(cudaMallocHost(&pinned_ints, WORKSPACE_BYTES), "cudaMallocHost");
    }

    ~Bench() { cudaFreeHost(pinned_ints); }

    static std::unique_ptr<Buffer<bf16>> noise(size_t count, u32 seed) {
        std::unique_ptr<Buffer<bf16>> memory(new Buffer<bf16>(count));
        lab::fill(memory->get(), count, seed, 1.0f);
        return memory;
    }
    static Element* elements(const Buffer<bf16>& memory) { return reinterpret_cast<Element*>(memory.get()); }

    Pages cache(int turn) const {
        const size_t offset = size_t(turn) % sets * set_elements;
        return Pages(KV_HEADS, PAGE_TOKENS, DIM, shape.batch, fi::QKVLayout::kHND, elements(*keys) + offset,
                     elements(*values) + offset, indices->get(), starts_there->get(), last_lengths->get());
    }

    template <class T> T* planned(int64_t offset) const { return fi::GetPtrFromBaseOffset<T>(ints.get(), offset); }
    template <class T> T* partial(int64_t offset) const { return fi::GetPtrFromBaseOffset<T>(floats.get(), offset); }

    double decode() {
        fi::DecodePlanInfo plan;
        const auto estimate = fi::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<QUERY_HEADS / KV_HEADS, DIM, PLAIN, Attention, DecodeParams>;
        lab::check((fi::DecodePlan<DIM, PLAIN, Attention, DecodeParams>(floats.get(), WORKSPACE_BYTES, ints.get(), pinned_ints, WORKSPACE_BYTES, plan,
                                                                       starts.data(), shape.batch, QUERY_HEADS, PAGE_TOKENS, false, nullptr, estimate)), "DecodePlan");
        lab::check(cudaDeviceSynchronize(), "a plan");
        return lab::seconds_of(10, [&](int turn) {
            DecodeParams params(elements(*queries), nullptr, cache(turn), elements(*out), nullptr, nullptr, QUERY_HEADS, QUERY_HEADS * DIM, DIM, -1, 0.0f, 0.088388f, 1.0f, 1e4f);
            params.padded_batch_size = uint32_t(plan.padded_batch_size);
            params.request_indices = planned<int32_t>(plan.request_indices_offset);
            params.kv_tile_indices = planned<int32_t>(plan.kv_tile_indices_offset);
            params.o_indptr = planned<int32_t>(plan.o_indptr_offset);
            params.kv_chunk_size_ptr = planned<int32_t>(plan.kv_chunk_size_ptr_offset);
            params.partition_kv = plan.split_kv;
            auto* sums = plan.split_kv ? partial<Element>(plan.v_offset) : nullptr;
            auto* scores = plan.split_kv ? partial<float>(plan.s_offset) : nullptr;
            lab::check((fi::BatchDecodeWithPagedKVCacheDispatched<DIM, PLAIN, Attention>(params, sums, scores, false, nullptr)), "decode");
        });
    }

    double prefill() {
        fi::PrefillPlanInfo plan;
        lab::check(fi::PrefillPlan<int32_t>(floats.get(), WORKSPACE_BYTES, ints.get(), pinned_ints, WORKSPACE_BYTES, plan, row_starts.data(), starts.data(),
                                           shape.batch * shape.rows, shape.batch, QUERY_HEADS, KV_HEADS, DIM, DIM, PAGE_TOKENS, false, 2, -1, -1,
                                           false, 0, 0, nullptr), "PrefillPlan");
        lab::check(cudaDeviceSynchronize(), "a plan");
        return lab::seconds_of(10, [&](int turn) {
            PrefillParams params(elements(*queries), cache(turn), nullptr, row_starts_there->get(), nullptr, nullptr, elements(*out), nullptr, nullptr, QUERY_HEADS,
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
                lab::check((fi::BatchPrefillWithPagedKVCacheDispatched<TILE, DIM, DIM, PLAIN, false, fi::MaskMode::kCausal, Attention>(
                    params, sums, scores, false, nullptr)), "prefill");
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
    lab::Figure figure;
    figure.lab = "attend";
    figure.variant = "flashinfer:decode";
    figure.shape = told(shape);
    figure.bytes = double(batch) * context * TOKEN_ELEMENTS * 2 * sizeof(Element);
    figure.seconds = std::min(bench.decode(), bench.prefill());
    lab::report(figure, 0, 0);
}

void prefill(uint32_t tokens) {
    const Shape shape = {1, tokens, tokens};
    Bench bench(shape);
    lab::Figure figure;
    figure.lab = "attend";
    figure.variant = "flashinfer:prefill";
    figure.shape = told(shape);
    figure.operations = 4.0 * QUERY_HEADS * DIM * (double(tokens) * (tokens + 1) / 2);
    figure.seconds = bench.prefill();
    lab::report(figure, 0, 0);
}

}  // namespace

int main() {
    for (uint32_t context : {1024u, 8192u}) {
        for (uint32_t batch : {1u, 8u, 32u, 128u}) decode(batch, context);
    }
    for (uint32_t tokens : {2048u, 8192u, 32768u}) prefill(tokens);
}
