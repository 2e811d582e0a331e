// Attention over a block of bfloat16 positions where the CPU multiplies bfloat16: with its numbers in pairs, a row costs
// two products a pair and no sum across lanes. Pages of pairs hold them that way; a block of other pages is laid out once
// for all the rows that attend to it.
//
// A row is a query head of a token. Lane p of its scores is position p of the block, whatever else is there, and its
// sums run over features, or over positions, in order: a row's bits depend on the row and the block alone.
#pragma once

#include <array>
#include <utility>

#include "pages.h"
#include "simd.h"

namespace jaxcb {

constexpr int64_t kBlock = 64;  // positions: keys and values of a block fit the first-level cache at D = 64

#if defined(JAXCB_BF16_PRODUCTS)
constexpr int kBlockVectors = kBlock / kLanes;
constexpr int kBlockRows = kAccumulators / kBlockVectors;  // that are computed together
static_assert(kSlab == kLanes);

// The slabs of a block, up to the last position of interest.
struct Slabs {
  const bf16_pair *keys[kBlockVectors] = {}, *values[kBlockVectors] = {};
};

class PairBlock {
 public:
  // Numbers of a row of features, in whole registers of pairs.
  static int64_t padded(int64_t head_dim) { return (head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }
  // Floats of memory that a block takes.
  static int64_t size(int64_t head_dim) { return kBlock * padded(head_dim); }

  PairBlock(float* memory, int64_t head_dim)
      : keys_(reinterpret_cast<bf16_pair*>(memory)), values_(keys_ + kBlock * padded(head_dim) / 2), head_dim_(head_dim),
        width_(padded(head_dim)) {}

  // Takes positions [begin, end) of slabs; what others hold counts for nothing. The first rows that attend ask for
  // `next` on the way, one line for each that they read: of more at once most would be dropped.
  void take(const Slabs& slabs, int64_t begin, int64_t end, const Slabs& next) {
    set_range(begin, end);
    slabs_ = slabs, next_ = next;
    if (begin % 2) forget(begin - 1);
    if (end % 2) forget(end);
  }

  // Takes positions [begin, end) of the block from rows. Others count as zeros, and rows give them no weight. On the way
  // it asks for the first positions of the next block.
  void fill(const bf16* const* keys, const bf16* const* values, int64_t begin, int64_t end,
            const bf16* const* next_keys, const bf16* const* next_values, int64_t next_end) {
    auto part = [&](const bf16* const* rows, const bf16* const* next, int64_t position, int64_t d) {
      if (position < next_end) __builtin_prefetch(next[position] + d, 0, 2);
      return begin <= position && position < end ? load_up_to(rows[position - begin] + d, head_dim_ - d) : no_pairs();
    };
    set_range(begin, end);
    for (int64_t v = 0; v < vectors_; v++) {
      slabs_.keys[v] = keys_ + v * width_ / 2 * kLanes, slabs_.values[v] = values_of(v);
      for (int64_t d = 0; d < width_; d += 2 * kLanes) {
        Pairs x[kLanes];
        for (int64_t i = 0; i < kLanes; i++) x[i] = part(keys, next_keys, v * kLanes + i, d);
        transpose(x);
        bf16_pair* to = keys_ + (v * width_ + d) / 2 * kLanes;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; i++) store(to + i * kLanes, x[i]);
      }
    }
    for (int64_t pair = first_; pair < last_; pair++) {
      for (int64_t d = 0; d < width_; d += 2 * kLanes) {
        Pairs both[2];
        interleave(part(values, next_values, 2 * pair, d), part(values, next_values, 2 * pair + 1, d), both);
        store(values_ + pair * width_ + d, both[0]);
        store(values_ + pair * width_ + d + kLanes, both[1]);
      }
    }
  }

  // Up to kBlockRows rows.
  //
  // Arguments:
  //   q: of every row, scaled, in pairs of features with zeros behind them: [rows][padded / 2].
  //   seen: of every row, the positions that it sees, as bits.
  //   peak, total, out: of every row, its largest score, the sum of its weights against that and the values' weighted
  //     sum, [rows][head_dim].
  void attend(int rows, const bf16_pair* q, const uint64_t* seen, float soft_cap, float* peak, float* total, float* out);

 private:
  static constexpr int64_t kPairs = kLanes / 2;  // of positions in a slab

  void set_range(int64_t begin, int64_t end) {
    vectors_ = static_cast<int>((end + kLanes - 1) / kLanes), first_ = begin / 2, last_ = (end + 1) / 2;
  }
  bf16_pair* values_of(int64_t v) const { return values_ + v * kPairs * width_; }

  // Makes the value of a position zero, which may be NaN: the other one of its pair counts.
  void forget(int64_t position) {
    int64_t v = position / kLanes, pair = position % kLanes / 2;
    bf16_pair* copy = values_of(v);
    if (slabs_.values[v] != copy) std::copy_n(slabs_.values[v], kPairs * width_, copy);
    slabs_.values[v] = copy;
    for (int64_t d = 0; d < width_; d++) copy[pair * width_ + d].bits &= position % 2 ? 0xffffu : 0xffff0000u;
  }

