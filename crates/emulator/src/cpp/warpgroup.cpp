// Products of warpgroups, which run asynchronously to the threads that begin them.
//
// Owns: the begun products of each thread, and the sums while they are undefined.
// Never: touches shared memory: emulator.h reads it when a product is begun and again when it is
// waited for, and the content must not have changed meanwhile, since the device may read it at any
// time between.
// Invariant: a thread's sums are NaNs for it from the first product until it has waited for the
// last one.
#include <string.h>

#include "block.h"
#include "groups.h"
#include "numbers.h"

namespace emulator {
namespace {

constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t SUMS = 64, ROWS = 16, COLUMNS = 128, DEPTH = 16;

typedef float Lanes8 __attribute__((vector_size(32)));

struct Products {
    Groups<WarpgroupProduct> all;
    // Address of the sums; null without a product in flight.
    float* d = nullptr;
    float sums[SUMS];
    WarpgroupProduct now;
    bool is_unfenced = false;
};

Products products_of[THREADS_MAX];
uint32_t unfenced = 0;

void set_unfenced(Products& products, bool is_unfenced) {
    unfenced += uint32_t(is_unfenced) - uint32_t(products.is_unfenced);
    products.is_unfenced = is_unfenced;
}

// The eight bf16 elements as floats.
void widen(float* to, const Row& row) {
    uint16_t halves[8];
    memcpy(halves, row.word, sizeof halves);
    for (uint32_t i = 0; i < 8; i++) to[i] = numbers::from_bf16(halves[i]);
}

// The place of lane `of`'s numbers: rows `of / 4` and the eighth after, columns `of % 4 * 2` and
// the next of each eight.
float& sum_at(uint32_t first, uint32_t row, uint32_t column) {
    uint32_t of = row % 8 * 4 + column % 8 / 2;
    return products_of[first + of].sums[column / 8 * 4 + row / 8 * 2 + column % 2];
}

// Sums run over the inner dimension in order, one rounding at a time, as `mma_bf16` does.
void multiply(uint32_t first) {
    float a[ROWS][DEPTH];
    static float b[DEPTH][COLUMNS];
    for (uint32_t of = 0; of < LANES; of++) {
        const WarpgroupProduct& part = products_of[first + of].now;
        widen(&a[of % 16][of / 16 * 8], part.left);
        for (uint32_t i = 0; i < 8; i++) {
            float row[8];
            widen(row, part.right[i]);
            for (uint32_t k = 0; k < 8; k++) b[i % 2 * 8 + k][of * 4 + i / 2] = row[k];
        }
    }
    bool keeps = products_of[first].now.keeps;
    for (uint32_t row = 0; row < ROWS; row++) {
        alignas(32) float sums[COLUMNS] = {};
        for (uint32_t column = 0; keeps && column < COLUMNS; column++) sums[column] = sum_at(first, row, column);
        for (uint32_t k = 0; k < DEPTH; k++) {
            for (uint32_t eight = 0; eight < COLUMNS; eight += 8) {
                Lanes8 sum, right;
                memcpy(&sum, sums + eight, sizeof sum);
                memcpy(&right, b[k] + eight, sizeof right);
                sum += a[row][k] * right;
                memcpy(sums + eight, &sum, sizeof sum);
            }
        }
        for (uint32_t column = 0; column < COLUMNS; column++) sum_at(first, row, column) = sums[column];
    }
}

}  // namespace

bool has_products() { return products_of[block.now].d != nullptr; }

void forget_products(uint32_t number) {
    Products& products = products_of[number];
    products.all.forget();
    products.d = nullptr;
    set_unfenced(products, false);
}

void shared_written() { set_unfenced(products_of[block.now], true); }
void shared_fenced() { set_unfenced(products_of[block.now], false); }

void products_begin(float* d, const WarpgroupProduct& product, Site site) {
    Products& products = products_of[block.now];
    if (block.threads % WARPGROUP != 0) fail(Outcome::Failed, "wgmma in a block that is no whole number of warpgroups", site);
    if (unfenced != 0) fail(Outcome::Failed, "wgmma after copies to shared memory that were not fenced for it", site);
    if (products.d != nullptr && products.d != d) fail(Outcome::Failed, "wgmma into other sums than those under way", site);
    if (products.d == nullptr) {
        products.d = d;
        memcpy(products.sums, d, sizeof products.sums);
        for (uint32_t i = 0; i < SUMS; i++) d[i] = numbers::from_bits(numbers::POISON);
    }
    products.all.begin(product);
}

void products_commit() { products_of[block.now].all.commit(); }

const WarpgroupProduct* products_due(uint32_t groups_left, uint32_t* count) {
    return products_of[block.now].all.due(groups_left, count);
}

void products_run(const WarpgroupProduct& product, Site site) {
    if (warp->exists != 0xffffffffu) fail(Outcome::Failed, "wgmma in a warp of fewer than 32 lanes", site);
    products_of[block.now].now = product;
    if (meet(Collective::Wgmma, site)) {
        multiply(block.now / LANES * LANES);
        let_go();
    } else {
        wait();
    }
}

void products_over() {
    Products& products = products_of[block.now];
    if (products.d == nullptr || !products.all.is_over()) return;
    memcpy(products.d, products.sums, sizeof products.sums);
    products.d = nullptr;
}

}  // namespace emulator
