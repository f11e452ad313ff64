// Gather, pool and decode rows. Included once per instruction set, after its simd_*.h.
//
// What hides the memory's latency: every line of a row is asked for some rows ahead, and the usual dims
// are compile-time constants, so that a row is straight-line code.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"

namespace embedserve {
namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line
// Lines asked for ahead of the row at work: fewer leave the memory idle, more push each other out of a core's
// first cache. Short rows gain nothing past kRowsAhead.
constexpr int64_t kLinesAhead = 84;
constexpr int64_t kRowsAhead = 48;

// Rows to ask for ahead. Rows begin at multiples of 4, so one lies on 1 + (stride - 4) / kLine lines on average.
constexpr int64_t rows_ahead(int64_t stride) {
  const int64_t rows = kLinesAhead * kLine / (stride + kLine - 4);
  return rows > kRowsAhead ? kRowsAhead : rows < 2 ? 2 : rows;
}

inline int64_t load_i64(const uint8_t* p, int64_t i) { int64_t v; std::memcpy(&v, p + 8 * i, 8); return v; }
inline uint32_t load_u32(const uint8_t* p, int64_t i) { uint32_t v; std::memcpy(&v, p + 4 * i, 4); return v; }
inline float load_f32(const uint8_t* p, int64_t i) { float v; std::memcpy(&v, p + 4 * i, 4); return v; }

// Templates of the standard library over types of this unnamed namespace stay in this file. Over plain
// types the linker would keep one copy for all instruction sets, and might keep the widest.
template <class T>
struct LocalAllocator : std::allocator<T> {
  template <class U> struct rebind { using other = LocalAllocator<U>; };
};
template <class T>
using Scratch = std::vector<T, LocalAllocator<T>>;

// `Block` by a name that is looked up only where it is used: not every one has every operation.
template <RowType>
struct DependentBlock { using type = Block; };

// One row type: where its codes lie, how 16 of them become values.
template <RowType kType, bool kWide>
struct RowReader {
  static constexpr bool kInteger = kType == RowType::kInt8 || kType == RowType::kInt4;
  static constexpr int kHeader = kInteger ? (kWide ? 8 : 4) : 0;
  // A row of 4-bit codes has 16 values: where a register can be indexed by code, they are worked out once.
  static constexpr bool kTabled = kType == RowType::kInt4 && Block::kIndexesNibbles;
  Block scale, bias, table;
  const uint8_t* codes;

  static constexpr int64_t code_bytes(int64_t columns) {
    return kType == RowType::kInt8 ? columns : kType == RowType::kInt4 ? (columns + 1) / 2
         : kType == RowType::kFp16 ? 2 * columns : 4 * columns;
  }

  explicit RowReader(const uint8_t* row) : codes(row + kHeader) {
    if constexpr (kInteger && kWide) {
      scale = Block::set1(load_f32(row, 0));
      bias = Block::set1(load_f32(row, 1));
    } else if constexpr (kInteger) {
      uint16_t header[2];
      std::memcpy(header, row, 4);
#if defined(__F16C__)
      const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(int(uint32_t(header[0]) | uint32_t(header[1]) << 16)));
      scale = Block::set1(_mm_cvtss_f32(both));
      bias = Block::set1(_mm_cvtss_f32(_mm_movehdup_ps(both)));
#else
      scale = Block::set1(half_to_float(header[0]));
      bias = Block::set1(half_to_float(header[1]));
#endif
    }
    if constexpr (kTabled) {
      static constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      table = Block::load(kCodes) * scale + bias;
    }
  }

  Block decode(const uint8_t* p) const {
    if constexpr (kTabled) return DependentBlock<kType>::type::index_u4(table, p);
    else if constexpr (kType == RowType::kInt8) return Block::load_u8(p) * scale + bias;
    else if constexpr (kType == RowType::kInt4) return Block::load_u4(p) * scale + bias;
    else if constexpr (kType == RowType::kFp16) return Block::load_f16(p);
    else { float v[16]; std::memcpy(v, p, 64); return Block::load(v); }
  }
  // Values of columns [column, column + 16); all must exist.
  Block block(int64_t column) const { return decode(codes + code_bytes(column)); }
  // Values of the last `n` < 16 columns; the other lanes decode zeros.
  Block tail(int64_t column, int64_t n) const {
    uint8_t padded[64] = {};
    std::memcpy(padded, codes + code_bytes(column), size_t(code_bytes(n)));
    return decode(padded);
  }
};

// Where decoded values go.
template <Output kOutput>
struct Sink {
  static constexpr int kBytes = kOutput == Output::kFloat32 ? 4 : 2;
  static void put(Block b, uint8_t* p) {
    if constexpr (kOutput == Output::kFloat32) b.store(p);
    else if constexpr (kOutput == Output::kFloat16) b.store_f16(p);
    else b.store_bf16(p);
  }
  static void put_tail(Block b, uint8_t* p, int64_t n) {
    uint8_t whole[64];
    put(b, whole);
    std::memcpy(p, whole, size_t(n * kBytes));
  }
};

