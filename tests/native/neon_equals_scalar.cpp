// Every NEON kernel against the scalar one, bit for bit, for machines without an arm64 core: `make arm64`
// cross-compiles this and runs it under qemu. On arm64 itself the Python tests do the same.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../quant/kernels/kernels.h"

namespace embedserve {
extern const Kernels kScalarKernels, kNeonKernels;
}
using namespace embedserve;

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  int64_t checks = 0;
  for (int64_t dim : {1, 2, 3, 15, 16, 17, 31, 64, 100, 128, 384}) {
    for (int type = 0; type < 4; ++type) for (bool wide : {false, true}) for (int scheme = 0; scheme < 2; ++scheme) for (int calibration = 0; calibration < 3; ++calibration) {
      RowFormat format;
      format.type = RowType(type);
      format.wide = wide;
      format.dim = dim;
      if (wide && !format.is_integer()) continue;
      constexpr int64_t kRows = 50;
      std::vector<float> values(size_t(kRows * dim));
      for (float& v : values) v = float(int(normal(random) * 512)) / 256;
      std::vector<uint8_t> rows[2];
      for (int which = 0; which < 2; ++which) {
        rows[which].assign(size_t(kRows * format.stride()), 0xaa);
        std::vector<double> sums(static_cast<size_t>(dim));
        EncodeRequest request{values.data(), kRows, format, Scheme(scheme), Calibration(calibration), rows[which].data()};
        EncodeReport report;
        report.column_sums = sums.data();
        (which ? kNeonKernels : kScalarKernels).encode(request, report);
      }
      if (rows[0] != rows[1]) return std::printf("encode differs: dim %d type %d\n", int(dim), type), 1;
      TableView table;
      table.rows = rows[0].data();
      table.n_rows = kRows;
      table.format = format;
      table.stride = format.stride();
      std::vector<int64_t> ids;
      for (int i = 0; i < 90; ++i) ids.push_back(int64_t(random() % 60) - 5);
      for (int output = 0; output < 4; ++output) {
        std::vector<uint8_t> out[2];
        std::vector<uint32_t> missing[2];
        for (int which = 0; which < 2; ++which) {
          out[which].assign(size_t(90 * output_row_bytes(format, Output(output))), 0xaa);
          missing[which].assign(90, 0);
          GatherRequest request{reinterpret_cast<const uint8_t*>(ids.data()), 90, Output(output), nullptr, out[which].data(), missing[which].data()};
          (which ? kNeonKernels : kScalarKernels).gather(table, request);
        }
        if (out[0] != out[1] || missing[0] != missing[1]) return std::printf("gather differs: dim %d type %d output %d\n", int(dim), type, output), 1;
        ++checks;
      }
      const uint32_t offsets[] = {0, 30, 30, 71};
      std::vector<float> pooled[2];
      for (int which = 0; which < 2; ++which) {
        pooled[which].assign(size_t(4 * dim), 0);
        std::vector<uint32_t> missing(90);
        PoolRequest request;
        request.ids = reinterpret_cast<const uint8_t*>(ids.data());
        request.n = 90;
        request.offsets = reinterpret_cast<const uint8_t*>(offsets);
        request.n_bags = 4;
        request.mean = true;
        request.out = reinterpret_cast<uint8_t*>(pooled[which].data());
        request.missing = missing.data();
        (which ? kNeonKernels : kScalarKernels).pool(table, request);
      }
      if (pooled[0] != pooled[1]) return std::printf("pool differs: dim %d type %d\n", int(dim), type), 1;
      for (int metric = 0; metric < 3; ++metric) {
        int64_t positions[2][10] = {}, counts[2] = {};
        float scores[2][10] = {};
        for (int which = 0; which < 2; ++which) {
          TopKRequest request;
          request.queries = values.data();
          request.n_queries = 1;
          request.k = 10;
          request.metric = Metric(metric);
          request.positions = positions[which];
          request.scores = scores[which];
          request.counts = &counts[which];
          (which ? kNeonKernels : kScalarKernels).topk(table, request);
        }
        for (int i = 0; i < 10; ++i) {  // the order of rounding differs by FMA: scores agree within a bound
          if (counts[0] != counts[1] || std::fabs(scores[0][i] - scores[1][i]) > 1e-3f * (1 + std::fabs(scores[0][i]))) return std::printf("topk differs\n"), 1;
        }
      }
    }
  }
  std::printf("%d gathers agree\n", int(checks));
}
