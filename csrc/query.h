// Prepares queries for the stored keys of one stream: multiplied by the softmax scale, in the basis
// of the keys, and as integers for integer products with quantized keys.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arena.h"
#include "lane.h"
#include "numeric.h"
#include "rows.h"
#include "tile.h"
#if CARAMBA_FAST_VECTOR_BITS
#include "query_int8.h"
#include "scores_group.h"
#endif
#if CARAMBA_FAST_BYTE_SUMS
#include "prompt_bf16.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

struct QueryUnit;  // query_int8.h

// Query row r of the lane's h-th kv head, times its factor, in the model's basis; (dim) of a key
// stream.
inline void read_query(const Lane& lane, int stream, int h, int r, float* to) {
  const AttentionJob& job = lane.job;
  const std::int64_t dim = job.stored[stream].dim;
  read_row(job.queries[stream], lane.row, lane.query_head(h, r), lane.query_token(r), dim, to);
  for (std::int64_t d = 0; d < dim; ++d) to[d] *= job.factors[stream];
}

// All query rows of one kv head for one key stream.
struct HeadQuery {
  HeadStream key;
  float* values;        // (query rows, key.width) fp32; zeros outside the head
  float* folded;        // for keys by channel: scratch of the same size plus one value per row
  std::int32_t* masks;  // and of one per byte of 4-bit codes
  // (query rows, units), null unless key.bytes: 16 bits in two bytes, and 8 bits in one; for q8_0
  // the latter is the remainder of the former.
  QueryUnit *two_bytes, *one_byte;
  float allowed_step = 0;  // for keys by channel, see scores_group.h
  // (query rows, key.width) bf16 in the model's basis, for prompts in bf16 (prompt_bf16.h), and the
  // factor of their products; null elsewhere.
  float* halves = nullptr;
  float factor = 1;

  // `row` is scratch for one query row.
  CARAMBA_FAST_NOINLINE HeadQuery(const Lane& lane, int stream, int h, Arena& arena, float* row)
      : key(lane.job.stored[stream], h, true),
        values(arena.zeros(lane.query_rows * key.width)),
        folded(is_by_channel(key.stored->format)
                   ? arena.take<float>(lane.query_rows * (key.width + 1))
                   : nullptr),
        masks(is_by_channel(key.stored->format) ? arena.take<std::int32_t>(key.width / 2)
                                                : nullptr),
        two_bytes(nullptr),
        one_byte(nullptr) {
    const StoredStream& s = *key.stored;
    for (int r = 0; r < lane.query_rows; ++r) {
      read_query(lane, stream, h, r, row);
      if (s.rotate) hadamard(row, s.dim);
      std::copy(row, row + s.dim, values + r * key.width + key.inner);
    }
#if CARAMBA_FAST_VECTOR_BITS
#if CARAMBA_FAST_BYTE_SUMS
    if (takes_bf16(lane.job, stream)) keep_halves(lane, stream, h, arena, row);
#endif
    if (is_by_channel(s.format))
      allowed_step = step_allowed(bits_of(s.format), key.width, lane.job.queries[stream].type);
    if (key.bytes == nullptr) return;
    two_bytes = arena.take<QueryUnit>(lane.query_rows * key.bytes->units);
    one_byte = arena.take<QueryUnit>(lane.query_rows * key.bytes->units);
    if (s.format == Format::q8_0) quantize_rows<Format::q8_0>(lane.query_rows);
    if (s.format == Format::q4_0) quantize_rows<Format::q4_0>(lane.query_rows);
    if (s.format == Format::nf4) quantize_rows<Format::nf4>(lane.query_rows);
#endif
  }

 private:
#if CARAMBA_FAST_BYTE_SUMS
  void keep_halves(const Lane& lane, int stream, int h, Arena& arena, float* row) {
    const HeadTensor& queries = lane.job.queries[stream];
    const std::int64_t dim = key.stored->dim;
    halves = arena.zeros(lane.query_rows * key.width / 2);
    factor = lane.job.factors[stream];
    for (int r = 0; r < lane.query_rows; ++r) {
      read_row(queries, lane.row, lane.query_head(h, r), lane.query_token(r), dim, row);
      write_row(Format::bf16, row, dim, halves, r * key.width + key.inner);
    }
  }
#endif
#if CARAMBA_FAST_VECTOR_BITS
  template <Format F>
  void quantize_rows(int rows) {
    for (int r = 0; r < rows; ++r) {
      const float* query = values + r * key.width;
      QueryUnit *two = two_bytes + r * key.bytes->units, *one = one_byte + r * key.bytes->units;
      quantize_query<F, 2>(query, *key.bytes, two, F == Format::q8_0 ? one : nullptr);
      if (F != Format::q8_0) quantize_query<F, 1>(query, *key.bytes, one, nullptr);
    }
  }
#endif
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
