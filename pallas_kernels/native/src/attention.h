// Attention of a ragged batch over pages that are read in place, decodes and chunks alike.
//
// A context is cut into blocks of 64 positions. For one token, one KV head and one block the query heads that share it
// get scores, softmax weights against the block's own largest score, and a weighted sum of values; blocks are then
// folded together from first to last. What a token gets depends on nothing else: not on who computes a block, nor on
// whether the token is a decode or part of a chunk.
#pragma once

#include <cstdint>

#include "numbers.h"
#include "parallel.h"

namespace jaxcb {

struct Shape {  // of one layer's attention
  int64_t tokens, heads, kv_heads, head_dim, page_size, num_layers, layer, num_flat_pages;
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // 0: none
  int64_t group() const { return heads / kv_heads; }
};

struct Batch {
  const int32_t *query_starts, *context_lens, *block_tables;
  int64_t num_seqs, table_width;
  int64_t first(int64_t s) const { return query_starts[s]; }
  int64_t count(int64_t s) const { return query_starts[s + 1] - query_starts[s]; }
  int64_t position(int64_t s, int64_t token) const { return context_lens[s] - count(s) + token - first(s); }
};

// The pool [N, L, 2, page_size, K, D]. Rows of int8 have a scale each, beside them in an array [N, L, 2, K, page_size].
struct Store {
  void* values;
  Number type;
  float* scales;       // null but for int8
  bool pairs = false;  // numbers lie as pages.h says: for what holds_pairs()
};

// Whether such pages can hold pairs.
bool holds_pairs(const Shape& s, Number type);

// What a step's projection left, and what turns it into queries, keys and values.
struct Projected {
  const float* qkv;       // [tokens, (H + 2K) * D]
  const float *cos, *sin;  // [tokens, rotated / 2]
  int64_t rotated;         // the first features of a head, in pairs (i, i + rotated / 2)
  const float *q_norm, *k_norm;  // [D] or null
  float eps;
};

// Why the step's numbers, which come from the host, can't be; null if they can. Each would become a stray address.
const char* why_not(const Shape& s, const Batch& b);

// Normalises, rotates and scales the queries of every token into q [tokens, H, D], and puts its key and value into
// their page. Into int8 a row is rounded by itself: its largest magnitude becomes 127.
void place(Pool& pool, const Shape& s, const Batch& batch, const Projected& p, const Store& store, float* q);

// Attention of scaled queries q [tokens, H, D] over pages that hold the step's keys and values.
// sinks: [H], scores of a position without a value, or null. out: [tokens, H, D]; padding tokens are left alone.
void attend(Pool& pool, const Shape& s, const Batch& batch, const float* q, const Store& store, const float* sinks,
            float* out);

}  // namespace jaxcb
