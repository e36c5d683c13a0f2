// The scales of a quantized tile for the integer passes (int8_layout.h). Compiled once for each
// instruction set that has such products, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_job.h"
#include "int8_layout.h"
#include "prefetch.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// The fp16 scales of a tile, contiguous, in steps of four tokens.
struct ScaleSteps {
  const char* from;
  int step, valid;  // in halves

  // The scales of four tokens; past the end zeros, or scales of the tile's other tokens.
  Halves quad(int i) const {
    const int there = valid - i * step;
    const char* at = from + 2 * i * step;
    Halves found;
#if CARAMBA_FAST_VECTOR_BITS == 512
    found.part[0] =
        _mm512_maskz_loadu_epi16(there > 0 ? ~0u >> (32 - std::min(there, step)) : 0, at);
#else
    if (there >= 32 || (there >= 16 && step <= 16)) {
      found.part[0] = load_as<Raw>(at);
      found.part[1] = step > 16 ? load_as<Raw>(at + kUnit) : Raw{};
    } else {
      alignas(64) std::uint16_t last[32] = {};
      for (int half = 0; half < std::min(there, step); ++half)
        std::memcpy(last + half, at + 2 * half, 2);
      std::memcpy(found.part, last, sizeof last);
    }
#endif
    return found;
  }
};

struct TileScales {
  // scale[group][quad of tokens][lane * 4 + token] as fp32 (`widen`); zeros past the last token.
  alignas(64) float scale[kMostGroups][kQuads][kLanes];
  bool finite;

  ScaleSteps steps(const char* from, std::int64_t stride, const HeadBytes& head, int count) {
    for (std::int64_t i = 0; i < stride * kTile; i += kLine)
      __builtin_prefetch(from + ahead_of(stride) + i, 0, 3);
    if (stride * head.fold == 2 * head.blocks)
      return {from, 4 * head.blocks, count * head.token_blocks};
    for (int t = 0; t < count; ++t)
      for (int block = 0; block < head.blocks; ++block)
        std::memcpy(tokens_ + t * head.blocks + block, from + t * stride + 2 * block, 2);
    return {reinterpret_cast<const char*>(tokens_), 4 * head.blocks, count * head.blocks};
  }

  void widen(const ScaleSteps& steps, const HeadBytes& head) {
    Raw most{};
    for (int quad = 0; quad < head.quads(); ++quad) {
      const Halves raw = steps.quad(quad);
      for (const Raw part : raw.part)
        most = CARAMBA_FAST_MM(max_epu16)(most, part & CARAMBA_FAST_MM(set1_epi16)(0x7fff));
      for (int g = 0; g < head.groups; ++g) store_as(head.scale_order[g](raw), scale[g][quad]);
    }
    finite = !any_greater(most, CARAMBA_FAST_MM(set1_epi16)(0x7bff));
  }

 private:
  alignas(64) std::uint16_t tokens_[kTile * kMostBlocks];
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
