#include "product.h"

#include "dot.h"
#include "norm.h"

namespace jaxcb {
namespace {

constexpr int64_t kManyRows = 28;  // from here on packing pays
constexpr int64_t kBlock = 48;     // most columns of an item: 110 KB of float32 at 576 inputs

// Sums of columns [first, last) for R rows from `row` on, into out[row * stride + column - first].
template <int R, bool kFirst, class W>
void some_rows(const Product& p, const W* weights, int64_t row, int64_t first, int64_t last, float* out, int64_t stride) {
  constexpr int C = kAccumulators / R;
  const float* x[R];
  for (int r = 0; r < R; r++) x[r] = p.x + (row + r) * p.inputs;
  for (int64_t n = first; n < last; n += C) {
    const W* w[C];
    for (int c = 0; c < C; c++) w[c] = weights + std::min<int64_t>(n + c, last - 1) * p.inputs;
    float sums[R * C];
    dot_tile<R, C, W, kFirst>(x, w, p.inputs, sums);
    size_t bytes = std::min<int64_t>(C, last - n) * sizeof(float);
    for (int r = 0; r < R; r++) memcpy(out + (row + r) * stride + n - first, sums + r * C, bytes);
  }
}

constexpr int kRows = 4, kColumns = kAccumulators / kRows;

template <int R>
void some_rows_packed(const Product& p, const float* panels, int64_t row, int64_t count, float* out, int64_t stride) {
  const float* x[R];
  for (int r = 0; r < R; r++) x[r] = p.x + (row + r) * p.inputs;
  for (int64_t n = 0; n < count; n += kColumns, panels += kColumns * p.inputs) {
    float sums[R * kColumns];
    dot_packed<R, kColumns>(x, panels, p.inputs, sums);
    int64_t valid = std::min<int64_t>(kColumns, count - n);
    for (int r = 0; r < R; r++) {
      for (int64_t c = 0; c < valid; c++) out[(row + r) * stride + n + c] = sums[r * kColumns + c];
    }
  }
}

// Many rows: the first ones bring the block's weights into the cache and leave them widened and packed, then the others
// pass over them.
template <class W>
void columns_packed(const Product& p, int64_t first, int64_t last, float* out, int64_t stride) {
  static thread_local Scratch scratch;
  int64_t count = last - first, panel = kColumns * p.inputs;
  float* panels = scratch.get((count + kColumns - 1) / kColumns * panel);
  const float* x[kRows];
  for (int r = 0; r < kRows; r++) x[r] = p.x + r * p.inputs;
  for (int64_t n = 0; n < count; n += kColumns) {
    const W* w[kColumns];
    for (int c = 0; c < kColumns; c++) {
      w[c] = static_cast<const W*>(p.weights) + std::min<int64_t>(first + n + c, last - 1) * p.inputs;
    }
    float sums[kRows * kColumns];
    dot_and_pack<kRows, kColumns>(x, w, p.inputs, panels + n / kColumns * panel, sums);
    int64_t valid = std::min<int64_t>(kColumns, count - n);
    for (int r = 0; r < kRows; r++) {
      for (int64_t c = 0; c < valid; c++) out[r * stride + n + c] = sums[r * kColumns + c];
    }
  }
  int64_t row = kRows;
  for (; row + kRows <= p.rows; row += kRows) some_rows_packed<kRows>(p, panels, row, count, out, stride);
  if (p.rows - row == 3) some_rows_packed<3>(p, panels, row, count, out, stride);
  if (p.rows - row == 2) some_rows_packed<2>(p, panels, row, count, out, stride);
  if (p.rows - row == 1) some_rows_packed<1>(p, panels, row, count, out, stride);
}

// Few rows: the first ones bring the block's weights into the cache, the others find them there.
template <bool kFirst, class W>
void up_to_four_rows(const Product& p, int64_t row, int64_t first, int64_t last, float* out, int64_t stride) {
  const W* weights = static_cast<const W*>(p.weights);
  switch (std::min<int64_t>(4, p.rows - row)) {
    case 1: return some_rows<1, kFirst>(p, weights, row, first, last, out, stride);
    case 2: return some_rows<2, kFirst>(p, weights, row, first, last, out, stride);
    case 3: return some_rows<3, kFirst>(p, weights, row, first, last, out, stride);
    case 4: return some_rows<4, kFirst>(p, weights, row, first, last, out, stride);
  }
}

template <class W>
void columns_in_place(const Product& p, int64_t first, int64_t last, float* out, int64_t stride) {
  up_to_four_rows<true, W>(p, 0, first, last, out, stride);
  for (int64_t row = 4; row < p.rows; row += 4) up_to_four_rows<false, W>(p, row, first, last, out, stride);
}

// What follows the sums of columns [first, last): scales, bias, residual.
void adjust(const Product& p, int64_t first, int64_t last, float* out, int64_t stride) {
  if (!p.scales && !p.bias && !p.residual) return;
  for (int64_t row = 0; row < p.rows; row++) {
    float* to = out + row * stride;
    if (p.scales) for (int64_t n = first; n < last; n++) to[n - first] *= p.scales[n];
    if (p.bias) for (int64_t n = first; n < last; n++) to[n - first] += p.bias[n];
    if (p.residual) {
      const float* residual = p.residual + row * p.outputs;
      for (int64_t n = first; n < last; n++) to[n - first] += residual[n];
    }
  }
}

template <class W>
void columns(const Product& p, int64_t first, int64_t last, float* out, int64_t stride) {
  if (p.rows >= kManyRows && p.inputs % kLanes == 0) columns_packed<W>(p, first, last, out, stride);
  else columns_in_place<W>(p, first, last, out, stride);
  adjust(p, first, last, out, stride);
}

F32 activated(F32 x, Activation activation) {
  if (activation == Activation::kSilu) return div(x, add(all(1.0f), exp(sub(zero(), x))));
  F32 inner = mul(all(0.7978845608028654f), fma(mul(mul(x, x), x), all(0.044715f), x));
  return mul(mul(all(0.5f), x), add(all(1.0f), tanh(inner)));
}

// act(gate) * up of both halves, gate_up as columns() left it: [rows, 2 * width].
void gated(const Product& p, const float* gate_up, int64_t first, int64_t width) {
  for (int64_t row = 0; row < p.rows; row++) {
    const float* gate = gate_up + row * 2 * width;
    const float* up = gate + width;
    float* to = p.y + row * (p.outputs / 2) + first;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(to + i, mul(activated(load(gate + i), p.activation), load(up + i)));
    if (int rest = static_cast<int>(width - i)) {
      F32 y = mul(activated(load_part(gate + i, rest), p.activation), load_part(up + i, rest));
      store_part(to + i, y, rest);
    }
  }
}

template <class W>
void run(Pool& pool, const Product& p) {
  int64_t width = p.activation == Activation::kNone ? p.outputs : p.outputs / 2;
  // An item's columns: enough items for every thread, blocks that stay in the second-level cache.
  int64_t share = width / (4 * std::max<int64_t>(1, pool.num_threads()));
  int64_t block = std::clamp<int64_t>(share / kAccumulators, 1, kBlock / kAccumulators) * kAccumulators;
  parallel_for(pool, (width + block - 1) / block, [&](int64_t item) {
    int64_t first = item * block, last = std::min(width, first + block), count = last - first;
    if (p.activation == Activation::kNone) {
      columns<W>(p, first, last, p.y + first, width);
      return;
    }
    static thread_local Scratch scratch;
    float* both = scratch.get(p.rows * 2 * count);
    columns<W>(p, first, last, both, 2 * count);
    columns<W>(p, width + first, width + last, both + count, 2 * count);
    gated(p, both, first, count);
  });
}

// x normalised, in memory of the calling thread.
const float* normalised(Pool& pool, const Product& p) {
  static thread_local Scratch scratch;
  float* h = scratch.get(p.rows * p.inputs);
  constexpr int64_t kTogether = 32;
  parallel_for(pool, (p.rows + kTogether - 1) / kTogether, [&](int64_t item) {
    for (int64_t row = item * kTogether; row < std::min(p.rows, (item + 1) * kTogether); row++) {
      rms_norm(p.x + row * p.inputs, p.norm, p.eps, p.inputs, h + row * p.inputs);
    }
  });
  return h;
}

}  // namespace

void multiply(Pool& pool, Product p) {
  if (p.rows == 0) return;
  if (p.norm) p.x = normalised(pool, p);
  switch (p.weight_type) {
    case Number::kF32: return run<float>(pool, p);
    case Number::kBF16: return run<bf16>(pool, p);
    case Number::kF16: return run<f16>(pool, p);
    case Number::kS8: return run<int8_t>(pool, p);
  }
}

}  // namespace jaxcb
