// The row kernels as a table of functions, one table an instruction set, chosen once at run time.
//
// Nothing here knows of Python. Every function is thread-safe for concurrent readers, takes pointers of
// any alignment, and may run for milliseconds: callers hold no lock (and no GIL).
#pragma once

#include <cstdint>

#include "key_index.h"
#include "row_format.h"

namespace embedserve {

// A version's rows in memory, as the kernels see them. Borrows; the owner outlives it.
struct TableView {
  const uint8_t* rows = nullptr;  // [n_rows, stride]
  int64_t n_rows = 0;
  RowFormat format;
  int64_t stride = 0;             // format.stride(), or more
  KeyIndex index;                 // empty: keys are positions 0..n_rows-1
};

struct GatherRequest {
  const uint8_t* ids = nullptr;   // int64[n], little-endian, unaligned
  int64_t n = 0;
  Output output = Output::kFloat32;
  const uint8_t* fill = nullptr;  // what a missing id reads as, one row as `output`; null: zeros
  uint8_t* out = nullptr;         // [n, output_row_bytes]
  uint32_t* missing = nullptr;    // room for n: places in `ids` that name no row, ascending
};

// Rows that lie anywhere: row i, decoded, becomes row `places[i]` of `out`, or row i without places.
struct PickRequest {
  const uint8_t* const* rows = nullptr;  // [n]; null: that row of `out` stays as it is
  const uint32_t* places = nullptr;
  int64_t n = 0;
  RowFormat format;
  Output output = Output::kFloat32;
  uint8_t* out = nullptr;
};

struct PoolRequest {
  const uint8_t* ids = nullptr;
  int64_t n = 0;
  const uint8_t* offsets = nullptr;  // uint32[n_bags], ascending, the first 0, the last at most n (checked by the caller)
  int64_t n_bags = 0;
  const uint8_t* weights = nullptr;  // float[n], or null for 1
  bool mean = false;                 // divide by the sum of weights
  Output output = Output::kFloat32;  // not kQuantized
  const float* fill = nullptr;       // float[dim] or null: zeros
  uint8_t* out = nullptr;            // [n_bags, output_row_bytes]
  uint32_t* missing = nullptr;
};

struct EncodeRequest {
  const float* values = nullptr;  // [n, dim]
  int64_t n = 0;
  RowFormat format;
  Scheme scheme = Scheme::kAsymmetric;
  Calibration calibration = Calibration::kMinmax;
  uint8_t* out = nullptr;         // [n, format.stride()]
};

// What encoding did; rows are numbered within the request.
struct EncodeReport {
  int64_t bad_row = -1, bad_column = -1;   // first NaN, infinity, or value the row type cannot hold; encoding stops there
  int64_t needs_wide_row = -1;             // first row that loses more than half a code step to FP16 scale and bias; stops there
  double squared_error = 0, sum_cosine = 0;
  float max_error = 0, max_abs = 0;
  double* column_sums = nullptr;           // [dim], of the decoded rows; added to, the caller zeroes
};

struct TopKRequest {
  const float* queries = nullptr;  // [n_queries, dim]
  int64_t n_queries = 0;
  int64_t k = 0;
  Metric metric = Metric::kInnerProduct;
  const int64_t* keys = nullptr;            // of each position; null: the position is the key
  const int64_t* allow = nullptr;           // positions to consider, ascending, distinct; null: all
  int64_t n_allow = 0;
  const int64_t* excluded = nullptr;        // positions, ascending within each query's span
  const int64_t* excluded_spans = nullptr;  // [n_queries + 1] into `excluded`
  const int64_t* candidates = nullptr;      // [n_queries, n_candidates] positions to consider, each query's own; negative: none
  int64_t n_candidates = 0;
  const int64_t* dropped = nullptr;         // positions left out for every query, ascending
  int64_t n_dropped = 0;
  bool has_min_score = false;
  float min_score = 0;
  int64_t* positions = nullptr;             // [n_queries, k], best first
  float* scores = nullptr;                  // [n_queries, k]
  int64_t* counts = nullptr;                // [n_queries]
  int64_t* considered = nullptr;            // [n_queries], with candidates: those that may be answered, whatever they score
};

struct Kernels {
  const char* name;
  int64_t (*gather)(const TableView&, const GatherRequest&);  // returns the number of missing ids
  int64_t (*pool)(const TableView&, const PoolRequest&);
  void (*encode)(const EncodeRequest&, EncodeReport&);
  void (*topk)(const TableView&, const TopKRequest&);     // of all rows, or those allowed
  void (*rescore)(const TableView&, const TopKRequest&);  // of each query's candidates
  void (*pick)(const PickRequest&);
  // Reads every line of the rows and writes as many bytes as `gather` would, without decoding: its floor.
  int64_t (*touch)(const TableView&, const GatherRequest&);
};

// The best table this CPU can run; or by name ("scalar", "avx2", "avx512", "neon"), null when it cannot.
const Kernels& best_kernels();
const Kernels* kernels_named(const char* name);

}  // namespace embedserve
