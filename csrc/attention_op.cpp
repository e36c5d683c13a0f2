// Attention of any number of query tokens over a cache, standard and decoupled: divides torch's
// arguments into pieces, tasks and threads, and merges.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "attention_plan.h"
#include "dispatch.h"
#include "ops.h"
#include "planned.h"

namespace caramba_fast {
namespace {

// Tiles times query rows that justify a thread: about 20 microseconds.
constexpr std::int64_t kGrain = 128;
constexpr std::int64_t kWidestHead = 1024;
// Replaces anything larger, so that positions can be added to it.
constexpr std::int64_t kEndless = std::int64_t{1} << 40;

// Numbers of any type as fp32.
std::vector<float> as_floats(const Tensor& x, const char* name) {
  check_cpu(x, name);
  const Tensor dense = made_contiguous(x);
  std::vector<float> found(static_cast<std::size_t>(x.numel()));
  const Format format = element_format(x, name);
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (format == Format::fp32) {
      found[i] = static_cast<const float*>(dense.const_data_ptr())[i];
    } else {
      const std::uint16_t bits = static_cast<const std::uint16_t*>(dense.const_data_ptr())[i];
      found[i] = format == Format::fp16 ? static_cast<float>(torch::headeronly::Half(
                                              bits, torch::headeronly::Half::from_bits()))
                                        : static_cast<float>(torch::headeronly::BFloat16(
                                              bits, torch::headeronly::BFloat16::from_bits()));
    }
  }
  return found;
}

std::vector<std::int64_t> sizes_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}

// Arguments that are not of one stream.
struct Common {
  const Tensor& cache_seqlens;
  std::int64_t n_kv_heads;
  const MaybeTensor &block_table, &cache_leftpad, &query_lens;
  std::int64_t residual_len;
  const MaybeTensor& s_aux;
  const std::vector<std::int64_t>& window_size;
  std::int64_t num_sink_tokens;
  double softcap;
  std::int64_t num_splits;
  bool prompt;
};

// A repeatable call: the streams, visibility, and the division of work.
struct AttentionPlan : Planned {
  AttentionJob work;
  std::int64_t residual_len = 0, num_sink_tokens = 0, num_splits = 0;
  std::vector<std::int64_t> window_size;
  double softcap = 0;
};

// Everything of one call; `work` points into it.
struct Call {
  AttentionJob work;
  Plan plan;
  std::vector<std::vector<float>> numbers;  // null keys and values, s_aux
  std::vector<Tensor> held;                 // copies of tensors in another layout

  void place(const Common& c, const Lead& lead, const StreamTensors* streams, int count);
  void see(const Common& c);
  void run(const Common& c);
  std::tuple<Tensor, Tensor> run_pieces(const Common& c, const Tensor& q);
};

void Call::place(const Common& c, const Lead& lead, const StreamTensors* streams, int count) {
  work.lanes = lead.lanes;
  work.slots = lead.slots;
  work.pages = lead.rows;
  STD_TORCH_CHECK(work.lanes == (work.kv_heads + work.heads_per_lane - 1) / work.heads_per_lane,
                  "the cache has ", work.lanes, " lanes of ", work.heads_per_lane,
                  " heads for n_kv_heads=", work.kv_heads);
  if (c.block_table.has_value()) {
    place_table(*c.block_table, work, held);
    STD_TORCH_CHECK(work.slots % 32 == 0, "pages have ", work.slots,
                    " slots; a multiple of 32 is needed");
    work.tile = work.slots % kTile == 0 ? kTile : 32;
  } else {
    STD_TORCH_CHECK(lead.rows == work.batch, "the cache has B=", lead.rows,
                    ", q has B=", work.batch);
  }
  std::int64_t sides[2] = {0, 0};  // slots of tail and of sinks, the same for all streams
  for (int i = 0; i < count; ++i) {
    const MaybeTensor* parts[2] = {&streams[i].tail, &streams[i].sink};
    for (int which = 0; which < 2; ++which) {
      const std::int64_t slots = parts[which]->has_value() ? (*parts[which])->size(2) : 0;
      STD_TORCH_CHECK(i == 0 || slots == sides[which], "tails and sinks of all streams must agree");
      STD_TORCH_CHECK(slots == 0 || (*parts[which])->size(0) == work.batch, streams[i].name,
                      ": tail and sinks need B=", work.batch);
      sides[which] = slots;
    }
  }
  work.ring = sides[0];
  work.sink_len = sides[1];
  work.residual = work.ring > 0 ? c.residual_len : 0;
  STD_TORCH_CHECK(c.residual_len >= 0 && c.residual_len <= work.ring,
                  "residual_len needs a tail in every stream, and no shorter one");
  for (int i = 0; i < count; ++i) work.group = std::max(work.group, work.stored[i].group);
  const std::int64_t needed = work.residual + work.group - 1 + work.all - 1;
  STD_TORCH_CHECK(!work.has_tail() || needed <= work.ring, "T=", work.all,
                  " and residual_len=", work.residual, " need a tail of ", needed, ", it has ",
                  work.ring);
}

