// What the operators of this folder share: numbers of any format as vectors of float, and work handed out to threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace nanoserve {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Below this many multiplications it takes longer to wake the other threads than to do all of it alone.
constexpr int64_t kWorthSharing = 1 << 17;

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
inline int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

inline Vec floats_at(const float* source) { return Vec::loadu(source); }

template <typename Number>
inline Vec floats_at(const Number* source) {
  Vec numbers;
  at::vec::load_to_float<Number>(source, numbers);
  return numbers;
}

// The first `count` numbers, zeros behind them; nothing is read beyond.
template <typename Number>
inline Vec some_floats_at(const Number* source, int64_t count) {
  float numbers[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(source[i]);
  return Vec::loadu(numbers);
}

inline float sum_of_lanes(const Vec& vector) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, vector);
}

inline float largest_lane(const Vec& vector) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, vector);
}

// `count` numbers as floats, each multiplied by `scale`.
template <typename Number>
inline void convert_scaled(const Number* source, float* target, int64_t count, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) (floats_at(source + i) * Vec(scale)).store(target + i);
  for (; i < count; ++i) target[i] = static_cast<float>(source[i]) * scale;
}

template <typename Number>
inline void convert_back(const float* source, Number* target, int64_t count) {
  at::vec::convert(source, target, count);
}

// Memory of this thread that lasts from call to call: fresh pages would cost more than the work on them. It begins at a
// cache line, so that no vector lies in two.
class Scratch {
 public:
  explicit Scratch(std::vector<float>& memory) : memory_(memory) {}
  float* take(int64_t size) {
    constexpr size_t kLine = 64;
    if (static_cast<int64_t>(memory_.size()) < size + static_cast<int64_t>(kLine / sizeof(float)))
      memory_.resize(size + kLine / sizeof(float));
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (round_up(address, kLine) - address) / sizeof(float);
  }

 private:
  std::vector<float>& memory_;
};

// Items in order, each to the thread that is free next: ragged rows and a busy neighbour do not hold all others up.
template <typename Body>
void share_out(int64_t items, int64_t multiplications, const Body& body) {
  const int64_t threads = multiplications < kWorthSharing ? 1 : std::min<int64_t>(at::get_num_threads(), items);
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) body(item);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item);
  });
}

}  // namespace nanoserve
