// The ram tier of tables that are not held whole: rows of all of them in one pool of fixed size.
//
// The pool is cut into shards by key. A shard keeps its rows in two rings, each filled at its head and emptied at
// its tail, like the queues of S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023):
// new rows enter `probation`; those asked for again before they reach its end move to `main`, the others leave and
// are remembered by a fingerprint for a while, so that one that comes back goes to `main` at once. A row at the end
// of `main` that was asked for goes round again. Policies differ in three numbers, see Policy.
//
// Readers take no lock: a bucket's way is one atomic pointer to an entry; an entry is written before it is
// named, and its memory is written again only when no reader can be looking (epochs.h). Writers hold their shard's
// mutex. A row that finds no room at once is not taken in: a cache may always decline.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "epochs.h"
#include "key_index.h"

namespace embedserve {

struct Policy {
  const char* name;
  double probation;  // share of the pool for rows not yet asked for twice; 0: none, and no memory of those that left
  uint8_t most;      // times asked that are counted; each takes a row round `main` once more
};

// s3fifo as published. lru: the second chance of CLOCK, which keeps what was asked for since the hand last passed.
// lfu: counts further, so that a row asked for often outlives long pauses.
constexpr Policy kPolicies[] = {{"s3fifo", 0.1, 3}, {"lru", 0.0, 1}, {"lfu", 0.1, 15}};

inline const Policy& policy_named(const std::string& name) {
  for (const Policy& policy : kPolicies) {
    if (name == policy.name) return policy;
  }
  throw std::invalid_argument("policy: '" + name + "'; there is s3fifo, lru, lfu");
}

// One table version's part in the cache. Its number marks its entries.
struct Source {
  std::atomic<bool> used{false}, alive{false};
  std::atomic<int64_t> bytes{0}, rows{0}, hits{0}, misses{0}, unknown{0}, evictions{0}, declined{0};
  std::atomic<int64_t> fetched{0}, fetch_ns{0}, fetches{0}, unavailable{0};
  int64_t floor = 0, ceiling = 0;  // bytes; ceiling 0: none
};

struct alignas(8) Entry {
  enum Kind : uint8_t { kFiller = 0, kRow = 1, kTombstone = 2 };
  int64_t key;
  uint32_t source;
  uint16_t words;  // of 8 bytes, behind these 16
  std::atomic<uint8_t> asked;
  Kind kind;

  uint8_t* payload() { return reinterpret_cast<uint8_t*>(this) + sizeof(Entry); }
  const uint8_t* payload() const { return reinterpret_cast<const uint8_t*>(this) + sizeof(Entry); }
  int64_t bytes() const { return int64_t(sizeof(Entry)) + 8 * int64_t(words); }
};
static_assert(sizeof(Entry) == 16);

class RowCache {
 public:
  static constexpr int64_t kLeastBytes = int64_t(1) << 20;
  static constexpr uint32_t kSources = 4096;
  static constexpr int64_t kTombstoneSeconds = 30;
  static constexpr int64_t kMostRowBytes = 8 * int64_t(UINT16_MAX);

