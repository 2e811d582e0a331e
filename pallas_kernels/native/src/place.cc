#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "norm.h"
#include "pages.h"

namespace jaxcb {
namespace {

// Turns a head's features by the angles of a token's position, and multiplies them by `scale`.
void rotate(const Projected& p, int64_t token, int64_t size, float scale, float* x) {
  int64_t half = p.rotated / 2;
  const float *cos = p.cos + token * half, *sin = p.sin + token * half;
  for (int64_t i = 0; i < half; i += kLanes) {
    int64_t n = half - i;
    F32 a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    F32 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    store_up_to(x + i, mul(sub(mul(a, c), mul(b, s)), all(scale)), n);
    store_up_to(x + half + i, mul(add(mul(b, c), mul(a, s)), all(scale)), n);
  }
  for (int64_t i = 2 * half; i < size; i++) x[i] *= scale;
}

// Rounds to int8 so that the largest magnitude becomes 127; returns what the numbers are to be multiplied by. NaN comes
// back out as NaN.
float quantize(const float* x, int64_t size, int8_t* out) {
  float largest = 0;
  for (int64_t i = 0; i < size; i++) {
    float magnitude = std::abs(x[i]);
    if (magnitude > largest || magnitude != magnitude) largest = magnitude;
  }
  constexpr float kNothing = 1e-30f;  // the scale of less than this would lose its own digits
  float scale = largest < kNothing ? 1.0f : largest / 127;
  if (!(scale < INFINITY)) {
    std::fill_n(out, size, int8_t{1});
    return NAN;
  }
  for (int64_t i = 0; i < size; i += kLanes) {
    int count = static_cast<int>(std::min<int64_t>(kLanes, size - i));
    float lanes[kLanes];
    store(lanes, round(div(count == kLanes ? load(x + i) : load_part(x + i, count), all(scale))));
    for (int lane = 0; lane < count; lane++) out[i + lane] = static_cast<int8_t>(lanes[lane]);
  }
  return scale;
}

// Puts a head's key or value into its place.
template <class T>
void put_row(const Pages<T>& pages, int64_t page, int64_t offset, int64_t head, int which, const float* row) {
  T* to = pages.row(page, offset, head, which);
  int64_t size = pages.shape->head_dim;
  if constexpr (std::is_same_v<T, int8_t>) {
    *pages.scale(page, offset, head, which) = quantize(row, size, to);
  } else {
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) put(to + d, load(row + d));
    for (; d < size; d++) put(to + d, row[d]);
  }
}

// The same into pages of pairs.
void put_pairs(const Pages<bf16>& pages, int64_t page, int64_t offset, int64_t head, int which, const float* row) {
  int64_t size = pages.shape->head_dim, place = offset % kSlab;
  bf16* to = pages.slab(page, offset, head, which) + (which ? place / 2 * 2 * size + place % 2 : 2 * place);
  bf16 numbers[kLanes];
  for (int64_t d = 0; d < size; d += kLanes) {
    put(numbers, load(row + d));
    for (int64_t i = 0; i < kLanes; i++) {
      if (which) to[2 * (d + i)] = numbers[i];
      else to[(d + i) / 2 * 2 * kSlab + i % 2] = numbers[i];
    }
  }
}

// Normalises, rotates and scales one token's queries into q, and puts its key and value into their page.
template <class T, bool pairs>
void place_token(const Shape& s, const Projected& p, const Pages<T>& pages, int64_t token, int64_t page, int64_t offset,
                 float* q) {
  auto put_head = [&](int64_t head, int which, const float* x) {
    if constexpr (pairs) put_pairs(pages, page, offset, head, which, x);
    else put_row(pages, page, offset, head, which, x);
  };
  int64_t D = s.head_dim;
  const float* row = p.qkv + token * (s.heads + 2 * s.kv_heads) * D;
  float* head = q + token * s.heads * D;
  for (int64_t h = 0; h < s.heads; h++, head += D, row += D) {
    if (p.q_norm) rms_norm(row, p.q_norm, p.eps, D, head);
    else std::copy_n(row, D, head);
    rotate(p, token, D, s.scale, head);
  }
  float key[512];
  for (int64_t h = 0; h < s.kv_heads; h++, row += D) {
    if (p.k_norm) rms_norm(row, p.k_norm, p.eps, D, key);
    else std::copy_n(row, D, key);
    rotate(p, token, D, 1, key);
    put_head(h, 0, key);
  }
  for (int64_t h = 0; h < s.kv_heads; h++, row += D) put_head(h, 1, row);
}

template <class T, bool pairs>
void place_tokens(Pool& pool, const Shape& s, const Batch& batch, const Projected& p, const Store& store, float* q) {
  Pages<T> pages{static_cast<T*>(store.values), store.scales, &s};
  struct Run { int64_t sequence, first, last; };
  std::vector<Run> runs;
  constexpr int64_t kTokens = 16;
  for (int64_t i = 0; i < batch.num_seqs; i++) {
    for (int64_t t = batch.first(i); t < batch.first(i + 1); t += kTokens) {
      if (!runs.empty() && batch.count(i) == 1 && i % kTokens && runs.back().last == t) runs.back().last = t + 1;
      else runs.push_back({i, t, std::min(t + kTokens, batch.first(i + 1))});
    }
  }
  auto place_run = [&](int64_t i) {
    int64_t sequence = runs[i].sequence;
    for (int64_t t = runs[i].first; t < runs[i].last; t++) {
      while (t >= batch.first(sequence + 1)) sequence++;
      int64_t position = batch.position(sequence, t);
      int64_t page = batch.block_tables[sequence * batch.table_width + position / s.page_size];
      place_token<T, pairs>(s, p, pages, t, page, position % s.page_size, q);
    }
  };
  if (runs.size() < 3) for (size_t i = 0; i < runs.size(); i++) place_run(i);
  else parallel_for(pool, runs.size(), place_run);
}

}  // namespace

void place(Pool& pool, const Shape& s, const Batch& batch, const Projected& p, const Store& store, float* q) {
  by_type(store.type, [&]<class T>(T*) {
    if constexpr (std::is_same_v<T, bf16>) {
      if (store.pairs) return place_tokens<T, true>(pool, s, batch, p, store, q);
    }
    place_tokens<T, false>(pool, s, batch, p, store, q);
  });
}

}  // namespace jaxcb
