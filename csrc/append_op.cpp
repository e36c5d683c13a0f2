// append_ and decoupled_append_: divides torch's arguments into lanes of tokens for threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "append_job.h"
#include "arguments.h"
#include "dispatch.h"
#include "ops.h"
#include "planned.h"

namespace caramba_fast {
namespace {

// Values that justify a thread.
constexpr std::int64_t kGrainValues = 16384;

// A repeatable call: where the tokens go, and how much work they are.
struct AppendPlan : Planned {
  AppendJob job;
  std::int64_t values = 0;  // of all streams, per lane of a token
  bool grouped = false;     // streams by channel: lanes are not divided by tokens
  bool turns = false;       // applies RoPE to keys and queries
};

struct Rotary {
  const MaybeTensor &q, &cos, &sin;
  MaybeTensor& out;
};

struct AppendCommon {
  const Tensor& start;
  const MaybeTensor &block_table, &cache_leftpad, &query_lens;
};

// Raises unless all are given, or none.
void check_whole(const Rotary& rotary) {
  const bool given = rotary.q.has_value();
  STD_TORCH_CHECK(rotary.cos.has_value() == given && rotary.sin.has_value() == given &&
                      rotary.out.has_value() == given,
                  "rotary_q, rotary_cos, rotary_sin and rotary_out are given together");
}

// Checks the tensors of RoPE and rotates the keys.
Tensor turned_keys(const Rotary& rotary, const Tensor& keys) {
  const Tensor &q = *rotary.q, &out = *rotary.out;
  check_angles(q, *rotary.cos, *rotary.sin);
  check_angles(keys, *rotary.cos, *rotary.sin);
  heads_of(q, "rotary_q");
  check_cpu(out, "rotary_out");
  STD_TORCH_CHECK(
      q.size(0) == keys.size(0) && q.size(2) == keys.size(2) && q.size(3) == keys.size(3),
      "rotary_q and the keys may differ in heads alone");
  STD_TORCH_CHECK(out.dim() == 4 && out.is_contiguous() && out.scalar_type() == q.scalar_type(),
                  "rotary_out must be contiguous and of the dtype of rotary_q");
  for (int i = 0; i < 4; ++i)
    STD_TORCH_CHECK(out.size(i) == q.size(i), "rotary_out and rotary_q differ in dimension ", i);
  return turned(keys, "the keys", made_contiguous(*rotary.cos), made_contiguous(*rotary.sin));
}

void turn_queries(const Rotary& rotary) {
  Tensor place = *rotary.out;
  turned(*rotary.q, "rotary_q", made_contiguous(*rotary.cos), made_contiguous(*rotary.sin), &place);
}

// Null for unquantized formats.
QuantizeBlocks quantizer(Format format, int block, const std::string& fit) {
  if (!is_quantized(format) || is_by_channel(format)) return nullptr;
  return kernels().store->formats[static_cast<int>(format) - kValueTypes].quantize[fit_index(
      fit)][block_index(block)][static_cast<int>(Format::fp32)];
}

// Where each row's tokens go, and copies kept for it.
std::vector<Tensor> place(const AppendCommon& c, AppendJob& job) {
  std::vector<Tensor> held;
  if (c.block_table.has_value()) place_table(*c.block_table, job, held);
  job.start = row_integers(c.start, "start", job.batch, held);
  job.leftpad = row_integers(c.cache_leftpad, "cache_leftpad", job.batch, held);
  job.query_lens = row_integers(c.query_lens, "query_lens", job.batch, held);
  return held;
}

// Appends with threads; items are (row, lane), divided further by tokens if a thread would get too
// little.
void run(const AppendJob& job, std::int64_t values, bool grouped) {
  const auto append = kernels().store->append;
  const std::int64_t items = job.batch * job.lanes;
  const std::int64_t all = items * job.tokens;
  const auto lanes = [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t row = begin / job.lanes, first = begin % job.lanes;
      const std::int64_t last = std::min(job.lanes, first + end - begin);
      for (int i = 0; i < job.streams; ++i)
        append(job, job.stream[i], row, first, last, 0, job.tokens);
      begin += last - first;
    }
  };
  const auto tokens = [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t item = begin / job.tokens, from = begin % job.tokens;
      const std::int64_t to = std::min(job.tokens, from + end - begin);
      for (int i = 0; i < job.streams; ++i)
        append(job, job.stream[i], item / job.lanes, item % job.lanes, item % job.lanes + 1, from,
               to);
      begin += to - from;
    }
  };
  if (all * values < 2 * kGrainValues || torch::stable::get_num_threads() == 1)
    lanes(0, items);
  else if (grouped)
    torch::stable::parallel_for(
        0, items, std::max<std::int64_t>(1, kGrainValues / (values * job.tokens)), lanes);
  else
    torch::stable::parallel_for(0, all, std::max<std::int64_t>(1, kGrainValues / values), tokens);
}

// The fit of a stream's scales.
struct Fit {
  const std::string& name;
  const MaybeTensor& query_rms;
};

