// A version whose rows are partly in the ram tier and wholly in a cold one.
//
// A request asks the cache for all its ids in one pass, the cold tier for all that it lacks in another, and puts
// those into the cache in a third. Rows never leave the cache while they are decoded (a Pin a block).
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <vector>

#include "cold_source.h"
#include "kernels.h"
#include "row_cache.h"

namespace embedserve {

// What became of a request's ids.
struct Tally {
  int64_t ram = 0, cold = 0;
  std::vector<uint32_t> unavailable;  // places, ascending
};

// A share of what the cache answers, to be compared with the cold tier off the request's path.
class Samples {
 public:
  static constexpr size_t kMost = 4096;
  void set_share(double share) { every_ = share > 0 ? std::max<int64_t>(1, int64_t(1.0 / share)) : 0; }
  void see(const int64_t* ids, const uint8_t* const* rows, int64_t n) {
    if (!every_) return;
    const int64_t before = seen_.fetch_add(n, std::memory_order_relaxed);
    const int64_t first = (every_ - before % every_) % every_;
    if (first >= n) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = first; i < n && keys_.size() < kMost; i += every_) {
      if (rows[i]) keys_.push_back(ids[i]);
    }
  }
  std::vector<int64_t> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(keys_, {});
  }

 private:
  int64_t every_ = 0;
  std::atomic<int64_t> seen_{0};
  std::mutex mutex_;
  std::vector<int64_t> keys_;
};

inline int64_t coarse_seconds() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec;
}

class CachedTable {
 public:
  // kernels, format: of the rows. upserts: rows that stand before all tiers, or null. Borrows all but the shares it
  // takes in the cache's sources; `source` is its number there.
  CachedTable(const Kernels& kernels, const RowFormat& format, const TableView* upserts, RowCache& cache, uint32_t source, ColdSource& cold,
              Samples& samples)
      : kernels_(kernels), format_(format), upserts_(upserts), cache_(cache), source_(source), cold_(cold), samples_(samples) {}

  const RowFormat& format() const { return format_; }
  const Kernels& kernels() const { return kernels_; }

  // As Table::gather, and what the tiers did. Rows that no tier can give read as `substitute` (null: zeros). Without the GIL.
  int64_t gather(const GatherRequest& request, const uint8_t* substitute, Tally& tally) const {
    std::vector<uint32_t> absent;
    std::vector<uint32_t> missing;
    for (int64_t begin = 0; begin < request.n; begin += kBlock) gather_block(request, begin, absent, missing, tally);
    Source& source = cache_.source(source_);
    add(source.hits, tally.ram);
    add(source.unknown, int64_t(missing.size()));
    if (!absent.empty()) fetch(request, absent, missing, tally);
    const int64_t row_bytes = output_row_bytes(format_, request.output);
    fill(request, missing, request.fill, row_bytes);
    fill(request, tally.unavailable, substitute, row_bytes);
    std::copy(missing.begin(), missing.end(), request.missing);
    return int64_t(missing.size());
  }

  // Loads keys into the cache as rows that were asked for. Returns how many were found. Without the GIL.
  int64_t warm(const int64_t* keys, int64_t n) const {
    int64_t found = 0;
    for (int64_t begin = 0; begin < n; begin += kFetched) {
      std::vector<int64_t> ids(keys + begin, keys + std::min(n, begin + kFetched));
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
      const Fetched fetched(*this, ids);
      for (size_t i = 0; i < ids.size(); ++i) {
        if (fetched.statuses[i] != RowStatus::kFound) continue;
        cache_.insert(source_, ids[i], fetched.row(i), format_.stride(), 0, true);
        ++found;
      }
    }
    return found;
  }

