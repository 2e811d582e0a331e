// Attention over a block of positions of any type, whose keys and values are read where they lie.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "dot.h"
#include "pair_block.h"
#include "softmax.h"

namespace jaxcb {

// Keys, or values, of some positions of a block.
template <class T>
struct Rows {
  const T* const* at;
  const float* scales;  // of each, or null
  Rows from(int64_t n) const { return {at + n, scales ? scales + n : nullptr}; }
};

template <int R, class T>
void scores(const Shape& s, const float* q, const T* const* keys, int64_t n, float* out) {
  constexpr int C = kAccumulators / R;
  for (int64_t p = 0; p < n; p += C) {
    const float* x[R];
    const T* w[C];
    for (int r = 0; r < R; r++) x[r] = q + r * s.head_dim;
    for (int c = 0; c < C; c++) w[c] = keys[std::min(p + c, n - 1)];
    float sums[R * C];
    dot_tile<R, C>(x, w, s.head_dim, sums);
    if (p + C <= n) {
      for (int r = 0; r < R; r++) memcpy(out + r * kBlock + p, sums + r * C, C * sizeof(float));
    } else {
      for (int r = 0; r < R; r++) memcpy(out + r * kBlock + p, sums + r * C, (n - p) * sizeof(float));
    }
  }
}

// Scores, or weights, of n positions times the scales of what they are multiplied with: int8 rows are read as they lie.
inline void scale_by(const float* scales, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i++) x[i] *= scales[i];
}

// Turns n scores into softmax weights; returns the largest score and the sum of the weights.
inline void soften(const Shape& s, float* scores, int64_t n, float* peak, float* total) {
  if (s.soft_cap > 0) {
    for (int64_t i = 0; i < n; i += kLanes) {
      int part = static_cast<int>(std::min<int64_t>(kLanes, n - i));
      F32 x = mul(load_part(scores + i, part), all(1.0f / s.soft_cap));
      store_part(scores + i, mul(tanh(x), all(s.soft_cap)), part);
    }
  }
  F32 mosts = all(scores[0]);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) mosts = max(mosts, load(scores + i));
  float most = largest(mosts);
  for (; i < n; i++) most = std::max(most, scores[i]);
  F32 sums = zero();
  i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    F32 weight = exp(sub(load(scores + i), all(most)));
    store(scores + i, weight);
    sums = add(sums, weight);
  }
  if (int rest = static_cast<int>(n - i)) {
    store_part(scores + i, exp(sub(load_part(scores + i, rest), all(most))), rest);
    sums = add(sums, load_part(scores + i, rest));
  }
  *peak = most;
  *total = sum(sums);
}

template <int R, int V, class T>
void weigh_columns(const Shape& s, const float* weights, const T* const* values, int64_t n, int64_t d, float* out) {
  F32 sums[R * V];
#pragma GCC unroll 16
  for (int i = 0; i < R * V; i++) sums[i] = zero();
  for (int64_t p = 0; p < n; p++) {
    F32 columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = load(values[p] + d + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      F32 weight = all(weights[r * kBlock + p]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r * V + v] = fma(weight, columns[v], sums[r * V + v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * V; i++) store(out + i / V * s.head_dim + d + i % V * kLanes, sums[i]);
}

// out[r] = sum over p of weights[r][p] * values[p], position after position.
template <int R, class T>
void weigh(const Shape& s, const float* weights, const T* const* values, int64_t n, float* out) {
  constexpr int V = R == 1 ? 8 : R == 4 ? 2 : 4;
  int64_t d = 0;
  for (; d + V * kLanes <= s.head_dim; d += V * kLanes) weigh_columns<R, V>(s, weights, values, n, d, out);
  for (; d + kLanes <= s.head_dim; d += kLanes) weigh_columns<R, 1>(s, weights, values, n, d, out);
  if (int rest = static_cast<int>(s.head_dim - d)) {
    for (int r = 0; r < R; r++) {
      F32 sums = zero();
      for (int64_t p = 0; p < n; p++) sums = fma(all(weights[r * kBlock + p]), load_part(values[p] + d, rest), sums);
      store_part(out + r * s.head_dim + d, sums, rest);
    }
  }
}

// One token's query heads of one KV head over n positions of a block.
template <int R, class T>
void attend_heads(const Shape& s, const float* q, Rows<T> keys, Rows<T> values, int64_t n, Softmax block,
                  int64_t head) {
  alignas(64) float weights[R * kBlock];
  scores<R>(s, q + head * s.head_dim, keys.at, n, weights);
  for (int r = 0; r < R; r++) {
    float* row = weights + r * kBlock;
    if (keys.scales) scale_by(keys.scales, n, row);
    soften(s, row, n, block.peak + head + r, block.total + head + r);
    if (values.scales) scale_by(values.scales, n, row);
  }
  weigh<R>(s, weights, values.at, n, block.values + head * s.head_dim);
}

template <class T>
void attend_block(const Shape& s, const float* q, Rows<T> keys, Rows<T> values, int64_t n, Softmax block) {
  int64_t head = 0, heads = s.group();
  for (; heads - head >= 5 || heads - head == 3; head += 3) attend_heads<3>(s, q, keys, values, n, block, head);
  if (heads - head == 4) attend_heads<4>(s, q, keys, values, n, block, head);
  if (heads - head == 2) attend_heads<2>(s, q, keys, values, n, block, head);
  if (heads - head == 1) attend_heads<1>(s, q, keys, values, n, block, head);
}

}  // namespace jaxcb
