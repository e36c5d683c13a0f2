// Merges softmaxes over disjoint keys: the splits of one row, one more key, and two finished
// attentions. lse is the logarithm of a softmax's sum of exponentials.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "arena.h"
#include "lane.h"
#include "numeric.h"
#include "rows.h"
#include "softmax.h"
#include "values.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// The partial result of a split: (heads of a lane, query rows, 2 + D_v) fp32, the largest score,
// the sum of exponentials relative to it, and the weighted values.
inline std::int64_t partial_row(const AttentionJob& job) { return 2 + job.value().dim; }

inline std::int64_t partial_floats(const AttentionJob& job) {
  return job.heads_per_lane * job.rows_per_head() * partial_row(job);
}

inline float* partial_of(const AttentionJob& job, std::int64_t partial, int h, int r) {
  return job.partials + partial * job.partial_size +
         (h * job.rows_per_head() + r) * partial_row(job);
}

inline void keep_partial(const Lane& lane, std::int64_t partial, int h, const Softmax& softmax,
                         const ValueSums& values) {
  for (int r = 0; r < lane.query_rows; ++r) {
    float* to = partial_of(lane.job, partial, h, r);
    to[0] = softmax.max[r];
    to[1] = softmax.total[r];
    std::copy(values.of_head(r), values.of_head(r) + lane.job.value().dim, to + 2);
  }
}

struct Merged {
  float max, total;
};

// Merges the splits of one query row; weighted values go to `sums` (D_v).
inline Merged merge_splits(const AttentionJob& job, const std::int64_t* partials, int count, int h,
                           int r, float* sums) {
  const std::int64_t dim = job.value().dim;
  Merged all = {kNegativeInfinity, 0};
  for (int i = 0; i < count; ++i)
    all.max = std::max(all.max, partial_of(job, partials[i], h, r)[0]);
  std::fill(sums, sums + dim, 0.0f);
  for (int i = 0; i < count; ++i) {
    const float* from = partial_of(job, partials[i], h, r);
    if (from[0] == kNegativeInfinity && !(from[1] != from[1])) continue;  // NaN must propagate
    const float weight = all.max == kNegativeInfinity ? 1.0f : std::exp(from[0] - all.max);
    all.total += from[1] * weight;
    for (std::int64_t d = 0; d < dim; ++d) sums[d] += weight * from[2 + d];
  }
  return all;
}

// Merges one more key, with a logit and a value (null for zeros), into a finished attention: out
// (dim), lse.
inline void join_key(float* out, std::int64_t dim, float& lse, float logit, const float* value) {
  const float most = std::max(lse, logit);
  if (lse == kNegativeInfinity && logit == kNegativeInfinity) return;  // NaN must propagate
  const float mine = std::exp(lse - most), other = std::exp(logit - most), sum = mine + other;
  for (std::int64_t d = 0; d < dim; ++d)
    out[d] = (out[d] * mine + (value == nullptr ? 0.0f : value[d] * other)) / sum;
  lse = most + std::log(sum);
}

// Merges two finished attentions, row by row: out (rows, dim) of `type`, lse (rows).
inline void merge_states(Format type, const void* a, const float* lse_a, const void* b,
                         const float* lse_b, void* out, float* lse, std::int64_t rows,
                         std::int64_t dim) {
  Arena& arena = thread_arena();
  arena.reset();
  float* x = arena.take<float>(dim);
  float* y = arena.take<float>(dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float most = std::max(lse_a[r], lse_b[r]);
    const float base = most == kNegativeInfinity ? 0.0f : most;
    const float mine = std::exp(lse_a[r] - base), other = std::exp(lse_b[r] - base);
    const float total = mine + other;
    read_row({a, type, 0, 0, dim, 1}, 0, 0, r, dim, x);
    read_row({b, type, 0, 0, dim, 1}, 0, 0, r, dim, y);
    const float divisor = total == 0 ? 1 : total;  // NaN stays NaN
    const float share_x = mine / divisor, share_y = other / divisor;
    for (std::int64_t d = 0; d < dim; ++d) x[d] = x[d] * share_x + y[d] * share_y;
    write_row(type, x, dim, out, r * dim);
    lse[r] = base + std::log(total);
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
