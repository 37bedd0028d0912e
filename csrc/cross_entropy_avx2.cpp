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
  static constexpr bool kFused = true;

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
  static void load_32(const float* p, F (&r)[4]) {
    for (int k = 0; k < 4; ++k) r[k] = load(p + 8 * k);
  }
  static void load_32(const BFloat16* p, F (&r)[4]) {
    for (int k = 0; k < 2; ++k) load_pair(p + 16 * k, r[k], r[k + 2]);
  }
  static void load_32(const Half* p, F (&r)[4]) {
    for (int k = 0; k < 4; ++k) r[k] = load(p + 8 * k);
  }
  template <class T>
  static void load_pair(const T* p, F& a, F& b) {
    a = load(p);
    b = load(p + 8);
  }
  // Even numbers in one register, odd in the other: the upper half of a 32-bit word is a float as it stands.
  static void load_pair(const BFloat16* p, F& even, F& odd) {
    const __m256i words = load_16(p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  template <class T>
  static void store_pair(T* p, F a, F b) {
    store(p, a);
    store(p + 8, b);
  }
  static void store_pair(BFloat16* p, F even, F odd) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bfloat16_pair(even, odd));
  }
  static void stream_pair(float* p, F a, F b) {
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + 8, b);
  }
  static void stream_pair(BFloat16* p, F even, F odd) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bfloat16_pair(even, odd));
  }
  static void stream_pair(Half* p, F a, F b) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_half(a));
    _mm_stream_si128(reinterpret_cast<__m128i*>(p + 8), to_half(b));
  }
  static void fence() { _mm_sfence(); }
  using I16 = __m256i;
  static I16 set1_16(std::int16_t x) { return _mm256_set1_epi16(x); }
  static I16 load_16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I16 max_signed_16(I16 a, I16 b) { return _mm256_max_epi16(a, b); }
  static I16 min_unsigned_16(I16 a, I16 b) { return _mm256_min_epu16(a, b); }
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
  // The upper half is the number to 16 bits, to nearest, ties to even; of NaN, those with a low half of zeros.
  static __m256i rounded(F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  }
  static __m128i to_bfloat16(F v) {
    const __m256i high = _mm256_srli_epi32(rounded(v), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static __m256i bfloat16_pair(F even, F odd) {
    const __m256i upper = _mm256_and_si256(rounded(odd), _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
    return _mm256_or_si256(_mm256_srli_epi32(rounded(even), 16), upper);
  }
  static __m128i to_half(F v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace

Loops avx2_loops() { return float_loops<Avx2>("avx2"); }

}  // namespace prism
