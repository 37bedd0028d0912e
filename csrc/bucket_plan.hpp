// Record lengths -> order of micro-batches: bucket-to-pair, shuffle-to-mix. docs/bucket-plan.md is the specification.
//
// Records are ordered by length (stable), cut into buckets, shuffled inside each bucket, cut into micro-batches of
// neighbours, and the micro-batches are shuffled over the whole corpus. The last shuffle costs no padding and restores
// the mixing, so buckets should be tight.
#pragma once

#include <cstdint>
#include <span>
#include <variant>

#include "large_array.hpp"

namespace prism {

// Record lengths in tokens, in whichever integer type the caller holds them: they are never copied.
using Lengths = std::variant<std::span<const std::uint16_t>, std::span<const std::int32_t>,
                             std::span<const std::uint32_t>, std::span<const std::int64_t>>;

std::uint64_t record_count(const Lengths& lengths);

// Micro-batches of `micro_batch` records each. `bucket` 0 means file order: neighbours in the corpus, nothing shuffled;
// otherwise bucket >= micro_batch. Writes ceil(records / micro_batch) rows of `micro_batch` record numbers to `rows`;
// only the last row can be incomplete, and -1 fills it.
// Working memory: at most two indexes a record, of 4 bytes up to 2^31 records and 8 beyond: 16 bytes a record at most.
// Throws std::invalid_argument for a negative length or an argument out of range.
void plan_fixed(const Lengths& lengths, std::uint64_t micro_batch, std::uint64_t bucket, std::uint64_t seed,
                std::span<std::int64_t> rows);

// Micro-batches of varying size: micro-batch k is records[starts[k] .. starts[k + 1]).
struct VariablePlan {
  LargeArray<std::int64_t> records;
  LargeArray<std::int64_t> starts;
};

struct VariableRules {
  std::uint64_t max_rows = 0;      // rows a micro-batch at most; 0: no limit
  std::uint64_t token_budget = 0;  // rows x widest row a micro-batch at most; 0: no limit
  std::uint64_t row_overhead = 0;  // tokens that every row has beyond its record, counted in the budget
  std::uint64_t bucket = 0;        // records a bucket; 0: file order
  bool exact_width = false;        // the records of one length are a bucket: no padding at all
};

// Fills micro-batches greedily, under the rules, with neighbours of the bucketed order, then shuffles all of them.
// A record that alone exceeds the budget is refused (std::invalid_argument). Working memory as in plan_fixed.
VariablePlan plan_variable(const Lengths& lengths, const VariableRules& rules, std::uint64_t seed);

// An order to measure. `records` empty means file order; `starts` empty means `micro_batch` records each.
struct Order {
  std::span<const std::int64_t> records;
  std::span<const std::int64_t> starts;
  std::uint64_t micro_batch = 0;
};

// What an order costs. A micro-batch is as wide as its longest record; an incomplete one has only the rows it has.
struct PlanStatistics {
  std::uint64_t micro_batches = 0;
  std::uint64_t real_tokens = 0;
  std::uint64_t padded_tokens = 0;  // sum of rows x width
  double mean_width = 0;
  double mean_square_width = 0;
  double mean_rows_width = 0;         // mean of rows x width
  double mean_rows_square_width = 0;  // mean of rows x width^2
  std::uint64_t width_p50 = 0;        // widths sorted ascending, item floor(p x micro_batches)
  std::uint64_t width_p90 = 0;
  std::uint64_t width_p99 = 0;
  std::uint64_t zero_pad_micro_batches = 0;
  double adjacent_correlation = 0;  // Pearson, width of a micro-batch against the next; 0 when undefined
  std::uint64_t windows = 0;        // whole windows of `accumulate` micro-batches
  std::uint64_t sources_total = 0;  // distinct sources, summed over windows
  std::uint64_t sources_min = 0;
};

// `sources` is empty or holds a source number below `source_count` for each record.
PlanStatistics measure_plan(const Lengths& lengths, const Order& order, std::uint64_t accumulate,
                            std::span<const std::int32_t> sources, std::uint64_t source_count);

}  // namespace prism
