// Exact top-K over stored rows. Included once per instruction set, after its simd_*.h and decode_impl.h.
//
// Rows are decoded a block at a time into cache and scored against every query there. A row's score
// depends on nothing but the row and the query, so equal rows tie exactly and the smaller key wins.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "encode_impl.h"

namespace embedserve {
namespace {

struct Candidate { float score; int64_t key; int64_t position; };

// Whether `a` ranks before `b`; the heap keeps the worst of the best at its front.
struct Better {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.score != b.score ? a.score > b.score : a.key < b.key;
  }
};

inline float dot(const float* a, const float* b, int64_t padded) {
  Block sum = Block::zero();
  for (int64_t c = 0; c < padded; c += 16) sum = fused(sum, Block::load(a + c), Block::load(b + c));
  return sum.sum();
}

inline float squared_distance(const float* a, const float* b, int64_t padded) {
  Block sum = Block::zero();
  for (int64_t c = 0; c < padded; c += 16) {
    const Block difference = Block::load(a + c) - Block::load(b + c);
    sum = fused(sum, difference, difference);
  }
  return sum.sum();
}

// Decodes a row into `dim` floats padded with zeros.
template <class Reader>
inline void decode_padded(const uint8_t* row, float* out, int64_t dim, Block mask) {
  const Reader reader(row);
  const int64_t whole = dim / 16 * 16;
  for (int64_t c = 0; c < whole; c += 16) reader.block(c).store(reinterpret_cast<uint8_t*>(out + c));
  if (whole < dim) (reader.tail(whole, dim - whole) * mask).store(reinterpret_cast<uint8_t*>(out + whole));
}

// Ascending positions.
struct PositionSet {
  const int64_t *begin, *end;
  bool holds(int64_t position) const {
    return std::binary_search(begin, end, position, [](int64_t a, int64_t b) { return a < b; });
  }
};

class QueryHeap {
 public:
  QueryHeap(const TopKRequest& request, const int64_t* excluded, int64_t n_excluded)
      : k_(size_t(request.k)), excluded_{excluded, excluded + n_excluded}, dropped_{request.dropped, request.dropped + request.n_dropped} {}

  void offer(float score, int64_t key, int64_t position) {
    const Candidate candidate{score, key, position};
    if (heap_.size() == k_ && !Better()(candidate, heap_.front())) return;
    if (leaves_out(position)) return;
    if (heap_.size() == k_) {
      std::pop_heap(heap_.begin(), heap_.end(), Better());
      heap_.back() = candidate;
    } else {
      heap_.push_back(candidate);
    }
    std::push_heap(heap_.begin(), heap_.end(), Better());
  }

  bool leaves_out(int64_t position) const { return excluded_.holds(position) || dropped_.holds(position); }

  int64_t finish(int64_t* positions, float* scores) {
    std::sort_heap(heap_.begin(), heap_.end(), Better());
    for (size_t i = 0; i < heap_.size(); ++i) { positions[i] = heap_[i].position; scores[i] = heap_[i].score; }
    return int64_t(heap_.size());
  }

 private:
  size_t k_;
  PositionSet excluded_, dropped_;
  Scratch<Candidate> heap_;
};

// The queries as the kernels want them: padded with zeros, and their norms.
struct PaddedQueries {
  PaddedQueries(const TopKRequest& request, int64_t dim, int64_t padded)
      : padded_(padded), values_(size_t(request.n_queries * padded)), norms_(static_cast<size_t>(request.n_queries)) {
    for (int64_t q = 0; q < request.n_queries; ++q) {
      std::copy(request.queries + q * dim, request.queries + (q + 1) * dim, values_.begin() + q * padded);
      norms_[size_t(q)] = std::sqrt(dot(&values_[size_t(q * padded)], &values_[size_t(q * padded)], padded));
    }
  }

  float score(Metric metric, int64_t q, const float* row, float row_norm) const {
    const float* query = &values_[size_t(q * padded_)];
    if (metric == Metric::kL2) return -squared_distance(query, row, padded_);
    const float product = dot(query, row, padded_);
    if (metric == Metric::kInnerProduct) return product;
    const float norm = norms_[size_t(q)] * row_norm;
    return norm > 0 ? product / norm : 0.0f;  // a zero vector is similar to nothing
  }

