#include "attention.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "dot.h"
#include "norm.h"

namespace jaxcb {
namespace {

constexpr int64_t kBlock = 64;       // positions: keys and values of a block fit the first-level cache at D = 64
constexpr int64_t kAhead = 16;       // positions between a key that is read and the one that is asked for
constexpr int64_t kTileTokens = 32;  // of a chunk, that share a block's keys and values while these are in the cache

// Keys and values of one layer of the pool.
template <class T>
struct Pages {
  T* data;
  float* scales;
  const Shape* shape;
  T* row(int64_t page, int64_t offset, int64_t head, int which) const {
    return data + ((flat(page, which) * shape->page_size + offset) * shape->kv_heads + head) * shape->head_dim;
  }
  float* scale(int64_t page, int64_t offset, int64_t head, int which) const {
    return scales + (flat(page, which) * shape->kv_heads + head) * shape->page_size + offset;
  }

 private:
  int64_t flat(int64_t page, int which) const { return page * 2 * shape->num_layers + 2 * shape->layer + which; }
};

// Keys, or values, of some positions of a block.
template <class T>
struct Rows {
  const T* const* at;
  const float* scales;  // of each, or null
  Rows from(int64_t n) const { return {at + n, scales ? scales + n : nullptr}; }
};

// What a token's heads know after some blocks: largest score, sum of weights and weighted sum of values of each head.
struct Softmax {
  float *peak, *total, *values;
  static size_t size(int64_t heads, int64_t head_dim) { return heads * (head_dim + 2); }
  Softmax(float* memory, int64_t heads) : peak(memory), total(memory + heads), values(memory + 2 * heads) {}
};

float exp_of(float x) {
  float out[kLanes];
  store(out, exp(all(x)));
  return out[0];
}

void begin(Softmax state, const float* sinks, int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; h++) {
    state.peak[h] = sinks ? sinks[h] : -1e30f;
    state.total[h] = sinks ? 1.0f : 0.0f;
  }
  std::fill_n(state.values, heads * head_dim, 0.0f);
}

void fold(Softmax state, Softmax block, int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; h++) {
    float peak = std::max(state.peak[h], block.peak[h]);
    float old_part = exp_of(state.peak[h] - peak), new_part = exp_of(block.peak[h] - peak);
    state.peak[h] = peak;
    state.total[h] = state.total[h] * old_part + block.total[h] * new_part;
    float *to = state.values + h * head_dim, *from = block.values + h * head_dim;
    for (int64_t d = 0; d < head_dim; d++) to[d] = to[d] * old_part + from[d] * new_part;
  }
}

void finish(Softmax state, int64_t heads, int64_t head_dim, float* out) {
  for (int64_t h = 0; h < heads; h++) {
    float factor = 1.0f / state.total[h];
    for (int64_t d = 0; d < head_dim; d++) out[h * head_dim + d] = state.values[h * head_dim + d] * factor;
  }
}

