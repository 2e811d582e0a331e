// A tile of dot products, the inner loop of attention scores.
//
// out[r * C + c] = sum over k of x[r][k] * w[c][k]. Lanes run along k, each (r, c) has one register of partial sums, and
// sum4 adds its lanes: the order of the additions depends on `size` alone, never on R, C or what else is in the tile.
#pragma once

#include "simd.h"

namespace jaxcb {

template <int R, int C, class W>
inline void dot_tile(const float* const (&x_rows)[R], const W* const (&w_rows)[C], int64_t size, float* out) {
  static_assert(R * C % 4 == 0 && R <= 4 && C <= 24);
  const float* x[R];
  const W* w[C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) x[r] = x_rows[r];
#pragma GCC unroll 24
  for (int c = 0; c < C; c++) w[c] = w_rows[c];
  F32 sums[R * C];
#pragma GCC unroll 24
  for (int i = 0; i < R * C; i++) sums[i] = zero();
  float x_tail[R][kLanes];
  W w_tail[C][kLanes];
  int64_t end = size / kLanes * kLanes;
  for (int pass = 0; pass < 2; pass++) {  // the second one is over what is left, padded with zeros
    for (int64_t k = 0; k < end; k += kLanes) {
      if constexpr (R < C) {  // the shorter side is held in registers beside the sums
        F32 rows[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) rows[r] = load(x[r] + k);
#pragma GCC unroll 24
        for (int c = 0; c < C; c++) {
          F32 column = load(w[c] + k);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) sums[r * C + c] = fma(rows[r], column, sums[r * C + c]);
        }
      } else {
        F32 columns[C];
#pragma GCC unroll 24
        for (int c = 0; c < C; c++) columns[c] = load(w[c] + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          F32 row = load(x[r] + k);
#pragma GCC unroll 24
          for (int c = 0; c < C; c++) sums[r * C + c] = fma(row, columns[c], sums[r * C + c]);
        }
      }
    }
    int64_t rest = size - end;
    if (pass == 1 || rest == 0) break;
    memset(x_tail, 0, sizeof x_tail);
    memset(w_tail, 0, sizeof w_tail);
    for (int r = 0; r < R; r++) {
      memcpy(x_tail[r], x[r] + end, rest * sizeof(float));
      x[r] = x_tail[r];
    }
    for (int c = 0; c < C; c++) {
      memcpy(w_tail[c], w[c] + end, rest * sizeof(W));
      w[c] = w_tail[c];
    }
    end = kLanes;
  }
#pragma GCC unroll 6
  for (int i = 0; i < R * C; i += 4) sum4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], out + i);
}

}  // namespace jaxcb
