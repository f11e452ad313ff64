// From ids to the bytes of a LookupResponse, built once, in the object that goes out.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rows.h"
#include "wire.h"

namespace embedserve {

enum class OnMissing { kZero = 0, kDefault = 1, kError = 2 };
enum class OnUnavailable { kDefaultRows = 0, kFail = 1 };
constexpr int kOutputs = 4;

// What a caller wants besides the rows.
struct Terms {
  Output output = Output::kFloat32;
  OnMissing on_missing = OnMissing::kZero;
  OnUnavailable on_unavailable = OnUnavailable::kDefaultRows;
};

// A response, or none where missing or unavailable ids allow none; and the places of both, ascending.
struct Response {
  nb::object message = nb::none();
  std::unique_ptr<uint32_t[]> missing;
  int64_t n_missing = 0;
  Tally tally;

  std::string_view missing_bytes() const { return {reinterpret_cast<const char*>(missing.get()), size_t(4 * n_missing)}; }
  std::string_view unavailable_bytes() const {
    return {reinterpret_cast<const char*>(tally.unavailable.data()), 4 * tally.unavailable.size()};
  }
};

// Answers from one version's rows. Immutable; safe for concurrent use; called with the GIL.
class Responder {
 public:
  // rows: a Table or CachedRows. default_rows: one an output, as that output; none where the row type cannot hold it.
  Responder(nb::object rows, std::string version, nb::sequence default_rows, bool fits_float16)
      : keep_(rows), version_(std::move(version)), fits_float16_(fits_float16) {
    if (nb::isinstance<CachedRows>(rows)) {
      rows_ = &nb::cast<const CachedRows&>(rows);
    } else {
      whole_ = std::make_unique<WholeRows>(nb::cast<const Table&>(rows));
      rows_ = whole_.get();
    }
    if (nb::len(default_rows) != size_t(kOutputs)) throw nb::value_error("default_rows: one an output");
    for (int i = 0; i < kOutputs; ++i) {
      const MaybeBuffer row(default_rows[i], "default_rows", 1);
      row.expect(rows_->row_bytes(Output(i)), "default_rows");
      if (row.data()) default_rows_[i].emplace(reinterpret_cast<const char*>(row.data()), size_t(row.items()));
    }
  }

  bool can_give(Output output) const { return output != Output::kFloat16 || fits_float16_; }
  int64_t row_bytes(Output output) const { return rows_->row_bytes(output); }

  Response rows(const uint8_t* ids, int64_t n, const Terms& terms) const {
    const uint8_t* default_row = default_of(terms.output);
    Response response;
    response.missing.reset(new uint32_t[size_t(n) + 1]);
    GatherRequest request;
    request.ids = ids;
    request.n = n;
    request.output = terms.output;
    if (terms.on_missing == OnMissing::kDefault) request.fill = default_row;
    request.missing = response.missing.get();
    const int64_t payload = n * rows_->row_bytes(terms.output);
    response.tally.ram = n;
    const std::string head = head_of(terms.output, payload, response);
    response.message = new_message(head, payload, &request.out);
    response.tally.ram = 0;
    response.n_missing = rows_->gather(request, default_row, response.tally);
    finish(response, terms, payload, head.size(), default_row != nullptr);
    return response;
  }

  // Arguments as Python gives them; raises ValueError as PoolArguments does.
  Response pooled(nb::handle ids, nb::handle offsets, nb::handle weights, bool mean, const Terms& terms) const {
    const uint8_t* default_row = default_of(Output::kFloat32);  // pooled as floats, whatever leaves
    nb::object fill = nb::none();
    if (terms.on_missing == OnMissing::kDefault && default_row) fill = nb::bytes(default_row, size_t(4 * rows_->format().dim));
    PoolArguments arguments(rows_->format().dim, ids, offsets, weights, mean, terms.output, fill);
    PoolRequest& request = arguments.request;
    const int64_t payload = request.n_bags * rows_->row_bytes(terms.output);
    Response response;
    response.tally.ram = request.n;
    const std::string head = head_of(terms.output, payload, response);
    response.message = new_message(head, payload, &request.out);
    response.tally.ram = 0;
    response.n_missing = rows_->pool(request, reinterpret_cast<const float*>(default_row), response.tally);
    response.missing = arguments.take_missing();
    finish(response, terms, payload, head.size(), default_row != nullptr);
    return response;
  }

 private:
  const uint8_t* default_of(Output output) const {
    const auto& row = default_rows_[int(output)];
    return row ? reinterpret_cast<const uint8_t*>(row->data()) : nullptr;
  }

  // A LookupResponse up to the bytes of its rows, which come last. As long whatever the tiers counted, as long as
  // no row is missing or unavailable.
  std::string head_of(Output output, int64_t payload, const Response& response) const {
    WireWriter tiers, head;
    if (const int cold = rows_->cold_tier()) {
      tiers.padded_number(2, uint64_t(response.tally.ram));
      tiers.padded_number(cold, uint64_t(response.tally.cold));
    } else {
      tiers.number(2, uint64_t(response.tally.ram));
    }
    head.bytes(1, version_);
    head.number(2, uint64_t(rows_->format().dim));
    if (response.n_missing) head.bytes(5, response.missing_bytes());
    head.bytes(6, tiers.data());
    if (!response.tally.unavailable.empty()) {
      head.number(7, 1);
      head.bytes(8, response.unavailable_bytes());
    }
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

  // Puts the head that tells what was found before the rows; or drops the message.
  void finish(Response& response, const Terms& terms, int64_t payload, size_t old_size, bool has_default) const {
    const bool missing_fails = terms.on_missing == OnMissing::kError || (terms.on_missing == OnMissing::kDefault && !has_default);
    if ((response.n_missing && missing_fails) || (!response.tally.unavailable.empty() && terms.on_unavailable == OnUnavailable::kFail)) {
      response.message = nb::none();
      return;
    }
    if (!rows_->cold_tier() && !response.n_missing) return;
    const std::string head = head_of(terms.output, payload, response);
    char* old = PyBytes_AS_STRING(response.message.ptr());
    if (head.size() == old_size) {
      std::memcpy(old, head.data(), old_size);
      return;
    }
    uint8_t* at;
    nb::object marked = new_message(head, payload, &at);
    std::memcpy(at, old + old_size, size_t(payload));
    response.message = std::move(marked);
  }

  nb::object keep_;
  std::unique_ptr<WholeRows> whole_;
  const Rows* rows_;
  std::string version_;
  bool fits_float16_;
  std::optional<std::string> default_rows_[kOutputs];
};

}  // namespace embedserve
