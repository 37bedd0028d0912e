#include "bucket_plan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "large_array.hpp"
#include "random.hpp"

namespace prism {
namespace {

__extension__ using Wide = unsigned __int128;

// The histogram of one sorting pass must stay in cache (2^16 counters of 8 bytes); lengths of real corpora need one.
constexpr unsigned kDigitBits = 16;
// How far ahead of its use a randomly addressed item is requested from memory.
constexpr std::size_t kAhead = 24;

template <class T>
struct LengthRange {
  T smallest = 0;
  T largest = 0;
};

template <class T>
LengthRange<T> length_range(std::span<const T> lengths) {
  if (lengths.empty()) return {};
  const auto [low, high] = std::minmax_element(lengths.begin(), lengths.end());
  if constexpr (std::is_signed_v<T>) {
    if (*low < 0) {
      throw std::invalid_argument("record " + std::to_string(low - lengths.begin()) + " has length " +
                                  std::to_string(*low) + ": lengths are tokens, 0 or more");
    }
  }
  return {*low, *high};
}

// One stable counting pass over `bits` bits of the length from bit `shift`; `from` empty means file order.
template <class T, class Index>
void counting_pass(std::span<const T> lengths, T smallest, unsigned shift, unsigned bits, const Index* from,
                   Index* to) {
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  const auto digit = [&](T length) { return (static_cast<std::uint64_t>(length - smallest) >> shift) & mask; };
  std::vector<std::size_t> next(mask + 1);
  for (const T length : lengths) ++next[digit(length)];
  std::exclusive_scan(next.begin(), next.end(), next.begin(), std::size_t{0});
  const std::size_t n = lengths.size();
  if (from == nullptr) {
    for (std::size_t i = 0; i < n; ++i) to[next[digit(lengths[i])]++] = static_cast<Index>(i);
    return;
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&lengths[from[i + kAhead]]);
    to[next[digit(lengths[from[i]])]++] = from[i];
  }
}

// Record numbers by ascending length, ties by record number: least significant digit first, one pass for lengths that
// span less than 2^16.
template <class Index, class T>
LargeArray<Index> order_by_length(std::span<const T> lengths) {
  const auto [smallest, largest] = length_range(lengths);
  const unsigned width = std::bit_width(static_cast<std::uint64_t>(largest - smallest));
  const unsigned passes = std::max(1u, (width + kDigitBits - 1) / kDigitBits);
  const unsigned bits = (width + passes - 1) / passes;
  LargeArray<Index> order(lengths.size());
  counting_pass<T, Index>(lengths, smallest, 0, bits, nullptr, order.data());
  if (passes == 1) return order;
  LargeArray<Index> other(lengths.size());
  for (unsigned pass = 1; pass < passes; ++pass) {
    counting_pass<T, Index>(lengths, smallest, pass * bits, bits, order.data(), other.data());
    std::swap(order, other);
  }
  return order;
}

// Calls `use` with a 32-bit index type when that is enough (one bit is spare): half the memory and cache misses.
template <class Use>
auto with_index_type(std::uint64_t records, Use use) {
  if (records <= std::numeric_limits<std::uint32_t>::max() / 2) return use(std::uint32_t{});
  return use(std::uint64_t{});
}

void fill_file_order(std::uint64_t records, std::span<std::int64_t> rows) {
  std::iota(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(records), std::int64_t{0});
  std::fill(rows.begin() + static_cast<std::ptrdiff_t>(records), rows.end(), std::int64_t{-1});
}

// Calls `use(bucket)` for each bucket of the order: `size` records each, or, when `size` is 0, the records of one
// length.
template <class Index, class T, class Use>
void for_each_bucket(std::span<const T> lengths, std::span<Index> order, std::size_t size, Use use) {
  for (std::size_t start = 0, end = 0; start < order.size(); start = end) {
    if (size > 0) {
      end = start + std::min(size, order.size() - start);
    } else {
      for (end = start + 1; end < order.size() && lengths[order[end]] == lengths[order[start]];) ++end;
    }
    use(order.subspan(start, end - start));
  }
}

template <class Index, class T>
void plan_fixed_as(std::span<const T> lengths, std::size_t m, std::size_t bucket, std::uint64_t seed,
                   std::span<std::int64_t> rows) {
  const std::size_t n = lengths.size();
  SplitMix64 random(seed);
  auto order = order_by_length<Index>(lengths);

  // Shuffle inside each bucket, and close up the whole micro-batches at the front.
  std::size_t kept = 0;
  std::vector<Index> left_over;
  left_over.reserve(n / bucket * (bucket % m) + n % bucket % m);
  for_each_bucket(lengths, order.span(), bucket, [&](std::span<Index> records) {
    shuffle(records, random);
    const auto whole = records.begin() + static_cast<std::ptrdiff_t>(records.size() - records.size() % m);
    left_over.insert(left_over.end(), whole, records.end());
    if (order.data() + kept != records.data()) std::copy(records.begin(), whole, order.data() + kept);
    kept += static_cast<std::size_t>(whole - records.begin());
  });
  std::sort(left_over.begin(), left_over.end(),
            [&](Index a, Index b) { return lengths[a] != lengths[b] ? lengths[a] < lengths[b] : a < b; });

  const std::size_t whole_micro_batches = kept / m;
  const LargeArray<Index> micro_batches(whole_micro_batches);
  std::iota(micro_batches.data(), micro_batches.data() + whole_micro_batches, Index{0});
  shuffle(micro_batches.span(), random);
  std::int64_t* out = rows.data();
  for (std::size_t k = 0; k < whole_micro_batches; ++k) {
    if (k + kAhead < whole_micro_batches) __builtin_prefetch(order.data() + micro_batches[k + kAhead] * m);
    const Index* const records = order.data() + micro_batches[k] * m;
    for (std::size_t row = 0; row < m; ++row) *out++ = static_cast<std::int64_t>(records[row]);
  }
  for (const Index record : left_over) *out++ = static_cast<std::int64_t>(record);
  std::fill(out, rows.data() + rows.size(), std::int64_t{-1});
}

// Fills one micro-batch after another under the rules.
class GreedyFill {
 public:
  explicit GreedyFill(const VariableRules& rules) : rules_(rules) {}

