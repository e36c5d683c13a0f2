// One call of decode attention as plain data: what is stored where, who may see what, and how the
// work is cut. Data only, no functions with linkage: shared by translation units compiled for
// different instruction sets.
#pragma once

#include <cstdint>

#include "formats.h"

namespace caramba_fast {

// Tokens taken at a time; a tile never crosses a page.
inline constexpr int kTile = 64;
inline constexpr int kMostQueryTokens = 32;  // of a piece: a call of more is done in pieces
inline constexpr int kMostStreams = 3;       // k, v or k_sem, k_geo, v
inline constexpr int kPhaseTile = 128;       // tokens of a tile of the phase table

// The change of basis a stream is stored in (caramba_fast/ops/transform.py); null pointers leave a
// step out.
struct Basis {
  const float* mean = nullptr;          // (H_kv, D)
  const float* bias = nullptr;          // (H_kv, P, 2)
  const std::int32_t* pairs = nullptr;  // (H_kv, P, 2)
  const float* phases = nullptr;        // (H_kv, P, phase_rows, 2)
  const float* scale = nullptr;         // (H_kv, D)
  std::int64_t pair_count = 0;
  std::int64_t phase_rows = 0;
  bool rotate = false;
};

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
  int block = 32;             // values that share a scale
  std::int64_t lane_dim = 0;  // values of a lane of a token
  std::int64_t dim = 0;       // values of a head
  Buffer codes, scales;
  Buffer tail, sink;  // fp16
  Basis basis;
  const float* null = nullptr;  // (H_kv, D) or null
};

// A (B, H, T, D) tensor of fp32, fp16 or bf16 with any strides, in elements.
struct HeadTensor {
  const void* data = nullptr;
  Format type;
  std::int64_t batch = 0, head = 0, token = 0, dim = 0;
};

// A stretch of positions of one row, read from one place.
enum class Source : int { codes = 0, tail = 1, sinks = 2 };

struct Segment {
  Source source;
  std::int64_t start, stop;
};

// Who sees what in one row.
struct RowPlan {
  std::int64_t length = 0, count = 0, pad = 0;  // tokens cached, real queries, leading padding
  Segment segments[5];
  int segment_count = 0;
  std::int64_t tiles = 0;
};

// Some tiles of one (row, lane). Where `partial` is not negative, the result is left there for the
// merge.
struct Task {
  std::int64_t row, lane, first, last, partial;
};

struct Attention {
  // shapes
  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  // A call of many query tokens is done in pieces: `tokens` of them, the first being `first` of
  // `all`.
  std::int64_t tokens = 0, first = 0, all = 0;
  std::int64_t lanes = 0, heads_per_lane = 0, groups = 0;  // groups: query heads of a kv head
  int streams = 0;                                         // keys first, then v
  StoredStream stored[kMostStreams];
  HeadTensor queries[kMostStreams - 1];
  float factors[kMostStreams - 1] = {};
  // places
  const std::int32_t* table = nullptr;  // (B, pages)
  std::int64_t table_row = 0, pages_per_row = 0, pages = 0,
               slots = 0;  // slots: of a row or of a page
  int tile = kTile;
  // who sees what
  std::int64_t residual = 0, ring = 0, sink_len = 0, window = -1, kept = 0;
  float softcap = 0;
  const float* s_aux = nullptr;  // (H_q)
  const RowPlan* rows = nullptr;
  // results, of all pieces
  void* out = nullptr;   // (B, H_q, all, D_v) contiguous, of the queries' type
  float* lse = nullptr;  // (B, H_q, all)
  float* partials = nullptr;
  std::int64_t partial_size = 0;  // floats of one

  const StoredStream& value() const { return stored[streams - 1]; }
  std::int64_t rows_per_head() const { return groups * tokens; }
};

}  // namespace caramba_fast