template <class Reader, class Out, int kDim, bool kStream>
inline void decode_row(const uint8_t* row, uint8_t* out, int64_t runtime_dim) {
  const int64_t dim = kDim ? kDim : runtime_dim;
  const Reader reader(row);
  const int64_t whole = dim / 16 * 16;
  const auto decode_block = [&](int64_t c) __attribute__((always_inline)) {
    if constexpr (kStream) reader.block(c).stream(out + c * Out::kBytes);
    else Out::put(reader.block(c), out + c * Out::kBytes);
  };
  if constexpr (kDim) {
#pragma GCC unroll 24
    for (int64_t c = 0; c < kDim / 16 * 16; c += 16) decode_block(c);
  } else {
    for (int64_t c = 0; c < whole; c += 16) decode_block(c);
  }
  if (whole < dim) Out::put_tail(reader.tail(whole, dim - whole), out + whole * Out::kBytes, dim - whole);
}

// Turns ids into positions a block at a time and runs ahead with prefetches.
// visit(i, row) is called for every id in order, with row = null where the id names none.
template <int kStride, class Visit>
inline void for_each_row(const TableView& table, const uint8_t* ids, int64_t n, Visit visit) {
  constexpr int64_t kBlock = 1024;
  const int64_t stride = kStride ? kStride : table.stride;
  const int64_t distance = rows_ahead(stride);
  const uint64_t n_rows = uint64_t(table.n_rows);
  int64_t positions[kBlock];
  const bool keyed = bool(table.index);
  const auto row_at = [&](int64_t position) __attribute__((always_inline)) -> const uint8_t* {
    return uint64_t(position) < n_rows ? table.rows + position * table.stride : nullptr;
  };
  // Forced inline: GCC takes a function that only prefetches for one without effect, and drops the call.
  const auto prefetch = [&](int64_t position) __attribute__((always_inline)) {
    const uint8_t* row = row_at(position);
    if (!row) return;
    // Rows begin at multiples of 4, so the last prefetch covers a remainder of 4 bytes.
    for (int64_t offset = 0; offset < stride - 4; offset += kLine) __builtin_prefetch(row + offset);
    __builtin_prefetch(row + stride - 1);
  };
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    // Copying also aligns: ids may start at any byte of a message.
    std::memcpy(positions, ids + 8 * begin, size_t(8 * count));
    if (keyed) table.index.find_many(positions, count, positions);
    if (begin == 0 || keyed) for (int64_t i = 0; i < count && i < distance; ++i) prefetch(positions[i]);
    // Dense keys run ahead over the block's end; keyed ones are not resolved there yet.
    const int64_t last = keyed ? count : n - begin;
    for (int64_t i = 0; i < count; ++i) {
      if (i + distance < count) prefetch(positions[i + distance]);
      else if (i + distance < last) prefetch(load_i64(ids, begin + i + distance));
      visit(begin + i, row_at(positions[i]));
    }
  }
}

// Past this many bytes a result does not stay in the cores' shared cache: write round it, without reading it
// first. A smaller one, written where an earlier one lay, is quicker left in the cache, and so is its reading.
constexpr int64_t kStreamBytes = int64_t(16) << 20;

template <class Reader, class Out, int kDim, bool kStream>
int64_t gather_rows(const TableView& table, const GatherRequest& request) {
  constexpr int kStride = kDim ? int((Reader::kHeader + Reader::code_bytes(kDim) + 3) / 4 * 4) : 0;
  const int64_t row_bytes = (kDim ? kDim : table.format.dim) * Out::kBytes;
  int64_t n_missing = 0;
  for_each_row<kStride>(table, request.ids, request.n, [&](int64_t i, const uint8_t* row) {
    uint8_t* out = request.out + i * row_bytes;
    if (__builtin_expect(row != nullptr, 1)) {
      decode_row<Reader, Out, kDim, kStream>(row, out, table.format.dim);
    } else {
      request.missing[n_missing++] = uint32_t(i);
      if (request.fill) std::memcpy(out, request.fill, size_t(row_bytes));
      else std::memset(out, 0, size_t(row_bytes));
    }
  });
  if constexpr (kStream) Block::fence();
  return n_missing;
}

