#include "bits_per_byte.hpp"

#include <cmath>

namespace prism {

CodeLength& CodeLength::operator+=(const CodeLength& other) {
  nats += other.nats;
  special_nll_nats += other.special_nll_nats;
  bytes += other.bytes;
  tokens += other.tokens;
  special_tokens += other.special_tokens;
  faults += other.faults;
  return *this;
}

void add_row(CodeLength& total, const float* nll, const Targets& targets, std::int64_t first, std::int64_t tokens,
             const std::int32_t* token_bytes, std::int64_t vocab, double fault_nats) {
  CodeLength row;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t target = targets[first + i];
    if (target == targets.ignore_index) continue;
    if (target < 0 || target >= vocab) {
      ++row.faults;
      continue;
    }
    double nats = static_cast<double>(nll[first + i]);
    if (!std::isfinite(nats)) {
      nats = fault_nats;
      ++row.faults;
    }
    const std::int32_t bytes = token_bytes[target];
    if (bytes > 0) {
      row.nats += nats;
      row.bytes += bytes;
      ++row.tokens;
    } else {
      row.special_nll_nats += nats;
      ++row.special_tokens;
    }
  }
  total += row;
}

}  // namespace prism
