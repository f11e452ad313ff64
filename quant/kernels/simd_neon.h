// `Block` (see simd_scalar.h) on NEON (every arm64): four registers of 4.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "half.h"

namespace embedserve {
namespace {

struct Block {
  static constexpr bool kIndexesNibbles = false;
  float32x4_t q[4];

  // Orders streamed stores before what follows.
  static void fence() {}
  static Block zero() { return set1(0.0f); }
  static Block set1(float x) { Block b; for (auto& r : b.q) r = vdupq_n_f32(x); return b; }
  static Block load(const float* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.q[i] = vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p) + 16 * i));
    return b;
  }
  static Block load_f16(const uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.q[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
    return b;
  }
  static Block from_bytes(uint8x16_t bytes) {
    const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_u8(vget_high_u8(bytes));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)))}};
  }
  static Block load_u8(const uint8_t* p) { return from_bytes(vld1q_u8(p)); }
  static Block load_u4(const uint8_t* p) {
    const uint8x8_t packed = vld1_u8(p);
    const uint8x8x2_t both = vzip_u8(vand_u8(packed, vdup_n_u8(15)), vshr_n_u8(packed, 4));
    return from_bytes(vcombine_u8(both.val[0], both.val[1]));
  }

  void store(uint8_t* p) const { for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vreinterpretq_u8_f32(q[i])); }
  void stream(uint8_t* p) const { store(p); }
  void store_f16(uint8_t* p) const { for (int i = 0; i < 4; ++i) vst1_u8(p + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(q[i]))); }
  void store_bf16(uint8_t* p) const {
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t bits = vreinterpretq_u32_f32(q[i]);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
      const uint32x4_t nan = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
      vst1_u8(p + 8 * i, vreinterpret_u8_u16(vmovn_u32(vbslq_u32(vceqq_f32(q[i], q[i]), rounded, nan))));
    }
  }
  void store_u8(uint8_t* p) const {
    uint16x4_t n[4];
    for (int i = 0; i < 4; ++i) n[i] = vmovn_u32(vcvtnq_u32_f32(q[i]));
    vst1q_u8(p, vcombine_u8(vmovn_u16(vcombine_u16(n[0], n[1])), vmovn_u16(vcombine_u16(n[2], n[3]))));
  }
  Block round() const { Block b; for (int i = 0; i < 4; ++i) b.q[i] = vrndnq_f32(q[i]); return b; }

  // Folds the lanes in halves (8, 4, 2, 1): the order of a sum is fixed, so its bits are too.
  float sum() const {
    const float32x4_t four = vaddq_f32(vaddq_f32(q[0], q[2]), vaddq_f32(q[1], q[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  float smallest() const {
    const float32x4_t four = vminq_f32(vminq_f32(q[0], q[2]), vminq_f32(q[1], q[3]));
    const float32x2_t two = vmin_f32(vget_low_f32(four), vget_high_f32(four));
    return vminv_f32(two);
  }
  float largest() const {
    const float32x4_t four = vmaxq_f32(vmaxq_f32(q[0], q[2]), vmaxq_f32(q[1], q[3]));
    const float32x2_t two = vmax_f32(vget_low_f32(four), vget_high_f32(four));
    return vmaxv_f32(two);
  }

  friend Block operator+(Block a, Block b) { for (int i = 0; i < 4; ++i) a.q[i] = vaddq_f32(a.q[i], b.q[i]); return a; }
  friend Block operator-(Block a, Block b) { for (int i = 0; i < 4; ++i) a.q[i] = vsubq_f32(a.q[i], b.q[i]); return a; }
  friend Block operator*(Block a, Block b) { for (int i = 0; i < 4; ++i) a.q[i] = vmulq_f32(a.q[i], b.q[i]); return a; }
  friend Block min(Block a, Block b) { for (int i = 0; i < 4; ++i) a.q[i] = vminq_f32(a.q[i], b.q[i]); return a; }
  friend Block max(Block a, Block b) { for (int i = 0; i < 4; ++i) a.q[i] = vmaxq_f32(a.q[i], b.q[i]); return a; }
  friend Block abs(Block a) { for (int i = 0; i < 4; ++i) a.q[i] = vabsq_f32(a.q[i]); return a; }
  friend Block fused(Block a, Block b, Block c) { for (int i = 0; i < 4; ++i) a.q[i] = vfmaq_f32(a.q[i], b.q[i], c.q[i]); return a; }
};

}  // namespace
}  // namespace embedserve
