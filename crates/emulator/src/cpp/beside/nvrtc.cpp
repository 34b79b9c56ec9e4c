// A stand-in for libnvrtc: it compiles nothing, since the kernels are in the stand-in driver
// already.
//
// Owns: programs, and recognisable bytes in place of code.
// Never: reads a source.
// Invariant: its version is 0.0, so that a cache of compiled code never takes it for another
// compiler.
#include <string.h>

#include <string>

namespace {

enum Result : int { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4 };

struct Program {
    std::string code;
    bool is_compiled;
};

Result size_of(const Program* program, size_t* bytes) {
    if (program == nullptr || !program->is_compiled) return INVALID_PROGRAM;
    *bytes = program->code.size() + 1;
    return SUCCESS;
}

Result copy(const Program* program, char* to) {
    if (program == nullptr || !program->is_compiled) return INVALID_PROGRAM;
    memcpy(to, program->code.c_str(), program->code.size() + 1);
    return SUCCESS;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Result

API nvrtcVersion(int* major, int* minor) {
    *major = *minor = 0;
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(Result result) {
    switch (result) {
        case SUCCESS: return "NVRTC_SUCCESS";
        case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    }
    return "NVRTC_ERROR unknown";
}

API nvrtcCreateProgram(Program** made, const char* source, const char* name, int, const char* const*, const char* const*) {
    if (made == nullptr || source == nullptr) return INVALID_INPUT;
    *made = new Program{std::string("stand-in code of ") + (name == nullptr ? "a program" : name), false};
    return SUCCESS;
}

API nvrtcCompileProgram(Program* program, int, const char* const*) {
    if (program == nullptr) return INVALID_PROGRAM;
    program->is_compiled = true;
    return SUCCESS;
}

API nvrtcGetCUBINSize(Program* program, size_t* bytes) { return size_of(program, bytes); }
API nvrtcGetCUBIN(Program* program, char* to) { return copy(program, to); }
API nvrtcGetPTXSize(Program* program, size_t* bytes) { return size_of(program, bytes); }
API nvrtcGetPTX(Program* program, char* to) { return copy(program, to); }

API nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = 1;
    return program == nullptr ? INVALID_PROGRAM : SUCCESS;
}

API nvrtcGetProgramLog(Program* program, char* to) {
    *to = 0;
    return program == nullptr ? INVALID_PROGRAM : SUCCESS;
}

API nvrtcDestroyProgram(Program** program) {
    if (program == nullptr) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}