// Visibility in the current piece: its rows end with its queries.
void Call::see(const Common& c) {
  STD_TORCH_CHECK(c.window_size.size() == 2, "window_size needs two numbers");
  work.window = std::min(c.window_size[0], kEndless);
  work.kept = std::min(c.num_sink_tokens, kEndless);
  work.softcap = static_cast<float>(c.softcap);
  const auto* lengths = row_integers(c.cache_seqlens, "cache_seqlens", work.batch, held);
  const auto* pads = row_integers(c.cache_leftpad, "cache_leftpad", work.batch, held);
  const auto* counts = row_integers(c.query_lens, "query_lens", work.batch, held);
  const std::int64_t pages = work.table == nullptr ? 1 : work.pages > 0 ? work.pages_per_row : 0;
  const std::int64_t capacity = work.slots * pages;
  plan.rows.clear();
  for (std::int64_t b = 0; b < work.batch; ++b) {
    const std::int64_t real =
        counts == nullptr ? work.all : std::min<std::int64_t>(counts[b], work.all);
    const std::int64_t count = std::clamp<std::int64_t>(real - work.first, 0, work.tokens);
    const std::int64_t length = lengths[b] - std::max<std::int64_t>(real - work.first - count, 0);
    plan.rows.push_back(plan_row(work, length, count, pads == nullptr ? 0 : pads[b], capacity));
  }
  work.rows = plan.rows.data();
}

std::tuple<Tensor, Tensor> Call::run_pieces(const Common& c, const Tensor& q) {
  Tensor out = torch::stable::new_empty(q, {work.batch, work.heads, work.all, work.value().dim},
                                        q.scalar_type());
  Tensor lse = torch::stable::new_empty(q, {work.batch, work.heads, work.all}, ScalarType::Float);
  work.out = out.mutable_data_ptr();
  work.lse = static_cast<float*>(lse.mutable_data_ptr());
  const void* starts[kMostStreams - 1];
  for (int i = 0; i + 1 < work.streams; ++i) starts[i] = work.queries[i].data;
  const std::int64_t most = work.prompt ? kPieceTokens : kMostQueryTokens;
  for (work.first = 0; work.first < work.all; work.first += most) {
    work.tokens = std::min(most, work.all - work.first);
    for (int i = 0; i + 1 < work.streams; ++i) {
      const std::int64_t bytes = work.queries[i].type == Format::fp32 ? 4 : 2;
      work.queries[i].data =
          static_cast<const char*>(starts[i]) + work.first * work.queries[i].token * bytes;
    }
    see(c);
    run(c);
  }
  return {out, lse};
}

void Call::run(const Common& c) {
  std::int64_t seen = 0;  // tokens, since tiles of sinks and tail may be short
  for (const RowPlan& row : plan.rows)
    for (int i = 0; i < row.segment_count; ++i)
      seen += row.segments[i].stop - row.segments[i].start;
  const std::int64_t tiles = (seen * work.lanes + kTile - 1) / kTile;
  const std::int64_t cost = tiles * (4 + work.rows_per_head() * work.heads_per_lane);
  const std::int64_t threads = torch::stable::get_num_threads();
  const std::int64_t pieces = std::clamp<std::int64_t>(cost / kGrain, 1, threads);
  plan_tasks(plan, work.lanes, pieces, c.num_splits);
  const Kernels& isa = kernels();
  thread_local std::vector<float> partials;
  work.partial_size = isa.partial_floats(work);
  partials.resize(static_cast<std::size_t>(plan.partials * work.partial_size));
  work.partials = partials.data();
  const auto piece = [&](std::int64_t i) {
    const std::int64_t first = plan.cuts[static_cast<std::size_t>(i)];
    isa.attend(work, plan.tasks.data() + first, plan.cuts[static_cast<std::size_t>(i) + 1] - first);
  };
  if (pieces == 1) {
    piece(0);
  } else {
    torch::stable::parallel_for(0, pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) piece(i);
    });
  }
  std::vector<std::int64_t> parts;
  for (std::size_t i = 0; i < plan.tasks.size(); ++i) {
    const Task& task = plan.tasks[i];
    if (task.partial < 0) continue;
    parts.push_back(task.partial);
    const bool last = i + 1 == plan.tasks.size() || plan.tasks[i + 1].row != task.row ||
                      plan.tasks[i + 1].lane != task.lane;
    if (!last) continue;
    isa.merge(work, task.row, task.lane, parts.data(), static_cast<int>(parts.size()));
    parts.clear();
  }
}

