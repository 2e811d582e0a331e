// Where keys and values lie in the pool.
//
// Pages hold rows, [page_size, K, D], or pairs, which attention multiplies as they lie (pair_block.h). Then 16 positions
// of a head, a slab, are a block of memory by itself: [page_size / 16, K, slab], of keys [D / 2][16 positions][2 features],
// of values [8][D][2 positions]. A page is as large either way, and its numbers are the same.
#pragma once

#include "attention.h"
#include "simd.h"

namespace jaxcb {

constexpr int64_t kSlab = 16;

// Keys and values of one layer of the pool.
template <class T>
struct Pages {
  T* data;
  float* scales;
  const Shape* shape;
  T* row(int64_t page, int64_t offset, int64_t head, int which) const {
    return data + ((flat(page, which) * shape->page_size + offset) * shape->kv_heads + head) * shape->head_dim;
  }
  // The slab that a position of a page lies in.
  T* slab(int64_t page, int64_t offset, int64_t head, int which) const {
    int64_t rows = offset / kSlab * shape->kv_heads + head;
    return data + (flat(page, which) * shape->page_size * shape->kv_heads + rows * kSlab) * shape->head_dim;
  }
  float* scale(int64_t page, int64_t offset, int64_t head, int which) const {
    return scales + (flat(page, which) * shape->kv_heads + head) * shape->page_size + offset;
  }

 private:
  int64_t flat(int64_t page, int which) const { return page * 2 * shape->num_layers + 2 * shape->layer + which; }
};

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

}  // namespace jaxcb
