// Messages of the emulator and the stand-in driver: lines on stderr, kept for tests.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <string>

#include "scheduler.h"

namespace emulator {
namespace {

std::mutex guard;
std::string& last() {
    static std::string line;
    return line;
}

}  // namespace

void say(const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s\n", line);
    std::lock_guard<std::mutex> held(guard);
    last() = line;
}

size_t last_message(char* to, size_t bytes) {
    std::lock_guard<std::mutex> held(guard);
    if (bytes != 0) {
        size_t length = last().size() < bytes - 1 ? last().size() : bytes - 1;
        memcpy(to, last().data(), length);
        to[length] = 0;
    }
    return last().size();
}

}  // namespace emulator
