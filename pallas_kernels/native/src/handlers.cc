// What XLA calls: operands and attributes of a custom call become arguments of the kernels.
#include "attention.h"
#include "product.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxcb {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

class XlaPool final : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t num_threads() const override { return pool_.num_threads(); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

ffi::Error bad(const char* message) { return ffi::Error::InvalidArgument(message); }

// uint16 holds the bits of bfloat16.
bool number_of(ffi::DataType type, Number* number) {
  switch (type) {
    case ffi::F32: *number = Number::kF32; return true;
    case ffi::BF16: case ffi::U16: *number = Number::kBF16; return true;
    case ffi::F16: *number = Number::kF16; return true;
    case ffi::S8: *number = Number::kS8; return true;
    default: return false;
  }
}

const float* optional(Floats x) { return x.element_count() ? x.typed_data() : nullptr; }

// Kernels, int8 scales, biases and norm scales are of all layers. Rows from num_rows on are padding: nothing is computed
// for them, and they come out as 0.
ffi::Error product(ffi::ThreadPool threads, Floats x, ffi::AnyBuffer kernels, Floats scales, Floats biases, Floats norms,
                   Floats residual, Ints layer, Ints num_rows, ffi::Result<Floats> y, int64_t activation, float eps) {
  int64_t index = layer.typed_data()[0], num_layers = kernels.dimensions()[0];
  if (index < 0 || index >= num_layers) return bad("layer is out of range");
  auto of_layer = [&](Floats all) { return all.element_count() ? all.typed_data() + index * all.dimensions()[1] : nullptr; };
  Product p{};
  p.x = x.typed_data();
  p.weights = static_cast<const char*>(kernels.untyped_data()) + kernels.size_bytes() / num_layers * index;
  if (!number_of(kernels.element_type(), &p.weight_type)) return bad("the weights' type is not supported");
  p.scales = of_layer(scales);
  p.bias = of_layer(biases);
  p.norm = of_layer(norms);
  p.residual = optional(residual);
  p.y = y->typed_data();
  int64_t all_rows = x.dimensions()[0], width = y->dimensions()[1];
  p.rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, all_rows);
  p.inputs = x.dimensions()[1];
  p.activation = static_cast<Activation>(activation);
  p.outputs = p.activation == Activation::kNone ? width : 2 * width;
  p.eps = eps;
  XlaPool pool(threads);
  multiply(pool, p);
  std::fill(p.y + p.rows * width, p.y + all_rows * width, 0.0f);
  return ffi::Error::Success();
}

// Kernels [layers, groups, panels, inputs, 16] and int8 scales [layers, groups, outputs]; group g of a layer has rows
// starts[g] to starts[g + 1]. Rows past the last one come out as 0, and kernels of groups without rows aren't read.
ffi::Error grouped_product(ffi::ThreadPool threads, Floats x, ffi::AnyBuffer kernels, Floats scales, Floats norms,
                           Ints starts, Ints layer, ffi::Result<Floats> y, int64_t activation, float eps) {
  auto d = kernels.dimensions();
  int64_t index = layer.typed_data()[0], groups = d[1], all_rows = x.dimensions()[0], width = y->dimensions()[1];
  if (index < 0 || index >= d[0]) return bad("layer is out of range");
  const int32_t* begin = starts.typed_data();
  if (begin[0] != 0 || begin[groups] > all_rows) return bad("starts must go from 0 to at most the number of rows");
  for (int64_t g = 0; g < groups; g++) {
    if (begin[g] > begin[g + 1]) return bad("starts must not fall");
  }
  Product p{};
  if (!number_of(kernels.element_type(), &p.weight_type)) return bad("the weights' type is not supported");
  p.inputs = x.dimensions()[1];
  p.norm = norms.element_count() ? norms.typed_data() + index * p.inputs : nullptr;
  p.eps = eps;
  p.activation = static_cast<Activation>(activation);
  p.outputs = p.activation == Activation::kNone ? width : 2 * width;
  int64_t kernel_bytes = kernels.size_bytes() / (d[0] * groups);
  XlaPool pool(threads);
  for (int64_t g = 0; g < groups; g++) {
    int64_t place = index * groups + g;
    p.rows = begin[g + 1] - begin[g];
    p.x = x.typed_data() + begin[g] * p.inputs;
    p.weights = static_cast<const char*>(kernels.untyped_data()) + kernel_bytes * place;
    p.scales = scales.element_count() ? scales.typed_data() + place * p.outputs : nullptr;
    p.y = y->typed_data() + begin[g] * width;
    multiply(pool, p);
  }
  std::fill(y->typed_data() + begin[groups] * width, y->typed_data() + all_rows * width, 0.0f);
  return ffi::Error::Success();
}

