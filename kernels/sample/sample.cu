// From logits to a token, one row at a time: the mask of a constraint, bias, bans and penalties, top-n-sigma,
// temperature, top-k, top-p, min-p, and the draw with a number that the host made of seed and position.
//
// The rules are those of crates/engine/src/sampling, to the bit: the exponential is the same sequence of
// rounded operations, and weights are added as whole numbers of 2^-44, so that sums do not depend on how many
// threads make them. Equal logits give equal tokens on every device.
//
// `sample_prepare` checks and edits the logits and finds the most likely token, and `sample_weigh` adds up the weights
// of each segment of a row, both with many blocks a row. `sample_draw` does the rest, one block a row; nothing is
// sorted. A cut by likelihood ends at a bar: a logit, and among tokens of that logit the largest id that stays. It is
// found by radix selection over the logits' bits, by count for top-k and by weight for top-p, among the few tokens
// that can be near it; where many can (a top-k above 512, a flat row), warps add up in bins of their own, so that none
// waits for another.
//
// An exponential takes some 60 instructions, a row of 128k tokens on one multiprocessor 60 µs: whole rows are weighed
// by many blocks, and one block weighs the tokens alone that can count.
#include "prims.cuh"

// The rules by which a row's token is drawn.
struct DrawRule {
    u64 bits;          // below 2^53
    u64 top_p;         // parts of 2^53; 2^53 keeps all
    float heat;        // 1 / temperature; 0 takes the most likely token
    float min_p;       // 0 keeps all
    u32 top_k;         // 0 keeps all
    u32 edits_first;   // in edits; sorted by token, several of one token in the order they apply
    u32 edits_count;
    float top_n_sigma; // 0 keeps all
    u32 row;           // of logits, counters and tokens
    u32 mask;          // the first word of its mask, or NO_MASK or DRAWN_LATER
};

enum EditKind : u32 { EDIT_ADD = 0, EDIT_BAN = 1, EDIT_PENALIZE = 2 };

struct Edit {
    u32 token;
    u32 kind;
    float value;       // added to the logit, or the repetition penalty
    float frequency;   // subtracted
    float presence;    // subtracted after `frequency`
};

struct SampleArgs {
    float* logits;           // (rows, vocab), changed
    const DrawRule* rules;   // (rows)
    const Edit* edits;
    const u32* masks;        // (vocab / 32, rounded up) words a mask: bit t % 32 of word t / 32 allows token t
    u64* best;               // (rows), zero before and after: see key_of_token
    u64* segments;           // (rows, SEGMENTS_MAX), the sum of each segment's units, see Segments
    u32* tokens;             // (rows), the token drawn, or NO_TOKEN if logits were not finite
    u32 vocab;
    u32 reserved;
};

constexpr u32 NO_TOKEN = 0xffffffffu;
constexpr u32 NO_MASK = 0xffffffffu;
// The row gets NO_TOKEN: another launch draws it once its mask is known, or it is a row of padding.
constexpr u32 DRAWN_LATER = 0xfffffffeu;
constexpr u64 NOT_FINITE = ~u64(0);

constexpr u32 PREPARE_THREADS = 256;
constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 DIGIT_BITS = 8;
constexpr u32 BINS = 1 << DIGIT_BITS;
constexpr u32 SEGMENTS_MAX = 1024;
// Tokens near a cut that a warp keeps beside each other.
constexpr u32 LISTED_MAX = 256;
// Tokens whose logits a thread loads at once, and such loads on the way: a row is read by one block, so the latency of
// its loads is its time.
constexpr u32 TOGETHER = 4;
constexpr u32 AHEAD = 4;

