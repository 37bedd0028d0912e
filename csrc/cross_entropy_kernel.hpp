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
using Registers = Vec<Isa>[kLanes / Isa::kWidth];

template <class Isa>
inline constexpr int kRegs = kLanes / Isa::kWidth;

// factor * exp(x), for x up to a little above 0: x = n ln 2 + r with |r| <= ln(2) / 2, and 2^n * p(r) with p of degree
// 5 (relative error 1.1e-7, none at 0). The factor is multiplied into p's coefficients, so it costs nothing. Below
// `floor` the scale 2^n has an all-zero exponent field: exactly 0, without a branch. NaN stays NaN.
template <class Isa>
struct Exp {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;

  explicit Exp(double factor = 1.0)
      : floor(Isa::set1(Isa::kDouble ? C(-746) : C(-88))),
        c0(Isa::set1(static_cast<C>(factor))),
        c2(Isa::set1(static_cast<C>(factor * 0x1.fffdfcp-2))),
        c3(Isa::set1(static_cast<C>(factor * 0x1.5557b0p-3))),
        c4(Isa::set1(static_cast<C>(factor * 0x1.572a64p-5))),
        c5(Isa::set1(static_cast<C>(factor * 0x1.106250p-7))) {}

  F clamp(F x) const { return Isa::max(floor, x); }

  // factor * exp(x), x clamped.
  F operator()(F x) const {
    if constexpr (Isa::kDouble) {
      return c0 * ::exp(x);
    } else {
      F power;
      const F p = parts(x, power);
      return Isa::mul(p, power);
    }
  }

  // sum + factor * exp(x), x clamped.
  F add_to(F sum, F x) const {
    if constexpr (Isa::kDouble) {
      return sum + c0 * ::exp(x);
    } else {
      F power;
      const F p = parts(x, power);
      return Isa::fma(p, power, sum);
    }
  }

 private:
  F parts(F x, F& power) const {
    // Adding 1.5 * 2^23 rounds to an integer that sits in the low bits; 127 more makes it a float's exponent field.
    const F magic = Isa::set1(12582912.0f + 127.0f);
    const F shifted = Isa::fma(x, Isa::set1(0x1.715476p+0f), magic);
    const F n = Isa::sub(shifted, magic);
    F r;
    if constexpr (Isa::kFused) {
      r = Isa::fma(n, Isa::set1(-0x1.62e430p-1f), x);
    } else {  // ln 2 in two parts, the first short enough for n times it to be exact
      r = Isa::fma(n, Isa::set1(-0.693359375f), x);
      r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
    }
    F p = Isa::fma(c5, r, c4);
    p = Isa::fma(p, r, c3);
    p = Isa::fma(p, r, c2);
    p = Isa::fma(p, r, c0);
    p = Isa::fma(p, r, c0);
    power = Isa::low_bits_as_exponent(shifted);
    return p;
  }

  F floor, c0, c2, c3, c4, c5;
};

// z' = cap * tanh(z / cap), and dz'/dz = 1 - tanh^2 where wanted.
template <class Isa>
struct Softcap {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;

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
      const F e = exp(exp.clamp(Isa::mul(a, Isa::set1(-2.0f))));
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

  F cap, inverse;
  Exp<Isa> exp;
};

