#include "attention.h"

#include <type_traits>
#include <vector>

#include "pages.h"
#include "pair_block.h"
#include "plain_block.h"
#include "softmax.h"

namespace jaxcb {
namespace {

constexpr int64_t kTileTokens = 32;  // of a chunk, that share a block's keys and values while these are in the cache

// Some tokens of one sequence, all of its blocks or one, the query heads of some KV heads.
struct Item {
  int64_t sequence, token, num_tokens, kv_head, num_kv_heads;
  int64_t part = -1;  // -1: all blocks and the result; else one block, the first head's sums into this slot
  int64_t block = 0, stride = 0;  // between the slots of two heads
};

template <class T>
class Attention {
 public:
  Attention(const Shape& shape, const Batch& batch, const float* q, const Store& store, const float* sinks, float* out)
      : s_(shape), batch_(batch), q_(q), pages_{static_cast<const T*>(store.values), store.scales, &s_},
        pairs_(store.pairs), sinks_(sinks), out_(out) {}

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
      if (split) {
        first_part[s] = num_parts, num_parts += s_.kv_heads * (end - begin);
        if (end - begin >= 4 * threads) together = s_.kv_heads;
      }
      for (int64_t token = 0; token < count; token += kTileTokens) {
        for (int64_t head = 0; head < s_.kv_heads; head += together) {
          Item item{s, batch_.first(s) + token, std::min(kTileTokens, count - token), head, together};
          if (!split) items.push_back(item);
          for (int64_t b = begin; split && b < end; b++) {
            item.block = b, item.stride = end - begin, item.part = first_part[s] + head * item.stride + b - begin;
            items.push_back(item);
          }
        }
      }
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    static thread_local Scratch scratch;
    parts_ = scratch.get(num_parts * part_size());
    int64_t num_items = items.size(), shares = std::min(threads, num_items);
    parallel_for(pool, num_items, [&](int64_t i) {
      int64_t share = part_of(i, num_items, shares);
      const Item* next = i + 1 < part_begin(share + 1, num_items, shares) ? &items[i + 1] : nullptr;  // of this thread
      bool asked = pairs_ && i > part_begin(share, num_items, shares);  // the one before did, for as much as it read
      items[i].part < 0 ? whole(items[i], next, asked) : one_block(items[i], next, asked);
    });
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

  int64_t first_block(const Item& item) const {
    return item.part < 0 ? blocks(item.sequence, item.token, item.num_tokens).first : item.block;
  }

  int64_t cost(const Item& item) const {
    auto [begin, end] = blocks(item.sequence, item.token, item.num_tokens);
    return item.part < 0 ? item.num_tokens * item.num_kv_heads * (end - begin) : 1;
  }

  // A block of some KV heads.
  struct Place {
    const Item* item;  // null: none
    int64_t block;
  };

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

  // What attends from the tokens of an item to one block of one KV head after the other, in numbers as they lie or, for
  // several tokens, widened once.
  class Plain {
   public:
    static constexpr bool kAsksAhead = false;
    static size_t size(const Shape& s, const Item& item) {
      size_t widened = sizeof(T) < 4 && item.num_tokens > 3 ? 2 * kBlock * s.head_dim : 0;
      return Softmax::size(s.group(), s.head_dim) + widened;
    }
    Plain(const Attention& attention, const Item& item, float* memory)
        : at_(attention), s_(attention.s_), item_(item), block_(memory, s_.group()),
          widened_(memory + Softmax::size(s_.group(), s_.head_dim)) {}

    // KV head number k of the item's, positions [first, last) of block b; folded into the rows of `state`. `next` comes
    // next.
    void attend(int64_t k, int64_t b, int64_t first, int64_t last, Place, Softmax state) const {
      Located found;
      at_.locate(item_.sequence, item_.kv_head + k, first, last, found);
      const float* key_scales = found.scales_or_null(found.key_scales);
      const float* value_scales = found.scales_or_null(found.value_scales);
      if (sizeof(T) < 4 && item_.num_tokens > 3) {
        const float *keys[kBlock], *values[kBlock];
        widen(found.keys, last - first, widened_, keys);
        widen(found.values, last - first, widened_ + kBlock * s_.head_dim, values);
        rows(k, b, first, Rows<float>{keys, key_scales}, {values, value_scales}, state);
      } else {
        rows(k, b, first, Rows<T>{found.keys, key_scales}, {found.values, value_scales}, state);
      }
    }

