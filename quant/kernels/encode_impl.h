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

constexpr int64_t kTogether = 16;  // rows encoded step by step together
constexpr int kSearchBins = 200;
constexpr int kSearchSteps = 32;
constexpr float kPercentileTail = 0.001f;  // clipped at each end by `percentile`: 99.9 %

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
    // Adding zero makes -0 +0: which of the two a minimum over both gives depends on its order.
    if (r.lo == r.hi) return {0.0f, stored(r.lo + 0.0f)};  // constant: the value itself
    if (scheme == Scheme::kSymmetric) {
      const float scale = stored(ideal_step(r));
      return {scale, stored(-((top + 1) / 2) * scale)};
    }
    const float bias = stored(r.lo + 0.0f);
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
    return total.sum();
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
      if (format.type == RowType::kInt8 && n == 16) {
        codes(row.at(c), bias, inv).store_u8(at + c);
        continue;
      }
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

// Error of stored rows against their source, and the decoded values' sums by column.
class Measure {
 public:
  Measure(int64_t dim, EncodeReport& report) : report_(report), dim_(dim), sums_(size_t((dim + 15) / 16 * 16)) {}

  template <class Reader>
  void add(const SourceRow& row, const uint8_t* stored) {
    const Reader reader(stored);
    Block dot = Block::zero(), norm_x = Block::zero(), norm_y = Block::zero();
    for (int64_t c = 0; c < row.padded; c += 16) {
      const Block x = row.at(c);
      const Block y = c + 16 > row.dim ? reader.tail(c, row.dim - c) * row.mask : reader.block(c);
      const Block error = y - x;
      squared_ = fused(squared_, error, error);
      worst_ = max(worst_, abs(error));
      dot = fused(dot, x, y);
      norm_x = fused(norm_x, x, x);
      norm_y = fused(norm_y, y, y);
      float* sum = &sums_[size_t(c)];
      (Block::load(sum) + y).store(reinterpret_cast<uint8_t*>(sum));
    }
    const double xx = double(norm_x.sum()), yy = double(norm_y.sum());
    report_.sum_cosine += xx > 0 && yy > 0 ? double(dot.sum()) / std::sqrt(xx * yy) : (xx == yy ? 1.0 : 0.0);
    if (++rows_ % 256 == 0) flush();
  }

  // FP32 sums go into FP64 ones often enough that nothing is lost.
  void flush() {
    for (int64_t c = 0; c < dim_; ++c) report_.column_sums[c] += double(sums_[size_t(c)]);
    std::memset(sums_.data(), 0, sums_.size() * 4);
    report_.squared_error += double(squared_.sum());
    report_.max_error = std::max(report_.max_error, worst_.largest());
    squared_ = worst_ = Block::zero();
  }

 private:
  EncodeReport& report_;
  int64_t dim_, rows_ = 0;
  Scratch<float> sums_;
  Block squared_ = Block::zero(), worst_ = Block::zero();
};

// Smallest and largest value of a row; false if one is not finite or is larger in magnitude than `limit`.
inline bool find_range(const SourceRow& row, float limit, Range& range) {
  const float first = row.values[0];
  Block least = Block::set1(first), most = least, poison = Block::zero();
  // Padding must be neither the smallest nor the largest: it reads as the row's first value.
  const Block padding = (Block::set1(1.0f) - row.mask) * Block::set1(std::fabs(first) <= limit ? first : 0.0f);
  for (int64_t c = 0; c < row.padded; c += 16) {
    __builtin_prefetch(row.values + c + kTogether * row.dim);
    const Block x = c + 16 > row.dim ? row.at(c) + padding : row.at(c);
    poison = poison + x * Block::zero();  // NaN where x is not finite
    least = min(least, x);
    most = max(most, x);
  }
  range = {least.smallest(), most.largest()};
  return poison.sum() == 0.0f && std::max(std::fabs(range.lo), std::fabs(range.hi)) <= limit;
}

// Rows are encoded a few at a time, step by step: within a row each step waits for the one before, so the
// processor is kept busy by the other rows.
void encode(const EncodeRequest& request, EncodeReport& report) {
  const RowFormat& format = request.format;
  const int64_t dim = format.dim, padded = (dim + 15) / 16 * 16, stride = format.stride();
  const int64_t padding = stride - format.header_bytes() - format.code_bytes();
  RowEncoder encoder(request);
  Scratch<float> copies(dim % 16 ? size_t(padded * kTogether) : 0);
  Measure measure(dim, report);
  float lanes[16];
  for (int64_t i = 0; i < 16; ++i) lanes[i] = i < 16 - (padded - dim) ? 1.0f : 0.0f;
  const Block mask = Block::load(lanes);
  const float limit = largest_value(format);

  for (int64_t begin = 0; begin < request.n; begin += kTogether) {
    int64_t count = std::min(kTogether, request.n - begin);
    SourceRow rows[kTogether];
    Range ranges[kTogether];
    Params params[kTogether];
    for (int64_t i = 0; i < count; ++i) {
      const float* values = request.values + (begin + i) * dim;
      if (dim % 16) {
        float* copy = &copies[size_t(i * padded)];
        std::memcpy(copy, values, size_t(4 * dim));
        values = copy;
      }
      rows[i] = {values, dim, padded, mask};
      if (find_range(rows[i], limit, ranges[i])) continue;
      report.bad_row = begin + i;
      for (int64_t c = dim - 1; c >= 0; --c) if (!(std::fabs(values[c]) <= limit)) report.bad_column = c;
      count = i;
    }
    for (int64_t i = 0; i < count && format.is_integer(); ++i) {
      const Range calibrated = encoder.calibrate(rows[i], ranges[i]);
      params[i] = encoder.params(calibrated);
      if (!format.wide && encoder.lossy(calibrated, params[i])) {
        report.needs_wide_row = begin + i;
        report.bad_row = report.bad_column = -1;
        count = i;
      }
    }
    uint8_t* out = request.out + begin * stride;
    for (int64_t i = 0; i < count; ++i) {
      if (format.is_integer()) encoder.write(rows[i], params[i], out + i * stride);
      else write_float_row(format, rows[i].values, out + i * stride);
      std::memset(out + (i + 1) * stride - padding, 0, size_t(padding));
      report.max_abs = std::max(report.max_abs, std::max(std::fabs(ranges[i].lo), std::fabs(ranges[i].hi)));
    }
    with_reader(format, [&]<class Reader>() {
      for (int64_t i = 0; i < count; ++i) measure.add<Reader>(rows[i], out + i * stride);
    });
    if (report.bad_row >= 0 || report.needs_wide_row >= 0) break;
  }
  measure.flush();
}

}  // namespace
}  // namespace embedserve
