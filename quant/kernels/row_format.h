// What a stored row looks like. FBGEMM's inference layout: little-endian scale and bias (FP16, or FP32
// in the wide variant), then the codes, padded with zeros to a stride of a multiple of 4 bytes:
//
//     INT8, INT4    [scale][bias][codes ...][padding]      value = code * scale + bias
//     FP16, FP32    [values ...][padding]
//
// INT8 takes one unsigned byte a code; INT4 two codes a byte, the even column in the low nibble.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embedserve {

enum class RowType : int { kInt8 = 0, kInt4 = 1, kFp16 = 2, kFp32 = 3 };
enum class Output : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kQuantized = 3 };
enum class Metric : int { kInnerProduct = 0, kL2 = 1, kCosine = 2 };
enum class Scheme : int { kAsymmetric = 0, kSymmetric = 1 };
enum class Calibration : int { kMinmax = 0, kPercentile = 1, kMse = 2 };

struct RowFormat {
  RowType type = RowType::kInt8;
  bool wide = false;  // FP32 scale and bias; only for INT8 and INT4
  int64_t dim = 0;

  bool is_integer() const { return type == RowType::kInt8 || type == RowType::kInt4; }
  int64_t header_bytes() const { return is_integer() ? (wide ? 8 : 4) : 0; }
  int64_t code_bytes() const {
    switch (type) {
      case RowType::kInt8: return dim;
      case RowType::kInt4: return (dim + 1) / 2;
      case RowType::kFp16: return 2 * dim;
      case RowType::kFp32: return 4 * dim;
    }
    return 0;
  }
  int64_t stride() const { return (header_bytes() + code_bytes() + 3) / 4 * 4; }
};

// Bytes of one decoded row.
static inline int64_t output_row_bytes(const RowFormat& format, Output output) {
  switch (output) {
    case Output::kFloat32: return 4 * format.dim;
    case Output::kFloat16:
    case Output::kBfloat16: return 2 * format.dim;
    case Output::kQuantized: return format.stride();
  }
  return 0;
}

}  // namespace embedserve
