// Python's view of the kernels: checks arguments, releases the GIL, and loops over no rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <string>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace embedserve;

namespace {

// Any contiguous buffer: bytes, memoryview, numpy array.
class Buffer {
 public:
  Buffer(nb::handle object, const char* name, size_t item, bool writable = false) {
    const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    if (size_t(view_.len) % item != 0) {
      const std::string message = std::string(name) + ": " + std::to_string(view_.len) +
          " bytes are not a whole number of " + std::to_string(item) + "-byte items";
      PyBuffer_Release(&view_);
      throw nb::value_error(message.c_str());
    }
    items_ = int64_t(size_t(view_.len) / item);
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  int64_t items() const { return items_; }

 private:
  Py_buffer view_;
  int64_t items_ = 0;
};

// A buffer that may be absent.
class MaybeBuffer {
 public:
  MaybeBuffer(nb::handle object, const char* name, size_t item) {
    if (!object.is_none()) buffer_ = std::make_unique<Buffer>(object, name, item);
  }
  uint8_t* data() const { return buffer_ ? buffer_->data() : nullptr; }
  int64_t items() const { return buffer_ ? buffer_->items() : 0; }
  void expect(int64_t n, const char* name) const {
    if (buffer_ && buffer_->items() != n) {
      throw nb::value_error((std::string(name) + ": expected " + std::to_string(n) + " items, got " + std::to_string(buffer_->items())).c_str());
    }
  }

 private:
  std::unique_ptr<Buffer> buffer_;
};

const Kernels& choose(const std::string& name) {
  if (name.empty()) return best_kernels();
  const Kernels* kernels = kernels_named(name.c_str());
  if (!kernels) throw nb::value_error(("this CPU has no kernels named '" + name + "'").c_str());
  return *kernels;
}

template <class Enum>
Enum checked(int value, int last, const char* name) {
  if (value < 0 || value > last) throw nb::value_error((std::string(name) + " out of range").c_str());
  return Enum(value);
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

// Releases the GIL for work on this many bytes or more. Below it the work takes some microseconds, less than
// another thread needs to take the lock and hand it back.
class Unlocked {
 public:
  explicit Unlocked(int64_t work_bytes) {
    if (work_bytes >= (int64_t(128) << 10)) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

nb::object missing_bytes(const uint32_t* missing, int64_t n) {
  if (n == 0) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(missing), size_t(4 * n));
}

// A bytes object of `head` and `payload` uninitialised bytes behind it. Until it is returned nobody else
// sees it, so it may be filled without the GIL.
nb::object new_message(const Buffer& head, int64_t payload, uint8_t** at) {
  PyObject* message = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(head.items() + payload));
  if (!message) throw nb::python_error();
  uint8_t* data = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(message));
  std::memcpy(data, head.data(), size_t(head.items()));
  *at = data + head.items();
  return nb::steal(message);
}

class Table {
 public:
  Table(nb::object rows, int64_t dim, int row_type, bool wide, nb::object index, uint64_t seed, const std::string& kernels)
      : kernels_(choose(kernels)) {
    view_.format = make_format(row_type, wide, dim);
    view_.stride = view_.format.stride();
    rows_ = std::make_unique<Buffer>(rows, "rows", size_t(view_.stride));
    view_.rows = rows_->data();
    view_.n_rows = rows_->items();
    if (!index.is_none()) {
      index_ = std::make_unique<Buffer>(index, "index", sizeof(KeyBucket));
      if (index_->items() <= int64_t(kTailBuckets)) throw nb::value_error("index: too few buckets");
      if (reinterpret_cast<uintptr_t>(index_->data()) % alignof(KeyBucket) != 0) throw nb::value_error("index: not aligned to 8 bytes");
      view_.index = KeyIndex(index_->data(), uint64_t(index_->items()), seed, view_.n_rows);
    }
  }

  int64_t n_rows() const { return view_.n_rows; }
  int64_t stride() const { return view_.stride; }
  const char* kernels() const { return kernels_.name; }
  int64_t row_bytes(int output) const { return output_row_bytes(view_.format, checked<Output>(output, 3, "output")); }

  nb::object gather(nb::object ids, int output, nb::object fill, nb::object out, bool floor) const {
    const Buffer id_bytes(ids, "ids", 8), target(out, "out", 1, true);
    const MaybeBuffer fill_bytes(fill, "fill", 1);
    if (target.items() != id_bytes.items() * row_bytes(output)) throw nb::value_error("out: wrong number of bytes");
    return run_gather(id_bytes, output, fill_bytes, target.data(), floor);
  }

