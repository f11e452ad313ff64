// `Block` (see simd_scalar.h) on AVX2 + F16C + FMA: two registers of 8.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "half.h"

namespace embedserve {
namespace {

struct Block {
  static constexpr bool kIndexesNibbles = false;
  __m256 lo, hi;

  // Orders streamed stores before what follows.
  static void fence() { _mm_sfence(); }
  static Block zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Block set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Block load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Block load_f16(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
  }
  static Block from_bytes(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static Block load_u8(const uint8_t* p) { return from_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Block load_u4(const uint8_t* p) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i mask = _mm_set1_epi8(15);
    return from_bytes(_mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask)));
  }

  void store(uint8_t* p) const {
    _mm256_storeu_ps(reinterpret_cast<float*>(p), lo);
    _mm256_storeu_ps(reinterpret_cast<float*>(p) + 8, hi);
  }
  // `p` must be 32-byte aligned.
  void stream(uint8_t* p) const {
    _mm256_stream_ps(reinterpret_cast<float*>(p), lo);
    _mm256_stream_ps(reinterpret_cast<float*>(p) + 8, hi);
  }
  void store_f16(uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT));
  }
  static __m128i bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  void store_bf16(uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bf16(lo));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), bf16(hi));
  }
  void store_u8(uint8_t* p) const {
    const __m256i a = _mm256_cvtps_epi32(lo), b = _mm256_cvtps_epi32(hi);
    const __m128i a16 = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i b16 = _mm_packus_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(a16, b16));
  }
  Block round() const {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(lo, kMode), _mm256_round_ps(hi, kMode)};
  }

  // Folds the lanes in halves (8, 4, 2, 1): the order of a sum is fixed, so its bits are too.
  float sum() const {
    const __m256 eight = _mm256_add_ps(lo, hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  float smallest() const {
    const __m256 eight = _mm256_min_ps(lo, hi);
    const __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(lo, hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  friend Block operator+(Block a, Block b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  friend Block operator-(Block a, Block b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  friend Block operator*(Block a, Block b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  friend Block min(Block a, Block b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  friend Block max(Block a, Block b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  friend Block abs(Block a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
  }
  friend Block fused(Block a, Block b, Block c) {
    return {_mm256_fmadd_ps(b.lo, c.lo, a.lo), _mm256_fmadd_ps(b.hi, c.hi, a.hi)};
  }
};

}  // namespace
}  // namespace embedserve
