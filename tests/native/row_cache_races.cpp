// Readers race writers on a small cache: no torn row, no row of another key, no data race. Meant for ThreadSanitizer.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "row_cache.h"

using namespace embedserve;

namespace {
constexpr int64_t kRowBytes = 68;
constexpr int kReaders = 3, kWriters = 2;

void make_row(uint32_t source, int64_t key, uint8_t* row) {
  for (int64_t i = 0; i < kRowBytes; ++i) row[i] = uint8_t(uint64_t(key) * 31 + source * 17 + uint64_t(i));
}

uint64_t next(uint64_t& state) { return state = hash_key(int64_t(state), 7); }

// Few keys are asked for often, many seldom.
int64_t draw(uint64_t& state) {
  const uint64_t r = next(state);
  return int64_t(r % 4 ? (r >> 8) % 500 : (r >> 8) % 60000);
}
}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20000;
  for (const Policy& policy : kPolicies) {
    RowCache cache(RowCache::kLeastBytes, policy.name, kRowBytes);
    const uint32_t sources[2] = {cache.add_source(0, 0), cache.add_source(0, 0)};
    std::atomic<int64_t> found{0}, wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kReaders; ++t) {
      threads.emplace_back([&, t] {
        uint64_t state = uint64_t(t) + 1;
        uint8_t expected[kRowBytes];
        for (int round = 0; round < rounds; ++round) {
          const Epochs::Pin pin(cache.epochs());
          for (int i = 0; i < 16; ++i) {
            const int64_t key = draw(state);
            const uint32_t source = sources[next(state) % 2];
            const uint64_t hash = RowCache::hash_of(source, key);
            const Entry* entry = cache.find(hash, source, key, cache.candidate(hash, kRowBytes));
            if (!entry) continue;
            cache.note_asked(entry);
            make_row(source, key, expected);
            if (entry->kind != Entry::kRow || std::memcmp(entry->payload(), expected, kRowBytes)) ++wrong;
            ++found;
          }
        }
      });
    }
    for (int t = 0; t < kWriters; ++t) {
      threads.emplace_back([&, t] {
        uint64_t state = uint64_t(t) + 100;
        uint8_t row[kRowBytes];
        for (int round = 0; round < 8 * rounds; ++round) {
          const int64_t key = draw(state);
          const uint32_t source = sources[next(state) % 2];
          make_row(source, key, row);
          cache.insert(source, key, row, kRowBytes);
          if (round % 64 == 0) cache.drop(source, draw(state));
          if (round % 4096 == 0) cache.hot_keys(source);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const Source &a = cache.source(sources[0]), &b = cache.source(sources[1]);
    std::printf("%s: %lld found, %lld wrong, %lld + %lld rows, %lld evicted, %lld declined\n", policy.name, (long long)found.load(),
                (long long)wrong.load(), (long long)a.rows.load(), (long long)b.rows.load(),
                (long long)(a.evictions.load() + b.evictions.load()), (long long)(a.declined.load() + b.declined.load()));
    if (wrong || !found) return 1;
  }
  return 0;
}
