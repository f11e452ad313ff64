#include "key_index.h"

namespace embedserve {

void KeyIndex::find_many(const int64_t* keys, int64_t n, int64_t* positions) const {
  constexpr int64_t kAhead = 16;  // probes in flight
  uint64_t homes[kAhead];
  for (int64_t i = 0; i < n && i < kAhead; ++i) prefetch(homes[i] = home(keys[i]));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = find(keys[i], homes[i % kAhead]);
    if (i + kAhead < n) prefetch(homes[i % kAhead] = home(keys[i + kAhead]));
    positions[i] = position;
  }
}

}  // namespace embedserve
