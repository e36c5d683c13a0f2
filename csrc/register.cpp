// Binds the ops to torch, and implements quantize and dequantize: checks arguments, allocates,
// divides the work over threads. This file, the other *_op.cpp, arguments.h and planned.h use torch
// only through its stable ABI, so that one binary serves every torch from TORCH_TARGET_VERSION on.
// Schemas are defined in Python (caramba_fast/ops).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "dispatch.h"
#include "ops.h"

#ifdef __GLIBC__
// libstdc++ needs glibc 2.32 for this flag, which allows counting references without atomics.
// Defined here as false, the extension runs with any glibc that torch runs with.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

namespace caramba_fast {

// A string argument. torch's own conversion to std::string (up to 2.13 at least) leaks one per
// call; a generation makes millions of calls.
struct Text : std::string {};

}  // namespace caramba_fast

template <>
struct torch::stable::detail::ToImpl<caramba_fast::Text> {
  static caramba_fast::Text call(StableIValue value, std::uint64_t, bool) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    std::size_t length = 0;
    const char* data = nullptr;
    const bool read = torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
                      torch_string_c_str(handle, &data) == AOTI_TORCH_SUCCESS;
    caramba_fast::Text text;
    if (read) text.assign(data, length);
    if (torch_delete_string(handle) != AOTI_TORCH_SUCCESS || !read)
      throw std::runtime_error("a string argument cannot be read");
    return text;
  }
};

namespace caramba_fast {
namespace {

// An unboxed argument of an op.
template <class T>
using Held = std::conditional_t<std::is_same_v<std::decay_t<T>, std::string>, const Text&, T>;

template <auto op>
struct Boxed;

template <class R, class... Args, R (*op)(Args...)>
struct Boxed<op> {
  static R call(Held<Args>... args) { return op(args...); }
};

// Below this number of values a thread costs more than it saves.
constexpr std::int64_t kGrainValues = 32768;

int quantized_index(const std::string& kind) {
  for (int i = 0; i < kQuantizedFormats; ++i)
    if (kind == kQuantized[i].name) return i;
  STD_TORCH_CHECK(false, "kind is '", kind,
                  "'; quantized kinds are q8_0, q4_0, nf4, q8_channel, q4_channel");
}

bool is_channel_kind(const std::string& kind) {
  return kind == "q8_channel" || kind == "q4_channel";
}

int checked_block_index(std::int64_t block) {
  const int index = block_index(block);
  STD_TORCH_CHECK(index >= 0, "block is ", block, "; allowed are 32, 64, 128");
  return index;
}

ScalarType code_type(int bits) { return bits == 8 ? ScalarType::Char : ScalarType::Byte; }

Tensor empty_like_but(const Tensor& like, std::int64_t last, ScalarType type) {
  const auto sizes = like.sizes();
  std::vector<std::int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return torch::stable::new_empty(like, shape, type);
}

// Groups of `block` tokens by channel, of `dim` channels each.
StoredStream groups_of(const std::string& kind, std::int64_t block, std::int64_t dim) {
  StoredStream groups{};
  groups.format = kind == "q8_channel" ? Format::q8_channel : Format::q4_channel;
  checked_block_index(block);
  STD_TORCH_CHECK(dim % 32 == 0, "there are ", dim, " channels; a multiple of 32 is needed");
  groups.group = block;
  groups.lane_dim = dim;
  groups.codes.token = dim * bits_of(groups.format) / 8;
  return groups;
}

std::int64_t groups_at_once(const StoredStream& groups) {
  return std::max<std::int64_t>(1, kGrainValues / (groups.group * groups.lane_dim));
}

std::tuple<Tensor, Tensor> quantize_by_channel(const Tensor& x, const std::string& kind,
                                               std::int64_t block, const std::string& fit) {
  const bool divides = fit_index(fit) == fit_index("mse");
  const Format type = element_format(x, "x");
  STD_TORCH_CHECK(x.dim() > 1, "x has ", x.dim(), " dimensions; (..., tokens, dim) is needed");
  const std::int64_t last = x.dim() - 1, dim = x.size(last);
  const StoredStream groups = groups_of(kind, block, dim);
  STD_TORCH_CHECK(x.size(last - 1) % block == 0, "block=", block, " does not divide the ",
                  x.size(last - 1), " tokens of x");

  const Tensor values = made_contiguous(x);
  Tensor codes = empty_like_but(x, groups.codes.token, ScalarType::Byte);
  const auto sizes = x.sizes();
  std::vector<std::int64_t> shape(sizes.begin(), sizes.end());
  shape[last - 1] /= block;
  shape[last] *= 2;
  Tensor scales = torch::stable::new_empty(x, shape, ScalarType::Half);
  if (x.numel() == 0) return {codes, scales};

  const auto* from = static_cast<const char*>(values.const_data_ptr());
  auto* to = static_cast<char*>(codes.mutable_data_ptr());
  auto* to_scales = static_cast<std::uint16_t*>(scales.mutable_data_ptr());
  const std::int64_t value_bytes = block * dim * static_cast<std::int64_t>(x.element_size());
  torch::stable::parallel_for(0, x.numel() / (block * dim), groups_at_once(groups),
                              [&](std::int64_t begin, std::int64_t end) {
                                kernels().store->quantize_groups(
                                    groups, divides, type, from + begin * value_bytes,
                                    to + begin * block * groups.codes.token,
                                    to_scales + begin * 2 * dim, end - begin);
                              });
  return {codes, scales};
}

Tensor dequantize_by_channel(const Tensor& codes, const Tensor& scales, const std::string& kind,
                             std::int64_t head_dim, ScalarType dtype) {
  const Format type = element_format(dtype, "dtype");
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte &&
                      scales.scalar_type() == ScalarType::Half && scales.is_cpu(),
                  "codes by channel are uint8, their scales float16, both on the cpu");
  const std::int64_t last = codes.dim() - 1;
  STD_TORCH_CHECK(last > 0 && scales.dim() == codes.dim(), "codes have ", codes.dim(),
                  " dimensions and scales ", scales.dim());
  for (std::int64_t i = 0; i < last - 1; ++i)
    STD_TORCH_CHECK(codes.size(i) == scales.size(i), "codes and scales differ in dimension ", i);
  const std::int64_t count = scales.size(last - 1), tokens = codes.size(last - 1);
  Tensor values = empty_like_but(codes, head_dim, dtype);
  STD_TORCH_CHECK(count > 0 ? tokens % count == 0 : tokens == 0, tokens, " tokens cannot have ",
                  count, " groups");
  const std::int64_t block = count > 0 ? tokens / count : 32;
  const StoredStream groups = groups_of(kind, block, head_dim);
  STD_TORCH_CHECK(codes.size(last) == groups.codes.token && scales.size(last) == 2 * head_dim,
                  "codes of ", codes.size(last), " bytes and ", scales.size(last),
                  " scales do not fit head_dim=", head_dim);
  if (values.numel() == 0) return values;

