// Sums of a batch's losses for bits per byte, in one fixed order: double, left to right inside a row, rows in order.
// One mask: a target's loss counts if and only if its bytes count.
#pragma once

#include <cstdint>

#include "cross_entropy.hpp"

namespace prism {

struct CodeLength {
  double nats = 0.0;              // over targets with bytes
  double special_nll_nats = 0.0;  // over targets without
  std::int64_t bytes = 0;
  std::int64_t tokens = 0;
  std::int64_t special_tokens = 0;
  std::int64_t faults = 0;  // targets whose loss was NaN or infinite, or that are no token at all

  CodeLength& operator+=(const CodeLength& other);
};

// Adds the `tokens` targets of one row. `token_bytes` holds the bytes of each of `vocab` tokens, 0 for special ones. A
// loss that is NaN or infinite is charged `fault_nats`. A target that is neither ignored nor a token has no bytes, so
// by the one mask its loss counts nowhere: it is only counted as a fault.
void add_row(CodeLength& total, const float* nll, const Targets& targets, std::int64_t first, std::int64_t tokens,
             const std::int32_t* token_bytes, std::int64_t vocab, double fault_nats);

}  // namespace prism
