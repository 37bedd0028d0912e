// The loops of the loss kernels, written once over an instruction set `Isa` and compiled once per instruction set (each
// cross_entropy_<isa>.cpp includes this file under its own compiler flags). What happens around the loops, once per
// row, is in cross_entropy.cpp.
//
// Everything here is in an unnamed namespace and calls no inline function of the standard library: a copy of
// std::min compiled for AVX-512 could otherwise be the one that the linker keeps for everybody.
#pragma once

#include <math.h>
#include <string.h>

#include "cross_entropy_loops.hpp"

namespace prism {
namespace {

constexpr std::int64_t kLanes = 32;    // logical lanes of every sum, whatever the register width
constexpr std::int64_t kBlock = 4096;  // numbers brought to one maximum; 16 KB of float, half of a first-level cache
constexpr float kInfinity = __builtin_inff();

template <class Isa>
using Vec = typename Isa::F;

template <class Isa>
inline constexpr int kRegs = kLanes / Isa::kWidth;

// exp(x) for x in [kExpFloor, 0] and a little above: 2^n * p(r), x = n ln 2 + r, |r| <= ln(2) / 2, p of degree 6 with
// relative error 3e-9 before rounding. Below the floor the scale 2^n has an all-zero exponent: exactly 0. NaN stays.
constexpr float kExpFloor = -88.0f;
constexpr double kExpFloorDouble = -746.0;

template <class Isa>
inline Vec<Isa> exp_floor() {
  if constexpr (Isa::kDouble) {
    return Isa::set1(kExpFloorDouble);
  } else {
    return Isa::set1(kExpFloor);
  }
}

template <class Isa>
inline Vec<Isa> exp_of(Vec<Isa> x) {
  if constexpr (Isa::kDouble) {
    return ::exp(x);
  } else {
    // Adding 1.5 * 2^23 rounds to an integer that sits in the low bits; 127 more makes it a float's exponent field.
    const auto magic = Isa::set1(12582912.0f + 127.0f);
    const auto shifted = Isa::fma(x, Isa::set1(0x1.715476p+0f), magic);
    const auto n = Isa::sub(shifted, magic);
    // ln 2 in two parts, the first with few enough bits for n * part to be exact without a fused multiply-add.
    auto r = Isa::fma(n, Isa::set1(-0.693359375f), x);
    r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
    auto p = Isa::fma(Isa::set1(0x1.6a23d0p-10f), r, Isa::set1(0x1.123a20p-7f));
    p = Isa::fma(p, r, Isa::set1(0x1.5558f2p-5f));
    p = Isa::fma(p, r, Isa::set1(0x1.555492p-3f));
    p = Isa::fma(p, r, Isa::set1(0x1.fffffcp-2f));
    p = Isa::fma(p, r, Isa::set1(1.0f));
    p = Isa::fma(p, r, Isa::set1(1.0f));
    return Isa::mul(p, Isa::low_bits_as_exponent(shifted));
  }
}

// z' = cap * tanh(z / cap), and dz'/dz = 1 - tanh^2 where wanted.
template <class Isa>
struct Softcap {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;
  F cap;
  F inverse;

  explicit Softcap(double value)
      : cap(Isa::set1(static_cast<C>(value))), inverse(Isa::set1(static_cast<C>(1.0 / value))) {}

  F operator()(F z) const {
    F slope;
    return apply<false>(z, slope);
  }

  F with_slope(F z, F& slope) const { return apply<true>(z, slope); }