// (lanes, lane_dim) fp32; null for none.
const float* query_rms_of(const MaybeTensor& x, const std::string& stream, const Lead& lead,
                          std::int64_t lane_dim) {
  if (!x.has_value()) return nullptr;
  check_cpu(*x, stream + "_query_rms");
  STD_TORCH_CHECK(x->scalar_type() == ScalarType::Float && x->dim() == 2 &&
                      x->size(0) == lead.lanes && x->size(1) == lane_dim && x->is_contiguous(),
                  stream, "_query_rms must be (", lead.lanes, ", ", lane_dim,
                  ") float32 and contiguous");
  return static_cast<const float*>(x->const_data_ptr());
}

void append(const AppendCommon& c, const Rotary& rotary, const StreamTensors* streams,
            const Tensor** given, const Fit* fits, int count) {
  AppendPlan plan;
  AppendJob& job = plan.job;
  const Tensor& first = *given[0];
  STD_TORCH_CHECK(first.dim() == 4, streams[0].name, "_new has ", first.dim(),
                  " dimensions; (B, H_kv, T, D) is needed");
  job.batch = first.size(0);
  job.heads = first.size(1);
  job.tokens = first.size(2);
  job.streams = count;
  if (job.batch * job.heads * job.tokens == 0) return;
  MaybeTensor keys;
  check_whole(rotary);
  if (rotary.q.has_value()) {
    heads_of(*given[count - 2], streams[count - 2].name);
    keys = turned_keys(rotary, *given[count - 2]);
    given[count - 2] = &*keys;
    plan.turns = true;
  }
  Lead lead;
  for (int i = 0; i < count; ++i) {
    const StreamTensors& s = streams[i];
    AppendStream& stream = job.stream[i];
    const Tensor& x = *given[i];
    const std::string name = s.name;
    check_writable(s.codes, name + "_codes");
    check_writable(s.scales, name + "_scales");
    check_writable(s.tail, name + "_tail");
    check_writable(s.sink, name + "_sink");
    stream.given = heads_of(x, s.name);
    STD_TORCH_CHECK(x.size(0) == job.batch && x.size(1) == job.heads && x.size(2) == job.tokens,
                    s.name, "_new: streams differ in (B, H_kv, T)");
    const std::int64_t lane_dim = lane_values(s.codes, format_named(s.kind, s.name));
    const std::int64_t per_lane = x.size(3) > 0 ? lane_dim / x.size(3) : 0;
    STD_TORCH_CHECK(per_lane > 0 && (i == 0 || per_lane == job.heads_per_lane), s.name,
                    "_codes: lanes of ", lane_dim, " do not fit heads of ", x.size(3));
    job.heads_per_lane = per_lane;
    stream.stored = stream_of(s, x.size(3), per_lane, lead);
    stream.quantize = quantizer(stream.stored.format, stream.stored.block, fits[i].name);
    stream.divides = fit_index(fits[i].name) == fit_index("mse");
    stream.query_rms = query_rms_of(fits[i].query_rms, s.name, lead, lane_dim);
    const auto slots = [&](const MaybeTensor& part) {
      STD_TORCH_CHECK(!part.has_value() || part->size(0) == job.batch, s.name,
                      ": sides need B=", job.batch);
      return part.has_value() ? part->size(2) : 0;
    };
    stream.ring = slots(s.tail);
    stream.sink_len = slots(s.sink);
    if (stream.ring == 0) stream.stored.tail.data = nullptr;
    if (stream.sink_len == 0) stream.stored.sink.data = nullptr;
    STD_TORCH_CHECK(stream.stored.group == 1 || stream.ring >= stream.stored.group, s.name,
                    " is stored in groups of ", stream.stored.group,
                    " tokens and needs a tail of so many, it has ", stream.ring);
    plan.grouped = plan.grouped || stream.stored.group > 1;
    plan.values += lane_dim;
  }
  job.lanes = lead.lanes;
  job.slots = lead.slots;
  job.pages = lead.rows;
  STD_TORCH_CHECK(job.lanes == (job.heads + job.heads_per_lane - 1) / job.heads_per_lane,
                  "the cache has ", job.lanes, " lanes of ", job.heads_per_lane, " heads for ",
                  job.heads, " heads");
  if (c.block_table.has_value()) {
    STD_TORCH_CHECK(job.slots > 0, "pages have no slots");
  } else {
    STD_TORCH_CHECK(lead.rows == job.batch, "the cache has B=", lead.rows,
                    ", the new tokens B=", job.batch);
  }

  const auto held = place(c, job);
  if (plan.turns) turn_queries(rotary);
  run(job, plan.values, plan.grouped);
  if (!is_recording()) return;
  plan.hold(streams, count);
  for (int i = 0; i < count; ++i)
    if (fits[i].query_rms.has_value()) plan.hold(*fits[i].query_rms);
  plan.paged = c.block_table.has_value();
  keep(std::make_shared<AppendPlan>(std::move(plan)));
}

}  // namespace