// Memory that will be read next is asked for ahead, since a page is a short run of bytes anywhere in the pool: keys a
// few positions on, and the values of the positions at hand.
template <int R, class T>
void scores(const Shape& s, const float* q, const T* const* keys, const T* const* values, int64_t n, float* out) {
  constexpr int C = kAccumulators / R;
  for (int64_t p = 0; p < n; p += C) {
    for (int64_t i = p; i < std::min(p + C, n); i++) {
      prefetch(values[i], s.head_dim);
      if (i + kAhead < n) prefetch(keys[i + kAhead], s.head_dim);
    }
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
void scale_by(const float* scales, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i++) x[i] *= scales[i];
}

// Turns n scores into softmax weights; returns the largest score and the sum of the weights.
void soften(const Shape& s, float* scores, int64_t n, float* peak, float* total) {
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
  scores<R>(s, q + head * s.head_dim, keys.at, values.at, n, weights);
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

// Some tokens of one sequence, all of its blocks or one, the query heads of some KV heads.
struct Item {
  int64_t sequence, token, num_tokens, kv_head, num_kv_heads;
  int64_t part = -1;  // -1: all blocks and the result; else one block, into slot `part`
  int64_t block = 0;
};

template <class T>
class Attention {
 public:
  Attention(const Shape& shape, const Batch& batch, const float* q, const Store& store, const float* sinks, float* out)
      : s_(shape), batch_(batch), q_(q), pages_{static_cast<const T*>(store.values), store.scales, &s_}, sinks_(sinks),
        out_(out) {}

  void run(Pool& pool) {
    int64_t threads = std::max<int64_t>(1, pool.num_threads()), live = 0;
    for (int64_t s = 0; s < batch_.num_seqs; s++) live += batch_.count(s) > 0;
    bool few = live < 2 * threads;
    std::vector<Item> items;
    std::vector<int64_t> first_part(batch_.num_seqs, -1);
    int64_t num_parts = 0;
    for (int64_t s = 0; s < batch_.num_seqs; s++) {
      int64_t count = batch_.count(s), together = count == 1 && !few ? s_.kv_heads : 1;
      auto [begin, end] = blocks(s, batch_.first(s), count);
      bool split = count == 1 && few && live * s_.kv_heads < 4 * threads && end - begin > 2;
      if (split) first_part[s] = num_parts;
      for (int64_t token = 0; token < count; token += kTileTokens) {
        for (int64_t head = 0; head < s_.kv_heads; head += together) {
          Item item{s, batch_.first(s) + token, std::min(kTileTokens, count - token), head, together};
          if (!split) items.push_back(item);
          for (int64_t b = begin; split && b < end; b++) {
            item.block = b, item.part = num_parts++;
            items.push_back(item);
          }
        }
      }
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    static thread_local Scratch scratch;
    parts_ = scratch.get(num_parts * part_size());
    parallel_for(pool, items.size(), [&](int64_t i) { items[i].part < 0 ? whole(items[i]) : one_block(items[i]); });
    for (int64_t s = 0; s < batch_.num_seqs; s++) {
      if (first_part[s] >= 0) join(s, first_part[s]);
    }
  }

 private:
  int64_t group() const { return s_.group(); }
  size_t part_size() const { return Softmax::size(group(), s_.head_dim); }
  int64_t oldest(int64_t position) const { return s_.window ? std::max<int64_t>(0, position + 1 - s_.window) : 0; }
  const float* query(int64_t token, int64_t kv_head) const {
    return q_ + (token * s_.heads + kv_head * group()) * s_.head_dim;
  }
  float* result(int64_t token, int64_t kv_head) const {
    return out_ + (token * s_.heads + kv_head * group()) * s_.head_dim;
  }

  std::pair<int64_t, int64_t> blocks(int64_t sequence, int64_t token, int64_t num_tokens) const {
    int64_t position = batch_.position(sequence, token);
    return {oldest(position) / kBlock, (position + num_tokens + kBlock - 1) / kBlock};
  }

  int64_t cost(const Item& item) const {
    auto [begin, end] = blocks(item.sequence, item.token, item.num_tokens);
    return item.part < 0 ? item.num_tokens * item.num_kv_heads * (end - begin) : 1;
  }

  // Keys and values of up to a block of positions.
  struct Located {
    const T *keys[kBlock], *values[kBlock];
    float key_scales[kBlock], value_scales[kBlock];  // of int8
    const float* scales_or_null(const float* scales) const { return std::is_same_v<T, int8_t> ? scales : nullptr; }
  };

  // Where those of positions [first, last) lie.
  void locate(int64_t sequence, int64_t kv_head, int64_t first, int64_t last, Located& found) const {
    const T **keys = found.keys, **values = found.values;
    const int32_t* table = batch_.block_tables + sequence * batch_.table_width;
    int64_t stride = s_.kv_heads * s_.head_dim;
    for (int64_t position = first; position < last;) {
      int64_t offset = position % s_.page_size, page = table[position / s_.page_size];
      int64_t count = std::min(s_.page_size - offset, last - position);
      const T *key = pages_.row(page, offset, kv_head, 0), *value = pages_.row(page, offset, kv_head, 1);
      if constexpr (std::is_same_v<T, int8_t>) {
        std::copy_n(pages_.scale(page, offset, kv_head, 0), count, found.key_scales + (position - first));
        std::copy_n(pages_.scale(page, offset, kv_head, 1), count, found.value_scales + (position - first));
      }
      for (int64_t i = 0; i < count; i++, position++) {
        *keys++ = key + i * stride;
        *values++ = value + i * stride;
      }
    }
  }

  void whole(const Item& item) const {
    static thread_local Scratch scratch;
    int64_t wide = sizeof(T) < 4 && item.num_tokens > 3 ? 2 * kBlock * s_.head_dim : 0;
    float* memory = scratch.get((item.num_tokens + 1) * part_size() + wide);
    Softmax block(memory, group());
    float *states = memory + part_size(), *widened = states + item.num_tokens * part_size();
    for (int64_t head = item.kv_head; head < item.kv_head + item.num_kv_heads; head++) {
      for (int64_t i = 0; i < item.num_tokens; i++) {
        begin(Softmax(states + i * part_size(), group()), sinks_ ? sinks_ + head * group() : nullptr, group(), s_.head_dim);
      }
      auto [begin, end] = blocks(item.sequence, item.token, item.num_tokens);
      for (int64_t b = begin; b < end; b++) {
        int64_t first = std::max(b * kBlock, oldest(batch_.position(item.sequence, item.token)));
        int64_t last = std::min((b + 1) * kBlock, batch_.position(item.sequence, item.token) + item.num_tokens);
        Located found;
        locate(item.sequence, head, first, last, found);
        const float* key_scales = found.scales_or_null(found.key_scales);
        const float* value_scales = found.scales_or_null(found.value_scales);
        if (wide) {
          const float *keys[kBlock], *values[kBlock];
          widen(found.keys, last - first, widened, keys);
          widen(found.values, last - first, widened + kBlock * s_.head_dim, values);
          tokens_of(item, head, b, first, Rows<float>{keys, key_scales}, {values, value_scales}, block, states);
        } else {
          tokens_of(item, head, b, first, Rows<T>{found.keys, key_scales}, {found.values, value_scales}, block, states);
        }
      }
      for (int64_t i = 0; i < item.num_tokens; i++) {
        finish(Softmax(states + i * part_size(), group()), group(), s_.head_dim, result(item.token + i, head));
      }
    }
  }

  // All tokens of an item over one block, whose located positions begin at `first`.
  template <class N>
  void tokens_of(const Item& item, int64_t head, int64_t b, int64_t first, Rows<N> keys, Rows<N> values, Softmax block,
                 float* states) const {
    for (int64_t i = 0; i < item.num_tokens; i++) {
      int64_t position = batch_.position(item.sequence, item.token + i);
      int64_t from = std::max(b * kBlock, oldest(position)), to = std::min((b + 1) * kBlock, position + 1);
      if (from >= to) continue;
      attend_block(s_, query(item.token + i, head), keys.from(from - first), values.from(from - first), to - from,
                   block);
      fold(Softmax(states + i * part_size(), group()), block, group(), s_.head_dim);
    }
  }

  void widen(const T* const* rows, int64_t n, float* memory, const float** wide) const {
    for (int64_t i = 0; i < n; i++) {
      float* to = memory + i * s_.head_dim;
      int64_t d = 0;
      for (; d + kLanes <= s_.head_dim; d += kLanes) store(to + d, load(rows[i] + d));
      if (int rest = static_cast<int>(s_.head_dim - d)) store_part(to + d, load_part(rows[i] + d, rest), rest);
      wide[i] = to;
    }
  }

  void one_block(const Item& item) const {
    int64_t position = batch_.position(item.sequence, item.token);
    int64_t first = std::max(item.block * kBlock, oldest(position));
    int64_t last = std::min((item.block + 1) * kBlock, position + 1);
    Located found;
    locate(item.sequence, item.kv_head, first, last, found);
    Rows<T> keys{found.keys, found.scales_or_null(found.key_scales)};
    Rows<T> values{found.values, found.scales_or_null(found.value_scales)};
    attend_block(s_, query(item.token, item.kv_head), keys, values, last - first,
                 Softmax(parts_ + item.part * part_size(), group()));
  }

  void join(int64_t sequence, int64_t part) const {
    int64_t token = batch_.first(sequence);
    auto [begin_block, end_block] = blocks(sequence, token, 1);
    static thread_local Scratch scratch;
    Softmax state(scratch.get(part_size()), group());
    for (int64_t head = 0; head < s_.kv_heads; head++) {
      begin(state, sinks_ ? sinks_ + head * group() : nullptr, group(), s_.head_dim);
      for (int64_t b = begin_block; b < end_block; b++) {
        fold(state, Softmax(parts_ + part++ * part_size(), group()), group(), s_.head_dim);
      }
      finish(state, group(), s_.head_dim, result(token, head));
    }
  }

  Shape s_;
  Batch batch_;
  const float* q_;
  Pages<const T> pages_;
  const float* sinks_;
  float* out_;
  float* parts_ = nullptr;
};

// ---------------------------------------------------------------- queries, keys and values of the step

void rotate(const Projected& p, int64_t token, float* x) {
  int64_t half = p.rotated / 2;
  const float *cos = p.cos + token * half, *sin = p.sin + token * half;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
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
    for (int64_t d = 0; d < size; d++) put(to + d, row[d]);
  }
}

// Normalises, rotates and scales one token's queries into q, and puts its key and value into their page.
template <class T>
void place_token(const Shape& s, const Projected& p, const Pages<T>& pages, int64_t token, int64_t page, int64_t offset,
                 float* q) {
  int64_t D = s.head_dim;
  const float* row = p.qkv + token * (s.heads + 2 * s.kv_heads) * D;
  float* head = q + token * s.heads * D;
  for (int64_t h = 0; h < s.heads; h++, head += D, row += D) {
    if (p.q_norm) rms_norm(row, p.q_norm, p.eps, D, head);
    else std::copy_n(row, D, head);
    rotate(p, token, head);
    for (int64_t d = 0; d < D; d++) head[d] *= s.scale;
  }
  float key[512];
  for (int64_t h = 0; h < s.kv_heads; h++, row += D) {
    if (p.k_norm) rms_norm(row, p.k_norm, p.eps, D, key);
    else std::copy_n(row, D, key);
    rotate(p, token, key);
    put_row(pages, page, offset, h, 0, key);
  }
  for (int64_t h = 0; h < s.kv_heads; h++, row += D) put_row(pages, page, offset, h, 1, row);
}

template <class T>
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
      place_token(s, p, pages, t, page, position % s.page_size, q);
    }
  };
  if (runs.size() < 3) for (size_t i = 0; i < runs.size(); i++) place_run(i);
  else parallel_for(pool, runs.size(), place_run);
}

