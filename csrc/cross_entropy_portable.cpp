// The loops for any processor: four-float vectors that the compiler lowers to SSE2 or plain arithmetic; on 64-bit ARM
// to NEON, with its fused multiply-add and half-float conversions. Also the only double loops: double logits are for
// reference and tests, where speed is not the point.
#include "cross_entropy_kernel.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace prism {
namespace {

#if !defined(__aarch64__)
inline float half_to_float(Half h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = h.bits & 0x7FFFu;
  std::uint32_t bits;
  if (magnitude >= 0x7C00u) {  // inf, NaN
    bits = sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13);
  } else if (magnitude >= 0x400u) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// To nearest, ties to even.
inline Half float_to_half(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, 4);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return Half{static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return Half{static_cast<std::uint16_t>(sign | 0x7C00u)};  // rounds to inf
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    float small;
    memcpy(&small, &magnitude, 4);
    small += 0.5f;
    std::uint32_t rounded;
    memcpy(&rounded, &small, 4);
    return Half{static_cast<std::uint16_t>(sign | (rounded - 0x3F000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23);
  return Half{static_cast<std::uint16_t>(sign | (rounded >> 13))};
}

#endif

inline float bfloat16_to_float(BFloat16 b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// To nearest, ties to even; of NaN, those with a low half of zeros.
inline BFloat16 float_to_bfloat16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, 4);
  return BFloat16{static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

struct Portable {
  using Scalar = float;
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
  typedef std::uint32_t U __attribute__((vector_size(16)));
  typedef std::int16_t I16 __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr bool kDouble = false;
#if defined(__aarch64__)
  static constexpr bool kFused = true;
  static F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
  static F load(const Half* p) { return (F)vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(p))); }
  static void store(Half* p, F v) { vst1_f16(reinterpret_cast<float16_t*>(p), vcvt_f16_f32((float32x4_t)v)); }
#else
  static constexpr bool kFused = false;
  static F fma(F a, F b, F c) { return a * b + c; }
  static F load(const Half* p) {
    return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
  }
  static void store(Half* p, F v) {
    for (int j = 0; j < 4; ++j) p[j] = float_to_half(v[j]);
  }
#endif

  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static F load(const BFloat16* p) {
    return F{bfloat16_to_float(p[0]), bfloat16_to_float(p[1]), bfloat16_to_float(p[2]), bfloat16_to_float(p[3])};
  }
  static void store(float* p, F v) { memcpy(p, &v, sizeof v); }
  static void store(BFloat16* p, F v) {
    for (int j = 0; j < 4; ++j) p[j] = float_to_bfloat16(v[j]);
  }
  template <class T>
  static void load_32(const T* p, F (&r)[8]) {
    for (int k = 0; k < 8; ++k) r[k] = load(p + 4 * k);
  }
  static void load_32(const BFloat16* p, F (&r)[8]) {
    for (int k = 0; k < 4; ++k) load_pair(p + 8 * k, r[k], r[k + 4]);
  }
  template <class T>
  static void load_pair(const T* p, F& a, F& b) {
    a = load(p);
    b = load(p + 4);
  }
  // Even numbers in one register, odd in the other: the upper half of a 32-bit word is a float as it stands.
  static void load_pair(const BFloat16* p, F& even, F& odd) {
    U words;
    memcpy(&words, p, sizeof words);
    even = (F)(words << 16);
    odd = (F)(words & 0xFFFF0000u);
  }
  template <class T>
  static void store_pair(T* p, F a, F b) {
    store(p, a);
    store(p + 4, b);
  }
  static void store_pair(BFloat16* p, F even, F odd) {
    const U words = (rounded(even) >> 16) | (rounded(odd) & 0xFFFF0000u);
    memcpy(p, &words, sizeof words);
  }
  template <class T>
  static void stream_pair(T* p, F a, F b) {
    store_pair(p, a, b);
  }
  static I16 set1_16(std::int16_t x) { return I16{x, x, x, x, x, x, x, x}; }
  static I16 load_16(const void* p) {
    I16 v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static I16 max_signed_16(I16 a, I16 b) { return a > b ? a : b; }
  static I16 min_unsigned_16(I16 a, I16 b) {
    typedef std::uint16_t U16 __attribute__((vector_size(16)));
    return (I16)((U16)a < (U16)b ? (U16)a : (U16)b);
  }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }  // b where either is NaN
  static F abs(F a) { return (F)((I)a & 0x7FFFFFFF); }
  static F copy_sign(F magnitude, F sign) {
    return (F)((I)magnitude | ((I)sign & static_cast<std::int32_t>(0x80000000u)));
  }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static F low_bits_as_exponent(F a) { return (F)((U)a << 23); }

 private:
  // The upper half is the number to 16 bits, to nearest, ties to even.
  static U rounded(F v) {
    const U bits = (U)v;
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
  }
};

struct PortableDouble {
  using Scalar = double;
  using F = double;
  static constexpr int kWidth = 1;
  static constexpr bool kDouble = true;
  static constexpr bool kFused = false;

  static F set1(double x) { return x; }
  static F load(const double* p) { return *p; }
  static void store(double* p, F v) { *p = v; }
  static void load_32(const double* p, F (&r)[32]) { memcpy(r, p, sizeof r); }
  static void load_pair(const double* p, F& a, F& b) {
    a = p[0];
    b = p[1];
  }
  static void store_pair(double* p, F a, F b) {
    p[0] = a;
    p[1] = b;
  }
  static void stream_pair(double* p, F a, F b) { store_pair(p, a, b); }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
};

}  // namespace

Loops portable_loops() {
#if defined(__aarch64__)
  Loops loops = float_loops<Portable>("neon");
#else
  Loops loops = float_loops<Portable>("portable");
#endif
  loops.terms[static_cast<int>(Dtype::kF64)] = row_terms<PortableDouble, double>;
  loops.grad[static_cast<int>(Dtype::kF64)] = row_grad<PortableDouble, double>;
  loops.scale[static_cast<int>(Dtype::kF64)] = row_scale<PortableDouble, double>;
  return loops;
}

}  // namespace prism
