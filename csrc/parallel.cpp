#include "parallel.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace prism {
namespace {

struct Loop {
  std::int64_t items;
  std::int64_t grain;
  ItemRange body;
  void* context;
  std::atomic<std::int64_t> next{0};

  void run() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= items) return;
      body(context, begin, std::min(begin + grain, items));
    }
  }
};

// libgomp's entry point for `#pragma omp parallel`, which libomp offers too. It is looked up rather than linked:
// torch ships its own copy of the runtime and loads it into the global scope, and only that copy has torch's threads.
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel find_openmp() {
  static const auto entry = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return entry;
}

}  // namespace

const char* parallel_runtime() { return find_openmp() != nullptr ? "openmp" : "std::thread"; }

void parallel_for(std::int64_t items, std::int64_t grain, int threads, ItemRange body, void* context) {
  if (items <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t pieces = (items + grain - 1) / grain;
  const int team = static_cast<int>(std::clamp<std::int64_t>(threads, 1, pieces));
  if (team == 1) {
    body(context, 0, items);
    return;
  }
  Loop loop{items, grain, body, context};
  if (const GompParallel openmp = find_openmp()) {
    openmp([](void* data) { static_cast<Loop*>(data)->run(); }, &loop, static_cast<unsigned>(team), 0);
    return;
  }
  std::vector<std::jthread> helpers;
  helpers.reserve(static_cast<std::size_t>(team) - 1);
  for (int i = 1; i < team; ++i) helpers.emplace_back([&loop] { loop.run(); });
  loop.run();
}

}  // namespace prism
