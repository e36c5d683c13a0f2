// Decode attention over some tiles of one (row, lane), and the merge of such pieces: online softmax
// (arXiv:1805.02867) over tiles, keys and values read once for all query heads that share them.
// Every format has a score pass and a value pass of its own; everything else is here, once.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "arena.h"
#include "attention_job.h"
#include "dequantize.h"
#include "numeric.h"
#include "scores_float.h"
#include "values_float.h"
#if CARAMBA_FAST_VNNI
#include "scores_int8.h"
#include "values_int8.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline float element(const HeadTensor& x, std::int64_t at) {
  if (x.type == Format::fp32) return static_cast<const float*>(x.data)[at];
  std::uint16_t padded[kLanes] = {static_cast<const std::uint16_t*>(x.data)[at]};
  return (x.type == Format::fp16 ? load_half(padded) : load_bfloat(padded))[0];
}

// One row of a (B, H, T, D) tensor as fp32.
inline void read_row(const HeadTensor& x, std::int64_t b, std::int64_t h, std::int64_t t,
                     std::int64_t dim, float* to) {
  const std::int64_t at = b * x.batch + h * x.head + t * x.token;
  std::int64_t d = 0;
  if (x.dim == 1) {
    for (; d + kLanes <= dim; d += kLanes) {
      Floats v;
      if (x.type == Format::fp32)
        v = load_as<Floats>(static_cast<const float*>(x.data) + at + d);
      else if (x.type == Format::fp16)
        v = load_half(static_cast<const std::uint16_t*>(x.data) + at + d);
      else
        v = load_bfloat(static_cast<const std::uint16_t*>(x.data) + at + d);
      store_as(v, to + d);
    }
  }
  for (; d < dim; ++d) to[d] = element(x, at + d * x.dim);
}

inline void write_row(Format type, const float* from, std::int64_t dim, void* out,
                      std::int64_t at) {
  float padded[kLanes];
  for (std::int64_t d = 0; d < dim; d += kLanes) {
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kLanes, dim - d));
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, from + d, count * sizeof(float));
    if (type == Format::fp32) {
      std::memcpy(static_cast<float*>(out) + at + d, padded, count * sizeof(float));
    } else {
      std::uint16_t narrow[kLanes];
      if (type == Format::fp16)
        store_half(load_as<Floats>(padded), narrow);
      else
        store_bfloat(load_as<Floats>(padded), narrow);
      std::memcpy(static_cast<std::uint16_t*>(out) + at + d, narrow, count * sizeof(*narrow));
    }
  }
}

// The part of a lane's token that holds one head: whole blocks (32 values where there are none).
struct HeadSpan {
  std::int64_t first, width,
      inner;  // values before it, values in it, those of them before the head
  int blocks;
  HeadSpan() = default;
  HeadSpan(const StoredStream& s, std::int64_t head_in_lane) {
    const std::int64_t unit = is_quantized(s.format) ? s.block : 32;
    const std::int64_t begin = head_in_lane * s.dim, end = begin + s.dim;
    first = begin / unit * unit;
    width = (end + unit - 1) / unit * unit - first;
    inner = begin - first;
    blocks = static_cast<int>(width / unit);
  }
};

// A key stream as one head's queries meet it.
struct KeyHead {
  const StoredStream* stored;
  HeadSpan span;
  float* query;     // (rows, width) fp32, transformed, times the factor; zeros outside the head
  float* constant;  // (rows) q . mean, or null
  float* waves;     // (rows, pairs, 2) what meets cos and sin, or null
  float* inside;  // (pairs, 2, kInside) cos and sin of the tokens of a tile of the phase table, or
                  // null
#if CARAMBA_FAST_VNNI
  const HeadBytes* bytes;  // null where the integer passes do not serve
  QueryUnit* units;        // of 16 bits
  QueryUnit* short_units;  // of 8; of q8_0 what 16 bits leave
#endif
};

// Everything one head of a lane accumulates.
struct HeadState {
  KeyHead keys[kMostStreams - 1];
  HeadSpan value;
  float *most, *total;  // (rows) largest score so far, sum of exponentials relative to it
  float* sums;          // (rows, value width) weighted values
#if CARAMBA_FAST_VNNI
  const HeadBytes* bytes;
  float* unit_sums;  // (rows, unit width) the same of tiles summed in integers, in the order of
                     // value_half
  std::int64_t unit_width;
#endif
};

// Tokens of a tile of the phase table, and room for a vector that begins with the last.
inline constexpr int kInside = kPhaseTile + 16;

struct Tile {
  Source source;
  std::int64_t start;
  int count;
  bool masked;
  std::uint64_t used;  // tokens that some query sees
};

