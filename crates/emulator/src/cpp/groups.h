// Operations that a thread has begun and not waited for, in groups: copies, warpgroup products.
//
// Owns: which of them a wait completes. Never: knows or performs the operations.
// Invariant: completed entries stay in place until more are begun.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

#pragma GCC visibility push(hidden)
namespace emulator {

template <class T> class Groups {
public:
    void begin(const T& one) {
        if (done_ != 0) {
            all_.erase(all_.begin(), all_.begin() + ptrdiff_t(done_));
            for (size_t& end : group_ends_) end -= done_;
            done_ = 0;
        }
        all_.push_back(one);
    }

    void commit() { group_ends_.push_back(all_.size()); }

    // All groups but the last `groups_left`, oldest first.
    const T* due(uint32_t groups_left, uint32_t* count) {
        *count = 0;
        if (group_ends_.size() <= groups_left) return nullptr;
        size_t groups_due = group_ends_.size() - groups_left;
        size_t first = done_, end = group_ends_[groups_due - 1];
        group_ends_.erase(group_ends_.begin(), group_ends_.begin() + ptrdiff_t(groups_due));
        done_ = end;
        *count = uint32_t(end - first);
        return all_.data() + first;
    }

    bool is_over() const { return done_ == all_.size(); }

    void forget() {
        all_.clear();
        group_ends_.clear();
        done_ = 0;
    }

private:
    std::vector<T> all_;
    // The end in `all_` of each group that was not waited for.
    std::vector<size_t> group_ends_;
    size_t done_ = 0;
};

}  // namespace emulator
#pragma GCC visibility pop
