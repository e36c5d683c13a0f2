// Keys in fp32, transposed for many query rows: a vector has one dim of kLanes tokens, so that no
// score is a sum across a vector. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "half.h"
#include "numeric.h"
#include "prefetch.h"
#if CARAMBA_FAST_VECTOR_BITS
#include "turn_codes.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

#if CARAMBA_FAST_VECTOR_BITS
#if CARAMBA_FAST_VECTOR_BITS == 512
// The even halves of a vector, then the odd ones.
struct EvenFirst {
  alignas(64) std::uint16_t half[2 * kLanes] = {};
  constexpr EvenFirst() {
    for (int i = 0; i < 2 * kLanes; ++i)
      half[i] = static_cast<std::uint16_t>(i < kLanes ? 2 * i : 2 * (i - kLanes) + 1);
  }
};
inline constexpr EvenFirst kEvenFirst{};
#endif

// Replaces `count` vectors of pairs, the second half of 2 count, by their first and second values.
template <Format T>
inline void widen_pairs(float* to, std::int64_t count) {
  for (const float* from = to + count * kLanes; count > 0; --count, from += kLanes) {
    const Raw pairs = load_as<Raw>(from);
    if constexpr (T == Format::bf16) {
      const Ints both = reinterpret_cast<Ints>(pairs);
      store_as(floats(both << 16), to);
      store_as(floats(both & splat(-65536)), to + kLanes);
    } else {
#if CARAMBA_FAST_VECTOR_BITS == 512
      const Raw apart = _mm512_permutexvar_epi16(load_as<Raw>(kEvenFirst.half), pairs);
      store_as(_mm512_cvtph_ps(_mm512_castsi512_si256(apart)), to);
      store_as(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(apart, 1)), to + kLanes);
#else
      const Raw lanes = _mm256_shuffle_epi8(
          pairs, in_all_lanes(_mm_set_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)));
      const Raw apart = _mm256_permute4x64_epi64(lanes, 0xd8);
      store_as(_mm256_cvtph_ps(_mm256_castsi256_si128(apart)), to);
      store_as(_mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1)), to + kLanes);
#endif
    }
    to += 2 * kLanes;
  }
}
#endif

// Keys of a tile as (vector of tokens, dim, token); the last token is repeated past the end.
template <Format T>
CARAMBA_FAST_NOINLINE void turn_keys(const void* keys, std::int64_t stride, int count,
                                     std::int64_t width, float* to) {
  using Storage = typename Values<T>::Storage;
  for (int t = 0; t < count; t += kLanes, to += width * kLanes) {
#if CARAMBA_FAST_VECTOR_BITS
    constexpr int kSize = sizeof(Storage);
    const Tokens tokens(static_cast<const char*>(keys) + t * stride, stride, count - t);
    float* turned = to + (kSize == 2 ? width / 2 * kLanes : 0);
    turn_codes(tokens, static_cast<int>(width) * kSize, reinterpret_cast<std::uint8_t*>(turned));
    if constexpr (kSize == 2) widen_pairs<T>(to, width / 2);
#else
    for (int i = 0; i < kLanes; ++i) {
      const auto* key = token_at<Storage>(keys, stride, t + i < count ? t + i : count - 1);
      for (std::int64_t d = 0; d < width; d += kLanes) {
        const Floats v = Values<T>::load(key + d);
        for (int j = 0; j < kLanes; ++j) to[(d + j) * kLanes + i] = v[j];
      }
    }
#endif
  }
}

// Tokens in another form, in fp32.
using MovedTile = void (*)(const void* from, std::int64_t stride, int count, std::int64_t width,
                           float* to);
// By element type.
inline constexpr MovedTile kTurnKeys[kValueTypes] = {
    turn_keys<Format::fp32>, turn_keys<Format::fp16>, turn_keys<Format::bf16>};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
