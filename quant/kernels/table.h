// A version's rows as Python hands them over: the view the kernels read, and the buffers that keep it alive.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "kernels.h"
#include "python_buffers.h"

namespace embedserve {

// Immutable once made; safe for concurrent use.
class Table {
 public:
  // Raises ValueError for rows or an index that cannot be of the format.
  Table(nb::object rows, RowFormat format, nb::object index, uint64_t seed, const Kernels& kernels) : kernels_(kernels) {
    view_.format = format;
    view_.stride = format.stride();
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

  const TableView& view() const { return view_; }
  const Kernels& kernels() const { return kernels_; }
  int64_t row_bytes(Output output) const { return output_row_bytes(view_.format, output); }

  // These hold the GIL when called, and release it where that pays. They return the number of missing ids.
  int64_t gather(const GatherRequest& request) const {
    const Unlocked unlocked(request.n * (view_.stride + row_bytes(request.output)));
    return kernels_.gather(view_, request);
  }
  int64_t touch(const GatherRequest& request) const {
    const Unlocked unlocked(request.n * (view_.stride + row_bytes(request.output)));
    return kernels_.touch(view_, request);
  }
  int64_t pool(const PoolRequest& request) const {
    const Unlocked unlocked(request.n * view_.stride);
    return kernels_.pool(view_, request);
  }

 private:
  const Kernels& kernels_;
  TableView view_;
  std::unique_ptr<Buffer> rows_, index_;
};

// A PoolRequest from Python's arguments, all but where it writes; owns what the request points to.
// Raises ValueError for offsets that do not begin at 0, fall, or pass the ids.
class PoolArguments {
 public:
  PoolArguments(const TableView& view, nb::handle ids, nb::handle offsets, nb::handle weights, bool mean, Output output, nb::handle fill)
      : ids_(ids, "ids", 8), offsets_(offsets, "offsets", 4), weights_(weights, "weights", 4) {
    const MaybeBuffer fill_bytes(fill, "fill", 4);
    weights_.expect(ids_.items(), "weights");
    fill_bytes.expect(view.format.dim, "fill");
    if (output == Output::kQuantized) throw nb::value_error("pooled rows cannot be quantised");
    check_offsets();
    if (fill_bytes.data()) {
      // A copy: the caller's bytes may not be aligned for floats.
      fill_ = std::make_unique<float[]>(size_t(view.format.dim));
      std::memcpy(fill_.get(), fill_bytes.data(), size_t(4 * view.format.dim));
    }
    missing_.reset(new uint32_t[size_t(ids_.items()) + 1]);
    request.ids = ids_.data();
    request.n = ids_.items();
    request.offsets = offsets_.data();
    request.n_bags = offsets_.items();
    request.weights = weights_.data();
    request.mean = mean;
    request.output = output;
    request.fill = fill_.get();
    request.missing = missing_.get();
  }

  PoolRequest request;

  std::unique_ptr<uint32_t[]> take_missing() { return std::move(missing_); }

 private:
  void check_offsets() const {
    const int64_t n = ids_.items();
    uint32_t before = 0;
    for (int64_t i = 0; i < offsets_.items(); ++i) {
      uint32_t offset;
      std::memcpy(&offset, offsets_.data() + 4 * i, 4);
      if ((i == 0 && offset != 0) || offset < before || int64_t(offset) > n) {
        throw nb::value_error(("offsets[" + std::to_string(i) + "] = " + std::to_string(offset) +
            ": must begin at 0, not fall, and not pass the " + std::to_string(n) + " ids").c_str());
      }
      before = offset;
    }
    if (offsets_.items() == 0 && n > 0) throw nb::value_error("offsets: empty, but there are ids");
  }

  Buffer ids_, offsets_;
  MaybeBuffer weights_;
  std::unique_ptr<float[]> fill_;
  std::unique_ptr<uint32_t[]> missing_;
};

}  // namespace embedserve
