// Lab of sampling: the time that drawing a batch's tokens adds to a decode step.
//
// Owns: greedy and seeded draws over a large vocabulary, each rule alone and all together.
// Never: checks more of the rules than that the most likely token wins where it must: the backend's tests hold every
// draw against the processor's.
#ifdef __CUDACC__
#include "lab.h"

#include "sample.cu"

#include <memory>

namespace {

using lab::Buffer;

constexpr u32 VOCABULARY = 128256;
constexpr u32 MASK_WORDS = (VOCABULARY + 31) / 32;
// Sets of logits that take turns: 32 of them are a gigabyte at batch 64, more than a cache holds even at batch 1.
constexpr int SETS = 32;

struct Variant {
    const char* name;
    float heat;
    float min_p;
    u32 top_k;
    double top_p;
    float top_n_sigma;
    // One of so many tokens is allowed; 0 without a mask.
    u32 allowed_every = 0;
};

constexpr Variant VARIANTS[] = {
    {"greedy", 0.0f, 0.0f, 0, 1.0, 0.0f},
    {"seeded", 1.0f, 0.0f, 0, 1.0, 0.0f},
    {"top-k 50", 1.0f, 0.0f, 50, 1.0, 0.0f},
    {"top-p 0.9", 1.0f, 0.0f, 0, 0.9, 0.0f},
    {"top-n-sigma 1", 1.0f, 0.0f, 0, 1.0, 1.0f},
    {"all rules", 1.25f, 0.02f, 200, 0.95, 2.0f},
    {"greedy, a mask of 1 in 8", 0.0f, 0.0f, 0, 1.0, 0.0f, 8},
    {"seeded, a mask of 1 in 8", 1.0f, 0.0f, 0, 1.0, 0.0f, 8},
    // One token is kept, so that the draw must give the most likely one.
    {"top-k 1", 1.0f, 0.0f, 1, 1.0, 0.0f},
};

// Logits with a bell-shaped distribution, about as wide as a model's, in which one token in 2,000 stands out, as it
// does where a model has an opinion.
std::vector<float> logits_of(u32 batch) {
    std::vector<float> logits(size_t(batch) * VOCABULARY);
    u64 state = 1;
    for (float& logit : logits) {
        float sum = 0;
        for (int i = 0; i < 3; i++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            sum += float(state >> 40) / (1 << 23) - 1.0f;
        }
        logit = 4.0f * sum + (state >> 33 & 2047 ? 0.0f : 12.0f);
    }
    return logits;
}

// Masks that allow one of `every` tokens.
std::vector<u32> masks_of(u32 batch, u32 every) {
    std::vector<u32> masks(size_t(batch) * MASK_WORDS);
    for (u32 row = 0; row < batch; row++) {
        for (u32 token = row % every; token < VOCABULARY; token += every)
            masks[size_t(row) * MASK_WORDS + token / 32] |= 1u << token % 32;
    }
    return masks;
}

// Rows whose token is not the most likely one, the first of equals; as a share.
double wrong_share(const std::vector<float>& logits, const std::vector<u32>& tokens) {
    double wrong = 0;
    for (size_t row = 0; row < tokens.size(); row++) {
        const float* of_row = logits.data() + row * VOCABULARY;
        wrong += tokens[row] != u32(std::max_element(of_row, of_row + VOCABULARY) - of_row);
    }
    return wrong / double(tokens.size());
}

void measure(u32 batch, const Variant& variant) {
    const std::vector<float> host = logits_of(batch);
    const size_t sets_count = batch > 16 ? SETS / 4 : SETS;
    std::vector<std::unique_ptr<Buffer<float>>> sets;
    for (size_t i = 0; i < sets_count; i++) sets.emplace_back(new Buffer<float>(host));
    std::vector<DrawRule> rules;
    for (u32 row = 0; row < batch; row++) {
        const u64 whole = u64(1) << 53, bits = (row + 1) * 0x9e3779b97f4a7c15ull >> 11;
        const u64 top_p = variant.top_p < 1.0 ? u64(variant.top_p * double(whole)) : whole;
        const u32 mask = variant.allowed_every > 0 ? row * MASK_WORDS : NO_MASK;
        rules.push_back(
            DrawRule{bits, top_p, variant.heat, variant.min_p, variant.top_k, 0, 0, variant.top_n_sigma, row, mask});
    }
    const Buffer<u32> masks(masks_of(batch, variant.allowed_every > 0 ? variant.allowed_every : 1));
    const Buffer<DrawRule> rules_there(rules);
    const Buffer<u64> best(batch);
    const Buffer<u64> segments(size_t(batch) * SEGMENTS_MAX);
    const Buffer<u32> tokens(batch);
    SampleArgs args{};
    args.rules = rules_there.get();
    args.masks = masks.get();
    args.best = best.get();
    args.segments = segments.get();
    args.tokens = tokens.get();
    args.vocab = VOCABULARY;
    lab::check(cudaFuncSetAttribute(sample_draw, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))), "shared memory");
    lab::Figure figure;
    figure.lab = "sample";
    figure.variant = variant.name;
    figure.shape = "batch " + std::to_string(batch) + ", vocabulary " + std::to_string(VOCABULARY);
    figure.seconds = lab::seconds_of(20, [&](int turn) {
        args.logits = sets[size_t(turn) % sets.size()]->get();
        sample_prepare<<<dim3(batch, (VOCABULARY + 8191) / 8192), PREPARE_THREADS>>>(args);
        sample_weigh<<<dim3(batch, (VOCABULARY + 2047) / 2048), PREPARE_THREADS>>>(args);
        sample_draw<<<batch, THREADS, sizeof(Shared)>>>(args);
    });
    const bool is_certain = variant.allowed_every == 0 && (variant.heat == 0.0f || variant.top_k == 1);
    figure.error = is_certain ? wrong_share(host, tokens.read()) : 0;
    lab::report(figure, 0, 0);
}

}  // namespace

int main() {
    for (const u32 batch : {1u, 8u, 32u, 128u}) {
        for (const Variant& variant : VARIANTS) measure(batch, variant);
    }
}
#endif
