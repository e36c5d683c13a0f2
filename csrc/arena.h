// Scratch memory of a thread. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

// Under AddressSanitizer what is not taken is out of bounds, with a gap behind everything taken.
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

// 64-byte aligned memory, kept between calls.
class Arena {
 public:
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    char* taken = data_.get() + used_;
    used_ += (bytes + 63) / 64 * 64 + CARAMBA_FAST_ARENA_GAP;
    ASAN_UNPOISON_MEMORY_REGION(taken, used_ <= size_ ? bytes : 0);
    return reinterpret_cast<T*>(taken);
  }
  // Room for everything that is taken afterwards, in kMostSmall pieces where `bytes` leaves no room
  // for gaps; what was taken is lost.
  void reserve(std::size_t bytes) {
    bytes += kMostSmall * CARAMBA_FAST_ARENA_GAP;
    if (bytes > size_) {
      data_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(64))));
      size_ = bytes;
    }
    used_ = 0;
    ASAN_POISON_MEMORY_REGION(data_.get(), size_);
  }

 private:
  static constexpr std::size_t kMostSmall = 16;
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<char, Free> data_;
  std::size_t size_ = 0, used_ = 0;
};

inline Arena& thread_arena() {
  thread_local Arena arena;
  return arena;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