  const Tensor packed = made_contiguous(codes);
  const Tensor packed_scales = made_contiguous(scales);
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  const auto* from_scales = static_cast<const std::uint16_t*>(packed_scales.const_data_ptr());
  auto* to = static_cast<char*>(values.mutable_data_ptr());
  const std::int64_t value_bytes =
      block * head_dim * static_cast<std::int64_t>(values.element_size());
  torch::stable::parallel_for(0, values.numel() / (block * head_dim), groups_at_once(groups),
                              [&](std::int64_t begin, std::int64_t end) {
                                kernels().store->dequantize_groups(
                                    groups, type, from + begin * block * groups.codes.token,
                                    from_scales + begin * 2 * head_dim, to + begin * value_bytes,
                                    end - begin);
                              });
  return values;
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string kind, std::int64_t block,
                                    std::string fit) {
  if (is_channel_kind(kind)) return quantize_by_channel(x, kind, block, fit);
  const int format = quantized_index(kind);
  const int rule = fit_index(fit);
  const int size = checked_block_index(block);
  const int type = static_cast<int>(element_format(x, "x"));
  STD_TORCH_CHECK(x.dim() > 0, "x is a scalar; at least one dimension is needed");
  const std::int64_t dim = x.size(x.dim() - 1);
  STD_TORCH_CHECK(dim % block == 0, "block=", block, " does not divide the ", dim, " values of x");

  const int bits = kQuantized[format].bits;
  const Tensor values = made_contiguous(x);
  Tensor codes = empty_like_but(x, dim * bits / 8, code_type(bits));
  Tensor scales = empty_like_but(x, dim / block, ScalarType::Half);

  const auto run = kernels().store->formats[format].quantize[rule][size][type];
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  auto* to = static_cast<char*>(codes.mutable_data_ptr());
  auto* to_scales = static_cast<std::uint16_t*>(scales.mutable_data_ptr());
  const std::int64_t value_bytes = block * static_cast<std::int64_t>(x.element_size());
  const std::int64_t code_bytes = block * bits / 8;
  torch::stable::parallel_for(
      0, x.numel() / block, kGrainValues / block, [&](std::int64_t begin, std::int64_t end) {
        run(from + begin * value_bytes, to + begin * code_bytes, to_scales + begin, end - begin);
      });
  return {codes, scales};
}

// The block size that codes and scales imply; 0 when they hold nothing.
std::int64_t implied_block(const Tensor& codes, const Tensor& scales, std::int64_t head_dim,
                           const FormatRow& format) {
  STD_TORCH_CHECK(codes.scalar_type() == code_type(format.bits), "codes have dtype ",
                  torch::headeronly::toString(codes.scalar_type()), "; ", format.name, " stores ",
                  torch::headeronly::toString(code_type(format.bits)));
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Half, "scales have dtype ",
                  torch::headeronly::toString(scales.scalar_type()), "; allowed is float16");
  STD_TORCH_CHECK(scales.is_cpu(), "scales must be a cpu tensor, as codes are");
  STD_TORCH_CHECK(codes.dim() > 0 && codes.dim() == scales.dim(), "codes have ", codes.dim(),
                  " dimensions and scales ", scales.dim());
  const std::int64_t last = codes.dim() - 1;
  for (std::int64_t i = 0; i < last; ++i)
    STD_TORCH_CHECK(codes.size(i) == scales.size(i), "codes and scales differ in dimension ", i,
                    ": ", codes.size(i), " and ", scales.size(i));
  STD_TORCH_CHECK(codes.size(last) * 8 == head_dim * format.bits, "codes hold ",
                  codes.size(last) * 8 / format.bits, " values of ", format.name,
                  ", not head_dim=", head_dim);
  const std::int64_t blocks = scales.size(last);
  STD_TORCH_CHECK(blocks > 0 ? head_dim % blocks == 0 : head_dim == 0, "head_dim=", head_dim,
                  " values cannot have ", blocks, " scales");
  return blocks > 0 ? head_dim / blocks : 0;
}

