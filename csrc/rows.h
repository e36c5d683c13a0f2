// Rows, one head's values of one token: read and written as fp32, whatever their element type.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "streams.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// kLanes values, from element `at` on.
inline Floats load_values(Format type, const void* data, std::int64_t at) {
  if (type == Format::fp32) return load_as<Floats>(static_cast<const float*>(data) + at);
  const auto* from = static_cast<const std::uint16_t*>(data) + at;
  return type == Format::fp16 ? load_half(from) : load_bfloat(from);
}

inline void store_values(Format type, Floats v, void* data, std::int64_t at) {
  if (type == Format::fp32) return store_as(v, static_cast<float*>(data) + at);
  auto* to = static_cast<std::uint16_t*>(data) + at;
  return type == Format::fp16 ? store_half(v, to) : store_bfloat(v, to);
}

inline float load_value(Format type, const void* data, std::int64_t at) {
  if (type == Format::fp32) return static_cast<const float*>(data)[at];
  std::uint16_t padded[kLanes] = {static_cast<const std::uint16_t*>(data)[at]};
  return (type == Format::fp16 ? load_half(padded) : load_bfloat(padded))[0];
}

// One row of a (B, H, T, D) tensor; `dim` is D.
inline void read_row(const HeadTensor& x, std::int64_t b, std::int64_t h, std::int64_t t,
                     std::int64_t dim, float* to) {
  const std::int64_t at = b * x.batch + h * x.head + t * x.token;
  std::int64_t d = 0;
  if (x.dim == 1)
    for (; d + kLanes <= dim; d += kLanes) store_as(load_values(x.type, x.data, at + d), to + d);
  for (; d < dim; ++d) to[d] = load_value(x.type, x.data, at + d * x.dim);
}

// Writes `dim` values from element `at` on.
inline void write_row(Format type, const float* from, std::int64_t dim, void* out,
                      std::int64_t at) {
  std::int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store_values(type, load_as<Floats>(from + d), out, at + d);
  if (d == dim) return;
  float padded[kLanes] = {}, rest[kLanes];  // `rest` has room for values of any type
  std::copy(from + d, from + dim, padded);
  store_values(type, load_as<Floats>(padded), rest, 0);
  const std::int64_t bytes = bits_of(type) / 8;
  std::memcpy(static_cast<char*>(out) + (at + d) * bytes, rest,
              static_cast<std::size_t>((dim - d) * bytes));
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
