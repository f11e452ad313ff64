// Python's view of the native request path.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "lookups.h"
#include "redis_pages.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace embedserve;

namespace {

nb::object bytes_or_none(std::string_view bytes) {
  if (bytes.empty()) return nb::none();
  return nb::bytes(bytes.data(), bytes.size());
}

nb::tuple to_python(const Response& response) {
  return nb::make_tuple(response.message, bytes_or_none(response.missing_bytes()), bytes_or_none(response.unavailable_bytes()));
}

Terms terms_of(int output, int on_missing, int on_unavailable) {
  return {checked<Output>(output, 3, "output"), checked<OnMissing>(on_missing, 2, "on_missing"),
          checked<OnUnavailable>(on_unavailable, 1, "on_unavailable")};
}

nb::tuple rows(const Responder& responder, nb::object ids, int output, int on_missing, int on_unavailable) {
  const Buffer id_bytes(ids, "ids", 8);
  return to_python(responder.rows(id_bytes.data(), id_bytes.items(), terms_of(output, on_missing, on_unavailable)));
}

nb::tuple pooled(const Responder& responder, nb::object ids, nb::object offsets, nb::object weights, bool mean, int output, int on_missing,
                 int on_unavailable) {
  return to_python(responder.pooled(ids, offsets, weights, mean, terms_of(output, on_missing, on_unavailable)));
}

std::shared_ptr<ColdSource> disk_rows(const std::string& path, int64_t rows_offset, int64_t n_rows, int64_t stride, int64_t index_offset,
                                      uint64_t n_buckets, uint64_t seed) {
  if (index_offset >= 0 && n_buckets <= kTailBuckets) throw nb::value_error("n_buckets: too few");
  return std::make_shared<UnlockedDisk>(path, DiskLayout{rows_offset, n_rows, stride, index_offset, n_buckets, seed});
}

std::shared_ptr<ColdSource> python_rows(nb::object source, int64_t stride) { return std::make_shared<PythonSource>(std::move(source), stride); }

std::string_view bytes_of(nb::handle object) {
  return {PyBytes_AS_STRING(object.ptr()), size_t(PyBytes_GET_SIZE(object.ptr()))};
}

// Rows and statuses of ids from the pages that hold them. Returns how many pages were there and not what they should be.
int64_t rows_of_pages(nb::list values, nb::list names, nb::object numbers, nb::object ids, nb::object which, int row_type, uint32_t dim, bool keyed,
                      int64_t rows_a_page, int64_t n_rows, nb::object rows, nb::object statuses) {
  const Buffer number_bytes(numbers, "numbers", 8), id_bytes(ids, "ids", 8), page_of(which, "which", 4), status_bytes(statuses, "statuses", 1, true);
  const int64_t n = id_bytes.items();
  if (page_of.items() != n || status_bytes.items() != n || values.size() != names.size() || int64_t(values.size()) != number_bytes.items()) {
    throw nb::value_error("rows_of_pages: sizes do not agree");
  }
  const Buffer row_bytes(rows, "rows", 1, true);
  const int64_t stride = n ? row_bytes.items() / n : 0;
  if (row_bytes.items() != n * stride) throw nb::value_error("rows: wrong number of bytes");
  std::vector<RedisPage> pages;
  std::vector<int64_t> firsts;
  int64_t damaged = 0;
  for (size_t p = 0; p < values.size(); ++p) {
    const bool there = PyBytes_Check(values[p].ptr());
    if (!PyBytes_Check(nb::handle(names[p]).ptr())) throw nb::type_error("names: bytes");
    pages.emplace_back(bytes_of(names[p]), there ? bytes_of(values[p]) : std::string_view(), uint8_t(row_type), dim, stride, keyed);
    int64_t number;
    std::memcpy(&number, number_bytes.data() + 8 * p, 8);
    firsts.push_back(number * rows_a_page);
    if (!keyed && pages.back().ok && pages.back().n != std::min(rows_a_page, n_rows - firsts.back())) pages.back().ok = false;
    damaged += there && !pages.back().ok;
  }
  for (int64_t i = 0; i < n; ++i) {
    int32_t p;
    int64_t id;
    std::memcpy(&p, page_of.data() + 4 * i, 4);
    std::memcpy(&id, id_bytes.data() + 8 * i, 8);
    if (p >= int64_t(pages.size())) throw nb::value_error("which: out of range");
    RowStatus& status = reinterpret_cast<RowStatus*>(status_bytes.data())[i];
    if (p < 0) {
      status = RowStatus::kMissing;
      continue;
    }
    const RedisPage& page = pages[size_t(p)];
    const int64_t place = !page.ok ? -1 : keyed ? page.find(id) : id - firsts[size_t(p)];
    status = !page.ok ? RowStatus::kUnavailable : place < 0 || place >= page.n ? RowStatus::kMissing : RowStatus::kFound;
    if (status == RowStatus::kFound) std::memcpy(row_bytes.data() + i * stride, page.rows + place * stride, size_t(stride));
  }
  return damaged;
}

nb::tuple gather(const CachedRows& rows, nb::object ids, int output, nb::object out) {
  const Buffer id_bytes(ids, "ids", 8), target(out, "out", 1, true);
  if (target.items() != id_bytes.items() * rows.row_bytes(checked<Output>(output, 3, "output"))) throw nb::value_error("out: wrong number of bytes");
  std::unique_ptr<uint32_t[]> missing(new uint32_t[size_t(id_bytes.items()) + 1]);
  GatherRequest request;
  request.ids = id_bytes.data();
  request.n = id_bytes.items();
  request.output = Output(output);
  request.out = target.data();
  request.missing = missing.get();
  Tally tally;
  const int64_t n = rows.gather(request, nullptr, tally);
  return nb::make_tuple(bytes_or_none({reinterpret_cast<const char*>(missing.get()), size_t(4 * n)}),
                        bytes_or_none({reinterpret_cast<const char*>(tally.unavailable.data()), 4 * tally.unavailable.size()}));
}

int64_t warm(const CachedRows& rows, nb::object keys) {
  const Buffer key_bytes(keys, "keys", 8);
  std::vector<int64_t> copy(static_cast<size_t>(key_bytes.items()));
  if (!copy.empty()) std::memcpy(copy.data(), key_bytes.data(), 8 * copy.size());
  const nb::gil_scoped_release unlocked;
  return rows.table().warm(copy.data(), int64_t(copy.size()));
}

nb::bytes hot_keys(const CachedRows& rows, int64_t most) {
  std::vector<int64_t> keys;
  {
    const nb::gil_scoped_release unlocked;
    for (const auto& [asked, key] : rows.cache().hot_keys(rows.number())) {
      if (int64_t(keys.size()) == most) break;
      keys.push_back(key);
    }
  }
  return nb::bytes(keys.data(), 8 * keys.size());
}

std::pair<int64_t, std::vector<int64_t>> check_samples(const CachedRows& rows) {
  const nb::gil_scoped_release unlocked;
  return rows.table().check_samples();
}

nb::dict counts(const CachedRows& rows) {
  const Source& source = rows.counts();
  nb::dict result;
  const std::pair<const char*, const std::atomic<int64_t>*> fields[] = {
      {"rows", &source.rows}, {"bytes", &source.bytes}, {"hits", &source.hits}, {"misses", &source.misses}, {"unknown", &source.unknown},
      {"evictions", &source.evictions}, {"declined", &source.declined}, {"fetches", &source.fetches}, {"fetched", &source.fetched},
      {"fetch_ns", &source.fetch_ns}, {"unavailable", &source.unavailable}};
  for (const auto& [name, count] : fields) result[name] = count->load(std::memory_order_relaxed);
  return result;
}

}  // namespace

