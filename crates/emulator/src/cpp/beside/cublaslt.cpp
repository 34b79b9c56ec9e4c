// A stand-in for libcublasLt: matrix products in a stream of the stand-in driver.
//
// Owns: descriptors, layouts, preferences, the single algorithm, and the product itself.
// Never: computes at the call: products run in stream order, and can be captured.
// Invariant: each element is summed over k in order, whatever the other sizes; so one column
// computed alone agrees to the bit with the same column among many. Calls that the real library
// refuses are refused.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../numbers.h"

namespace {

enum Status : int {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

enum Type : int { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28 };
enum Order : int { COLUMNS = 0, ROWS = 1 };
enum Epilogue : int { DEFAULT = 1, BIAS = 4 };
enum ScaleMode : int { SCALAR = 0, OUTER_VECTOR = 3 };
enum DescAttribute : int {
    DESC_POINTER_MODE = 2,
    DESC_TRANSA = 3,
    DESC_TRANSB = 4,
    DESC_EPILOGUE = 7,
    DESC_BIAS = 8,
    DESC_A_SCALE = 17,
    DESC_B_SCALE = 18,
    DESC_D_SCALE = 20,
    DESC_FAST_ACCUM = 25,
    DESC_BIAS_TYPE = 26,
    DESC_A_SCALE_MODE = 31,
    DESC_B_SCALE_MODE = 32,
};
enum LayoutAttribute : int { LAYOUT_TYPE, LAYOUT_ORDER, LAYOUT_ROWS, LAYOUT_COLS, LAYOUT_LD, LAYOUT_BATCH_COUNT, LAYOUT_BATCH_OFFSET };
enum PreferenceAttribute : int { PREFERENCE_WORKSPACE_MAX = 1 };

// Attributes without effect here are not stored; only attributes with an effect are validated.
struct Desc {
    int compute_type = 0, scale_type = F32;
    int pointer_mode = 0, transpose_a = 0, transpose_b = 0, epilogue = DEFAULT, bias_type = -1, a_scale_mode = SCALAR, b_scale_mode = SCALAR;
    const void *bias = nullptr, *a_scale = nullptr, *b_scale = nullptr;
};

struct Layout {
    int type = F32, order = COLUMNS;
    uint64_t rows = 0, columns = 0;
    int64_t lead = 0;
    int batch_count = 1;
    int64_t batch_offset = 0;
};

struct Preference {
    uint64_t workspace_bytes_max = 0;
};

struct Algo {
    uint64_t magic, workspace_bytes, rest[6];
};

struct HeuristicResult {
    Algo algo;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

constexpr uint64_t ALGO_MAGIC = 0x6c6177656e6f6e65ull;
// Overwritten by each product, as if its sums were split over the workspace.
constexpr uint64_t WORKSPACE_BYTES = 65536;

// A matrix in memory, read by row and column of its role in the product.
struct Operand {
    const uint8_t* at;
    int type;
    int64_t row_stride, column_stride, batch_stride;
};

struct Product {
    uint64_t rows, columns, depth;
    int batches;
    Operand a, b, c, d;
    float alpha, beta;
    const float *a_scale, *b_scale;
    bool a_scale_is_vector, b_scale_is_vector;
    Operand bias;
    void* workspace;
    size_t workspace_bytes;
};

size_t bytes_of(int type) { return type == F32 ? 4 : type == E4M3 ? 1 : 2; }
bool is_known(int type) { return type == F32 || type == F16 || type == BF16 || type == E4M3; }

template <class Word> Word word_at(const uint8_t* at) {
    Word word;
    memcpy(&word, at, sizeof word);
    return word;
}

float load(const Operand& from, int64_t offset) {
    const uint8_t* at = from.at + offset * int64_t(bytes_of(from.type));
    switch (from.type) {
        case E4M3: return numbers::from_e4m3(*at);
        case F16: return numbers::from_half(word_at<uint16_t>(at));
        case BF16: return numbers::from_bf16(word_at<uint16_t>(at));
        default: return word_at<float>(at);
    }
}

void store(const Operand& to, int64_t offset, float x) {
    uint8_t* at = const_cast<uint8_t*>(to.at) + offset * int64_t(bytes_of(to.type));
    uint16_t half = to.type == F16 ? numbers::to_half(x) : numbers::to_bf16(x);
    if (to.type == F32) {
        memcpy(at, &x, sizeof x);
    } else {
        memcpy(at, &half, sizeof half);
    }
}

// Functions of the stand-in driver; null in front of a real one.
struct Driver {
    int (*enqueue)(void* stream, void (*function)(void*), const void* data, size_t bytes);
    int (*holds)(const void* at, size_t bytes);
};

const Driver* driver() {
    static const Driver found = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        Driver of = {};
        if (library == nullptr) return of;
        of.enqueue = reinterpret_cast<decltype(of.enqueue)>(dlsym(library, "cleave_standin_enqueue"));
        of.holds = reinterpret_cast<decltype(of.holds)>(dlsym(library, "cleave_standin_holds"));
        return of;
    }();
    return found.enqueue == nullptr || found.holds == nullptr ? nullptr : &found;
}

// Computes a batch, four columns at a time so that the left matrix is read less often.
void multiply_batch(const Product& the, int batch) {
    constexpr uint64_t TOGETHER = 4;
    auto at = [batch](const Operand& of, uint64_t row, uint64_t column) {
        return batch * of.batch_stride + int64_t(row) * of.row_stride + int64_t(column) * of.column_stride;
    };
    std::vector<float> left(the.rows * the.depth), sums(the.rows * TOGETHER);
    for (uint64_t k = 0; k < the.depth; k++) {
        for (uint64_t row = 0; row < the.rows; row++) left[k * the.rows + row] = load(the.a, at(the.a, row, k));
    }
    for (uint64_t first = 0; first < the.columns; first += TOGETHER) {
        uint64_t count = std::min(TOGETHER, the.columns - first);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (uint64_t k = 0; k < the.depth; k++) {
            const float* from = left.data() + k * the.rows;
            for (uint64_t index = 0; index < count; index++) {
                float factor = load(the.b, at(the.b, k, first + index));
                float* to = sums.data() + index * the.rows;
                for (uint64_t row = 0; row < the.rows; row++) to[row] += from[row] * factor;
            }
        }
        for (uint64_t index = 0; index < count; index++) {
            uint64_t column = first + index;
            for (uint64_t row = 0; row < the.rows; row++) {
                float scale = the.alpha;
                if (the.a_scale != nullptr) scale *= the.a_scale[the.a_scale_is_vector ? row : 0];
                if (the.b_scale != nullptr) scale *= the.b_scale[the.b_scale_is_vector ? column : 0];
                float sum = scale * sums[index * the.rows + row];
                if (the.beta != 0.0f) sum += the.beta * load(the.c, at(the.c, row, column));
                if (the.bias.at != nullptr) sum += load(the.bias, int64_t(row));
                store(the.d, at(the.d, row, column), sum);
            }
        }
    }
}

void run(void* data) {
    const Product& the = *static_cast<const Product*>(data);
    numbers::poison(the.workspace, the.workspace_bytes);
    for (int batch = 0; batch < the.batches; batch++) multiply_batch(the, batch);
}

Operand operand_of(const void* at, const Layout& layout, bool is_transposed) {
    int64_t row_stride = layout.order == ROWS ? layout.lead : 1, column_stride = layout.order == ROWS ? 1 : layout.lead;
    if (is_transposed) std::swap(row_stride, column_stride);
    return {static_cast<const uint8_t*>(at), layout.type, row_stride, column_stride, layout.batch_offset};
}

size_t span_of(const Layout& layout) {
    uint64_t lines = layout.order == ROWS ? layout.rows : layout.columns, width = layout.order == ROWS ? layout.columns : layout.rows;
    if (lines == 0 || width == 0) return 0;
    uint64_t elements = (lines - 1) * uint64_t(layout.lead) + width + uint64_t(layout.batch_count - 1) * uint64_t(layout.batch_offset);
    return elements * bytes_of(layout.type);
}

bool is_sound(const Layout& layout) {
    uint64_t width = layout.order == ROWS ? layout.columns : layout.rows;
    return is_known(layout.type) && (layout.order == COLUMNS || layout.order == ROWS) && layout.lead >= int64_t(width) && layout.batch_count >= 1;
}

// e4m3 is possible only in the one layout of the tensor cores, with sizes that are multiples of 16.
bool is_possible_e4m3(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
    bool is_in_form = a.type == b.type && desc.transpose_a == 1 && desc.transpose_b == 0 && a.order == COLUMNS && b.order == COLUMNS;
    bool is_whole = d.rows % 16 == 0 && d.columns % 16 == 0 && a.rows % 16 == 0 && a.lead % 16 == 0 && b.lead % 16 == 0;
    return is_in_form && is_whole;
}

Status check(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    if (!is_sound(a) || !is_sound(b) || !is_sound(c) || !is_sound(d)) return INVALID_VALUE;
    uint64_t a_rows = desc.transpose_a ? a.columns : a.rows, a_columns = desc.transpose_a ? a.rows : a.columns;
    uint64_t b_rows = desc.transpose_b ? b.columns : b.rows, b_columns = desc.transpose_b ? b.rows : b.columns;
    bool fits = a_rows == d.rows && b_columns == d.columns && a_columns == b_rows && c.rows == d.rows && c.columns == d.columns;
    if (!fits || a.batch_count != d.batch_count || b.batch_count != d.batch_count) return INVALID_VALUE;
    bool is_plain = desc.pointer_mode == 0 && desc.scale_type == F32 && (desc.epilogue == DEFAULT || desc.epilogue == BIAS);
    auto is_scale_mode = [](int mode) { return mode == SCALAR || mode == OUTER_VECTOR; };
    if (!is_plain || !is_scale_mode(desc.a_scale_mode) || !is_scale_mode(desc.b_scale_mode)) return NOT_SUPPORTED;
    if (a.type != b.type || d.type == E4M3 || c.type != d.type) return NOT_SUPPORTED;
    bool is_narrow = a.type == E4M3;
    if (is_narrow && !is_possible_e4m3(desc, a, b, d)) return NOT_SUPPORTED;
    bool has_scales = desc.a_scale != nullptr || desc.b_scale != nullptr;
    return has_scales && !is_narrow ? NOT_SUPPORTED : SUCCESS;
}

Status refuse(const char* what) {
    fprintf(stderr, "stand-in cublasLt: %s\n", what);
    return INVALID_VALUE;
}

template <class Value> Status set(Value& to, const void* from, size_t bytes) {
    if (bytes != sizeof to) return INVALID_VALUE;
    memcpy(&to, from, sizeof to);
    return SUCCESS;
}

template <class Made> Status make(Made** to, Made value) {
    if (to == nullptr) return INVALID_VALUE;
    *to = new Made(value);
    return SUCCESS;
}

template <class Made> Status destroy(Made* made) {
    delete made;
    return SUCCESS;
}

struct Handle {};

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Status

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130000; }
extern "C" __attribute__((visibility("default"))) size_t cublasLtGetCudartVersion() { return 13000; }
extern "C" __attribute__((visibility("default"))) const char* cublasLtGetStatusName(Status status) {
    switch (status) {
        case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}
extern "C" __attribute__((visibility("default"))) const char* cublasLtGetStatusString(Status status) { return cublasLtGetStatusName(status); }

API cublasLtCreate(Handle** handle) { return driver() == nullptr ? NOT_INITIALIZED : make(handle, Handle{}); }
API cublasLtDestroy(Handle* handle) { return destroy(handle); }

API cublasLtMatmulDescCreate(Desc** desc, int compute_type, int scale_type) {
    Desc made;
    made.compute_type = compute_type;
    made.scale_type = scale_type;
    return make(desc, made);
}
API cublasLtMatmulDescDestroy(Desc* desc) { return destroy(desc); }
API cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
        case DESC_POINTER_MODE: return set(desc->pointer_mode, value, bytes);
        case DESC_TRANSA: return set(desc->transpose_a, value, bytes);
        case DESC_TRANSB: return set(desc->transpose_b, value, bytes);
        case DESC_EPILOGUE: return set(desc->epilogue, value, bytes);
        case DESC_BIAS: return set(desc->bias, value, bytes);
        case DESC_BIAS_TYPE: return set(desc->bias_type, value, bytes);
        case DESC_A_SCALE: return set(desc->a_scale, value, bytes);
        case DESC_B_SCALE: return set(desc->b_scale, value, bytes);
        case DESC_A_SCALE_MODE: return set(desc->a_scale_mode, value, bytes);
        case DESC_B_SCALE_MODE: return set(desc->b_scale_mode, value, bytes);
        case DESC_FAST_ACCUM:
        case DESC_D_SCALE: return SUCCESS;
        default: return NOT_SUPPORTED;
    }
}

API cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t lead) {
    Layout made;
    made.type = type;
    made.rows = rows;
    made.columns = columns;
    made.lead = lead;
    return make(layout, made);
}
API cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }
API cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t bytes) {
    switch (attribute) {
        case LAYOUT_TYPE: return set(layout->type, value, bytes);
        case LAYOUT_ORDER: return set(layout->order, value, bytes);
        case LAYOUT_ROWS: return set(layout->rows, value, bytes);
        case LAYOUT_COLS: return set(layout->columns, value, bytes);
        case LAYOUT_LD: return set(layout->lead, value, bytes);
        case LAYOUT_BATCH_COUNT: return set(layout->batch_count, value, bytes);
        case LAYOUT_BATCH_OFFSET: return set(layout->batch_offset, value, bytes);
        default: return NOT_SUPPORTED;
    }
}

API cublasLtMatmulPreferenceCreate(Preference** preference) { return make(preference, Preference{}); }
API cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }
API cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
    return attribute == PREFERENCE_WORKSPACE_MAX ? set(preference->workspace_bytes_max, value, bytes) : SUCCESS;
}

API cublasLtMatmulAlgoGetHeuristic(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d, Preference* preference, int wanted,
                                   HeuristicResult* results, int* found) {
    if (handle == nullptr || wanted < 1 || results == nullptr || found == nullptr) return INVALID_VALUE;
    *found = 0;
    Status status = check(*desc, *a, *b, *c, *d);
    if (status != SUCCESS) return status;
    uint64_t workspace_bytes = std::min(preference->workspace_bytes_max, WORKSPACE_BYTES);
    results[0] = {};
    results[0].algo.magic = ALGO_MAGIC;
    results[0].algo.workspace_bytes = results[0].workspace_bytes = workspace_bytes;
    results[0].waves = 1.0f;
    *found = 1;
    return SUCCESS;
}

