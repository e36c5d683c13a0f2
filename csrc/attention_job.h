// One call of decode attention as plain data: storage, visibility, and the division of work.
// Without functions with linkage, since translation units of different instruction sets share it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "streams.h"

namespace caramba_fast {

inline constexpr int kTile = 64;  // tokens per step; a tile never crosses a page
// Scores, then weights, of one query and a tile, with room for vectors written past its end.
inline constexpr int kScoreRow = kTile + 16;
inline constexpr int kMostQueryTokens = 32;  // of a short call; longer ones are done in pieces
inline constexpr int kPieceTokens = 64;      // of a piece with `AttentionJob::prompt`

// A position is a slot of a row, leading padding included. A segment is a range of them in one
// place: the codes, the fp16 tail (a ring of the newest tokens) or the fp16 sinks (the first ones).
enum class Source : int { codes = 0, tail = 1, sinks = 2 };

struct Segment {
  Source source;
  std::int64_t start, stop;
};

// The positions that some query of a row sees.
struct RowPlan {
  std::int64_t length = 0, count = 0, pad = 0;  // tokens cached, real queries, leading padding
  Segment segments[4];
  int segment_count = 0;
  std::int64_t tiles = 0;
};

// A split: tiles [first, last) of one (row, lane). If `partial` is not negative, it is the index of
// the result for the merge.
struct Task {
  std::int64_t row, lane, first, last, partial;
};

struct AttentionJob {
  // Shapes. A call of many query tokens is done in pieces: `tokens` of `all`, from `first` on.
  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  std::int64_t tokens = 0, first = 0, all = 0;
  bool prompt = false;                         // passes for many queries are allowed (prompt.h)
  std::int64_t lanes = 0, heads_per_lane = 0;  // of kv heads
  std::int64_t groups = 0;                     // query heads of a kv head
  int streams = 0;                             // keys first, then values
  StoredStream stored[kMostStreams];
  HeadTensor queries[kMostStreams - 1];  // of each key stream, of one element type
  float factors[kMostStreams - 1] = {};  // softmax_scale, the factor of q . k
  // Pages; without a table, row b is row b of the cache.
  const std::int32_t* table = nullptr;  // (B, pages_per_row), rows table_row apart
  std::int64_t table_row = 0, pages_per_row = 0, pages = 0;
  std::int64_t slots = 0;  // of a row or of a page
  int tile = kTile;        // tokens of a tile; 32 if pages are odd multiples of that
  // Visibility, in tokens. The newest `residual` are read from the tail, a ring of `ring` slots, as
  // are all tokens of a `group` until its last token is that old; the first `sink_len` from the
  // sinks. A query sees `window` tokens before its own (-1: all) and the first `kept`.
  std::int64_t group = 1;
  std::int64_t residual = 0, ring = 0, sink_len = 0, window = -1, kept = 0;
  float softcap = 0;              // 0: none
  const float* s_aux = nullptr;   // (H_q) a logit that joins each softmax, without a value
  const RowPlan* rows = nullptr;  // (B)
  // Results, of all pieces.
  void* out = nullptr;            // (B, H_q, all, D_v) contiguous, of the queries' type
  float* lse = nullptr;           // (B, H_q, all), natural logarithm
  float* partials = nullptr;      // what splits leave for the merge (merge.h)
  std::int64_t partial_size = 0;  // floats of one

  const StoredStream& value() const { return stored[streams - 1]; }
  std::int64_t rows_per_head() const { return groups * tokens; }
  // Whether any token is read from the tail.
  bool has_tail() const { return residual > 0 || group > 1; }
  // Where the first tile of a segment begins: at a multiple of a tile, so that none crosses a page
  // and a token is in the same tile whatever the oldest one is. Sinks never move.
  std::int64_t first_tile(const Segment& segment) const {
    return segment.source == Source::sinks ? segment.start : segment.start / tile * tile;
  }
  // The tokens of a row of `length` that its last query reads from codes: whole groups.
  std::int64_t encoded_before(std::int64_t length) const {
    return std::max<std::int64_t>(length - residual, 0) / group * group;
  }
};

}  // namespace caramba_fast
