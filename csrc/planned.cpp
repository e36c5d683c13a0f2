// Kept calls (planned.h), and how Python records one: through ctypes, since only numbers are
// passed.
#include "planned.h"

#include <mutex>
#include <unordered_map>

namespace caramba_fast {
namespace {

struct Recording {
  bool on = false;
  int calls = 0;
  std::shared_ptr<const Planned> call;
};

thread_local Recording recording;

struct Table {
  std::mutex mutex;
  std::int64_t last = 0;
  std::unordered_map<std::int64_t, std::shared_ptr<const Planned>> calls;
};

// Never destroyed: Python may free plans while the process ends.
Table& table() {
  static Table* const found = new Table;
  return *found;
}

}  // namespace

bool is_recording() { return recording.on; }

void keep(std::shared_ptr<const Planned> call) {
  recording.call = ++recording.calls == 1 ? std::move(call) : nullptr;
}

std::shared_ptr<const Planned> kept(std::int64_t number) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().calls.find(number);
  return found == table().calls.end() ? nullptr : found->second;
}

}  // namespace caramba_fast

#define CARAMBA_FAST_EXPORT extern "C" __attribute__((visibility("default")))

// Starts recording this thread's calls.
CARAMBA_FAST_EXPORT void caramba_fast_record() { caramba_fast::recording = {true, 0, nullptr}; }

// Stops recording: the number of the call, or 0 if there was none, several, or one that cannot be
// repeated.
CARAMBA_FAST_EXPORT std::int64_t caramba_fast_recorded() {
  auto call = std::move(caramba_fast::recording.call);
  caramba_fast::recording = {};
  if (call == nullptr) return 0;
  auto& table = caramba_fast::table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  table.calls.emplace(++table.last, std::move(call));
  return table.last;
}

// Forgets a call and releases its streams.
CARAMBA_FAST_EXPORT void caramba_fast_forget(std::int64_t number) {
  std::shared_ptr<const caramba_fast::Planned> call;  // released outside the lock
  auto& table = caramba_fast::table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  const auto found = table.calls.find(number);
  if (found == table.calls.end()) return;
  call = std::move(found->second);
  table.calls.erase(found);
}