 private:
  template <bool kSlope>
  F apply(F z, F& slope) const {
    const F x = Isa::mul(z, inverse);
    if constexpr (Isa::kDouble) {
      const F t = ::tanh(x);
      if constexpr (kSlope) {
        const F e = ::exp(-2.0 * ::fabs(x));
        slope = 4.0 * e / ((1.0 + e) * (1.0 + e));
      }
      return cap * t;
    } else {
      const F one = Isa::set1(1.0f);
      const F a = Isa::abs(x);
      const F e = exp_of<Isa>(Isa::max(Isa::set1(kExpFloor), Isa::mul(a, Isa::set1(-2.0f))));
      const F inverse_sum = Isa::div(one, Isa::add(one, e));
      const F large = Isa::mul(Isa::sub(one, e), inverse_sum);
      // Near 0, 1 - e loses the leading digits: an odd polynomial instead (error 4e-9 of tanh for |x| < 0.625).
      const F x2 = Isa::mul(a, a);
      F q = Isa::fma(Isa::set1(-0.00570498f), x2, Isa::set1(0.02063908f));
      q = Isa::fma(q, x2, Isa::set1(-0.05373971f));
      q = Isa::fma(q, x2, Isa::set1(0.13331442f));
      q = Isa::fma(q, x2, Isa::set1(-0.33333282f));
      const F small = Isa::fma(Isa::mul(a, x2), q, a);
      if constexpr (kSlope) slope = Isa::mul(Isa::mul(Isa::set1(4.0f), e), Isa::mul(inverse_sum, inverse_sum));
      return Isa::mul(cap, Isa::copy_sign(Isa::select_less(a, Isa::set1(0.625f), small, large), x));
    }
  }
};

// Sum of the 32 lanes in one order for every register width: halves added down to 8 lanes, those in double.
template <class Isa>
inline double sum_lanes(Vec<Isa> (&r)[kRegs<Isa>]) {
  constexpr int kLast = Isa::kWidth >= 8 ? 1 : 8 / Isa::kWidth;
  for (int half = kRegs<Isa> / 2; half >= kLast; half /= 2) {
    for (int k = 0; k < half; ++k) r[k] = Isa::add(r[k], r[k + half]);
  }
  typename Isa::Scalar lanes[kLast * Isa::kWidth];
  for (int k = 0; k < kLast; ++k) Isa::store(lanes + k * Isa::kWidth, r[k]);
  double sum = 0.0;
  for (int j = 0; j < 8; ++j) {
    auto lane = lanes[j];
    if constexpr (Isa::kWidth == 16) lane += lanes[j + 8];
    sum += static_cast<double>(lane);
  }
  return sum;
}

template <class Isa>
inline typename Isa::Scalar max_lanes(Vec<Isa> (&r)[kRegs<Isa>]) {
  for (int half = kRegs<Isa> / 2; half >= 1; half /= 2) {
    for (int k = 0; k < half; ++k) r[k] = Isa::max(r[k], r[k + half]);
  }
  typename Isa::Scalar lanes[Isa::kWidth];
  Isa::store(lanes, r[0]);
  auto best = lanes[0];
  for (int j = 1; j < Isa::kWidth; ++j) best = lanes[j] > best ? lanes[j] : best;
  return best;
}

template <class Isa>
inline typename Isa::Scalar first_lane(Vec<Isa> v) {
  typename Isa::Scalar lanes[Isa::kWidth];
  Isa::store(lanes, v);
  return lanes[0];
}

// One number of the logits' type, as the vector code sees it.
template <class Isa, class T>
inline typename Isa::Scalar to_scalar(T value) {
  T copies[Isa::kWidth];
  for (int j = 0; j < Isa::kWidth; ++j) copies[j] = value;
  return first_lane<Isa>(Isa::load(copies));
}

template <class Isa, class T>
inline T from_scalar(typename Isa::Scalar value) {
  T lanes[Isa::kWidth];
  Isa::store(lanes, Isa::set1(value));
  return lanes[0];
}

template <class T>
inline T minus_infinity();
template <>
inline float minus_infinity<float>() {
  return -kInfinity;
}
template <>
inline double minus_infinity<double>() {
  return -__builtin_inf();
}
template <>
inline BFloat16 minus_infinity<BFloat16>() {
  return BFloat16{0xFF80};
}
template <>
inline Half minus_infinity<Half>() {
  return Half{0xFC00};
}

// `n` numbers of a row in consecutive memory: the row itself, or a copy where the row is strided.
template <class T>
inline const T* contiguous(const T* z, std::int64_t stride, std::int64_t n, T* buffer) {
  if (stride == 1) return z;
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = z[i * stride];
  return buffer;
}

// The terms of one block, whose target, if any, is left out already.
template <class Isa, class T, bool kCap, bool kSmooth, bool kMoment>
inline RowTerms block_terms(const T* z, std::int64_t n, const typename Isa::Scalar* w, const Softcap<Isa>* softcap,
                            bool prefetch) {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;
  constexpr int R = kRegs<Isa>;
  constexpr int W = Isa::kWidth;
  const std::int64_t full = n - n % kLanes;
  T tail[kLanes];
  if (full < n) {
    for (std::int64_t i = full; i < n; ++i) tail[i - full] = z[i];
    for (std::int64_t i = n; i < full + kLanes; ++i) tail[i - full] = minus_infinity<T>();
  }

  F best[R];
  for (int k = 0; k < R; ++k) best[k] = Isa::set1(-static_cast<C>(kInfinity));
  for (std::int64_t i = 0; i < full; i += kLanes) {
    for (int k = 0; k < R; ++k) best[k] = Isa::max(best[k], Isa::load(z + i + k * W));
  }
  if (full < n) {
    for (int k = 0; k < R; ++k) best[k] = Isa::max(best[k], Isa::load(tail + k * W));
  }
  C max = max_lanes<Isa>(best);
  if constexpr (kCap) max = first_lane<Isa>((*softcap)(Isa::set1(max)));
  // A block of -inf has no maximum to subtract; NaN must still come through.
  const C origin = max == -static_cast<C>(kInfinity) ? C{0} : max;

  const F floor = exp_floor<Isa>();
  const F shift = Isa::set1(origin);
  F sum[R], moment[R], distance[R], weight[R];
  for (int k = 0; k < R; ++k) sum[k] = moment[k] = distance[k] = weight[k] = Isa::set1(0);
  const auto capped = [&](F logit) {
    if constexpr (kCap) logit = (*softcap)(logit);
    return logit;
  };
  const auto add_term = [&](F logit, int k) {
    const F d = Isa::sub(logit, shift);
    const F clamped = Isa::max(floor, d);
    const F e = exp_of<Isa>(clamped);
    sum[k] = Isa::add(sum[k], e);
    if constexpr (kMoment) moment[k] = Isa::fma(e, clamped, moment[k]);
    return d;
  };
  for (std::int64_t i = 0; i < full; i += kLanes) {
    if (prefetch) {  // the next block arrives from memory while this one is in the arithmetic units
      for (std::size_t byte = 0; byte < kLanes * sizeof(T); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(z + i + kBlock) + byte);
      }
    }
    for (int k = 0; k < R; ++k) {
      const F d = add_term(capped(Isa::load(z + i + k * W)), k);
      if constexpr (kSmooth) {
        if (w != nullptr) {
          const F wk = Isa::load(w + i + k * W);
          distance[k] = Isa::fma(wk, d, distance[k]);
          weight[k] = Isa::add(weight[k], wk);
        } else {
          distance[k] = Isa::add(distance[k], d);
        }
      }
    }
  }
  double tail_distance = 0.0;
  double tail_weight = 0.0;
  if (full < n) {
    C lanes[kLanes];
    for (int k = 0; k < R; ++k) Isa::store(lanes + k * W, capped(Isa::load(tail + k * W)));
    for (std::int64_t i = n - full; i < kLanes; ++i) lanes[i] = -static_cast<C>(kInfinity);  // the cap moved them
    for (int k = 0; k < R; ++k) Isa::store(lanes + k * W, add_term(Isa::load(lanes + k * W), k));
    if constexpr (kSmooth) {
      for (std::int64_t i = full; i < n; ++i) {
        const double wi = w != nullptr ? static_cast<double>(w[i]) : 1.0;
        tail_distance += wi * static_cast<double>(lanes[i - full]);
        tail_weight += wi;
      }
    }
  }
  RowTerms terms;
  terms.max = static_cast<double>(max);
  terms.sum = sum_lanes<Isa>(sum);
  if constexpr (kMoment) terms.moment = sum_lanes<Isa>(moment);
  if constexpr (kSmooth) {
    const double weights = tail_weight + (w != nullptr ? sum_lanes<Isa>(weight) : static_cast<double>(full));
    terms.weighted = sum_lanes<Isa>(distance) + tail_distance + static_cast<double>(origin) * weights;
  }
  return terms;
}

template <class Isa, class T, bool kCap, bool kSmooth, bool kMoment>
RowTerms row_terms_of(const RowIn& in) {
  using C = typename Isa::Scalar;
  const T* z = static_cast<const T*>(in.logits);
  const C* w = static_cast<const C*>(in.class_weight);
  const Softcap<Isa> softcap(kCap ? in.softcap : 1.0);
  T buffer[kBlock];
  RowTerms row;
  const auto segment = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kBlock) {
      const std::int64_t n = end - i < kBlock ? end - i : kBlock;
      const T* block = contiguous(z + i * in.stride, in.stride, n, buffer);
      merge(row, block_terms<Isa, T, kCap, kSmooth, kMoment>(block, n, w != nullptr ? w + i : nullptr, &softcap,
                                                             in.stride == 1));
    }
  };
  if (in.target < 0) {
    segment(0, in.vocab);
    return row;
  }
  segment(0, in.target);
  row.before = row.max;
  segment(in.target + 1, in.vocab);
  C target = to_scalar<Isa>(z[in.target * in.stride]);
  if constexpr (kCap) target = first_lane<Isa>(softcap(Isa::set1(target)));
  row.target = static_cast<double>(target);
  return row;
}

