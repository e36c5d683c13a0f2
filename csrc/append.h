// Writing new tokens, one lane at a time: rotates, quantizes, and stores codes, scales, fp16 tail
// and fp16 sinks. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "append_job.h"
#include "arena.h"
#include "channel.h"
#include "numeric.h"
#include "rows.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline void store_halves(const float* x, std::int64_t count, char* to) {
  write_row(Format::fp16, x, count, to, 0);
}

// Finds the row or page, and the slot, of a position; false if it is stored nowhere.
inline bool find_place(const AppendJob& job, std::int64_t b, std::int64_t position,
                       std::int64_t& row, std::int64_t& slot) {
  row = b;
  slot = position;
  if (job.table == nullptr) return position >= 0 && position < job.slots;
  const std::int64_t page = position / job.slots;
  const bool kept = position >= 0 && page < job.pages_per_row;
  row = kept ? job.table[b * job.table_row + page] : -1;
  slot = position % job.slots;
  return row >= 0 && row < job.pages;
}

// The incomplete group of tokens of one (row, lane) of a stream by channel. Earlier tokens of the
// first group are read from the tail before anything is written to it.
class OpenGroup {
 public:
  OpenGroup(const AppendStream& stream, std::int64_t b, std::int64_t lane, std::int64_t start,
            Arena& arena)
      : stream_(stream),
        query_rms_(stream.query_rms == nullptr ? nullptr
                                               : stream.query_rms + lane * stream.stored.lane_dim),
        values_(arena.take<float>(stream.stored.group * stream.stored.lane_dim)) {
    const StoredStream& s = stream.stored;
    for (std::int64_t t = start - start % s.group; t >= 0 && t < start; ++t) {
      const char* held = s.tail.at(b, lane, t % stream.ring);
      for (std::int64_t d = 0; d < s.lane_dim; d += kLanes)
        store_as(load_half(reinterpret_cast<const std::uint16_t*>(held) + d), row_of(t) + d);
    }
  }

  // Adds a token, and encodes its group if it is the last. Tokens from `counted` on determine the
  // ranges.
  void take(const AppendJob& job, std::int64_t b, std::int64_t lane, std::int64_t position,
            std::int64_t counted, const float* x) {
    const StoredStream& s = stream_.stored;
    if (position < 0) return;
    float* to = row_of(position);
    for (std::int64_t d = 0; d < s.lane_dim; d += kLanes) {
      std::uint16_t halves[kLanes];
      store_half(load_as<Floats>(x + d), halves);
      store_as(load_half(halves), to + d);
    }
    std::int64_t row, slot;
    const std::int64_t first = position - s.group + 1;
    if ((position + 1) % s.group != 0 || !find_place(job, b, first, row, slot)) return;
    auto* scales = reinterpret_cast<std::uint16_t*>(s.scales.at(row, lane, slot / s.group));
    encode_group(values_, s, std::max<std::int64_t>(counted - first, 0), stream_.divides,
                 query_rms_, s.codes.at(row, lane, slot), scales);
  }

 private:
  float* row_of(std::int64_t position) const {
    return values_ + position % stream_.stored.group * stream_.stored.lane_dim;
  }

  const AppendStream& stream_;
  const float* query_rms_;
  float* values_;
};

// Token i of one (row, lane) as fp32 in the stored basis; (lane_dim).
inline void read_token(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                       std::int64_t lane, std::int64_t i, float* x) {
  const StoredStream& s = stream.stored;
  for (std::int64_t h = 0; h < job.heads_per_lane; ++h, x += s.dim) {
    const std::int64_t head = lane * job.heads_per_lane + h;
    if (head >= job.heads) {
      std::fill(x, x + s.dim, 0.0f);
      continue;
    }
    read_row(stream.given, b, head, i, s.dim, x);
    if (s.rotate) hadamard(x, s.dim);
  }
}

// Number and positions of a row's new tokens.
struct NewTokens {
  std::int64_t start, pad, count;

  NewTokens(const AppendJob& job, std::int64_t b)
      : start(job.start[b]),
        pad(job.leftpad == nullptr ? 0 : job.leftpad[b]),
        count(job.query_lens == nullptr ? job.tokens : job.query_lens[b]) {}
};

