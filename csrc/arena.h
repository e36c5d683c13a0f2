// Scratch memory of a thread. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "vec.h"

// Under AddressSanitizer unused memory is out of bounds, with a gap after every allocation.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define CARAMBA_FAST_ARENA_GAP 64
#else
#define CARAMBA_FAST_ARENA_GAP 0
#define ASAN_POISON_MEMORY_REGION(at, bytes) (static_cast<void>(0))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) (static_cast<void>(0))
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// 64-byte aligned memory, kept between calls. It grows by blocks as needed; `reset` replaces them
// by one block, so that the next call of that size is contiguous.
class Arena {
 public:
  // `count` elements, valid until `reset`; not initialized.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    const std::size_t whole = (bytes + 63) / 64 * 64 + CARAMBA_FAST_ARENA_GAP;
    static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= 64, "none is destroyed");
    if (whole > static_cast<std::size_t>(end_ - next_)) grow(whole);
    char* taken = next_;
    next_ += whole;
    ASAN_UNPOISON_MEMORY_REGION(taken, bytes);
    return reinterpret_cast<T*>(taken);
  }

  float* zeros(std::int64_t count) {
    float* made = take<float>(count);
    std::memset(made, 0, static_cast<std::size_t>(count) * sizeof(float));
    return made;
  }

  // Releases all allocations.
  void reset() {
    if (blocks_.size() > 1) {
      const std::size_t all = total_;
      blocks_.clear();
      next_ = end_ = nullptr;
      size_ = total_ = 0;
      grow(all);
    }
    next_ = end_ - size_;
    if (size_ > 0) ASAN_POISON_MEMORY_REGION(next_, size_);
  }

 private:
  CARAMBA_FAST_NOINLINE void grow(std::size_t least) {
    const std::size_t size = std::max(least, kSmallest);
    blocks_.emplace_back(static_cast<char*>(::operator new(size, std::align_val_t(64))));
    next_ = blocks_.back().get();
    end_ = next_ + size;
    size_ = size;
    total_ += size;
    ASAN_POISON_MEMORY_REGION(next_, size);
  }

  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  static constexpr std::size_t kSmallest = 1 << 16;  // bytes of a block
  std::vector<std::unique_ptr<char, Free>> blocks_;  // allocations come from the last
  char *next_ = nullptr, *end_ = nullptr;            // of the last block
  std::size_t size_ = 0, total_ = 0;                 // bytes of the last block, of all
};

inline Arena& thread_arena() {
  thread_local Arena arena;
  return arena;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