API cublasLtMatmul(Handle* handle, Desc* desc, const float* alpha, const void* a, Layout* a_layout, const void* b, Layout* b_layout, const float* beta,
                   const void* c, Layout* c_layout, void* d, Layout* d_layout, const Algo* algo, void* workspace, size_t workspace_bytes, void* stream) {
    if (handle == nullptr || driver() == nullptr) return NOT_INITIALIZED;
    Status status = check(*desc, *a_layout, *b_layout, *c_layout, *d_layout);
    if (status != SUCCESS) return status;
    if (algo != nullptr && algo->magic != ALGO_MAGIC) return refuse("an algorithm that no heuristic gave");
    uint64_t needed = algo == nullptr ? 0 : algo->workspace_bytes;
    if (needed > workspace_bytes) return refuse("a workspace smaller than the algorithm was chosen for");
    const Driver& the = *driver();
    auto is_held = [&](const void* at, const Layout& layout) { return the.holds(at, span_of(layout)) != 0; };
    if (d_layout->rows == 0 || d_layout->columns == 0) return SUCCESS;
    if (!is_held(a, *a_layout) || !is_held(b, *b_layout) || !is_held(d, *d_layout)) return refuse("an operand that is not all device memory");
    if (*beta != 0.0f && !is_held(c, *c_layout)) return refuse("C is not all device memory");
    if (needed != 0 && the.holds(workspace, needed) == 0) return refuse("a workspace that is not all device memory");
    Product product = {};
    product.rows = d_layout->rows;
    product.columns = d_layout->columns;
    product.depth = desc->transpose_a ? a_layout->rows : a_layout->columns;
    product.batches = d_layout->batch_count;
    product.a = operand_of(a, *a_layout, desc->transpose_a != 0);
    product.b = operand_of(b, *b_layout, desc->transpose_b != 0);
    product.c = operand_of(c, *c_layout, false);
    product.d = operand_of(d, *d_layout, false);
    product.alpha = *alpha;
    product.beta = *beta;
    product.a_scale = static_cast<const float*>(desc->a_scale);
    product.b_scale = static_cast<const float*>(desc->b_scale);
    product.a_scale_is_vector = desc->a_scale_mode == OUTER_VECTOR;
    product.b_scale_is_vector = desc->b_scale_mode == OUTER_VECTOR;
    if (desc->epilogue == BIAS) {
        product.bias = {static_cast<const uint8_t*>(desc->bias), desc->bias_type < 0 ? d_layout->type : desc->bias_type, 1, 0, 0};
        if (the.holds(desc->bias, product.rows * bytes_of(product.bias.type)) == 0) return refuse("a bias that is not all device memory");
    }
    product.workspace = workspace;
    product.workspace_bytes = needed;
    return the.enqueue(stream, run, &product, sizeof product) == 0 ? SUCCESS : EXECUTION_FAILED;
}
