// Planned faults. See faults.h.
#include "faults.h"

#include <stdlib.h>

#include "state.h"

namespace standin {
namespace {

struct Planned {
    Fault fault;
    std::string name;
    uint64_t left;
};

const std::pair<const char*, Fault> KINDS[] = {
    {"alloc", Fault::Alloc},   {"host_alloc", Fault::HostAlloc},  {"launch", Fault::Launch},    {"copy", Fault::Copy},       {"unlisted", Fault::Unlisted},
    {"module", Fault::Module}, {"event_late", Fault::EventLate}, {"ipc_open", Fault::IpcOpen},
    {"ipc_copy", Fault::IpcCopy}, {"ipc_wait", Fault::IpcWait},
};

bool parse_one(const std::string& text, Planned& to) {
    size_t at = text.find('@'), colon = text.find(':');
    if (at == std::string::npos) return false;
    std::string kind = text.substr(0, colon < at ? colon : at);
    if (colon < at) to.name = text.substr(colon + 1, at - colon - 1);
    char* end = nullptr;
    to.left = strtoull(text.c_str() + at + 1, &end, 10);
    if (*end != 0 || to.left == 0) return false;
    for (auto& [name, fault] : KINDS) {
        if (kind == name) {
            to.fault = fault;
            return to.name.empty() || fault == Fault::Launch;
        }
    }
    return false;
}

// Null if the text is not a list of faults.
std::unique_ptr<std::vector<Planned>> parse(const std::string& text) {
    auto list = std::make_unique<std::vector<Planned>>();
    for (size_t first = 0; first < text.size();) {
        size_t comma = text.find(',', first);
        if (comma == std::string::npos) comma = text.size();
        Planned one = {};
        if (!parse_one(text.substr(first, comma - first), one)) {
            say("stand-in: `%s` is not a list of faults (kind[:name]@n, ...)", text.c_str());
            return nullptr;
        }
        list->push_back(one);
        first = comma + 1;
    }
    return list;
}

std::vector<Planned>& planned() {
    static auto* list = [] {
        const char* text = getenv("CLEAVE_STANDIN_FAULTS");
        auto parsed = parse(text == nullptr ? "" : text);
        if (parsed == nullptr) abort();
        return parsed.release();
    }();
    return *list;
}

}  // namespace

bool strikes(Fault fault, const char* name) {
    bool does = false;
    auto& list = planned();
    for (size_t index = 0; index < list.size();) {
        Planned& one = list[index];
        bool is_meant = one.fault == fault && (one.name.empty() || (name != nullptr && one.name == name));
        if (is_meant && (--one.left == 0 || fault == Fault::EventLate)) does = true;
        if (one.left == 0) {
            list.erase(list.begin() + ptrdiff_t(index));
        } else {
            index++;
        }
    }
    return does;
}

}  // namespace standin

// Replaces the planned faults; an empty text removes all. Returns their number, or -1.
extern "C" __attribute__((visibility("default"))) int cleave_standin_faults(const char* text) {
    std::lock_guard<std::mutex> held(standin::state().mutex);
    auto parsed = standin::parse(text);
    if (parsed == nullptr) return -1;
    standin::planned() = *parsed;
    return int(parsed->size());
}