Tensor dequantize(const Tensor& codes, const Tensor& scales, std::string kind,
                  std::int64_t head_dim, ScalarType dtype) {
  if (is_channel_kind(kind)) return dequantize_by_channel(codes, scales, kind, head_dim, dtype);
  const int format = quantized_index(kind);
  const int type = static_cast<int>(element_format(dtype, "dtype"));
  const std::int64_t block = implied_block(codes, scales, head_dim, kQuantized[format]);
  Tensor values = empty_like_but(codes, head_dim, dtype);
  if (values.numel() == 0) return values;

  const auto run = kernels().store->formats[format].dequantize[checked_block_index(block)][type];
  const Tensor packed = made_contiguous(codes);
  const Tensor packed_scales = made_contiguous(scales);
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  const auto* from_scales = static_cast<const std::uint16_t*>(packed_scales.const_data_ptr());
  auto* to = static_cast<char*>(values.mutable_data_ptr());
  const std::int64_t code_bytes = block * kQuantized[format].bits / 8;
  const std::int64_t value_bytes = block * static_cast<std::int64_t>(values.element_size());
  torch::stable::parallel_for(
      0, values.numel() / block, kGrainValues / block, [&](std::int64_t begin, std::int64_t end) {
        run(from + begin * code_bytes, from_scales + begin, to + begin * value_bytes, end - begin);
      });
  return values;
}

// The two ops of an attention: decode for the few tokens of a step, extend for those of a prompt.
template <auto attention>
struct Attend;

template <class... Args, std::tuple<Tensor, Tensor> (*attention)(bool, const Tensor&, Args...)>
struct Attend<attention> {
  static std::tuple<Tensor, Tensor> decode(const Tensor& q, Held<Args>... args) {
    STD_TORCH_CHECK(q.dim() != 4 || q.size(2) <= 32, "q has T=", q.size(2),
                    " tokens; 1 to 32 are allowed");
    return attention(false, q, args...);
  }

  // `q_chunk` bounds the scratch of implementations that need some.
  static std::tuple<Tensor, Tensor> extend(const Tensor& q, Held<Args>... args,
                                           std::int64_t q_chunk, bool batch_invariant) {
    STD_TORCH_CHECK(q_chunk >= 1, "q_chunk is ", q_chunk, "; 1 or more is allowed");
    return attention(!batch_invariant, q, args...);
  }
};

using Standard = Attend<&cached_attention>;
using Decoupled = Attend<&decoupled_cached_attention>;

}  // namespace
}  // namespace caramba_fast

// The name of the instruction set in use, through ctypes; null if CARAMBA_FAST_CPU_ISA names none
// that runs here (the ops then say so).
extern "C" __attribute__((visibility("default"))) const char* caramba_fast_cpu_isa() {
  try {
    return caramba_fast::kernels().isa;
  } catch (const std::runtime_error&) {
    return nullptr;
  }
}

STABLE_TORCH_LIBRARY_IMPL(caramba_fast, CPU, m) {
  m.impl("quantize", TORCH_BOX(&caramba_fast::Boxed<&caramba_fast::quantize>::call));
  m.impl("dequantize", TORCH_BOX(&caramba_fast::Boxed<&caramba_fast::dequantize>::call));
  m.impl("append_", TORCH_BOX(&caramba_fast::Boxed<&caramba_fast::append_>::call));
  m.impl("decoupled_append_",
         TORCH_BOX(&caramba_fast::Boxed<&caramba_fast::decoupled_append_>::call));
  m.impl("append_planned", TORCH_BOX(&caramba_fast::append_planned));
  m.impl("attention_planned", TORCH_BOX(&caramba_fast::attention_planned));
  m.impl("apply_rotary_emb", TORCH_BOX(&caramba_fast::apply_rotary_emb));
  m.impl("merge_state", TORCH_BOX(&caramba_fast::Boxed<&caramba_fast::merge_state>::call));
  m.impl("decode_attention", TORCH_BOX(&caramba_fast::Standard::decode));
  m.impl("decoupled_decode_attention", TORCH_BOX(&caramba_fast::Decoupled::decode));
  m.impl("extend_attention", TORCH_BOX(&caramba_fast::Standard::extend));
  m.impl("decoupled_extend_attention", TORCH_BOX(&caramba_fast::Decoupled::extend));
}