  using Attend = void (PairBlock::*)(const bf16_pair*, const uint64_t*, float, float*, float*, float*);

  template <int R, int... V>
  static constexpr std::array<Attend, kBlockVectors> attend_of(std::integer_sequence<int, V...>) {
    return {&PairBlock::attend_rows<R, V + 1>...};
  }
  template <int... R>
  static constexpr std::array<std::array<Attend, kBlockVectors>, kBlockRows> every_attend(
      std::integer_sequence<int, R...>) {
    return {attend_of<R + 1>(std::make_integer_sequence<int, kBlockVectors>())...};
  }

  template <int R, int V>
  void attend_rows(const bf16_pair* q, const uint64_t* seen, float soft_cap, float* peak, float* total, float* out) {
    Slabs next = next_;
    next_ = {};
    F32 scores[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) scores[r][v] = zero();
    }
    for (int64_t d = 0; d < (head_dim_ + 1) / 2; d++) {
      Pairs keys[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        if (next.keys[v]) __builtin_prefetch(next.keys[v] + d * kLanes, 0, 2);
        keys[v] = load(slabs_.keys[v] + d * kLanes);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        Pairs feature = all(q[r * width_ / 2 + d]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) scores[r][v] = fma(feature, keys[v], scores[r][v]);
      }
    }
    alignas(64) bf16_pair weights[R][kBlock / 2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      alignas(64) float row[(V + 1) / 2 * 2 * kLanes] = {};
      F32 most = all(-1e30f), sums = zero();
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        F32 x = scores[r][v];
        if (soft_cap > 0) x = mul(tanh(mul(x, all(1.0f / soft_cap))), all(soft_cap));
        scores[r][v] = keep(lanes_of(seen[r], v), x, all(-1e30f));
        most = max(most, scores[r][v]);
      }
      F32 peaks = all(peak[r] = largest(most));
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        F32 weight = keep(lanes_of(seen[r], v), exp(sub(scores[r][v], peaks)), zero());
        sums = add(sums, weight);
        store(row + v * kLanes, weight);
      }
      total[r] = sum(sums);
      for (int v = 0; v < V; v += 2) store(weights[r] + v * kLanes / 2, pairs_of(row + v * kLanes));
    }
    int64_t d = 0;
    constexpr int C = R <= 3 ? 8 : 4;
    for (; d + C * kLanes <= width_; d += C * kLanes) weigh<R, C>(weights, d, next, out);
    for (; d < width_; d += 2 * kLanes) weigh<R, 2>(weights, d, next, out);
  }

  // Features from d on, C registers of them.
  template <int R, int C>
  void weigh(const bf16_pair (&weights)[R][kBlock / 2], int64_t d, const Slabs& next, float* out) const {
    F32 sums[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = zero();
    }
    for (int64_t pair = first_; pair < last_; pair++) {
      Pairs values[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        int64_t v = pair / kPairs, place = pair % kPairs * width_ + d + c * kLanes;
        if (next.values[v]) __builtin_prefetch(next.values[v] + place, 0, 2);
        values[c] = load(slabs_.values[v] + place);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        Pairs weight = all(weights[r][pair]);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = fma(weight, values[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; r++) {
      for (int c = 0; c < C; c++) {
        int64_t at = d + c * kLanes, left = head_dim_ - at;
        if (left > 0) store_up_to(out + r * head_dim_ + at, sums[r][c], left);
      }
    }
  }

  static uint16_t lanes_of(uint64_t seen, int v) { return static_cast<uint16_t>(seen >> (v * kLanes)); }

  bf16_pair *keys_, *values_;  // memory for slabs: [vectors][width / 2][kLanes]; [pairs of positions][width]
  Slabs slabs_, next_;
  int64_t head_dim_, width_, first_ = 0, last_ = 0;  // pairs of positions that are there
  int vectors_ = 0;
};

inline void PairBlock::attend(int rows, const bf16_pair* q, const uint64_t* seen, float soft_cap, float* peak,
                              float* total, float* out) {
  static constexpr auto every = every_attend(std::make_integer_sequence<int, kBlockRows>());
  (this->*every[rows - 1][vectors_ - 1])(q, seen, soft_cap, peak, total, out);
}

// Rows of numbers in pairs, rounded, with zeros behind them: [rows][padded / 2].
inline void to_pairs(const float* x, int64_t rows, int64_t size, bf16_pair* out) {
  int64_t width = PairBlock::padded(size);
  for (int64_t r = 0; r < rows; r++, x += size, out += width / 2) {
    for (int64_t d = 0; d < width; d += 2 * kLanes) {
      float part[2 * kLanes] = {};
      bool whole = d + 2 * kLanes <= size;
      if (!whole) memcpy(part, x + d, (size - d) * sizeof(float));
      store(out + d / 2, pairs_of(whole ? x + d : part));
    }
  }
}
#endif

}  // namespace jaxcb
