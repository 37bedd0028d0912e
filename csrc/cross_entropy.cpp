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

// A thread takes at least this many numbers at a time, some 15 us of work: waking a team takes as long.
constexpr std::int64_t kNumbersPerPiece = 65536;
// Gradients larger than this leave the caches before they are read again, so they are written past them.
constexpr std::int64_t kStreamBytes = std::int64_t{8} << 20;

std::int64_t size_of(Dtype dtype) { return dtype == Dtype::kF64 ? 8 : dtype == Dtype::kF32 ? 4 : 2; }

Loops choose_loops() {
  const Loops portable = portable_loops();
#if defined(__x86_64__)
  const char* asked = std::getenv("PRISM_FAST_ISA");
  const std::string_view wanted = asked == nullptr ? "" : asked;
  const auto takes = [&](std::string_view name, bool has) { return has && (wanted.empty() || wanted == name); };
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  Loops best;
  if (takes("avx512bf16", bf16)) {
    best = avx512bf16_loops();
  } else if (takes("avx512", avx512)) {
    best = avx512_loops();
  } else if (takes("avx2", avx2)) {
    best = avx2_loops();
  } else {
    return portable;
  }
  constexpr int kDouble = static_cast<int>(Dtype::kF64);
  best.terms[kDouble] = portable.terms[kDouble];
  best.grad[kDouble] = portable.grad[kDouble];
  best.scale[kDouble] = portable.scale[kDouble];
  return best;
#else
  return portable;
#endif
}

char* row_of(const Matrix& m, std::int64_t row) {
  return static_cast<char*>(m.data) + row * m.row_stride * size_of(m.dtype);
}

RowIn row_in(const Matrix& logits, std::int64_t row, std::int64_t target) {
  return RowIn{row_of(logits, row), logits.vocab_stride, logits.vocab, target, 0.0, nullptr, false, false};
}

// Per-row numbers are float, or double beside double logits.
std::int64_t row_number_size(Dtype dtype) { return dtype == Dtype::kF64 ? 8 : 4; }

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