  // Adds a record; true if it begins a micro-batch.
  bool add(std::uint64_t record, std::uint64_t length) {
    // A row of no tokens still takes a row of the block.
    const std::uint64_t width = std::max<std::uint64_t>(1, length + rules_.row_overhead);
    if (rules_.token_budget > 0 && width > rules_.token_budget) {
      throw std::invalid_argument("record " + std::to_string(record) + " takes " + std::to_string(width) +
                                  " tokens alone, more than the token budget " + std::to_string(rules_.token_budget) +
                                  ": raise the budget, or cut records to a sequence length first");
    }
    const std::uint64_t wider = std::max(widest_, width);
    const bool begins = rows_ == 0 || rows_ == rules_.max_rows ||
                        (rules_.token_budget > 0 && static_cast<Wide>(rows_ + 1) * wider > rules_.token_budget) ||
                        (rules_.exact_width && length != length_);
    rows_ = begins ? 1 : rows_ + 1;
    widest_ = begins ? width : wider;
    length_ = length;
    return begins;
  }

 private:
  VariableRules rules_;
  std::uint64_t rows_ = 0;
  std::uint64_t widest_ = 0;
  std::uint64_t length_ = 0;
};

template <class Index, class T>
VariablePlan plan_variable_as(std::span<const T> lengths, const VariableRules& rules, std::uint64_t seed) {
  // The top bit of an entry of the order marks the first record of a micro-batch: ends cost no memory.
  constexpr Index kBegins = Index{1} << (std::numeric_limits<Index>::digits - 1);
  const std::size_t n = lengths.size();
  const bool file_order = !rules.exact_width && rules.bucket == 0;
  SplitMix64 random(seed);
  LargeArray<Index> order;
  if (file_order) {
    length_range(lengths);  // refuses negative lengths
    order = LargeArray<Index>(n);
    std::iota(order.data(), order.data() + n, Index{0});
  } else {
    order = order_by_length<Index>(lengths);
    for_each_bucket(lengths, order.span(), rules.exact_width ? 0 : rules.bucket,
                    [&](std::span<Index> records) { shuffle(records, random); });
  }

  std::size_t count = 0;
  GreedyFill fill(rules);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&lengths[order[i + kAhead]]);
    if (fill.add(order[i], static_cast<std::uint64_t>(lengths[order[i]]))) {
      order[i] |= kBegins;
      ++count;
    }
  }
  const LargeArray<Index> begins(count);
  for (std::size_t i = 0, k = 0; i < n; ++i) {
    if (order[i] & kBegins) begins[k++] = static_cast<Index>(i);
  }
  if (!file_order) shuffle(begins.span(), random);

  VariablePlan plan{LargeArray<std::int64_t>(n), LargeArray<std::int64_t>(count + 1)};
  std::size_t written = 0;
  for (std::size_t k = 0; k < count; ++k) {
    if (k + kAhead < count) __builtin_prefetch(order.data() + begins[k + kAhead]);
    plan.starts[k] = static_cast<std::int64_t>(written);
    std::size_t i = begins[k];
    do {
      plan.records[written++] = static_cast<std::int64_t>(order[i] & ~kBegins);
    } while (++i < n && !(order[i] & kBegins));
  }
  plan.starts[count] = static_cast<std::int64_t>(n);
  return plan;
}