// Stores token i in the fp16 tail and sinks.
inline void store_sides(const AppendStream& stream, const NewTokens& added, std::int64_t b,
                        std::int64_t lane, std::int64_t i, const float* x) {
  const StoredStream& s = stream.stored;
  const std::int64_t position = added.start + i, t = position - added.pad;
  if (s.tail.data != nullptr && position >= 0 && i >= added.count - stream.ring)
    store_halves(x, s.lane_dim, s.tail.at(b, lane, position % stream.ring));
  if (s.sink.data != nullptr && t >= 0 && t < stream.sink_len)
    store_halves(x, s.lane_dim, s.sink.at(b, lane, t));
}

// Tokens [begin, end) of one (row, lane), stored as they are or by channel (then all of them).
inline void append_lane(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                        std::int64_t lane, std::int64_t begin, std::int64_t end) {
  Arena& arena = thread_arena();
  const StoredStream& s = stream.stored;
  arena.reset();
  float* x = arena.take<float>(s.lane_dim + 64);
  const NewTokens added(job, b);
  const bool by_channel = is_by_channel(s.format);
  // Earlier tokens are only needed if a group is completed.
  const bool ends = by_channel && added.start % s.group + added.count >= s.group;
  OpenGroup* open = ends ? new (arena.take<OpenGroup>(1))
                               OpenGroup(stream, b, lane, added.start, arena)
                         : nullptr;
  for (std::int64_t i = begin; i < std::min(end, added.count); ++i) {
    const std::int64_t position = added.start + i;
    read_token(job, stream, b, lane, i, x);
    std::int64_t row, slot;
    if (open != nullptr)
      open->take(job, b, lane, position, added.pad + stream.sink_len, x);
    else if (!by_channel && find_place(job, b, position, row, slot))
      write_row(s.format, x, s.lane_dim, s.codes.at(row, lane, slot), 0);
    store_sides(stream, added, b, lane, i, x);
  }
}

// Tokens [begin, end) of some lanes with scales per block of a token. Lanes are quantized together,
// since a few blocks take as long as a vector of them.
inline void append_blocks(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                          std::int64_t first, std::int64_t last, std::int64_t begin,
                          std::int64_t end) {
  constexpr std::int64_t kTogether = 16;  // blocks
  Arena& arena = thread_arena();
  const StoredStream& s = stream.stored;
  arena.reset();
  const std::int64_t blocks = s.lane_dim / s.block, bytes = s.lane_dim * bits_of(s.format) / 8;
  const std::int64_t most = std::max<std::int64_t>(kTogether / blocks, 1);
  float* x = arena.take<float>(most * s.lane_dim + 64);
  char* codes = arena.take<char>(most * bytes);
  auto* scales = arena.take<std::uint16_t>(most * blocks);
  const NewTokens added(job, b);
  for (std::int64_t lane = first; lane < last; lane += most)
    for (std::int64_t i = begin; i < std::min(end, added.count); ++i) {
      const std::int64_t lanes = std::min(most, last - lane);
      for (std::int64_t l = 0; l < lanes; ++l)
        read_token(job, stream, b, lane + l, i, x + l * s.lane_dim);
      stream.quantize(x, codes, scales, lanes * blocks);
      std::int64_t row, slot;
      const bool kept = find_place(job, b, added.start + i, row, slot);
      for (std::int64_t l = 0; l < lanes; ++l) {
        store_sides(stream, added, b, lane + l, i, x + l * s.lane_dim);
        if (!kept) continue;
        std::memcpy(s.codes.at(row, lane + l, slot), codes + l * bytes,
                    static_cast<std::size_t>(bytes));
        std::memcpy(s.scales.at(row, lane + l, slot), scales + l * blocks,
                    static_cast<std::size_t>(blocks) * sizeof *scales);
      }
    }
}

// Tokens [begin, end) of the lanes [first, last) of one row of one stream; by channel all tokens.
inline void append_tokens(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                          std::int64_t first, std::int64_t last, std::int64_t begin,
                          std::int64_t end) {
  if (stream.quantize != nullptr) return append_blocks(job, stream, b, first, last, begin, end);
  for (std::int64_t lane = first; lane < last; ++lane)
    append_lane(job, stream, b, lane, begin, end);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