  // Compares sampled rows of the cache with the cold tier's, and drops those that differ. {compared, differing}
  std::pair<int64_t, std::vector<int64_t>> check_samples() const {
    std::vector<int64_t> ids = samples_.take(), differing;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (ids.empty()) return {0, differing};
    const Fetched fetched(*this, ids);
    int64_t compared = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (fetched.statuses[i] == RowStatus::kUnavailable) continue;
      const Epochs::Pin pin(cache_.epochs());
      const uint64_t hash = RowCache::hash_of(source_, ids[i]);
      const Entry* entry = cache_.find(hash, source_, ids[i], cache_.candidate(hash, format_.stride()));
      if (!entry || entry->kind != Entry::kRow) continue;
      ++compared;
      if (fetched.statuses[i] == RowStatus::kFound && !std::memcmp(entry->payload(), fetched.row(i), size_t(format_.stride()))) continue;
      differing.push_back(ids[i]);
    }
    for (int64_t key : differing) cache_.drop(source_, key);
    return {compared, differing};
  }

  // The cached row of a key, to write into: for tests that damage it.
  bool overwrite(int64_t key, uint8_t byte) const {
    const Epochs::Pin pin(cache_.epochs());
    const uint64_t hash = RowCache::hash_of(source_, key);
    const Entry* entry = cache_.find(hash, source_, key, cache_.candidate(hash, format_.stride()));
    if (!entry || entry->kind != Entry::kRow) return false;
    const_cast<Entry*>(entry)->payload()[format_.stride() - 1] ^= byte;
    return true;
  }

 private:
  static constexpr int64_t kBlock = 256;      // ids decoded under one Pin: some microseconds
  static constexpr int64_t kFetched = 16384;  // rows fetched at once: the most that a request's buffer holds of them
  static constexpr int64_t kAheadBucket = 32, kAheadRow = 16;

  // Rows from the cold tier, in a buffer of their own.
  struct Fetched {
    Fetched(const CachedTable& table, const std::vector<int64_t>& ids)
        : stride(table.format_.stride()), rows(new uint8_t[ids.size() * size_t(stride)]), statuses(ids.size()) {
      Source& source = table.cache_.source(table.source_);
      const auto begun = std::chrono::steady_clock::now();
      table.cold_.fetch(ids.data(), int64_t(ids.size()), rows.get(), statuses.data());
      const auto took = std::chrono::steady_clock::now() - begun;
      add(source.fetches, 1);
      add(source.fetch_ns, std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    }
    const uint8_t* row(size_t i) const { return rows.get() + int64_t(i) * stride; }
    int64_t stride;
    std::unique_ptr<uint8_t[]> rows;
    std::vector<RowStatus> statuses;
  };

  static void add(std::atomic<int64_t>& count, int64_t n) {
    if (n) count.fetch_add(n, std::memory_order_relaxed);
  }

  void gather_block(const GatherRequest& request, int64_t begin, std::vector<uint32_t>& absent, std::vector<uint32_t>& missing, Tally& tally) const {
    const int64_t n = std::min(kBlock, request.n - begin);
    int64_t ids[kBlock];
    uint64_t hashes[kBlock];
    const Entry* likely[kBlock];
    const uint8_t* rows[kBlock];
    std::memcpy(ids, request.ids + 8 * begin, size_t(8 * n));
    const int64_t stride = format_.stride();
    const auto hash_one = [&](int64_t i) __attribute__((always_inline)) {
      hashes[i] = RowCache::hash_of(source_, ids[i]);
      cache_.prefetch_bucket(hashes[i]);
    };
    const Epochs::Pin pin(cache_.epochs());
    for (int64_t i = 0; i < std::min(n, kAheadBucket); ++i) hash_one(i);
    for (int64_t i = 0; i < std::min(n, kAheadRow); ++i) likely[i] = cache_.candidate(hashes[i], stride);
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAheadBucket < n) hash_one(i + kAheadBucket);
      if (i + kAheadRow < n) likely[i + kAheadRow] = cache_.candidate(hashes[i + kAheadRow], stride);
      const Entry* entry = cache_.find(hashes[i], source_, ids[i], likely[i]);
      rows[i] = nullptr;
      if (!entry) {
        absent.push_back(uint32_t(begin + i));
      } else if (entry->kind == Entry::kRow) {
        cache_.note_asked(entry);
        rows[i] = entry->payload();
        ++found;
      } else if (expired(entry)) {
        absent.push_back(uint32_t(begin + i));
      } else {
        missing.push_back(uint32_t(begin + i));
      }
    }
    samples_.see(ids, rows, n);
    if (upserts_) found += put_upserts_first(ids, n, begin, rows, absent, missing);
    tally.ram += found;
    PickRequest pick;
    pick.rows = rows;
    pick.n = n;
    pick.format = format_;
    pick.output = request.output;
    pick.out = request.out + begin * output_row_bytes(format_, request.output);
    kernels_.pick(pick);
  }

  static bool expired(const Entry* entry) {
    int64_t until;
    std::memcpy(&until, entry->payload(), 8);
    return until <= coarse_seconds();
  }

  // Upserted rows stand before those of the version, whatever is known of these. Returns how many more rows there are.
  int64_t put_upserts_first(const int64_t* ids, int64_t n, int64_t begin, const uint8_t** rows, std::vector<uint32_t>& absent,
                            std::vector<uint32_t>& missing) const {
    int64_t positions[kBlock], more = 0;
    upserts_->index.find_many(ids, n, positions);
    for (int64_t i = 0; i < n; ++i) {
      if (positions[i] < 0) continue;
      more += rows[i] == nullptr;
      rows[i] = upserts_->rows + positions[i] * upserts_->stride;
    }
    if (!more) return 0;
    const auto upserted = [&](uint32_t place) { return int64_t(place) >= begin && positions[int64_t(place) - begin] >= 0; };
    std::erase_if(absent, upserted);
    std::erase_if(missing, upserted);
    return more;
  }

  // Rows that the cache lacks: each key once, however often it is asked for.
  void fetch(const GatherRequest& request, std::vector<uint32_t>& absent, std::vector<uint32_t>& missing, Tally& tally) const {
    const auto id_at = [&](uint32_t place) { int64_t id; std::memcpy(&id, request.ids + 8 * int64_t(place), 8); return id; };
    Source& source = cache_.source(source_);
    add(source.misses, int64_t(absent.size()));
    std::stable_sort(absent.begin(), absent.end(), [&](uint32_t a, uint32_t b) { return id_at(a) < id_at(b); });
    for (size_t begin = 0; begin < absent.size();) {
      std::vector<int64_t> ids;
      std::vector<uint32_t> which;  // of `ids`, for each place
      size_t end = begin;
      for (; end < absent.size(); ++end) {
        const int64_t id = id_at(absent[end]);
        if (ids.empty() || ids.back() != id) {
          if (int64_t(ids.size()) == kFetched) break;
          ids.push_back(id);
        }
        which.push_back(uint32_t(ids.size() - 1));
      }
      const Fetched fetched(*this, ids);
      place_fetched(request, {absent.data() + begin, end - begin}, which, fetched, missing, tally);
      const int64_t until = coarse_seconds() + RowCache::kTombstoneSeconds;
      for (size_t i = 0; i < ids.size(); ++i) {
        if (fetched.statuses[i] == RowStatus::kFound) cache_.insert(source_, ids[i], fetched.row(i), format_.stride());
        else if (fetched.statuses[i] == RowStatus::kMissing) cache_.insert(source_, ids[i], nullptr, 0, until);
      }
      begin = end;
    }
    std::sort(missing.begin(), missing.end());
    std::sort(tally.unavailable.begin(), tally.unavailable.end());
    add(source.fetched, tally.cold);
    add(source.unavailable, int64_t(tally.unavailable.size()));
  }

  struct Places { const uint32_t* data; size_t n; };

  void place_fetched(const GatherRequest& request, Places places, const std::vector<uint32_t>& which, const Fetched& fetched,
                     std::vector<uint32_t>& missing, Tally& tally) const {
    std::vector<const uint8_t*> rows(places.n, nullptr);
    for (size_t i = 0; i < places.n; ++i) {
      switch (fetched.statuses[which[i]]) {
        case RowStatus::kFound: rows[i] = fetched.row(which[i]); ++tally.cold; break;
        case RowStatus::kMissing: missing.push_back(places.data[i]); break;
        case RowStatus::kUnavailable: tally.unavailable.push_back(places.data[i]); break;
      }
    }
    PickRequest pick;
    pick.rows = rows.data();
    pick.places = places.data;
    pick.n = int64_t(places.n);
    pick.format = format_;
    pick.output = request.output;
    pick.out = request.out;
    kernels_.pick(pick);
  }

  static void fill(const GatherRequest& request, const std::vector<uint32_t>& places, const uint8_t* row, int64_t row_bytes) {
    for (uint32_t place : places) {
      uint8_t* out = request.out + int64_t(place) * row_bytes;
      if (row) std::memcpy(out, row, size_t(row_bytes));
      else std::memset(out, 0, size_t(row_bytes));
    }
  }

  const Kernels& kernels_;
  RowFormat format_;
  const TableView* upserts_;
  RowCache& cache_;
  uint32_t source_;
  ColdSource& cold_;
  Samples& samples_;
};

}  // namespace embedserve
