// What the lanes of a warp do together: each brings its part, the last one to come computes for all.
//
// Owns: shuffles, ballot, the distribution of matrix tiles, the product of tiles.
// Never: touches the kernel's memory, save the registers that lanes hand in by address.
// Invariant: a lane reads what it takes before it can meet the others again.
#include "block.h"
#include "fiber.h"
#include "numbers.h"

namespace emulator {
namespace {

// The elements of one 16-byte row as 16-bit numbers.
uint32_t element(const Row& row, uint32_t column) { return row.word[column / 2] >> (column % 2 * 16) & 0xffffu; }

void distribute(Brought& all, Layout layout) {
    for (uint32_t to = 0; to < LANES; to++) {
        uint32_t group = to / 4, pair = to % 4;
        for (uint32_t matrix = 0; matrix < 4; matrix++) {
            const Row* rows = all.row + matrix * 8;
            all.tile[to][matrix] = layout == Layout::AsStored
                ? rows[group].word[pair]
                : element(rows[pair * 2], group) | element(rows[pair * 2 + 1], group) << 16;
        }
    }
}

float low(uint32_t word) { return numbers::from_bits(word << 16); }
float high(uint32_t word) { return numbers::from_bits(word & 0xffff0000u); }

// m16n8k16: sums run over k in order, one rounding at a time.
void multiply(Brought& all) {
    alignas(64) float a[16][16], b[16][8], d[16][8];
    for (uint32_t from = 0; from < LANES; from++) {
        uint32_t group = from / 4, pair = from % 4 * 2;
        for (uint32_t part = 0; part < 4; part++) {
            uint32_t row = group + part % 2 * 8, column = pair + part / 2 * 8;
            a[row][column] = low(all.a[from][part]);
            a[row][column + 1] = high(all.a[from][part]);
            d[group + part / 2 * 8][pair + part % 2] = all.d[from][part];
        }
        for (uint32_t part = 0; part < 2; part++) {
            b[pair + part * 8][group] = low(all.b[from][part]);
            b[pair + part * 8 + 1][group] = high(all.b[from][part]);
        }
    }
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t k = 0; k < 16; k++) {
            for (uint32_t column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (uint32_t to = 0; to < LANES; to++) {
        uint32_t group = to / 4, pair = to % 4 * 2;
        for (uint32_t part = 0; part < 4; part++) all.d[to][part] = d[group + part / 2 * 8][pair + part % 2];
    }
}

// A lane that the block does not have has nothing to give: whoever asks it gets a NaN.
void exchange(Warp& of) {
    Brought& all = of.brought;
    constexpr uint64_t NOTHING = uint64_t(numbers::POISON) << 32 | numbers::POISON;
    for (uint32_t to = 0; to < LANES; to++) {
        uint32_t from = all.from_lane[to];
        all.taken[to] = of.exists >> from & 1 ? all.value[from] : NOTHING;
    }
}

void require_whole_warp(const char* what, Site site) {
    if (warp->exists != 0xffffffffu) fail(Outcome::Failed, what, site);
}

}  // namespace

void sync_warp(Site site) {
    uint64_t* gate = &warp->gate[warp->syncs % 2];
    release(gate);
    if (meet(Collective::Sync, site)) {
        warp->syncs++;
        let_go();
    } else {
        wait();
    }
    acquire(gate);
}

uint64_t shuffle(uint64_t value, uint32_t from_lane, Site site) {
    Brought& all = warp->brought;
    all.value[lane] = value;
    all.from_lane[lane] = from_lane;
    if (meet(Collective::Shuffle, site)) {
        exchange(*warp);
        let_go();
    } else {
        wait();
    }
    return warp->brought.taken[lane];
}

uint32_t ballot(bool is_true, Site site) {
    warp->ballot_votes |= uint32_t(is_true) << lane;
    if (meet(Collective::Ballot, site)) {
        warp->ballot = warp->ballot_votes;
        warp->ballot_votes = 0;
        let_go();
    } else {
        wait();
    }
    return warp->ballot;
}

void ldmatrix(uint32_t* to, const Row& row, Layout layout, Site site) {
    require_whole_warp("ldmatrix in a warp of fewer than 32 lanes", site);
    warp->brought.row[lane] = row;
    warp->brought.tile[lane] = to;
    if (meet(layout == Layout::AsStored ? Collective::Ldmatrix : Collective::LdmatrixTransposed, site)) {
        distribute(warp->brought, layout);
        let_go();
    } else {
        wait();
    }
}

void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
    require_whole_warp("mma_bf16 in a warp of fewer than 32 lanes", site);
    Brought& all = warp->brought;
    all.d[lane] = d;
    all.a[lane] = a;
    all.b[lane] = b;
    if (meet(Collective::Mma, site)) {
        multiply(all);
        let_go();
    } else {
        wait();
    }
}

}  // namespace emulator
