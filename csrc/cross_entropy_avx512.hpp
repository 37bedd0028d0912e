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
  static void stream(float* p, F v) { _mm512_stream_ps(p, v); }
  static void stream(BFloat16* p, F v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(v)); }
  static void stream(Half* p, F v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_half(v)); }
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
  static __m256i to_bfloat16(F v) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
    // To nearest, ties to even; NaN made quiet.
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
  }
  static __m256i to_half(F v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace
}  // namespace prism