  // usual_row_bytes: of the rows that will be most; says how many buckets there must be. Throws std::invalid_argument
  // for a budget too small, std::bad_alloc if memory cannot be had.
  RowCache(int64_t budget_bytes, const std::string& policy, int64_t usual_row_bytes)
      : policy_(policy_named(policy)), budget_(budget_bytes), sources_(new Source[kSources]) {
    if (budget_bytes < kLeastBytes) {
      throw std::invalid_argument("memory_pool_size: " + std::to_string(budget_bytes) + " bytes; must be at least " + std::to_string(kLeastBytes));
    }
    int bits = 0;
    while (bits < 6 && (budget_bytes >> (bits + 1)) >= 8 * kLeastBytes) ++bits;
    shard_bits_ = bits;
    map_ = ::mmap(nullptr, size_t(budget_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(map_, size_t(budget_bytes), MADV_HUGEPAGE);
    constexpr int kPopulateWrite = 23;  // Linux 5.14
    if (::madvise(map_, size_t(budget_bytes), kPopulateWrite) != 0) std::memset(map_, 0, size_t(budget_bytes));
    const int64_t each = budget_bytes / (int64_t(1) << bits) / 64 * 64;
    for (int64_t s = 0; s < int64_t(1) << bits; ++s) {
      shards_.push_back(std::make_unique<Shard>(*this, static_cast<uint8_t*>(map_) + s * each, each, usual_row_bytes));
      buckets_.push_back({shards_.back()->buckets, shards_.back()->n_buckets});
    }
  }
  ~RowCache() { ::munmap(map_, size_t(budget_)); }
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  const Policy& policy() const { return policy_; }
  int64_t budget() const { return budget_; }
  Source& source(uint32_t number) { return sources_[number]; }
  const Source& source(uint32_t number) const { return sources_[number]; }

  // A number for a version's rows. Throws std::runtime_error when 4,095 are in use.
  uint32_t add_source(int64_t floor, int64_t ceiling) {
    const std::lock_guard<std::mutex> lock(sources_mutex_);
    for (uint32_t tried = 1; tried < kSources; ++tried) {
      const uint32_t number = next_source_++ % (kSources - 1) + 1;
      Source& source = sources_[number];
      if (source.used || source.bytes != 0) continue;  // entries of a version that has left may linger
      for (auto* count : {&source.rows, &source.hits, &source.misses, &source.unknown, &source.evictions, &source.declined,
                          &source.fetched, &source.fetch_ns, &source.fetches, &source.unavailable}) *count = 0;
      source.floor = floor;
      source.ceiling = ceiling;
      source.used = source.alive = true;
      return number;
    }
    throw std::runtime_error("row cache: too many versions");
  }
  // Its entries are found no more, and go before all others.
  void remove_source(uint32_t number) {
    sources_[number].alive = false;
    sources_[number].used = false;
  }

  // What one key is: an entry that lives as long as the caller's Pin, or null.
  struct Place {
    uint64_t hash;
    const Entry* entry;
  };
  static uint64_t hash_of(uint32_t source, int64_t key) { return hash_key(key, uint64_t(source) * 0x9e3779b97f4a7c15ull); }
  [[gnu::always_inline]] void prefetch_bucket(uint64_t hash) const { __builtin_prefetch(&home(hash)); }
  // The likely entry by its tag, its key not yet compared; its lines are asked for. May be null.
  [[gnu::always_inline]] const Entry* candidate(uint64_t hash, int64_t row_bytes) const {
    const Bucket& bucket = home(hash);
    const uint64_t equal = Bucket::equal(bucket.tags.load(std::memory_order_seq_cst), tag_of(hash));
    const Entry* entry = equal ? bucket.ways[__builtin_ctzll(equal) >> 3].load(std::memory_order_seq_cst) : nullptr;
    if (entry) {
      const char* at = reinterpret_cast<const char*>(entry);
      for (int64_t offset = 0; offset < row_bytes + int64_t(sizeof(Entry)); offset += 64) __builtin_prefetch(at + offset);
      __builtin_prefetch(at + sizeof(Entry) + row_bytes - 1);
    }
    return entry;
  }
  // The entry of a key, or null; `likely` from candidate().
  [[gnu::always_inline]] const Entry* find(uint64_t hash, uint32_t source, int64_t key, const Entry* likely) const {
    if (likely && likely->key == key && likely->source == source) return likely;
    return likely || Bucket::overflowed(home(hash).tags.load(std::memory_order_seq_cst)) ? shard(hash).find(hash, source, key) : nullptr;
  }
  [[gnu::always_inline]] void note_asked(const Entry* entry) const {
    auto& asked = const_cast<Entry*>(entry)->asked;
    const uint8_t before = asked.load(std::memory_order_relaxed);
    if (before < policy_.most) asked.store(uint8_t(before + 1), std::memory_order_relaxed);
  }

  // Takes a row in, or an unknown key (row null, expires at the coarse second `until`). `hot`: straight into main.
  void insert(uint32_t source, int64_t key, const uint8_t* row, int64_t row_bytes, int64_t until = 0, bool hot = false) {
    const uint64_t hash = hash_of(source, key);
    Shard& at = shard(hash);
    const std::lock_guard<std::mutex> lock(at.mutex);
    if (!at.insert(hash, source, key, row, row_bytes, until, hot)) sources_[source].declined.fetch_add(1, std::memory_order_relaxed);
  }
  void drop(uint32_t source, int64_t key) {
    const uint64_t hash = hash_of(source, key);
    Shard& at = shard(hash);
    const std::lock_guard<std::mutex> lock(at.mutex);
    at.drop(hash, source, key);
  }

  // Keys of a source's rows with how often each was asked for, of those in main first; the order is not more than that.
  std::vector<std::pair<uint8_t, int64_t>> hot_keys(uint32_t source) {
    std::vector<std::pair<uint8_t, int64_t>> found;
    for (auto& each : shards_) {
      const std::lock_guard<std::mutex> lock(each->mutex);
      each->collect(source, found);
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    return found;
  }

  Epochs& epochs() const { return epochs_; }

 private:
  // Where the keys at home here, or overflowed to here, have their entries. A byte of `tags` tells the likely way, so that
  // hardly an entry is looked at that is another key's; its last byte counts the keys at home here that live in their other
  // bucket (255: that many or more, for ever). Writers name an entry in `ways` before its tag, and take the tag back first.
  struct alignas(64) Bucket {
    static constexpr int kWays = 7;
    std::atomic<uint64_t> tags;
    std::atomic<Entry*> ways[kWays];

    // A bit in the top of each byte that holds the tag (Mycroft's test for zero bytes; a false one does no harm).
    static uint64_t equal(uint64_t tags, uint8_t tag) {
      const uint64_t x = tags ^ kOnes * tag;
      return (x - kOnes) & ~x & (kOnes << 7) & (~uint64_t(0) >> 8);
    }
    static uint8_t overflowed(uint64_t tags) { return uint8_t(tags >> 56); }
    void set_tag(int way, uint8_t tag) {
      const uint64_t before = tags.load(std::memory_order_relaxed);
      tags.store((before & ~(uint64_t(255) << 8 * way)) | uint64_t(tag) << 8 * way, std::memory_order_seq_cst);
    }
    void add_overflowed(int change) {
      const uint64_t before = tags.load(std::memory_order_relaxed);
      if (overflowed(before) != 255) tags.store(before + (uint64_t(int64_t(change)) << 56), std::memory_order_seq_cst);
    }
    static constexpr uint64_t kOnes = 0x0101010101010101;
  };
  static uint8_t tag_of(uint64_t hash) { return uint8_t(hash) ? uint8_t(hash) : 1; }  // 0: a free way

  // Bytes in the order they came. Places count on for ever; `size` of them exist.
  struct Ring {
    uint8_t* base = nullptr;
    int64_t size = 0;
    int64_t head = 0, tail = 0, safe = 0;                // safe <= tail <= head <= safe + size
    std::deque<std::pair<int64_t, uint64_t>> retired;    // (end, epoch): up to `end` nobody has looked since epoch + grace

    Entry* at(int64_t place) const { return reinterpret_cast<Entry*>(base + place % size); }
    bool owns(const Entry* entry) const { return reinterpret_cast<const uint8_t*>(entry) >= base && reinterpret_cast<const uint8_t*>(entry) < base + size; }
    int64_t to_end() const { return size - head % size; }
  };

  struct Shard {
    Shard(RowCache& owner, uint8_t* memory, int64_t bytes, int64_t usual_row_bytes) : cache(owner) {
      const int64_t entry = 16 + (usual_row_bytes + 7) / 8 * 8;
      const bool two = cache.policy_.probation > 0;
      // Half of the ways stay free, so that hardly a key finds both its buckets full.
      const double per_entry = double(entry) + 2.0 * 64 / Bucket::kWays + (two ? 8 : 0);
      const int64_t entries = std::max<int64_t>(8, int64_t(double(bytes) / per_entry));
      n_buckets = uint64_t(std::max<int64_t>(2, 2 * entries / Bucket::kWays));
      n_ghosts = two ? uint64_t(entries) : 0;
      buckets = new (memory) Bucket[n_buckets]();
      ghosts = reinterpret_cast<uint64_t*>(memory + int64_t(n_buckets) * 64);
      std::memset(ghosts, 0, 8 * n_ghosts);
      uint8_t* rings = memory + int64_t(n_buckets) * 64 + (int64_t(n_ghosts) * 8 + 63) / 64 * 64;
      const int64_t left = memory + bytes - rings;
      probation.base = rings;
      probation.size = two ? int64_t(double(left) * cache.policy_.probation) / 8 * 8 : 0;
      main.base = rings + probation.size;
      main.size = (left - probation.size) / 8 * 8;
    }

    Bucket& home(uint64_t hash) const { return buckets[home_at(hash, n_buckets)]; }
    Bucket& other(uint64_t hash) const { return buckets[scaled(uint32_t((hash * 0xd6e8feb86659fd93ull) >> 32), n_buckets)]; }

    const Entry* find(uint64_t hash, uint32_t source, int64_t key) const {
      const Way way = find_way(hash, source, key);
      return way.bucket ? way.entry : nullptr;
    }

    // Where a key's entry is named. Readers may find that it is not any more: then a Pin keeps `entry` readable.
    struct Way {
      Bucket* bucket = nullptr;
      int number = 0;
      Entry* entry = nullptr;
    };
    Way find_way(uint64_t hash, uint32_t source, int64_t key) const {
      for (Bucket* bucket : {&home(hash), &other(hash)}) {
        const uint64_t tags = bucket->tags.load(std::memory_order_seq_cst);
        for (uint64_t equal = Bucket::equal(tags, tag_of(hash)); equal; equal &= equal - 1) {
          const int number = __builtin_ctzll(equal) >> 3;
          Entry* entry = bucket->ways[number].load(std::memory_order_seq_cst);
          if (entry && entry->key == key && entry->source == source) return {bucket, number, entry};
        }
        if (bucket == &home(hash) && !Bucket::overflowed(tags)) break;
      }
      return {};
    }

    // Writers; all hold the mutex.

    bool insert(uint64_t hash, uint32_t number, int64_t key, const uint8_t* row, int64_t row_bytes, int64_t until, bool hot) {
      if (const Way way = find_way(hash, number, key); way.bucket) {
        if (way.entry->kind == Entry::kRow) return true;  // another request was quicker
        unlink(hash, way);
      }
      const bool two = probation.size > 0;
      Ring& ring = two && row && !hot && !take_ghost(hash) ? probation : two && !row ? probation : main;
      const int64_t words = row ? (row_bytes + 7) / 8 : 1;
      Source& source = cache.sources_[number];
      const int64_t bytes = int64_t(sizeof(Entry)) + 8 * words;
      const int64_t per_shard = int64_t(cache.shards_.size());
      if (source.ceiling && source.bytes.load(std::memory_order_relaxed) + bytes * per_shard > source.ceiling) {
        crowded = number;
        for (int i = 0; i < kMostSteps && source.bytes.load(std::memory_order_relaxed) + bytes > source.ceiling; ++i) {
          if (!step(ring.tail < ring.head ? ring : main)) break;
        }
        crowded = 0;
        if (source.bytes.load(std::memory_order_relaxed) + bytes > source.ceiling) return false;
      }
      if (!make_room(ring, bytes)) return false;
      Entry* entry = allocate(ring, key, number, uint16_t(words), row ? Entry::kRow : Entry::kTombstone);
      if (row) {
        std::memcpy(entry->payload(), row, size_t(row_bytes));
        std::memset(entry->payload() + row_bytes, 0, size_t(8 * words - row_bytes));
      } else {
        std::memcpy(entry->payload(), &until, 8);
      }
      link(hash, entry);
      source.bytes.fetch_add(entry->bytes(), std::memory_order_relaxed);
      if (row) source.rows.fetch_add(1, std::memory_order_relaxed);
      return true;
    }

    void drop(uint64_t hash, uint32_t number, int64_t key) {
      if (const Way way = find_way(hash, number, key); way.bucket) unlink(hash, way);
    }

    void collect(uint32_t number, std::vector<std::pair<uint8_t, int64_t>>& found) const {
      for (const Ring* ring : {&main, &probation}) {
        for (int64_t place = ring->tail; place < ring->head;) {
          if (ring->size - place % ring->size < int64_t(sizeof(Entry))) { place += ring->size - place % ring->size; continue; }
          const Entry* entry = ring->at(place);
          place += entry->bytes();
          if (entry->kind != Entry::kRow || entry->source != number) continue;
          if (!named(*entry)) continue;
          found.push_back({uint8_t(entry->asked.load(std::memory_order_relaxed) * 2 + (ring == &main ? 1 : 0)), entry->key});
        }
      }
    }

    RowCache& cache;
    std::mutex mutex;
    Bucket* buckets = nullptr;
    uint64_t n_buckets = 0;

   private:
    static constexpr int kMostSteps = 256;  // of a hand for one insert, so that none takes long
    static constexpr int64_t kGap = 16;     // 1 / 16 of a ring is emptied ahead, for readers to let go of

    bool named(const Entry& entry) const {
      return find_way(hash_of(entry.source, entry.key), entry.source, entry.key).entry == &entry;
    }

    // Empties the tail until `bytes` can be written at the head, and the gap behind it is there.
    bool make_room(Ring& ring, int64_t bytes) {
      const int64_t with_filler = bytes + (ring.to_end() < bytes ? ring.to_end() : 0);
      if (with_filler > ring.size / 2) return false;
      const int64_t gap = std::max(with_filler, std::min(ring.size / kGap, int64_t(256) << 10));
      for (int i = 0; i < kMostSteps && ring.head + gap - ring.tail > ring.size; ++i) {
        if (!step(ring)) break;
      }
      return fits(ring, with_filler);
    }

    bool fits(Ring& ring, int64_t bytes) {
      if (ring.head + bytes - ring.safe <= ring.size) return true;
      for (int tried = 0; tried < 3; ++tried) {
        const uint64_t now = cache.epochs_.current();
        while (!ring.retired.empty() && ring.retired.front().second + Epochs::kGrace <= now) {
          ring.safe = ring.retired.front().first;
          ring.retired.pop_front();
        }
        if (ring.head + bytes - ring.safe <= ring.size) return true;
        cache.epochs_.try_advance();
      }
      return false;
    }

    // Takes the entry at a ring's tail out of it: away, to main, or round again. False if main has no room for it now.
    bool step(Ring& ring) {
      if (ring.tail >= ring.head) return false;
      if (ring.size - ring.tail % ring.size < int64_t(sizeof(Entry))) {
        retire(ring, ring.size - ring.tail % ring.size);
        return true;
      }
      Entry* entry = ring.at(ring.tail);
      if (entry->kind == Entry::kFiller) {
        retire(ring, entry->bytes());
        return true;
      }
      const uint64_t hash = hash_of(entry->source, entry->key);
      const Way way = find_way(hash, entry->source, entry->key);
      if (way.entry == entry) {
        if (keeps(ring, *entry)) {
          // A probation row makes room in main first; a main row has the gap that was made ahead of it.
          const int64_t bytes = entry->bytes();
          const int64_t with_filler = bytes + (main.to_end() < bytes ? main.to_end() : 0);
          if (&ring == &probation ? !make_room(main, bytes) : !fits(main, with_filler)) {
            if (&ring == &main) evict(hash, way);  // no reader lets go: rather lose a row than stand still
            else return false;
          } else if (named(*entry)) {
            Entry* copy = allocate(main, entry->key, entry->source, entry->words, entry->kind);
            std::memcpy(copy->payload(), entry->payload(), size_t(8 * entry->words));
            const uint8_t asked = entry->asked.load(std::memory_order_relaxed);
            copy->asked.store(&ring == &main && asked ? uint8_t(asked - 1) : 0, std::memory_order_relaxed);
            way.bucket->ways[way.number].store(copy, std::memory_order_seq_cst);
          }
        } else {
          if (&ring == &probation && entry->kind == Entry::kRow) remember_ghost(hash);
          evict(hash, way);
        }
      }
      retire(ring, entry->bytes());
      return true;
    }

    bool keeps(const Ring& ring, const Entry& entry) const {
      const Source& source = cache.sources_[entry.source];
      if (entry.kind == Entry::kTombstone || !source.alive.load(std::memory_order_relaxed) || entry.source == crowded) return false;
      const uint8_t asked = entry.asked.load(std::memory_order_relaxed);
      if (source.bytes.load(std::memory_order_relaxed) <= source.floor) return true;
      return asked > (&ring == &probation ? 1 : 0);
    }

    void evict(uint64_t hash, const Way& way) {
      if (way.entry->kind == Entry::kRow) cache.sources_[way.entry->source].evictions.fetch_add(1, std::memory_order_relaxed);
      unlink(hash, way);
    }

    void unlink(uint64_t hash, const Way& way) {
      Source& source = cache.sources_[way.entry->source];
      source.bytes.fetch_sub(way.entry->bytes(), std::memory_order_relaxed);
      if (way.entry->kind == Entry::kRow) source.rows.fetch_sub(1, std::memory_order_relaxed);
      way.bucket->set_tag(way.number, 0);
      way.bucket->ways[way.number].store(nullptr, std::memory_order_seq_cst);
      if (way.bucket != &home(hash)) home(hash).add_overflowed(-1);
    }

    void link(uint64_t hash, Entry* entry) {
      Bucket& first = home(hash);
      Bucket& second = other(hash);
      for (Bucket* bucket : {&first, &second}) {
        for (int way = 0; way < Bucket::kWays; ++way) {
          if (bucket->ways[way].load(std::memory_order_relaxed)) continue;
          name(hash, entry, *bucket, way);
          return;
        }
      }
      // Both full: the least asked for at home goes.
      int least = 0;
      for (int way = 1; way < Bucket::kWays; ++way) {
        if (asked(first, way) < asked(first, least)) least = way;
      }
      Entry* old = first.ways[least].load(std::memory_order_relaxed);
      evict(hash_of(old->source, old->key), {&first, least, old});
      name(hash, entry, first, least);
    }
    void name(uint64_t hash, Entry* entry, Bucket& bucket, int way) {
      if (&bucket != &home(hash)) home(hash).add_overflowed(1);  // first, or readers would not look here
      bucket.ways[way].store(entry, std::memory_order_seq_cst);
      bucket.set_tag(way, tag_of(hash));
    }
    static uint8_t asked(const Bucket& bucket, int way) {
      return bucket.ways[way].load(std::memory_order_relaxed)->asked.load(std::memory_order_relaxed);
    }

    Entry* allocate(Ring& ring, int64_t key, uint32_t source, uint16_t words, Entry::Kind kind) {
      const int64_t bytes = int64_t(sizeof(Entry)) + 8 * int64_t(words);
      if (const int64_t left = ring.to_end(); left < bytes) {
        if (left >= int64_t(sizeof(Entry))) fill(ring, left);
        else ring.head += left;
      }
      Entry* entry = new (ring.at(ring.head)) Entry{key, source, words, 0, kind};
      ring.head += bytes;
      return entry;
    }
    // Fillers up to the ring's end; one names 512 KiB at most.
    void fill(Ring& ring, int64_t left) {
      while (left > 0) {
        if (left < int64_t(sizeof(Entry))) { ring.head += left; return; }
        const int64_t words = std::min<int64_t>((left - int64_t(sizeof(Entry))) / 8, UINT16_MAX);
        new (ring.at(ring.head)) Entry{0, 0, uint16_t(words), 0, Entry::kFiller};
        ring.head += int64_t(sizeof(Entry)) + 8 * words;
        left -= int64_t(sizeof(Entry)) + 8 * words;
      }
    }

    void retire(Ring& ring, int64_t bytes) {
      ring.tail += bytes;
      const uint64_t now = cache.epochs_.current();
      if (!ring.retired.empty() && ring.retired.back().second == now) ring.retired.back().first = ring.tail;
      else ring.retired.push_back({ring.tail, now});
    }

    // Fingerprints of rows that left probation, each good for as many departures as main has rows.
    void remember_ghost(uint64_t hash) {
      if (n_ghosts) ghosts[(hash >> 20) % n_ghosts] = (hash & 0xffffffff00000000ull) | (++departures & 0xffffffff);
    }
    bool take_ghost(uint64_t hash) {
      if (!n_ghosts) return false;
      uint64_t& ghost = ghosts[(hash >> 20) % n_ghosts];
      const bool here = ghost && (ghost >> 32) == (hash >> 32) && uint32_t(uint32_t(departures) - uint32_t(ghost)) < n_ghosts;
      if (here) ghost = 0;
      return here;
    }

    uint64_t* ghosts = nullptr;
    uint64_t n_ghosts = 0, departures = 0;
    Ring probation, main;
    uint32_t crowded = 0;  // a source that must get smaller
  };

  // The bits of a hash: shard at the top, then the bucket; the tag at the bottom.
  size_t shard_of(uint64_t hash) const { return hash >> 1 >> (63 - shard_bits_); }
  static uint64_t home_at(uint64_t hash, uint64_t n_buckets) { return scaled(uint32_t(hash >> 24), n_buckets); }
  static uint64_t scaled(uint32_t h, uint64_t n_buckets) { return (uint64_t(h) * n_buckets) >> 32; }
  Shard& shard(uint64_t hash) const { return *shards_[shard_of(hash)]; }
  [[gnu::always_inline]] const Bucket& home(uint64_t hash) const {
    const Buckets& of_shard = buckets_[shard_of(hash)];
    return of_shard.at[home_at(hash, of_shard.n)];
  }

  const Policy& policy_;
  int64_t budget_;
  int shard_bits_ = 0;
  void* map_ = nullptr;
  mutable Epochs epochs_;
  std::unique_ptr<Source[]> sources_;
  std::mutex sources_mutex_;
  uint32_t next_source_ = 0;
  std::vector<std::unique_ptr<Shard>> shards_;
  struct Buckets {
    const Bucket* at;
    uint64_t n;
  };
  std::vector<Buckets> buckets_;  // of each shard: all that a reader needs of it
};

}  // namespace embedserve
