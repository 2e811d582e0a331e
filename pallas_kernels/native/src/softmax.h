// What is kept of rows' attention between blocks, and how blocks are folded into it.
#pragma once

#include <algorithm>

#include "simd.h"

namespace jaxcb {

// What rows, the query heads of some tokens, know after some blocks: of each its largest score, the sum of its weights
// and the values' weighted sum.
struct Softmax {
  float *peak, *total, *values;
  static size_t size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
  Softmax(float* memory, int64_t rows) : peak(memory), total(memory + rows), values(memory + 2 * rows) {}
  Softmax from(int64_t row, int64_t head_dim) const {
    Softmax rest = *this;
    rest.peak += row, rest.total += row, rest.values += row * head_dim;
    return rest;
  }
};

// A token's heads before the first block.
inline void begin(Softmax state, const float* sinks, int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; h++) {
    state.peak[h] = sinks ? sinks[h] : -1e30f;
    state.total[h] = sinks ? 1.0f : 0.0f;
  }
  std::fill_n(state.values, heads * head_dim, 0.0f);
}

// x * a + y * b of a row, into x.
inline void blend(float* x, float a, const float* y, float b, int64_t size) {
  for (int64_t d = 0; d < size; d += kLanes) {
    store_up_to(x + d, fma(load_up_to(x + d, size - d), all(a), mul(load_up_to(y + d, size - d), all(b))), size - d);
  }
}

inline void fold(Softmax state, Softmax block, int64_t rows, int64_t head_dim) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    int64_t n = std::min<int64_t>(kLanes, rows - row);
    float old_part[kLanes], new_part[kLanes];
    F32 old_peak = load_up_to(state.peak + row, n), new_peak = load_up_to(block.peak + row, n);
    F32 peak = max(old_peak, new_peak);
    store(old_part, exp(sub(old_peak, peak)));
    store(new_part, exp(sub(new_peak, peak)));
    store_up_to(state.peak + row, peak, n);
    F32 total = mul(load_up_to(block.total + row, n), load(new_part));
    store_up_to(state.total + row, fma(load_up_to(state.total + row, n), load(old_part), total), n);
    for (int64_t r = row; r < row + n; r++) {
      blend(state.values + r * head_dim, old_part[r - row], block.values + r * head_dim, new_part[r - row], head_dim);
    }
  }
}

inline void finish(Softmax state, int64_t heads, int64_t head_dim, float* out) {
  for (int64_t h = 0; h < heads; h++, out += head_dim) {
    std::fill_n(out, head_dim, 0.0f);
    blend(out, 0.0f, state.values + h * head_dim, 1.0f / state.total[h], head_dim);
  }
}

}  // namespace jaxcb
