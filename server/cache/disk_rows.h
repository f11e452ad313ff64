// The disk tier: rows read from an artifact's file by position, one read a row.
//
// Reads and not a mapping: what is read does not count as memory of the process, a file that is cut short is an
// error and not a crash, and rows that are not in the page cache can be asked for together before any is waited for.
#pragma once

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include "cold_source.h"
#include "key_index.h"

namespace embedserve {

// Where the arrays of rows.safetensors lie.
struct DiskLayout {
  int64_t rows_offset = 0, n_rows = 0, stride = 0;
  int64_t index_offset = -1;  // -1: keys are positions
  uint64_t n_buckets = 0, seed = 0;
};

class DiskRows final : public ColdSource {
 public:
  // Throws std::system_error if the file cannot be opened.
  DiskRows(const std::string& path, const DiskLayout& layout) : layout_(layout), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  }
  ~DiskRows() override { ::close(fd_); }
  DiskRows(const DiskRows&) = delete;
  DiskRows& operator=(const DiskRows&) = delete;

  void fetch(const int64_t* ids, int64_t n, uint8_t* rows, RowStatus* statuses) override {
    std::vector<int64_t> positions(ids, ids + n);
    std::fill(statuses, statuses + n, RowStatus::kFound);
    if (layout_.index_offset >= 0) look_up(positions, statuses);
    std::vector<Read> reads;
    reads.reserve(size_t(n));
    for (int64_t i = 0; i < n; ++i) {
      if (statuses[i] != RowStatus::kFound) continue;
      if (uint64_t(positions[size_t(i)]) >= uint64_t(layout_.n_rows)) statuses[i] = RowStatus::kMissing;
      else reads.push_back({layout_.rows_offset + positions[size_t(i)] * layout_.stride, i, rows + i * layout_.stride, layout_.stride});
    }
    read_all(reads, statuses);
  }

 private:
  struct Read {
    int64_t offset, item;
    uint8_t* to;
    int64_t bytes;
  };

  // Positions of keys, from their buckets; those whose bucket is full and without them go on to the next.
  void look_up(std::vector<int64_t>& keys, RowStatus* statuses) const {
    const int64_t n = int64_t(keys.size());
    const KeyIndex homes(nullptr, layout_.n_buckets, layout_.seed, layout_.n_rows);
    std::vector<uint64_t> at(static_cast<size_t>(n));
    std::vector<int64_t> pending(static_cast<size_t>(n));
    std::iota(pending.begin(), pending.end(), 0);
    for (int64_t i = 0; i < n; ++i) at[size_t(i)] = homes.home(keys[size_t(i)]);
    std::vector<KeyBucket> buckets(static_cast<size_t>(n));
    while (!pending.empty()) {
      std::vector<Read> reads;
      for (int64_t i : pending) {
        reads.push_back({layout_.index_offset + int64_t(at[size_t(i)] * sizeof(KeyBucket)), i, reinterpret_cast<uint8_t*>(&buckets[size_t(i)]), int64_t(sizeof(KeyBucket))});
      }
      read_all(reads, statuses);
      std::vector<int64_t> further;
      for (int64_t i : pending) {
        if (statuses[i] != RowStatus::kFound) continue;
        const KeyBucket& bucket = buckets[size_t(i)];
        const uint32_t count = std::min(bucket.count, KeyBucket::kSlots);
        const int64_t* found = std::find(bucket.keys, bucket.keys + count, keys[size_t(i)]);
        if (found != bucket.keys + count) keys[size_t(i)] = int64_t(bucket.positions[found - bucket.keys]);
        else if (count == KeyBucket::kSlots && ++at[size_t(i)] < layout_.n_buckets) further.push_back(i);
        else statuses[i] = RowStatus::kMissing;
      }
      pending.swap(further);
    }
  }

  // In the order they lie. What is in memory is taken at once, the rest is asked for together and then waited for.
  void read_all(std::vector<Read>& reads, RowStatus* statuses) const {
    std::sort(reads.begin(), reads.end(), [](const Read& a, const Read& b) { return a.offset < b.offset; });
    std::vector<const Read*> cold;
    for (const Read& read : reads) {
      if (nowait_ && read_now(read)) continue;
      cold.push_back(&read);
    }
    if (cold.size() > 1) {
      for (const Read* read : cold) ::posix_fadvise(fd_, read->offset, read->bytes, POSIX_FADV_WILLNEED);
    }
    for (const Read* read : cold) {
      if (!read_waiting(*read)) statuses[read->item] = RowStatus::kUnavailable;
    }
  }

  bool read_now(const Read& read) const {
    const iovec part{read.to, size_t(read.bytes)};
    const ssize_t n = ::preadv2(fd_, &part, 1, read.offset, RWF_NOWAIT);
    if (n < 0 && errno == EOPNOTSUPP) nowait_ = false;
    return n == read.bytes;
  }

  bool read_waiting(const Read& read) const {
    for (int64_t done = 0; done < read.bytes;) {
      const ssize_t n = ::pread(fd_, read.to + done, size_t(read.bytes - done), read.offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;  // the disk's error, or a file that was cut short
      done += n;
    }
    return true;
  }

  DiskLayout layout_;
  int fd_;
  mutable std::atomic<bool> nowait_{true};  // until the file system says that it cannot
};

}  // namespace embedserve
