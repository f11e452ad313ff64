// Python's view of the native request path.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "lookups.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace embedserve;

namespace {

nb::tuple to_python(const Response& response) {
  nb::object missing = nb::none();
  if (response.n_missing) missing = nb::bytes(response.missing_bytes().data(), response.missing_bytes().size());
  return nb::make_tuple(response.message, missing);
}

nb::tuple rows(const Responder& responder, nb::object ids, int output, int on_missing) {
  const Buffer id_bytes(ids, "ids", 8);
  return to_python(responder.rows(id_bytes.data(), id_bytes.items(), checked<Output>(output, 3, "output"),
                                  checked<OnMissing>(on_missing, 2, "on_missing")));
}

nb::tuple pooled(const Responder& responder, nb::object ids, nb::object offsets, nb::object weights, bool mean, int output, int on_missing) {
  return to_python(responder.pooled(ids, offsets, weights, mean, checked<Output>(output, 3, "output"),
                                    checked<OnMissing>(on_missing, 2, "on_missing")));
}

}  // namespace

NB_MODULE(_lookup, m) {
  m.doc() = "The native request path of Lookup. Import embedserve.quant.kernels._native first: tables come from there.";
  nb::set_leak_warnings(false);  // as in _native
  nb::class_<Responder>(m, "Responder", "Builds LookupResponses from one version's rows. Safe for concurrent use.")
      .def(nb::init<nb::object, std::string, nb::sequence, bool>(), "table"_a, "version"_a, "default_rows"_a, "fits_float16"_a)
      .def("rows", &rows, "ids"_a, "output"_a, "on_missing"_a,
           "(response bytes, places of missing ids as packed uint32 or None). No response where on_missing is ERROR and ids are "
           "missing, or DEFAULT and there is no default row.")
      .def("pooled", &pooled, "ids"_a, "offsets"_a, "weights"_a.none(), "mean"_a, "output"_a, "on_missing"_a,
           "The same with one pooled row a bag. Raises ValueError on bad offsets.");
  nb::class_<Lookups>(m, "Lookups", "Answers plain LookupRequests. Safe for concurrent use.")
      .def(nb::init<nb::dict>(), "tables"_a, "{name: (current Responder, {version: Responder})}")
      .def("answer", &Lookups::answer, "request"_a, "max_ids"_a, "max_response_bytes"_a,
           "(LookupResponse bytes, number of ids), or None for a request that is not plain or does not succeed.");
}
