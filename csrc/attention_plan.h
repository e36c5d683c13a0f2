// Finds the segments of a row that its queries see, and divides the tiles of all rows and lanes
// into tasks of equal work. Plain code for any CPU; included by attention_op.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_job.h"

namespace caramba_fast {

// The visible segments of one row. No segment leaves its buffer, whatever the numbers are.
inline RowPlan plan_row(const AttentionJob& a, std::int64_t length, std::int64_t count,
                        std::int64_t pad, std::int64_t capacity) {
  RowPlan row;
  row.length = length;
  row.count = count = std::clamp<std::int64_t>(count, 0, a.tokens);
  row.pad = pad = std::max<std::int64_t>(pad, 0);
  if (count == 0) return row;
  const std::int64_t first = length - count;  // the first query's position
  const auto add = [&row, &a](Source source, std::int64_t start, std::int64_t stop) {
    if (stop <= start) return;
    const Segment& segment = row.segments[row.segment_count++] = {source, start, stop};
    row.tiles += (stop - a.first_tile(segment) + a.tile - 1) / a.tile;
  };
  const std::int64_t begin = pad + a.sink_len;
  const std::int64_t near = a.window >= 0 ? std::max(begin, first - a.window) : begin;
  add(Source::sinks, pad, std::min(begin, length));
  const std::int64_t end = std::min(a.encoded_before(length), capacity);
  // If the kept tokens and the window share a tile, they are one segment: each tile is processed
  // once, so that a query's bits do not depend on where the windows of others begin.
  const std::int64_t kept = std::min({pad + a.kept, near, end});
  const bool apart = near > begin && near / a.tile * a.tile >= kept;
  if (apart) add(Source::codes, begin, kept);
  add(Source::codes, apart || kept <= begin ? near : begin, end);
  if (a.has_tail()) {
    const std::int64_t behind = std::max<std::int64_t>(first - a.residual + 1, 0);
    const std::int64_t oldest = std::max(begin, behind / a.group * a.group);
    const std::int64_t start = a.kept > 0 ? oldest : std::max(oldest, near);
    add(Source::tail, start, length);
  }
  return row;
}

// Tasks, in the order of rows and lanes; cuts[i] is the first task of piece i.
struct Plan {
  std::vector<RowPlan> rows;
  std::vector<Task> tasks;
  std::vector<std::int64_t> cuts;
  std::int64_t partials = 0;
};

// The most splits, since each leaves partial results of all its queries.
inline constexpr std::int64_t kMostSplits = 64;

// Cuts a (row, lane) into `splits` tasks of equal length.
inline void split_evenly(Plan& plan, std::int64_t row, std::int64_t lane, std::int64_t splits) {
  const std::int64_t tiles = plan.rows[static_cast<std::size_t>(row)].tiles;
  splits =
      std::clamp<std::int64_t>(splits, 1, std::max<std::int64_t>(1, std::min(tiles, kMostSplits)));
  for (std::int64_t i = 0; i < splits; ++i)
    plan.tasks.push_back({row, lane, tiles * i / splits, tiles * (i + 1) / splits,
                          splits > 1 ? plan.partials++ : -1});
}

// Each (row, lane) becomes `wanted` splits; if 0, the tiles of all are divided into `pieces` equal
// parts, so that threads finish together whatever the rows' lengths.
inline void plan_tasks(Plan& plan, std::int64_t lanes, std::int64_t pieces, std::int64_t wanted) {
  const auto rows = static_cast<std::int64_t>(plan.rows.size());
  plan.tasks.clear();
  plan.cuts.assign(1, 0);
  plan.partials = 0;
  std::int64_t total = 0;
  for (const RowPlan& row : plan.rows) total += (row.tiles + 1) * lanes;
  if (wanted > 0 || pieces <= 1) {
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t lane = 0; lane < lanes; ++lane) split_evenly(plan, row, lane, wanted);
    const auto tasks = static_cast<std::int64_t>(plan.tasks.size());
    for (std::int64_t i = 1; i <= pieces; ++i) plan.cuts.push_back(tasks * i / pieces);
    return;
  }
  std::int64_t passed = 0, piece = 0;  // units passed, current piece
  const auto end_of = [&](std::int64_t i) { return total * (i + 1) / pieces; };
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const std::int64_t tiles = plan.rows[static_cast<std::size_t>(row)].tiles;
      const std::int64_t begin = passed, end = passed + tiles + 1;
      const std::size_t before = plan.tasks.size();
      std::int64_t first = 0;
      while (end_of(piece) < end && piece + 1 < pieces) {
        const std::int64_t last = std::min(end_of(piece) - begin, tiles);
        if (last > first) plan.tasks.push_back({row, lane, first, last, -1});
        first = std::max(first, last);
        plan.cuts.push_back(static_cast<std::int64_t>(plan.tasks.size()));
        ++piece;
      }
      if (first < tiles || tiles == 0) plan.tasks.push_back({row, lane, first, tiles, -1});
      passed = end;
      if (plan.tasks.size() - before > 1)
        for (std::size_t i = before; i < plan.tasks.size(); ++i)
          plan.tasks[i].partial = plan.partials++;
    }
  while (static_cast<std::int64_t>(plan.cuts.size()) <= pieces)
    plan.cuts.push_back(static_cast<std::int64_t>(plan.tasks.size()));
}

}  // namespace caramba_fast
