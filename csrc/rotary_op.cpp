// apply_rotary_emb: rotates queries and keys of some tokens to their positions in one call. append
// rotates its keys and queries with the same functions.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "ops.h"

namespace caramba_fast {
namespace {

// Values that justify a thread.
constexpr std::int64_t kGrainValues = 16384;

}  // namespace

Tensor turned(const Tensor& x, const char* name, const Tensor& cos, const Tensor& sin,
              Tensor* given_out) {
  const HeadTensor given = heads_of(x, name);
  const std::int64_t rows = x.size(0), heads = x.size(1), tokens = x.size(2), dim = x.size(3);
  const std::int64_t width = cos.size(2), half = dim / 2;
  STD_TORCH_CHECK(dim % 2 == 0, name, " has head_dim ", dim, "; an even one is needed");
  STD_TORCH_CHECK(width == dim || width == half, "cos has ", width, " values a token; ", dim,
                  " or ", half, " are needed for ", name);
  STD_TORCH_CHECK((cos.size(0) == 1 || cos.size(0) == rows) && cos.size(1) == tokens, "cos has (",
                  cos.size(0), ", ", cos.size(1), ") tokens; (", rows, " or 1, ", tokens,
                  ") are needed for ", name);
  Tensor out = given_out != nullptr
                   ? *given_out
                   : torch::stable::new_empty(x, {rows, heads, tokens, dim}, x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor dense = given.dim == 1 ? x : made_contiguous(x);
  const HeadTensor from = heads_of(dense, name);
  const auto bytes = static_cast<std::int64_t>(x.element_size());
  const auto* source = static_cast<const char*>(from.data);
  const auto* cosines = static_cast<const char*>(cos.const_data_ptr());
  const auto* sines = static_cast<const char*>(sin.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const std::int64_t cos_row = cos.size(0) > 1 ? tokens : 0;
  const auto run = kernels().store->rotate_heads;
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / tokens, t = i % tokens, at = (b * cos_row + t) * width * bytes;
      run(from.type, source + (b * from.batch + t * from.token) * bytes, from.head, cosines + at,
          sines + at, width == dim ? half : 0, to + (b * heads * tokens + t) * dim * bytes,
          tokens * dim, heads, dim);
    }
  };
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainValues / (heads * dim));
  if (rows * tokens <= grain)
    piece(0, rows * tokens);
  else
    torch::stable::parallel_for(0, rows * tokens, grain, piece);
  return out;
}

void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  for (const Tensor* angle : {&cos, &sin}) {
    const char* name = angle == &cos ? "cos" : "sin";
    check_cpu(*angle, name);
    STD_TORCH_CHECK(angle->dim() == 3, name, " has ", angle->dim(),
                    " dimensions; (B or 1, T, D or D / 2) is needed");
    for (int i = 0; i < 3; ++i)
      STD_TORCH_CHECK(angle->size(i) == cos.size(i), "cos and sin differ in dimension ", i);
    STD_TORCH_CHECK(angle->scalar_type() == x.scalar_type(),
                    "queries, keys, cos and sin must have one dtype");
  }
}

std::tuple<Tensor, Tensor> apply_rotary_emb(const Tensor& q, const Tensor& k, const Tensor& cos,
                                            const Tensor& sin) {
  check_angles(q, cos, sin);
  check_angles(k, cos, sin);
  const Tensor c = made_contiguous(cos), s = made_contiguous(sin);
  return {turned(q, "q", c, s), turned(k, "k", c, s)};
}

}  // namespace caramba_fast
