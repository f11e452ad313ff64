// The hash index of a table with arbitrary int64 keys: key -> position, immutable, mmap-able.
//
// An array of 64-byte buckets, so that a probe costs one cache line in the usual case. A key lives in
// its home bucket, or, where that is full, in the next one with room: every bucket from a key's home to
// the one that holds it is full, so a probe stops at the first bucket with a free slot. The array ends
// in kTailBuckets extra buckets and never wraps. Nothing is ever removed.
//
//     bucket: int64 keys[5] · uint32 positions[5] · uint32 count        (little-endian)
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace embedserve {

struct KeyBucket {
  static constexpr uint32_t kSlots = 5;
  int64_t keys[kSlots];
  uint32_t positions[kSlots];
  uint32_t count;
};
static_assert(sizeof(KeyBucket) == 64);

constexpr uint64_t kTailBuckets = 64;
constexpr int64_t kMaxIndexedRows = int64_t(UINT32_MAX);

// Home buckets for n keys: at most 3.5 keys a bucket (load 0.7), where fewer than 1 % of keys leave home.
static inline uint64_t home_buckets_for(uint64_t n_keys) { return n_keys * 2 / 7 + 1; }

// splitmix64's finaliser (Steele, Lea, Flood 2014) over the seeded key.
static inline uint64_t hash_key(int64_t key, uint64_t seed) {
  uint64_t x = uint64_t(key) + seed + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static inline uint64_t home_of(int64_t key, uint64_t seed, uint64_t n_home) {
  return uint64_t((static_cast<unsigned __int128>(hash_key(key, seed)) * n_home) >> 64);
}

// Reads a finished index. Thread-safe: it never writes.
class KeyIndex {
 public:
  KeyIndex() = default;
  KeyIndex(const void* buckets, uint64_t n_buckets, uint64_t seed, int64_t n_rows)
      : buckets_(static_cast<const KeyBucket*>(buckets)),
        n_buckets_(n_buckets), n_home_(n_buckets - kTailBuckets), seed_(seed), n_rows_(n_rows) {}

  explicit operator bool() const { return buckets_ != nullptr; }
  uint64_t home(int64_t key) const { return home_of(key, seed_, n_home_); }
  [[gnu::always_inline]] void prefetch(uint64_t bucket) const { __builtin_prefetch(buckets_ + bucket); }

  // The position of `key`, or -1. The file is untrusted: counts and positions are bounded here.
  int64_t find(int64_t key, uint64_t home) const {
    for (uint64_t b = home; b < n_buckets_; ++b) {
      const KeyBucket& bucket = buckets_[b];
      const uint32_t count = bucket.count < KeyBucket::kSlots ? bucket.count : KeyBucket::kSlots;
      for (uint32_t s = 0; s < count; ++s) {
        if (bucket.keys[s] == key) {
          return int64_t(bucket.positions[s]) < n_rows_ ? int64_t(bucket.positions[s]) : -1;
        }
      }
      if (count < KeyBucket::kSlots) return -1;
    }
    return -1;
  }

  // positions[i] of keys[i], -1 where absent; the two may be the same array.
  void find_many(const int64_t* keys, int64_t n, int64_t* positions) const;

 private:
  const KeyBucket* buckets_ = nullptr;
  uint64_t n_buckets_ = 0, n_home_ = 0, seed_ = 0;
  int64_t n_rows_ = 0;
};

// Builds the index one range of buckets at a time, so that memory is bounded whatever the table's size:
// for each part, `begin`, `add` every key of the table (others' keys are skipped), then write the part.
// Keys that overflow a part's end are carried into the next.
class KeyIndexPart {
 public:
  struct Duplicate { bool found = false; int64_t key = 0; int64_t first = 0, second = 0; };

  KeyIndexPart(uint64_t n_buckets, uint64_t seed)
      : n_buckets_(n_buckets), n_home_(n_buckets - kTailBuckets), seed_(seed) {}

  // Takes buckets [lo, hi); they must be zeroed. The last part includes the tail.
  void begin(void* buckets, uint64_t lo, uint64_t hi) {
    buckets_ = static_cast<KeyBucket*>(buckets);
    lo_ = lo;
    hi_ = hi;
    std::vector<Entry> carried;
    carried.swap(spill_);
    for (const Entry& entry : carried) insert(lo_, entry.key, entry.position);
  }

  void add(const int64_t* keys, int64_t n, int64_t first_position) {
    for (int64_t i = 0; i < n && !duplicate_.found; ++i) {
      const uint64_t home = home_of(keys[i], seed_, n_home_);
      if (home >= lo_ && home < hi_) insert(home, keys[i], first_position + i);
    }
  }

  const Duplicate& duplicate() const { return duplicate_; }
  // Keys that found no room before the end of the array: try another seed.
  bool overflowed() const { return hi_ == n_buckets_ && !spill_.empty(); }

 private:
  struct Entry { int64_t key; int64_t position; };

  void report(int64_t key, int64_t a, int64_t b) {
    if (!duplicate_.found) duplicate_ = {true, key, a < b ? a : b, a < b ? b : a};
  }

  void insert(uint64_t from, int64_t key, int64_t position) {
    for (uint64_t b = from; b < hi_; ++b) {
      KeyBucket& bucket = buckets_[b - lo_];
      for (uint32_t s = 0; s < bucket.count; ++s) {
        if (bucket.keys[s] == key) return report(key, bucket.positions[s], position);
      }
      if (bucket.count < KeyBucket::kSlots) {
        bucket.keys[bucket.count] = key;
        bucket.positions[bucket.count] = uint32_t(position);
        ++bucket.count;
        return;
      }
    }
    // Two equal keys that both leave the part meet in the next one, except past the very end.
    if (hi_ == n_buckets_) {
      for (const Entry& entry : spill_) {
        if (entry.key == key) return report(key, entry.position, position);
      }
    }
    spill_.push_back({key, position});
  }

  uint64_t n_buckets_, n_home_, seed_;
  KeyBucket* buckets_ = nullptr;
  uint64_t lo_ = 0, hi_ = 0;
  std::vector<Entry> spill_;
  Duplicate duplicate_;
};

}  // namespace embedserve
