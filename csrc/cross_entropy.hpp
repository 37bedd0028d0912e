// Cross-entropy on the CPU: scoring, loss and gradient, row by row. Plain pointers in and out; the caller owns every
// buffer and has checked shapes. Nothing here throws or depends on the number of threads: a row's results are made by
// one thread, in an order fixed by the row's length alone.
//
// A row's terms are summed in float (double for double logits) in 32 fixed lanes over blocks of fixed length, without
// the target; each block is brought to its own maximum, and blocks and target are merged in double, in order. So the
// target's share is never lost in the sum (a loss of 1e-9 is not rounded to 0), no loss is negative, and a vocabulary
// of one gives exactly 0.
#pragma once

#include <cstdint>

namespace prism {

enum class Dtype : int { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };

// [rows, vocab] numbers; strides in elements, of any sign or size (0 too, for what is only read).
struct Matrix {
  void* data;
  Dtype dtype;
  std::int64_t rows;
  std::int64_t vocab;
  std::int64_t row_stride;
  std::int64_t vocab_stride;
};

// Class ids, one per row, contiguous, int32 or int64.
struct Targets {
  const void* data;
  bool is_int64;
  std::int64_t ignore_index;

  std::int64_t operator[](std::int64_t row) const {
    return is_int64 ? static_cast<const std::int64_t*>(data)[row]
                    : std::int64_t{static_cast<const std::int32_t*>(data)[row]};
  }
};

// loss = (1 - label_smoothing) * w[target] * nll + label_smoothing / vocab * sum_v w[v] * (lse - z[v])
//        + z_loss * lse^2, on z = softcap * tanh(logits / softcap) when softcap > 0.
struct LossOptions {
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  double softcap = 0.0;
  const void* class_weight = nullptr;  // [vocab] float, or double for double logits; null: all 1
};

// Where scoring writes, one entry per row. Null: not wanted. float, or double for double logits.
struct ScoreOut {
  void* nll = nullptr;
  void* lse = nullptr;
  bool* correct = nullptr;  // the target is the first of the row's largest logits
  void* entropy = nullptr;  // of the predicted distribution, in nats
  std::int32_t* faults = nullptr;
};

// Scoring. Ignored rows give 0 (and false), faulty ones NaN.
void token_nll(const Matrix& logits, const Targets& targets, const ScoreOut& out, int threads);

// One vocabulary shard, whose class 0 is `vocab_start` of the whole: max, sum of exp(z - max) and the target's logit
// (-inf where another shard holds it). float, or double for double logits.
void token_nll_shard(const Matrix& logits, const Targets& targets, std::int64_t vocab_start, void* max, void* sum,
                     void* target_logit, int threads);

// What one pass over some classes of a row gives: sums over those classes but the target, relative to their maximum.
// Terms of consecutive parts of a vocabulary merge into those of the whole.
struct RowTerms {
  double max = -__builtin_inf();
  double sum = 0.0;                  // of exp(z' - max)
  double moment = 0.0;               // of exp(z' - max) * (z' - max), where it was asked for
  double weighted = 0.0;             // of w * z', where it was asked for
  double before = -__builtin_inf();  // maximum over the classes before the target
  double target = -__builtin_inf();  // z'[target], where the target is among the classes
};

// The same for logits that are made in blocks of consecutive classes, the first one first and `vocab_start` of the
// whole: adds each row's terms of the block to `terms` [rows].
void add_terms(const Matrix& logits, const Targets& targets, std::int64_t vocab_start, const LossOptions& options,
               bool moment, RowTerms* terms, int threads);

// Scores from the terms of all `vocab` classes.
void score_of_terms(const RowTerms* terms, const Targets& targets, std::int64_t rows, std::int64_t vocab, Dtype dtype,
                    const ScoreOut& out);

struct LossOut {
  void* loss;            // [rows] float, or double for double logits
  double* lse;           // [rows]; double, so that the gradient can subtract it without rounding
  std::int32_t* faults;  // [1], added to
};

// The loss of each row; with `grad`, also d/dlogits of sum_i grad_loss[i] * loss[i] while the row is in cache. `grad`
// may be the logits themselves. Returns the first row whose target is neither ignored nor in range, or -1.
std::int64_t cross_entropy(const Matrix& logits, const Targets& targets, const LossOptions& options, const LossOut& out,
                           const Matrix* grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads);

// The loss from the terms of all `vocab` classes; returns as cross_entropy does.
std::int64_t loss_of_terms(const RowTerms* terms, const Targets& targets, std::int64_t rows, std::int64_t vocab,
                           Dtype dtype, const LossOptions& options, const LossOut& out);

// The gradient alone, from the `lse` of the forward pass; the same bits as the gradient made with the loss.
void cross_entropy_backward(const Matrix& logits, const Targets& targets, const LossOptions& options, const double* lse,
                            const Matrix& grad, const void* grad_loss, std::int64_t grad_loss_stride, int threads);

// rows[i] *= factor[i]; rows whose factor is 1 are not touched.
void scale_rows(const Matrix& rows, const void* factor, std::int64_t factor_stride, int threads);

// Sum of float or double values, through double, first to last.
double sum_rows(const void* values, bool is_double, std::int64_t count);

// "avx512bf16", "avx512", "avx2" or "portable": the instruction set in use, the best this processor has. The
// environment variable PRISM_FAST_ISA, read once, asks for another; one that the processor lacks is not taken.
const char* cross_entropy_isa();

}  // namespace prism
