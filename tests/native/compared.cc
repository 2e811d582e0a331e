// Runs the kernels over random shapes against plain loops in double precision, and looks that a row's bits are the same
// in any company. It needs no XLA, so that it can be built for another CPU and run by an emulator.
//
//   compared SEED ROUNDS
#include <cmath>

#include "driver.h"
#include "panels.h"

namespace {

int failures = 0;
double worst[3] = {};  // products, what is written into pages, attention: error over what is allowed

void check(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  failures++;
}

void within(double got, double wanted, double allowed, int which, const char* what) {
  double error = std::abs(got - wanted) / allowed;
  worst[which] = std::max(worst[which], error);
  check(error <= 1, what);  // NaN is never good
}

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

double number_at(const char* p, int64_t i, Number type) {
  switch (type) {
    case Number::kF32: return reinterpret_cast<const float*>(p)[i];
    case Number::kBF16: return float_of(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[i]) << 16);
    case Number::kS8: return reinterpret_cast<const int8_t*>(p)[i];
    case Number::kF16: break;
  }
  uint16_t bits = reinterpret_cast<const uint16_t*>(p)[i];
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return bits >> 15 ? -size : size;
}

// A random number of moderate size, exact in the type.
void set_number(char* p, int64_t i, Number type) {
  int64_t x = between(-120, 120);
  switch (type) {
    case Number::kF32: reinterpret_cast<float*>(p)[i] = static_cast<float>(x) / 7; return;
    case Number::kBF16: put(reinterpret_cast<bf16*>(p) + i, static_cast<float>(x) / 64); return;
    case Number::kF16: put(reinterpret_cast<f16*>(p) + i, static_cast<float>(x) / 64); return;
    case Number::kS8: reinterpret_cast<int8_t*>(p)[i] = static_cast<int8_t>(x); return;
  }
}

// Where an output's weight of an input lies in its panel (pallas_kernels/native/panels.py).
int64_t place_in_panel(int64_t output, int64_t input, int64_t inputs, Number type) {
  if (type != Number::kBF16) return input * kPanel + output;
#if defined(JAXCB_BF16_PRODUCTS)
  if (input < inputs / 2 * 2) return input / 2 * 2 * kPanel + 2 * output + input % 2;
  return input * kPanel + output;
#else
  return input * kPanel + (output < 8 ? 2 * output : 2 * output - 15);
#endif
}

double rounded_input(double x, Number type) {
#if defined(JAXCB_BF16_PRODUCTS)
  if (type == Number::kBF16) {
    bf16 bits;
    put(&bits, static_cast<float>(x));
    return number_at(reinterpret_cast<char*>(&bits), 0, type);
  }
#endif
  return x;
}

