// The Lookup messages in protobuf's wire format (protobuf's "Encoding" page), as far as the request path needs it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace embedserve {

// A LookupRequest for single rows, as clients usually write it. Borrows the request's bytes.
struct PlainLookup {
  std::string_view table, version;
  const uint8_t* ids = nullptr;  // int64[n_ids], little-endian, unaligned
  int64_t n_ids = 0;
  int output = 0;                // 0 to 3
  int on_missing = 0;            // 0 to 2
  int on_unavailable = 0;        // 0 to 1
};

class WireReader {
 public:
  explicit WireReader(std::string_view data) : at_(data.data()), end_(data.data() + data.size()) {}
  bool at_end() const { return at_ == end_; }

  // One byte of a varint that has no other; false for longer ones.
  bool small(int& value) {
    if (at_ == end_ || uint8_t(*at_) > 127) return false;
    value = *at_++;
    return true;
  }

  // Length-delimited bytes.
  bool bytes(std::string_view& value) {
    uint64_t length = 0;
    for (int shift = 0;; shift += 7) {
      if (at_ == end_ || shift > 28) return false;
      const uint8_t byte = uint8_t(*at_++);
      length |= uint64_t(byte & 127) << shift;
      if (byte < 128) break;
    }
    if (length > uint64_t(end_ - at_)) return false;
    value = {at_, size_t(length)};
    at_ += length;
    return true;
  }

 private:
  const char* at_;
  const char* end_;
};

// Reads a request of the usual form. False for every other, valid or not: pooled, with fields unknown, repeated,
// split or unpacked, or with a value out of range. Those go to the general parser, which judges them.
inline bool read_plain_lookup(std::string_view data, PlainLookup& lookup) {
  WireReader reader(data);
  bool seen[10] = {};
  int tag, ignored;
  std::string_view ids;
  while (!reader.at_end()) {
    if (!reader.small(tag)) return false;
    const int field = tag >> 3;
    if (field > 9 || seen[field]) return false;
    seen[field] = true;
    bool ok = false;
    switch (tag) {
      case 1 << 3 | 2: ok = reader.bytes(lookup.table); break;
      case 2 << 3 | 2: ok = reader.bytes(ids) && ids.size() % 8 == 0; break;
      case 3 << 3 | 2: ok = reader.bytes(lookup.version); break;
      case 4 << 3 | 0: ok = reader.small(lookup.output) && lookup.output <= 3; break;
      case 5 << 3 | 0: ok = reader.small(ignored) && ignored == 0; break;
      case 8 << 3 | 0: ok = reader.small(lookup.on_missing) && lookup.on_missing <= 2; break;
      case 9 << 3 | 0: ok = reader.small(lookup.on_unavailable) && lookup.on_unavailable <= 1; break;
    }
    if (!ok) return false;
  }
  lookup.ids = reinterpret_cast<const uint8_t*>(ids.data());
  lookup.n_ids = int64_t(ids.size() / 8);
  return true;
}

class WireWriter {
 public:
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) data_.push_back(char((value & 127) | 128));
    data_.push_back(char(value));
  }
  // proto3 leaves out a number that is 0.
  void number(int field, uint64_t value) {
    if (value == 0) return;
    varint(uint64_t(field) << 3);
    varint(value);
  }
  // A number below 2^28 in four bytes, whatever it is: a varint may end in idle zeros.
  void padded_number(int field, uint64_t value) {
    varint(uint64_t(field) << 3);
    for (int i = 0; i < 4; ++i, value >>= 7) data_.push_back(char((value & 127) | (i < 3 ? 128 : 0)));
  }
  // What precedes `length` bytes of a field.
  void bytes_head(int field, uint64_t length) {
    varint(uint64_t(field) << 3 | 2);
    varint(length);
  }
  void bytes(int field, std::string_view value) {
    bytes_head(field, value.size());
    data_.append(value);
  }
  const std::string& data() const { return data_; }

 private:
  std::string data_;
};

}  // namespace embedserve
