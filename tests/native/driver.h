// What programs that drive the kernels without XLA share: threads, random numbers, and arrays of them that are exactly as
// large as they must be.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "product.h"

using namespace jaxcb;

class Threads : public Pool {
 public:
  explicit Threads(int count) {
    for (int i = 1; i < count; i++) workers_.emplace_back([this] { work(); });
  }
  ~Threads() override {
    { std::lock_guard lock(mutex_); stop_ = true; }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  int64_t num_threads() const override { return static_cast<int64_t>(workers_.size()) + 1; }
  void schedule(std::function<void()> task) override {
    { std::lock_guard lock(mutex_); tasks_.push_back(std::move(task)); }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> workers_;
  bool stop_ = false;
};

inline thread_local std::mt19937 rng;

inline int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
template <class T> T one_of(std::initializer_list<T> list) { return list.begin()[between(0, list.size() - 1)]; }

// A heap block of its own, so that a step past either end is seen.
inline std::unique_ptr<float[]> floats(int64_t n) {
  std::unique_ptr<float[]> out(new float[n]);
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<float>(between(-1000, 1000)) / 1000;
  return out;
}

inline int64_t bytes_of(Number type) { return type == Number::kF32 ? 4 : type == Number::kS8 ? 1 : 2; }
inline std::unique_ptr<char[]> numbers(int64_t n, Number type) {
  std::unique_ptr<char[]> out(new char[n * bytes_of(type)]());
  if (type == Number::kF32) memcpy(out.get(), floats(n).get(), n * 4);
  return out;
}