NB_MODULE(_lookup, m) {
  m.doc() = "The native request path of Lookup, and the ram tier. Import embedserve.quant.kernels._native first: tables come from there.";
  nb::set_leak_warnings(false);  // as in _native
  nb::class_<ColdSource>(m, "ColdSource", "Where rows come from that the cache does not hold.");
  m.def("disk_rows", &disk_rows, "path"_a, "rows_offset"_a, "n_rows"_a, "stride"_a, "index_offset"_a, "n_buckets"_a, "seed"_a,
        "Rows of an artifact's file; index_offset -1: keys are positions. Raises OSError.");
  m.def("python_rows", &python_rows, "source"_a, "stride"_a, "Rows of an object with fetch(ids) -> (rows, statuses).");
  m.def("rows_of_pages", &rows_of_pages, "values"_a, "names"_a, "numbers"_a, "ids"_a, "which"_a, "row_type"_a, "dim"_a, "keyed"_a, "rows_a_page"_a,
        "n_rows"_a, "rows"_a, "statuses"_a,
        "Rows [n, stride] and statuses [n] of ids from pages of Redis (bytes or None): `which` [n] int32 is each id's page, -1 for none. "
        "Returns how many pages were damaged.");
  nb::class_<RowCache>(m, "RowCache", "The ram tier of tables that are not held whole: one pool for all their rows.")
      .def(nb::init<int64_t, const std::string&, int64_t>(), "budget_bytes"_a, "policy"_a, "usual_row_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("budget_bytes", &RowCache::budget)
      .def_prop_ro("policy", [](const RowCache& cache) { return cache.policy().name; });
  nb::class_<CachedRows>(m, "CachedRows", "One version's rows in a RowCache in front of a ColdSource. Safe for concurrent use.")
      .def(nb::init<nb::object, nb::object, nb::object, std::shared_ptr<ColdSource>, int, int64_t, int64_t, double>(), "table"_a, "upserts"_a.none(),
           "cache"_a, "cold"_a, "cold_tier"_a, "floor"_a, "ceiling"_a, "shadow_share"_a)
      .def("with_upserts", [](const CachedRows& rows, nb::object upserts) { return std::make_unique<CachedRows>(rows, std::move(upserts)); },
           "upserts"_a.none(), "The same version, in the same part of the cache, behind other upserts.")
      .def("gather", &gather, "ids"_a, "output"_a, "out"_a,
           "Decode the rows of ids into out, zeros where there is none. (places of missing ids, of unavailable ones), packed uint32 or None.")
      .def("warm", &warm, "keys"_a, "Loads rows before they are asked for. Returns how many there are.")
      .def("hot_keys", &hot_keys, "most"_a, "Keys of the cached rows, those most asked for first, packed int64.")
      .def("check_samples", &check_samples, "(rows compared with the cold tier, keys that differed and were dropped).")
      .def("overwrite", [](const CachedRows& rows, int64_t key, int byte) { return rows.table().overwrite(key, uint8_t(byte)); }, "key"_a, "byte"_a,
           "Damages a cached row: for tests.")
      .def("counts", &counts, "What the cache counted for this version, by name.");
  nb::class_<Responder>(m, "Responder", "Builds LookupResponses from one version's rows. Safe for concurrent use.")
      .def(nb::init<nb::object, std::string, nb::sequence, bool>(), "rows"_a, "version"_a, "default_rows"_a, "fits_float16"_a)
      .def("rows", &rows, "ids"_a, "output"_a, "on_missing"_a, "on_unavailable"_a,
           "(response bytes, places of missing ids, places of ids that no tier could give: packed uint32 or None). No response where "
           "on_missing is ERROR and ids are missing, or DEFAULT and there is no default row; or on_unavailable is FAIL and ids are unavailable.")
      .def("pooled", &pooled, "ids"_a, "offsets"_a, "weights"_a.none(), "mean"_a, "output"_a, "on_missing"_a, "on_unavailable"_a,
           "The same with one pooled row a bag. Raises ValueError on bad offsets.");
  nb::class_<Lookups>(m, "Lookups", "Answers plain LookupRequests. Safe for concurrent use.")
      .def(nb::init<nb::dict>(), "tables"_a, "{name: (current Responder, {version: Responder})}")
      .def("answer", &Lookups::answer, "request"_a, "max_ids"_a, "max_response_bytes"_a,
           "(LookupResponse bytes, number of ids), or None for a request that is not plain or does not succeed.");
}
