#include "product.h"

#include "norm.h"
#include "panels.h"

namespace jaxcb {
namespace {

constexpr int64_t kRows = 96;        // of a chunk: 200 KB of their inputs in the second-level cache
constexpr int64_t kMostPanels = 8;   // of an item: 147 KB of bfloat16 at 576 inputs, beside a chunk

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sums of panels [first, last) for rows [row, row + rows), into sums[rows][(last - first) * kPanel].
//
// The first tile of rows brings panels into the cache, the others find them there; all ask for the next panels while they
// compute, at an even rate. After the last of these, `then` is what this thread goes on to; null: that isn't known.
template <class W>
void add_up(const Product& p, const Input<W>* x, int64_t first, int64_t last, const W* then, int64_t row, int64_t rows,
            float* sums) {
  const W* weights = static_cast<const W*>(p.weights);
  int64_t x_stride = ceil_div(p.inputs, kStep<W>);
  int64_t panel = kPanel * p.inputs, width = (last - first) * kPanel, tiles = ceil_div(rows, kMostRows);
  int most = most_panels(static_cast<int>(ceil_div(rows, tiles)));
  int64_t block = ceil_div(ceil_div(p.inputs, ceil_div(p.inputs, kInputs)), 4) * 4;
  for (int64_t k = 0; k < p.inputs; k += block) {
    int64_t size = std::min(block, p.inputs - k);
    for (int64_t n = first, panels; n < last; n += panels) {
      panels = most;
      while (panels > last - n) panels /= 2;
      const W* w = weights + n * panel + k * kPanel;
      const W* next = n + panels < last        ? w + panels * panel
                      : k + block < p.inputs ? weights + first * panel + (k + block) * kPanel
                                             : then;
      Ahead ahead{reinterpret_cast<const char*>(next), 0};
      int64_t bytes = panels * size * kPanel * static_cast<int64_t>(sizeof(W)), steps = std::max<int64_t>(1, size / 4);
      const char* end = ahead.next + bytes;
      if (row == 0 && next != nullptr) ahead.lines = ceil_div(bytes, 64 * steps * tiles);
      for (int64_t done = 0, t = 0; t < tiles; t++) {
        int64_t count = ceil_div(rows - done, tiles - t);
        tile_of<W>(count, static_cast<int>(panels))(
            x + (row + done) * x_stride + k / kStep<W>, x_stride, w, panel, size, k == 0,
            sums + done * width + (n - first) * kPanel, width, ahead);
        done += count;
        ahead.next += 64 * ahead.lines * steps;
        if (ahead.next >= end) ahead.lines = 0;
      }
    }
  }
}

F32 activated(F32 x, Activation activation) {
  if (activation == Activation::kSilu) return div(x, add(all(1.0f), exp(sub(zero(), x))));
  F32 inner = mul(all(0.7978845608028654f), fma(mul(mul(x, x), x), all(0.044715f), x));
  return mul(mul(all(0.5f), x), add(all(1.0f), tanh(inner)));
}

// What follows the sums: scales, biases, and the residual or the gate. `n` is the first output of the item.
void finish(const Product& p, int64_t n, int64_t width, int64_t row, int64_t rows, const float* sums) {
  bool gated = p.activation != Activation::kNone;
  int64_t outputs = gated ? p.outputs / 2 : p.outputs, step = gated ? 2 * kPanel : kPanel;
  auto adjusted = [&](const float* sum, int64_t output, int64_t left) {
    F32 y = load(sum);
    if (p.scales) y = mul(y, load_up_to(p.scales + output, left));
    return p.bias ? add(y, load_up_to(p.bias + output, left)) : y;
  };
  for (int64_t r = row; r < row + rows; r++, sums += width) {
    int64_t output = n;
    for (int64_t at = 0; at < width; at += step) {
      for (int64_t i = 0; i < kPanel && output < outputs; i += kLanes, output += kLanes) {
        int64_t left = outputs - output, place = r * outputs + output;
        F32 y = adjusted(sums + at + i, output, left);
        if (gated) y = mul(activated(y, p.activation), adjusted(sums + at + kPanel + i, outputs + output, left));
        if (p.residual) y = add(y, load_up_to(p.residual + place, left));
        store_up_to(p.y + place, y, left);
      }
    }
  }
}

constexpr int64_t kTogether = 32;  // rows that one thread prepares: fewer aren't worth a second thread

// Calls f(row) for every row.
template <class F>
void for_rows(Pool& pool, int64_t rows, const F& f) {
  parallel_for(pool, ceil_div(rows, kTogether), [&](int64_t item) {
    for (int64_t row = item * kTogether; row < std::min(rows, (item + 1) * kTogether); row++) f(row);
  });
}

// The rows that are multiplied, x or its norm, in memory of the calling thread where they aren't x itself.
template <class W>
const float* inputs_of(Pool& pool, const Product& p, const W*) {
  static thread_local Scratch scratch;
  if (!p.norm) return p.x;
  float* h = scratch.get(p.rows * p.inputs);
  for_rows(pool, p.rows, [&](int64_t row) {
    rms_norm(p.x + row * p.inputs, p.norm, p.eps, p.inputs, h + row * p.inputs);
  });
  return h;
}

#if defined(JAXCB_BF16_PRODUCTS)
// The same in pairs of bfloat16; beside the last of an odd number stands 0.
const bf16_pair* inputs_of(Pool& pool, const Product& p, const bf16*) {
  static thread_local Scratch scratch;
  static_assert(sizeof(bf16_pair) == sizeof(float));
  int64_t stride = ceil_div(p.inputs, 2);
  bf16_pair* pairs = reinterpret_cast<bf16_pair*>(scratch.get(p.rows * stride));
  for_rows(pool, p.rows, [&](int64_t row) {
    static thread_local Scratch normalised;
    const float* x = p.x + row * p.inputs;
    if (p.norm) {
      float* h = normalised.get(p.inputs);
      rms_norm(x, p.norm, p.eps, p.inputs, h);
      x = h;
    }
    bf16_pair* to = pairs + row * stride;
    int64_t i = 0;
    for (; i + 2 * kLanes <= p.inputs; i += 2 * kLanes) store(to + i / 2, pairs_of(x + i));
    for (; i + 2 <= p.inputs; i += 2) to[i / 2] = pair_of(x[i], x[i + 1]);
    if (i < p.inputs) to[i / 2] = pair_of(x[i], 0);
  });
  return pairs;
}
#endif

// How many of the groups an item takes, at most `most`: as many as let all threads end at about the same time.
int64_t groups_of_item(int64_t groups, int64_t most, int64_t chunks, int64_t threads) {
  int64_t best = 1, best_time = ceil_div(groups * chunks, threads);
  for (int64_t n = 2; n <= most && ceil_div(groups, n) * chunks >= 4 * threads; n++) {
    int64_t time = ceil_div(ceil_div(groups, n) * chunks, threads) * n;
    if (time <= best_time) best = n, best_time = time;
  }
  return best;
}

template <class W>
void run(Pool& pool, const Product& p) {
  const Input<W>* x = inputs_of(pool, p, static_cast<const W*>(nullptr));
  bool gated = p.activation != Activation::kNone;
  int64_t group = gated ? 2 : 1;  // panels that give outputs together
  int64_t groups = ceil_div(p.outputs / group, kPanel);
  int64_t chunks = ceil_div(p.rows, kRows), chunk = ceil_div(ceil_div(p.rows, chunks), kMostRows) * kMostRows;
  chunks = ceil_div(p.rows, chunk);
  int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  int64_t together = groups_of_item(groups, kMostPanels / group, chunks, threads);
  int64_t runs = ceil_div(groups, together), size = together * group * kPanel * p.inputs;  // of a run of panels
  int64_t items = runs * chunks, parts = std::min(threads, items);
  // The panels that a thread goes on to after an item, if it knows them: those of its part.
  auto after = [&](int64_t item) -> const W* {
    int64_t next = item / chunks + 1, end = part_begin(part_of(item, items, parts) + 1, items, parts);
    return next * chunks < end ? static_cast<const W*>(p.weights) + next * size : nullptr;
  };
  parallel_for(pool, items, [&](int64_t item) {
    static thread_local Scratch scratch;
    int64_t first = item / chunks * together, last = std::min(groups, first + together);
    int64_t row = item % chunks * chunk, rows = std::min(chunk, p.rows - row), width = (last - first) * group * kPanel;
    float* sums = scratch.get(rows * width);
    add_up<W>(p, x, first * group, last * group, after(item), row, rows, sums);
    finish(p, first * kPanel, width, row, rows, sums);
  });
}

}  // namespace

void multiply(Pool& pool, const Product& p) {
  if (p.rows == 0) return;
  switch (p.weight_type) {
    case Number::kF32: return run<float>(pool, p);
    case Number::kBF16: return run<bf16>(pool, p);
    case Number::kF16: return run<f16>(pool, p);
    case Number::kS8: return run<int8_t>(pool, p);
  }
}

}  // namespace jaxcb