// Pearson correlation of each value with the next one; 0 where it is undefined (fewer than 3 values, or no spread).
double lag_one_correlation(const std::vector<std::uint64_t>& values) {
  if (values.size() < 3) return 0;
  const std::size_t pairs = values.size() - 1;
  double first_mean = 0;
  double second_mean = 0;
  for (std::size_t k = 0; k < pairs; ++k) {
    first_mean += static_cast<double>(values[k]);
    second_mean += static_cast<double>(values[k + 1]);
  }
  first_mean /= static_cast<double>(pairs);
  second_mean /= static_cast<double>(pairs);
  double product = 0;
  double first_square = 0;
  double second_square = 0;
  for (std::size_t k = 0; k < pairs; ++k) {
    const double first = static_cast<double>(values[k]) - first_mean;
    const double second = static_cast<double>(values[k + 1]) - second_mean;
    product += first * second;
    first_square += first * first;
    second_square += second * second;
  }
  const double spread = std::sqrt(first_square) * std::sqrt(second_square);
  return spread > 0 ? product / spread : 0;
}

std::uint64_t quantile(std::vector<std::uint64_t>& values, std::size_t numerator, std::size_t denominator) {
  if (values.empty()) return 0;
  // Integer arithmetic: 0.9 x 10 must be item 9 whatever the rounding of 0.9.
  const std::size_t at = static_cast<std::size_t>(static_cast<Wide>(values.size()) * numerator / denominator);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

// Counts distinct sources in consecutive windows; a source was seen in this window if its stamp is the window's.
class SourceWindows {
 public:
  SourceWindows(std::span<const std::int32_t> sources, std::uint64_t source_count, std::uint64_t accumulate)
      : sources_(sources), last_seen_(source_count, 0), accumulate_(accumulate) {}

  void see(std::uint64_t record) {
    const std::int32_t source = sources_[record];
    if (source < 0 || static_cast<std::size_t>(source) >= last_seen_.size()) {
      throw std::invalid_argument("record " + std::to_string(record) + " has source " + std::to_string(source) +
                                  ", outside 0.." + std::to_string(last_seen_.size()));
    }
    std::uint64_t& seen = last_seen_[static_cast<std::size_t>(source)];
    distinct_ += seen != window_;
    seen = window_;
  }

  void end_micro_batch(PlanStatistics& statistics) {
    if (++micro_batches_ < accumulate_) return;
    statistics.sources_min = statistics.windows == 0 ? distinct_ : std::min(statistics.sources_min, distinct_);
    statistics.sources_total += distinct_;
    ++statistics.windows;
    ++window_;
    micro_batches_ = 0;
    distinct_ = 0;
  }

 private:
  std::span<const std::int32_t> sources_;
  std::vector<std::uint64_t> last_seen_;
  std::uint64_t accumulate_;
  std::uint64_t window_ = 1;
  std::uint64_t micro_batches_ = 0;
  std::uint64_t distinct_ = 0;
};

template <class T>
PlanStatistics measure_as(std::span<const T> lengths, const Order& order, std::uint64_t accumulate,
                          std::span<const std::int32_t> sources, std::uint64_t source_count) {
  const std::size_t placed = order.records.empty() ? lengths.size() : order.records.size();
  const std::size_t m = order.micro_batch;
  const std::size_t count = order.starts.empty() ? (placed + m - 1) / m : order.starts.size() - 1;
  PlanStatistics statistics;
  statistics.micro_batches = count;
  std::vector<std::uint64_t> widths(count);
  SourceWindows windows(sources, source_count, accumulate);
  Wide width_sum = 0;
  Wide square_sum = 0;
  Wide rows_square_sum = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t begin = order.starts.empty() ? k * m : static_cast<std::size_t>(order.starts[k]);
    const std::size_t end =
        order.starts.empty() ? std::min(begin + m, placed) : static_cast<std::size_t>(order.starts[k + 1]);
    if (begin > end || end > placed) throw std::invalid_argument("the starts of the micro-batches do not ascend");
    std::uint64_t widest = 0;
    std::uint64_t narrowest = std::numeric_limits<std::uint64_t>::max();
    for (std::size_t i = begin; i < end; ++i) {
      if (!order.records.empty() && i + kAhead < placed) {
        const auto ahead = static_cast<std::size_t>(order.records[i + kAhead]);
        __builtin_prefetch(lengths.data() + std::min(ahead, lengths.size()));
      }
      const std::uint64_t record = order.records.empty() ? i : static_cast<std::uint64_t>(order.records[i]);
      if (record >= lengths.size()) {
        throw std::invalid_argument("the order names record " + std::to_string(static_cast<std::int64_t>(record)) +
                                    " of " + std::to_string(lengths.size()));
      }
      const std::uint64_t length = static_cast<std::uint64_t>(lengths[record]);
      statistics.real_tokens += length;
      widest = std::max(widest, length);
      narrowest = std::min(narrowest, length);
      if (!sources.empty()) windows.see(record);
    }
    if (!sources.empty()) windows.end_micro_batch(statistics);
    const std::uint64_t rows = end - begin;
    widths[k] = widest;
    statistics.padded_tokens += rows * widest;
    statistics.zero_pad_micro_batches += widest == narrowest;
    width_sum += widest;
    square_sum += static_cast<Wide>(widest) * widest;
    rows_square_sum += static_cast<Wide>(widest) * widest * rows;
  }
  if (count == 0) return statistics;
  const double micro_batches = static_cast<double>(count);
  statistics.mean_width = static_cast<double>(width_sum) / micro_batches;
  statistics.mean_square_width = static_cast<double>(square_sum) / micro_batches;
  statistics.mean_rows_width = static_cast<double>(statistics.padded_tokens) / micro_batches;
  statistics.mean_rows_square_width = static_cast<double>(rows_square_sum) / micro_batches;
  statistics.adjacent_correlation = lag_one_correlation(widths);
  statistics.width_p50 = quantile(widths, 1, 2);
  statistics.width_p90 = quantile(widths, 9, 10);
  statistics.width_p99 = quantile(widths, 99, 100);
  return statistics;
}

}  // namespace