template <class Reader, class Out>
int64_t gather_as(const TableView& table, const GatherRequest& request) {
  const int64_t dim = table.format.dim;
  const bool stream = Out::kBytes == 4 && dim % 16 == 0 && uintptr_t(request.out) % 64 == 0 &&
                      request.n * dim * Out::kBytes >= kStreamBytes;
  const auto run = [&]<int kDim>() {
    if constexpr (Out::kBytes == 4) {
      if (stream) return gather_rows<Reader, Out, kDim, true>(table, request);
    }
    return gather_rows<Reader, Out, kDim, false>(table, request);
  };
  if constexpr (Reader::kInteger && Reader::kHeader == 4) {
    switch (dim) {
      case 16: return run.template operator()<16>();
      case 32: return run.template operator()<32>();
      case 64: return run.template operator()<64>();
      case 128: return run.template operator()<128>();
      case 256: return run.template operator()<256>();
      case 384: return run.template operator()<384>();
      default: break;
    }
  }
  return run.template operator()<0>();
}

template <class Reader, class Out, int kDim>
void pick_rows(const PickRequest& request) {
  const int64_t row_bytes = (kDim ? kDim : request.format.dim) * Out::kBytes;
  for (int64_t i = 0; i < request.n; ++i) {
    if (!request.rows[i]) continue;
    const int64_t place = request.places ? int64_t(request.places[i]) : i;
    decode_row<Reader, Out, kDim, false>(request.rows[i], request.out + place * row_bytes, request.format.dim);
  }
}

template <class Reader, class Out>
void pick_as(const PickRequest& request) {
  if constexpr (Reader::kInteger && Reader::kHeader == 4) {
    switch (request.format.dim) {
      case 16: return pick_rows<Reader, Out, 16>(request);
      case 32: return pick_rows<Reader, Out, 32>(request);
      case 64: return pick_rows<Reader, Out, 64>(request);
      case 128: return pick_rows<Reader, Out, 128>(request);
      default: break;
    }
  }
  pick_rows<Reader, Out, 0>(request);
}

int64_t gather_raw(const TableView& table, const GatherRequest& request) {
  const size_t row_bytes = size_t(table.format.stride());
  int64_t n_missing = 0;
  for_each_row<0>(table, request.ids, request.n, [&](int64_t i, const uint8_t* row) {
    uint8_t* out = request.out + size_t(i) * row_bytes;
    if (!row) {
      request.missing[n_missing++] = uint32_t(i);
      row = request.fill;
    }
    if (row) std::memcpy(out, row, row_bytes);
    else std::memset(out, 0, row_bytes);
  });
  return n_missing;
}

// Calls run<Reader>() for the table's row type.
template <class Run>
auto with_reader(const RowFormat& format, Run run) {
  switch (format.type) {
    case RowType::kInt8:
      return format.wide ? run.template operator()<RowReader<RowType::kInt8, true>>()
                         : run.template operator()<RowReader<RowType::kInt8, false>>();
    case RowType::kInt4:
      return format.wide ? run.template operator()<RowReader<RowType::kInt4, true>>()
                         : run.template operator()<RowReader<RowType::kInt4, false>>();
    case RowType::kFp16: return run.template operator()<RowReader<RowType::kFp16, false>>();
    case RowType::kFp32: break;
  }
  return run.template operator()<RowReader<RowType::kFp32, false>>();
}

int64_t gather(const TableView& table, const GatherRequest& request) {
  if (request.output == Output::kQuantized) return gather_raw(table, request);
  return with_reader(table.format, [&]<class Reader>() {
    switch (request.output) {
      case Output::kFloat16: return gather_as<Reader, Sink<Output::kFloat16>>(table, request);
      case Output::kBfloat16: return gather_as<Reader, Sink<Output::kBfloat16>>(table, request);
      default: return gather_as<Reader, Sink<Output::kFloat32>>(table, request);
    }
  });
}

// The rows are in cache already: whoever found them has asked for their lines.
void pick(const PickRequest& request) {
  if (request.output == Output::kQuantized) {
    const size_t row_bytes = size_t(request.format.stride());
    for (int64_t i = 0; i < request.n; ++i) {
      const size_t place = request.places ? request.places[i] : size_t(i);
      if (request.rows[i]) std::memcpy(request.out + place * row_bytes, request.rows[i], row_bytes);
    }
    return;
  }
  with_reader(request.format, [&]<class Reader>() {
    switch (request.output) {
      case Output::kFloat16: return pick_as<Reader, Sink<Output::kFloat16>>(request);
      case Output::kBfloat16: return pick_as<Reader, Sink<Output::kBfloat16>>(request);
      default: return pick_as<Reader, Sink<Output::kFloat32>>(request);
    }
  });
}

// One bag's sum in FP32, ids in order, product then sum (no contraction): the reference's bits.
template <class Reader>
struct BagSum {
  Scratch<float> sum;
  int64_t dim;
  explicit BagSum(int64_t d) : sum(size_t((d + 15) / 16 * 16)), dim(d) {}

