// A version's rows as Python hands them over: the view the kernels read, and the buffers that keep it alive.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "python_buffers.h"

namespace embedserve {

// Pools rows from wherever gather(GatherRequest) has them as floats: the same sums in the same order as over stored
// rows. Returns what gather does, the number of missing ids.
template <class Gather>
int64_t pool_decoded(const Kernels& kernels, int64_t dim, const PoolRequest& request, Gather gather) {
  const size_t n = size_t(request.n);
  const std::unique_ptr<float[]> rows(new float[n * size_t(dim) + 1]);
  GatherRequest gathered;
  gathered.ids = request.ids;
  gathered.n = request.n;
  gathered.fill = reinterpret_cast<const uint8_t*>(request.fill);
  gathered.out = reinterpret_cast<uint8_t*>(rows.get());
  gathered.missing = request.missing;
  const int64_t n_missing = gather(gathered);
  TableView decoded;
  decoded.rows = gathered.out;
  decoded.n_rows = request.n;
  decoded.format.type = RowType::kFp32;
  decoded.format.dim = dim;
  decoded.stride = decoded.format.stride();
  std::vector<int64_t> places(n);
  for (size_t i = 0; i < n; ++i) places[i] = int64_t(i);
  const std::unique_ptr<uint32_t[]> none(new uint32_t[n + 1]);
  PoolRequest inner = request;
  inner.ids = reinterpret_cast<const uint8_t*>(places.data());
  inner.fill = nullptr;
  inner.missing = none.get();
  kernels.pool(decoded, inner);
  return n_missing;
}

// Immutable once made; safe for concurrent use.
//
// `upserts`, if any, is a table with keys whose rows stand before this one's: a key is looked for there first,
// and its row there has position n_rows + its position there. `topk` alone sees only this table's own rows.
class Table {
 public:
  // Raises ValueError for rows or an index that cannot be of the format.
  Table(nb::object rows, RowFormat format, nb::object index, uint64_t seed, const Kernels& kernels, nb::object upserts)
      : kernels_(kernels), keep_upserts_(upserts), upserts_(upserts.is_none() ? nullptr : &nb::cast<const Table&>(upserts)) {
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
    if (upserts_) {
      const RowFormat& other = upserts_->view_.format;
      if (other.type != format.type || other.wide != format.wide || other.dim != format.dim) throw nb::value_error("upserts: of another row format");
      if (!upserts_->view_.index || upserts_->upserts_) throw nb::value_error("upserts: must have keys, and no upserts of its own");
    }
  }

  const TableView& view() const { return view_; }
  const Kernels& kernels() const { return kernels_; }
  int64_t row_bytes(Output output) const { return output_row_bytes(view_.format, output); }

  // These hold the GIL when called, and release it where that pays. They return the number of missing ids.
  int64_t gather(const GatherRequest& request) const {
    const Unlocked unlocked(request.n * (view_.stride + row_bytes(request.output)));
    const int64_t n_missing = kernels_.gather(view_, request);
    return upserts_ ? overwrite_with_upserts(request, n_missing) : n_missing;
  }
  int64_t touch(const GatherRequest& request) const {
    const Unlocked unlocked(request.n * (view_.stride + row_bytes(request.output)));
    return kernels_.touch(view_, request);
  }
  int64_t pool(const PoolRequest& request) const {
    const Unlocked unlocked(request.n * view_.stride);
    return upserts_ ? pool_with_upserts(request) : kernels_.pool(view_, request);
  }
  // Positions of ids (int64[n], unaligned), -1 where missing.
  void find(const uint8_t* ids, int64_t n, int64_t* positions) const {
    const Unlocked unlocked(n * int64_t(sizeof(KeyBucket)));
    std::vector<int64_t> upserted;
    if (upserts_) upserted = upserts_->own_positions(ids, n);
    own_positions(ids, n, positions);
    for (int64_t i = 0; i < int64_t(upserted.size()); ++i) {
      if (upserted[size_t(i)] >= 0) positions[i] = view_.n_rows + upserted[size_t(i)];
    }
  }

 private:
  void own_positions(const uint8_t* ids, int64_t n, int64_t* positions) const {
    if (n) std::memcpy(positions, ids, size_t(8 * n));
    if (view_.index) return view_.index.find_many(positions, n, positions);
    for (int64_t i = 0; i < n; ++i) {
      if (uint64_t(positions[i]) >= uint64_t(view_.n_rows)) positions[i] = -1;
    }
  }
  std::vector<int64_t> own_positions(const uint8_t* ids, int64_t n) const {
    std::vector<int64_t> positions(static_cast<size_t>(n));
    own_positions(ids, n, positions.data());
    return positions;
  }

  // Puts upserted rows in the places of their ids, and takes those places out of `missing`.
  int64_t overwrite_with_upserts(const GatherRequest& request, int64_t n_missing) const {
    const std::vector<int64_t> positions = upserts_->own_positions(request.ids, request.n);
    std::vector<int64_t> found;
    for (int64_t position : positions) {
      if (position >= 0) found.push_back(position);
    }
    if (found.empty()) return n_missing;
    const int64_t bytes = row_bytes(request.output);
    const std::unique_ptr<uint8_t[]> rows(new uint8_t[size_t(bytes) * found.size()]);
    const std::unique_ptr<uint32_t[]> none(new uint32_t[found.size()]);
    TableView by_position = upserts_->view_;
    by_position.index = KeyIndex();
    GatherRequest inner;
    inner.ids = reinterpret_cast<const uint8_t*>(found.data());
    inner.n = int64_t(found.size());
    inner.output = request.output;
    inner.out = rows.get();
    inner.missing = none.get();
    kernels_.gather(by_position, inner);
    const uint8_t* row = rows.get();
    for (int64_t i = 0; i < request.n; ++i) {
      if (positions[size_t(i)] < 0) continue;
      std::memcpy(request.out + i * bytes, row, size_t(bytes));
      row += bytes;
    }
    int64_t kept = 0;
    for (int64_t m = 0; m < n_missing; ++m) {
      const uint32_t place = request.missing[m];
      if (positions[place] < 0) request.missing[kept++] = place;
    }
    return kept;
  }

  int64_t pool_with_upserts(const PoolRequest& request) const {
    return pool_decoded(kernels_, view_.format.dim, request, [&](const GatherRequest& gathered) {
      return overwrite_with_upserts(gathered, kernels_.gather(view_, gathered));
    });
  }

  const Kernels& kernels_;
  nb::object keep_upserts_;
  const Table* upserts_;
  TableView view_;
  std::unique_ptr<Buffer> rows_, index_;
};

// A PoolRequest from Python's arguments, all but where it writes; owns what the request points to.
// Raises ValueError for offsets that do not begin at 0, fall, or pass the ids.
class PoolArguments {
 public:
  PoolArguments(int64_t dim, nb::handle ids, nb::handle offsets, nb::handle weights, bool mean, Output output, nb::handle fill)
      : ids_(ids, "ids", 8), offsets_(offsets, "offsets", 4), weights_(weights, "weights", 4) {
    const MaybeBuffer fill_bytes(fill, "fill", 4);
    weights_.expect(ids_.items(), "weights");
    fill_bytes.expect(dim, "fill");
    if (output == Output::kQuantized) throw nb::value_error("pooled rows cannot be quantised");
    check_offsets();
    if (fill_bytes.data()) {
      // A copy: the caller's bytes may not be aligned for floats.
      fill_ = std::make_unique<float[]>(size_t(dim));
      std::memcpy(fill_.get(), fill_bytes.data(), size_t(4 * dim));
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