void products(Pool& pool) {
  Product p{};
  p.rows = between(1, 30), p.inputs = between(1, 70), p.outputs = 2 * between(1, 40);
  if (between(0, 4) == 0) p.rows = between(90, 110), p.inputs = between(760, 800), p.outputs = 2 * between(1, 9);
  p.activation = one_of({Activation::kNone, Activation::kSilu, Activation::kGeluTanh});
  p.weight_type = one_of({Number::kF32, Number::kBF16, Number::kF16, Number::kS8});
  bool gated = p.activation != Activation::kNone;
  int64_t width = gated ? p.outputs / 2 : p.outputs, panels = (width + kPanel - 1) / kPanel * (gated ? 2 : 1);
  auto x = floats(p.rows * p.inputs), scales = floats(p.outputs), bias = floats(p.outputs), norm = floats(p.inputs);
  auto residual = floats(p.rows * width), y = floats(p.rows * width);
  auto weights = numbers(panels * kPanel * p.inputs, p.weight_type);
  for (int64_t i = 0; i < panels * kPanel * p.inputs; i++) set_number(weights.get(), i, p.weight_type);
  p.x = x.get(), p.y = y.get(), p.weights = weights.get(), p.eps = 1e-5f;
  p.scales = p.weight_type == Number::kS8 || between(0, 1) ? scales.get() : nullptr;
  p.bias = between(0, 1) ? bias.get() : nullptr;
  p.norm = between(0, 1) ? norm.get() : nullptr;
  p.residual = !gated && between(0, 1) ? residual.get() : nullptr;
  multiply(pool, p);

  auto sum = [&](int64_t r, int64_t output, double* size) {
    double squares = 0, total = 0;
    const float* row = x.get() + r * p.inputs;
    for (int64_t i = 0; i < p.inputs; i++) squares += static_cast<double>(row[i]) * row[i];
    double factor = p.norm ? 1 / std::sqrt(squares / p.inputs + p.eps) : 1;
    int64_t in_half = output % width, panel = in_half / kPanel * (gated ? 2 : 1) + output / width;
    for (int64_t i = 0; i < p.inputs; i++) {
      double h = rounded_input(row[i] * factor * (p.norm ? norm[i] : 1), p.weight_type);
      int64_t place = place_in_panel(in_half % kPanel, i, p.inputs, p.weight_type);
      double term = h * number_at(weights.get(), panel * kPanel * p.inputs + place, p.weight_type);
      total += term, *size += std::abs(term);
    }
    double scale = p.scales ? scales[output] : 1;
    *size *= std::abs(scale);
    return total * scale + (p.bias ? bias[output] : 0);
  };
  for (int64_t r = 0; r < p.rows; r++) {
    for (int64_t o = 0; o < width; o++) {
      double size = 0, wanted = sum(r, o, &size), slack = 1;
      if (gated) {
        double up_size = 0, up = sum(r, width + o, &up_size), gate = wanted;
        double inner = std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate));
        wanted = p.activation == Activation::kSilu ? gate / (1 + std::exp(-gate)) : 0.5 * gate * (1 + inner);
        slack = std::abs(wanted) + std::abs(up) + 1, size += up_size, wanted *= up;
      }
      if (p.residual) wanted += residual[r * width + o];
      // A normalised number that is rounded to bfloat16 may fall on the other side.
      double rounding = p.norm && p.weight_type == Number::kBF16 && rounded_input(1.001, Number::kBF16) == 1 ? 4e-3 : 4e-6;
      within(y[r * width + o], wanted, rounding * (size * slack + std::abs(wanted) + 1), 0, "a product");
    }
  }

  int64_t one = between(0, p.rows - 1);  // the same row alone
  auto alone = floats(width);
  Product q = p;
  q.rows = 1, q.x = p.x + one * p.inputs, q.y = alone.get();
  if (p.residual) q.residual = p.residual + one * width;
  multiply(pool, q);
  check(memcmp(alone.get(), p.y + one * width, width * sizeof(float)) == 0, "a row's bits alone");
}

struct Cache {
  Shape s;
  Number type;
  bool pairs;
  std::unique_ptr<char[]> values;
  std::unique_ptr<float[]> scales;
  Store store() { return {values.get(), type, type == Number::kS8 ? scales.get() : nullptr, pairs}; }
  double at(int64_t page, int64_t offset, int64_t head, int which, int64_t d) const {
    int64_t flat = page * 2 * s.num_layers + 2 * s.layer + which;
    int64_t row = (flat * s.page_size + offset) * s.kv_heads + head, place = row * s.head_dim + d;
    if (pairs) {
      int64_t slab = flat * s.page_size * s.kv_heads + (offset / 16 * s.kv_heads + head) * 16, i = offset % 16;
      place = slab * s.head_dim + (which ? i / 2 * 2 * s.head_dim + 2 * d + i % 2 : d / 2 * 32 + 2 * i + d % 2);
    }
    double x = number_at(values.get(), place, type);
    return type == Number::kS8 ? x * scales[(flat * s.kv_heads + head) * s.page_size + offset] : x;
  }
};

