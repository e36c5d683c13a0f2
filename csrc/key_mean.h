// What centering takes out of the scores. Keys are stored without their mean and without a bias
// that turns with the token's position as rotary embeddings do, so q . k of what is stored lacks
//
//   q . mean + sum over pairs p of A_p cos(t theta_p) + B_p sin(t theta_p)
//
// for the token at position t behind the padding. A and B are the query's alone. The angle of t is
// that of the first token of its stretch of kPhaseTile, which turns A and B once for many tokens,
// plus an angle that is the same in every stretch. Compiled once per instruction set, in that set's
// namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arena.h"
#include "attention_job.h"
#include "numeric.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// The queries of one kv head against the mean and the bias of one key stream.
class KeyMean {
 public:
  KeyMean(const Basis& basis, std::int64_t head, int query_rows, Arena& arena)
      : basis_(&basis), head_(head), query_rows_(query_rows) {
    const std::int64_t pairs = basis.pair_count;
    dots_ = basis.mean != nullptr ? arena.take<float>(query_rows) : nullptr;
    waves_ = pairs > 0 ? arena.take<float>(query_rows * pairs * 2) : nullptr;
    within_ = pairs > 0 ? arena.zeros(pairs * 2 * kWithin) : nullptr;
    for (std::int64_t p = 0; p < pairs; ++p) {
      const float* table = phases(p);
      float* cosine = within_ + p * 2 * kWithin;
      for (int t = 0; t < kPhaseTile; ++t) {
        cosine[t] = table[2 * t];
        cosine[kWithin + t] = table[2 * t + 1];
      }
    }
  }

  // Query row r, q (dim) as the model has it, times its factor.
  void take_query(int r, const float* q, std::int64_t dim) {
    if (dots_ != nullptr) {
      float sum = 0;
      for (std::int64_t d = 0; d < dim; ++d) sum += q[d] * basis_->mean[head_ * dim + d];
      dots_[r] = sum;
    }
    for (std::int64_t p = 0; p < basis_->pair_count; ++p) {
      const std::int64_t pair = head_ * basis_->pair_count + p;
      const float first = q[basis_->pairs[2 * pair]], second = q[basis_->pairs[2 * pair + 1]];
      const float* b = basis_->bias + 2 * pair;
      float* wave = waves_ + (r * basis_->pair_count + p) * 2;
      wave[0] = first * b[0] + second * b[1];
      wave[1] = second * b[0] - first * b[1];
    }
  }

  // Adds it to the scores of `count` tokens, the first being `first` tokens behind the padding.
  // What lies behind the scores in their rows may be overwritten.
  void add_to(float* scores, std::int64_t first, int count) const {
    if (dots_ != nullptr)
      for (int r = 0; r < query_rows_; ++r)
        for (int i = 0; i < count; i += kLanes) {
          float* to = scores + r * kScoreRow + i;
          store_as(load_as<Floats>(to) + dots_[r], to);
        }
    if (waves_ == nullptr) return;
    // Tokens outside of the table are padding, which nobody sees.
    const std::int64_t end = (basis_->phase_rows - kPhaseTile) * kPhaseTile;
    const std::int64_t last = std::min(first + count, end);
    for (std::int64_t t = std::max<std::int64_t>(first, 0); t < last;) {
      const std::int64_t stop = std::min((t / kPhaseTile + 1) * kPhaseTile, last);
      add_waves(scores + (t - first), t, static_cast<int>(stop - t), stop == last);
      t = stop;
    }
  }

 private:
  // Tokens of a stretch, and room for a vector that begins with the last.
  static constexpr int kWithin = kPhaseTile + 16;
  static constexpr int kPairsAtOnce = 4;

  // The table of one pair: (phase_rows, 2).
  const float* phases(std::int64_t pair) const {
    return basis_->phases + (head_ * basis_->pair_count + pair) * basis_->phase_rows * 2;
  }

  // `count` tokens from t on, all of one stretch. `open`: what lies behind them may be overwritten.
  CARAMBA_FAST_NOINLINE void add_waves(float* scores, std::int64_t t, int count, bool open) const {
    const std::int64_t pairs = basis_->pair_count, offset = t % kPhaseTile;
    const int whole = open ? count : count / kLanes * kLanes;
    for (int r = 0; r < query_rows_; ++r) {
      const float* wave = waves_ + r * pairs * 2;
      float* to = scores + r * kScoreRow;
      for (std::int64_t p = 0; p < pairs; p += kPairsAtOnce) {
        const auto some = static_cast<int>(std::min<std::int64_t>(kPairsAtOnce, pairs - p));
        Floats a[kPairsAtOnce], b[kPairsAtOnce];
        for (int k = 0; k < some; ++k) {
          const float* start = phases(p + k) + (kPhaseTile + t / kPhaseTile) * 2;
          const float* w = wave + 2 * (p + k);
          a[k] = splat(w[0] * start[0] + w[1] * start[1]);
          b[k] = splat(w[1] * start[0] - w[0] * start[1]);
        }
        const float* within = within_ + p * 2 * kWithin + offset;
        for (int i = 0; i < whole; i += kLanes) {
          Floats sum = load_as<Floats>(to + i);
          for (int k = 0; k < some; ++k) {
            const float* cosine = within + k * 2 * kWithin + i;
            sum = fused(a[k], load_as<Floats>(cosine), sum);
            sum = fused(b[k], load_as<Floats>(cosine + kWithin), sum);
          }
          store_as(sum, to + i);
        }
        for (int i = whole; i < count; ++i)
          for (int k = 0; k < some; ++k) {
            const float* cosine = within + k * 2 * kWithin + i;
            to[i] += a[k][0] * cosine[0] + b[k][0] * cosine[kWithin];
          }
      }
    }
  }

  const Basis* basis_;
  std::int64_t head_;  // kv head
  int query_rows_;
  float* dots_;    // (query rows) q . mean, or null
  float* waves_;   // (query rows, pairs, 2) A and B, or null
  float* within_;  // (pairs, 2, kWithin) cos and sin of the tokens of a stretch, or null
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
