// The choice of experts for each row, and their weights.
//
// Owns: the router's formula from logits on.
// Never: looks at another row's logits.
// Invariant: of equal scores the expert or group of the lower index is chosen; a score that is no number is chosen
// last. A row's experts are stored in ascending order.
//
// A warp has a row, lane l its experts l, l + 32 and so on.
#include "piece.cuh"

struct RouteArgs {
    // (rows, columns), the first `count` of which are experts'; become their scores.
    float* logits;
    // (count), or null.
    const float* choice_bias;
    // (rows, chosen) each.
    u32* experts;
    float* weights;
    // (rows): the sigmoid of the shared expert's logit if there is one, else 1.
    float* shared_weights;
    // (count, words): bit r of word w says whether row 32 w + r uses the expert.
    u32* masks;
    ExpertPiece piece;
    u32 columns;
    u32 count;
    u32 chosen;
    u32 words;
    // Score and Rule.
    u32 score;
    u32 rule;
    // Groups of neighbouring experts, as many in each; 0 if there are none.
    u32 groups;
    u32 groups_chosen;
    // 1 if the score of a group is the sum of its two best, 0 if it is the best.
    u32 is_two_best;
    float epsilon;
    float scale;
    u32 unused;
};

// From logits to scores.
enum Score : u32 { SOFTMAX, SIGMOID, IDENTITY };
// From chosen scores to weights.
enum Rule : u32 { SCORES, NORMALIZED, SOFTMAX_OF_CHOSEN };
constexpr u32 EXPERTS_MOST = 512, LANE_EXPERTS = EXPERTS_MOST / 32;
constexpr u32 ROWS = 32;
constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float warp_max(float x) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) x = max(x, shuffle_xor(x, mask));
    return x;
}
DEVICE float warp_sum(float x) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}
DEVICE float exponential(float x) { return exp2_fast(mul_rn(x, LOG2_E)); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

DEVICE float choice_bias(const RouteArgs& args, u32 expert) {
    return args.choice_bias == nullptr ? 0.0f : args.choice_bias[expert];
}

// Of two numbers the larger has the larger key; 1 for what is none, so that 0 is below all.
DEVICE u32 key_of(float x) {
    if (x != x) return 1;
    // Both zeros are one number.
    const u32 bits = f32_to_bits(x + 0.0f);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// Turns a row's logits into scores, in memory too, and each into its key in the choice; 0 where there is no expert.
DEVICE void score(const RouteArgs& args, u32 (&keys)[LANE_EXPERTS], float* logits) {
    const u32 lane = lane_index();
    float scores[LANE_EXPERTS], most = NEGATIVE_INFINITY, sum = 0;
#pragma unroll
    for (u32 i = 0; i < LANE_EXPERTS; i++) {
        const u32 expert = lane + i * 32;
        scores[i] = expert < args.count ? logits[expert] : NEGATIVE_INFINITY;
        most = max(most, scores[i]);
    }
    if (args.score == SIGMOID) {
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) scores[i] = sigmoid(scores[i]);
    } else if (args.score == SOFTMAX) {
        most = warp_max(most);
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) {
            scores[i] = exponential(scores[i] - most);
            sum = add_rn(sum, scores[i]);
        }
        sum = warp_sum(sum);
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) scores[i] /= sum;
    }
#pragma unroll
    for (u32 i = 0; i < LANE_EXPERTS; i++) {
        const u32 expert = lane + i * 32;
        keys[i] = 0;
        if (expert >= args.count) continue;
        logits[expert] = scores[i];
        keys[i] = key_of(scores[i] + choice_bias(args, expert));
    }
}

// Of group `lane`.
DEVICE float group_score(const RouteArgs& args, const float* scores) {
    const u32 each = args.count / args.groups, first = lane_index() * each;
    float largest = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
    for (u32 expert = first; expert < first + each; expert++) {
        const float x = scores[expert] + choice_bias(args, expert);
        if (x > largest) {
            second = largest;
            largest = x;
        } else {
            second = max(second, x);
        }
    }
    return args.is_two_best != 0 ? largest + second : largest;
}