void attentions(Pool& pool) {
  Shape s{};
  int64_t context = between(1, 150), count = between(0, 1) ? 1 : between(1, std::min<int64_t>(context, 40));
  s.tokens = count, s.kv_heads = between(1, 3), s.heads = s.kv_heads * between(1, 5);
  s.head_dim = between(0, 1) ? 2 * between(1, 20) : one_of<int64_t>({32, 64});
  s.page_size = one_of<int64_t>({8, 16, 64}), s.num_layers = between(1, 2), s.layer = s.num_layers - 1;
  s.window = between(0, 1) ? between(1, 100) : 0, s.soft_cap = between(0, 1) ? 20.0f : 0.0f, s.scale = 0.2f;
  int64_t pages = (context + s.page_size - 1) / s.page_size, D = s.head_dim, K = s.kv_heads, H = s.heads;
  s.num_flat_pages = pages * 2 * s.num_layers;
  std::vector<int32_t> starts{0, static_cast<int32_t>(count)}, contexts{static_cast<int32_t>(context)}, table(pages);
  for (int64_t p = 0; p < pages; p++) table[p] = static_cast<int32_t>(pages - 1 - p);
  Batch batch{starts.data(), contexts.data(), table.data(), 1, pages};
  check(why_not(s, batch) == nullptr, "the batch is refused");
  Number type = one_of({Number::kF32, Number::kBF16, Number::kF16, Number::kS8});
  int64_t rows = s.num_flat_pages * s.page_size * K;
  bool pairs = holds_pairs(s, type) && between(0, 1);
  Cache cache{s, type, pairs, numbers(rows * D, type), floats(rows)};
  for (int64_t i = 0; i < rows * D; i++) set_number(cache.values.get(), i, type);
  for (int64_t i = 0; i < rows; i++) cache.scales[i] = 0.01f;
  auto qkv = floats(count * (H + 2 * K) * D), q = floats(count * H * D), out = floats(count * H * D);
  int64_t half = between(0, D / 2);
  auto cos = floats(count * half), sin = floats(count * half), norm = floats(D), sinks = floats(H);
  bool normed = between(0, 1), sunk = between(0, 1);
  Projected p{qkv.get(), cos.get(), sin.get(), 2 * half, normed ? norm.get() : nullptr, normed ? norm.get() : nullptr, 1e-5f};
  place(pool, s, batch, p, cache.store(), q.get());
  attend(pool, s, batch, q.get(), cache.store(), sunk ? sinks.get() : nullptr, out.get());

  auto turned = [&](int64_t t, int64_t head, bool plain) {  // a head of the projection, normalised and rotated
    const float* row = qkv.get() + (t * (H + 2 * K) + head) * D;
    std::vector<double> x(row, row + D);
    if (plain) return x;
    double squares = 0;
    for (double a : x) squares += a * a;
    for (int64_t d = 0; normed && d < D; d++) x[d] *= norm[d] / std::sqrt(squares / D + 1e-5);
    for (int64_t i = 0; i < half; i++) {
      double a = x[i], b = x[half + i], c = cos[t * half + i], s = sin[t * half + i];
      x[i] = a * c - b * s, x[half + i] = b * c + a * s;
    }
    return x;
  };
  for (int64_t t = 0; t < count; t++) {
    int64_t position = context - count + t, page = table[position / s.page_size], offset = position % s.page_size;
    for (int64_t h = 0; h < 2 * K; h++) {  // keys, then values
      auto wanted = turned(t, H + h, h >= K);
      double largest = 0;
      for (double x : wanted) largest = std::max(largest, std::abs(x));
      for (int64_t d = 0; d < D; d++) {
        double step = type == Number::kF32 ? 1e-5 : type == Number::kBF16 ? 0x1p-8 : 0x1p-11;
        double allowed = type == Number::kS8 ? largest * 0.502 / 127 : step * std::abs(wanted[d]);
        within(cache.at(page, offset, h % K, h >= K, d), wanted[d], allowed + 1e-5, 1, "a key or value");
      }
    }
    for (int64_t h = 0; h < H; h++) {
      auto query = turned(t, h, false);
      std::vector<double> scores, values(D);
      double total = sunk ? std::exp(sinks[h]) : 0, size = 1;
      int64_t first = s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
      for (int64_t i = first; i <= position; i++) {
        double score = 0;
        int64_t where = table[i / s.page_size];
        for (int64_t d = 0; d < D; d++) score += query[d] * s.scale * cache.at(where, i % s.page_size, h / s.group(), 0, d);
        if (s.soft_cap > 0) score = s.soft_cap * std::tanh(score / s.soft_cap);
        double weight = std::exp(score);
        total += weight;
        for (int64_t d = 0; d < D; d++) {
          double value = cache.at(where, i % s.page_size, h / s.group(), 1, d);
          values[d] += weight * value, size = std::max(size, std::abs(value));
        }
      }
      // Where bfloat16 are multiplied, queries and weights are rounded to it.
      bool in_pairs = type == Number::kBF16 && rounded_input(1.001, Number::kBF16) == 1;
      double allowed = (in_pairs ? 2e-2 : 1e-4) * size;
      for (int64_t d = 0; d < D; d++) within(out[(t * H + h) * D + d], values[d] / total, allowed, 2, "attention");
    }
  }

  Shape one = s;  // the last token as a decode by itself, over the same pages
  one.tokens = 1;
  std::vector<int32_t> one_start{0, 1};
  Batch last{one_start.data(), contexts.data(), table.data(), 1, pages};
  auto alone = floats(H * D);
  attend(pool, one, last, q.get() + (count - 1) * H * D, cache.store(), sunk ? sinks.get() : nullptr, alone.get());
  check(memcmp(alone.get(), out.get() + (count - 1) * H * D, H * D * sizeof(float)) == 0, "a token's bits as a decode");
}