template <class Isa, class T>
RowTerms row_terms(const RowIn& in) {
  if (in.softcap > 0.0) {
    return in.smooth ? row_terms_of<Isa, T, true, true, false>(in) : row_terms_of<Isa, T, true, false, false>(in);
  }
  if (in.smooth) return row_terms_of<Isa, T, false, true, false>(in);
  if (in.moment) return row_terms_of<Isa, T, false, false, true>(in);
  return row_terms_of<Isa, T, false, false, false>(in);
}

// grad[v] = (scale * exp(z'[v] - lse) - uniform * w[v]) * dz'/dz, for every class; the target's own term is put in
// afterwards, from double.
template <class Isa, class T, bool kCap, bool kSmooth>
void row_grad_of(const RowIn& in, const RowGrad& grad) {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;
  constexpr int W = Isa::kWidth;
  const T* z = static_cast<const T*>(in.logits);
  const C* w = static_cast<const C*>(in.class_weight);
  T* out = static_cast<T*>(grad.out);
  const Softcap<Isa> softcap(kCap ? in.softcap : 1.0);
  // lse in two parts: rounding it to float would move every probability by the rounding error of a large offset.
  const C high = static_cast<C>(grad.lse);
  const F lse_high = Isa::set1(high);
  const F lse_low = Isa::set1(high - high == 0 ? static_cast<C>(grad.lse - static_cast<double>(high)) : C{0});
  const F scale = Isa::set1(static_cast<C>(grad.scale));
  const F uniform = Isa::set1(static_cast<C>(grad.uniform));
  const F floor = exp_floor<Isa>();

  C target_capped = 0;
  F target_slope = Isa::set1(1);
  if (in.target >= 0) {
    F t = Isa::set1(to_scalar<Isa>(z[in.target * in.stride]));
    if constexpr (kCap) t = softcap.with_slope(t, target_slope);
    target_capped = first_lane<Isa>(t);
  }

  const auto value = [&](F logit, F weight) {
    F slope;
    if constexpr (kCap) logit = softcap.with_slope(logit, slope);
    const F d = Isa::sub(Isa::sub(logit, lse_high), lse_low);
    const F p = exp_of<Isa>(Isa::max(floor, d));
    F g = Isa::mul(scale, p);
    if constexpr (kSmooth) g = Isa::sub(g, Isa::mul(uniform, weight));
    if constexpr (kCap) g = Isa::mul(g, slope);
    return g;
  };
  const auto weight_at = [&](std::int64_t i) {
    if constexpr (kSmooth) {
      if (w != nullptr) return Isa::load(w + i);
    }
    return Isa::set1(1);
  };
  // Fewer than a register's worth: through a padded copy, so that every class has the same bits wherever it falls.
  const auto few = [&](const T* from, T* to, std::int64_t v, std::int64_t n) {
    T in_lanes[W];
    T out_lanes[W];
    C weights[W];
    for (std::int64_t j = 0; j < W; ++j) {
      in_lanes[j] = from[j < n ? j : 0];
      weights[j] = kSmooth && w != nullptr ? w[v + (j < n ? j : 0)] : C{1};
    }
    Isa::store(out_lanes, value(Isa::load(in_lanes), Isa::load(weights)));
    for (std::int64_t j = 0; j < n; ++j) to[j] = out_lanes[j];
  };

  T in_buffer[kBlock];
  T out_buffer[kBlock];
  for (std::int64_t begin = 0; begin < in.vocab; begin += kBlock) {
    const std::int64_t n = in.vocab - begin < kBlock ? in.vocab - begin : kBlock;
    const T* from = contiguous(z + begin * in.stride, in.stride, n, in_buffer);
    T* to = grad.stride == 1 ? out + begin : out_buffer;
    std::int64_t i = 0;
    if (grad.stream && grad.stride == 1) {
      const auto misaligned =
          static_cast<std::int64_t>((reinterpret_cast<std::uintptr_t>(to) % (W * sizeof(T))) / sizeof(T));
      if (misaligned != 0) {
        i = W - misaligned < n ? W - misaligned : n;
        few(from, to, begin, i);
      }
      for (; i + W <= n; i += W) Isa::stream(to + i, value(Isa::load(from + i), weight_at(begin + i)));
    } else {
      for (; i + W <= n; i += W) Isa::store(to + i, value(Isa::load(from + i), weight_at(begin + i)));
    }
    if (i < n) few(from + i, to + i, begin + i, n - i);
    if (grad.stride != 1) {
      for (std::int64_t j = 0; j < n; ++j) out[(begin + j) * grad.stride] = out_buffer[j];
    }
  }
  if (grad.stream) Isa::fence();

  if (in.target >= 0) {
    // p - 1 from expm1, exact where p is close to 1.
    const double weight = kSmooth && w != nullptr ? static_cast<double>(w[in.target]) : 1.0;
    const double log_p = static_cast<double>(target_capped) - grad.lse;
    const double g = (grad.hit * ::expm1(log_p) + (grad.scale - grad.hit) * ::exp(log_p) - grad.uniform * weight) *
                     static_cast<double>(first_lane<Isa>(target_slope));
    out[in.target * grad.stride] = from_scalar<Isa, T>(static_cast<C>(g));
  }
}