// Sets the keys of experts in other groups than the best to 0.
DEVICE void close_groups(const RouteArgs& args, u32 (&keys)[LANE_EXPERTS], const float* scores) {
    const u32 lane = lane_index(), each = args.count / args.groups;
    const bool is_group = lane < args.groups;
    const float own = is_group ? group_score(args, scores) : NEGATIVE_INFINITY;
    u32 better = 0;
    for (u32 other = 0; other < args.groups; other++) {
        const float x = shuffle(own, other);
        if (x > own || (x == own && other < lane)) better++;
    }
    const u32 open = ballot(is_group && better < args.groups_chosen);
#pragma unroll
    for (u32 i = 0; i < LANE_EXPERTS; i++) {
        const u32 group = (lane + i * 32) / each;
        if (group >= args.groups || (open >> group & 1) == 0) keys[i] = 0;
    }
}

// The lane's experts that are among the row's best, as bits.
DEVICE u32 choose(const RouteArgs& args, u32 (&keys)[LANE_EXPERTS]) {
    const u32 lane = lane_index();
    u32 taken = 0;
    for (u32 turn = 0; turn < args.chosen; turn++) {
        u32 best = 0, expert = EXPERTS_MOST;
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) {
            if (keys[i] > best) {
                best = keys[i];
                expert = lane + i * 32;
            }
        }
#pragma unroll
        for (u32 mask = 16; mask > 0; mask /= 2) {
            const u32 other = shuffle_xor(best, mask), other_expert = shuffle_xor(expert, mask);
            if (other > best || (other == best && other_expert < expert)) {
                best = other;
                expert = other_expert;
            }
        }
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) {
            if (lane + i * 32 != expert) continue;
            keys[i] = 0;
            taken |= 1u << i;
        }
    }
    return taken;
}

// Stores the row's experts and their scores in ascending order, and marks the row for each.
DEVICE void store_choice(const RouteArgs& args, const float* scores, u32 taken, u32 row, u32* masks) {
    u32 before = 0;
#pragma unroll 1
    for (u32 i = 0; i < LANE_EXPERTS; i++) {
        const bool is_taken = (taken >> i & 1) != 0;
        const u32 lanes = ballot(is_taken), expert = lane_index() + i * 32;
        if (is_taken) {
            const u64 at = u64(row) * args.chosen + before + count_ones(lanes & ((1u << lane_index()) - 1));
            args.experts[at] = expert;
            args.weights[at] = scores[expert];
            // Each row has a bit of its own: the sum is the same in any order.
            atomic_add(masks + expert, 1u << row % ROWS);
        }
        before += count_ones(lanes);
    }
}

// Turns the chosen scores into weights.
DEVICE void weigh(const RouteArgs& args, u32 row) {
    const bool is_there = lane_index() < args.chosen;
    float* at = args.weights + u64(row) * args.chosen + lane_index();
    float weight = is_there ? *at : 0.0f;
    if (args.rule == NORMALIZED) {
        weight /= add_rn(warp_sum(weight), args.epsilon);
    } else if (args.rule == SOFTMAX_OF_CHOSEN) {
        const float most = warp_max(is_there ? weight : NEGATIVE_INFINITY);
        const float power = is_there ? exponential(weight - most) : 0.0f;
        weight = power / warp_sum(power);
    }
    if (is_there) *at = mul_rn(weight, args.scale);
}

DEVICE void route(const RouteArgs& args, u32 row, u32* masks) {
    float* scores = args.logits + u64(row) * args.columns;
    u32 keys[LANE_EXPERTS];
    score(args, keys, scores);
    if (lane_index() == 0) args.shared_weights[row] = args.columns > args.count ? sigmoid(scores[args.count]) : 1.0f;
    // Scores that other lanes stored are read.
    sync_warp();
    if (args.groups != 0) close_groups(args, keys, scores);
    store_choice(args, scores, choose(args, keys), row, masks);
    sync_warp();
    weigh(args, row);
}

// Grid: a block for each 32 rows of the piece.
extern "C" KERNEL(32 * ROWS, 1) experts_route(GRID_CONSTANT const RouteArgs args) {
    __shared__ u32 masks[EXPERTS_MOST];
    start_kernel();
    for (u32 i = threadIdx.x; i < args.count; i += 32 * ROWS) masks[i] = 0;
    sync_block();
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row < args.piece.rows()) route(args, row, masks);
    sync_block();
    for (u32 i = threadIdx.x; i < args.count; i += 32 * ROWS) args.masks[u64(i) * args.words + blockIdx.x] = masks[i];
}