  std::tuple<nb::object, nb::object> gather_message(nb::object ids, int output, nb::object fill, nb::object head) const {
    const Buffer id_bytes(ids, "ids", 8), head_bytes(head, "head", 1);
    const MaybeBuffer fill_bytes(fill, "fill", 1);
    uint8_t* at;
    nb::object message = new_message(head_bytes, id_bytes.items() * row_bytes(output), &at);
    nb::object missing = run_gather(id_bytes, output, fill_bytes, at, false);
    return {message, missing};
  }

  std::tuple<nb::object, nb::object> pool_message(nb::object ids, nb::object offsets, nb::object weights, bool mean, int output,
                                                  nb::object fill, nb::object head) const {
    const Buffer id_bytes(ids, "ids", 8), head_bytes(head, "head", 1), offset_bytes(offsets, "offsets", 4);
    const MaybeBuffer weight_bytes(weights, "weights", 4), fill_bytes(fill, "fill", 4);
    weight_bytes.expect(id_bytes.items(), "weights");
    fill_bytes.expect(view_.format.dim, "fill");
    if (output == int(Output::kQuantized)) throw nb::value_error("pooled rows cannot be quantised");
    check_offsets(offset_bytes, id_bytes.items());
    PoolRequest request;
    request.ids = id_bytes.data();
    request.n = id_bytes.items();
    request.offsets = offset_bytes.data();
    request.n_bags = offset_bytes.items();
    request.weights = weight_bytes.data();
    request.mean = mean;
    request.output = checked<Output>(output, 2, "output");
    // A copy: the caller's bytes may not be aligned for floats.
    std::unique_ptr<float[]> fill_values;
    if (fill_bytes.data()) {
      fill_values = std::make_unique<float[]>(size_t(view_.format.dim));
      std::memcpy(fill_values.get(), fill_bytes.data(), size_t(4 * view_.format.dim));
      request.fill = fill_values.get();
    }
    nb::object message = new_message(head_bytes, request.n_bags * row_bytes(output), &request.out);
    std::unique_ptr<uint32_t[]> missing(new uint32_t[size_t(request.n) + 1]);
    request.missing = missing.get();
    int64_t n_missing;
    {
      const Unlocked unlocked(request.n * view_.stride);
      n_missing = kernels_.pool(view_, request);
    }
    return {message, missing_bytes(missing.get(), n_missing)};
  }

  void find(nb::object ids, nb::object out) const {
    const Buffer id_bytes(ids, "ids", 8), target(out, "out", 8, true);
    if (target.items() != id_bytes.items()) throw nb::value_error("out: wrong number of items");
    const Unlocked unlocked(id_bytes.items() * int64_t(sizeof(KeyBucket)));
    int64_t* positions = reinterpret_cast<int64_t*>(target.data());
    std::memcpy(positions, id_bytes.data(), size_t(8 * id_bytes.items()));
    if (view_.index) return view_.index.find_many(positions, id_bytes.items(), positions);
    for (int64_t i = 0; i < id_bytes.items(); ++i) {
      if (uint64_t(positions[i]) >= uint64_t(view_.n_rows)) positions[i] = -1;
    }
  }

  using Queries = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  using Positions = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  void topk(Queries queries, int metric, nb::object keys, nb::object allow, Positions excluded, Positions spans,
            nb::object min_score, nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> positions,
            nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> scores,
            nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> counts) const {
    TopKRequest request;
    request.queries = queries.data();
    request.n_queries = int64_t(queries.shape(0));
    request.k = int64_t(positions.shape(1));
    request.metric = checked<Metric>(metric, 2, "metric");
    const MaybeBuffer key_values(keys, "keys", 8), allowed(allow, "allow", 8);
    key_values.expect(view_.n_rows, "keys");
    if (int64_t(queries.shape(1)) != view_.format.dim) throw nb::value_error("queries: wrong dim");
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
    request.keys = reinterpret_cast<const int64_t*>(key_values.data());
    request.allow = reinterpret_cast<const int64_t*>(allowed.data());
    request.n_allow = allowed.items();
    for (int64_t i = 0; i < request.n_allow; ++i) {
      if (uint64_t(request.allow[i]) >= uint64_t(view_.n_rows)) throw nb::value_error("allow: position out of range");
    }
    // An empty list allows nothing; the kernel tells it from "no list" by the pointer.
    static const int64_t nothing = 0;
    if (!allow.is_none() && !request.allow) request.allow = &nothing;
    request.excluded = excluded.data();
    request.excluded_spans = spans.data();
    request.has_min_score = !min_score.is_none();
    if (request.has_min_score) request.min_score = nb::cast<float>(min_score);
    request.positions = positions.data();
    request.scores = scores.data();
    request.counts = counts.data();
    nb::gil_scoped_release unlocked;
    kernels_.topk(view_, request);
  }

