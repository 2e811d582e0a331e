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

// Of the parts of a loop over [0, n), one a thread: where one begins, and which one i lies in.
inline int64_t part_begin(int64_t part, int64_t n, int64_t threads) { return part * n / threads; }
inline int64_t part_of(int64_t i, int64_t n, int64_t threads) { return ((i + 1) * threads - 1) / n; }

// Calls f(i) for i in [0, n) from this thread and the pool's. Each goes through a part of its own, so that what it reads
// lies in one run and can be asked for ahead, and then helps the others with theirs: a helper that the pool starts late
// finds nothing left and can't hold the loop up; the caller only waits for items being worked on.
template <class F>
void parallel_for(Pool& pool, int64_t n, const F& f) {
  int64_t threads = std::min(pool.num_threads(), n);
  if (threads < 2) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Loop {
    const std::unique_ptr<Part[]> parts;
    const int64_t threads;
    const F& f;
    std::atomic<int64_t> done{0};
    Loop(int64_t threads, const F& f) : parts(new Part[threads]), threads(threads), f(f) {}
    void work(int64_t own) {
      for (int64_t t = 0; t < threads; t++) {
        Part& part = parts[(own + t) % threads];
        for (int64_t i; (i = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;) {
          f(i);
          done.fetch_add(1, std::memory_order_release);
        }
      }
    }
  };
  auto loop = std::make_shared<Loop>(threads, f);  // outlives the call: a late helper still reads the parts
  for (int64_t t = 0; t < threads; t++) {
    loop->parts[t].next.store(part_begin(t, n, threads), std::memory_order_relaxed);
    loop->parts[t].end = part_begin(t + 1, n, threads);
  }
  for (int64_t t = 1; t < threads; t++) pool.schedule([loop, t] { loop->work(t); });
  loop->work(0);
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
