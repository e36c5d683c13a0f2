// One call of decode attention as plain data: what is stored where, who may see what, and how the
// work is cut. Data only, no functions with linkage: shared by translation units compiled for
// different instruction sets.
#pragma once

#include <cstdint>

#include "streams.h"

namespace caramba_fast {

inline constexpr int kTile = 64;  // tokens taken at a time; a tile never crosses a page
// Scores, then weights, of one query and a tile: with room for what a vector writes beyond it.
inline constexpr int kScoreRow = kTile + 16;
inline constexpr int kMostQueryTokens = 32;  // of a short call: a call of more is done in pieces
inline constexpr int kPieceTokens = 64;      // of such a piece where `AttentionJob::prompt`

// Positions are slots of a row, leading padding included. A stretch of them, read from one place:
// the codes, the fp16 tail (a ring of the newest tokens) or the fp16 sinks (the first ones).
enum class Source : int { codes = 0, tail = 1, sinks = 2 };

struct Segment {
  Source source;
  std::int64_t start, stop;
};

// What the queries of one row see, taken together.
struct RowPlan {
  std::int64_t length = 0, count = 0, pad = 0;  // tokens cached, real queries, leading padding
  Segment segments[4];
  int segment_count = 0;
  std::int64_t tiles = 0;
};

// A split: tiles [first, last) of one (row, lane). Where `partial` is not negative, the result is
// left there for the merge.
struct Task {
  std::int64_t row, lane, first, last, partial;
};

struct AttentionJob {
  // Shapes. A call of many query tokens is done in pieces: `tokens` of them, the first being
  // `first` of `all`.
  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  std::int64_t tokens = 0, first = 0, all = 0;
  bool prompt = false;                         // passes for many queries are allowed (prompt.h)
  std::int64_t lanes = 0, heads_per_lane = 0;  // of kv heads
  std::int64_t groups = 0;                     // query heads of a kv head
  int streams = 0;                             // keys first, then values
  StoredStream stored[kMostStreams];
  HeadTensor queries[kMostStreams - 1];  // of each key stream, of one element type
  float factors[kMostStreams - 1] = {};  // what q . k is multiplied by, softmax_scale
  // Pages; without a table rows lie in the cache as they are.
  const std::int32_t* table = nullptr;  // (B, pages_per_row), rows table_row apart
  std::int64_t table_row = 0, pages_per_row = 0, pages = 0;
  std::int64_t slots = 0;  // of a row or of a page
  int tile = kTile;        // tokens of a tile; 32 where pages are odd multiples of that
  // Visibility, in tokens: the newest `residual` are read from the tail, a ring of `ring` slots,
  // all tokens of a group of `group` until the last of them is so far behind, the first `sink_len`
  // from the sinks; a query sees `window` tokens before its own (-1: all) and the first `kept`.
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
  // Where the first tile of a segment begins: at a multiple of a tile, so that none crosses a page,
  // and tokens share tiles with the same others whatever the oldest one is. Sinks never move.
  std::int64_t first_tile(const Segment& segment) const {
    return segment.source == Source::sinks ? segment.start : segment.start / tile * tile;
  }
  // The last token of the group that a token is in.
  std::int64_t last_of(std::int64_t token) const { return token - token % group + group - 1; }
};

}  // namespace caramba_fast
