// Checks the tensors of an op's arguments and describes them by the records of streams.h, so that
// kernels stay within the tensors. Included by the op bindings alone.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "streams.h"

namespace caramba_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Format element_format(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float:
      return Format::fp32;
    case ScalarType::Half:
      return Format::fp16;
    case ScalarType::BFloat16:
      return Format::bf16;
    default:
      STD_TORCH_CHECK(false, name, " has dtype ", torch::headeronly::toString(type),
                      "; allowed are float32, float16, bfloat16");
  }
}

inline Format element_format(const Tensor& x, const char* name) {
  return element_format(x.scalar_type(), name);
}

inline Format format_named(const std::string& kind, const char* name) {
  static constexpr const char* kNames[] = {"fp32", "fp16", "bf16",       "q8_0",
                                           "q4_0", "nf4",  "q8_channel", "q4_channel"};
  for (int i = 0; i < 8; ++i)
    if (kind == kNames[i]) return static_cast<Format>(i);
  STD_TORCH_CHECK(false, name, "_kind is '", kind,
                  "'; allowed are fp32, fp16, bf16, q8_0, q4_0, nf4, q8_channel, q4_channel");
}

// The index of a fit in kFits.
inline int fit_index(const std::string& fit) {
  for (int i = 0; i < kFitCount; ++i)
    if (fit == kFits[i]) return i;
  STD_TORCH_CHECK(false, "fit is '", fit, "'; allowed are amax, mse");
}

inline ScalarType stored_type(Format format) {
  static constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                          ScalarType::Char,  ScalarType::Byte, ScalarType::Byte,
                                          ScalarType::Byte,  ScalarType::Byte};
  return kTypes[static_cast<int>(format)];
}

// Values of a token's lane, from the last dimension of its codes.
inline std::int64_t lane_values(const Tensor& codes, Format format) {
  const std::int64_t width = codes.dim() == 4 ? codes.size(3) : 0;
  return is_quantized(format) ? width * 8 / bits_of(format) : width;
}

inline Tensor made_contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

inline void check_cpu(const Tensor& x, const std::string& name) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be a cpu tensor");
}

// A buffer to write needs memory of its own for each element; an expanded one has none.
inline void check_writable(const MaybeTensor& x, const std::string& name) {
  for (std::int64_t i = 0; x.has_value() && i < x->dim(); ++i)
    STD_TORCH_CHECK(x->stride(i) != 0 || x->size(i) <= 1, name, " has elements that share memory (",
                    "stride 0 in dimension ", i,
                    "); a buffer that is written needs memory for each");
}

// (B, lanes, n, width) with contiguous slots.
inline Buffer buffer_of(const Tensor& x, const std::string& name, ScalarType type) {
  check_cpu(x, name);
  STD_TORCH_CHECK(x.scalar_type() == type, name, " has dtype ",
                  torch::headeronly::toString(x.scalar_type()), "; ",
                  torch::headeronly::toString(type), " is needed");
  STD_TORCH_CHECK(x.dim() == 4, name, " has ", x.dim(),
                  " dimensions; (B, lanes, n, width) is needed");
  const bool contiguous =
      (x.stride(3) == 1 || x.size(3) == 1) && (x.stride(2) == x.size(3) || x.size(2) <= 1);
  STD_TORCH_CHECK(contiguous, name, " has strides (", x.stride(0), ", ", x.stride(1), ", ",
                  x.stride(2), ", ", x.stride(3), "); the slots of a lane must be contiguous");
  const auto bytes = static_cast<std::int64_t>(x.element_size());
  return {static_cast<char*>(x.mutable_data_ptr()), x.stride(0) * bytes, x.stride(1) * bytes,
          x.size(3) * bytes};
}

inline HeadTensor heads_of(const Tensor& x, const char* name) {
  check_cpu(x, name);
  STD_TORCH_CHECK(x.dim() == 4, name, " has ", x.dim(), " dimensions; (B, H, T, D) is needed");
  return {x.const_data_ptr(), element_format(x, name), x.stride(0), x.stride(1), x.stride(2),
          x.stride(3)};
}

// The tensors of one stream, in the order of the schemas.
struct StreamTensors {
  const char* name;
  const Tensor& codes;
  const MaybeTensor& scales;
  const std::string& kind;
  const MaybeTensor &tail, &sink;
  bool rotate;
};

// Checks one stored stream; lanes, slots and the first dimension are those of `lead`, which the
// first stream fills.
struct Lead {
  std::int64_t rows = -1, lanes = -1, slots = -1;
};

// Scales and zeros of a stream by channel: (B, lanes, S / group, 2 * lane_dim).
inline void place_groups(const StreamTensors& s, const Lead& lead, StoredStream& stream) {
  const std::string name = s.name;
  stream.scales = buffer_of(*s.scales, name + "_scales", ScalarType::Half);
  const std::int64_t groups = s.scales->size(2);
  stream.group = groups > 0 ? lead.slots / groups : 32;
  STD_TORCH_CHECK(s.scales->size(0) == lead.rows && s.scales->size(1) == lead.lanes &&
                      stream.group * groups == lead.slots && block_index(stream.group) >= 0,
                  name, "_scales: ", groups, " groups for ", lead.slots,
                  " slots; groups of 32, 64 and 128 tokens are allowed");
  STD_TORCH_CHECK(s.scales->size(3) == 2 * stream.lane_dim && stream.lane_dim % 32 == 0, name,
                  "_scales has rows of ", s.scales->size(3), "; scales and zeros of ",
                  stream.lane_dim, " values, a multiple of 32, are needed");
}