// Moves terms that are relative to one maximum to another, `shift` above it.
void rebase(RowTerms& terms, double shift) {
  if (terms.sum == 0.0) return;
  const double scale = std::exp(-shift);
  terms.moment = scale * (terms.moment - shift * terms.sum);
  terms.sum *= scale;
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

// The target is the first of the row's largest logits.
bool is_argmax(const RowTerms& t) { return t.target > t.before && t.target >= t.max; }

double entropy_of(RowTerms t, const RowResult& r) {
  // lse - sum p z' = log(sum) - moment / sum, all about the row's maximum.
  rebase(t, r.max - t.max);
  const double away = t.target - r.max;
  const double moment = t.moment + (away == -kInf ? 0.0 : std::exp(away) * away);
  return std::max(0.0, std::log(r.sum) - moment / r.sum);
}

bool in_range(std::int64_t target, std::int64_t vocab) { return target >= 0 && target < vocab; }

std::int64_t rows_per_piece(std::int64_t vocab) {
  return std::max<std::int64_t>(1, kNumbersPerPiece / std::max<std::int64_t>(vocab, 1));
}

double total_weight(const LossOptions& options, std::int64_t vocab, Dtype dtype) {
  if (options.class_weight == nullptr) return static_cast<double>(vocab);
  double total = 0.0;
  for (std::int64_t v = 0; v < vocab; ++v) total += get(options.class_weight, dtype, v);
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
      : logits(logits_),
        grad(grad_),
        options(options_),
        weight_total(total_weight(options_, logits_.vocab, logits_.dtype)) {
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
                      upstream * hit,
                      upstream * (each * weight_total + 2.0 * options.z_loss * lse),
                      upstream * each,
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

// Terms of the classes [vocab_start, vocab_start + logits.vocab) of one row.
RowTerms terms_of(const Matrix& logits, std::int64_t row, std::int64_t target, std::int64_t vocab_start,
                  const LossOptions& options, bool moment) {
  const std::int64_t local = target - vocab_start;
  RowIn in = row_in(logits, row, in_range(local, logits.vocab) ? local : -1);
  in.softcap = options.softcap;
  in.smooth = options.label_smoothing != 0.0;
  in.moment = moment;
  if (options.class_weight != nullptr) {
    in.class_weight = static_cast<const char*>(options.class_weight) + vocab_start * row_number_size(logits.dtype);
  }
  RowTerms terms = loops().terms[static_cast<int>(logits.dtype)](in);
  if (local >= logits.vocab) terms.before = terms.max;
  return terms;
}

// Writes what scoring found for one row; true if the row is faulty.
bool put_score(const ScoreOut& out, Dtype dtype, std::int64_t row, const RowTerms& terms, bool valid_target) {
  const RowResult r = valid_target ? finish(terms) : RowResult{};
  const bool faulty = std::isnan(r.lse);
  put(out.nll, dtype, row, r.nll);
  put(out.lse, dtype, row, r.lse);
  if (out.correct != nullptr) out.correct[row] = !faulty && is_argmax(terms);
  if (out.entropy != nullptr) put(out.entropy, dtype, row, faulty ? kNan : entropy_of(terms, r));
  return faulty;
}

void put_ignored(const ScoreOut& out, Dtype dtype, std::int64_t row) {
  put(out.nll, dtype, row, 0.0);
  put(out.lse, dtype, row, 0.0);
  if (out.correct != nullptr) out.correct[row] = false;
  if (out.entropy != nullptr) put(out.entropy, dtype, row, 0.0);
}

// Writes loss and lse of one row; the lse, NaN for a faulty row.
double put_loss(const LossOut& out, Dtype dtype, std::int64_t row, const RowTerms& terms, std::int64_t target,
                std::int64_t vocab, const LossOptions& options, double weight_total) {
  const RowResult r = finish(terms);
  const double eps = options.label_smoothing;
  const double weight = options.class_weight == nullptr ? 1.0 : get(options.class_weight, dtype, target);
  double loss = (1.0 - eps) * weight * r.nll + options.z_loss * r.lse * r.lse;
  if (eps != 0.0) {
    const double weighted = terms.weighted + weight * terms.target;
    loss += eps / static_cast<double>(vocab) * (weight_total * r.lse - weighted);
  }
  put(out.loss, dtype, row, loss);
  out.lse[row] = r.lse;
  return r.lse;
}

// Calls body(row) for every row, which says whether the row is faulty, and adds up the faults.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t vocab, int threads, std::int32_t* faults, const Body& body) {
  std::atomic<std::int32_t> total{0};
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    std::int32_t faulty = 0;
    for (std::int64_t row = begin; row < end; ++row) faulty += body(row) ? 1 : 0;
    total.fetch_add(faulty, std::memory_order_relaxed);
  };
  parallel_for(rows, rows_per_piece(vocab), threads, piece);
  if (faults != nullptr) *faults += total.load();
}

std::int64_t first_bad_target(const Targets& targets, std::int64_t rows, std::int64_t vocab) {
  for (std::int64_t i = 0; i < rows; ++i) {
    if (targets[i] != targets.ignore_index && !in_range(targets[i], vocab)) return i;
  }
  return -1;
}

}  // namespace

const Loops& loops() {
  static const Loops chosen = choose_loops();
  return chosen;
}

const char* cross_entropy_isa() { return loops().name; }

void merge(RowTerms& terms, RowTerms more) {
  terms.weighted += more.weighted;
  terms.before = std::max(terms.before, more.before);
  if (more.target != -kInf) terms.target = more.target;
  if (more.sum == 0.0) return;  // nothing but -inf
  if (more.max > terms.max) {
    rebase(terms, more.max - terms.max);
    terms.max = more.max;
  } else {
    rebase(more, terms.max - more.max);
  }
  terms.sum += more.sum;
  terms.moment += more.moment;
}

void token_nll(const Matrix& logits, const Targets& targets, const ScoreOut& out, int threads) {
  for_rows(logits.rows, logits.vocab, threads, out.faults, [&](std::int64_t row) {
    const std::int64_t target = targets[row];
    if (target == targets.ignore_index) {
      put_ignored(out, logits.dtype, row);
      return false;
    }
    const bool valid = in_range(target, logits.vocab);
    const RowTerms terms = valid ? terms_of(logits, row, target, 0, {}, out.entropy != nullptr) : RowTerms{};
    return put_score(out, logits.dtype, row, terms, valid);
  });
}

void token_nll_shard(const Matrix& logits, const Targets& targets, std::int64_t vocab_start, void* max, void* sum,
                     void* target_logit, int threads) {
  for_rows(logits.rows, logits.vocab, threads, nullptr, [&](std::int64_t row) {
    RowTerms terms;
    if (targets[row] != targets.ignore_index) terms = terms_of(logits, row, targets[row], vocab_start, {}, false);
    put(max, logits.dtype, row, terms.max);
    put(sum, logits.dtype, row, terms.sum);
    put(target_logit, logits.dtype, row, terms.target);
    return false;
  });
}