template <class Isa, class T>
void row_grad(const RowIn& in, const RowGrad& grad) {
  if (in.softcap > 0.0) {
    in.smooth ? row_grad_of<Isa, T, true, true>(in, grad) : row_grad_of<Isa, T, true, false>(in, grad);
  } else {
    in.smooth ? row_grad_of<Isa, T, false, true>(in, grad) : row_grad_of<Isa, T, false, false>(in, grad);
  }
}

template <class Isa, class T>
void row_scale(void* row, std::int64_t stride, std::int64_t n, double factor) {
  using C = typename Isa::Scalar;
  constexpr int W = Isa::kWidth;
  T* z = static_cast<T*>(row);
  const Vec<Isa> f = Isa::set1(static_cast<C>(factor));
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + W <= n; i += W) Isa::store(z + i, Isa::mul(Isa::load(z + i), f));
  }
  for (; i < n; ++i) {
    z[i * stride] = from_scalar<Isa, T>(to_scalar<Isa>(z[i * stride]) * static_cast<C>(factor));
  }
}

template <class Isa>
constexpr Loops float_loops(const char* name) {
  Loops loops{};
  loops.name = name;
  loops.terms[static_cast<int>(Dtype::kF32)] = row_terms<Isa, float>;
  loops.terms[static_cast<int>(Dtype::kBF16)] = row_terms<Isa, BFloat16>;
  loops.terms[static_cast<int>(Dtype::kF16)] = row_terms<Isa, Half>;
  loops.grad[static_cast<int>(Dtype::kF32)] = row_grad<Isa, float>;
  loops.grad[static_cast<int>(Dtype::kBF16)] = row_grad<Isa, BFloat16>;
  loops.grad[static_cast<int>(Dtype::kF16)] = row_grad<Isa, Half>;
  loops.scale[static_cast<int>(Dtype::kF32)] = row_scale<Isa, float>;
  loops.scale[static_cast<int>(Dtype::kBF16)] = row_scale<Isa, BFloat16>;
  loops.scale[static_cast<int>(Dtype::kF16)] = row_scale<Isa, Half>;
  return loops;
}

}  // namespace
}  // namespace prism
