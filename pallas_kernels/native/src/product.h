// Products of activations with weights in panels (panels.h): y = f(h @ w.T), w [outputs, inputs].
//
//   plain      y [T, N] = h @ w.T (+ bias) (+ residual)
//   gated      y [T, F] = act(h @ w[:F].T + bias[:F]) * (h @ w[F:].T + bias[F:]); a panel of w[:F], then one of w[F:]
//
// h is x, or x normalised by its root mean square and scaled. A row of y depends on its row of x alone, to the bit: not
// on the other rows, nor on how many there are. Where the CPU multiplies bfloat16 and the weights are that, h is rounded
// to it, to the nearest, ties to even; sums are float32.
#pragma once

#include <cstdint>

#include "numbers.h"
#include "parallel.h"

namespace jaxcb {

enum class Activation : int64_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

struct Product {
  const float* x;         // [rows, inputs]
  const void* weights;    // [panels, inputs, kPanel], the last panel filled up with any numbers
  Number weight_type;
  const float* scales;    // [outputs] of int8 weights, or null
  const float* bias;      // [outputs] or null
  const float* norm;      // [inputs], scale of the norm of x, or null
  const float* residual;  // [rows, outputs] or null
  float* y;               // [rows, outputs], gated: [rows, outputs / 2]
  int64_t rows, inputs, outputs;
  Activation activation;
  float eps;
};

void multiply(Pool& pool, const Product& p);

}  // namespace jaxcb
