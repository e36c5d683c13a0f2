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
    const std::int64_t first = plan.length - plan.count;
    const std::uint64_t all = mask_of_first(tile.count);
    const auto seen_by = [&](std::int64_t t) { return tokens_seen(job, plan, first + t, tile); };
    any = all;
    // Each bound of what a query sees rises, or falls, with its position.
    whole = plan.count == job.tokens && seen_by(0) == all && seen_by(plan.count - 1) == all;
    if (whole) return;
    any = 0;
    std::fill(seen, seen + job.tokens, 0);
    for (std::int64_t t = 0; t < plan.count; ++t) any |= seen[t] = seen_by(t);
  }

  // Whether a query token sees all of a tile of full size.
  bool full(const Tile& tile, std::int64_t token, int tile_size) const {
    return tile.count == tile_size && (whole || seen[token] == mask_of_first(tile.count));
  }

  // Sets the scores of a tile's invisible tokens to -infinity, and those past it up to `stop`, a
  // multiple of kLanes.
  void hide(float* scores, std::int64_t token, int stop) const {
    const Ints lanes = splat(1) << first_lanes();
    for (int i = 0; i < stop; i += kLanes) {
      const Ints mine = splat(static_cast<std::int32_t>(seen[token] >> i)) & lanes;
      store_as(mine != 0 ? load_as<Floats>(scores + i) : splat(kNegativeInfinity), scores + i);
    }
  }

 private:
  // The tokens of a tile at the positions [first, stop).
  static std::uint64_t between(const Tile& tile, std::int64_t first, std::int64_t stop) {
    const auto of_tile = [&tile](std::int64_t position) {
      return mask_of_first(
          static_cast<int>(std::clamp<std::int64_t>(position - tile.start, 0, tile.count)));
    };
    return of_tile(stop) & ~of_tile(first);
  }

  // What the query at one position sees of a tile: the newest `residual` are only in the tail.
  static std::uint64_t tokens_seen(const AttentionJob& job, const RowPlan& plan, std::int64_t query,
                                   const Tile& tile) {
    const std::int64_t encoded = job.encoded_before(query + 1), end = tile.start + tile.count;
    std::uint64_t seen = between(tile, tile.source == Source::tail ? encoded : tile.start,
                                 tile.source == Source::codes ? encoded : query + 1);
    if (job.window >= 0)
      seen &=
          between(tile, query - job.window, end) | between(tile, tile.start, plan.pad + job.kept);
    return seen;
  }
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
