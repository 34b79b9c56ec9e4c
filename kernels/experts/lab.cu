// The lab of mixtures of experts: every kernel for experts' products against the plain one and against each other to
// the bit, and the time of each step of a layer of Qwen3-30B-A3B.
//
// Owns: the shapes that are timed.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "../matmul/experts.cu"
#include "../matmul/plain.cu"
#include "piece.cuh"
#include "stored.cuh"

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>

// Each file has constants of its own.
namespace logits_kernel {
#include "logits.cu"
}
namespace route_kernel {
#include "route.cu"
}
namespace sort_kernel {
#include "sort.cu"
}
namespace combine_kernel {
#include "combine.cu"
}

namespace {

using lab::Buffer;

struct Size {
    const char* name;
    u32 count;
    u32 chosen;
    u32 hidden;
    u32 width;
    // Slices of the down projection's inner dimension, equal ones.
    u32 slices;
};

struct Candidate {
    std::string name;
    lab::Kernel kernel;
    u32 columns;
    u32 rows;
};

template <class S> Candidate candidate(const char* name, const void* entry) {
    return {name, {entry, int(S::THREADS), int(S::SHARED_BYTES)}, S::COLUMNS, S::ROWS};
}

std::vector<Candidate> candidates() {
    return {candidate<matmul::ExpertsMany8>("many8", reinterpret_cast<const void*>(experts_many8_bf16)),
            candidate<matmul::ExpertsMany16>("many16", reinterpret_cast<const void*>(experts_many16_bf16)),
            candidate<matmul::ExpertsMany32>("many32", reinterpret_cast<const void*>(experts_many32_bf16)),
            candidate<matmul::ExpertsMany64>("many64", reinterpret_cast<const void*>(experts_many64_bf16)),
            candidate<matmul::ExpertsMany128>("many128", reinterpret_cast<const void*>(experts_many128_bf16))};
}

std::vector<float> random_floats(size_t count, u32 seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> all(count);
    for (float& one : all) one = normal(random);
    return all;
}

// Rows of one step with their experts, chosen by random logits.
class Routing {
public:
    Routing(const Size& size, u32 rows, u32 tile_rows, u32 seed)
        : size_(size), rows_(rows), tile_rows_(tile_rows), words_((rows + 31) / 32), logits_(random_floats(size_t(rows) * size.count, seed)),
          rows_count_(std::vector<u32>{rows}), experts_(size_t(rows) * size.chosen), places_(experts_.count()), rows_of_(experts_.count()),
          masks_(size_t(size.count) * words_), tiles_count_(1), weights_(experts_.count()), shared_weights_(rows),
          tiles_(size.count + experts_.count() / tile_rows + 1) {
        route();
        sort();
        lab::check(cudaDeviceSynchronize(), "routing");
        const std::vector<u32> chosen = experts_.read();
        touched_ = u32(std::set<u32>(chosen.begin(), chosen.end()).size());
    }

    ExpertPiece piece() const { return {rows_count_.get(), 0, rows_}; }
    void route() const {
        const route_kernel::RouteArgs args = {logits_.get(), nullptr, experts_.get(), weights_.get(), shared_weights_.get(), masks_.get(), piece(),
                                              size_.count, size_.count, size_.chosen, words_, route_kernel::IDENTITY, route_kernel::NORMALIZED,
                                              0, 0, 0, 0.0f, 1.0f, 0};
        const lab::Kernel kernel = {reinterpret_cast<const void*>(route_kernel::experts_route), int(32 * route_kernel::ROWS), 0};
        kernel.launch(args, int(words_));
    }
    void sort() const {
        const sort_kernel::ExpertSortArgs args = {masks_.get(), experts_.get(), places_.get(), rows_of_.get(), tiles_.get(), tiles_count_.get(),
                                                  0, size_.count, size_.chosen, words_, tile_rows_, 0};
        const lab::Kernel kernel = {reinterpret_cast<const void*>(sort_kernel::experts_sort), int(sort_kernel::THREADS), 0};
        kernel.launch(args, int(size_.count));
    }
    ExpertRows expert_rows(bool has_list, u64 stride) const { return {tiles_.get(), tiles_count_.get(), has_list ? rows_of_.get() : nullptr, stride}; }
    const u32* places() const { return places_.get(); }
    const float* weights() const { return weights_.get(); }
    const float* shared_weights() const { return shared_weights_.get(); }
    u32 touched() const { return touched_; }

private:
    Size size_;
    u32 rows_, tile_rows_, words_, touched_;
    Buffer<float> logits_;
    Buffer<u32> rows_count_, experts_, places_, rows_of_, masks_, tiles_count_;
    Buffer<float> weights_, shared_weights_;
    Buffer<ExpertTile> tiles_;
};

// One of the two products of all experts.
class Product {
public:
    Product(const Size& size, bool is_down)
        : is_down_(is_down), columns_(is_down ? size.hidden : 2 * size.width), width_(is_down ? size.width : size.hidden),
          slices_(is_down ? size.slices : 1), chosen_(size.chosen), weights_(size_t(size.count) * columns_ * width_) {
        lab::fill(weights_.get(), weights_.count(), is_down ? 3 : 4, 0.05f);
    }