class Worker {
 public:
  Worker(const AttentionJob& a, Arena& arena) : a_(a), arena_(arena) {
    rows_ = static_cast<int>(a.rows_per_head());
  }

  void run(const Task& task) {
    b_ = task.row;
    lane_ = task.lane;
    row_ = &a_.rows[b_];
    heads_ = static_cast<int>(std::min(a_.heads_per_lane, a_.kv_heads - lane_ * a_.heads_per_lane));
    arena_.reset();
    prepare();
    std::int64_t index = 0;
    for (int i = 0; i < row_->segment_count; ++i) {
      const Segment& segment = row_->segments[i];
      const std::int64_t aligned =
          segment.source == Source::codes ? segment.start / a_.tile * a_.tile : segment.start;
      for (std::int64_t at = aligned; at < segment.stop; at += a_.tile, ++index) {
        if (index < task.first || index >= task.last) continue;
        const std::int64_t start = std::max(at, segment.start);
        const std::int64_t stop = std::min(at + a_.tile, segment.stop);
        attend({segment.source, start, static_cast<int>(stop - start), false, ~std::uint64_t{0}});
      }
    }
    for (int h = 0; h < heads_; ++h) {
      settle(states_[h]);
      const std::int64_t head = lane_ * a_.heads_per_lane + h;
      if (task.partial >= 0)
        keep(states_[h], a_.partials + task.partial * a_.partial_size + h * partial_of_head());
      else
        for (int r = 0; r < rows_; ++r)
          finish(head, r, states_[h].most[r], states_[h].total[r],
                 states_[h].sums + r * states_[h].value.width + states_[h].value.inner);
    }
  }

  // Merges the partial results of one (row, lane) and writes what they give.
  void merge(std::int64_t row, std::int64_t lane, const std::int64_t* partials, int count) {
    b_ = row;
    lane_ = lane;
    row_ = &a_.rows[b_];
    heads_ = static_cast<int>(std::min(a_.heads_per_lane, a_.kv_heads - lane_ * a_.heads_per_lane));
    const std::int64_t dim = a_.value().dim;
    arena_.reset();
    float* sum = arena_.take<float>(dim);
    temporary_ = arena_.take<float>(dim + widest());
    for (int h = 0; h < heads_; ++h)
      for (int r = 0; r < rows_; ++r) {
        float most = kNegativeInfinity, total = 0;
        for (int i = 0; i < count; ++i) most = std::max(most, part(partials[i], h, r)[0]);
        std::fill(sum, sum + dim, 0.0f);
        for (int i = 0; i < count; ++i) {
          const float* from = part(partials[i], h, r);
          if (from[0] == kNegativeInfinity && !(from[1] != from[1])) continue;
          const float weight = most == kNegativeInfinity ? 1.0f : std::exp(from[0] - most);
          total += from[1] * weight;
          for (std::int64_t d = 0; d < dim; ++d) sum[d] += weight * from[2 + d];
        }
        finish(lane_ * a_.heads_per_lane + h, r, most, total, sum);
      }
  }

  static std::int64_t partial_of_head(const AttentionJob& a) {
    return a.rows_per_head() * (a.value().dim + 2);
  }

 private:
  std::int64_t partial_of_head() const { return partial_of_head(a_); }
  const float* part(std::int64_t slot, int h, int r) const {
    return a_.partials + slot * a_.partial_size + h * partial_of_head() + r * (a_.value().dim + 2);
  }
  std::int64_t widest() const {
    std::int64_t most = 0;
    for (int i = 0; i < a_.streams; ++i) most = std::max(most, a_.stored[i].dim);
    return most;
  }

  // -- queries ----------------------------------------------------------------------------

  void prepare() {
    temporary_ = arena_.take<float>(2 * widest() + 64);
    scores_ = arena_.take<float>(static_cast<std::int64_t>(rows_) * kScoreRow);
    peaks_ = arena_.take<float>(rows_);
    for (int h = 0; h < heads_; ++h) {
      HeadState& state = states_[h];
      for (int i = 0; i + 1 < a_.streams; ++i) prepare_keys(state.keys[i], i, h);
      const StoredStream& value = a_.value();
      state.value = HeadSpan(value, h);
      state.most = arena_.take<float>(rows_);
      state.total = arena_.take<float>(rows_);
      std::fill(state.most, state.most + rows_, kNegativeInfinity);
      std::fill(state.total, state.total + rows_, 0.0f);
      state.sums = arena_.zeros(rows_ * state.value.width);
#if CARAMBA_FAST_VNNI
      state.bytes = bytes_of(value, state.value);
      if (state.bytes != nullptr) {
        state.unit_width = state.bytes->sums();
        state.unit_sums = arena_.zeros(rows_ * state.unit_width);
      }
#endif
    }
    std::int64_t widths[2] = {0, 0};  // of keys, of values
    for (int h = 0; h < heads_; ++h) {
      for (int i = 0; i + 1 < a_.streams; ++i)
        widths[0] = std::max(widths[0], states_[h].keys[i].span.width);
      widths[1] = std::max(widths[1], states_[h].value.width);
    }
    decoded_ = arena_.take<float>(kTile * std::max(widths[0], widths[1]) + 16);
#if CARAMBA_FAST_VNNI
    weight_groups_ = arena_.take<WeightGroup>(kRowsAtOnce * kMostGroups);
    flips_ = arena_.take<Flips>(1);
#endif
  }

