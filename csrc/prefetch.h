// Reading a stream of tokens: where a token is, and asking for the bytes behind it in time. Strides
// and lengths are in bytes. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

template <class T>
inline const T* token_at(const void* data, std::int64_t stride, std::int64_t token) {
  return reinterpret_cast<const T*>(static_cast<const char*>(data) + token * stride);
}

// How far ahead of what is read the next bytes of a stream are asked for. Hardware follows a stream
// to the end of its page; a lane changes streams with every tile.
inline constexpr std::int64_t kAhead = 4096;
inline constexpr std::int64_t kLine = 64;

inline void prefetch(const void* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kLine)
    __builtin_prefetch(static_cast<const char*>(at) + kAhead + i, 0, 2);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
