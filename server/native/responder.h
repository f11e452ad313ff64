// From ids to the bytes of a LookupResponse, built once, in the object that goes out.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "table.h"
#include "wire.h"

namespace embedserve {

enum class OnMissing { kZero = 0, kDefault = 1, kError = 2 };
constexpr int kOutputs = 4;

// A response, or none where missing ids allow none; and the places of the missing ids, ascending.
struct Response {
  nb::object message = nb::none();
  std::unique_ptr<uint32_t[]> missing;
  int64_t n_missing = 0;

  std::string_view missing_bytes() const { return {reinterpret_cast<const char*>(missing.get()), size_t(4 * n_missing)}; }
};

// Answers from one version's rows. Immutable; safe for concurrent use; called with the GIL.
class Responder {
 public:
  // default_rows: one an output, as that output; none where the table's row type cannot hold it.
  Responder(nb::object table, std::string version, nb::sequence default_rows, bool fits_float16)
      : keep_(table), table_(nb::cast<const Table&>(table)), version_(std::move(version)), fits_float16_(fits_float16) {
    if (nb::len(default_rows) != size_t(kOutputs)) throw nb::value_error("default_rows: one an output");
    for (int i = 0; i < kOutputs; ++i) {
      const MaybeBuffer row(default_rows[i], "default_rows", 1);
      row.expect(table_.row_bytes(Output(i)), "default_rows");
      if (row.data()) default_rows_[i].emplace(reinterpret_cast<const char*>(row.data()), size_t(row.items()));
    }
  }

  const Table& table() const { return table_; }
  bool can_give(Output output) const { return output != Output::kFloat16 || fits_float16_; }

  Response rows(const uint8_t* ids, int64_t n, Output output, OnMissing on_missing) const {
    const auto& default_row = default_rows_[int(output)];
    Response response;
    response.missing.reset(new uint32_t[size_t(n) + 1]);
    GatherRequest request;
    request.ids = ids;
    request.n = n;
    request.output = output;
    if (on_missing == OnMissing::kDefault && default_row) request.fill = reinterpret_cast<const uint8_t*>(default_row->data());
    request.missing = response.missing.get();
    const int64_t payload = n * table_.row_bytes(output);
    const std::string head = head_of(n, output, payload, {});
    response.message = new_message(head, payload, &request.out);
    response.n_missing = table_.gather(request);
    if (response.n_missing) mark_missing(response, n, output, on_missing, head.size(), bool(default_row));
    return response;
  }

  // Arguments as Python gives them; raises ValueError as PoolArguments does.
  Response pooled(nb::handle ids, nb::handle offsets, nb::handle weights, bool mean, Output output, OnMissing on_missing) const {
    const auto& default_row = default_rows_[int(Output::kFloat32)];  // pooled as floats, whatever leaves
    nb::object fill = nb::none();
    if (on_missing == OnMissing::kDefault && default_row) fill = nb::bytes(default_row->data(), default_row->size());
    PoolArguments arguments(table_.view(), ids, offsets, weights, mean, output, fill);
    PoolRequest& request = arguments.request;
    const int64_t payload = request.n_bags * table_.row_bytes(output);
    const std::string head = head_of(request.n, output, payload, {});
    Response response;
    response.message = new_message(head, payload, &request.out);
    response.n_missing = table_.pool(request);
    response.missing = arguments.take_missing();
    if (response.n_missing) mark_missing(response, request.n, output, on_missing, head.size(), bool(default_row));
    return response;
  }

 private:
  // A LookupResponse up to the bytes of its rows, which come last.
  std::string head_of(int64_t n, Output output, int64_t payload, std::string_view missing) const {
    WireWriter tiers, head;
    tiers.number(2, uint64_t(n) - missing.size() / 4);  // ram
    head.bytes(1, version_);
    head.number(2, uint64_t(table_.view().format.dim));
    if (!missing.empty()) head.bytes(5, missing);
    head.bytes(6, tiers.data());
    head.bytes_head(output == Output::kFloat32 ? 3 : 4, uint64_t(payload));
    return head.data();
  }

  // A bytes object of `head` and `payload` uninitialised bytes behind it. Until it is returned nobody else
  // sees it, so it may be filled without the GIL.
  static nb::object new_message(std::string_view head, int64_t payload, uint8_t** at) {
    PyObject* message = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(head.size()) + Py_ssize_t(payload));
    if (!message) throw nb::python_error();
    uint8_t* data = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(message));
    std::memcpy(data, head.data(), head.size());
    *at = data + head.size();
    return nb::steal(message);
  }

  // Puts a head that names the missing places before the rows; or drops the message.
  void mark_missing(Response& response, int64_t n, Output output, OnMissing on_missing, size_t old_head, bool has_default) const {
    if (on_missing == OnMissing::kError || (on_missing == OnMissing::kDefault && !has_default)) {
      response.message = nb::none();
      return;
    }
    const char* rows = PyBytes_AS_STRING(response.message.ptr()) + old_head;
    const int64_t payload = PyBytes_GET_SIZE(response.message.ptr()) - int64_t(old_head);
    uint8_t* at;
    nb::object marked = new_message(head_of(n, output, payload, response.missing_bytes()), payload, &at);
    std::memcpy(at, rows, size_t(payload));
    response.message = std::move(marked);
  }

  nb::object keep_;
  const Table& table_;
  std::string version_;
  bool fits_float16_;
  std::optional<std::string> default_rows_[kOutputs];
};

}  // namespace embedserve