  void prepare_keys(KeyHead& key, int stream, int h) {
    const StoredStream& s = a_.stored[stream];
    const std::int64_t head = lane_ * a_.heads_per_lane + h, dim = s.dim;
    const Basis& basis = s.basis;
    key.stored = &s;
    key.span = HeadSpan(s, h);
    key.query = arena_.zeros(rows_ * key.span.width);
    key.constant = basis.mean != nullptr ? arena_.take<float>(rows_) : nullptr;
    key.waves = basis.pair_count > 0 ? arena_.take<float>(rows_ * basis.pair_count * 2) : nullptr;
    key.inside = key.waves != nullptr ? arena_.zeros(basis.pair_count * 2 * kInside) : nullptr;
    for (std::int64_t p = 0; p < basis.pair_count; ++p) {
      const float* table = basis.phases + (head * basis.pair_count + p) * basis.phase_rows * 2;
      float* cosine = key.inside + p * 2 * kInside;
      for (int t = 0; t < kPhaseTile; ++t) {
        cosine[t] = table[2 * t];
        cosine[kInside + t] = table[2 * t + 1];
      }
    }
    for (int r = 0; r < rows_; ++r) {
      float* q = temporary_;
      read_query(stream, head, r, q);
      if (key.constant != nullptr) {
        float sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) sum += q[d] * basis.mean[head * dim + d];
        key.constant[r] = sum;
      }
      for (std::int64_t p = 0; p < basis.pair_count; ++p) {
        const std::int64_t pair = head * basis.pair_count + p;
        const float first = q[basis.pairs[2 * pair]], second = q[basis.pairs[2 * pair + 1]];
        const float* b = basis.bias + 2 * pair;
        float* wave = key.waves + (r * basis.pair_count + p) * 2;
        wave[0] = first * b[0] + second * b[1];
        wave[1] = second * b[0] - first * b[1];
      }
      if (basis.scale != nullptr)
        for (std::int64_t d = 0; d < dim; ++d) q[d] *= basis.scale[head * dim + d];
      if (basis.rotate) hadamard(q, dim);
      std::copy(q, q + dim, key.query + r * key.span.width + key.span.inner);
    }
#if CARAMBA_FAST_VNNI
    key.bytes = bytes_of(s, key.span);
    if (key.bytes != nullptr) {
      if (s.format == Format::q8_0) prepare_units<Format::q8_0>(key);
      if (s.format == Format::q4_0) prepare_units<Format::q4_0>(key);
      if (s.format == Format::nf4) prepare_units<Format::nf4>(key);
    }
#endif
  }

#if CARAMBA_FAST_VNNI
  template <Format F>
  void prepare_units(KeyHead& key) {
    const HeadBytes& bytes = *key.bytes;
    const std::int64_t units = bytes.units;
    key.units = arena_.take<QueryUnit>(rows_ * units);
    key.short_units = arena_.take<QueryUnit>(rows_ * units);
    for (int r = 0; r < rows_; ++r) {
      const float* query = key.query + r * key.span.width;
      QueryUnit *two = key.units + r * units, *one = key.short_units + r * units;
      prepare_query<F, 2>(query, bytes, two, F == Format::q8_0 ? one : nullptr);
      if (F != Format::q8_0) prepare_query<F, 1>(query, bytes, one, nullptr);
    }
  }

  template <Format F>
  void score_units_of(const KeyHead& key, const char* codes, const ScaleSteps& steps,
                      const Tile& tile) {
    const HeadBytes& bytes = *key.bytes;
    const std::int64_t stride = key.stored->codes.token;
    const auto score = [&](auto bits, const QueryUnit* units, int first, int rows) {
      score_int8<F, decltype(bits)::value>(units + first * bytes.units, bytes, rows, codes, stride,
                                           steps, tile.count, scores_ + first * kScoreRow);
    };
    using OneByte = std::integral_constant<int, 1>;
    using TwoBytes = std::integral_constant<int, 2>;
    // q8_0 takes two bytes, or three, 4 bits one or two. Of tiles a query sees a part of, others
    // may see more: those take the most whatever is in them.
    constexpr bool kThree = F == Format::q8_0;
    Enough<F> enough(bytes, steps, codes, stride, tile.count);
    const QueryUnit* judged = kThree ? key.units : key.short_units;
    const auto in_few = [&](int r) {
      return sees_whole(tile, r) && enough(judged + r * bytes.units);
    };
    if (kThree) score(TwoBytes{}, key.units, 0, rows_);
    int first = 0;  // of a run of queries that take the same number of bytes
    bool few = in_few(0);
    for (int r = 1; r <= rows_; ++r) {
      const bool next = r < rows_ && in_few(r);
      if (r < rows_ && next == few) continue;
      if (kThree != few)
        score(OneByte{}, key.short_units, first, r - first);
      else if (!kThree)
        score(TwoBytes{}, key.units, first, r - first);
      first = r;
      few = next;
    }
  }