// Calls f with a null pointer of the pages' number type.
template <class F>
void by_type(Number type, const F& f) {
  switch (type) {
    case Number::kF32: return f(static_cast<float*>(nullptr));
    case Number::kBF16: return f(static_cast<bf16*>(nullptr));
    case Number::kF16: return f(static_cast<f16*>(nullptr));
    case Number::kS8: return f(static_cast<int8_t*>(nullptr));
  }
}

}  // namespace

const char* why_not(const Shape& s, const Batch& b) {
  if (s.layer < 0 || s.layer >= s.num_layers) return "layer is out of range";
  if (s.window < 0) return "window is negative";
  if (b.query_starts[0] != 0) return "query_starts must begin with 0";
  for (int64_t i = 0; i < b.num_seqs; i++) {
    int64_t count = b.count(i), context = b.context_lens[i];
    if (count < 0 || b.first(i + 1) > s.tokens || (count > 0 && context < count)) {
      return "query_starts and context_lens don't fit together";
    }
    int64_t used = count > 0 ? (context + s.page_size - 1) / s.page_size : 0;
    if (used > b.table_width) return "a context is longer than its block table";
    for (int64_t p = 0; p < used; p++) {
      int64_t page = b.block_tables[i * b.table_width + p];
      if (page < 0 || (page + 1) * 2 * s.num_layers > s.num_flat_pages) {
        return "a block table names a page that the pool doesn't have";
      }
    }
  }
  return nullptr;
}

void place(Pool& pool, const Shape& s, const Batch& batch, const Projected& p, const Store& store, float* q) {
  by_type(store.type, [&]<class T>(T*) { place_tokens<T>(pool, s, batch, p, store, q); });
}

void attend(Pool& pool, const Shape& s, const Batch& batch, const float* q, const Store& store, const float* sinks,
            float* out) {
  by_type(store.type, [&]<class T>(T*) { Attention<T>(s, batch, q, store, sinks, out).run(pool); });
}

}  // namespace jaxcb