  void clear() { std::memset(sum.data(), 0, sum.size() * 4); }
  void accumulate(float* at, Block value, const Block* weight) {
    if (weight) value = value * *weight;
    (Block::load(at) + value).store(reinterpret_cast<uint8_t*>(at));
  }
  void add_row(const uint8_t* row, const Block* weight) {
    const Reader reader(row);
    const int64_t whole = dim / 16 * 16;
    for (int64_t c = 0; c < whole; c += 16) accumulate(&sum[size_t(c)], reader.block(c), weight);
    if (whole < dim) accumulate(&sum[size_t(whole)], reader.tail(whole, dim - whole), weight);
  }
  void add_values(const float* values, const Block* weight) {
    for (int64_t c = 0; c < dim; c += 16) {
      float padded[16] = {};
      std::memcpy(padded, values + c, size_t(4 * (dim - c < 16 ? dim - c : 16)));
      accumulate(&sum[size_t(c)], Block::load(padded), weight);
    }
  }
  void write(Output output, float factor, uint8_t* out) const {
    const Block by = Block::set1(factor);
    for (int64_t c = 0; c < dim; c += 16) {
      const int64_t n = dim - c < 16 ? dim - c : 16;
      const Block value = Block::load(&sum[size_t(c)]) * by;
      switch (output) {
        case Output::kFloat16: Sink<Output::kFloat16>::put_tail(value, out + 2 * c, n); break;
        case Output::kBfloat16: Sink<Output::kBfloat16>::put_tail(value, out + 2 * c, n); break;
        default: Sink<Output::kFloat32>::put_tail(value, out + 4 * c, n); break;
      }
    }
  }
};

int64_t pool(const TableView& table, const PoolRequest& request) {
  const int64_t row_bytes = output_row_bytes(table.format, request.output);
  return with_reader(table.format, [&]<class Reader>() {
    BagSum<Reader> bag(table.format.dim);
    int64_t n_missing = 0, current = 0;
    float total = 0;  // of the bag's weights
    const auto end_of = [&](int64_t b) { return b + 1 < request.n_bags ? int64_t(load_u32(request.offsets, b + 1)) : request.n; };
    const auto finish = [&] {
      bag.write(request.output, request.mean && total != 0 ? 1.0f / total : 1.0f, request.out + current * row_bytes);
      bag.clear();
      total = 0;
      ++current;
    };
    for_each_row<0>(table, request.ids, request.n, [&](int64_t i, const uint8_t* row) {
        while (i >= end_of(current)) finish();
      const float weight = request.weights ? load_f32(request.weights, i) : 1.0f;
      const Block weights = Block::set1(weight);
      total += weight;
      if (row) {
        bag.add_row(row, request.weights ? &weights : nullptr);
      } else {
        request.missing[n_missing++] = uint32_t(i);
        if (request.fill) bag.add_values(request.fill, request.weights ? &weights : nullptr);
      }
    });
    while (current < request.n_bags) finish();
    return n_missing;
  });
}

template <int kStride, bool kStream>
int64_t touch_rows(const TableView& table, const GatherRequest& request) {
  const int64_t row_bytes = output_row_bytes(table.format, request.output);
  for_each_row<kStride>(table, request.ids, request.n, [&](int64_t i, const uint8_t* row) {
    uint8_t* out = request.out + i * row_bytes;
    float sum = 0;
    if (row) {
      for (int64_t offset = 0; offset < (kStride ? kStride : table.stride); offset += 64) sum += load_f32(row + offset, 0);
      sum += load_f32(row + table.stride - 4, 0);
    }
    const Block block = Block::set1(sum);
    int64_t b = 0;
    for (; b + 64 <= row_bytes; b += 64) {
      if constexpr (kStream) block.stream(out + b);
      else block.store(out + b);
    }
    for (; b + 4 <= row_bytes; b += 4) std::memcpy(out + b, &sum, 4);
  });
  if constexpr (kStream) Block::fence();
  return 0;
}

int64_t touch(const TableView& table, const GatherRequest& request) {
  const int64_t row_bytes = output_row_bytes(table.format, request.output);
  const bool stream = request.n * row_bytes >= kStreamBytes && row_bytes % 64 == 0 && uintptr_t(request.out) % 64 == 0;
  const auto run = [&]<int kStride>() {
    return stream ? touch_rows<kStride, true>(table, request) : touch_rows<kStride, false>(table, request);
  };
  switch (table.stride) {  // INT8 and INT4 rows of the usual dims
    case 12: return run.template operator()<12>();
    case 20: return run.template operator()<20>();
    case 36: return run.template operator()<36>();
    case 68: return run.template operator()<68>();
    case 132: return run.template operator()<132>();
    case 196: return run.template operator()<196>();
    case 388: return run.template operator()<388>();
    default: return run.template operator()<0>();
  }
}

}  // namespace
}  // namespace embedserve