   private:
    template <class N>
    void rows(int64_t k, int64_t b, int64_t first, Rows<N> keys, Rows<N> values, Softmax state) const {
      for (int64_t i = 0; i < item_.num_tokens; i++) {
        auto [from, to] = at_.seen(item_, i, b);
        if (from >= to) continue;
        attend_block(s_, at_.query(item_.token + i, item_.kv_head + k), keys.from(from - first),
                     values.from(from - first), to - from, block_);
        fold(state.from(i * s_.group(), s_.head_dim), block_, s_.group(), s_.head_dim);
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

    const Attention& at_;
    const Shape& s_;
    const Item& item_;
    Softmax block_;
    float* widened_;
  };

#if defined(JAXCB_BF16_PRODUCTS)
  // The same in pairs of bfloat16 (pair_block.h), the rows of all tokens beside each other.
  class InPairs {
   public:
    static constexpr bool kAsksAhead = true;  // for the next block
    static size_t size(const Shape& s, const Item& item) {
      return PairBlock::size(s.head_dim) + item.num_kv_heads * pairs_of_head(s, item) + Softmax::size(kBlockRows, s.head_dim);
    }
    InPairs(const Attention& attention, const Item& item, float* memory)
        : at_(attention), s_(attention.s_), item_(item), block_(memory, s_.head_dim),
          q_(reinterpret_cast<bf16_pair*>(memory + PairBlock::size(s_.head_dim))),
          sums_(memory + PairBlock::size(s_.head_dim) + item.num_kv_heads * pairs_of_head(s_, item), kBlockRows) {
      for (int64_t k = 0; k < item.num_kv_heads; k++) {
        for (int64_t i = 0; i < item.num_tokens; i++) {
          to_pairs(at_.query(item.token + i, item.kv_head + k), s_.group(), s_.head_dim, query(k, i * s_.group()));
        }
      }
    }

    void attend(int64_t k, int64_t b, int64_t first, int64_t last, Place next, Softmax state) {
      if (at_.pairs_) {
        block_.take(slabs_of({&item_, b}, k), first - b * kBlock, last - b * kBlock, slabs_of(next, k));
      } else {
        Located found, then;
        at_.locate(item_.sequence, item_.kv_head + k, first, last, found);
        int64_t count = 0;
        if (next.item) {
          auto [from, to] = at_.range(next);
          at_.locate(next.item->sequence, head_of(next, k), from, to, then);
          count = to - from;
        }
        block_.fill(found.keys, found.values, first - b * kBlock, last - b * kBlock, then.keys, then.values, count);
      }
      int64_t group = s_.group(), row = 0, end = item_.num_tokens * group;
      while (row < end && sees(row, b) == 0) row += group - row % group;
      while (end > row && sees(end - 1, b) == 0) end -= group;
      for (int64_t rows; row < end; row += rows) {
        rows = std::min<int64_t>(kBlockRows, end - row);
        uint64_t seen[kBlockRows];
        for (int64_t r = 0; r < rows; r++) seen[r] = sees(row + r, b);
        block_.attend(static_cast<int>(rows), query(k, row), seen, s_.soft_cap, sums_.peak, sums_.total, sums_.values);
        fold(state.from(row, s_.head_dim), sums_, rows, s_.head_dim);
      }
    }

   private:
    static int64_t pairs_of_head(const Shape& s, const Item& item) {
      return item.num_tokens * s.group() * PairBlock::padded(s.head_dim) / 2;
    }
    static int64_t head_of(Place at, int64_t k) { return at.item->kv_head + std::min(k, at.item->num_kv_heads - 1); }
    Slabs slabs_of(Place at, int64_t k) const {
      Slabs found;
      if (at.item == nullptr) return found;
      const int32_t* table = at_.table(*at.item);
      int64_t position = at.block * kBlock, end = at_.range(at).second;
      for (int64_t v = 0; v < kBlockVectors && position < end; v++, position += kSlab) {
        int64_t page = table[position / s_.page_size], offset = position % s_.page_size;
        found.keys[v] = reinterpret_cast<const bf16_pair*>(at_.pages_.slab(page, offset, head_of(at, k), 0));
        found.values[v] = reinterpret_cast<const bf16_pair*>(at_.pages_.slab(page, offset, head_of(at, k), 1));
      }
      return found;
    }
    bf16_pair* query(int64_t k, int64_t row) const {
      return q_ + k * pairs_of_head(s_, item_) + row * PairBlock::padded(s_.head_dim) / 2;
    }
    // The positions of a block that a row sees, as bits.
    uint64_t sees(int64_t row, int64_t b) const {
      auto [from, to] = at_.seen(item_, row / s_.group(), b);
      return from >= to ? 0 : ~uint64_t{0} >> (kBlock - (to - from)) << (from - b * kBlock);
    }

    const Attention& at_;
    const Shape& s_;
    const Item& item_;
    PairBlock block_;
    bf16_pair* q_;
    Softmax sums_;
  };
  using Work = std::conditional_t<std::is_same_v<T, bf16>, InPairs, Plain>;
#else
  using Work = Plain;
#endif

  int64_t end_of(const Item& item) const { return batch_.position(item.sequence, item.token) + item.num_tokens; }

  const int32_t* table(const Item& item) const { return batch_.block_tables + item.sequence * batch_.table_width; }

  // The positions of a block that its item's tokens see.
  std::pair<int64_t, int64_t> range(Place at) const {
    return {seen(*at.item, 0, at.block).first, std::min((at.block + 1) * kBlock, end_of(*at.item))};
  }

  // Brings a block of positions into the cache, for the KV heads of an item.
  void touch_block(const Item& item, int64_t b) const {
    auto [first, last] = range({&item, b});
    const int32_t* table = this->table(item);
    int64_t width = item.num_kv_heads * s_.head_dim, stride = s_.kv_heads * s_.head_dim;
    if (pairs_) {
      for (first -= first % kSlab; first < last; first += kSlab) {
        int64_t page = table[first / s_.page_size], offset = first % s_.page_size;
        for (int which = 0; which < 2; which++) touch(pages_.slab(page, offset, item.kv_head, which), kSlab * width);
      }
      return;
    }
    for (int64_t count; first < last; first += count) {
      int64_t page = table[first / s_.page_size], offset = first % s_.page_size;
      count = std::min(s_.page_size - offset, last - first);
      for (int which = 0; which < 2; which++) {
        const T* rows = pages_.row(page, offset, item.kv_head, which);
        if (width == stride) touch(rows, count * stride);
        else for (int64_t i = 0; i < count; i++) touch(rows + i * stride, width);
      }
    }
  }

  // Of a token, the positions of a block that it sees: [first, last), none if they are not in order.
  std::pair<int64_t, int64_t> seen(const Item& item, int64_t i, int64_t b) const {
    int64_t position = batch_.position(item.sequence, item.token + i);
    return {std::max(b * kBlock, oldest(position)), std::min((b + 1) * kBlock, position + 1)};
  }

  void whole(const Item& item, const Item* after, bool asked) const {
    static thread_local Scratch scratch;
    int64_t rows = item.num_tokens * group(), work_size = Work::size(s_, item), size = Softmax::size(rows, s_.head_dim);
    float* memory = scratch.get(work_size + item.num_kv_heads * size);
    Work work(*this, item, memory);
    auto state_of = [&](int64_t k) { return Softmax(memory + work_size + k * size, rows); };
    for (int64_t k = 0; k < item.num_kv_heads; k++) {
      for (int64_t i = 0; i < item.num_tokens; i++) {
        const float* sinks = sinks_ ? sinks_ + (item.kv_head + k) * group() : nullptr;
        begin(state_of(k).from(i * group(), s_.head_dim), sinks, group(), s_.head_dim);
      }
    }
    auto [begin_block, end_block] = blocks(item.sequence, item.token, item.num_tokens);
    for (int64_t b = begin_block; b < end_block; b++) {
      int64_t first = seen(item, 0, b).first, last = seen(item, item.num_tokens - 1, b).second;
      if ((b == begin_block && !asked) || !Work::kAsksAhead) touch_block(item, b);
      Place next{&item, b + 1};
      if (b + 1 == end_block) next = {after, after ? first_block(*after) : 0};
      for (int64_t k = 0; k < item.num_kv_heads; k++) work.attend(k, b, first, last, next, state_of(k));
    }
    for (int64_t k = 0; k < item.num_kv_heads; k++) {
      for (int64_t i = 0; i < item.num_tokens; i++) {
        Softmax state = state_of(k).from(i * group(), s_.head_dim);
        finish(state, group(), s_.head_dim, result(item.token + i, item.kv_head + k));
      }
    }
  }

  void one_block(const Item& item, const Item* after, bool asked) const {
    static thread_local Scratch scratch;
    Work work(*this, item, scratch.get(Work::size(s_, item)));
    auto [first, last] = seen(item, 0, item.block);
    if (!asked) touch_block(item, item.block);
    Place next{after, after ? first_block(*after) : 0};
    for (int64_t k = 0; k < item.num_kv_heads; k++) {
      Softmax part(parts_ + (item.part + k * item.stride) * part_size(), group());
      begin(part, nullptr, group(), s_.head_dim);
      work.attend(k, item.block, first, last, next, part);
    }
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
  bool pairs_;
  const float* sinks_;
  float* out_;
  float* parts_ = nullptr;
};

}  // namespace

bool holds_pairs(const Shape& s, Number type) {
#if defined(JAXCB_BF16_PRODUCTS)
  return type == Number::kBF16 && s.page_size % kSlab == 0 && s.head_dim % (2 * kLanes) == 0;
#else
  return false;
#endif
}

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

void attend(Pool& pool, const Shape& s, const Batch& batch, const float* q, const Store& store, const float* sinks,
            float* out) {
  by_type(store.type, [&]<class T>(T*) { Attention<T>(s, batch, q, store, sinks, out).run(pool); });
}

}  // namespace jaxcb