inline StoredStream stream_of(const StreamTensors& s, std::int64_t dim, std::int64_t heads_per_lane,
                              Lead& lead) {
  const std::string name = s.name;
  StoredStream stream;
  stream.format = format_named(s.kind, s.name);
  stream.dim = dim;
  stream.lane_dim = dim * heads_per_lane;
  stream.codes = buffer_of(s.codes, name + "_codes", stored_type(stream.format));
  if (lead.lanes < 0) lead = {s.codes.size(0), s.codes.size(1), s.codes.size(2)};
  STD_TORCH_CHECK(s.codes.size(0) == lead.rows && s.codes.size(1) == lead.lanes &&
                      s.codes.size(2) == lead.slots,
                  name, "_codes: streams differ in (B, lanes, S)");
  const bool quantized = is_quantized(stream.format);
  const std::int64_t width =
      quantized ? stream.lane_dim * bits_of(stream.format) / 8 : stream.lane_dim;
  STD_TORCH_CHECK(s.codes.size(3) == width, name, "_codes has rows of ", s.codes.size(3),
                  "; heads of ", dim, " in lanes of ", heads_per_lane, " need something else");
  STD_TORCH_CHECK(quantized == s.scales.has_value(), name,
                  "_scales: only quantized kinds have scales");
  if (is_by_channel(stream.format)) {
    place_groups(s, lead, stream);
  } else if (quantized) {
    stream.scales = buffer_of(*s.scales, name + "_scales", ScalarType::Half);
    const std::int64_t blocks = s.scales->size(3);
    stream.block = static_cast<int>(blocks > 0 ? stream.lane_dim / blocks : 0);
    STD_TORCH_CHECK(s.scales->size(0) == lead.rows && s.scales->size(1) == lead.lanes &&
                        s.scales->size(2) == lead.slots,
                    name, "_scales: codes and scales differ in (B, lanes, S)");
    STD_TORCH_CHECK(block_index(stream.block) >= 0 && stream.block * blocks == stream.lane_dim,
                    name, "_scales has ", blocks, " scales for ", stream.lane_dim,
                    " values; blocks of 32, 64 and 128 are allowed");
  } else {
    STD_TORCH_CHECK(stream.lane_dim % 32 == 0, name, "'s lanes hold ", stream.lane_dim,
                    " values; a multiple of 32 is needed");
  }
  for (const auto* part : {&s.tail, &s.sink}) {
    if (!part->has_value()) continue;
    const char* what = part == &s.tail ? "_tail" : "_sink";
    (part == &s.tail ? stream.tail : stream.sink) =
        buffer_of(**part, name + what, ScalarType::Half);
    STD_TORCH_CHECK((*part)->size(1) == lead.lanes && (*part)->size(3) == stream.lane_dim, name,
                    what, " does not have the lanes of the codes");
  }
  stream.rotate = s.rotate;
  return stream;
}

// The block table, (B, pages) int32 with contiguous rows: fills the three fields of a job or a
// call.
template <class Work>
void place_table(const Tensor& given, Work& work, std::vector<Tensor>& held) {
  check_cpu(given, "block_table");
  STD_TORCH_CHECK(
      given.dim() == 2 && given.size(0) == work.batch && given.scalar_type() == ScalarType::Int,
      "block_table must be (B, pages) int32");
  Tensor table = given;
  if (table.stride(1) != 1 && table.size(1) > 1)
    held.push_back(table = torch::stable::contiguous(table));
  work.table = static_cast<const std::int32_t*>(table.const_data_ptr());
  work.table_row = table.stride(0);
  work.pages_per_row = table.size(1);
}

// (B,) int32; null for none. If a copy is needed, `held` keeps it alive.
inline const std::int32_t* row_integers(const MaybeTensor& x, const std::string& name,
                                        std::int64_t batch, std::vector<Tensor>& held) {
  if (!x.has_value()) return nullptr;
  check_cpu(*x, name);
  STD_TORCH_CHECK(x->scalar_type() == ScalarType::Int, name, " has dtype ",
                  torch::headeronly::toString(x->scalar_type()), "; ",
                  torch::headeronly::toString(ScalarType::Int), " is needed");
  STD_TORCH_CHECK(x->numel() == batch, name, " has ", x->numel(), " elements; ", batch,
                  " are needed");
  if (x->is_contiguous()) return static_cast<const std::int32_t*>(x->const_data_ptr());
  held.push_back(torch::stable::contiguous(*x));
  return static_cast<const std::int32_t*>(held.back().const_data_ptr());
}

}  // namespace caramba_fast