 private:
  nb::object run_gather(const Buffer& ids, int output, const MaybeBuffer& fill, uint8_t* out, bool floor) const {
    fill.expect(row_bytes(output), "fill");
    GatherRequest request;
    request.ids = ids.data();
    request.n = ids.items();
    request.output = checked<Output>(output, 3, "output");
    request.fill = fill.data();
    request.out = out;
    std::unique_ptr<uint32_t[]> missing(new uint32_t[size_t(request.n) + 1]);
    request.missing = missing.get();
    int64_t n_missing;
    {
      const Unlocked unlocked(request.n * (view_.stride + row_bytes(output)));
      n_missing = (floor ? kernels_.touch : kernels_.gather)(view_, request);
    }
    return missing_bytes(missing.get(), n_missing);
  }

  static void check_offsets(const Buffer& offsets, int64_t n) {
    uint32_t before = 0;
    for (int64_t i = 0; i < offsets.items(); ++i) {
      uint32_t offset;
      std::memcpy(&offset, offsets.data() + 4 * i, 4);
      if ((i == 0 && offset != 0) || offset < before || int64_t(offset) > n) {
        throw nb::value_error(("offsets[" + std::to_string(i) + "] = " + std::to_string(offset) +
            ": must begin at 0, not fall, and not pass the " + std::to_string(n) + " ids").c_str());
      }
      before = offset;
    }
    if (offsets.items() == 0 && n > 0) throw nb::value_error("offsets: empty, but there are ids");
  }

  const Kernels& kernels_;
  TableView view_;
  std::unique_ptr<Buffer> rows_, index_;
};

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
      .def(nb::init<nb::object, int64_t, int, bool, nb::object, uint64_t, const std::string&>(), "rows"_a, "dim"_a, "row_type"_a,
           "wide"_a, "index"_a = nb::none(), "seed"_a = 0, "kernels"_a = "")
      .def_prop_ro("n_rows", &Table::n_rows)
      .def_prop_ro("stride", &Table::stride)
      .def_prop_ro("kernels", &Table::kernels)
      .def("row_bytes", &Table::row_bytes, "output"_a)
      .def("gather", &Table::gather, "ids"_a, "output"_a, "fill"_a.none(), "out"_a, "floor"_a = false,
           "Decode the rows of ids into out. Returns places of missing ids as packed uint32, or None.")
      .def("gather_message", &Table::gather_message, "ids"_a, "output"_a, "fill"_a.none(), "head"_a,
           "(head + decoded rows, missing as in gather).")
      .def("pool_message", &Table::pool_message, "ids"_a, "offsets"_a, "weights"_a.none(), "mean"_a, "output"_a, "fill"_a.none(), "head"_a,
           "(head + one pooled row a bag, missing as in gather). Raises ValueError on bad offsets.")
      .def("find", &Table::find, "ids"_a, "out"_a, "Positions of ids into out, int64; -1 where missing.")
      .def("topk", &Table::topk, "queries"_a, "metric"_a, "keys"_a.none(), "allow"_a.none(), "excluded"_a, "spans"_a, "min_score"_a.none(),
           "positions"_a, "scores"_a, "counts"_a, "Exact top-K into positions, scores [Q, k] and counts [Q].");
  nb::class_<IndexPart>(m, "KeyIndexPart", "Builds a key index one range of buckets at a time.")
      .def(nb::init<uint64_t, uint64_t>(), "n_buckets"_a, "seed"_a)
      .def("begin", &IndexPart::begin, "buckets"_a, "lo"_a, "hi"_a)
      .def("add", &IndexPart::add, "keys"_a, "first_position"_a)
      .def_prop_ro("duplicate", &IndexPart::duplicate)
      .def_prop_ro("overflowed", &IndexPart::overflowed);
}