std::tuple<Tensor, Tensor> attend(const Common& c, const Tensor* const* queries,
                                  const char* const* names, const std::optional<double>* factors,
                                  const StreamTensors* streams, const MaybeTensor* const* nulls,
                                  int count) {
  Call call;
  AttentionJob& work = call.work;
  const Tensor& q = *queries[0];
  work.streams = count;
  for (int i = 0; i + 1 < count; ++i) {
    work.queries[i] = heads_of(*queries[i], names[i]);
    STD_TORCH_CHECK(queries[i]->size(0) == q.size(0) && queries[i]->size(1) == q.size(1) &&
                        queries[i]->size(2) == q.size(2) &&
                        work.queries[i].type == work.queries[0].type,
                    "queries differ in shape or dtype");
    const std::int64_t dim = queries[i]->size(3);
    STD_TORCH_CHECK(dim >= 1 && dim <= kWidestHead, names[i], " has head_dim ", dim, "; 1 to ",
                    kWidestHead, " is allowed");
    work.factors[i] = static_cast<float>(
        factors[i].has_value() ? *factors[i] : 1 / std::sqrt(static_cast<double>(dim)));
  }
  work.batch = q.size(0);
  work.heads = q.size(1);
  work.all = q.size(2);
  work.prompt = c.prompt && work.all > kMostQueryTokens;
  work.kv_heads = c.n_kv_heads;
  STD_TORCH_CHECK(work.all >= 1, "q has no tokens; 1 or more are needed");
  STD_TORCH_CHECK(work.kv_heads > 0 && work.heads % work.kv_heads == 0, "q has ", work.heads,
                  " heads, not a multiple of n_kv_heads=", work.kv_heads);
  work.groups = work.heads / work.kv_heads;
  Lead lead;
  const auto values_of = [](const StreamTensors& s) {
    return lane_values(s.codes, format_named(s.kind, s.name));
  };
  const std::int64_t lane_dim = values_of(streams[0]);
  work.heads_per_lane = lane_dim / q.size(3);
  STD_TORCH_CHECK(work.heads_per_lane >= 1 && work.heads_per_lane <= 32, streams[0].name,
                  "_codes: lanes of ", lane_dim, " do not hold heads of ", q.size(3));
  for (int i = 0; i < count; ++i) {
    const std::int64_t dim =
        i + 1 < count ? queries[i]->size(3) : values_of(streams[i]) / work.heads_per_lane;
    work.stored[i] = stream_of(streams[i], dim, work.heads_per_lane, lead);
    if (!nulls[i]->has_value()) continue;
    STD_TORCH_CHECK((*nulls[i])->numel() == work.kv_heads * dim, "null_", streams[i].name, " has ",
                    (*nulls[i])->numel(), " elements; ", work.kv_heads * dim, " are needed");
    call.numbers.push_back(as_floats(**nulls[i], "a null key or value"));
    work.stored[i].null = call.numbers.back().data();
  }
  const bool nothing = !nulls[0]->has_value();
  for (int i = 0; i < count; ++i)
    STD_TORCH_CHECK(nulls[i]->has_value() != nothing, "null keys and values go together");
  if (c.s_aux.has_value()) {
    STD_TORCH_CHECK(c.s_aux->numel() == work.heads, "s_aux has ", c.s_aux->numel(), " elements; ",
                    work.heads, " are needed");
    call.numbers.push_back(as_floats(*c.s_aux, "s_aux"));
    work.s_aux = call.numbers.back().data();
  }
  call.place(c, lead, streams, count);
  // Copies of null keys, values and s_aux would not follow the caller's.
  if (is_recording() && call.numbers.empty()) {
    auto plan = std::make_shared<AttentionPlan>();
    plan->hold(streams, count);
    plan->paged = c.block_table.has_value();
    plan->work = work;
    plan->residual_len = c.residual_len;
    plan->num_sink_tokens = c.num_sink_tokens;
    plan->num_splits = c.num_splits;
    plan->window_size = c.window_size;
    plan->softcap = c.softcap;
    keep(std::move(plan));
  }
  return call.run_pieces(c, q);
}

}  // namespace

