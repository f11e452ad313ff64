// Python's view of the kernels: checks arguments, releases the GIL, and loops over no rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "table.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace embedserve;

namespace {

const Kernels& choose(const std::string& name) {
  if (name.empty()) return best_kernels();
  const Kernels* kernels = kernels_named(name.c_str());
  if (!kernels) throw nb::value_error(("this CPU has no kernels named '" + name + "'").c_str());
  return *kernels;
}

RowFormat make_format(int row_type, bool wide, int64_t dim) {
  RowFormat format;
  format.type = checked<RowType>(row_type, 3, "row_type");
  format.wide = wide;
  format.dim = dim;
  if (dim < 1) throw nb::value_error("dim must be at least 1");
  if (wide && !format.is_integer()) throw nb::value_error("only integer rows have a wide variant");
  return format;
}

nb::object missing_bytes(const uint32_t* missing, int64_t n) {
  if (n == 0) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(missing), size_t(4 * n));
}

void make_table(Table* self, nb::object rows, int64_t dim, int row_type, bool wide, nb::object index, uint64_t seed, const std::string& kernels,
                nb::object upserts) {
  new (self) Table(rows, make_format(row_type, wide, dim), index, seed, choose(kernels), upserts);
}

int64_t row_bytes(const Table& table, int output) { return table.row_bytes(checked<Output>(output, 3, "output")); }

nb::object gather(const Table& table, nb::object ids, int output, nb::object fill, nb::object out, bool floor) {
  const Buffer id_bytes(ids, "ids", 8), target(out, "out", 1, true);
  const MaybeBuffer fill_bytes(fill, "fill", 1);
  if (target.items() != id_bytes.items() * row_bytes(table, output)) throw nb::value_error("out: wrong number of bytes");
  fill_bytes.expect(row_bytes(table, output), "fill");
  std::unique_ptr<uint32_t[]> missing(new uint32_t[size_t(id_bytes.items()) + 1]);
  GatherRequest request;
  request.ids = id_bytes.data();
  request.n = id_bytes.items();
  request.output = Output(output);
  request.fill = fill_bytes.data();
  request.out = target.data();
  request.missing = missing.get();
  return missing_bytes(missing.get(), floor ? table.touch(request) : table.gather(request));
}

nb::object pool(const Table& table, nb::object ids, nb::object offsets, nb::object weights, bool mean, int output, nb::object fill, nb::object out) {
  PoolArguments arguments(table.view().format.dim, ids, offsets, weights, mean, checked<Output>(output, 3, "output"), fill);
  const Buffer target(out, "out", 1, true);
  if (target.items() != arguments.request.n_bags * row_bytes(table, output)) throw nb::value_error("out: wrong number of bytes");
  arguments.request.out = target.data();
  return missing_bytes(arguments.request.missing, table.pool(arguments.request));
}

void find(const Table& table, nb::object ids, nb::object out) {
  const Buffer id_bytes(ids, "ids", 8), target(out, "out", 8, true);
  if (target.items() != id_bytes.items()) throw nb::value_error("out: wrong number of items");
  table.find(id_bytes.data(), id_bytes.items(), reinterpret_cast<int64_t*>(target.data()));
}

using Queries = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Found = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Scores = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// What topk and rescore are both asked, checked.
TopKRequest checked_topk(const TableView& view, const Queries& queries, int metric, const MaybeBuffer& keys, const Positions& excluded,
                         const Positions& spans, const Positions& dropped, const nb::object& min_score, const Found& positions,
                         const Scores& scores, const Counts& counts) {
  TopKRequest request;
  request.queries = queries.data();
  request.n_queries = int64_t(queries.shape(0));
  request.k = int64_t(positions.shape(1));
  request.metric = checked<Metric>(metric, 2, "metric");
  keys.expect(view.n_rows, "keys");
  if (int64_t(queries.shape(1)) != view.format.dim) throw nb::value_error("queries: wrong dim");
  if (request.k < 1) throw nb::value_error("k must be at least 1");
  const size_t n = queries.shape(0);
  if (spans.shape(0) != n + 1 || positions.shape(0) != n || scores.shape(0) != n || counts.shape(0) != n || scores.shape(1) != positions.shape(1)) {
    throw nb::value_error("topk: shapes do not agree");
  }
  for (size_t i = 0; i < n; ++i) {
    if (spans.data()[i] < 0 || spans.data()[i] > spans.data()[i + 1] || spans.data()[i + 1] > int64_t(excluded.shape(0))) {
      throw nb::value_error("spans: out of order or range");
    }
  }
  request.keys = reinterpret_cast<const int64_t*>(keys.data());
  request.excluded = excluded.data();
  request.excluded_spans = spans.data();
  request.dropped = dropped.data();
  request.n_dropped = int64_t(dropped.shape(0));
  request.has_min_score = !min_score.is_none();
  if (request.has_min_score) request.min_score = nb::cast<float>(min_score);
  request.positions = positions.data();
  request.scores = scores.data();
  request.counts = counts.data();
  return request;
}

