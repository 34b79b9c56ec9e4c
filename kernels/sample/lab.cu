// Lab of sampling: what drawing a batch's tokens takes beside a decode step.
//
// Owns: greedy and seeded draws over a large vocabulary, each rule alone and all together.
// Never: checks more of the rules than that the most likely token wins where it must: the backend's tests hold every
// draw against the processor's.
#include "sample.cu"
#include "lab.h"

namespace {

constexpr u32 VOCABULARY = 128256;
// Sets of logits that take turns: 32 of them are a gigabyte at batch 64, more than a cache holds even at batch 1.
constexpr int SETS = 32;

struct Variant {
    const char* name;
    float heat;
    float min_p;
    u32 top_k;
    double top_p;
};

constexpr Variant VARIANTS[] = {
    {"greedy", 0.0f, 0.0f, 0, 1.0},
    {"seeded", 1.0f, 0.0f, 0, 1.0},
    {"top-k 50", 1.0f, 0.0f, 50, 1.0},
    {"top-p 0.9", 1.0f, 0.0f, 0, 0.9},
    {"all rules", 1.25f, 0.02f, 200, 0.95},
    // One token is kept, so that the draw must give the most likely one.
    {"top-k 1", 1.0f, 0.0f, 1, 1.0},
};

std::vector<float> logits_of(u32 batch) {
    std::vector<float> logits(size_t(batch) * VOCABULARY);
    for (size_t i = 0; i < logits.size(); i++) logits[i] = 4.0f * (lab::noise(1, i) + lab::noise(2, i) + lab::noise(3, i));
    return logits;
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
    std::vector<float*> sets(batch > 16 ? SETS / 4 : SETS);
    for (float*& set : sets) set = lab::to_device(host);
    std::vector<DrawRule> rules(batch);
    for (u32 row = 0; row < batch; row++) {
        const u64 whole = u64(1) << 53;
        rules[row] = DrawRule{lab::mixed(row) >> 11, variant.top_p < 1.0 ? u64(variant.top_p * double(whole)) : whole,
                              variant.heat, variant.min_p, variant.top_k, 0, 0, 0};
    }
    SampleArgs args{};
    args.rules = lab::to_device(rules);
    args.best = lab::device_zeros<u64>(batch);
    args.tokens = lab::device_zeros<u32>(batch);
    args.vocab = VOCABULARY;
    const auto draw = [&](int turn, cudaStream_t stream) {
        args.logits = sets[size_t(turn) % sets.size()];
        sample_prepare<<<dim3(batch, (VOCABULARY + 8191) / 8192), PREPARE_THREADS, 0, stream>>>(args);
        sample_draw<<<batch, THREADS, 0, stream>>>(args);
    };
    lab::Result result;
    result.lab = "sample";
    result.variant = variant.name;
    result.shape = "batch " + std::to_string(batch) + ", vocabulary " + std::to_string(VOCABULARY);
    result.timing = lab::time(draw);
    const bool is_certain = variant.heat == 0.0f || variant.top_k == 1;
    result.error = is_certain ? wrong_share(host, lab::to_host(args.tokens, batch)) : 0;
    lab::report(result);
    for (float* set : sets) LAB_CHECK(cudaFree(set));
}

}  // namespace

int main() {
    for (u32 batch : {1u, 8u, 32u, 128u}) {
        for (const Variant& variant : VARIANTS) measure(batch, variant);
    }
}
