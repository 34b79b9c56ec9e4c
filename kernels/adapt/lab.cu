// Lab of adapters: both products of each stack of Llama 3.1 8B at rank 16, for rows of one adapter and of many, against
// sums in f64 on the host.
//
// Owns: the shapes that are timed.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "adapters.cuh"
#include "warp_sums.cuh"

#include <cmath>
#include <memory>
#include <random>

// Each file has constants of its own.
namespace shrink_kernel {
#include "shrink.cu"
}
namespace expand_kernel {
#include "expand.cu"
}

namespace {

using lab::Buffer;

struct Size {
    const char* name;
    u32 in;
    u32 out;
    u32 ranks;
};

std::vector<float> random_floats(size_t count, u32 seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> all(count);
    for (float& one : all) one = normal(random) / 64;
    return all;
}

// One stack of several adapters, and the rows of a step that go round them.
class Step {
public:
    Step(const Size& size, u32 rows, u32 adapters)
        : size_(size), rows_(rows), x_(u64(rows) * size.in), out_(u64(rows) * size.out), shrunk_(u64(rows) * size.ranks) {
        lab::fill(x_.get(), x_.count(), 1, 1.0f);
        for (u32 adapter = 0; adapter < adapters; adapter++) {
            shrink_.push_back(std::make_unique<Buffer<float>>(random_floats(u64(size.ranks) * size.in, 2 * adapter)));
            expand_.push_back(std::make_unique<Buffer<float>>(random_floats(u64(size.ranks) * size.out, 2 * adapter + 1)));
            const std::vector<AdapterChange> change = {{shrink_.back()->get(), expand_.back()->get(), size.ranks, 0}};
            changes_.push_back(std::make_unique<Buffer<AdapterChange>>(change));
        }
        for (u32 adapter = 0; adapter < adapters; adapter++) {
            const u32 first = rows * adapter / adapters, end = rows * (adapter + 1) / adapters;
            for (u32 row = first; row < end; row++) host_places_.push_back({changes_[adapter]->get(), row, 0});
            for (u32 at = first; at < end; at += TILE_PLACES) host_tiles_.push_back({at, std::min(end, at + TILE_PLACES)});
        }
        places_ = std::make_unique<Buffer<AdapterPlace>>(host_places_);
        tiles_ = std::make_unique<Buffer<AdapterTile>>(host_tiles_);
        counts_ = std::make_unique<Buffer<u32>>(std::vector<u32>{rows, u32(host_tiles_.size())});
    }

    void run() const {
        const AdapterRows rows = {places_->get(), tiles_->get(), counts_->get(), 0, size_.ranks};
        const bool is_tiled = rows_ >= 64;
        const u32 tiles = u32(host_tiles_.size());
        const u32 warps = is_tiled ? tiles * ((size_.ranks + 3) / 4) : rows_ * size_.ranks;
        const shrink_kernel::ShrinkArgs shrink = {x_.get(), shrunk_.get(), rows, size_.in, is_tiled};
        const expand_kernel::ExpandArgs expand = {shrunk_.get(), out_.get(), rows, size_.out, 0};
        shrink_kernel::adapt_shrink_bf16<<<(warps + 3) / 4, 128>>>(shrink);
        expand_kernel::adapt_expand_bf16<<<dim3(tiles, (size_.out + 1023) / 1024), 128>>>(expand);
    }

    // The largest error of the first and the last row, relative to the largest result, after one run on zeros.
    double error(u32 adapters) const {
        lab::check(cudaMemset(out_.get(), 0, out_.count() * sizeof(bf16)), "cudaMemset");
        run();
        const std::vector<bf16> x = x_.read(), out = out_.read();
        double most = 0, largest = 0;
        for (const u32 row : {0u, rows_ - 1}) {
            const u32 adapter = row == 0 ? 0 : adapters - 1;
            const std::vector<float> a = shrink_[adapter]->read(), b = expand_[adapter]->read();
            std::vector<double> shrunk(size_.ranks);
            for (u32 rank = 0; rank < size_.ranks; rank++) {
                for (u32 i = 0; i < size_.in; i++) shrunk[rank] += double(a[u64(rank) * size_.in + i]) * lab::value(x[u64(row) * size_.in + i]);
            }
            for (u32 column = 0; column < size_.out; column++) {
                double sum = 0;
                for (u32 rank = 0; rank < size_.ranks; rank++) sum += shrunk[rank] * b[u64(rank) * size_.out + column];
                most = std::max(most, std::abs(sum - lab::value(out[u64(row) * size_.out + column])));
                largest = std::max(largest, std::abs(sum));
            }
        }
        return most / largest;
    }

    // Each adapter's matrices once, the rows read, and the results read and written.
    double bytes(u32 adapters) const {
        return 4.0 * adapters * size_.ranks * (size_.in + size_.out) + 2.0 * rows_ * size_.in + 4.0 * rows_ * size_.out;
    }

private:
    Size size_;
    u32 rows_;
    Buffer<bf16> x_, out_;
    Buffer<float> shrunk_;
    std::vector<std::unique_ptr<Buffer<float>>> shrink_, expand_;
    std::vector<std::unique_ptr<Buffer<AdapterChange>>> changes_;
    std::vector<AdapterPlace> host_places_;
    std::vector<AdapterTile> host_tiles_;
    std::unique_ptr<Buffer<AdapterPlace>> places_;
    std::unique_ptr<Buffer<AdapterTile>> tiles_;
    std::unique_ptr<Buffer<u32>> counts_;
};

void measure(const Size& size, u32 rows, u32 adapters, double ceiling) {
    const Step step(size, rows, adapters);
    lab::Figure figure;
    figure.lab = "adapt";
    figure.variant = "bf16";
    figure.shape = std::string(size.name) + ", rows " + std::to_string(rows) + ", adapters " + std::to_string(adapters);
    figure.error = step.error(adapters);
    figure.tolerance = 0.01;
    figure.seconds = lab::seconds_of(20, [&](int) { step.run(); });
    figure.bytes = step.bytes(adapters);
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    const Size sizes[] = {{"qkv", 4096, 6144, 48}, {"output", 4096, 4096, 16}, {"gate and up", 4096, 28672, 32}, {"down", 14336, 4096, 16}};
    for (const Size& size : sizes) {
        for (const u32 rows : {1u, 32u, 256u, 4096u}) {
            measure(size, rows, 1, ceiling);
            if (rows >= 32) measure(size, rows, 32, ceiling);
        }
    }
}
#endif
