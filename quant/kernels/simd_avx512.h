// `Block` (see simd_scalar.h) on AVX-512 F/BW/DQ/VL: one register.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "half.h"

namespace embedserve {
namespace {

struct Block {
  static constexpr bool kIndexesNibbles = true;  // has index_u4
  __m512 v;

  // Orders streamed stores before what follows.
  static void fence() { _mm_sfence(); }
  static Block zero() { return {_mm512_setzero_ps()}; }
  static Block set1(float x) { return {_mm512_set1_ps(x)}; }
  static Block load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Block load_f16(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  static Block from_bytes(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))}; }
  static Block load_u8(const uint8_t* p) { return from_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Block load_u4(const uint8_t* p) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i mask = _mm_set1_epi8(15);
    return from_bytes(_mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask)));
  }

  // table[code] of 16 codes from 8 bytes, low nibble first; the permutation looks at 4 bits of each lane.
  static Block index_u4(Block table, const uint8_t* p) {
    int32_t low, high;  // read apart: two broadcasting loads
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    const __m512i packed = _mm512_mask_broadcastd_epi32(_mm512_set1_epi32(low), 0xff00, _mm_cvtsi32_si128(high));
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return {_mm512_permutexvar_ps(_mm512_srlv_epi32(packed, shifts), table.v)};
  }

  void store(uint8_t* p) const { _mm512_storeu_ps(p, v); }
  // `p` must be 64-byte aligned.
  void stream(uint8_t* p) const { _mm512_stream_ps(reinterpret_cast<float*>(p), v); }
  void store_f16(uint8_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  void store_bf16(uint8_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
  void store_u8(uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  Block round() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

  // Folds the lanes in halves (8, 4, 2, 1): the order of a sum is fixed, so its bits are too.
  float sum() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  float smallest() const {
    const __m256 eight = _mm256_min_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  friend Block operator+(Block a, Block b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Block operator-(Block a, Block b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Block operator*(Block a, Block b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Block min(Block a, Block b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Block max(Block a, Block b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Block abs(Block a) { return {_mm512_abs_ps(a.v)}; }
  friend Block fused(Block a, Block b, Block c) { return {_mm512_fmadd_ps(b.v, c.v, a.v)}; }
};

}  // namespace
}  // namespace embedserve
