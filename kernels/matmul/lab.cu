// The lab of matrix products: every kernel against the plain one, against each other to the bit, and against the
// ceilings of copies and of mma.sync.
//
//     nvcc -std=c++17 -O3 -Ikernels/include -gencode=arch=compute_90a,code=sm_90a -o lab kernels/matmul/lab.cu
//
// Owns: the shapes that are timed (Llama 3.1 8B and 1B, one layer's matrices and the head).
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "cluster.cu"
#include "few.cu"
#include "many.cu"
#include "narrow.cu"
#include "plain.cu"
#include "wide.cu"

#include <cuda.h>

#include <cmath>
#include <cstring>
#include <string>

namespace matmul {
// Other clusters than those that ship.
using Cluster128Memory = Cluster<Shape<Bf16Weights, 128, 128, 8, 1, 64, 6>, 2, 1>;
using Cluster128Square = Cluster<Shape<Bf16Weights, 128, 128, 8, 1, 64, 6>, 2, 2>;
using Cluster192Square = Cluster<Shape<Bf16Weights, 128, 192, 8, 1, 64, 5>, 2, 2>;
}  // namespace matmul
CLUSTER_ENTRY(matmul_cluster128_memory_bf16, matmul::Cluster128Memory)
CLUSTER_ENTRY(matmul_cluster128_square_bf16, matmul::Cluster128Square)
CLUSTER_ENTRY(matmul_cluster192_square_bf16, matmul::Cluster192Square)

namespace {

using lab::Buffer;

// The driver's tensor maps.
class TensorMaps {
public:
    TensorMaps() {
        cudaDriverEntryPointQueryResult found;
        void* function = nullptr;
        lab::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 13000, cudaEnableDefault, &found), "tensor maps");
        if (found != cudaDriverEntryPointSuccess) lab::check(cudaErrorNotSupported, "tensor maps");
        encode_ = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }

    // Of a (rows, width) matrix, in boxes of 64 columns by `box_rows` rows.
    TensorMap of(const void* matrix, u32 rows, u32 width, u32 box_rows) const {
        CUtensorMap map;
        const cuuint64_t sizes[] = {width, rows}, strides[] = {u64(width) * 2};
        const cuuint32_t box[] = {64, box_rows}, steps[] = {1, 1};
        const CUresult result = encode_(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes, strides, box, steps,
                                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS) lab::check(cudaErrorInvalidValue, "a tensor map");
        TensorMap to;
        static_assert(sizeof to == sizeof map, "one layout");
        std::memcpy(&to, &map, sizeof to);
        return to;
    }

private:
    decltype(&cuTensorMapEncodeTiled) encode_;
};

struct Candidate {
    std::string name;
    lab::Kernel kernel;
    u32 columns;
    u32 rows;
    // Whether reading weights bounds it, not multiplying.
    bool is_few;
    // Bits of a weight, and the kind of its scales.
    u32 bits;
    matmul::Scaling scaling;
    // Blocks of a cluster, and the columns and rows of its boxes; 0 without clusters.
    u32 cluster = 0;
    u32 box_columns = 0;
    u32 box_rows = 0;

    // As many as run at once.
    int blocks() const {
        const int all = kernel.blocks();
        if (cluster == 0) return all;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(u32(all) / cluster * cluster);
        config.blockDim = dim3(u32(kernel.threads));
        config.dynamicSmemBytes = size_t(kernel.shared_bytes);
        cudaLaunchAttribute size = {};
        size.id = cudaLaunchAttributeClusterDimension;
        size.val.clusterDim.x = cluster;
        size.val.clusterDim.y = size.val.clusterDim.z = 1;
        config.attrs = &size;
        config.numAttrs = 1;
        int clusters = 0;
        lab::check(cudaOccupancyMaxActiveClusters(&clusters, kernel.entry, &config), "occupancy of clusters");
        return std::min(clusters * int(cluster), all);
    }
};

template <class C> Candidate in_clusters(const char* name, const void* entry) {
    using S = typename C::S;
    return {name, {entry, int(C::THREADS), int(C::SHARED_BYTES)}, S::COLUMNS, S::ROWS, false, 16, matmul::Scaling::None,
            C::BLOCKS, C::BOX_COLUMNS, C::BOX_ROWS};
}

template <class S> Candidate candidate(const char* name, const void* entry) {
    return {name, {entry, int(S::THREADS), int(S::SHARED_BYTES)}, S::COLUMNS, S::ROWS, S::COLUMNS * S::ROWS < 128 * 64,
            128 / S::Weights::PER_CHUNK, S::Weights::SCALING};
}