#endif

  // The query of row r of a kv head, times its factor.
  void read_query(int stream, std::int64_t head, int r, float* to) const {
    const std::int64_t dim = a_.stored[stream].dim;
    read_row(a_.queries[stream], b_, head * a_.groups + r / a_.tokens, r % a_.tokens, dim, to);
    for (std::int64_t d = 0; d < dim; ++d) to[d] *= a_.factors[stream];
  }

  // -- one tile ---------------------------------------------------------------------------

  // Rows of the buffers a tile is read from.
  static const char* tokens_of(const AttentionJob& a, const Buffer& buffer, std::int64_t b,
                               std::int64_t lane, std::int64_t position, bool paged) {
    if (!paged) return buffer.at(b, lane, position);
    const std::int64_t page = a.table[b * a.table_row + position / a.slots];
    return buffer.at(std::clamp<std::int64_t>(page, 0, a.pages - 1), lane, position % a.slots);
  }

  const char* side(const Buffer& buffer, const Tile& tile) const {
    const std::int64_t slot =
        tile.source == Source::tail ? tile.start % a_.ring : tile.start - row_->pad;
    return buffer.at(b_, lane_, slot);
  }

  bool visible(std::int64_t query, std::int64_t key, Source source) const {
    const std::int64_t distance = query - key;
    if (source == Source::codes ? distance < a_.residual : distance < 0) return false;
    if (source == Source::tail && distance >= a_.residual) return false;
    if (a_.window < 0 || distance <= a_.window) return true;
    return key - row_->pad < a_.kept;
  }

  // Fills tile.masked, tile.used and masks_ (tokens of the tile that query token t sees).
  void look(Tile& tile) {
    const std::int64_t first = row_->length - row_->count, last = row_->length - 1;
    const std::int64_t newest = tile.start + tile.count - 1;
    bool all = row_->count == a_.tokens;
    if (tile.source == Source::codes) all = all && newest <= first - a_.residual;
    if (tile.source == Source::tail)
      all = all && newest <= first && last - tile.start < a_.residual;
    if (tile.source == Source::sinks) all = all && newest <= first;
    if (a_.window >= 0)
      all = all && (last - tile.start <= a_.window || newest - row_->pad < a_.kept);
    tile.masked = !all;
    tile.used = tile.count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << tile.count) - 1;
    if (all) return;
    std::fill(masks_, masks_ + a_.tokens, 0);
    std::uint64_t used = 0;
    for (std::int64_t t = 0; t < row_->count; ++t) {
      for (int i = 0; i < tile.count; ++i)
        if (visible(first + t, tile.start + i, tile.source)) masks_[t] |= std::uint64_t{1} << i;
      used |= masks_[t];
    }
    tile.used = used;
  }

  // Whether a query sees all of a tile, and the tile is as long as tiles are.
  bool sees_whole(const Tile& tile, int r) const {
    const std::uint64_t all =
        tile.count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << tile.count) - 1;
    return tile.count == a_.tile && (!tile.masked || masks_[r % a_.tokens] == all);
  }

  void attend(Tile tile) {
    look(tile);
    if (tile.used == 0) return;
    for (int h = 0; h < heads_; ++h) {
      HeadState& state = states_[h];
      std::memset(scores_, 0, static_cast<std::size_t>(rows_) * kScoreRow * sizeof(float));
      for (int i = 0; i + 1 < a_.streams; ++i) score(state.keys[i], h, tile);
      if (!weigh_scores(state, tile)) continue;
      add_values(state, tile);
    }
  }

  // scores_ += what one key stream says.
  void score(const KeyHead& key, int h, const Tile& tile) {
    const StoredStream& s = *key.stored;
    shift(key, h, tile);
    if (tile.source != Source::codes) {
      const Buffer& buffer = tile.source == Source::tail ? s.tail : s.sink;
      kScoreTiles[1](key.query, key.span.width, rows_, side(buffer, tile) + 2 * key.span.first,
                     buffer.token, tile.count, scores_);
      return;
    }
    const char* codes = at(s.codes, tile.start) + key.span.first * bits_of(s.format) / 8;
    if (!is_quantized(s.format)) {
      kScoreTiles[static_cast<int>(s.format)](key.query, key.span.width, rows_, codes,
                                              s.codes.token, tile.count, scores_);
      return;
    }
    const char* scales = at(s.scales, tile.start) + key.span.first / s.block * 2;
#if CARAMBA_FAST_VNNI
    if (key.bytes != nullptr && readable(*key.bytes, tile)) {
      const HeadBytes& bytes = *key.bytes;
      const ScaleSteps steps = tile_scales_.steps(scales, s.scales.token, bytes, tile.count);
      if (s.format == Format::q8_0)
        score_units_of<Format::q8_0>(key, codes, steps, tile);
      else if (s.format == Format::q4_0)
        score_units_of<Format::q4_0>(key, codes, steps, tile);
      else
        score_units_of<Format::nf4>(key, codes, steps, tile);
      return;
    }
#endif
    dequantizer(s.format, s.block)(codes, s.codes.token, scales, s.scales.token, key.span.blocks,
                                   tile.count, decoded_);
    kScoreTiles[0](key.query, key.span.width, rows_, decoded_, key.span.width * 4, tile.count,
                   scores_);
  }

  const char* at(const Buffer& buffer, std::int64_t position) const {
    return tokens_of(a_, buffer, b_, lane_, position, a_.table != nullptr);
  }

  // What centering took out of the logits: q . mean, and for each pair A cos + B sin of the token's
  // angle. A tile of the phase table turns A and B; the angles within it are the same for every
  // tile.
  void shift(const KeyHead& key, int h, const Tile& tile) {
    if (key.constant != nullptr)
      for (int r = 0; r < rows_; ++r)
        for (int i = 0; i < tile.count; i += kLanes) {
          float* to = scores_ + r * kScoreRow + i;
          store_as(load_as<Floats>(to) + key.constant[r], to);
        }
    if (key.waves == nullptr) return;
    const Basis& basis = key.stored->basis;
    const std::int64_t head = lane_ * a_.heads_per_lane + h, first = tile.start - row_->pad;
    const std::int64_t end = (basis.phase_rows - kPhaseTile) * kPhaseTile;
    // Tokens outside of the table are padding, which nobody sees.
    const std::int64_t last = std::min(first + tile.count, end);
    for (std::int64_t t = std::max<std::int64_t>(first, 0); t < last;) {
      const std::int64_t stop = std::min((t / kPhaseTile + 1) * kPhaseTile, last);
      turn(key, basis, head, t, static_cast<int>(stop - t), stop == last, scores_ + (t - first));
      t = stop;
    }
  }

  // `count` tokens from t on, all of one tile of the phase table. `open`: what lies behind them may
  // be overwritten.
  void turn(const KeyHead& key, const Basis& basis, std::int64_t head, std::int64_t t, int count,
            bool open, float* scores) const {
    const std::int64_t pairs = basis.pair_count, offset = t % kPhaseTile;
    const int whole = open ? count : count / kLanes * kLanes;
    for (int r = 0; r < rows_; ++r) {
      const float* wave = key.waves + r * pairs * 2;
      float* to = scores + r * kScoreRow;
      for (std::int64_t p = 0; p < pairs; p += kPairsAtOnce) {
        const auto some = static_cast<int>(std::min<std::int64_t>(kPairsAtOnce, pairs - p));
        Floats a[kPairsAtOnce], b[kPairsAtOnce];
        for (int k = 0; k < some; ++k) {
          const float* start = basis.phases + (head * pairs + p + k) * basis.phase_rows * 2 +
                               (kPhaseTile + t / kPhaseTile) * 2;
          const float* w = wave + 2 * (p + k);
          a[k] = splat(w[0] * start[0] + w[1] * start[1]);
          b[k] = splat(w[1] * start[0] - w[0] * start[1]);
        }
        const float* inside = key.inside + p * 2 * kInside + offset;
        for (int i = 0; i < whole; i += kLanes) {
          Floats sum = load_as<Floats>(to + i);
          for (int k = 0; k < some; ++k) {
            const float* cosine = inside + k * 2 * kInside + i;
            sum = fused(a[k], load_as<Floats>(cosine), sum);
            sum = fused(b[k], load_as<Floats>(cosine + kInside), sum);
          }
          store_as(sum, to + i);
        }
        for (int i = whole; i < count; ++i)
          for (int k = 0; k < some; ++k) {
            const float* cosine = inside + k * 2 * kInside + i;
            to[i] += a[k][0] * cosine[0] + b[k][0] * cosine[kInside];
          }
      }
    }
  }

  // scores_ become weights relative to the new maximum; false if nobody sees anything.
  bool weigh_scores(HeadState& state, const Tile& tile) {
    // All rows step by step, not row by row: each step waits for the one before.
    for (int r = 0; r < rows_; ++r) {
      float* row = scores_ + r * kScoreRow;
      if (a_.softcap > 0) cap(row, tile.count);
      for (int i = tile.count; i < kTile; ++i) row[i] = kNegativeInfinity;
      if (tile.masked) hide(row, masks_[r % a_.tokens], tile.count);
      Floats most = splat(kNegativeInfinity);
      for (int i = 0; i < kTile; i += kLanes) most = greater(load_as<Floats>(row + i), most);
      peaks_[r] = greatest_of(most);
    }
    bool any = false;
    for (int r = 0; r < rows_; ++r) {
      const float most = peaks_[r];
      any = any || std::max(state.most[r], most) != kNegativeInfinity;
      if (most > state.most[r]) raise(state, r, most);
    }
    for (int r = 0; r < rows_; ++r) {
      float* row = scores_ + r * kScoreRow;
      const float now = state.most[r];
      if (now == kNegativeInfinity) {  // also where every score seen is NaN: that must show
        bool damaged = false;
        for (int i = 0; i < tile.count; ++i) damaged = damaged || row[i] != row[i];
        if (damaged) state.total[r] = std::numeric_limits<float>::quiet_NaN();
        std::fill(row, row + kTile, 0.0f);
        continue;  // its peak stays -infinity
      }
      Floats total{};
      for (int i = 0; i < kTile; i += kLanes) {
        const Floats weight = exponential(load_as<Floats>(row + i) - now);
        total += weight;
        store_as(weight, row + i);
      }
      state.total[r] += sum_of(total);
      peaks_[r] = (peaks_[r] - now) * 1.44269504f - static_cast<float>(exponent_of(state.total[r]));
    }
    return any;
  }

  void cap(float* row, int count) const {
    for (int i = 0; i < count; i += kLanes) {
      const Floats capped = hyperbolic_tangent(load_as<Floats>(row + i) / a_.softcap);
      store_as(capped * a_.softcap, row + i);
    }
  }

  static void hide(float* row, std::uint64_t seen, int count) {
    for (int i = 0; i < count; ++i)
      if (!(seen >> i & 1)) row[i] = kNegativeInfinity;
  }

  // A new maximum: what is summed so far becomes relative to it.
  void raise(HeadState& state, int r, float now) {
    const float before = state.most[r];
    const float decay = before == kNegativeInfinity ? 0.0f : std::exp(before - now);
    state.most[r] = now;
    state.total[r] *= decay;
    rescale(state, r, decay);
  }

  void rescale(HeadState& state, int r, float factor) {
    scale_by(state.sums + r * state.value.width, state.value.width, factor);
#if CARAMBA_FAST_VNNI
    if (state.bytes != nullptr) {
      scale_by(state.unit_sums + r * state.unit_width, state.unit_width, factor);
    }
#endif
  }

  static void scale_by(float* x, std::int64_t count, float factor) {
    for (std::int64_t i = 0; i < count; i += kLanes)
      store_as(load_as<Floats>(x + i) * factor, x + i);
  }

  void add_values(HeadState& state, const Tile& tile) {
    const StoredStream& s = a_.value();
    const HeadSpan& span = state.value;
    if (tile.source != Source::codes || !is_quantized(s.format)) {
      const bool stored = tile.source == Source::codes;
      const Buffer& buffer = stored ? s.codes : tile.source == Source::tail ? s.tail : s.sink;
      const Format type = stored ? s.format : Format::fp16;
      const char* values = stored ? at(buffer, tile.start) : side(buffer, tile);
      add_floats(state, tile, type, values + span.first * bits_of(type) / 8, buffer.token);
      return;
    }
    const char* codes = at(s.codes, tile.start) + span.first * bits_of(s.format) / 8;
    const char* scales = at(s.scales, tile.start) + span.first / s.block * 2;
#if CARAMBA_FAST_VNNI
    if (state.bytes != nullptr && readable(*state.bytes, tile)) {
      const HeadBytes& bytes = *state.bytes;
      tile_scales_.widen(tile_scales_.steps(scales, s.scales.token, bytes, tile.count), bytes,
                         s.format == Format::q4_0);
      if (!tile_scales_.odd) {
        if (s.format == Format::q8_0) add_integers<Format::q8_0>(state, bytes, tile, codes);
        if (s.format == Format::q4_0) add_integers<Format::q4_0>(state, bytes, tile, codes);
        if (s.format == Format::nf4) add_integers<Format::nf4>(state, bytes, tile, codes);
        return;
      }
    }
#endif
    dequantizer(s.format, s.block)(codes, s.codes.token, scales, s.scales.token, span.blocks,
                                   tile.count, decoded_);
    add_floats(state, tile, Format::fp32, reinterpret_cast<const char*>(decoded_), span.width * 4);
  }

  // Values nobody sees may be anything: runs of those somebody sees are added.
  void add_floats(HeadState& state, const Tile& tile, Format type, const char* values,
                  std::int64_t stride) {
    const ValueTile add = kValueTiles[static_cast<int>(type)];
    for (int i = 0; i < tile.count;) {
      if (!(tile.used >> i & 1)) {
        ++i;
        continue;
      }
      int stop = i + 1;
      while (stop < tile.count && (tile.used >> stop & 1)) ++stop;
      add(scores_ + i, rows_, values + i * stride, stride, stop - i, state.sums, state.value.width);
      i = stop;
    }
  }

