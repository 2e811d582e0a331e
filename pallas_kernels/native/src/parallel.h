// Loops over a pool of threads, and scratch memory that a thread keeps. The kernels start no thread: the pool is XLA's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

namespace jaxcb {

class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t num_threads() const = 0;  // the caller's included
  virtual void schedule(std::function<void()> task) = 0;
};

// Calls f(i) for i in [0, n) from this thread and the pool's. All of them draw from one counter, so a helper that the
// pool starts late finds nothing left and can't hold the loop up; the caller only waits for items being worked on.
template <class F>
void parallel_for(Pool& pool, int64_t n, const F& f) {
  int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  struct Loop {
    std::atomic<int64_t> next{0}, done{0};
    int64_t n;
    const F* f;
    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        (*f)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto loop = std::make_shared<Loop>();  // outlives the call: a late helper still reads `next`
  loop->n = n;
  loop->f = &f;
  for (int64_t i = 0; i < helpers; i++) pool.schedule([loop] { loop->work(); });
  loop->work();
  while (loop->done.load(std::memory_order_acquire) < n) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// Memory of one thread, kept between calls. Its contents are lost with the next get().
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  float* get(size_t num_floats) {
    if (num_floats > size_) {
      std::free(data_);
      size_ = (num_floats + 15) / 16 * 16;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace jaxcb
