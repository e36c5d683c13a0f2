// Writing new tokens: transform, quantize, and store codes, scales, fp16 tail and fp16 sinks, one
// lane at a time. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "append_job.h"
#include "arena.h"
#include "numeric.h"
#include "rows.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// What is stored of one head's token, from x = the token as given, in place. Steps round one by
// one, as in the reference (caramba_fast/ops/transform.py).
inline void change_basis(float* x, const Basis& basis, std::int64_t head, std::int64_t dim,
                         std::int64_t t) {
  if (basis.mean != nullptr)
    for (std::int64_t d = 0; d < dim; ++d) x[d] -= basis.mean[head * dim + d];
  for (std::int64_t p = 0; p < basis.pair_count; ++p) {
    const std::int64_t pair = head * basis.pair_count + p;
    const std::int64_t most = (basis.phase_rows - kPhaseTile) * kPhaseTile - 1;
    const std::int64_t at = std::clamp<std::int64_t>(t, 0, most);
    const float* table = basis.phases + pair * basis.phase_rows * 2;
    const float* inside = table + at % kPhaseTile * 2;
    const float* start = table + (kPhaseTile + at / kPhaseTile) * 2;
    const float cosine = start[0] * inside[0] - start[1] * inside[1];
    const float sine = start[1] * inside[0] + start[0] * inside[1];
    const float* b = basis.bias + 2 * pair;
    x[basis.pairs[2 * pair]] -= b[0] * cosine - b[1] * sine;
    x[basis.pairs[2 * pair + 1]] -= b[0] * sine + b[1] * cosine;
  }
  if (basis.scale != nullptr)
    for (std::int64_t d = 0; d < dim; ++d) x[d] /= basis.scale[head * dim + d];
  if (basis.rotate) hadamard(x, dim);
}

inline void store_halves(const float* x, std::int64_t count, char* to) {
  write_row(Format::fp16, x, count, to, 0);
}

// Tokens [begin, end) of one (row, lane) of one stream.
inline void append_tokens(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                          std::int64_t lane, std::int64_t begin, std::int64_t end) {
  Arena& arena = thread_arena();
  const StoredStream& s = stream.stored;
  arena.reset();
  float* x = arena.take<float>(s.lane_dim + 64);
  const std::int64_t start = job.start[b], pad = job.leftpad == nullptr ? 0 : job.leftpad[b];
  const std::int64_t count = job.query_lens == nullptr ? job.tokens : job.query_lens[b];
  for (std::int64_t i = begin; i < std::min(end, count); ++i) {
    const std::int64_t position = start + i, t = position - pad;
    std::fill(x, x + s.lane_dim, 0.0f);
    for (std::int64_t h = 0; h < job.heads_per_lane; ++h) {
      const std::int64_t head = lane * job.heads_per_lane + h;
      if (head >= job.heads) break;
      read_row(stream.given, b, head, i, s.dim, x + h * s.dim);
      change_basis(x + h * s.dim, s.basis, head, s.dim, t);
    }
    std::int64_t row = b, slot = position;
    bool kept = position >= 0 && position < job.slots;
    if (job.table != nullptr) {
      const std::int64_t page = position / job.slots;
      kept = position >= 0 && page < job.pages_per_row;
      row = kept ? job.table[b * job.table_row + page] : -1;
      kept = row >= 0 && row < job.pages;
      slot = position % job.slots;
    }
    if (kept) {
      char* codes = s.codes.at(row, lane, slot);
      if (stream.quantize != nullptr) {
        auto* scales = reinterpret_cast<std::uint16_t*>(s.scales.at(row, lane, slot));
        stream.quantize(x, codes, scales, s.lane_dim / s.block);
      } else {
        write_row(s.format, x, s.lane_dim, codes, 0);
      }
    }
    if (s.tail.data != nullptr && position >= 0 && i >= count - stream.ring)
      store_halves(x, s.lane_dim, s.tail.at(b, lane, position % stream.ring));
    if (s.sink.data != nullptr && t >= 0 && t < stream.sink_len)
      store_halves(x, s.lane_dim, s.sink.at(b, lane, t));
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