std::tuple<Tensor, Tensor> cached_attention(
    bool prompt, const Tensor& q, const Tensor& k_codes, const MaybeTensor& k_scales,
    const Tensor& v_codes, const MaybeTensor& v_scales, const Tensor& cache_seqlens,
    const std::string& k_kind, const std::string& v_kind, std::int64_t n_kv_heads,
    const MaybeTensor& block_table, const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
    std::int64_t residual_len, const MaybeTensor& k_tail, const MaybeTensor& k_sink, bool rotate_k,
    const MaybeTensor& v_tail, const MaybeTensor& v_sink, bool rotate_v, const MaybeTensor& null_k,
    const MaybeTensor& null_v, const MaybeTensor& s_aux, std::optional<double> softmax_scale,
    const std::vector<std::int64_t>& window_size, std::int64_t num_sink_tokens, double softcap,
    std::int64_t num_splits) {
  const StreamTensors streams[] = {{"k", k_codes, k_scales, k_kind, k_tail, k_sink, rotate_k},
                                   {"v", v_codes, v_scales, v_kind, v_tail, v_sink, rotate_v}};
  const Common common{cache_seqlens,   n_kv_heads,   block_table, cache_leftpad,
                      query_lens,      residual_len, s_aux,       window_size,
                      num_sink_tokens, softcap,      num_splits,  prompt};
  const Tensor* queries[] = {&q};
  const char* names[] = {"q"};
  const MaybeTensor* nulls[] = {&null_k, &null_v};
  return attend(common, queries, names, &softmax_scale, streams, nulls, 2);
}

std::tuple<Tensor, Tensor> decoupled_cached_attention(
    bool prompt, const Tensor& q_sem, const Tensor& q_geo, const Tensor& k_sem_codes,
    const MaybeTensor& k_sem_scales, const Tensor& k_geo_codes, const MaybeTensor& k_geo_scales,
    const Tensor& v_codes, const MaybeTensor& v_scales, const Tensor& cache_seqlens,
    const std::string& k_sem_kind, const std::string& k_geo_kind, const std::string& v_kind,
    std::int64_t n_kv_heads, const MaybeTensor& block_table, const MaybeTensor& cache_leftpad,
    const MaybeTensor& query_lens, std::int64_t residual_len, const MaybeTensor& k_sem_tail,
    const MaybeTensor& k_sem_sink, bool rotate_k_sem, const MaybeTensor& k_geo_tail,
    const MaybeTensor& k_geo_sink, bool rotate_k_geo, const MaybeTensor& v_tail,
    const MaybeTensor& v_sink, bool rotate_v, const MaybeTensor& null_k_sem,
    const MaybeTensor& null_k_geo, const MaybeTensor& null_v, const MaybeTensor& s_aux,
    std::optional<double> sem_scale, std::optional<double> geo_scale,
    const std::vector<std::int64_t>& window_size, std::int64_t num_sink_tokens, double softcap,
    std::int64_t num_splits) {
  const StreamTensors streams[] = {
      {"k_sem", k_sem_codes, k_sem_scales, k_sem_kind, k_sem_tail, k_sem_sink, rotate_k_sem},
      {"k_geo", k_geo_codes, k_geo_scales, k_geo_kind, k_geo_tail, k_geo_sink, rotate_k_geo},
      {"v", v_codes, v_scales, v_kind, v_tail, v_sink, rotate_v}};
  const Common common{cache_seqlens,   n_kv_heads,   block_table, cache_leftpad,
                      query_lens,      residual_len, s_aux,       window_size,
                      num_sink_tokens, softcap,      num_splits,  prompt};
  const Tensor* queries[] = {&q_sem, &q_geo};
  const char* names[] = {"q_sem", "q_geo"};
  const std::optional<double> factors[] = {sem_scale, geo_scale};
  const MaybeTensor* nulls[] = {&null_k_sem, &null_k_geo, &null_v};
  return attend(common, queries, names, factors, streams, nulls, 3);
}

