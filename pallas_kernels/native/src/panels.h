// Weights in panels, and tiles of sums over them: the inner loop of the products.
//
// A panel holds the weights of kPanel outputs, an input's beside each other: [inputs][kPanel] (pallas_kernels/native/
// panels.py makes them; bfloat16 in the order that load_pairs() takes). Lanes run along the outputs. A sum adds its
// inputs one after the other, in blocks, so that it depends on its row and its output alone.
//
// Where the CPU multiplies bfloat16, such a panel is [inputs / 2][kPanel][2], with a last input of an odd number by
// itself, and rows of x are rounded to pairs of bfloat16 too: a step of the loops below takes two inputs.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace jaxcb {

constexpr int64_t kPanel = 16;
constexpr int kVectors = kPanel / kLanes;                            // registers that an input's weights fill
constexpr int kMostRows = std::min(12, kAccumulators / kVectors);    // of a tile
constexpr int64_t kInputs = 768;                                     // most of a block: 24 KB of a bfloat16 panel

// What a step of a tile takes of a row of x: an input or, where bfloat16 are multiplied, two.
#if defined(JAXCB_BF16_PRODUCTS)
template <class W>
using Input = std::conditional_t<std::is_same_v<W, bf16>, bf16_pair, float>;
#else
template <class W>
using Input = float;
#endif
template <class W>
constexpr int64_t kStep = std::is_same_v<Input<W>, float> ? 1 : 2;

// What the next tiles will read from memory, asked for while these compute.
struct Ahead {
  const char* next;
  int64_t lines;  // of 64 bytes, for every four inputs
};

template <class W>
inline void load_outputs(const W* w, F32 (&v)[kVectors]) {
  if constexpr (std::is_same_v<W, bf16>) {
    load_pairs(w, v);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) v[i] = load(w + i * kLanes);
  }
}

#if defined(JAXCB_BF16_PRODUCTS)
inline void load_outputs(const bf16* w, Pairs (&v)[kVectors]) { v[0] = load_dot(w); }
inline void load_last_outputs(const bf16* w, Pairs (&v)[kVectors]) { v[0] = load_dot_last(w); }
#endif

template <int R, int P, bool last = false, class W>
inline void add_step(const Input<W>* x, int64_t x_stride, const W* w, int64_t panel, F32 (&sums)[R][P * kVectors]) {
  decltype(all(Input<W>())) v[P][kVectors];
#pragma GCC unroll 4
  for (int p = 0; p < P; p++) {
    if constexpr (last) load_last_outputs(w + p * panel, v[p]);
    else load_outputs(w + p * panel, v[p]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    auto row = all(x[r * x_stride]);
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sums[r][p * kVectors + i] = fma(row, v[p][i], sums[r][p * kVectors + i]);
    }
  }
}

// Sums over `size` inputs of R rows of x and of P panels that lie `panel` numbers apart, into out[R][P * kPanel], whose
// rows lie out_stride apart: written if these are the first inputs, else added to.
template <int R, int P, class W>
void tile(const Input<W>* x, int64_t x_stride, const W* w, int64_t panel, int64_t size, bool first, float* out,
          int64_t out_stride, Ahead ahead) {
  F32 sums[R][P * kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < P * kVectors; i++) sums[r][i] = zero();
  }
  int64_t k = 0;
  for (; k + 4 <= size; k += 4) {
    for (int64_t i = 0; i < ahead.lines; i++, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
#pragma GCC unroll 2
    for (int64_t i = k; i < k + 4; i += kStep<W>) add_step<R, P>(x + i / kStep<W>, x_stride, w + i * kPanel, panel, sums);
  }
  for (; k + kStep<W> <= size; k += kStep<W>) add_step<R, P>(x + k / kStep<W>, x_stride, w + k * kPanel, panel, sums);
  if constexpr (kStep<W> == 2) {
    if (k < size) add_step<R, P, true>(x + k / 2, x_stride, w + k * kPanel, panel, sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < P * kVectors; i++) {
      float* to = out + r * out_stride + i * kLanes;
      store(to, first ? sums[r][i] : add(load(to), sums[r][i]));
    }
  }
}

template <class W>
using Tile = void (*)(const Input<W>*, int64_t, const W*, int64_t, int64_t, bool, float*, int64_t, Ahead);

// Most panels that a tile of so many rows has registers for.
constexpr int most_panels(int rows) {
  int panels = 4;
  while (panels > 1 && rows * panels * kVectors > kAccumulators) panels /= 2;
  return panels;
}

template <class W, int P, int... R>
constexpr std::array<Tile<W>, sizeof...(R)> tiles_of(std::integer_sequence<int, R...>) {
  return {&tile<R + 1, std::min(P, most_panels(R + 1)), W>...};
}

// The tile of so many rows, up to kMostRows, and panels: 1, 2 or 4, at most most_panels(rows).
template <class W>
inline Tile<W> tile_of(int64_t rows, int panels) {
  using Rows = std::make_integer_sequence<int, kMostRows>;
  static constexpr auto one = tiles_of<W, 1>(Rows()), two = tiles_of<W, 2>(Rows()), four = tiles_of<W, 4>(Rows());
  return (panels == 4 ? four : panels == 2 ? two : one)[rows - 1];
}

}  // namespace jaxcb
