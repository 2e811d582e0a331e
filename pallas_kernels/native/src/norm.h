// Root-mean-square normalisation of one row (Zhang and Sennrich 2019).
#pragma once

#include <cmath>

#include "simd.h"

namespace jaxcb {

inline void rms_norm(const float* x, const float* scale, float eps, int64_t size, float* out) {
  F32 squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  if (int rest = static_cast<int>(size - i)) {
    F32 part = load_part(x + i, rest);
    squares = fma(part, part, squares);
  }
  F32 factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(scale + i)));
  if (int rest = static_cast<int>(size - i)) {
    store_part(out + i, mul(mul(load_part(x + i, rest), factor), load_part(scale + i, rest)), rest);
  }
}

}  // namespace jaxcb