Shape shape_of(int64_t tokens, int64_t heads, const ffi::AnyBuffer& kv, Ints layer, Ints window, int64_t num_layers,
               float scale, float soft_cap) {
  auto d = kv.dimensions();
  return Shape{tokens, heads, d[2], d[3], d[1], num_layers, layer.typed_data()[0], d[0], scale, soft_cap,
               window.typed_data()[0]};
}

Batch batch_of(Ints query_starts, Ints context_lens, Ints block_tables) {
  auto d = block_tables.dimensions();
  return Batch{query_starts.typed_data(), context_lens.typed_data(), block_tables.typed_data(), d[0], d[1]};
}

// Pages, and the scales of int8 ones: [pages, K, page_size], of other ones nothing.
bool store_of(const ffi::AnyBuffer& kv, Floats scales, const Shape& s, bool pairs, Store* store) {
  auto d = kv.dimensions();
  store->values = kv.untyped_data();
  store->scales = scales.element_count() ? scales.typed_data() : nullptr;
  store->pairs = pairs;
  if (!number_of(kv.element_type(), &store->type)) return false;
  size_t wanted = store->type == Number::kS8 ? d[0] * d[1] * d[2] : 0;
  return scales.element_count() == wanted && (!pairs || holds_pairs(s, store->type));
}

ffi::Error attention(ffi::ThreadPool threads, Floats q, Floats sinks, Ints query_starts, Ints context_lens,
                     Ints block_tables, Ints layer, Ints window, ffi::AnyBuffer kv, Floats scales,
                     ffi::Result<Floats> out, bool pairs, int64_t num_layers, float scale, float soft_cap) {
  Shape s = shape_of(q.dimensions()[0], q.dimensions()[1], kv, layer, window, num_layers, scale, soft_cap);
  Batch batch = batch_of(query_starts, context_lens, block_tables);
  Store store;
  if (!store_of(kv, scales, s, pairs, &store)) return bad("such pages are not supported");
  if (const char* reason = why_not(s, batch)) return bad(reason);
  int64_t row = s.heads * s.head_dim, used = batch.first(batch.num_seqs);
  static thread_local Scratch scratch;
  float* scaled = scratch.get(used * row);
  for (int64_t i = 0; i < used * row; i++) scaled[i] = q.typed_data()[i] * scale;
  std::fill(out->typed_data() + used * row, out->typed_data() + s.tokens * row, 0.0f);
  XlaPool pool(threads);
  attend(pool, s, batch, scaled, store, optional(sinks), out->typed_data());
  return ffi::Error::Success();
}