void topk(const Table& table, Queries queries, int metric, nb::object keys, nb::object allow, Positions excluded, Positions spans,
          Positions dropped, nb::object min_score, Found positions, Scores scores, Counts counts) {
  const TableView& view = table.view();
  const MaybeBuffer key_values(keys, "keys", 8), allowed(allow, "allow", 8);
  TopKRequest request = checked_topk(view, queries, metric, key_values, excluded, spans, dropped, min_score, positions, scores, counts);
  request.allow = reinterpret_cast<const int64_t*>(allowed.data());
  request.n_allow = allowed.items();
  for (int64_t i = 0; i < request.n_allow; ++i) {
    if (uint64_t(request.allow[i]) >= uint64_t(view.n_rows)) throw nb::value_error("allow: position out of range");
  }
  // An empty list allows nothing; the kernel tells it from "no list" by the pointer.
  static const int64_t nothing = 0;
  if (!allow.is_none() && !request.allow) request.allow = &nothing;
  nb::gil_scoped_release unlocked;
  table.kernels().topk(view, request);
}

void rescore(const Table& table, Queries queries, int metric, nb::object keys,
             nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> candidates, Positions excluded, Positions spans,
             Positions dropped, nb::object min_score, Found positions, Scores scores, Counts counts, Counts considered) {
  const TableView& view = table.view();
  const MaybeBuffer key_values(keys, "keys", 8);
  TopKRequest request = checked_topk(view, queries, metric, key_values, excluded, spans, dropped, min_score, positions, scores, counts);
  if (candidates.shape(0) != queries.shape(0) || considered.shape(0) != queries.shape(0)) {
    throw nb::value_error("rescore: shapes do not agree");
  }
  request.candidates = candidates.data();
  request.n_candidates = int64_t(candidates.shape(1));
  request.considered = considered.data();
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates.data()[i] >= view.n_rows) throw nb::value_error("candidates: position out of range");
  }
  nb::gil_scoped_release unlocked;
  table.kernels().rescore(view, request);
}

