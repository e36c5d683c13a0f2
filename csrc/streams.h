// The streams of a cache (keys, values): memory and basis. Without functions with linkage, since
// translation units of different instruction sets share it.
//
// A stored buffer is (B or pages, lanes, slots, width): a lane holds a token's values of some kv
// heads side by side, so that blocks are whole. Strides of buffers are in bytes, those of tensors
// in elements.
#pragma once

#include <cstdint>

#include "formats.h"

namespace caramba_fast {

inline constexpr int kMostStreams = 3;  // k, v or k_sem, k_geo, v

// A (B or pages, lanes, n, width) buffer whose last two dimensions are contiguous; strides in
// bytes.
struct Buffer {
  char* data = nullptr;
  std::int64_t row = 0, lane = 0, token = 0;

  char* at(std::int64_t b, std::int64_t l, std::int64_t t) const {
    return data + b * row + l * lane + t * token;
  }
};

struct StoredStream {
  Format format;
  int block = 32;             // values that share a scale; by channel those packed together
  std::int64_t group = 1;     // tokens that share scales and zeros, by channel
  std::int64_t lane_dim = 0;  // values of a lane of a token
  std::int64_t dim = 0;       // values of a head
  Buffer codes, scales;
  Buffer tail, sink;            // fp16
  bool rotate = false;          // in the basis of a Walsh-Hadamard transform of each head
  const float* null = nullptr;  // (H_kv, D) or null
};

// A (B, H, T, D) tensor of fp32, fp16 or bf16 with any strides, in elements.
struct HeadTensor {
  const void* data = nullptr;
  Format type;
  std::int64_t batch = 0, head = 0, token = 0, dim = 0;
};

}  // namespace caramba_fast