// The vector layer by itself: what kernels rarely meet.
void numbers_one_by_one() {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    uint16_t both[kLanes];
    std::fill_n(both, kLanes, static_cast<uint16_t>(bits));
    float lanes[kLanes];
    store(lanes, load(reinterpret_cast<bf16*>(both)));
    check(std::bit_cast<uint32_t>(lanes[kLanes - 1]) == bits << 16, "bfloat16 widened");
    if ((bits >> 10 & 31) == 31) continue;  // infinities and NaN of float16
    store(lanes, load(reinterpret_cast<f16*>(both)));
    check(lanes[0] == number_at(reinterpret_cast<char*>(both), 0, Number::kF16), "float16 widened");
    f16 back;
    put(&back, lanes[0]);
    check(back.bits == bits, "float16 rounded");
    f16 halves[kLanes];
    put(halves, load(lanes));
    check(halves[kLanes - 1].bits == bits, "a register of float16 rounded");
  }
  for (uint32_t i = 0; i < 1 << 16; i++) {  // among them ties, infinities and NaN
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, std::bit_cast<float>(i << 16 | (i % 3 == 0 ? 0x8000 : (i * 40503) & 0xffff)));
    bf16 one, row[kLanes];
    put(&one, lanes[0]);
    put(row, load(lanes));
    check(row[0].bits == one.bits && row[kLanes - 1].bits == one.bits, "a register of bfloat16 rounded");
  }
  for (float x = -100; x < 100; x += 0.37f) {
    float lanes[kLanes];
    double clipped = std::exp(static_cast<double>(std::min(88.3762626647949f, std::max(-87.3365478515625f, x))));
    store(lanes, exp(all(x)));
    check(std::abs(lanes[0] / clipped - 1) < 4e-7, "exp");
    store(lanes, tanh(all(x / 20)));
    check(std::abs(lanes[kLanes - 1] - std::tanh(static_cast<double>(x) / 20)) < 4e-7, "tanh");
    store(lanes, round(all(x)));
    check(lanes[0] == std::nearbyint(x), "round");
  }
  float quiet = NAN, lanes[kLanes];
  store(lanes, exp(all(quiet)));
  check(std::isnan(lanes[0]), "NaN stays NaN");
}

}  // namespace

int main(int, char** arguments) {
  Threads pool(2);
  rng.seed(std::atoi(arguments[1]));
  numbers_one_by_one();
  for (int i = 0; i < std::atoi(arguments[2]); i++) {
    products(pool);
    attentions(pool);
  }
  std::printf("of what is allowed: products %.3f, pages %.3f, attention %.3f\n", worst[0], worst[1], worst[2]);
  return failures ? 1 : 0;
}
