// Runs the kernels over random shapes on threads of its own, for the sanitizers to watch: every array is exactly as
// large as it must be, and pages, rows and tokens that nobody may touch are not there.
//
//   sanitized SEED ROUNDS
#include <atomic>

#include "driver.h"

void one_product(Pool& pool) {
  Product p{};
  p.rows = between(1, 60), p.inputs = between(1, 70), p.outputs = 2 * between(1, 60);
  if (between(0, 9) == 0) p.rows = between(90, 200), p.inputs = between(760, 800);
  p.activation = one_of({Activation::kNone, Activation::kSilu, Activation::kGeluTanh});
  p.weight_type = one_of({Number::kF32, Number::kBF16, Number::kF16, Number::kS8});
  int64_t width = p.activation == Activation::kNone ? p.outputs : p.outputs / 2;
  auto x = floats(p.rows * p.inputs), scales = floats(p.outputs), bias = floats(p.outputs), norm = floats(p.inputs);
  auto residual = floats(p.rows * width), y = floats(p.rows * width);
  int64_t panels = p.activation == Activation::kNone ? (p.outputs + 15) / 16 : 2 * ((p.outputs / 2 + 15) / 16);
  auto weights = numbers(panels * 16 * p.inputs, p.weight_type);
  p.x = x.get(), p.y = y.get(), p.weights = weights.get(), p.eps = 1e-5f;
  p.scales = between(0, 1) ? scales.get() : nullptr;
  p.bias = between(0, 1) ? bias.get() : nullptr;
  p.norm = between(0, 1) ? norm.get() : nullptr;
  p.residual = p.activation == Activation::kNone && between(0, 1) ? residual.get() : nullptr;
  multiply(pool, p);
}

void one_attention(Pool& pool) {
  Shape s{};
  int64_t sequences = between(1, 5), tokens = 0;
  s.kv_heads = between(1, 3), s.heads = s.kv_heads * between(1, 6);
  s.head_dim = between(0, 1) ? 2 * between(1, 40) : one_of<int64_t>({32, 64, 96});
  s.page_size = one_of<int64_t>({8, 16, 64}), s.num_layers = between(1, 2), s.layer = s.num_layers - 1;
  s.window = between(0, 1) ? between(1, 100) : 0, s.soft_cap = between(0, 1) ? 20.0f : 0.0f, s.scale = 0.1f;
  std::vector<int32_t> starts{0}, contexts;
  int64_t pages = 0, width = 1;
  for (int64_t i = 0; i < sequences; i++) {
    int64_t context = between(0, 3) ? between(1, 150) : 0;
    int64_t count = context == 0 ? 0 : between(0, 2) ? 1 : between(1, std::min<int64_t>(context, 40));
    contexts.push_back(static_cast<int32_t>(context));
    tokens += count;
    starts.push_back(static_cast<int32_t>(tokens));
    width = std::max(width, (context + s.page_size - 1) / s.page_size);
  }
  std::vector<int32_t> tables(sequences * width, -1);  // -1: never to be looked up
  for (int64_t i = 0; i < sequences; i++) {
    for (int64_t p = 0; p * s.page_size < contexts[i]; p++) tables[i * width + p] = static_cast<int32_t>(pages++);
  }
  if (tokens == 0) return;
  s.tokens = tokens, s.num_flat_pages = pages * 2 * s.num_layers;
  Batch batch{starts.data(), contexts.data(), tables.data(), sequences, width};
  if (const char* reason = why_not(s, batch)) { std::printf("refused: %s\n", reason); std::exit(1); }
  Number type = one_of({Number::kF32, Number::kBF16, Number::kF16, Number::kS8});
  auto scales = floats(type == Number::kS8 ? s.num_flat_pages * s.page_size * s.kv_heads : 0);
  auto kv = numbers(s.num_flat_pages * s.page_size * s.kv_heads * s.head_dim, type);
  auto qkv = floats(tokens * (s.heads + 2 * s.kv_heads) * s.head_dim), q = floats(tokens * s.heads * s.head_dim);
  int64_t half = between(0, s.head_dim / 2);
  auto cos = floats(tokens * half), sin = floats(tokens * half), norm = floats(s.head_dim), sinks = floats(s.heads);
  auto out = floats(tokens * s.heads * s.head_dim);
  bool normed = between(0, 1);
  Projected p{qkv.get(), cos.get(), sin.get(), 2 * half, normed ? norm.get() : nullptr, normed ? norm.get() : nullptr, 1e-5f};
  Store store{kv.get(), type, type == Number::kS8 ? scales.get() : nullptr, holds_pairs(s, type) && between(0, 1)};
  place(pool, s, batch, p, store, q.get());
  attend(pool, s, batch, q.get(), store, between(0, 1) ? sinks.get() : nullptr, out.get());
}

// Of many threads or few, none of which comes before the loop has ended.
class Late : public Pool {
 public:
  explicit Late(int64_t count) : count_(count) {}
  int64_t num_threads() const override { return count_; }
  void schedule(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void come() {
    for (auto& task : tasks_) task();
  }

 private:
  int64_t count_;
  std::vector<std::function<void()>> tasks_;
};

void loops(Pool& pool) {
  for (int64_t threads : {1, 2, 3, 64, 100}) {
    for (int64_t n : {0, 1, 2, 7, 64, 200}) {
      Late late(threads);
      std::vector<std::atomic<int>> calls(n);
      auto count = [&](int64_t i) { calls[i]++; };
      parallel_for(late, n, count);
      late.come();  // and finds nothing to do
      parallel_for(pool, n, count);
      for (int64_t i = 0; i < n; i++) {
        int64_t parts = std::min(threads, n), part = part_of(i, n, parts);
        bool lies_in = part_begin(part, n, parts) <= i && i < part_begin(part + 1, n, parts);
        if (calls[i] != 2 || !lies_in) {
          std::fprintf(stderr, "%ld of %ld, %ld threads: %d calls, part %ld\n", i, n, threads, calls[i].load(), part);
          std::exit(1);
        }
      }
    }
  }
}

int main(int, char** arguments) {
  Threads pool(3);
  loops(pool);
  auto engine = [&](int seed) {
    rng.seed(seed);
    for (int i = 0; i < std::atoi(arguments[2]); i++) {
      one_product(pool);
      one_attention(pool);
    }
  };
  std::thread another(engine, std::atoi(arguments[1]) + 1);  // two engines of one process share XLA's pool
  engine(std::atoi(arguments[1]));
  another.join();
  std::puts("done");
}
