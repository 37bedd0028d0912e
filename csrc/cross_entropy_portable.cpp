// The loops for any processor: four-float vectors that the compiler lowers to SSE2, NEON or plain arithmetic. Also the
// only double loops: double logits are for reference and tests, where speed is not the point.
#include "cross_entropy_kernel.hpp"

namespace prism {
namespace {

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

inline float bfloat16_to_float(BFloat16 b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline BFloat16 float_to_bfloat16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return BFloat16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

struct Portable {
  using Scalar = float;
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr bool kDouble = false;

  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static F load(const BFloat16* p) {
    return F{bfloat16_to_float(p[0]), bfloat16_to_float(p[1]), bfloat16_to_float(p[2]), bfloat16_to_float(p[3])};
  }
  static F load(const Half* p) {
    return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
  }
  static void store(float* p, F v) { memcpy(p, &v, sizeof v); }
  static void store(BFloat16* p, F v) {
    for (int j = 0; j < 4; ++j) p[j] = float_to_bfloat16(v[j]);
  }
  static void store(Half* p, F v) {
    for (int j = 0; j < 4; ++j) p[j] = float_to_half(v[j]);
  }
  template <class T>
  static void stream(T* p, F v) {
    store(p, v);
  }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }  // b where either is NaN
  static F abs(F a) { return (F)((I)a & 0x7FFFFFFF); }
  static F copy_sign(F magnitude, F sign) {
    return (F)((I)magnitude | ((I)sign & static_cast<std::int32_t>(0x80000000u)));
  }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static F low_bits_as_exponent(F a) {
    typedef std::uint32_t U __attribute__((vector_size(16)));
    return (F)((U)a << 23);
  }
};

struct PortableDouble {
  using Scalar = double;
  using F = double;
  static constexpr int kWidth = 1;
  static constexpr bool kDouble = true;

  static F set1(double x) { return x; }
  static F load(const double* p) { return *p; }
  static void store(double* p, F v) { *p = v; }
  static void stream(double* p, F v) { *p = v; }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
};

}  // namespace

Loops portable_loops() {
  Loops loops = float_loops<Portable>("portable");
  loops.terms[static_cast<int>(Dtype::kF64)] = row_terms<PortableDouble, double>;
  loops.grad[static_cast<int>(Dtype::kF64)] = row_grad<PortableDouble, double>;
  loops.scale[static_cast<int>(Dtype::kF64)] = row_scale<PortableDouble, double>;
  return loops;
}

}  // namespace prism
