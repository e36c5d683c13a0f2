// Where a token of a stream is, and prefetching. Strides and lengths are in bytes.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_job.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

template <class T>
inline const T* token_at(const void* data, std::int64_t stride, std::int64_t token) {
  return reinterpret_cast<const T*>(static_cast<const char*>(data) + token * stride);
}

// Streams are prefetched one tile ahead into the first-level cache, which holds two tiles of each
// stream. Hardware prefetching does not suffice: a lane alternates between streams with every tile,
// and hardware follows a stream only to the end of its page.
inline constexpr std::int64_t kLine = 64;
inline std::int64_t ahead_of(std::int64_t stride) {
  return std::max<std::int64_t>(kTile * stride, 4096);
}

// Prefetches `bytes` of a stream of tokens `stride` apart, one tile after `at`.
inline void prefetch(const void* at, std::int64_t bytes, std::int64_t stride) {
  for (std::int64_t i = 0; i < bytes; i += kLine)
    __builtin_prefetch(static_cast<const char*>(at) + ahead_of(stride) + i, 0, 3);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