void add_terms(const Matrix& logits, const Targets& targets, std::int64_t vocab_start, const LossOptions& options,
               bool moment, RowTerms* terms, int threads) {
  for_rows(logits.rows, logits.vocab, threads, nullptr, [&](std::int64_t row) {
    if (targets[row] != targets.ignore_index) {
      merge(terms[row], terms_of(logits, row, targets[row], vocab_start, options, moment));
    }
    return false;
  });
}

void score_of_terms(const RowTerms* terms, const Targets& targets, std::int64_t rows, std::int64_t vocab, Dtype dtype,
                    const ScoreOut& out) {
  for_rows(rows, 1, 1, out.faults, [&](std::int64_t row) {
    if (targets[row] == targets.ignore_index) {
      put_ignored(out, dtype, row);
      return false;
    }
    return put_score(out, dtype, row, terms[row], in_range(targets[row], vocab));
  });
}

std::int64_t loss_of_terms(const RowTerms* terms, const Targets& targets, std::int64_t rows, std::int64_t vocab,
                           Dtype dtype, const LossOptions& options, const LossOut& out) {
  const std::int64_t bad = first_bad_target(targets, rows, vocab);
  if (bad >= 0) return bad;
  const double weights = total_weight(options, vocab, dtype);
  for_rows(rows, 1, 1, out.faults, [&](std::int64_t row) {
    if (targets[row] == targets.ignore_index) {
      put(out.loss, dtype, row, 0.0);
      out.lse[row] = 0.0;
      return false;
    }
    return std::isnan(put_loss(out, dtype, row, terms[row], targets[row], vocab, options, weights));
  });
  return -1;
}

std::int64_t cross_entropy(const Matrix& logits, const Targets& targets, const LossOptions& options, const LossOut& out,
                           const Matrix* grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads) {
  const std::int64_t bad = first_bad_target(targets, logits.rows, logits.vocab);
  if (bad >= 0) return bad;
  const Dtype dtype = logits.dtype;
  const double weights = total_weight(options, logits.vocab, dtype);
  std::optional<GradWriter> writer;
  if (grad != nullptr) writer.emplace(logits, *grad, options);
  for_rows(logits.rows, logits.vocab, threads, out.faults, [&](std::int64_t row) {
    const std::int64_t target = targets[row];
    if (target == targets.ignore_index) {
      put(out.loss, dtype, row, 0.0);
      out.lse[row] = 0.0;
      if (writer) writer->zero(row);
      return false;
    }
    const RowTerms terms = terms_of(logits, row, target, 0, options, false);
    const double lse = put_loss(out, dtype, row, terms, target, logits.vocab, options, weights);
    if (writer) (*writer)(row, target, lse, get(grad_loss, dtype, row * grad_loss_stride));
    return std::isnan(lse);
  });
  return -1;
}

void cross_entropy_backward(const Matrix& logits, const Targets& targets, const LossOptions& options, const double* lse,
                            const Matrix& grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads) {
  const GradWriter writer(logits, grad, options);
  for_rows(logits.rows, logits.vocab, threads, nullptr, [&](std::int64_t row) {
    const std::int64_t target = targets[row];
    if (target == targets.ignore_index || !in_range(target, logits.vocab)) {
      writer.zero(row);
    } else {
      writer(row, target, lse[row], get(grad_loss, logits.dtype, row * grad_loss_stride));
    }
    return false;
  });
}

void scale_rows(const Matrix& rows, const void* factor, std::int64_t factor_stride, int threads) {
  for_rows(rows.rows, rows.vocab, threads, nullptr, [&](std::int64_t row) {
    const double f = get(factor, rows.dtype, row * factor_stride);
    if (f != 1.0) loops().scale[static_cast<int>(rows.dtype)](row_of(rows, row), rows.vocab_stride, rows.vocab, f);
    return false;
  });
}

double sum_rows(const void* values, bool is_double, std::int64_t count) {
  double total = 0.0;
  for (std::int64_t i = 0; i < count; ++i) total += get(values, is_double ? Dtype::kF64 : Dtype::kF32, i);
  return total;
}

}  // namespace prism
