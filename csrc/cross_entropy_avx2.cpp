// The loops for x86-64 with AVX2, FMA and F16C; compiled with those flags and called only where the processor has them.
#include <immintrin.h>

#include "cross_entropy_kernel.hpp"

namespace prism {
namespace {

struct Avx2 {
  using Scalar = float;
  using F = __m256;
  static constexpr int kWidth = 8;
  static constexpr bool kDouble = false;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store(BFloat16* p, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(v)); }
  static void store(Half* p, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(v)); }
  static void stream(float* p, F v) { _mm256_stream_ps(p, v); }
  static void stream(BFloat16* p, F v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(v)); }
  static void stream(Half* p, F v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_half(v)); }
  static void fence() { _mm_sfence(); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static F copy_sign(F magnitude, F sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
  }
  static F select_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F low_bits_as_exponent(F a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }

 private:
  // To nearest, ties to even; NaN made quiet.
  static __m128i to_bfloat16(F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static __m128i to_half(F v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace

Loops avx2_loops() { return float_loops<Avx2>("avx2"); }

}  // namespace prism
