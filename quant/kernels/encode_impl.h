// Quantise rows. Included once per instruction set, after its simd_*.h and decode_impl.h.
//
// The arithmetic is fixed to the bit (FP32, product then sum, 16 lanes folded in halves), so the numpy
// reference in tests/ gives the same codes. The MSE search is the greedy one of Guan et al., "Post-
// Training 4-bit Quantization on Embedding Tables" (2019): 200 bins, and at most 16 % of the range kept out.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "decode_impl.h"

namespace embedserve {
namespace {

constexpr int kSearchBins = 200;
constexpr int kSearchSteps = 32;
constexpr float kPercentileTail = 0.001f;  // clipped at each end by `percentile`: 99.9 %

inline float fold_sum(Block b) {
  float v[16];
  b.store(reinterpret_cast<uint8_t*>(v));
  for (int half = 8; half; half /= 2) for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
inline float fold_min(Block b) {
  float v[16];
  b.store(reinterpret_cast<uint8_t*>(v));
  for (int half = 8; half; half /= 2) for (int i = 0; i < half; ++i) v[i] = v[i] < v[i + half] ? v[i] : v[i + half];
  return v[0];
}
inline float fold_max(Block b) {
  float v[16];
  b.store(reinterpret_cast<uint8_t*>(v));
  for (int half = 8; half; half /= 2) for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

struct Range { float lo, hi; };
struct Params { float scale, bias; };

// One source row, padded to whole blocks with zeros; `mask` is 1 in the real lanes of the last block.
struct SourceRow {
  const float* values;
  int64_t dim, padded;
  Block mask;
  Block at(int64_t c) const { return Block::load(values + c); }
};

struct RowEncoder {
  RowFormat format;
  Scheme scheme;
  Calibration calibration;
  float top = 255.0f;                   // largest code
  Scratch<float> sorted;

  RowEncoder(const EncodeRequest& r) : format(r.format), scheme(r.scheme), calibration(r.calibration),
      top(r.format.type == RowType::kInt8 ? 255.0f : 15.0f), sorted(size_t(r.format.dim)) {}

  float ideal_step(Range r) const {
    if (scheme == Scheme::kSymmetric) return std::max(std::fabs(r.lo), std::fabs(r.hi)) / ((top - 1) / 2);
    return (r.hi - r.lo) / top;
  }

  Params params(Range r) const {
    const auto stored = [&](float x) { return format.wide ? x : round_to_half(x); };
    if (r.lo == r.hi) return {0.0f, stored(r.lo)};  // constant: the value itself
    if (scheme == Scheme::kSymmetric) {
      const float scale = stored(ideal_step(r));
      return {scale, stored(-((top + 1) / 2) * scale)};
    }
    const float bias = stored(r.lo);
    return {stored((r.hi - bias) / top), bias};
  }

  // Whether these parameters lose more than half an ideal code step beyond the half that rounding costs.
  bool lossy(Range r, Params p) const {
    const float ideal = ideal_step(r);
    if (r.lo == r.hi) return p.bias != r.lo;
    const float worst = std::max(p.scale * 0.5f, std::max(p.bias - r.lo, r.hi - (p.bias + top * p.scale)));
    return !(worst <= ideal);
  }

  static float inverse(float scale) { return scale >= FLT_MIN ? 1.0f / scale : 0.0f; }

  Block codes(Block x, Block bias, Block inv) const {
    return min(max((x - bias) * inv, Block::zero()), Block::set1(top)).round();
  }

  float loss(const SourceRow& row, Range r) const {
    const Params p = params(r);
    const Block scale = Block::set1(p.scale), bias = Block::set1(p.bias), inv = Block::set1(inverse(p.scale));
    Block total = Block::zero();
    for (int64_t c = 0; c < row.padded; c += 16) {
      const Block x = row.at(c);
      Block error = codes(x, bias, inv) * scale + bias - x;
      if (c + 16 > row.dim) error = error * row.mask;
      total = total + error * error;
    }
    return fold_sum(total);
  }

  Range search(const SourceRow& row, Range range) const {
    Range best = range;
    float best_loss = loss(row, range);
    const float step = (range.hi - range.lo) / float(kSearchBins);
    for (int i = 0; i < kSearchSteps; ++i) {
      if (scheme == Scheme::kSymmetric) {
        const float amax = std::max(std::fabs(range.lo), std::fabs(range.hi)) * (1.0f - 1.0f / float(kSearchBins));
        range = {-amax, amax};
        const float found = loss(row, range);
        if (found < best_loss) { best = range; best_loss = found; }
        continue;
      }
      const Range from_left = {range.lo + step, range.hi}, from_right = {range.lo, range.hi - step};
      const float left = loss(row, from_left), right = loss(row, from_right);
      range = left <= right ? from_left : from_right;
      const float found = left <= right ? left : right;
      if (found < best_loss) { best = range; best_loss = found; }
    }
    return best;
  }

  // The value at quantile q, linear between neighbours, in FP32.
  Range percentile(const SourceRow& row) {
    std::copy(row.values, row.values + row.dim, sorted.begin());
    std::sort(sorted.begin(), sorted.end(), [](float a, float b) { return a < b; });
    const auto at = [&](float q) {
      const float where = q * float(row.dim - 1);
      const int64_t below = int64_t(where);
      const float part = where - float(below);
      const float a = sorted[size_t(below)], b = sorted[size_t(std::min(below + 1, row.dim - 1))];
      return a + (b - a) * part;
    };
    return {at(kPercentileTail), at(1.0f - kPercentileTail)};
  }

  Range calibrate(const SourceRow& row, Range minmax) {
    if (minmax.lo == minmax.hi) return minmax;
    switch (calibration) {
      case Calibration::kPercentile: return percentile(row);
      case Calibration::kMse: return search(row, minmax);
      case Calibration::kMinmax: break;
    }
    return minmax;
  }

  void write(const SourceRow& row, Params p, uint8_t* out) const {
    if (format.wide) {
      std::memcpy(out, &p.scale, 4);
      std::memcpy(out + 4, &p.bias, 4);
    } else {
      const uint16_t header[2] = {float_to_half(p.scale), float_to_half(p.bias)};
      std::memcpy(out, header, 4);
    }
    uint8_t* at = out + format.header_bytes();
    const Block bias = Block::set1(p.bias), inv = Block::set1(inverse(p.scale));
    for (int64_t c = 0; c < row.padded; c += 16) {
      const int64_t n = std::min<int64_t>(16, row.dim - c);
      uint8_t bytes[16];
      codes(row.at(c), bias, inv).store_u8(bytes);
      if (format.type == RowType::kInt8) {
        std::memcpy(at + c, bytes, size_t(n));
      } else {
        if (n % 2) bytes[n] = 0;
        for (int64_t i = 0; i < n; i += 2) at[(c + i) / 2] = uint8_t(bytes[i] | (bytes[i + 1] << 4));
      }
    }
  }
};

inline void write_float_row(const RowFormat& format, const float* values, uint8_t* out) {
  if (format.type == RowType::kFp32) { std::memcpy(out, values, size_t(4 * format.dim)); return; }
  for (int64_t c = 0; c < format.dim; c += 16) {
    float padded[16] = {};
    const int64_t n = std::min<int64_t>(16, format.dim - c);
    std::memcpy(padded, values + c, size_t(4 * n));
    Sink<Output::kFloat16>::put_tail(Block::load(padded), out + 2 * c, n);
  }
}

// Largest magnitude a row type takes: integer rows need hi - lo to be finite; FP16 must not round to infinity.
inline float largest_value(const RowFormat& format) {
  switch (format.type) {
    case RowType::kFp16: return 65519.996f;
    case RowType::kFp32: return FLT_MAX;
    default: return FLT_MAX / 2;
  }
}

// Error of the stored row against its source, and the decoded values' sum by column.
template <class Reader>
inline void measure_row(const SourceRow& row, const uint8_t* stored, Scratch<float>& sums, EncodeReport& report) {
  const Reader reader(stored);
  Block squared = Block::zero(), worst = Block::zero(), dot = Block::zero(), norm_x = Block::zero(), norm_y = Block::zero();
  for (int64_t c = 0; c < row.padded; c += 16) {
    const bool last = c + 16 > row.dim;
    const Block x = row.at(c);
    Block y = last ? reader.tail(c, row.dim - c) * row.mask : reader.block(c);
    const Block error = y - x;
    squared = fused(squared, error, error);
    worst = max(worst, abs(error));
    dot = fused(dot, x, y);
    norm_x = fused(norm_x, x, x);
    norm_y = fused(norm_y, y, y);
    (Block::load(&sums[size_t(c)]) + y).store(reinterpret_cast<uint8_t*>(&sums[size_t(c)]));
  }
  report.squared_error += double(fold_sum(squared));
  report.max_error = std::max(report.max_error, fold_max(worst));
  const double xx = double(fold_sum(norm_x)), yy = double(fold_sum(norm_y));
  report.sum_cosine += xx > 0 && yy > 0 ? std::min(1.0, double(fold_sum(dot)) / std::sqrt(xx * yy)) : (xx == yy ? 1.0 : 0.0);
}

void encode(const EncodeRequest& request, EncodeReport& report) {
  const RowFormat& format = request.format;
  const int64_t dim = format.dim, padded = (dim + 15) / 16 * 16, stride = format.stride();
  RowEncoder encoder(request);
  Scratch<float> copy(dim % 16 ? size_t(padded) : 0), sums(static_cast<size_t>(padded));
  float lanes[16] = {};
  for (int64_t i = 0; i < 16; ++i) lanes[i] = i < 16 - (padded - dim) ? 1.0f : 0.0f;
  const Block mask = Block::load(lanes);
  const float limit = largest_value(format);
  const auto flush = [&] {
    for (int64_t c = 0; c < dim; ++c) report.column_sums[c] += double(sums[size_t(c)]);
    std::fill(sums.begin(), sums.end(), 0.0f);
  };

  for (int64_t i = 0; i < request.n; ++i) {
    const float* values = request.values + i * dim;
    if (dim % 16) {
      std::copy(values, values + dim, copy.begin());
      values = copy.data();
    }
    const SourceRow row{values, dim, padded, mask};
    Block least = Block::set1(values[0]), most = least, poison = Block::zero();
    for (int64_t c = 0; c < padded; c += 16) {
      const Block x = row.at(c);
      poison = poison + x * Block::zero();  // NaN where x is not finite
      if (c + 16 > dim) {
        // Padding must not be the smallest or largest: put the row's first value there.
        const Block real = x + (Block::set1(1.0f) - mask) * Block::set1(std::isfinite(values[0]) ? values[0] : 0.0f);
        least = min(least, real);
        most = max(most, real);
      } else {
        least = min(least, x);
        most = max(most, x);
      }
    }
    const Range range = {fold_min(least), fold_max(most)};
    const float max_abs = std::max(std::fabs(range.lo), std::fabs(range.hi));
    if (!(fold_sum(poison) == 0.0f) || !(max_abs <= limit)) {
      report.bad_row = i;
      for (int64_t c = dim - 1; c >= 0; --c) if (!(std::fabs(values[c]) <= limit)) report.bad_column = c;
      return;
    }
    report.max_abs = std::max(report.max_abs, max_abs);
    uint8_t* out = request.out + i * stride;
    if (format.is_integer()) {
      const Range calibrated = encoder.calibrate(row, range);
      const Params params = encoder.params(calibrated);
      if (!format.wide && encoder.lossy(calibrated, params)) {
        report.needs_wide_row = i;
        return;
      }
      encoder.write(row, params, out);
    } else {
      write_float_row(format, values, out);
    }
    for (int64_t b = format.header_bytes() + format.code_bytes(); b < stride; ++b) out[b] = 0;
    with_reader(format, [&]<class Reader>() { measure_row<Reader>(row, out, sums, report); });
    if (i % 256 == 255) flush();
  }
  flush();
}

}  // namespace
}  // namespace embedserve