// Larger logits have larger keys; both zeros have one.
DEVICE u32 key_of(float logit) {
    u32 bits = f32_to_bits(add_rn(logit, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float logit_of(u32 key) { return bits_to_f32(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
// Larger for a larger logit, then for a smaller id; never 0 for a finite logit.
DEVICE u64 key_of_token(float logit, u32 token) { return u64(key_of(logit)) << 32 | u64(~token); }
DEVICE bool is_finite(float x) { return (f32_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// exp(x) for x <= 0; 0 below -87. Every operation is rounded as written.
DEVICE float exp_exact(float x) {
    constexpr float ROUND = 12582912.0f;
    constexpr float TERMS[5] = {1.3981999e-3f, 8.333452e-3f, 4.1665796e-2f, 1.6666665e-1f, 0.5f};
    float clamped = x > -87.0f ? x : -87.0f;
    float rounded = add_rn(mul_rn(clamped, 1.4426950408889634f), ROUND);
    float whole = add_rn(rounded, -ROUND);
    float r = add_rn(clamped, -mul_rn(whole, 0.6933594f));
    r = add_rn(r, -mul_rn(whole, -2.1219444e-4f));
    float p = 1.9875691e-4f;
#pragma unroll
    for (u32 i = 0; i < 5; i++) p = add_rn(mul_rn(p, r), TERMS[i]);
    float value = add_rn(add_rn(mul_rn(mul_rn(p, r), r), r), 1.0f);
    u32 exponent = f32_to_bits(rounded) - f32_to_bits(ROUND);
    float scale = bits_to_f32((exponent + 127) << 23);
    return x > -87.0f ? mul_rn(value, scale) : 0.0f;
}

// A weight as a whole number of 2^-44. The product with a power of two is exact.
DEVICE u64 units(float weight) { return u64(weight * 17592186044416.0f); }
// whole * share / 2^53, rounded down.
DEVICE u64 part(u64 whole, u64 share) { return mul_high(whole, share << 11); }

DEVICE void apply(float& logit, const Edit& edit) {
    switch (edit.kind) {
        case EDIT_ADD: logit = add_rn(logit, edit.value); break;
        case EDIT_BAN: logit = NEGATIVE_INFINITY; break;
        default:
            logit = logit > 0.0f ? logit / edit.value : mul_rn(logit, edit.value);
            logit = add_rn(add_rn(logit, -edit.frequency), -edit.presence);
    }
}

// The best key of a span of a row, over this thread's tokens.
DEVICE u64 best_of(const float* logits, u32 first, u32 end) {
    u64 best = 0;
    for (u32 token = first + threadIdx.x; token < end; token += PREPARE_THREADS)
        best = larger(best, is_finite(logits[token]) ? key_of_token(logits[token], token) : NOT_FINITE);
    return best;
}

// Grid: (rows, any number of blocks that share a row).
extern "C" KERNEL(PREPARE_THREADS, 1) sample_prepare(GRID_CONSTANT const SampleArgs args) {
    start_kernel();
    DrawRule rule = args.rules[blockIdx.x];
    if (rule.mask == DRAWN_LATER) return;
    u32 each = (args.vocab + gridDim.y - 1) / gridDim.y;
    u32 first = blockIdx.y * each;
    u32 end = first + each < args.vocab ? first + each : args.vocab;
    float* logits = args.logits + u64(rule.row) * args.vocab;
    u64 best = best_of(logits, first, end);
    if (rule.edits_count > 0 || rule.mask != NO_MASK) {
        __shared__ u32 is_broken;
        if (threadIdx.x == 0) is_broken = 0;
        sync_block();
        if (best == NOT_FINITE) is_broken = 1;
        sync_block();
        if (rule.mask != NO_MASK) {
            const u32* mask = args.masks + rule.mask;
            for (u32 token = first + threadIdx.x; token < end; token += PREPARE_THREADS)
                if (!(mask[token / 32] >> (token % 32) & 1)) logits[token] = NEGATIVE_INFINITY;
            sync_block();
        }
        const Edit* edits = args.edits + rule.edits_first;
        for (u32 i = threadIdx.x; i < rule.edits_count; i += PREPARE_THREADS) {
            u32 token = edits[i].token;
            bool is_mine = token >= first && token < end && (i == 0 || edits[i - 1].token != token);
            for (u32 j = i; is_mine && j < rule.edits_count && edits[j].token == token; j++) apply(logits[token], edits[j]);
        }
        sync_block();
        // Bans and masks are infinite by intention.
        best = 0;
        for (u32 token = first + threadIdx.x; token < end; token += PREPARE_THREADS)
            best = larger(best, key_of_token(logits[token], token));
        if (is_broken) best = NOT_FINITE;
    }
    for (u32 mask = 16; mask > 0; mask /= 2) best = larger(best, shuffle_xor(best, mask));
    if (lane_index() == 0 && best != 0) atomic_max(&args.best[rule.row], best);
}

// The state of one block for its row.
struct Row {
    const float* logits;
    u32 vocab;
    float most;
    float heat;
    float min_p;
    // The least likely token that stays: its logit's key, and its id.
    u32 bar_key;
    u32 bar_id;
};

struct Shared {
    // Each warp's own: one lane at a time adds to a bin, without atomics.
    u64 bins[WARPS][BINS];
    u64 segments[SEGMENTS_MAX];
    u64 warps[WARPS];
    // Tokens that a cut looks at, a list for each warp: their logits' keys, and their ids.
    u32 listed_keys[WARPS][LISTED_MAX];
    u32 listed_tokens[WARPS][LISTED_MAX];
    u32 listed[WARPS];
    u32 keys[THREADS];
    // An answer of one thread for all.
    u64 found[3];
};
static_assert(sizeof(Shared) == 75992, "the shared memory of a block, as in the list of kernels");

DEVICE bool is_kept(const Row& row, u32 key, u32 token) {
    return key > row.bar_key || (key == row.bar_key && token <= row.bar_id);
}
DEVICE float exponent_of(const Row& row, float logit) { return mul_rn(add_rn(logit, -row.most), row.heat); }
DEVICE float weight_of(const Row& row, float logit) { return exp_exact(exponent_of(row, logit)); }

// The logits of TOGETHER tokens from `first` on, a multiple of it; negative infinity past the vocabulary.
DEVICE void load_logits(float (&logits)[TOGETHER], const Row& row, u32 first) {
    if (row.vocab % TOGETHER == 0 && first < row.vocab) {
        const Words4 words = load_words(row.logits + first);
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) logits[i] = bits_to_f32(words.word[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) logits[i] = first + i < row.vocab ? row.logits[first + i] : NEGATIVE_INFINITY;
    }
}

// Calls `visit` with TOGETHER tokens and their logits from `first`, `first + stride` and so on: `rounds` times, past
// the vocabulary with negative infinity, so that all threads with the same `rounds` make the same calls.
template <class Visit> DEVICE void visit_rounds(const Row& row, u32 first, u32 stride, u32 rounds, Visit visit) {
    for (u32 round = 0; round < rounds; round += AHEAD) {
        float logits[AHEAD][TOGETHER];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (round + i < rounds) load_logits(logits[i], row, first + (round + i) * stride);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD * TOGETHER; i++) {
            const u32 at = round + i / TOGETHER;
            if (at < rounds) visit(first + at * stride + i % TOGETHER, logits[i / TOGETHER][i % TOGETHER]);
        }
    }
}

// The rounds in which a block visits a row.
DEVICE u32 rounds_of(const Row& row) { return (row.vocab + THREADS * TOGETHER - 1) / (THREADS * TOGETHER); }

// Calls `visit` with each of this thread's tokens and its logit.
template <class Visit> DEVICE void visit_tokens(const Row& row, Visit visit) {
    visit_rounds(row, threadIdx.x * TOGETHER, THREADS * TOGETHER, rounds_of(row), [&](u32 token, float logit) {
        if (token < row.vocab) visit(token, logit);
    });
}

DEVICE u64 warp_sum(u64 x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE u64 block_sum(u64 x, Shared& shared) {
    x = warp_sum(x);
    sync_block();
    if (lane_index() == 0) shared.warps[threadIdx.x / 32] = x;
    sync_block();
    u64 total = 0;
    for (u32 warp = 0; warp < WARPS; warp++) total += shared.warps[warp];
    return total;
}

DEVICE u64 block_largest(u64 x, Shared& shared) {
    for (u32 mask = 16; mask > 0; mask /= 2) x = larger(x, shuffle_xor(x, mask));
    sync_block();
    if (lane_index() == 0) shared.warps[threadIdx.x / 32] = x;
    sync_block();
    u64 largest = 0;
    for (u32 warp = 0; warp < WARPS; warp++) largest = larger(largest, shared.warps[warp]);
    return largest;
}

// The sum over the threads before this one.
DEVICE u64 sum_before(u64 x, Shared& shared) {
    u64 upto = x;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u64 other = shuffle_up(upto, distance);
        if (lane_index() >= distance) upto += other;
    }
    sync_block();
    if (lane_index() == 31) shared.warps[threadIdx.x / 32] = upto;
    sync_block();
    u64 before = upto - x;
    for (u32 warp = 0; warp < threadIdx.x / 32; warp++) before += shared.warps[warp];
    return before;
}

// The bin in which the running sum from the highest bin down reaches `wanted`, which lies within the sum
// of all: in found its number, what is still wanted of it, and what it has.
DEVICE void find_bin(u64 wanted, Shared& shared) {
    static_assert(BINS <= THREADS, "a thread a bin");
    const u32 bin = BINS - 1 - threadIdx.x;
    u64 mine = 0;
    if (threadIdx.x < BINS) {
        for (u32 warp = 0; warp < WARPS; warp++) mine += shared.bins[warp][bin];
    }
    u64 before = sum_before(mine, shared);
    if (before < wanted && wanted <= before + mine) {
        shared.found[0] = bin;
        shared.found[1] = wanted - before;
        shared.found[2] = mine;
    }
    sync_block();
}

// Adds each lane's measure to its digit's bin. Lanes of one digit are summed by the warp first, and one of them adds:
// most likelihoods of a row share a few digits, on which atomics would wait for each other. Sums are of whole numbers,
// so their order does not matter.
DEVICE void add_to_bins(u64 (&bins)[BINS], u32 digit, u64 measure) {
    for (u32 left = ballot(measure > 0); left != 0;) {
        const u32 leader = 31 - leading_zeros(left);
        // All lanes take part in the shuffle, also lanes with nothing to add.
        const u32 of_leader = shuffle(digit, leader);
        const bool is_mine = measure > 0 && digit == of_leader;
        const u32 same = ballot(is_mine);
        const u64 sum = count_ones(same) == 1 ? measure : warp_sum(is_mine ? measure : 0);
        if (lane_index() == leader) bins[digit] += sum;
        left &= ~same;
    }
}

// The measures of a cut: each token counts as one, or by its weight.
struct ByCount {
    u32 least_key;
    DEVICE bool may_count(const Row&, float, u32 key) const { return key >= least_key; }
    DEVICE u64 measure(const Row&, float, u32 key) const { return key >= least_key ? 1 : 0; }
};
struct ByWeight {
    u64 least;
    // Exponents below this surely have smaller weights.
    float least_exponent;

    DEVICE explicit ByWeight(u64 units_least) : least(units_least) {
        // 2^(power - 44) is at most the least weight, which is that of an exponent of (power - 44) · ln 2 or more. The
        // hundredth is far more than what the exponential is off by.
        const i32 power = i32(f32_to_bits(float(least)) >> 23) - 127;
        least_exponent = least > 0 ? add_rn(mul_rn(float(power - 1 - 44), 0.6931472f), -0.01f) : NEGATIVE_INFINITY;
    }
    // Whether the measure may be more than zero, with a few instructions.
    DEVICE bool may_count(const Row& row, float logit, u32) const { return exponent_of(row, logit) >= least_exponent; }
    DEVICE u64 measure(const Row& row, float logit, u32 key) const {
        if (!may_count(row, logit, key)) return 0;
        u64 unit = units(weight_of(row, logit));
        return unit >= least ? unit : 0;
    }
};

// Lists the kept tokens that a cut measures. False if a warp has more of them than its list holds.
template <class By> DEVICE bool list_measured(const Row& row, const By& by, Shared& shared) {
    const u32 warp = threadIdx.x / 32, lanes_before = (1u << lane_index()) - 1;
    u32 count = 0;
    visit_rounds(row, threadIdx.x * TOGETHER, THREADS * TOGETHER, rounds_of(row), [&](u32 token, float logit) {
        const u32 key = key_of(logit);
        const bool is_measured = token < row.vocab && is_kept(row, key, token) && by.may_count(row, logit, key);
        const u32 measured = ballot(is_measured);
        if (measured == 0) return;
        const u32 at = count + count_ones(measured & lanes_before);
        if (is_measured && at < LISTED_MAX) {
            shared.listed_keys[warp][at] = key;
            shared.listed_tokens[warp][at] = token;
        }
        count += count_ones(measured);
    });
    if (lane_index() == 0) shared.listed[warp] = count;
    sync_block();
    u32 most = 0;
    for (u32 other = 0; other < WARPS; other++) most = shared.listed[other] > most ? shared.listed[other] : most;
    return most <= LISTED_MAX;
}

// Calls `visit` with the tokens that a cut looks at, their logits and keys: the warp's list, or the whole row. All
// lanes of a warp make the same calls; those without a token have one past the vocabulary.
template <class Visit> DEVICE void visit_measured(const Row& row, bool is_listed, const Shared& shared, Visit visit) {
    if (!is_listed) {
        visit_rounds(row, threadIdx.x * TOGETHER, THREADS * TOGETHER, rounds_of(row),
                     [&](u32 token, float logit) { visit(token, logit, key_of(logit)); });
        return;
    }
    const u32 warp = threadIdx.x / 32, count = shared.listed[warp];
    for (u32 first = 0; first < count; first += 32) {
        const u32 at = first + lane_index();
        const u32 key = at < count ? shared.listed_keys[warp][at] : 0;
        visit(at < count ? shared.listed_tokens[warp][at] : row.vocab, logit_of(key), key);
    }
}

// Moves the bar to where the measures of kept tokens, most likely first, reach `wanted`.
template <class By> DEVICE void cut(Row& row, const By& by, u64 wanted, Shared& shared) {
    const bool is_listed = list_measured(row, by, shared);
    u32 prefix = 0;
    for (u32 shift = 32; shift > 0;) {
        u32 digits = shift >= DIGIT_BITS ? DIGIT_BITS : shift;
        u32 known = shift;
        shift -= digits;
        sync_block();
        u64(&bins)[BINS] = shared.bins[threadIdx.x / 32];
        for (u32 bin = lane_index(); bin < BINS; bin += 32) bins[bin] = 0;
        sync_warp();
        visit_measured(row, is_listed, shared, [&](u32 token, float logit, u32 key) {
            const bool is_here = token < row.vocab && (known == 32 || key >> known == prefix);
            const u64 measure = is_here && is_kept(row, key, token) ? by.measure(row, logit, key) : 0;
            add_to_bins(bins, (key >> shift) & ((1u << digits) - 1), measure);
            sync_warp();
        });
        sync_block();
        find_bin(wanted, shared);
        prefix = prefix << digits | u32(shared.found[0]);
        wanted = shared.found[1];
    }
    u64 equals = shared.found[2];
    // All tokens of one logit measure the same.
    u64 each = by.measure(row, logit_of(prefix), prefix);
    u64 staying = (wanted + each - 1) / each;
    u32 bar_id = prefix == row.bar_key ? row.bar_id : ~0u;
    if (staying * each < equals) {
        // The smallest ids stay: each thread counts in a span of its own.
        u32 span = (row.vocab + THREADS - 1) / THREADS;
        u32 first = threadIdx.x * span;
        u32 end = first + span < row.vocab ? first + span : row.vocab;
        u64 count = 0;
        for (u32 token = first; token < end; token++) count += key_of(row.logits[token]) == prefix;
        u64 before = sum_before(count, shared);
        if (before < staying && staying <= before + count) {
            u32 token = first;
            for (u64 left = staying - before; left > 0; token++) left -= key_of(row.logits[token]) == prefix;
            shared.found[0] = token - 1;
        }
        sync_block();
        bar_id = u32(shared.found[0]);
    }
    row.bar_key = prefix;
    row.bar_id = bar_id;
}

// A logit's key that at least `count` tokens reach, so that tokens below it need not be looked at: of the
// threads' largest the one of that rank. 0, which all reach, where there are not so many threads.
DEVICE u32 key_reached_by(const Row& row, u32 count, Shared& shared) {
    if (count > THREADS || count > row.vocab) return 0;
    u32 mine = 0;
    visit_tokens(row, [&](u32, float logit) {
        u32 key = key_of(logit);
        mine = key > mine ? key : mine;
    });
    shared.keys[threadIdx.x] = mine;
    sync_block();
    u32 rank = 0;
    for (u32 other = 0; other < THREADS; other++) {
        u32 key = shared.keys[other];
        rank += key > mine || (key == mine && other < threadIdx.x);
    }
    if (rank == count - 1) shared.found[0] = mine;
    sync_block();
    return u32(shared.found[0]);
}

// How far a logit is below the largest, in 2^-16 of a logit, rounded down; all beyond 65536 are equally far.
DEVICE u32 distance_of(const Row& row, float logit) {
    float distance = add_rn(row.most, -logit);
    return distance < 65536.0f ? u32(distance * 65536.0f) : ~0u;
}

// Moves the bar to the last token within `n` standard deviations of the largest logit, if it is above. Logits that
// are banned do not count.
DEVICE void keep_within(Row& row, float n, Shared& shared) {
    u64 count = 0, sum = 0;
    visit_tokens(row, [&](u32, float logit) {
        if (logit == NEGATIVE_INFINITY) return;
        count++;
        sum += distance_of(row, logit);
    });
    count = block_sum(count, shared);
    const u64 mean = block_sum(sum, shared) / count;
    // A square takes up to 64 bits, so the halves are added apart.
    u64 high = 0, low = 0;
    visit_tokens(row, [&](u32, float logit) {
        if (logit == NEGATIVE_INFINITY) return;
        u64 distance = distance_of(row, logit);
        u64 deviation = distance > mean ? distance - mean : mean - distance;
        u64 square = deviation * deviation;
        high += square >> 32;
        low += square & 0xffffffffu;
    });
    high = block_sum(high, shared);
    low = block_sum(low, shared);
    float squares = add_rn(mul_rn(float(high), 4294967296.0f), float(low));
    float limit = mul_rn(n, sqrt_rn(squares / float(count)));
    u32 greatest = limit < 4294967296.0f ? u32(limit) : ~0u;
    // The least key that stays, as the largest complement.
    u64 mine = 0;
    visit_tokens(row, [&](u32, float logit) {
        if (distance_of(row, logit) <= greatest) mine = larger(mine, u32(~key_of(logit)));
    });
    u32 key = ~u32(block_largest(mine, shared));
    if (key > row.bar_key) {
        row.bar_key = key;
        row.bar_id = ~0u;
    }
}

DEVICE u64 kept_units(const Row& row, u32 token, float logit) {
    if (!is_kept(row, key_of(logit), token)) return 0;
    float weight = weight_of(row, logit);
    return weight >= row.min_p ? units(weight) : 0;
}

// A row's segments: runs of tokens whose weights are summed by one warp, TOGETHER for each lane at a time.
struct Segments {
    u32 rounds;
    u32 tokens;
    u32 count;

    DEVICE explicit Segments(u32 vocab) {
        constexpr u32 ROUND = 32 * TOGETHER;
        rounds = (vocab + SEGMENTS_MAX * ROUND - 1) / (SEGMENTS_MAX * ROUND);
        tokens = rounds * ROUND;
        count = (vocab + tokens - 1) / tokens;
    }
};

// Adds up `count` segments from `first` on: a warp's work, with `to` in the memory that all its lanes see.
DEVICE void weigh_segments(const Row& row, const Segments& segments, u32 first, u32 count, u64* to) {
    u64 sum = 0;
    u32 segment = first, left = segments.rounds * TOGETHER;
    const u32 token = first * segments.tokens + lane_index() * TOGETHER;
    visit_rounds(row, token, 32 * TOGETHER, count * segments.rounds, [&](u32 at, float logit) {
        if (at < row.vocab) sum += kept_units(row, at, logit);
        if (--left > 0) return;
        sum = warp_sum(sum);
        if (lane_index() == 0) to[segment] = sum;
        segment++;
        left = segments.rounds * TOGETHER;
        sum = 0;
    });
}

// The first token at which the running sum of kept weights passes `bits` / 2^53 of all of them. `weighed` has the sums
// of segments if no rule but the temperature has changed them.
DEVICE u32 draw(const Row& row, u64 bits, const u64* weighed, Shared& shared) {
    const Segments segments(row.vocab);
    if (weighed == nullptr) {
        // A warp has neighbouring segments.
        const u32 each = (segments.count + WARPS - 1) / WARPS, first = min(threadIdx.x / 32 * each, segments.count);
        sync_block();
        weigh_segments(row, segments, first, min(each, segments.count - first), shared.segments);
        sync_block();
        weighed = shared.segments;
    }
    // Each thread has two neighbouring segments; in one thread's the sum passes the goal.
    static_assert(SEGMENTS_MAX == 2 * THREADS, "segments of a thread");
    u64 pair[2];
    for (u32 i = 0; i < 2; i++) {
        u32 segment = threadIdx.x * 2 + i;
        pair[i] = segment < segments.count ? weighed[segment] : 0;
    }
    const u64 goal = part(block_sum(pair[0] + pair[1], shared), bits);
    u64 before = sum_before(pair[0] + pair[1], shared);
    if (before <= goal && goal < before + pair[0] + pair[1]) {
        bool is_second = goal >= before + pair[0];
        shared.found[0] = threadIdx.x * 2 + is_second;
        shared.found[1] = goal - before - (is_second ? pair[0] : 0);
    }
    sync_block();
    // The first warp walks that segment; the others are done.
    if (threadIdx.x >= 32) return 0;
    u32 first = u32(shared.found[0]) * segments.tokens;
    u64 left = shared.found[1];
    u32 drawn = 0;
    for (u32 i = 0; i < segments.tokens; i += 32) {
        u32 token = first + i + lane_index();
        u64 weight = token < row.vocab ? kept_units(row, token, row.logits[token]) : 0;
        u64 upto = weight;
        for (u32 distance = 1; distance < 32; distance *= 2) {
            u64 other = shuffle_up(upto, distance);
            if (lane_index() >= distance) upto += other;
        }
        u32 passing = ballot(upto > left);
        if (passing != 0) {
            drawn = first + i + (31 - leading_zeros(passing & (0u - passing)));
            break;
        }
        left -= shuffle(upto, 31);
    }
    return drawn;
}

// The state of a row before any cut; `is_decided` if its token does not depend on weights.
struct Start {
    u64 best;
    float most;
    bool is_decided;

    DEVICE Start(const SampleArgs& args, const DrawRule& rule) : best(args.best[rule.row]), most(logit_of(u32(best >> 32))) {
        is_decided = best == NOT_FINITE || rule.heat == 0.0f || most == NEGATIVE_INFINITY;
    }
    DEVICE Row row(const SampleArgs& args, const DrawRule& rule) const {
        return {args.logits + u64(rule.row) * args.vocab, args.vocab, most, rule.heat, rule.min_p, 0, ~0u};
    }
};

DEVICE u64* segments_of(const SampleArgs& args, u32 row) { return args.segments + u64(row) * SEGMENTS_MAX; }
// Whether a rule cuts the row before weights are added up.
DEVICE bool cuts_first(const DrawRule& rule, u32 vocab) { return (rule.top_k > 0 && rule.top_k < vocab) || rule.top_n_sigma > 0.0f; }
DEVICE bool cuts_by_weight(const DrawRule& rule) { return rule.top_p < u64(1) << 53; }

// Grid: (rows, any number of blocks that share a row).
extern "C" KERNEL(PREPARE_THREADS, 1) sample_weigh(GRID_CONSTANT const SampleArgs args) {
    start_kernel();
    const DrawRule rule = args.rules[blockIdx.x];
    if (rule.mask == DRAWN_LATER || cuts_first(rule, args.vocab)) return;
    const Start start(args, rule);
    if (start.is_decided) return;
    Row row = start.row(args, rule);
    // The share of top-p is one of all tokens, whatever min-p takes away afterwards.
    if (cuts_by_weight(rule)) row.min_p = 0;
    const Segments segments(args.vocab);
    constexpr u32 WARPS_OF_BLOCK = PREPARE_THREADS / 32;
    const u32 warps = gridDim.y * WARPS_OF_BLOCK, each = (segments.count + warps - 1) / warps;
    const u32 first = min((blockIdx.y * WARPS_OF_BLOCK + threadIdx.x / 32) * each, segments.count);
    weigh_segments(row, segments, first, min(each, segments.count - first), segments_of(args, rule.row));
}

// The weight of all tokens that are kept.
DEVICE u64 kept_total(const Row& row, const u64* weighed, Shared& shared) {
    u64 mine = 0;
    if (weighed != nullptr) {
        for (u32 i = threadIdx.x; i < Segments(row.vocab).count; i += THREADS) mine += weighed[i];
    } else {
        visit_tokens(row, [&](u32 token, float logit) {
            if (is_kept(row, key_of(logit), token)) mine += units(weight_of(row, logit));
        });
    }
    return block_sum(mine, shared);
}

// Grid: (rows).
extern "C" KERNEL(THREADS, 1) sample_draw(GRID_CONSTANT const SampleArgs args) {
    start_kernel();
    DYNAMIC_SHARED(u8, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    DrawRule rule = args.rules[blockIdx.x];
    if (rule.mask == DRAWN_LATER) {
        if (threadIdx.x == 0) args.tokens[rule.row] = NO_TOKEN;
        return;
    }
    const Start start(args, rule);
    sync_block();
    if (threadIdx.x == 0) args.best[rule.row] = 0;
    if (start.is_decided) {
        u32 token = start.most == NEGATIVE_INFINITY ? 0 : ~u32(start.best);
        if (threadIdx.x == 0) args.tokens[rule.row] = start.best == NOT_FINITE ? NO_TOKEN : token;
        return;
    }
    Row row = start.row(args, rule);
    const u64* weighed = cuts_first(rule, args.vocab) ? nullptr : segments_of(args, rule.row);
    if (rule.top_k > 0 && rule.top_k < args.vocab) {
        ByCount by{key_reached_by(row, rule.top_k, shared)};
        cut(row, by, rule.top_k, shared);
    }
    // The cuts keep the most likely tokens, so the order of this one and the last does not matter.
    if (rule.top_n_sigma > 0.0f) keep_within(row, rule.top_n_sigma, shared);
    if (cuts_by_weight(rule)) {
        const u64 total = kept_total(row, weighed, shared);
        const u64 wanted = larger(part(total, rule.top_p), 1);
        // Tokens lighter than this together weigh less than what the set leaves out.
        cut(row, ByWeight((total - wanted) / args.vocab), wanted, shared);
        weighed = nullptr;
    }
    u32 token = draw(row, rule.bits, weighed, shared);
    if (threadIdx.x == 0) args.tokens[rule.row] = token;
}