nb::dict encode(nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> values, nb::object out, int row_type, bool wide,
                int scheme, int calibration, const std::string& kernels) {
  const Kernels& chosen = choose(kernels);
  EncodeRequest request;
  request.values = values.data();
  request.n = int64_t(values.shape(0));
  request.format = make_format(row_type, wide, int64_t(values.shape(1)));
  request.scheme = checked<Scheme>(scheme, 1, "scheme");
  request.calibration = checked<Calibration>(calibration, 2, "calibration");
  const Buffer target(out, "out", 1, true);
  if (target.items() != request.n * request.format.stride()) throw nb::value_error("out: wrong number of bytes");
  request.out = target.data();
  EncodeReport report;
  const size_t dim = values.shape(1);
  double* sums = new double[dim]();
  nb::capsule owner(sums, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  report.column_sums = sums;
  {
    nb::gil_scoped_release unlocked;
    chosen.encode(request, report);
  }
  nb::dict result;
  result["bad_row"] = report.bad_row;
  result["bad_column"] = report.bad_column;
  result["needs_wide_row"] = report.needs_wide_row;
  result["squared_error"] = report.squared_error;
  result["sum_cosine"] = report.sum_cosine;
  result["max_error"] = report.max_error;
  result["max_abs"] = report.max_abs;
  result["column_sums"] = nb::ndarray<nb::numpy, double, nb::ndim<1>>(sums, {dim}, owner);
  return result;
}

class IndexPart {
 public:
  IndexPart(uint64_t n_buckets, uint64_t seed) : part_(n_buckets, seed), n_buckets_(n_buckets) {
    if (n_buckets <= kTailBuckets) throw nb::value_error("n_buckets: too few");
  }
  void begin(nb::object buckets, uint64_t lo, uint64_t hi) {
    buffer_ = std::make_unique<Buffer>(buckets, "buckets", sizeof(KeyBucket), true);
    if (lo > hi || hi > n_buckets_ || uint64_t(buffer_->items()) != hi - lo) throw nb::value_error("buckets: wrong range");
    part_.begin(buffer_->data(), lo, hi);
  }
  void add(nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys, int64_t first_position) {
    if (!buffer_) throw nb::value_error("begin() comes first");
    if (first_position < 0 || first_position + int64_t(keys.shape(0)) > kMaxIndexedRows) throw nb::value_error("positions past 2^32");
    nb::gil_scoped_release unlocked;
    part_.add(keys.data(), int64_t(keys.shape(0)), first_position);
  }
  nb::object duplicate() const {
    const auto& d = part_.duplicate();
    if (!d.found) return nb::none();
    return nb::make_tuple(d.key, d.first, d.second);
  }
  bool overflowed() const { return part_.overflowed(); }

 private:
  KeyIndexPart part_;
  uint64_t n_buckets_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Row kernels: encode, gather, pool, find and top-K over quantised rows. Arguments are checked; the GIL is released.";
  m.def("encode", &encode, "values"_a, "out"_a, "row_type"_a, "wide"_a, "scheme"_a, "calibration"_a, "kernels"_a = "",
        "Quantise values [n, dim] float32 into out [n, stride] uint8. Returns a report; stops at the first row that cannot be held.");
  m.def("kernels", [] { return best_kernels().name; }, "The instruction set chosen for this CPU.");
  m.def("has_kernels", [](const std::string& name) { return kernels_named(name.c_str()) != nullptr; }, "name"_a);
  m.def("stride", [](int row_type, bool wide, int64_t dim) { return make_format(row_type, wide, dim).stride(); },
        "row_type"_a, "wide"_a, "dim"_a, "Bytes of one stored row.");
  m.def("index_buckets", [](uint64_t n) { return home_buckets_for(n) + kTailBuckets; }, "n_keys"_a,
        "64-byte buckets of a key index for n keys.");
  // A server ends with tables alive; that is no leak, and its log is no place for the warning.
  nb::set_leak_warnings(false);
  m.attr("BUCKET_BYTES") = sizeof(KeyBucket);
  m.attr("MAX_INDEXED_ROWS") = kMaxIndexedRows;

  nb::class_<Table>(m, "Table", "A version's rows in memory. Borrows its buffers; safe for concurrent use.")
      .def("__init__", &make_table, "rows"_a, "dim"_a, "row_type"_a, "wide"_a, "index"_a = nb::none(), "seed"_a = 0, "kernels"_a = "",
           "upserts"_a = nb::none())
      .def_prop_ro("n_rows", [](const Table& table) { return table.view().n_rows; })
      .def_prop_ro("stride", [](const Table& table) { return table.view().stride; })
      .def_prop_ro("kernels", [](const Table& table) { return table.kernels().name; })
      .def("row_bytes", &row_bytes, "output"_a)
      .def("gather", &gather, "ids"_a, "output"_a, "fill"_a.none(), "out"_a, "floor"_a = false,
           "Decode the rows of ids into out. Returns places of missing ids as packed uint32, or None.")
      .def("pool", &pool, "ids"_a, "offsets"_a, "weights"_a.none(), "mean"_a, "output"_a, "fill"_a.none(), "out"_a,
           "One pooled row a bag into out; missing as in gather. Raises ValueError on bad offsets.")
      .def("find", &find, "ids"_a, "out"_a, "Positions of ids into out, int64; -1 where missing.")
      .def("topk", &topk, "queries"_a, "metric"_a, "keys"_a.none(), "allow"_a.none(), "excluded"_a, "spans"_a, "dropped"_a, "min_score"_a.none(),
           "positions"_a, "scores"_a, "counts"_a, "Exact top-K of this table's own rows, but for positions `dropped`, into positions, scores [Q, k] and counts [Q].")
      .def("rescore", &rescore, "queries"_a, "metric"_a, "keys"_a.none(), "candidates"_a, "excluded"_a, "spans"_a, "dropped"_a,
           "min_score"_a.none(), "positions"_a, "scores"_a, "counts"_a, "considered"_a,
           "The best of each query's candidates, distinct positions [Q, C] (negative: none); considered [Q]: how many may be answered.");
  nb::class_<IndexPart>(m, "KeyIndexPart", "Builds a key index one range of buckets at a time.")
      .def(nb::init<uint64_t, uint64_t>(), "n_buckets"_a, "seed"_a)
      .def("begin", &IndexPart::begin, "buckets"_a, "lo"_a, "hi"_a)
      .def("add", &IndexPart::add, "keys"_a, "first_position"_a)
      .def_prop_ro("duplicate", &IndexPart::duplicate)
      .def_prop_ro("overflowed", &IndexPart::overflowed);
}
