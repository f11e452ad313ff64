// The rows that a Responder answers from: a table held whole, or one that is cached in front of a cold tier.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cached_table.h"
#include "disk_rows.h"
#include "table.h"

namespace embedserve {

// Immutable, as far as its callers can tell; safe for concurrent use; called with the GIL.
class Rows {
 public:
  virtual ~Rows() = default;
  virtual const RowFormat& format() const = 0;
  // The number of missing ids. Rows that no tier can give read as `substitute` (null: zeros), and are in the tally.
  virtual int64_t gather(const GatherRequest& request, const uint8_t* substitute, Tally& tally) const = 0;
  virtual int64_t pool(const PoolRequest& request, const float* substitute, Tally& tally) const = 0;
  // The field of TierCounts that counts rows which were not in RAM; 0 if all are.
  virtual int cold_tier() const = 0;

  int64_t row_bytes(Output output) const { return output_row_bytes(format(), output); }
};

class WholeRows final : public Rows {
 public:
  explicit WholeRows(const Table& table) : table_(table) {}
  const RowFormat& format() const override { return table_.view().format; }
  int cold_tier() const override { return 0; }
  int64_t gather(const GatherRequest& request, const uint8_t*, Tally& tally) const override {
    const int64_t n_missing = table_.gather(request);
    tally.ram = request.n - n_missing;
    return n_missing;
  }
  int64_t pool(const PoolRequest& request, const float*, Tally& tally) const override {
    const int64_t n_missing = table_.pool(request);
    tally.ram = request.n - n_missing;
    return n_missing;
  }

 private:
  const Table& table_;
};

// A cold tier in Python: an object with fetch(ids: bytes) -> (rows, statuses), bytes of n x stride and n.
class PythonSource final : public ColdSource {
 public:
  PythonSource(nb::object source, int64_t stride) : source_(std::move(source)), stride_(stride) {}
  void fetch(const int64_t* ids, int64_t n, uint8_t* rows, RowStatus* statuses) override {
    const nb::gil_scoped_acquire locked;
    const nb::object answer = source_.attr("fetch")(nb::bytes(reinterpret_cast<const char*>(ids), size_t(8 * n)));
    const Buffer row_bytes(answer[0], "rows", 1), status_bytes(answer[1], "statuses", 1);
    if (row_bytes.items() != n * stride_ || status_bytes.items() != n) throw nb::value_error("fetch: wrong number of bytes");
    std::memcpy(rows, row_bytes.data(), size_t(n * stride_));
    std::memcpy(statuses, status_bytes.data(), size_t(n));
  }

 private:
  nb::object source_;
  int64_t stride_;
};

// Waits for its disk without the GIL.
class UnlockedDisk final : public ColdSource {
 public:
  UnlockedDisk(const std::string& path, const DiskLayout& layout) : disk_(path, layout) {}
  void fetch(const int64_t* ids, int64_t n, uint8_t* rows, RowStatus* statuses) override {
    std::optional<nb::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    disk_.fetch(ids, n, rows, statuses);
  }

 private:
  DiskRows disk_;
};

// One version's rows behind the cache; its part there ends with it.
class CachedRows final : public Rows {
 public:
  // table: a _native.Table of the rows' format, whose rows are not read; upserts: one whose rows stand before all
  // tiers, or none.
  CachedRows(nb::object table, nb::object upserts, nb::object cache, std::shared_ptr<ColdSource> cold, int cold_tier, int64_t floor, int64_t ceiling,
             double shadow_share)
      : keep_{std::move(table), std::move(upserts), std::move(cache)}, cold_(std::move(cold)), cold_tier_(cold_tier),
        part_(std::make_shared<Part>(nb::cast<RowCache&>(keep_[2]), floor, ceiling, shadow_share)), table_(made()) {}
  // The same version with other upserts goes on with the same part of the cache.
  CachedRows(const CachedRows& other, nb::object upserts)
      : keep_{other.keep_[0], std::move(upserts), other.keep_[2]}, cold_(other.cold_), cold_tier_(other.cold_tier_), part_(other.part_), table_(made()) {}

  const RowFormat& format() const override { return table_.format(); }
  int cold_tier() const override { return cold_tier_; }
  int64_t gather(const GatherRequest& request, const uint8_t* substitute, Tally& tally) const override {
    const Unlocked unlocked(request.n * (format().stride() + row_bytes(request.output)));
    return table_.gather(request, substitute, tally);
  }
  int64_t pool(const PoolRequest& request, const float* substitute, Tally& tally) const override {
    const Unlocked unlocked(request.n * format().stride());
    return pool_decoded(table_.kernels(), format().dim, request, [&](const GatherRequest& gathered) {
      return table_.gather(gathered, reinterpret_cast<const uint8_t*>(substitute), tally);
    });
  }
  const CachedTable& table() const { return table_; }
  RowCache& cache() const { return part_->cache; }
  uint32_t number() const { return part_->number; }
  const Source& counts() const { return part_->cache.source(part_->number); }

 private:
  struct Part {
    Part(RowCache& in, int64_t floor, int64_t ceiling, double shadow_share) : cache(in), number(in.add_source(floor, ceiling)) {
      samples.set_share(shadow_share);
    }
    ~Part() { cache.remove_source(number); }
    RowCache& cache;
    uint32_t number;
    Samples samples;
  };

  CachedTable made() {
    const Table& rows = nb::cast<const Table&>(keep_[0]);
    const TableView* upserts = keep_[1].is_none() ? nullptr : &nb::cast<const Table&>(keep_[1]).view();
    return CachedTable(rows.kernels(), rows.view().format, upserts, part_->cache, part_->number, *cold_, part_->samples);
  }

  nb::object keep_[3];
  std::shared_ptr<ColdSource> cold_;
  int cold_tier_;
  std::shared_ptr<Part> part_;
  CachedTable table_;
};

}  // namespace embedserve
