// A block of 16 floats in plain C++: the fallback where no SIMD header fits, and the shape the others copy.
//
// Every SIMD header defines `Block` with these operations. All are IEEE single operations without
// contraction, so each gives the same bits on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

namespace embedserve {
namespace {

struct Block {
  static constexpr bool kIndexesNibbles = false;
  float v[16];

  // Orders streamed stores before what follows.
  static void fence() {}
  static Block zero() { return set1(0.0f); }
  static Block set1(float x) { Block b; for (float& lane : b.v) lane = x; return b; }
  static Block load(const float* p) { Block b; std::memcpy(b.v, p, 64); return b; }
  static Block load_f16(const uint8_t* p) {
    Block b;
    for (int i = 0; i < 16; ++i) {
      uint16_t half;
      std::memcpy(&half, p + 2 * i, 2);
      b.v[i] = half_to_float(half);
    }
    return b;
  }
  static Block load_u8(const uint8_t* p) { Block b; for (int i = 0; i < 16; ++i) b.v[i] = float(p[i]); return b; }
  // 16 codes from 8 bytes, low nibble first.
  static Block load_u4(const uint8_t* p) {
    Block b;
    for (int i = 0; i < 16; ++i) b.v[i] = float((p[i / 2] >> (4 * (i % 2))) & 15);
    return b;
  }

  void store(uint8_t* p) const { std::memcpy(p, v, 64); }
  void stream(uint8_t* p) const { store(p); }
  void store_f16(uint8_t* p) const {
    for (int i = 0; i < 16; ++i) { const uint16_t h = float_to_half(v[i]); std::memcpy(p + 2 * i, &h, 2); }
  }
  void store_bf16(uint8_t* p) const {
    for (int i = 0; i < 16; ++i) { const uint16_t h = float_to_bfloat16(v[i]); std::memcpy(p + 2 * i, &h, 2); }
  }
  // Rounds half to even; lanes must lie in 0..255.
  void store_u8(uint8_t* p) const { for (int i = 0; i < 16; ++i) p[i] = uint8_t(round_even(v[i])); }

  Block round() const { Block b; for (int i = 0; i < 16; ++i) b.v[i] = round_even(v[i]); return b; }

  // Folds the lanes in halves (8, 4, 2, 1): the order of a sum is fixed, so its bits are too.
  float sum() const { return folded([](float a, float b) { return a + b; }); }
  float smallest() const { return folded([](float a, float b) { return a < b ? a : b; }); }
  float largest() const { return folded([](float a, float b) { return a > b ? a : b; }); }

  friend Block operator+(Block a, Block b) { for (int i = 0; i < 16; ++i) a.v[i] += b.v[i]; return a; }
  friend Block operator-(Block a, Block b) { for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i]; return a; }
  friend Block operator*(Block a, Block b) { for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i]; return a; }
  friend Block min(Block a, Block b) { for (int i = 0; i < 16; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
  friend Block max(Block a, Block b) { for (int i = 0; i < 16; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
  friend Block abs(Block a) { for (float& lane : a.v) lane = float_of(bits_of(lane) & 0x7fffffffu); return a; }
  // a + b * c, with or without contraction: only for scores, whose bound is stated in ULPs.
  friend Block fused(Block a, Block b, Block c) { for (int i = 0; i < 16; ++i) a.v[i] += b.v[i] * c.v[i]; return a; }

 private:
  template <class Op>
  float folded(Op op) const {
    Block b = *this;
    for (int half = 8; half; half /= 2) for (int i = 0; i < half; ++i) b.v[i] = op(b.v[i], b.v[i + half]);
    return b.v[0];
  }
  // Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even, for |x| < 2^22.
  static float round_even(float x) { const float magic = 12582912.0f; return (x + magic) - magic; }
};

}  // namespace
}  // namespace embedserve
