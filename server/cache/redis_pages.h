// Pages of rows as they lie in Redis (quant/redis_catalog.py has the layout), checked before they are believed.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "cold_source.h"

namespace embedserve {

// CRC-32 (ISO-HDLC, as zlib's), eight bytes at a time: Kounavis and Berry, "Novel table lookup-based algorithms for
// high-performance CRC generation", 2008.
class Crc32 {
 public:
  static uint32_t of(std::string_view data, uint32_t crc = 0) {
    static const Tables tables;
    const uint8_t* p = reinterpret_cast<const uint8_t*>(data.data());
    size_t n = data.size();
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
      uint32_t low, high;
      std::memcpy(&low, p, 4);
      std::memcpy(&high, p + 4, 4);
      low ^= crc;
      crc = tables.t[7][low & 255] ^ tables.t[6][low >> 8 & 255] ^ tables.t[5][low >> 16 & 255] ^ tables.t[4][low >> 24] ^
            tables.t[3][high & 255] ^ tables.t[2][high >> 8 & 255] ^ tables.t[1][high >> 16 & 255] ^ tables.t[0][high >> 24];
    }
    for (; n; --n) crc = tables.t[0][(crc ^ *p++) & 255] ^ crc >> 8;
    return ~crc;
  }

 private:
  struct Tables {
    std::array<std::array<uint32_t, 256>, 8> t;
    Tables() {
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
        t[0][i] = crc;
      }
      for (size_t k = 1; k < 8; ++k) {
        for (uint32_t i = 0; i < 256; ++i) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 255];
      }
    }
  };
};

// One page; `ok` if it is what its name says.
struct RedisPage {
  static constexpr size_t kHeader = 16;
  static constexpr uint8_t kSchema = 1;

  RedisPage(std::string_view name, std::string_view value, uint8_t row_type, uint32_t dim, int64_t stride, bool keyed) {
    if (value.size() < kHeader || value.substr(0, 2) != "ES" || uint8_t(value[2]) != kSchema || uint8_t(value[3]) != row_type) return;
    uint32_t found_dim, crc;
    uint16_t count;
    std::memcpy(&found_dim, value.data() + 4, 4);
    std::memcpy(&count, value.data() + 8, 2);
    std::memcpy(&crc, value.data() + 12, 4);
    const size_t key_bytes = keyed ? 8 * size_t(count) : 0;
    if (found_dim != dim || value.size() != kHeader + key_bytes + size_t(count) * size_t(stride)) return;
    if (Crc32::of(value.substr(kHeader), Crc32::of(value.substr(0, 12), Crc32::of(name))) != crc) return;
    n = count;
    keys = value.data() + kHeader;
    rows = reinterpret_cast<const uint8_t*>(value.data()) + kHeader + key_bytes;
    ok = true;
  }

  // The place of a key among the page's, or -1.
  int64_t find(int64_t key) const {
    for (int64_t i = 0; i < n; ++i) {
      int64_t each;
      std::memcpy(&each, keys + 8 * i, 8);
      if (each == key) return i;
    }
    return -1;
  }

  bool ok = false;
  int64_t n = 0;
  const char* keys = nullptr;
  const uint8_t* rows = nullptr;
};

}  // namespace embedserve
