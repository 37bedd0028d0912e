#include "cross_entropy.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

#include "cross_entropy_loops.hpp"
#include "parallel.hpp"

namespace prism {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Below this many numbers a second thread costs more than it saves (measured: waking a team takes some 5 us).
constexpr std::int64_t kNumbersPerPiece = 32768;
// Gradients larger than this leave the caches before they are read again, so they are written past them.
constexpr std::int64_t kStreamBytes = std::int64_t{8} << 20;

std::int64_t size_of(Dtype dtype) { return dtype == Dtype::kF64 ? 8 : dtype == Dtype::kF32 ? 4 : 2; }

Loops choose_loops() {
  const char* asked = std::getenv("PRISM_FAST_ISA");
  const std::string_view wanted = asked == nullptr ? "" : asked;
  const auto allowed = [&](std::string_view name, bool has) { return has && (wanted.empty() || wanted == name); };
  Loops loops = portable_loops();
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  Loops best;
  if (allowed("avx512bf16", bf16)) {
    best = avx512bf16_loops();
  } else if (allowed("avx512", avx512)) {
    best = avx512_loops();
  } else if (allowed("avx2", avx2)) {
    best = avx2_loops();
  } else {
    return loops;
  }
  constexpr int kDouble = static_cast<int>(Dtype::kF64);
  best.terms[kDouble] = loops.terms[kDouble];
  best.grad[kDouble] = loops.grad[kDouble];
  best.scale[kDouble] = loops.scale[kDouble];
  loops = best;
#endif
  return loops;
}

const Loops& loops() {
  static const Loops chosen = choose_loops();
  return chosen;
}

char* row_of(const Matrix& m, std::int64_t row) {
  return static_cast<char*>(m.data) + row * m.row_stride * size_of(m.dtype);
}

RowIn row_in(const Matrix& logits, std::int64_t row, std::int64_t target) {
  return RowIn{row_of(logits, row), logits.vocab_stride, logits.vocab, target, 0.0, nullptr, false, false};
}

// Per-row numbers are float, or double beside double logits.
void put(void* data, Dtype dtype, std::int64_t i, double value) {
  if (dtype == Dtype::kF64) {
    static_cast<double*>(data)[i] = value;
  } else {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

double get(const void* data, Dtype dtype, std::int64_t i) {
  return dtype == Dtype::kF64 ? static_cast<const double*>(data)[i]
                              : static_cast<double>(static_cast<const float*>(data)[i]);
}

struct RowResult {
  double nll = kNan;
  double lse = kNan;
  double sum = kNan;  // of exp(z' - max) over all classes
  double max = kNan;  // over all classes
};

RowResult finish(const RowTerms& t) {
  RowResult r;
  if (std::isnan(t.sum) || std::isnan(t.target) || t.target == kInf) return r;
  if (t.sum == 0.0) {  // no other class has any probability
    if (t.target == -kInf) return r;
    r.nll = 0.0;
    r.lse = t.target;
    r.max = t.target;
    r.sum = 1.0;
    return r;
  }
  if (t.target >= t.max) {
    const double others = t.sum * std::exp(t.max - t.target);
    r.nll = std::log1p(others);
    r.lse = t.target + r.nll;
    r.max = t.target;
    r.sum = 1.0 + others;
    return r;
  }
  r.sum = t.sum + std::exp(t.target - t.max);
  r.max = t.max;
  const double log_sum = std::log(r.sum);
  r.nll = (t.max - t.target) + log_sum;
  r.lse = t.max + log_sum;
  return r;
}

double entropy_of(const RowTerms& t, const RowResult& r) {
  // lse - sum p z' = log(sum) - moment / sum, both about the row's maximum.
  const double shift = t.sum == 0.0 ? 0.0 : t.max - r.max;
  const double scale = t.sum == 0.0 ? 0.0 : std::exp(shift);
  double moment = t.sum == 0.0 ? 0.0 : scale * (t.moment + shift * t.sum);
  const double away = t.target - r.max;
  if (away != -kInf) moment += std::exp(away) * away;
  return std::max(0.0, std::log(r.sum) - moment / r.sum);
}

// No class before the target is as large. `other_max` settles it unless it equals the target's logit.
bool first_of_largest(const RowIn& in, Dtype dtype, double target, double other_max, double sum) {
  if (sum == 0.0 || target > other_max) return true;
  if (target < other_max) return false;
  // A sum over the classes before the target alone has their maximum.
  RowIn before = in;
  before.vocab = in.target;
  before.target = -1;
  before.moment = before.smooth = false;
  const RowTerms t = loops().terms[static_cast<int>(dtype)](before);
  return t.sum == 0.0 || t.max < target;
}

bool in_range(std::int64_t target, std::int64_t vocab) { return target >= 0 && target < vocab; }

std::int64_t rows_per_piece(std::int64_t vocab) {
  return std::max<std::int64_t>(1, kNumbersPerPiece / std::max<std::int64_t>(vocab, 1));
}

double total_weight(const LossOptions& options, const Matrix& logits) {
  if (options.class_weight == nullptr) return static_cast<double>(logits.vocab);
  double total = 0.0;
  for (std::int64_t v = 0; v < logits.vocab; ++v) total += get(options.class_weight, logits.dtype, v);
  return total;
}

// The gradient of one row, from its lse. `upstream` is the gradient of the row's loss.
struct GradWriter {
  const Matrix& logits;
  const Matrix& grad;
  const LossOptions& options;
  double weight_total;
  bool stream;

  GradWriter(const Matrix& logits_, const Matrix& grad_, const LossOptions& options_)
      : logits(logits_), grad(grad_), options(options_), weight_total(total_weight(options_, logits_)) {
    const std::int64_t bytes = grad.rows * grad.vocab * size_of(grad.dtype);
    const bool dense = grad.vocab_stride == 1 && grad.row_stride == grad.vocab;
    stream = bytes >= kStreamBytes && grad.data != logits.data && grad.vocab_stride == 1;
    if (stream && dense) {
      // Fresh memory of this size comes in 4 KB pages, and touching each first costs more than the arithmetic.
      constexpr std::uintptr_t kPage = std::uintptr_t{2} << 20;
      const auto begin = (reinterpret_cast<std::uintptr_t>(grad.data) + kPage - 1) / kPage * kPage;
      const auto end =
          (reinterpret_cast<std::uintptr_t>(grad.data) + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
      if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    }
  }

  void operator()(std::int64_t row, std::int64_t target, double lse, double upstream) const {
    const double eps = options.label_smoothing;
    const double weight = options.class_weight == nullptr ? 1.0 : get(options.class_weight, logits.dtype, target);
    const double hit = (1.0 - eps) * weight;
    const double each = eps / static_cast<double>(logits.vocab);
    RowIn in = row_in(logits, row, target);
    in.softcap = options.softcap;
    in.class_weight = options.class_weight;
    in.smooth = eps != 0.0;
    const RowGrad out{row_of(grad, row),
                      grad.vocab_stride,
                      lse,
                      upstream * (hit + each * weight_total + 2.0 * options.z_loss * lse),
                      upstream * each,
                      upstream * hit,
                      stream};
    loops().grad[static_cast<int>(logits.dtype)](in, out);
  }

  void zero(std::int64_t row) const {
    const std::int64_t size = size_of(grad.dtype);
    char* out = row_of(grad, row);
    if (grad.vocab_stride == 1) {
      std::fill(out, out + grad.vocab * size, char{0});
      return;
    }
    for (std::int64_t v = 0; v < grad.vocab; ++v) {
      std::fill(out + v * grad.vocab_stride * size, out + (v * grad.vocab_stride + 1) * size, char{0});
    }
  }
};

}  // namespace

const char* cross_entropy_isa() { return loops().name; }

void token_nll(const Matrix& logits, const Targets& targets, const ScoreOut& out, int threads) {
  const Dtype dtype = logits.dtype;
  std::atomic<std::int32_t> faults{0};
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    std::int32_t faulty = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t target = targets[i];
      double nll = 0.0, lse = 0.0, entropy = 0.0;
      bool correct = false;
      if (target != targets.ignore_index) {
        nll = lse = entropy = kNan;
        if (in_range(target, logits.vocab)) {
          RowIn in = row_in(logits, i, target);
          in.moment = out.entropy != nullptr;
          const RowTerms terms = loops().terms[static_cast<int>(dtype)](in);
          const RowResult r = finish(terms);
          nll = r.nll;
          lse = r.lse;
          if (!std::isnan(lse)) {
            if (out.entropy != nullptr) entropy = entropy_of(terms, r);
            if (out.correct != nullptr) {
              correct = first_of_largest(in, dtype, terms.target, terms.max, terms.sum);
            }
          }
        }
        if (std::isnan(lse)) ++faulty;
      }
      put(out.nll, dtype, i, nll);
      if (out.lse != nullptr) put(out.lse, dtype, i, lse);
      if (out.correct != nullptr) out.correct[i] = correct;
      if (out.entropy != nullptr) put(out.entropy, dtype, i, entropy);
    }
    faults.fetch_add(faulty, std::memory_order_relaxed);
  };
  parallel_for(logits.rows, rows_per_piece(logits.vocab), threads, rows);
  if (out.faults != nullptr) *out.faults += faults.load();
}

void token_nll_shard(const Matrix& logits, const Targets& targets, std::int64_t vocab_start, void* max, void* sum,
                     void* target_logit, int threads) {
  const Dtype dtype = logits.dtype;
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      double row_max = -kInf, row_sum = 0.0, row_target = -kInf;
      if (targets[i] != targets.ignore_index) {
        const std::int64_t target = targets[i] - vocab_start;
        const RowIn in = row_in(logits, i, in_range(target, logits.vocab) ? target : -1);
        const RowTerms terms = loops().terms[static_cast<int>(dtype)](in);
        row_max = terms.max;
        row_sum = terms.sum;
        row_target = terms.target;
      }
      put(max, dtype, i, row_max);
      put(sum, dtype, i, row_sum);
      put(target_logit, dtype, i, row_target);
    }
  };
  parallel_for(logits.rows, rows_per_piece(logits.vocab), threads, rows);
}