void append_(Tensor& k_codes, MaybeTensor k_scales, Tensor& v_codes, MaybeTensor v_scales,
             const Tensor& k_new, const Tensor& v_new, const Tensor& start,
             const std::string& k_kind, const std::string& v_kind, const MaybeTensor& block_table,
             const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
             const MaybeTensor& k_tail, const MaybeTensor& k_sink, bool rotate_k,
             const std::string& fit_k, const MaybeTensor& k_query_rms, const MaybeTensor& v_tail,
             const MaybeTensor& v_sink, bool rotate_v, const std::string& fit_v,
             const MaybeTensor& v_query_rms, const MaybeTensor& rotary_q,
             const MaybeTensor& rotary_cos, const MaybeTensor& rotary_sin, MaybeTensor rotary_out) {
  const StreamTensors streams[] = {{"k", k_codes, k_scales, k_kind, k_tail, k_sink, rotate_k},
                                   {"v", v_codes, v_scales, v_kind, v_tail, v_sink, rotate_v}};
  const Tensor* given[] = {&k_new, &v_new};
  const Fit fits[] = {{fit_k, k_query_rms}, {fit_v, v_query_rms}};
  append({start, block_table, cache_leftpad, query_lens},
         {rotary_q, rotary_cos, rotary_sin, rotary_out}, streams, given, fits, 2);
}

void decoupled_append_(
    Tensor& k_sem_codes, MaybeTensor k_sem_scales, Tensor& k_geo_codes, MaybeTensor k_geo_scales,
    Tensor& v_codes, MaybeTensor v_scales, const Tensor& k_sem_new, const Tensor& k_geo_new,
    const Tensor& v_new, const Tensor& start, const std::string& k_sem_kind,
    const std::string& k_geo_kind, const std::string& v_kind, const MaybeTensor& block_table,
    const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens, const MaybeTensor& k_sem_tail,
    const MaybeTensor& k_sem_sink, bool rotate_k_sem, const std::string& fit_k_sem,
    const MaybeTensor& k_sem_query_rms, const MaybeTensor& k_geo_tail,
    const MaybeTensor& k_geo_sink, bool rotate_k_geo, const std::string& fit_k_geo,
    const MaybeTensor& k_geo_query_rms, const MaybeTensor& v_tail, const MaybeTensor& v_sink,
    bool rotate_v, const std::string& fit_v, const MaybeTensor& v_query_rms,
    const MaybeTensor& rotary_q, const MaybeTensor& rotary_cos, const MaybeTensor& rotary_sin,
    MaybeTensor rotary_out) {
  const StreamTensors streams[] = {
      {"k_sem", k_sem_codes, k_sem_scales, k_sem_kind, k_sem_tail, k_sem_sink, rotate_k_sem},
      {"k_geo", k_geo_codes, k_geo_scales, k_geo_kind, k_geo_tail, k_geo_sink, rotate_k_geo},
      {"v", v_codes, v_scales, v_kind, v_tail, v_sink, rotate_v}};
  const Tensor* given[] = {&k_sem_new, &k_geo_new, &v_new};
  const Fit fits[] = {
      {fit_k_sem, k_sem_query_rms}, {fit_k_geo, k_geo_query_rms}, {fit_v, v_query_rms}};
  append({start, block_table, cache_leftpad, query_lens},
         {rotary_q, rotary_cos, rotary_sin, rotary_out}, streams, given, fits, 3);
}

void append_planned(std::int64_t number, const Tensor& first, const Tensor& second,
                    const Tensor& start, const MaybeTensor& block_table,
                    const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
                    const MaybeTensor& rotary_q, const MaybeTensor& rotary_cos,
                    const MaybeTensor& rotary_sin, MaybeTensor rotary_out,
                    const MaybeTensor& third) {
  const auto plan = kept_call<AppendPlan>(number, "append_");
  AppendJob job = plan->job;
  const Tensor* given[] = {&first, &second, third.has_value() ? &*third : nullptr};
  STD_TORCH_CHECK(third.has_value() == (job.streams == 3), "the plan has ", job.streams,
                  " streams");
  check_places(*plan);
  check_paged(*plan, block_table);
  STD_TORCH_CHECK(rotary_q.has_value() == plan->turns,
                  "rotary_q: a kept call is repeated with it, or without, as it was made");
  const Rotary rotary{rotary_q, rotary_cos, rotary_sin, rotary_out};
  check_whole(rotary);
  MaybeTensor keys;
  if (plan->turns) {
    const int at = job.streams - 2;
    heads_of(*given[at], "a stream's new tokens");
    keys = turned_keys(rotary, *given[at]);
    given[at] = &*keys;
  }
  for (int i = 0; i < job.streams; ++i) {
    HeadTensor& had = job.stream[i].given;
    const HeadTensor has = heads_of(*given[i], "a stream's new tokens");
    STD_TORCH_CHECK(given[i]->size(0) == job.batch && given[i]->size(1) == job.heads &&
                        given[i]->size(2) == job.tokens &&
                        given[i]->size(3) == job.stream[i].stored.dim && has.type == had.type,
                    "the new tokens have not the shape or dtype of the plan");
    had = has;
  }
  const auto held = place({start, block_table, cache_leftpad, query_lens}, job);
  if (plan->turns) turn_queries(rotary);
  run(job, plan->values, plan->grouped);
}

}  // namespace caramba_fast