    u64 expert_bytes() const { return u64(columns_) * width_ * 2; }
    u32 columns() const { return columns_; }
    u32 width() const { return width_; }
    bool is_down() const { return is_down_; }

    MatmulArgs args(const bf16* x, float* out, float* sums) const {
        MatmulArgs args = {};
        args.weights = weights_.get();
        args.x = x;
        args.out = out;
        args.sums = sums;
        args.columns = columns_;
        args.width = width_;
        args.is_out_f32 = 1;
        args.slices = slices_;
        for (u32 slice = 0; slice < slices_; slice++) args.slice_ends[slice] = width_ / slices_ * (slice + 1);
        args.span_width = matmul::span_width_of(columns_ * chosen_, args.slice_ends, slices_);
        return args;
    }
    MatmulPlainArgs plain_args(const bf16* x, float* out) const {
        const MatmulArgs tiled = args(x, out, nullptr);
        MatmulPlainArgs plain = {tiled.weights, x, nullptr, out, nullptr, columns_, width_, 1, slices_, {}};
        std::memcpy(plain.slice_ends, tiled.slice_ends, sizeof plain.slice_ends);
        return plain;
    }

private:
    bool is_down_;
    u32 columns_, width_, slices_, chosen_;
    Buffer<bf16> weights_;
};

// The memory of products with so many rows.
struct Bench {
    Buffer<bf16> x;
    Buffer<float> out;
    Buffer<float> sums;

