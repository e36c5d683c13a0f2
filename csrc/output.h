// Results: normalizes weighted values, rotates them back, adds the null key and the sink logit, and
// writes out and lse. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lane.h"
#include "merge.h"
#include "numeric.h"
#include "query.h"
#include "rows.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// The logit of the null key; `q` is scratch for one query row.
inline float null_logit(const Lane& lane, int h, int r, float* q) {
  const AttentionJob& job = lane.job;
  float logit = 0;
  for (int i = 0; i + 1 < job.streams; ++i) {
    const std::int64_t dim = job.stored[i].dim;
    read_query(lane, i, h, r, q);
    const float* null = job.stored[i].null + lane.kv_head(h) * dim;
    for (std::int64_t d = 0; d < dim; ++d) logit += q[d] * null[d];
  }
  return job.softcap > 0 ? job.softcap * std::tanh(logit / job.softcap) : logit;
}

// Writes the result of one query row; `row` is scratch for D_v values followed by the widest query.
inline void write_result(const Lane& lane, int h, int r, float max, float total, const float* sums,
                         float* row) {
  const AttentionJob& job = lane.job;
  const StoredStream& s = job.value();
  const std::int64_t dim = s.dim, token = lane.query_token(r);
  const std::int64_t query = lane.query_head(h, r), head = lane.kv_head(h);
  const std::int64_t index = (lane.row * job.heads + query) * job.all + job.first + token;
  float* out = row;
  float lse = kNegativeInfinity;
  std::fill(out, out + dim, 0.0f);
  if (token < lane.plan.count) {
    if (total != 0) {
      const float inverse = 1.0f / total;
      for (std::int64_t d = 0; d < dim; ++d) out[d] = sums[d] * inverse;
      lse = total != total ? total : max + std::log(total);
      if (s.rotate) hadamard(out, dim);
    }
    if (s.null != nullptr)
      join_key(out, dim, lse, null_logit(lane, h, r, row + dim), s.null + head * dim);
    if (job.s_aux != nullptr) join_key(out, dim, lse, job.s_aux[query], nullptr);
  }
  write_row(job.queries[0].type, out, dim, job.out, index * dim);
  job.lse[index] = lse;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