std::tuple<Tensor, Tensor> attention_planned(std::int64_t number, const Tensor& q,
                                             const Tensor& cache_seqlens,
                                             const MaybeTensor& block_table,
                                             const MaybeTensor& cache_leftpad,
                                             const MaybeTensor& query_lens,
                                             const MaybeTensor& q_geo) {
  const auto plan = kept_call<AttentionPlan>(number, "attention");
  Call call;
  AttentionJob& work = call.work = plan->work;
  const Tensor* queries[] = {&q, q_geo.has_value() ? &*q_geo : nullptr};
  STD_TORCH_CHECK(q_geo.has_value() == (work.streams == 3), "the plan has ", work.streams,
                  " streams");
  check_places(*plan);
  check_paged(*plan, block_table);
  for (int i = 0; i + 1 < work.streams; ++i) {
    const HeadTensor has = heads_of(*queries[i], "q");
    STD_TORCH_CHECK(queries[i]->size(0) == work.batch && queries[i]->size(1) == work.heads &&
                        queries[i]->size(2) == work.all &&
                        queries[i]->size(3) == work.stored[i].dim &&
                        has.type == work.queries[i].type,
                    "q has not the shape or dtype of the plan");
    work.queries[i] = has;
  }
  if (block_table.has_value()) place_table(*block_table, work, call.held);
  const MaybeTensor no_s_aux;
  const Common common{cache_seqlens, work.kv_heads,     block_table,
                      cache_leftpad, query_lens,        plan->residual_len,
                      no_s_aux,      plan->window_size, plan->num_sink_tokens,
                      plan->softcap, plan->num_splits,  false};
  return call.run_pieces(common, q);
}

std::tuple<Tensor, Tensor> merge_state(const Tensor& out_a, const Tensor& lse_a,
                                       const Tensor& out_b, const Tensor& lse_b) {
  const Format type = element_format(out_a, "out_a");
  const std::int64_t rows = lse_a.numel(), dim = rows > 0 ? out_a.numel() / rows : 0;
  STD_TORCH_CHECK(element_format(out_b, "out_b") == type && out_b.numel() == out_a.numel() &&
                      lse_b.numel() == rows && rows * dim == out_a.numel(),
                  "out_a and out_b, lse_a and lse_b must have one shape and dtype");
  for (const Tensor* lse : {&lse_a, &lse_b})
    STD_TORCH_CHECK(lse->is_cpu() && lse->scalar_type() == ScalarType::Float,
                    "lse_a and lse_b must be float32 on cpu");
  STD_TORCH_CHECK(out_a.is_cpu() && out_b.is_cpu(), "out_a and out_b must be on cpu");
  const Tensor a = made_contiguous(out_a), b = made_contiguous(out_b);
  const Tensor la = made_contiguous(lse_a), lb = made_contiguous(lse_b);
  Tensor out = torch::stable::new_empty(a, sizes_of(out_a), out_a.scalar_type());
  Tensor lse = torch::stable::new_empty(a, sizes_of(lse_a), ScalarType::Float);
  const auto* from_a = static_cast<const char*>(a.const_data_ptr());
  const auto* from_b = static_cast<const char*>(b.const_data_ptr());
  const auto* lses_a = static_cast<const float*>(la.const_data_ptr());
  const auto* lses_b = static_cast<const float*>(lb.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  auto* to_lse = static_cast<float*>(lse.mutable_data_ptr());
  const std::int64_t row_bytes = dim * static_cast<std::int64_t>(out_a.element_size());
  const auto run = kernels().store->merge_states;
  if (rows > 0)
    torch::stable::parallel_for(
        0, rows, std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(dim, 1)),
        [&](std::int64_t begin, std::int64_t end) {
          run(type, from_a + begin * row_bytes, lses_a + begin, from_b + begin * row_bytes,
              lses_b + begin, to + begin * row_bytes, to_lse + begin, end - begin, dim);
        });
  return {out, lse};
}

}  // namespace caramba_fast