 private:
  int64_t padded_;
  Scratch<float> values_, norms_;
};

inline Block tail_mask(int64_t dim, int64_t padded) {
  float lanes[16];
  for (int64_t i = 0; i < 16; ++i) lanes[i] = i < 16 - (padded - dim) ? 1.0f : 0.0f;
  return Block::load(lanes);
}

inline QueryHeap heap_of(const TopKRequest& request, int64_t q) {
  const int64_t begin = request.excluded_spans ? request.excluded_spans[q] : 0;
  const int64_t end = request.excluded_spans ? request.excluded_spans[q + 1] : 0;
  return QueryHeap(request, request.excluded + begin, end - begin);
}

void topk(const TableView& table, const TopKRequest& request) {
  constexpr int64_t kBlockRows = 64;
  const int64_t dim = table.format.dim, padded = (dim + 15) / 16 * 16;
  const Block mask = tail_mask(dim, padded);
  const PaddedQueries queries(request, dim, padded);
  Scratch<QueryHeap> heaps;
  for (int64_t q = 0; q < request.n_queries; ++q) heaps.push_back(heap_of(request, q));

  const int64_t n = request.allow ? request.n_allow : table.n_rows;
  const auto position_at = [&](int64_t i) { return request.allow ? request.allow[i] : i; };
  Scratch<float> rows(size_t(kBlockRows * padded));
  float norms[kBlockRows] = {};
  with_reader(table.format, [&]<class Reader>() {
    for (int64_t begin = 0; begin < n; begin += kBlockRows) {
      const int64_t count = std::min(kBlockRows, n - begin);
      for (int64_t i = 0; i < count; ++i) {
        float* row = &rows[size_t(i * padded)];
        decode_padded<Reader>(table.rows + position_at(begin + i) * table.stride, row, dim, mask);
        if (request.metric == Metric::kCosine) norms[i] = std::sqrt(dot(row, row, padded));
      }
      for (int64_t q = 0; q < request.n_queries; ++q) {
        for (int64_t i = 0; i < count; ++i) {
          const float score = queries.score(request.metric, q, &rows[size_t(i * padded)], norms[i]);
          if (request.has_min_score && !(score >= request.min_score)) continue;
          const int64_t position = position_at(begin + i);
          heaps[size_t(q)].offer(score, request.keys ? request.keys[position] : position, position);
        }
      }
    }
    return 0;
  });
  for (int64_t q = 0; q < request.n_queries; ++q) {
    request.counts[q] = heaps[size_t(q)].finish(request.positions + q * request.k, request.scores + q * request.k);
  }
}

void rescore(const TableView& table, const TopKRequest& request) {
  constexpr int64_t kAhead = 8;
  const int64_t dim = table.format.dim, padded = (dim + 15) / 16 * 16;
  const Block mask = tail_mask(dim, padded);
  const PaddedQueries queries(request, dim, padded);
  Scratch<float> row(static_cast<size_t>(padded));
  with_reader(table.format, [&]<class Reader>() {
    for (int64_t q = 0; q < request.n_queries; ++q) {
      QueryHeap heap = heap_of(request, q);
      const int64_t* candidates = request.candidates + q * request.n_candidates;
      int64_t considered = 0;
      for (int64_t i = 0; i < request.n_candidates; ++i) {
        if (i + kAhead < request.n_candidates && candidates[i + kAhead] >= 0) {
          const uint8_t* next = table.rows + candidates[i + kAhead] * table.stride;
          for (int64_t at = 0; at < table.stride; at += 64) __builtin_prefetch(next + at);
        }
        const int64_t position = candidates[i];
        if (position < 0 || heap.leaves_out(position)) continue;
        ++considered;
        decode_padded<Reader>(table.rows + position * table.stride, row.data(), dim, mask);
        const float norm = request.metric == Metric::kCosine ? std::sqrt(dot(row.data(), row.data(), padded)) : 0.0f;
        const float score = queries.score(request.metric, q, row.data(), norm);
        if (request.has_min_score && !(score >= request.min_score)) continue;
        heap.offer(score, request.keys ? request.keys[position] : position, position);
      }
      request.considered[q] = considered;
      request.counts[q] = heap.finish(request.positions + q * request.k, request.scores + q * request.k);
    }
    return 0;
  });
}

}  // namespace
}  // namespace embedserve