#if CARAMBA_FAST_VNNI
  static const HeadBytes* bytes_of(const StoredStream& s, const HeadSpan& span) {
    const int bits = bits_of(s.format);
    if (!is_quantized(s.format) || !HeadBytes::fits(bits, s.block, span.blocks)) return nullptr;
    const bool pairs = s.codes.token == kUnit / 2 && span.width * bits == 8 * s.codes.token &&
                       s.scales.token == 2 * span.blocks;
    return head_bytes(bits, s.block, span.blocks, pairs ? 2 : 1);
  }

  // Whether the token behind an odd number of tokens taken in pairs may be read.
  bool readable(const HeadBytes& bytes, const Tile& tile) const {
    return bytes.fold == 1 || tile.count % 2 == 0 || tile.start % a_.slots + tile.count < a_.slots;
  }

  template <Format F>
  void add_integers(HeadState& state, const HeadBytes& bytes, const Tile& tile, const char* codes) {
    if (F == Format::q4_0) take_signs(bytes, tile_scales_, *flips_);
    const auto faint = [&](int r) { return F != Format::q8_0 && peaks_[r] <= kFaint; };
    for (int first = 0, rows = 1; first < rows_; first += rows) {
      for (rows = 1; rows < kRowsAtOnce && first + rows < rows_; ++rows)
        if (faint(first + rows) != faint(first)) break;  // a row's weights are its own matter
      if (faint(first))
        add_rows<F, F == Format::q8_0 ? 2 : 1>(state, bytes, tile, codes, first, rows);
      else
        add_rows<F, 2>(state, bytes, tile, codes, first, rows);
    }
  }

  // The same for some rows, with weights of BYTES bytes.
  template <Format F, int BYTES>
  void add_rows(HeadState& state, const HeadBytes& bytes, const Tile& tile, const char* codes,
                int first, int rows) {
    for (int r = 0; r < rows; ++r) {
      const float* weights = scores_ + (first + r) * kScoreRow;
      WeightGroup* to = weight_groups_ + r * bytes.groups;
      if (bytes.fold == 2)
        weigh<F, BYTES, 2>(weights, bytes, tile_scales_, *flips_, to);
      else
        weigh<F, BYTES, 1>(weights, bytes, tile_scales_, *flips_, to);
    }
    value_int8<F, BYTES>(weight_groups_, bytes, rows, codes, a_.value().codes.token, *flips_,
                         tile.count, state.unit_sums + first * state.unit_width, state.unit_width);
  }