    Bench(const Size& size, u32 rows)
        : x(size_t(rows) * size.chosen * std::max(size.hidden, size.width)), out(size_t(rows) * size.chosen * std::max(size.hidden, 2 * size.width)),
          sums(size_t(96) << 20) {
        lab::fill(x.get(), x.count(), 5, 1.0f);
    }
    void launch(const Candidate& with, const Product& product, const Routing& routing, int blocks) const {
        const ExpertMatmulArgs args = {product.args(x.get(), out.get(), sums.get()),
                                       routing.expert_rows(!product.is_down(), product.expert_bytes())};
        with.kernel.launch(args, blocks);
    }
};

// Whether every kernel gives the same bits, and the plain kernel's within rounding.
bool check_all(const std::vector<Candidate>& all) {
    bool is_fine = true;
    for (const Size size : {Size{"small", 8, 3, 96, 160, 2}, Size{"odd", 70, 5, 136, 72, 1}, Size{"gpt-oss", 32, 4, 2880, 2880, 4}}) {
        for (const bool is_down : {false, true}) {
            const Product product(size, is_down);
            for (const u32 rows : {1u, 37u, 300u}) {
                const Bench bench(size, rows);
                std::vector<float> first;
                for (const Candidate& with : all) {
                    const Routing routing(size, rows, with.rows, rows);
                    bench.launch(with, product, routing, with.kernel.blocks());
                    lab::check(cudaDeviceSynchronize(), with.name.c_str());
                    const std::vector<float> found = bench.out.read();
                    bool is_same = !first.empty() && std::memcmp(first.data(), found.data(), found.size() * sizeof(float)) == 0;
                    double worst = 0;
                    if (first.empty()) {
                        first = found;
                        const Routing plain_routing(size, rows, matmul::PLAIN_TILE, rows);
                        const ExpertMatmulPlainArgs args = {product.plain_args(bench.x.get(), bench.out.get()),
                                                            plain_routing.expert_rows(!is_down, product.expert_bytes())};
                        const lab::Kernel plain = {reinterpret_cast<const void*>(experts_plain_bf16), int(matmul::PLAIN_THREADS), 0};
                        plain.launch(args, lab::multiprocessors() * 2);
                        lab::check(cudaDeviceSynchronize(), "plain");
                        const std::vector<float> right = bench.out.read();
                        for (size_t i = 0; i < right.size(); i++) worst = std::fmax(worst, std::fabs(right[i] - found[i]));
                        is_same = worst < 1e-4;
                    }
                    if (!is_same) std::fprintf(stderr, "WRONG: %s, %s, down %d, %u rows (%g)\n", with.name.c_str(), size.name, is_down, rows, worst);
                    is_fine &= is_same;
                }
            }
        }
    }
    return is_fine;
}

struct Ceilings {
    double copy;
    double mma;
};

lab::Figure figure_of(const std::string& variant, const Size& size, u32 rows) {
    lab::Figure figure;
    figure.lab = "experts";
    figure.variant = variant;
    figure.shape = std::string(size.name) + ", rows " + std::to_string(rows);
    return figure;
}

// Steps of one layer, with the weights of so many other rows that few of them lie in the second-level cache.
void time_size(const std::vector<Candidate>& all, const Size& size, u32 rows, const Ceilings& ceilings) {
    const Bench bench(size, rows);
    const u32 turns = rows < 32 ? 16 : 4;
    for (const bool is_down : {false, true}) {
        const Product product(size, is_down);
        for (const Candidate& with : all) {
            const u32 mean = matmul::divided_up(rows * size.chosen, std::min(size.count, rows * size.chosen));
            if (with.rows > 4 * mean + 8 || with.rows * 8 < mean) continue;
            std::vector<std::unique_ptr<Routing>> routings;
            double touched = 0;
            for (u32 turn = 0; turn < turns; turn++) {
                routings.push_back(std::make_unique<Routing>(size, rows, with.rows, 100 + turn));
                touched += double(routings.back()->touched()) / turns;
            }
            const int blocks = with.kernel.blocks();
            lab::Figure figure = figure_of((is_down ? "down " : "gate up ") + with.name, size, rows);
            figure.seconds = lab::seconds_of(int(2 * turns), [&](int i) { bench.launch(with, product, *routings[i % turns], blocks); });
            figure.bytes = touched * double(product.expert_bytes());
            if (rows >= 128) figure.operations = 2.0 * rows * size.chosen * product.columns() * product.width();
            lab::report(figure, ceilings.copy, ceilings.mma);
        }
    }
    const Routing routing(size, rows, 8, 1);
    lab::Figure figure = figure_of("route", size, rows);
    // The kernel turns the logits into scores, which are as good.
    figure.seconds = lab::seconds_of(20, [&](int) { routing.route(); });
    lab::report(figure, 0, 0);
    figure = figure_of("sort", size, rows);
    figure.seconds = lab::seconds_of(20, [&](int) { routing.sort(); });
    lab::report(figure, 0, 0);
    const Buffer<float> router(size_t(size.count) * size.hidden), logits(size_t(rows) * size.count);
    const u32 is_tiled = rows >= 64 ? 1 : 0;
    const logits_kernel::ExpertLogitsArgs args = {bench.x.get(), router.get(), nullptr, logits.get(), routing.piece(), size.count, size.hidden, is_tiled, 0};
    const u32 warps = is_tiled ? matmul::divided_up(rows, logits_kernel::TILE_ROWS) * matmul::divided_up(size.count, logits_kernel::TILE_COLUMNS) : rows * size.count;
    const lab::Kernel kernel = {reinterpret_cast<const void*>(logits_kernel::experts_logits_bf16), int(32 * logits_kernel::WARPS), 0};
    figure = figure_of("logits", size, rows);
    figure.seconds = lab::seconds_of(20, [&](int) { kernel.launch(args, int(matmul::divided_up(warps, logits_kernel::WARPS))); });
    lab::report(figure, 0, 0);
    const combine_kernel::CombineArgs sums = {bench.out.get(), routing.places(), routing.weights(), nullptr, routing.shared_weights(),
                                              bench.x.get(), routing.piece(), size.chosen, size.hidden};
    figure = figure_of("combine", size, rows);
    figure.seconds = lab::seconds_of(20, [&](int) {
        combine_kernel::experts_combine_bf16<<<dim3(rows, matmul::divided_up(size.hidden, combine_kernel::THREADS * 8)), combine_kernel::THREADS>>>(sums);
    });
    figure.bytes = double(rows) * size.hidden * (4.0 * size.chosen + 2);
    lab::report(figure, ceilings.copy, 0);
}

}  // namespace

int main() {
    const Ceilings ceilings = {lab::copy_ceiling(), lab::mma_ceiling()};
    std::fprintf(stderr, "copy %.0f GB/s, mma.sync %.0f TFLOP/s\n", ceilings.copy * 1e-9, ceilings.mma * 1e-12);
    const std::vector<Candidate> all = candidates();
    const bool is_fine = check_all(all);
    std::fprintf(stderr, "%s\n", is_fine ? "all right, all the same bits" : "NOT RIGHT");
    const Size qwen = {"Qwen3-30B-A3B", 128, 8, 2048, 768, 8};
    for (const u32 rows : {1u, 32u, 128u, 2048u}) time_size(all, qwen, rows, ceilings);
    return is_fine ? 0 : 1;
}
#endif
