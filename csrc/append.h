// Writing new tokens: rotate, quantize, and store codes, scales, fp16 tail and fp16 sinks, one
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
      if (s.rotate) hadamard(x + h * s.dim, s.dim);
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
