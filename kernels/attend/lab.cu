// The lab of attention: every kernel against the plain one, decode against prefill to the bit, and both against the
// ceilings of copies and of mma.sync.
//
//     nvcc -std=c++17 -O3 -Ikernels/include -gencode=arch=compute_90a,code=sm_90a -o lab kernels/attend/lab.cu
//
// Owns: the batches that are timed, and the plan of a batch as attend.cuh describes it.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "plain.cu"
#include "tensor.cu"
#include "tensor_fp8.cu"

#include <cmath>
#include <cstring>
#include <memory>

namespace {

using lab::Buffer;

struct Heads {
    u32 query;
    u32 kv;
    u32 dim;
};

struct Sequence {
    u32 position;
    u32 rows;
};

enum class Kind { Decode, Prefill };

struct Plan {
    std::vector<AttendItem> items;
    u32 states = 0;
    u32 arrivals = 0;
};

// Tiles of one kind; `spans_per_item` 0 for whole tiles.
Plan plan_of(const std::vector<Sequence>& batch, const Heads& heads, Kind kind, u32 spans_per_item) {
    const u32 group = heads.query / heads.kv, tile_rows = kind == Kind::Decode ? attend::DECODE_ROWS : attend::PREFILL_ROWS;
    Plan plan;
    for (u32 segment = 0; segment < batch.size(); segment++) {
        const u32 packed = batch[segment].rows * group;
        for (u32 row = 0; row < packed; row += tile_rows) {
            const u32 rows = std::min(tile_rows, packed - row);
            const u32 spans = (batch[segment].position + (row + rows - 1) / group) / attend::SPAN_KEYS + 1;
            const u32 step = spans_per_item == 0 ? spans : spans_per_item, parts = (spans + step - 1) / step;
            for (u32 part = 0; part < parts; part++) {
                plan.items.push_back({segment, row, part * step, std::min(spans, (part + 1) * step), parts, plan.states, plan.arrivals, 0});
            }
            if (parts == 1) continue;
            plan.states += heads.kv * spans * rows;
            plan.arrivals += heads.kv;
        }
    }
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const AttendItem& a, const AttendItem& b) {
        return a.span_end - a.span_first > b.span_end - b.span_first;
    });
    return plan;
}

