// What the operators of this folder share: numbers of any format as vectors of float, and work handed out to threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

namespace nanoserve {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Whether a row's result must not depend on how many rows a call has, in the whole process; slower.
inline std::atomic<bool> batch_invariant{false};

// Below this many multiplications it takes longer to wake the other threads than to do all of it alone.
constexpr int64_t kWorthSharing = 1 << 17;
constexpr float kLog2E = 1.44269504f;

constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
constexpr int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

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

// Two vectors' worth of numbers that lie together, in whichever order is cheapest to have; `store_in_order` undoes it.
struct Pair {
  Vec first, second;
};

// Either vector of a pair.
template <int64_t Which, typename Number>
inline Vec half_of_pair(const Number* source) {
  return floats_at(source + Which * kLanes);
}

// A bfloat16 is the upper half of a float. Of two in a word of 32 bits, the first is shifted there, and the second lies
// there already.
template <int64_t Which>
inline Vec half_of_pair(const at::BFloat16* source) {
  using Words = at::vec::Vectorized<int32_t>;
  const Words words = Words::loadu(source);
  const Words upper = Which == 0 ? words << Words(16) : words & Words(static_cast<int32_t>(0xffff0000));
  return at::vec::cast<float, int32_t>(upper);
}

template <typename Number>
inline Pair pair_at(const Number* source) {
  return {half_of_pair<0>(source), half_of_pair<1>(source)};
}

// What came of numbers of that format by `pair_at`.
template <typename Number>
inline void store_in_order(Pair pair, float* target) {
  if constexpr (std::is_same_v<Number, at::BFloat16>)
    std::tie(pair.first, pair.second) = at::vec::interleave2(pair.first, pair.second);
  pair.first.store(target);
  pair.second.store(target + kLanes);
}

template <typename Number>
inline void prefetch_pair(const Number* source) {
  constexpr int64_t kLine = 64 / sizeof(Number);
  for (int64_t i = 0; i < 2 * kLanes; i += kLine) __builtin_prefetch(source + i);
}

// Lane i of the result is the sum of the lanes of vectors[i]; zero where there are fewer vectors than lanes.
template <size_t Count, int64_t Lanes = kLanes>
C10_ALWAYS_INLINE Vec sums_of_lanes(const Vec (&vectors)[Count]) {
  if constexpr (Lanes == 1) {
    return vectors[0];
  } else {
    Vec halves[(Count + 1) / 2];
    c10::ForcedUnroll<(Count + 1) / 2>{}([&](auto i) {
      const Vec other = 2 * i + 1 < Count ? vectors[std::min<size_t>(2 * i + 1, Count - 1)] : Vec(0.0f);
      const auto [even, odd] = at::vec::deinterleave2(vectors[2 * i], other);
      halves[i] = even + odd;
    });
    return sums_of_lanes<(Count + 1) / 2, Lanes / 2>(halves);
  }
}

#if defined(CPU_CAPABILITY_AVX2)
// The same sums in the same order, in half the instructions: they stay within halves of a vector until the last.
C10_ALWAYS_INLINE Vec sums_of_lanes(const Vec (&vectors)[kLanes]) {
  const auto quarter = [&](int64_t i) {
    return _mm256_hadd_ps(
        _mm256_hadd_ps(vectors[i], vectors[i + 1]), _mm256_hadd_ps(vectors[i + 2], vectors[i + 3]));
  };
  const __m256 first = quarter(0), second = quarter(4);
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}
#endif

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

// The same with the order of `pair_at` in every two vectors' worth.
template <typename Number>
inline void convert_scaled_pairs(const Number* source, float* target, int64_t count, float scale) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Pair pair = pair_at(source + i);
    (pair.first * Vec(scale)).store(target + i);
    (pair.second * Vec(scale)).store(target + i + kLanes);
  }
  convert_scaled(source + i, target + i, count - i, scale);
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