std::vector<Candidate> wide_candidates() {
    std::vector<Candidate> all = {
            candidate<matmul::Few8>("few8_bf16", reinterpret_cast<const void*>(matmul_few8_bf16)),
            candidate<matmul::Few16>("few16_bf16", reinterpret_cast<const void*>(matmul_few16_bf16)),
            candidate<matmul::Few32>("few32_bf16", reinterpret_cast<const void*>(matmul_few32_bf16)),
            candidate<matmul::Few64>("few64_bf16", reinterpret_cast<const void*>(matmul_few64_bf16)),
            candidate<matmul::Many64>("many64_bf16", reinterpret_cast<const void*>(matmul_many64_bf16)),
            candidate<matmul::Many128>("many128_bf16", reinterpret_cast<const void*>(matmul_many128_bf16))};
    if (lab::is_hopper()) {
        all.push_back(candidate<matmul::Wide128>("wide128_bf16", reinterpret_cast<const void*>(matmul_wide128_bf16)));
        all.push_back(in_clusters<matmul::Cluster192>("cluster192_bf16", reinterpret_cast<const void*>(matmul_cluster192_bf16)));
        all.push_back(in_clusters<matmul::Cluster128>("cluster128_bf16", reinterpret_cast<const void*>(matmul_cluster128_bf16)));
        all.push_back(in_clusters<matmul::Cluster128Memory>("cluster128_memory_bf16", reinterpret_cast<const void*>(matmul_cluster128_memory_bf16)));
        all.push_back(in_clusters<matmul::Cluster128Square>("cluster128_2x2_bf16", reinterpret_cast<const void*>(matmul_cluster128_square_bf16)));
        all.push_back(in_clusters<matmul::Cluster192Square>("cluster192_2x2_bf16", reinterpret_cast<const void*>(matmul_cluster192_square_bf16)));
    }
    return all;
}

template <class Weights> void add_narrow(std::vector<Candidate>& to, const char* format, std::vector<const void*> entries) {
    using N = matmul::Narrow<Weights>;
    const std::string name = format;
    to.push_back(candidate<typename N::Few8>(("few8_" + name).c_str(), entries[0]));
    to.push_back(candidate<typename N::Few16>(("few16_" + name).c_str(), entries[1]));
    to.push_back(candidate<typename N::Few32>(("few32_" + name).c_str(), entries[2]));
    to.push_back(candidate<typename N::Many64>(("many64_" + name).c_str(), entries[3]));
}