// Sum of the 32 lanes in one order for every register width: halves added down to 8 lanes, those in double.
template <class Isa>
inline double sum_lanes(Registers<Isa>& r) {
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
inline typename Isa::Scalar max_lanes(Registers<Isa>& r) {
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

// Calls use(pointer) for each 32 numbers of a block.
template <class T, class Use>
inline void each_32(const T* z, std::int64_t full, const T* tail, const Use& use) {
  for (std::int64_t i = 0; i < full; i += kLanes) use(z + i);
  if (tail != nullptr) use(tail);
}

// The largest number of a block; NaN may be missed.
template <class Isa>
inline typename Isa::Scalar block_max(const typename Isa::Scalar* z, std::int64_t full,
                                      const typename Isa::Scalar* tail) {
  using C = typename Isa::Scalar;
  Registers<Isa> best;
  for (auto& b : best) b = Isa::set1(-static_cast<C>(kInfinity));
  each_32(z, full, tail, [&](const C* p) {
    for (int k = 0; k < kRegs<Isa>; ++k) best[k] = Isa::max(best[k], Isa::load(p + k * Isa::kWidth));
  });
  return max_lanes<Isa>(best);
}

// The same for 16-bit numbers, by their bits: those without a sign bit are in the order of signed integers and above
// all others, those with one are in reverse order of unsigned integers. Twice the numbers an instruction, unconverted.
template <class Isa, class T>
inline float block_max(const T* z, std::int64_t full, const T* tail) {
  typename Isa::I16 signed_max = Isa::set1_16(-32768);
  typename Isa::I16 unsigned_min = Isa::set1_16(-1);
  constexpr int kPer = sizeof(typename Isa::I16) / sizeof(T);
  each_32(z, full, tail, [&](const T* p) {
    for (int k = 0; k < kLanes; k += kPer) {
      const auto v = Isa::load_16(p + k);
      signed_max = Isa::max_signed_16(signed_max, v);
      unsigned_min = Isa::min_unsigned_16(unsigned_min, v);
    }
  });
  std::int16_t signs[kPer];
  std::uint16_t others[kPer];
  memcpy(signs, &signed_max, sizeof signs);
  memcpy(others, &unsigned_min, sizeof others);
  std::int16_t best = signs[0];
  std::uint16_t least = others[0];
  for (int j = 1; j < kPer; ++j) {
    best = signs[j] > best ? signs[j] : best;
    least = others[j] < least ? others[j] : least;
  }
  return to_scalar<Isa>(T{best >= 0 ? static_cast<std::uint16_t>(best) : least});
}

// The terms of one block, whose target, if any, is left out already.
template <class Isa, class T, bool kCap, bool kSmooth, bool kMoment>
inline RowTerms block_terms(const T* z, std::int64_t n, const typename Isa::Scalar* w, const Softcap<Isa>& softcap,
                            bool prefetch) {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;
  constexpr int R = kRegs<Isa>;
  constexpr int W = Isa::kWidth;
  const std::int64_t full = n - n % kLanes;
  // What does not fill 32 lanes goes through a copy filled up with -inf.
  T padded[kLanes];
  const T* tail = nullptr;
  if (full < n) {
    for (std::int64_t i = 0; i < kLanes; ++i) padded[i] = full + i < n ? z[full + i] : minus_infinity<T>();
    tail = padded;
  }

  C max;
  if constexpr (sizeof(T) == 2) {
    max = block_max<Isa, T>(z, full, tail);
  } else {
    max = block_max<Isa>(z, full, tail);
  }
  if constexpr (kCap) max = first_lane<Isa>(softcap(Isa::set1(max)));
  // A block of -inf has no maximum to subtract; NaN must still come through.
  const C origin = max == -static_cast<C>(kInfinity) ? C{0} : max;

  const Exp<Isa> exp;
  const F shift = Isa::set1(origin);
  Registers<Isa> sum, moment, distance, weight;
  for (int k = 0; k < R; ++k) sum[k] = moment[k] = distance[k] = weight[k] = Isa::set1(0);
  const auto capped = [&](F logit) {
    if constexpr (kCap) logit = softcap(logit);
    return logit;
  };
  const auto add_term = [&](F logit, int k) {
    const F d = Isa::sub(logit, shift);
    const F clamped = exp.clamp(d);
    sum[k] = exp.add_to(sum[k], clamped);
    if constexpr (kMoment) moment[k] = Isa::fma(exp(clamped), clamped, moment[k]);
    return d;
  };
  for (std::int64_t i = 0; i < full; i += kLanes) {
    if (prefetch) {  // the next block arrives from memory while this one is in the arithmetic units
      for (std::size_t byte = 0; byte < kLanes * sizeof(T); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(z + i + kBlock) + byte);
      }
    }
    Registers<Isa> logits;
    if constexpr (kSmooth) {  // class weights come in order
      for (int k = 0; k < R; ++k) logits[k] = Isa::load(z + i + k * W);
    } else {
      Isa::load_32(z + i, logits);
    }
    for (int k = 0; k < R; ++k) {
      const F d = add_term(capped(logits[k]), k);
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
  if (tail != nullptr) {
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
      merge(row, block_terms<Isa, T, kCap, kSmooth, kMoment>(block, n, w != nullptr ? w + i : nullptr, softcap,
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

// grad[v] = ((hit + rest) * exp(z'[v] - lse) - uniform * w[v]) * dz'/dz, for every class; the target's own term is put
// in afterwards, from double.
template <class Isa, class T, bool kCap, bool kSmooth>
void row_grad_of(const RowIn& in, const RowGrad& grad) {
  using F = Vec<Isa>;
  using C = typename Isa::Scalar;
  constexpr int W = Isa::kWidth;
  const T* z = static_cast<const T*>(in.logits);
  const C* w = static_cast<const C*>(in.class_weight);
  T* out = static_cast<T*>(grad.out);
  const double scale = grad.hit + grad.rest;
  const double all = scale + grad.uniform + grad.lse;
  if (all != all) {  // a faulty row. One NaN for all: rounding to a narrower type minds no other kind
    for (std::int64_t v = 0; v < in.vocab; ++v) out[v * grad.stride] = from_scalar<Isa, T>(__builtin_nanf(""));
    return;
  }
  const Softcap<Isa> softcap(kCap ? in.softcap : 1.0);
  // What rounding the lse leaves over goes into the scale: rounded away, it would move every probability by the
  // rounding error of a large common offset.
  const C high = static_cast<C>(grad.lse);
  const double low = high - high == 0 ? grad.lse - static_cast<double>(high) : 0.0;
  const F lse = Isa::set1(high);
  const Exp<Isa> scaled_exp(scale * ::exp(-low));
  const F uniform = Isa::set1(static_cast<C>(grad.uniform));

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
    F g = scaled_exp(scaled_exp.clamp(Isa::sub(logit, lse)));
    if constexpr (kSmooth) g = Isa::sub(g, Isa::mul(uniform, weight));
    if constexpr (kCap) g = Isa::mul(g, slope);
    return g;
  };
  const auto weight_at = [&](std::int64_t v) { return w != nullptr ? Isa::load(w + v) : Isa::set1(1); };
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
  // Two registers' worth.
  const auto pair = [&](const T* from, T* to, std::int64_t v, bool stream) {
    F a, b;
    if constexpr (kSmooth) {  // class weights come in order
      a = value(Isa::load(from), weight_at(v));
      b = value(Isa::load(from + W), weight_at(v + W));
      Isa::store(to, a);
      Isa::store(to + W, b);
    } else {
      Isa::load_pair(from, a, b);
      a = value(a, a);
      b = value(b, b);
      stream ? Isa::stream_pair(to, a, b) : Isa::store_pair(to, a, b);
    }
  };

  T in_buffer[kBlock];
  T out_buffer[kBlock];
  for (std::int64_t begin = 0; begin < in.vocab; begin += kBlock) {
    const std::int64_t n = in.vocab - begin < kBlock ? in.vocab - begin : kBlock;
    const T* from = contiguous(z + begin * in.stride, in.stride, n, in_buffer);
    T* to = grad.stride == 1 ? out + begin : out_buffer;
    std::int64_t i = 0;
    if (grad.stream && grad.stride == 1) {
      const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % 64 / sizeof(T));
      const std::int64_t head = past == 0 ? 0 : static_cast<std::int64_t>(64 / sizeof(T)) - past;
      for (; i < head && i < n; i += W) {
        const std::int64_t left = (head < n ? head : n) - i;
        few(from + i, to + i, begin + i, left < W ? left : W);
      }
      i = head < n ? head : n;
      for (; i + 2 * W <= n; i += 2 * W) pair(from + i, to + i, begin + i, true);
    } else {
      for (; i + 2 * W <= n; i += 2 * W) pair(from + i, to + i, begin + i, false);
    }
    for (; i < n; i += W) few(from + i, to + i, begin + i, n - i < W ? n - i : W);
    if (grad.stride != 1) {
      for (std::int64_t j = 0; j < n; ++j) out[(begin + j) * grad.stride] = out_buffer[j];
    }
  }
  if (grad.stream) Isa::fence();

  if (in.target >= 0) {
    // p - 1 from expm1, exact where p is close to 1.
    const double weight = kSmooth && w != nullptr ? static_cast<double>(w[in.target]) : 1.0;
    const double log_p = static_cast<double>(target_capped) - grad.lse;
    const double g = (grad.hit * ::expm1(log_p) + grad.rest * ::exp(log_p) - grad.uniform * weight) *
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
  if (factor != factor) factor = static_cast<double>(__builtin_nanf(""));  // as in row_grad_of
  const Vec<Isa> f = Isa::set1(static_cast<C>(factor));
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + W <= n; i += W) Isa::store(z + i, Isa::mul(Isa::load(z + i), f));
  }
  for (; i < n; ++i) {
    z[i * stride] = from_scalar<Isa, T>(to_scalar<Isa>(z[i * stride]) * static_cast<C>(factor));
  }
}

// kClasses rows of the head with a panel of kVectors registers of tokens, summed in registers.
template <class Isa, int kVectors, int kClasses>
void multiply_panel(const FewTokens& in, const float* panel, const float* head, float* sums) {
  constexpr int W = Isa::kWidth;
  const std::int64_t stride = in.vectors * W;
  Vec<Isa> sum[kClasses][kVectors];
  for (int c = 0; c < kClasses; ++c) {
    for (int k = 0; k < kVectors; ++k) {
      sum[c][k] = in.begin ? Isa::set1(0) : Isa::load(sums + c * stride + k * W);
    }
  }
  for (std::int64_t h = 0; h < in.depth; ++h, panel += kVectors * W) {
    Vec<Isa> tokens[kVectors];
    for (int k = 0; k < kVectors; ++k) tokens[k] = Isa::load(panel + k * W);
    for (int c = 0; c < kClasses; ++c) {
      const Vec<Isa> weight = Isa::set1(head[c * in.head_stride + h]);
      for (int k = 0; k < kVectors; ++k) sum[c][k] = Isa::fma(weight, tokens[k], sum[c][k]);
    }
  }
  for (int c = 0; c < kClasses; ++c) {
    for (int k = 0; k < kVectors; ++k) Isa::store(sums + c * stride + k * W, sum[c][k]);
  }
}

template <class Isa, int kVectors>
void multiply_classes(const FewTokens& in, const float* panel, std::int64_t first_vector) {
  constexpr int kClasses = 4;
  const std::int64_t stride = in.vectors * Isa::kWidth;
  float* sums = in.sums + first_vector * Isa::kWidth;
  std::int64_t c = 0;
  for (; c + kClasses <= in.classes; c += kClasses) {
    multiply_panel<Isa, kVectors, kClasses>(in, panel, in.head + c * in.head_stride, sums + c * stride);
  }
  for (; c < in.classes; ++c) {
    multiply_panel<Isa, kVectors, 1>(in, panel, in.head + c * in.head_stride, sums + c * stride);
  }
}

template <class Isa>
void few_tokens(const FewTokens& in) {
  const float* panel = in.panels;
  for (std::int64_t first = 0; first < in.vectors;) {
    const std::int64_t vectors = panel_vectors(in.vectors - first);
    if (vectors == 3) {
      multiply_classes<Isa, 3>(in, panel, first);
    } else if (vectors == 2) {
      multiply_classes<Isa, 2>(in, panel, first);
    } else {
      multiply_classes<Isa, 1>(in, panel, first);
    }
    panel += in.depth * vectors * Isa::kWidth;
    first += vectors;
  }
}

template <class Isa>
constexpr Loops float_loops(const char* name) {
  Loops loops{};
  loops.name = name;
  loops.width = Isa::kWidth;
  loops.few_tokens = few_tokens<Isa>;
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