ffi::Error place_and_attend(ffi::ThreadPool threads, Floats qkv, Floats cos, Floats sin, Floats q_norm, Floats k_norm,
                            Floats sinks, Ints query_starts, Ints context_lens, Ints block_tables, Ints layer,
                            Ints window, ffi::AnyBuffer, Floats, ffi::Result<Floats> out,
                            ffi::Result<ffi::AnyBuffer> kv, ffi::Result<Floats> scales, bool pairs,
                            int64_t num_heads, int64_t num_layers, float scale, float soft_cap, float eps) {
  Shape s = shape_of(qkv.dimensions()[0], num_heads, *kv, layer, window, num_layers, scale, soft_cap);
  Batch batch = batch_of(query_starts, context_lens, block_tables);
  Store store;
  if (!store_of(*kv, *scales, s, pairs, &store)) return bad("such pages are not supported");
  if (const char* reason = why_not(s, batch)) return bad(reason);
  int64_t row = s.heads * s.head_dim, used = batch.first(batch.num_seqs);
  Projected p{qkv.typed_data(), cos.typed_data(), sin.typed_data(), 2 * cos.dimensions()[1], optional(q_norm),
              optional(k_norm), eps};
  static thread_local Scratch scratch;
  float* q = scratch.get(used * row);
  std::fill(out->typed_data() + used * row, out->typed_data() + s.tokens * row, 0.0f);
  XlaPool pool(threads);
  place(pool, s, batch, p, store, q);
  attend(pool, s, batch, q, store, optional(sinks), out->typed_data());
  return ffi::Error::Success();
}

// Writes nothing. Memory that XLA has just got from the system comes into being page by page, as it is first written to:
// huge pages where there are some.
ffi::Error untouched(ffi::Result<ffi::AnyBuffer> out) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  uintptr_t begin = reinterpret_cast<uintptr_t>(out->untyped_data()), end = begin + out->size_bytes();
  begin = (begin + kPage - 1) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // else small ones will do
#endif
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxcb

#define JAXCB_FLOATS Arg<jaxcb::Floats>()
#define JAXCB_INTS Arg<jaxcb::Ints>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcb_product, jaxcb::product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .JAXCB_FLOATS  // x
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .JAXCB_FLOATS  // scales
                                  .JAXCB_FLOATS  // biases
                                  .JAXCB_FLOATS  // norms
                                  .JAXCB_FLOATS  // residual
                                  .JAXCB_INTS    // layer
                                  .JAXCB_INTS    // num_rows
                                  .Ret<jaxcb::Floats>()
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcb_grouped_product, jaxcb::grouped_product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .JAXCB_FLOATS  // x
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .JAXCB_FLOATS  // scales
                                  .JAXCB_FLOATS  // norms
                                  .JAXCB_INTS    // starts
                                  .JAXCB_INTS    // layer
                                  .Ret<jaxcb::Floats>()
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcb_attention, jaxcb::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .JAXCB_FLOATS  // q
                                  .JAXCB_FLOATS  // sinks
                                  .JAXCB_INTS    // query_starts
                                  .JAXCB_INTS    // context_lens
                                  .JAXCB_INTS    // block_tables
                                  .JAXCB_INTS    // layer
                                  .JAXCB_INTS    // window
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .JAXCB_FLOATS  // scales
                                  .Ret<jaxcb::Floats>()
                                  .Attr<bool>("pairs")
                                  .Attr<int64_t>("num_layers")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcb_place_and_attend, jaxcb::place_and_attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .JAXCB_FLOATS  // qkv
                                  .JAXCB_FLOATS  // cos
                                  .JAXCB_FLOATS  // sin
                                  .JAXCB_FLOATS  // q_norm
                                  .JAXCB_FLOATS  // k_norm
                                  .JAXCB_FLOATS  // sinks
                                  .JAXCB_INTS    // query_starts
                                  .JAXCB_INTS    // context_lens
                                  .JAXCB_INTS    // block_tables
                                  .JAXCB_INTS    // layer
                                  .JAXCB_INTS    // window
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .JAXCB_FLOATS  // scales
                                  .Ret<jaxcb::Floats>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<jaxcb::Floats>()  // scales
                                  .Attr<bool>("pairs")
                                  .Attr<int64_t>("num_heads")
                                  .Attr<int64_t>("num_layers")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcb_untouched, jaxcb::untouched, xla::ffi::Ffi::Bind().Ret<xla::ffi::AnyBuffer>());
