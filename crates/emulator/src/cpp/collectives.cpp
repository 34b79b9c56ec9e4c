// Collectives of a warp: each lane brings its operands, and reads its result when all lanes have
// come.
//
// Owns: shuffles, ballot, the distribution of matrix tiles, the product of tiles (computed by the
// last lane for all).
// Never: touches the kernel's memory, except the registers whose address a lane passes, while it
// runs.
// Invariant: a lane reads its result before it can meet the others twice more.
#include <string.h>

#include "block.h"
#include "numbers.h"

namespace emulator {
namespace {

typedef float Columns __attribute__((vector_size(32)));

void come_together(Collective collective, Site site) {
    if (meet(collective, site)) {
        let_go();
    } else {
        wait();
    }
}

void require_whole_warp(const char* what, Site site) {
    if (__builtin_expect(warp->exists != 0xffffffffu, false)) fail(Outcome::Failed, what, site);
}

// m16n8k16. Sums run over k in order, one rounding at a time.
void multiply(Brought& all) {
    Columns b[16];
    for (uint32_t part = 0; part < 2; part++) {
        uint16_t columns[8][8];
        memcpy(columns, all.b[part], sizeof columns);
        for (uint32_t k = 0; k < 8; k++) {
            for (uint32_t column = 0; column < 8; column++) b[part * 8 + k][column] = numbers::from_bf16(columns[column][k]);
        }
    }
    for (uint32_t half = 0; half < 2; half++) {
        Columns sums[8];
        memcpy(sums, all.d[half], sizeof sums);
        for (uint32_t part = 0; part < 2; part++) {
            uint16_t rows[8][8];
            memcpy(rows, all.a[half + part * 2], sizeof rows);
            for (uint32_t k = 0; k < 8; k++) {
                for (uint32_t row = 0; row < 8; row++) sums[row] += numbers::from_bf16(rows[row][k]) * b[part * 8 + k];
            }
        }
        memcpy(all.d[half], sums, sizeof sums);
    }
}

uint32_t element(const Row& row, uint32_t column) { return row.word[column / 2] >> (column % 2 * 16) & 0xffffu; }

}  // namespace

void sync_warp(Site site) {
    uint64_t* gate = &warp->gate[warp->turn];
    release(gate);
    come_together(Collective::Sync, site);
    acquire(gate);
}

uint64_t shuffle(uint64_t value, uint32_t from_lane, Site site) {
    // A lane that the block does not have gives NaNs.
    constexpr uint64_t NOTHING = uint64_t(numbers::POISON) << 32 | numbers::POISON;
    uint64_t* values = warp->brought.value[warp->turn];
    values[lane] = value;
    come_together(Collective::Shuffle, site);
    return warp->exists >> from_lane & 1 ? values[from_lane] : NOTHING;
}

uint32_t ballot(bool is_true, Site site) {
    uint32_t turn = warp->turn;
    warp->votes[turn] |= uint32_t(is_true) << lane;
    come_together(Collective::Ballot, site);
    return warp->votes[turn];
}

void ldmatrix(uint32_t* to, const Row& row, Layout layout, Site site) {
    require_whole_warp("ldmatrix in a warp of fewer than 32 lanes", site);
    const Row* rows = warp->brought.row[warp->turn];
    warp->brought.row[warp->turn][lane] = row;
    come_together(layout == Layout::AsStored ? Collective::Ldmatrix : Collective::LdmatrixTransposed, site);
    uint32_t group = lane / 4, pair = lane % 4;
    for (uint32_t matrix = 0; matrix < 4; matrix++, rows += 8) {
        to[matrix] = layout == Layout::AsStored ? rows[group].word[pair] : element(rows[pair * 2], group) | element(rows[pair * 2 + 1], group) << 16;
    }
}

void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
    require_whole_warp("mma_bf16 in a warp of fewer than 32 lanes", site);
    Brought& all = warp->brought;
    for (uint32_t part = 0; part < 4; part++) all.a[part][lane] = a[part];
    for (uint32_t part = 0; part < 2; part++) {
        all.b[part][lane] = b[part];
        memcpy(&all.d[part][lane * 2], d + part * 2, sizeof(float[2]));
    }
    if (meet(Collective::Mma, site)) {
        multiply(all);
        let_go();
    } else {
        wait();
    }
    // The lane's place is free to reuse: no lane multiplies again before this one is back.
    for (uint32_t part = 0; part < 2; part++) memcpy(d + part * 2, &all.d[part][lane * 2], sizeof(float[2]));
}

}  // namespace emulator
