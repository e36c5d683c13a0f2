// One call of append as plain data, shared by translation units of different instruction sets.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "streams.h"

namespace caramba_fast {

struct AppendStream {
  StoredStream stored;
  HeadTensor given;                   // (B, H_kv, T, D)
  QuantizeBlocks quantize = nullptr;  // of fp32 values; null for unquantized formats
  bool divides = false;               // bytes of q4_channel, as fit "mse" does
  const float* query_rms = nullptr;   // (lanes, lane_dim) or null; see `ChannelRange`
  std::int64_t ring = 0, sink_len = 0;
};

struct AppendJob {
  std::int64_t batch = 0, heads = 0, tokens = 0, lanes = 0, heads_per_lane = 0;
  int streams = 0;
  AppendStream stream[kMostStreams];
  const std::int32_t *start = nullptr, *leftpad = nullptr, *query_lens = nullptr, *table = nullptr;
  std::int64_t table_row = 0, pages_per_row = 0, pages = 0, slots = 0;
};

}  // namespace caramba_fast
