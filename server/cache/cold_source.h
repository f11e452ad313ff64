// Where rows come from that the cache does not hold.
#pragma once

#include <cstdint>

namespace embedserve {

enum class RowStatus : uint8_t { kFound = 0, kMissing = 1, kUnavailable = 2 };

class ColdSource {
 public:
  virtual ~ColdSource() = default;
  // rows[i] (stride bytes) and statuses[i] of ids[i], ascending and distinct. Called without the GIL, by many threads.
  virtual void fetch(const int64_t* ids, int64_t n, uint8_t* rows, RowStatus* statuses) = 0;
};

}  // namespace embedserve