#endif

  // -- results ----------------------------------------------------------------------------

  // Brings everything into state.sums.
  void settle(HeadState& state) {
#if CARAMBA_FAST_VNNI
    if (state.bytes == nullptr) return;
    const HeadBytes& bytes = *state.bytes;
    for (int r = 0; r < rows_; ++r) {
      float* to = state.sums + r * state.value.width;
      const float* from = state.unit_sums + r * state.unit_width;
      for (int u = 0; u < bytes.units; ++u) {
        for (int vector = 0; vector < 4 * bytes.nibbles; ++vector)
          for (int i = 0; i < kUnitLanes * 4; ++i, ++from) {
            const int value = bytes.value[u][vector][i];
            if (value >= 0) to[value] += *from;
          }
      }
    }
#else
    (void)state;
#endif
  }

  void keep(const HeadState& state, float* to) const {
    const std::int64_t dim = a_.value().dim;
    for (int r = 0; r < rows_; ++r, to += dim + 2) {
      to[0] = state.most[r];
      to[1] = state.total[r];
      const float* from = state.sums + r * state.value.width + state.value.inner;
      std::copy(from, from + dim, to + 2);
    }
  }

  // Writes one query's result: normalized, in the model's basis, with the null key and the sink
  // logit.
  void finish(std::int64_t head, int r, float most, float total, const float* sums) {
    const StoredStream& s = a_.value();
    const std::int64_t dim = s.dim, token = r % a_.tokens, query = head * a_.groups + r / a_.tokens;
    const std::int64_t index = (b_ * a_.heads + query) * a_.all + a_.first + token;
    float* out = temporary_;
    float lse = kNegativeInfinity;
    std::fill(out, out + dim, 0.0f);
    if (token < row_->count) {
      if (total != 0) {
        const float inverse = 1.0f / total;
        for (std::int64_t d = 0; d < dim; ++d) out[d] = sums[d] * inverse;
        lse = total != total ? total : most + std::log(total);
        if (s.basis.rotate) hadamard(out, dim);
        if (s.basis.scale != nullptr)
          for (std::int64_t d = 0; d < dim; ++d) out[d] *= s.basis.scale[head * dim + d];
      }
      if (s.null != nullptr) {
        float logit = 0;
        float* q = temporary_ + dim;
        for (int i = 0; i + 1 < a_.streams; ++i) {
          read_query(i, head, r, q);
          const float* null = a_.stored[i].null + head * a_.stored[i].dim;
          for (std::int64_t d = 0; d < a_.stored[i].dim; ++d) logit += q[d] * null[d];
        }
        if (a_.softcap > 0) logit = a_.softcap * std::tanh(logit / a_.softcap);
        join(out, dim, lse, logit, s.null + head * dim);
      }
      if (a_.s_aux != nullptr) join(out, dim, lse, a_.s_aux[query], nullptr);
    }
    write_row(a_.queries[0].type, out, dim, a_.out, index * dim);
    a_.lse[index] = lse;
  }

  // Another key of one logit and value (0 for none) joins the softmax.
  static void join(float* out, std::int64_t dim, float& lse, float logit, const float* value) {
    const float most = std::max(lse, logit);
    if (lse == kNegativeInfinity && logit == kNegativeInfinity) return;  // a NaN has to show
    const float mine = std::exp(lse - most), other = std::exp(logit - most), sum = mine + other;
    for (std::int64_t d = 0; d < dim; ++d)
      out[d] = (out[d] * mine + (value == nullptr ? 0.0f : value[d] * other)) / sum;
    lse = most + std::log(sum);
  }

  static constexpr int kPairsAtOnce = 4, kRowsAtOnce = 4;
  // log2 of a weight's share of the total that 8 bits of it, and of what is smaller in its tile,
  // are enough for.
  static constexpr float kFaint = -6;
  static constexpr int kMostHeads = 32;  // of a lane: head_dim 1 would be the narrowest

  const AttentionJob& a_;
  Arena& arena_;
  int rows_, heads_ = 0;
  std::int64_t b_ = 0, lane_ = 0;
  const RowPlan* row_ = nullptr;
  HeadState states_[kMostHeads];
  float *temporary_ = nullptr, *scores_ = nullptr, *decoded_ = nullptr;
  // (rows) the largest score of a tile, then log2 of at least its weight's share of the total so
  // far
  float* peaks_ = nullptr;
  std::uint64_t masks_[kMostQueryTokens];
#if CARAMBA_FAST_VNNI
  TileScales tile_scales_;
  WeightGroup* weight_groups_ = nullptr;
  Flips* flips_ = nullptr;
#endif
};

inline void attend_tasks(const AttentionJob& a, const Task* tasks, std::int64_t count) {
  Worker worker(a, thread_arena());
  for (std::int64_t i = 0; i < count; ++i) worker.run(tasks[i]);
}

inline void merge_partials(const AttentionJob& a, std::int64_t row, std::int64_t lane,
                           const std::int64_t* partials, int count) {
  Worker(a, thread_arena()).merge(row, lane, partials, count);
}

// Two attentions over disjoint keys become the one over both, row by row.
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

inline std::int64_t partial_floats(const AttentionJob& a) {
  return a.heads_per_lane * Worker::partial_of_head(a);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
