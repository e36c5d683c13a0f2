// Calls repeated with other tensors of the same shapes: the checks of the first and the addresses
// of its streams are kept under a number, so that a decode step passes only what changes. The op
// keeps a call while this thread records (planned.cpp).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "arguments.h"

namespace caramba_fast {

// What a kept call shares with its repetitions; holds the streams, so that they stay in place.
struct Planned {
  std::vector<Tensor> held;
  std::vector<const void*> places;  // of their data
  bool paged = false;
  virtual ~Planned() = default;

  void hold(const Tensor& x) {
    held.push_back(x);
    places.push_back(x.const_data_ptr());
  }
  void hold(const StreamTensors* streams, int count) {
    for (int i = 0; i < count; ++i) {
      hold(streams[i].codes);
      for (const auto* part : {&streams[i].scales, &streams[i].tail, &streams[i].sink})
        if (part->has_value()) hold(**part);
    }
  }
};

// Raises if a tensor's memory was replaced, as by Tensor.share_memory_. Callers look for
// "other memory" (planned.py).
inline void check_places(const Planned& plan) {
  for (std::size_t i = 0; i < plan.held.size(); ++i)
    STD_TORCH_CHECK(plan.held[i].const_data_ptr() == plan.places[i],
                    "a stream of a kept call has other memory than when it was made");
}

// Raises unless a repeated call has pages if and only if the first had them.
inline void check_paged(const Planned& plan, const MaybeTensor& block_table) {
  STD_TORCH_CHECK(block_table.has_value() == plan.paged,
                  "block_table: a kept call is repeated with one, or without, as it was made");
}

// Whether this thread records.
bool is_recording();
// Keeps a call of this thread; a second one while it records discards both.
void keep(std::shared_ptr<const Planned> call);
// The call with a number; null if there is none.
std::shared_ptr<const Planned> kept(std::int64_t number);

template <class T>
std::shared_ptr<const T> kept_call(std::int64_t number, const char* what) {
  auto found = std::dynamic_pointer_cast<const T>(kept(number));
  STD_TORCH_CHECK(found != nullptr, "plan ", number, " is no kept call of ", what);
  return found;
}

}  // namespace caramba_fast