// A batch in a pool of one layer, blocks in random order.
class Bench {
public:
    Bench(const Heads& heads, const std::vector<Sequence>& batch, u32 element_bytes, u32 copies)
        : heads_(heads), batch_(batch), element_bytes_(element_bytes), copies_(copies) {
        std::vector<AttendSegment> segments;
        u32 blocks = 0;
        for (const Sequence& sequence : batch) {
            segments.push_back({rows_, sequence.rows, sequence.position, blocks});
            rows_ += sequence.rows;
            blocks += (sequence.position + sequence.rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        }
        std::vector<u32> tables(blocks);
        for (u32 i = 0; i < blocks; i++) tables[i] = i;
        for (u32 i = blocks; i > 1; i--) std::swap(tables[i - 1], tables[(u64(i) * 2654435761u >> 7) % i]);
        copy_bytes_ = u64(blocks) * block_elements() * element_bytes;
        segments_.reset(new Buffer<AttendSegment>(segments));
        tables_.reset(new Buffer<u32>(tables));
        pool_.reset(new Buffer<u8>(copy_bytes_ * copies));
        qkv_.reset(new Buffer<bf16>(u64(rows_) * (heads.query + 2 * heads.kv) * heads.dim));
        out_.reset(new Buffer<bf16>(u64(rows_) * heads.query * heads.dim));
        if (element_bytes == 2) {
            lab::fill(reinterpret_cast<bf16*>(pool_->get()), pool_->count() / 2, 1, 1.0f);
        } else {
            lab::fill(pool_->get(), pool_->count(), 1);
        }
        lab::fill(qkv_->get(), qkv_->count(), 2, 2.0f);
    }

    // The operations of causal attention.
    double operations() const {
        double pairs = 0;
        for (const Sequence& sequence : batch_) pairs += double(sequence.rows) * (sequence.position + (sequence.rows + 1) / 2.0);
        return pairs * heads_.query * heads_.dim * 4;
    }

    void use(const Plan& plan) {
        items_.reset(new Buffer<AttendItem>(plan.items));
        items_count_.reset(new Buffer<u32>(std::vector<u32>{u32(plan.items.size())}));
        states_.reset(new Buffer<float>(u64(plan.states) * (heads_.dim + attend::STATE_HEADER)));
        arrivals_.reset(new Buffer<u32>(plan.arrivals));
    }

    AttendArgs args(int copy) const {
        AttendArgs args = {};
        args.qkv = qkv_->get();
        args.out = out_->get();
        args.pool = pool_->get() + copy_bytes_ * (copy % copies_);
        args.tables = tables_->get();
        args.segments = segments_->get();
        args.items = items_->get();
        args.items_count = items_count_->get();
        args.states = states_->get();
        args.arrivals = arrivals_->get();
        args.block_bytes = block_elements() * element_bytes_;
        args.value_bytes = args.block_bytes / 2;
        args.query_heads = heads_.query;
        args.kv_heads = heads_.kv;
        args.block_shift = BLOCK_SHIFT;
        args.window = 0xffffffffu;
        args.scale = scale();
        args.value_scale = 1;
        return args;
    }

    std::vector<bf16> result(const lab::Kernel& kernel, const Plan& plan) {
        use(plan);
        kernel.launch(args(0), kernel.blocks());
        lab::check(cudaDeviceSynchronize(), "attention");
        return out_->read();
    }

    std::vector<bf16> plain() {
        const Buffer<u32> count(std::vector<u32>{u32(batch_.size())});
        const AttendPlainArgs args = {qkv_->get(), out_->get(), pool_->get(), tables_->get(), segments_->get(), count.get(),
                                      nullptr, block_elements(), 0, block_elements() / 2, heads_.query, heads_.kv, heads_.dim,
                                      BLOCK_TOKENS, 0xffffffffu, scale(), 0, 0};
        const int shared = attend::PLAIN_WARPS * (384 + 8 * heads_.dim);
        const lab::Kernel kernel = {reinterpret_cast<const void*>(attend_plain_bf16), int(32 * attend::PLAIN_WARPS), shared};
        kernel.launch(args, kernel.blocks());
        lab::check(cudaDeviceSynchronize(), "plain attention");
        return out_->read();
    }

private:
    static constexpr u32 BLOCK_SHIFT = 4, BLOCK_TOKENS = 1 << BLOCK_SHIFT;

    u64 block_elements() const { return u64(2) * heads_.kv * BLOCK_TOKENS * heads_.dim; }
    float scale() const { return 1.44269504f / std::sqrt(float(heads_.dim)); }

    Heads heads_;
    std::vector<Sequence> batch_;
    u32 element_bytes_, copies_, rows_ = 0;
    u64 copy_bytes_ = 0;
    std::unique_ptr<Buffer<AttendSegment>> segments_;
    std::unique_ptr<Buffer<u32>> tables_, items_count_, arrivals_;
    std::unique_ptr<Buffer<u8>> pool_;
    std::unique_ptr<Buffer<bf16>> qkv_, out_;
    std::unique_ptr<Buffer<AttendItem>> items_;
    std::unique_ptr<Buffer<float>> states_;
};

// Both kernels for heads of DIM elements stored as Stored.
struct Pair {
    u32 dim;
    u32 element_bytes;
    lab::Kernel decode;
    lab::Kernel prefill;
};

template <u32 DIM, class Stored> Pair pair_of(const void* decode, const void* prefill) {
    using C = attend::Choice<DIM, Stored>;
    return {DIM, sizeof(Stored), {decode, int(C::Decode::THREADS), int(C::Decode::SHARED_BYTES)},
            {prefill, int(C::Prefill::THREADS), int(C::Prefill::SHARED_BYTES)}};
}

#define LAB_PAIR(dim, stored, format) \
    pair_of<dim, stored>(reinterpret_cast<const void*>(attend_decode_##format##_##dim), \
                         reinterpret_cast<const void*>(attend_prefill_##format##_##dim))
#define LAB_PAIRS(stored, format) \
    LAB_PAIR(64, stored, format), LAB_PAIR(80, stored, format), LAB_PAIR(96, stored, format), LAB_PAIR(128, stored, format), \
        LAB_PAIR(256, stored, format)

bool same(const std::vector<bf16>& a, const std::vector<bf16>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

float wide(bf16 x) {
    const u32 word = u32(x.bits) << 16;
    float y;
    std::memcpy(&y, &word, sizeof y);
    return y;
}

bool check_all(const std::vector<Pair>& pairs) {
    const std::vector<Sequence> batch = {{1299, 1}, {0, 300}, {700, 40}, {511, 1}, {512, 1}, {0, 1}, {2000, 5}};
    bool is_fine = true;
    for (const Pair& pair : pairs) {
        for (const u32 group : {1u, 3u, 4u, 8u}) {
            const Heads heads = {2 * group, 2, pair.dim};
            Bench bench(heads, batch, pair.element_bytes, 1);
            const std::vector<bf16> whole = bench.result(pair.prefill, plan_of(batch, heads, Kind::Prefill, 0));
            bool is_same = true;
            for (const u32 spans : {0u, 1u, 3u}) {
                is_same &= same(whole, bench.result(pair.decode, plan_of(batch, heads, Kind::Decode, spans)));
                is_same &= same(whole, bench.result(pair.prefill, plan_of(batch, heads, Kind::Prefill, spans)));
            }
            double worst = 0;
            if (pair.element_bytes == 2) {
                const std::vector<bf16> plain = bench.plain();
                for (size_t i = 0; i < plain.size(); i++) worst = std::fmax(worst, std::fabs(wide(plain[i]) - wide(whole[i])));
            }
            const bool is_right = is_same && worst < 0.02;
            if (!is_right) std::fprintf(stderr, "WRONG: dim %u, %u bytes, group %u: %s, off by %g\n", pair.dim, pair.element_bytes, group, is_same ? "same bits" : "other bits", worst);
            is_fine &= is_right;
        }
    }
    return is_fine;
}

struct Ceilings {
    double copy;
    double mma;
};

lab::Figure figure_of(const Pair& pair, const Heads& heads, const char* kind, u32 spans, const std::string& batch) {
    lab::Figure figure;
    figure.lab = "attend";
    figure.variant = std::string(kind) + (pair.element_bytes == 1 ? " fp8" : " bf16") + ", " +
                     (spans == 0 ? std::string("whole tiles") : std::to_string(spans) + " spans an item");
    figure.shape = batch + ", " + std::to_string(heads.query) + "/" + std::to_string(heads.kv) + " heads of " + std::to_string(pair.dim);
    return figure;
}

void time_decode(const Pair& pair, const Heads& heads, const Ceilings& ceilings, bool is_brief) {
    for (const u32 sequences : {1u, 8u, 32u, 128u}) {
        for (const u32 context : {1024u, 8192u, 32768u}) {
            const std::vector<Sequence> batch(sequences, Sequence{context - 1, 1});
            const double bytes = double(sequences) * context * 2 * heads.kv * heads.dim * pair.element_bytes;
            if (bytes > 40e9 || (is_brief && context != 8192)) continue;
            Bench bench(heads, batch, pair.element_bytes, u32(std::fmax(1, 400e6 / bytes)));
            for (const u32 spans : {1u, 2u, 0u}) {
                bench.use(plan_of(batch, heads, Kind::Decode, spans));
                const int blocks = pair.decode.blocks();
                const std::string shape = "batch " + std::to_string(sequences) + ", context " + std::to_string(context);
                lab::Figure figure = figure_of(pair, heads, "decode", spans, shape);
                figure.seconds = lab::seconds_of(20, [&](int i) { pair.decode.launch(bench.args(i), blocks); });
                figure.bytes = bytes;
                lab::report(figure, ceilings.copy, ceilings.mma);
            }
        }
    }
}

void time_prefill(const Pair& pair, const Heads& heads, const Ceilings& ceilings, bool is_brief) {
    for (const Sequence sequence : {Sequence{0, 512}, Sequence{0, 2048}, Sequence{0, 8192}, Sequence{0, 32768}, Sequence{30720, 2048}, Sequence{32256, 512}}) {
        if (is_brief && sequence.rows < 8192) continue;
        const std::vector<Sequence> batch = {sequence};
        Bench bench(heads, batch, pair.element_bytes, 1);
        for (const u32 spans : {0u, 8u}) {
            bench.use(plan_of(batch, heads, Kind::Prefill, spans));
            const int blocks = pair.prefill.blocks();
            const std::string after = sequence.position == 0 ? "" : " after " + std::to_string(sequence.position);
            lab::Figure figure = figure_of(pair, heads, "prefill", spans, "tokens " + std::to_string(sequence.rows) + after);
            figure.seconds = lab::seconds_of(4, [&](int i) { pair.prefill.launch(bench.args(i), blocks); });
            figure.operations = bench.operations();
            lab::report(figure, ceilings.copy, ceilings.mma);
        }
    }
}

}  // namespace

// With --brief only heads of 128 and 64 in bf16, at long contexts.
int main(int count, char** arguments) {
    const bool is_brief = lab::is_brief(count, arguments);
    const Ceilings ceilings = {lab::copy_ceiling(), lab::mma_ceiling()};
    std::fprintf(stderr, "copy %.0f GB/s, mma.sync %.0f TFLOP/s\n", ceilings.copy * 1e-9, ceilings.mma * 1e-12);
    const std::vector<Pair> pairs = {LAB_PAIRS(bf16, bf16), LAB_PAIRS(fp8, fp8)};
    const bool is_fine = check_all(pairs);
    std::fprintf(stderr, "%s\n", is_fine ? "all right, all the same bits" : "NOT RIGHT");
    for (const Pair& pair : pairs) {
        if (is_brief && (pair.element_bytes != 2 || (pair.dim != 128 && pair.dim != 64))) continue;
        // The number of KV heads gives the width of Llama 3.1's.
        const Heads heads = {32, 8, pair.dim};
        time_decode(pair, heads, ceilings, is_brief);
        time_prefill(pair, heads, ceilings, is_brief);
    }
    return is_fine ? 0 : 1;
}
#endif