std::int64_t cross_entropy(const Matrix& logits, const Targets& targets, const LossOptions& options, const LossOut& out,
                           const Matrix* grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads) {
  for (std::int64_t i = 0; i < logits.rows; ++i) {
    if (targets[i] != targets.ignore_index && !in_range(targets[i], logits.vocab)) return i;
  }
  const Dtype dtype = logits.dtype;
  const double eps = options.label_smoothing;
  const double weight_total = total_weight(options, logits);
  std::optional<GradWriter> writer;
  if (grad != nullptr) writer.emplace(logits, *grad, options);
  std::atomic<std::int32_t> faults{0};
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    std::int32_t faulty = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t target = targets[i];
      if (target == targets.ignore_index) {
        put(out.loss, dtype, i, 0.0);
        out.lse[i] = 0.0;
        if (writer) writer->zero(i);
        continue;
      }
      RowIn in = row_in(logits, i, target);
      in.softcap = options.softcap;
      in.class_weight = options.class_weight;
      in.smooth = eps != 0.0;
      const RowTerms terms = loops().terms[static_cast<int>(dtype)](in);
      const RowResult r = finish(terms);
      const double weight = options.class_weight == nullptr ? 1.0 : get(options.class_weight, dtype, target);
      double loss = (1.0 - eps) * weight * r.nll + options.z_loss * r.lse * r.lse;
      if (eps != 0.0) {
        const double weighted = terms.weighted + weight * terms.target;
        loss += eps / static_cast<double>(logits.vocab) * (weight_total * r.lse - weighted);
      }
      if (std::isnan(r.lse)) ++faulty;
      put(out.loss, dtype, i, loss);
      out.lse[i] = r.lse;
      if (writer) (*writer)(i, target, r.lse, get(grad_loss, dtype, i * grad_loss_stride));
    }
    faults.fetch_add(faulty, std::memory_order_relaxed);
  };
  parallel_for(logits.rows, rows_per_piece(logits.vocab), threads, rows);
  *out.faults += faults.load();
  return -1;
}

void cross_entropy_backward(const Matrix& logits, const Targets& targets, const LossOptions& options, const double* lse,
                            const Matrix& grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads) {
  const GradWriter writer(logits, grad, options);
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t target = targets[i];
      if (target == targets.ignore_index || !in_range(target, logits.vocab)) {
        writer.zero(i);
      } else {
        writer(i, target, lse[i], get(grad_loss, logits.dtype, i * grad_loss_stride));
      }
    }
  };
  parallel_for(logits.rows, rows_per_piece(logits.vocab), threads, rows);
}

void scale_rows(const Matrix& rows, const void* factor, std::int64_t factor_stride, int threads) {
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const double f = get(factor, rows.dtype, i * factor_stride);
      if (f == 1.0) continue;
      loops().scale[static_cast<int>(rows.dtype)](row_of(rows, i), rows.vocab_stride, rows.vocab, f);
    }
  };
  parallel_for(rows.rows, rows_per_piece(rows.vocab), threads, body);
}

double sum_rows(const void* values, bool is_double, std::int64_t count) {
  double total = 0.0;
  for (std::int64_t i = 0; i < count; ++i) total += get(values, is_double ? Dtype::kF64 : Dtype::kF32, i);
  return total;
}

}  // namespace prism
