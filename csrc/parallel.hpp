// Splits a loop over items among threads. Which thread takes which item is left open, so callers must write results
// that do not depend on it.
#pragma once

#include <cstdint>

namespace prism {

// A loop body: takes items [begin, end). Must not throw.
using ItemRange = void (*)(void* context, std::int64_t begin, std::int64_t end);

// Calls `body` on pieces of [0, items), `grain` items each, from up to `threads` threads, and returns when all are
// done. Runs on the process's OpenMP team when there is one (torch's own: its threads are awake and pinned to the
// same setting, and a second team would fight it for the cores), else on threads made for this call.
void parallel_for(std::int64_t items, std::int64_t grain, int threads, ItemRange body, void* context);

template <class Body>
void parallel_for(std::int64_t items, std::int64_t grain, int threads, const Body& body) {
  const ItemRange call = [](void* context, std::int64_t begin, std::int64_t end) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  parallel_for(items, grain, threads, call, const_cast<void*>(static_cast<const void*>(&body)));
}

// "openmp" or "std::thread": what parallel_for runs on in this process.
const char* parallel_runtime();

}  // namespace prism