#define LAB_NARROW(format) \
    {reinterpret_cast<const void*>(matmul_few8_##format), reinterpret_cast<const void*>(matmul_few16_##format), \
     reinterpret_cast<const void*>(matmul_few32_##format), reinterpret_cast<const void*>(matmul_many64_##format)}

std::vector<Candidate> narrow_candidates() {
    std::vector<Candidate> all;
    add_narrow<matmul::Fp8Weights>(all, "fp8", LAB_NARROW(fp8));
    add_narrow<matmul::Fp8GroupWeights>(all, "fp8_groups", LAB_NARROW(fp8_groups));
    add_narrow<matmul::Int8Weights>(all, "int8", LAB_NARROW(int8));
    add_narrow<matmul::Int4Weights>(all, "int4", LAB_NARROW(int4));
    return all;
}

struct Size {
    const char* name;
    u32 columns;
    u32 width;
    // Slices of the inner dimension, equal ones.
    u32 slices;
};

// One matrix in several copies, and everything around it.
class Bench {
public:
    Bench(const Size& size, u32 bits, u32 rows_most)
        : size_(size), rows_most_(rows_most), bytes_(u64(size.columns) * size.width * bits / 8), copies_(int(std::max<u64>(1, (u64(400) << 20) / bytes_))),
          weights_(bytes_ * copies_), x_(size_t(rows_most) * size.width), out_(size_t(rows_most) * size.columns),
          sums_(size_t(64) << 20), rows_(1),
          column_scales_(scales_of(size.columns)),
          group_scales_(std::vector<u32>(size_t(size.columns + 3) / 4 * 4 * (size.width / 128 + 1), 0x3c000008u)) {
        if (bits == 16) {
            lab::fill(reinterpret_cast<bf16*>(weights_.get()), weights_.count() / 2, 1, 0.05f);
        } else {
            lab::fill(weights_.get(), weights_.count(), 1);
        }
        lab::fill(x_.get(), x_.count(), 2, 1.0f);
    }

    u64 bytes() const { return bytes_; }

    MatmulArgs args(const Candidate& candidate, int copy) const {
        MatmulArgs args = {};
        args.slices = size_.slices;
        set_slices(args.slice_ends);
        args.span_width = matmul::span_width_of(size_.columns, args.slice_ends, args.slices);
        args.weights = weights_.get() + bytes_ * (copy % copies_);
        args.column_scales = candidate.scaling == matmul::Scaling::Columns ? column_scales_.get() : nullptr;
        args.group_scales = candidate.scaling == matmul::Scaling::Groups ? group_scales_.get() : nullptr;
        args.group_shift = 7;
        args.x = x_.get();
        args.bias = column_scales_.get();
        args.out = out_.get();
        args.rows_count = rows_.get();
        args.sums = sums_.get();
        args.columns = size_.columns;
        args.width = size_.width;
        args.is_out_f32 = is_out_f32_ ? 1 : 0;
        return args;
    }

    void launch(const Candidate& candidate, int copy, int blocks) const {
        const MatmulArgs product = args(candidate, copy);
        if (candidate.cluster == 0) {
            candidate.kernel.launch(product, blocks);
        } else {
            const MatmulClusterArgs all = {maps_.of(product.weights, size_.columns, size_.width, candidate.box_columns),
                                           maps_.of(product.x, rows_most_, size_.width, candidate.box_rows), product};
            candidate.kernel.launch(all, blocks);
        }
    }

    void set_rows(u32 rows) const { lab::check(cudaMemcpy(rows_.get(), &rows, sizeof rows, cudaMemcpyHostToDevice), "rows"); }

    // Rows are bf16 then, two in each float of the buffer.
    void set_out_bf16() { is_out_f32_ = false; }

    std::vector<float> result(const Candidate& candidate) const {
        launch(candidate, 0, candidate.blocks());
        lab::check(cudaDeviceSynchronize(), candidate.name.c_str());
        return out_.read();
    }

    std::vector<float> plain() const {
        const Buffer<float> out(out_.count());
        MatmulPlainArgs args = {weights_.get(), x_.get(), column_scales_.get(), out.get(), rows_.get(), size_.columns, size_.width, 1, size_.slices, {}};
        set_slices(args.slice_ends);
        const lab::Kernel kernel = {reinterpret_cast<const void*>(matmul_plain_bf16), int(matmul::PLAIN_THREADS), 0};
        kernel.launch(args, lab::multiprocessors() * 2);
        lab::check(cudaDeviceSynchronize(), "plain");
        return out.read();
    }

private:
    // Any numbers, as scales and as bias.
    static std::vector<float> scales_of(u32 columns) {
        std::vector<float> scales(columns);
        for (u32 i = 0; i < columns; i++) scales[i] = 0.01f + 1e-4f * float(i % 64);
        return scales;
    }
    void set_slices(u32 (&ends)[SLICES_MOST]) const {
        for (u32 slice = 0; slice < size_.slices; slice++) ends[slice] = size_.width / size_.slices * (slice + 1);
    }

    Size size_;
    u32 rows_most_;
    bool is_out_f32_ = true;
    u64 bytes_;
    int copies_;
    Buffer<u8> weights_;
    Buffer<bf16> x_;
    Buffer<float> out_;
    Buffer<float> sums_;
    Buffer<u32> rows_;
    Buffer<float> column_scales_;
    Buffer<u32> group_scales_;
    TensorMaps maps_;
};

// Whether every kernel of one format gives the same bits, and bf16's are the plain kernel's within rounding.
bool check_all(const std::vector<Candidate>& candidates) {
    bool is_fine = true;
    for (const Size size : {Size{"odd", 1000, 1288, 1}, Size{"spans", 512, 4096, 1}, Size{"one tile", 64, 256, 1},
                            Size{"slices", 512, 4096, 8}, Size{"short slices", 1000, 1280, 2},
                            Size{"slices of 144", 1000, 1152, 8}, Size{"odd columns", 1001, 1288, 1}}) {
        for (const u32 rows : {1u, 5u, 16u, 33u, 130u, 700u}) {
            std::vector<float> first, first_bf16;
            for (const Candidate& candidate : candidates) {
                // Slices are whole groups.
                if (candidate.bits != 16 && size.slices > 1 && size.width / size.slices % 128 != 0) continue;
                const u32 width = candidate.bits == 16 ? size.width : size.width / 128 * 128;
                const Size whole = {size.name, size.columns, width, size.slices};
                Bench bench(whole, candidate.bits, rows);
                bench.set_rows(rows);
                const std::vector<float> found = bench.result(candidate);
                bench.set_out_bf16();
                const std::vector<float> found_bf16 = bench.result(candidate);
                const bool is_first = candidate.name.rfind("few8", 0) == 0;
                if (is_first) {
                    first = found;
                    first_bf16 = found_bf16;
                }
                // Half of the buffer; the other half has floats of before.
                const size_t bytes_bf16 = found.size() * sizeof(bf16);
                bool is_same = std::memcmp(first.data(), found.data(), found.size() * sizeof(float)) == 0 &&
                               std::memcmp(first_bf16.data(), found_bf16.data(), bytes_bf16) == 0;
                double worst = 0;
                if (is_first && candidate.bits == 16) {
                    const std::vector<float> plain = bench.plain();
                    for (size_t i = 0; i < plain.size(); i++) worst = std::fmax(worst, std::fabs(plain[i] - found[i]));
                    is_same = worst < 1e-4;
                }
                if (!is_same) std::fprintf(stderr, "WRONG: %s, %s, %u rows (%g)\n", candidate.name.c_str(), size.name, rows, worst);
                is_fine &= is_same;
            }
        }
    }
    return is_fine;
}

struct Ceilings {
    double copy;
    double mma;
};

void time_one(const Size& size, const Candidate& candidate, u32 rows, const Ceilings& ceilings) {
    Bench bench(size, candidate.bits, rows);
    bench.set_rows(rows);
    // As in a model: sums for the residual stream have slices and are f32.
    if (size.slices == 1) bench.set_out_bf16();
    const int blocks = candidate.blocks();
    lab::Figure figure;
    figure.lab = "matmul";
    figure.variant = candidate.name;
    figure.shape = std::string(size.name) + ": " + std::to_string(size.columns) + " x " + std::to_string(size.width) + ", rows " + std::to_string(rows);
    figure.seconds = lab::seconds_of(20, [&](int i) { bench.launch(candidate, i, blocks); });
    // Reading weights bounds few rows, multiplying bounds many.
    if (candidate.is_few) {
        figure.bytes = double(bench.bytes());
    } else {
        figure.operations = 2.0 * rows * size.columns * size.width;
    }
    lab::report(figure, ceilings.copy, ceilings.mma);
}

void time_all(const std::vector<Candidate>& candidates, const Ceilings& ceilings, bool is_brief) {
    const Size sizes[] = {{"8B qkv", 6144, 4096, 1},       {"8B out", 4096, 4096, 8},  {"8B gate up", 28672, 4096, 1},
                          {"8B down", 4096, 14336, 8},     {"1B qkv", 3072, 2048, 1},  {"1B out", 2048, 2048, 8},
                          {"1B gate up", 16384, 2048, 1},  {"1B down", 2048, 8192, 8}, {"8B head", 128256, 4096, 1}};
    for (const Size& size : sizes) {
        if (is_brief && std::strncmp(size.name, "8B", 2) != 0) continue;
        for (const Candidate& candidate : candidates) {
            const bool is_many = !candidate.is_few;
            for (const u32 rows : {1u, 8u, 16u, 32u, 64u, 128u, 512u, 2048u, 8192u}) {
                const bool is_meant = is_many ? rows >= 64 : rows <= candidate.rows && (rows == 1 || rows * 2 > candidate.rows);
                if (!is_meant || u64(rows) * size.columns > u64(1) << 28) continue;
                if (is_brief && is_many && rows < 2048) continue;
                time_one(size, candidate, rows, ceilings);
            }
        }
    }
}

}  // namespace

// With --brief only bf16 and the shapes of an 8B model; with --only NAME these for one kernel, so that one that fails
// takes no other's figures with it.
int main(int count, char** arguments) {
    if (count == 3 && std::strcmp(arguments[1], "--only") == 0) {
        std::vector<Candidate> all = wide_candidates(), one;
        for (const Candidate& candidate : all) {
            if (candidate.name == arguments[2]) one = {candidate};
        }
        all.resize(1);
        if (one.empty() || one[0].name == all[0].name) return std::fprintf(stderr, "no kernel to compare: %s\n", arguments[2]), 2;
        all.push_back(one[0]);
        const bool is_fine = check_all(all);
        std::fprintf(stderr, "%s: %s, %d blocks\n", arguments[2], is_fine ? "the same bits" : "NOT RIGHT", one[0].blocks());
        time_all(one, {0, 0}, true);
        return is_fine ? 0 : 1;
    }
    const bool is_brief = lab::is_brief(count, arguments);
    const Ceilings ceilings = {lab::copy_ceiling(), lab::mma_ceiling()};
    std::fprintf(stderr, "copy %.0f GB/s, mma.sync %.0f TFLOP/s\n", ceilings.copy * 1e-9, ceilings.mma * 1e-12);
    const std::vector<Candidate> wide = wide_candidates(), narrow = narrow_candidates();
    const bool is_fine = check_all(wide) & check_all(narrow);
    std::fprintf(stderr, "%s\n", is_fine ? "all right, all the same bits" : "NOT RIGHT");
    time_all(wide, ceilings, is_brief);
    if (!is_brief) time_all(narrow, ceilings, is_brief);
    return is_fine ? 0 : 1;
}
#endif