std::uint64_t record_count(const Lengths& lengths) {
  return std::visit([](auto span) -> std::uint64_t { return span.size(); }, lengths);
}

void plan_fixed(const Lengths& lengths, std::uint64_t micro_batch, std::uint64_t bucket, std::uint64_t seed,
                std::span<std::int64_t> rows) {
  const std::uint64_t n = record_count(lengths);
  if (micro_batch == 0) throw std::invalid_argument("micro_batch must be at least 1 record");
  if (bucket > 0 && bucket < micro_batch) {
    throw std::invalid_argument("a bucket of " + std::to_string(bucket) + " records cannot fill a micro-batch of " +
                                std::to_string(micro_batch));
  }
  if (rows.size() != (n + micro_batch - 1) / micro_batch * micro_batch) {
    throw std::invalid_argument("the output does not hold one row per micro-batch");
  }
  std::visit(
      [&](auto span) {
        if (bucket == 0) {
          length_range(span);
          fill_file_order(n, rows);
        } else {
          with_index_type(n, [&](auto index) {
            plan_fixed_as<decltype(index)>(span, micro_batch, std::min(bucket, std::max<std::uint64_t>(n, 1)), seed,
                                           rows);
          });
        }
      },
      lengths);
}

VariablePlan plan_variable(const Lengths& lengths, const VariableRules& rules, std::uint64_t seed) {
  if (rules.max_rows == 0 && rules.token_budget == 0) {
    throw std::invalid_argument("micro-batches need a limit: rows, tokens, or both");
  }
  return std::visit(
      [&](auto span) {
        return with_index_type(span.size(),
                               [&](auto index) { return plan_variable_as<decltype(index)>(span, rules, seed); });
      },
      lengths);
}

PlanStatistics measure_plan(const Lengths& lengths, const Order& order, std::uint64_t accumulate,
                            std::span<const std::int32_t> sources, std::uint64_t source_count) {
  if (accumulate == 0) throw std::invalid_argument("accumulate must be at least 1 micro-batch");
  if (order.starts.empty() && order.micro_batch == 0) {
    throw std::invalid_argument("micro_batch must be at least 1 record");
  }
  if (!sources.empty() && sources.size() != record_count(lengths)) {
    throw std::invalid_argument(std::to_string(sources.size()) + " sources for " +
                                std::to_string(record_count(lengths)) + " records");
  }
  return std::visit([&](auto span) { return measure_as(span, order, accumulate, sources, source_count); }, lengths);
}

}  // namespace prism
