// The AVX-512 instruction set for the loops, shared by the two files that compile it with and without bf16.
#pragma once

#include <immintrin.h>

#include "cross_entropy_kernel.hpp"

namespace prism {
namespace {

struct Avx512 {
  using Scalar = float;
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr bool kDouble = false;
  static constexpr bool kFused = true;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store(BFloat16* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(v)); }
  static void store(Half* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(v)); }
  static void load_32(const float* p, F (&r)[2]) { load_two(p, r[0], r[1]); }
  static void load_32(const Half* p, F (&r)[2]) { load_two(p, r[0], r[1]); }
  // Even numbers in one register, odd in the other: the upper half of a 32-bit word is a float as it stands.
  static void load_32(const BFloat16* p, F (&r)[2]) {
    const __m512i words = load_16(p);
    r[0] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    r[1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  static void load_pair(const float* p, F& a, F& b) { load_two(p, a, b); }
  static void load_pair(const Half* p, F& a, F& b) { load_two(p, a, b); }
  static void store_pair(float* p, F a, F b) {
    store(p, a);
    store(p + 16, b);
  }
  static void store_pair(Half* p, F a, F b) {
    store(p, a);
    store(p + 16, b);
  }
  static void stream_pair(float* p, F a, F b) {
    _mm512_stream_ps(p, a);
    _mm512_stream_ps(p + 16, b);
  }
  static void stream_pair(Half* p, F a, F b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_half(a));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p + 16), to_half(b));
  }
  static void store_pair(BFloat16* p, F a, F b) { _mm512_storeu_si512(p, bfloat16_pair(a, b)); }
  static void stream_pair(BFloat16* p, F a, F b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bfloat16_pair(a, b));
  }
#if defined(__AVX512BF16__)
  // In order, as the conversion instruction packs them.
  static void load_pair(const BFloat16* p, F& a, F& b) { load_two(p, a, b); }
#else
  static void load_pair(const BFloat16* p, F& even, F& odd) {
    F r[2];
    load_32(p, r);
    even = r[0];
    odd = r[1];
  }
#endif
  using I16 = __m512i;
  static I16 set1_16(std::int16_t x) { return _mm512_set1_epi16(x); }
  static I16 load_16(const void* p) { return _mm512_loadu_si512(p); }
  static I16 max_signed_16(I16 a, I16 b) { return _mm512_max_epi16(a, b); }
  static I16 min_unsigned_16(I16 a, I16 b) { return _mm512_min_epu16(a, b); }
  static void fence() { _mm_sfence(); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F copy_sign(F magnitude, F sign) {
    const __m512i bit = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), bit));
  }
  static F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static F low_bits_as_exponent(F a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }

 private:
  template <class T>
  static void load_two(const T* p, F& a, F& b) {
    a = load(p);
    b = load(p + 16);
  }
#if defined(__AVX512BF16__)
  static __m256i to_bfloat16(F v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
  static __m512i bfloat16_pair(F first, F second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  }
#else
  // The upper half is the number to 16 bits, to nearest, ties to even; of NaN, those with a low half of zeros.
  static __m512i rounded(F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  }
  static __m256i to_bfloat16(F v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(v), 16)); }
  static __m512i bfloat16_pair(F even, F odd) {
    const __m512i upper = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
    return _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), upper);
  }
#endif
  static __m256i to_half(F v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace
}  // namespace prism
