// The tokens of a tile that each query token sees: limited by the row's length, the window and its
// kept first tokens, and by tail and sinks, which are read instead of codes. The tiles of a row are
// planned before (attention_plan.h). Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lane.h"
#include "numeric.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Bit i of a mask is token i of a tile.
static_assert(kTile <= 64, "a mask has 64 bits");
inline std::uint64_t mask_of_first(int count) {
  return count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// What the queries of one row see of one tile, computed by `find`.
struct Visibility {
  bool whole;                        // every query sees every token: `seen` is not filled
  std::uint64_t any;                 // tokens that some query sees
  std::uint64_t seen[kPieceTokens];  // tokens that query token t sees

  void find(const Lane& lane, const Tile& tile) {
    const AttentionJob& job = lane.job;
    const RowPlan& plan = lane.plan;
    whole = sees_everything(job, plan, tile);
    any = mask_of_first(tile.count);
    if (whole) return;
    const std::int64_t first = plan.length - plan.count;
    std::fill(seen, seen + job.tokens, 0);
    any = 0;
    for (std::int64_t t = 0; t < plan.count; ++t) {
      for (int i = 0; i < tile.count; ++i)
        if (sees(job, plan, first + t, tile.start + i, tile.source))
          seen[t] |= std::uint64_t{1} << i;
      any |= seen[t];
    }
  }

  // Whether a query token sees all of a tile of full size.
  bool full(const Tile& tile, std::int64_t token, int tile_size) const {
    return tile.count == tile_size && (whole || seen[token] == mask_of_first(tile.count));
  }

  // Sets the scores of invisible tokens to -infinity.
  void hide(float* scores, std::int64_t token, int count) const {
    for (int i = 0; i < count; ++i)
      if (!(seen[token] >> i & 1)) scores[i] = kNegativeInfinity;
  }

 private:
  // Whether the query at one position sees the key at another in `source`: the newest `residual`
  // are only in the tail.
  static bool sees(const AttentionJob& job, const RowPlan& plan, std::int64_t query,
                   std::int64_t key, Source source) {
    const std::int64_t distance = query - key;
    const bool encoded = query - job.last_of(key) >= job.residual;
    if (source == Source::codes ? !encoded : distance < 0) return false;
    if (source == Source::tail && encoded) return false;
    if (job.window < 0 || distance <= job.window) return true;
    return key - plan.pad < job.kept;
  }

  // The same for all queries and all tokens of a tile, from its ends.
  static bool sees_everything(const AttentionJob& job, const RowPlan& plan, const Tile& tile) {
    const std::int64_t first = plan.length - plan.count, last = plan.length - 1;
    const std::int64_t newest = tile.start + tile.count - 1;
    if (plan.count != job.tokens) return false;
    if (tile.source == Source::codes && job.last_of(newest) > first - job.residual) return false;
    if (tile.source != Source::codes && newest > first) return false;
    if (tile.source == Source::tail && last - job.last_of(tile.start) >= job.residual) return false;
    return job.window < 0 || last - tile.start <= job.window || newest - plan.pad < job.kept;
  }
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
