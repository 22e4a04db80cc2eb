// The selective scan of Mamba (arXiv 2312.00752): the state of a channel is a few numbers, each with a decay of its own.
//
// A thread takes some channels for all segments in order, one position after another: their states stay in its nearest
// cache, and so do the rates, which all rows share. The numbers of a state are lanes.
#pragma once

#include "recurrent_segments.h"

namespace nanoserve {

constexpr int64_t kUsualStateSize = 16;  // of Mamba, Jamba, and others
constexpr int64_t kChannelsAhead = 64;   // between the one that is computed and the one that is fetched
constexpr int kSecondCache = 2;          // the locality of what is fetched into the cache behind the nearest

template <typename Number>
struct SelectiveScan {
  Number* out;             // [T, channels]
  const Number* query;     // [T, state_size], rows `query_stride` apart; the key likewise
  const Number* key;
  const Number* value;     // [T, channels], rows `value_stride` apart
  const float* time_step;  // [T, channels]
  const float* rates;      // [channels, state_size]
  float* states;           // [slots, channels, state_size], slots `state_stride` apart
  int64_t channels, state_size, query_stride, key_stride, value_stride, state_stride;

  float* state(int64_t slot, int64_t channel) const { return states + slot * state_stride + channel * state_size; }
};

// 2^x for x of at most 0: a polynomial for the part behind the nearest whole number, times 2 to that number. It is exact
// at 0, where a factor decides what is left after a thousand positions, and off by 1.6e-7 at most elsewhere.
inline Vec power_of_two(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX512)
  const Vec rest = _mm512_reduce_ps(x, 0);
#else
  using Words = at::vec::Vectorized<int32_t>;
  constexpr float kExponentBias = 127.0f, kMantissaBits = 23;
  // To add this rounds to a whole number, and leaves it, biased, in the lowest bits.
  const Vec shift(1.5f * (1 << 23) + kExponentBias);
  const Vec clamped = at::vec::clamp_min(x, Vec(-kExponentBias));
  const Vec shifted = clamped + shift;
  const Vec rest = clamped - (shifted - shift);
#endif
  // Coefficients of the least relative error between -1/2 and 1/2 that leave 1 at 0.
  Vec sum = at::vec::fmadd(rest, Vec(1.3264727e-3f), Vec(9.6715127e-3f));
  sum = at::vec::fmadd(rest, sum, Vec(5.5507337e-2f));
  sum = at::vec::fmadd(rest, sum, Vec(0.24022242f));
  sum = at::vec::fmadd(rest, sum, Vec(0.69314698f));
  sum = at::vec::fmadd(rest, sum, Vec(1.0f));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(sum, x - rest);
#else
  return sum * at::vec::cast<float, int32_t>(at::vec::cast<int32_t, float>(shifted) << Words(kMantissaBits));
#endif
}

// What one position brings to some channels. Rows of numbers of a state are padded with zeros to whole vectors.
struct ScanStep {
  const float *query, *key;   // [state_size]
  const float *times, *added; // of each channel: its time step times log2(e), and times its value
  int64_t state_size;
};

// One channel: its state moves from one place to another, which may be the same. The lanes of the result add up to the
// channel's output. Vectors is how many whole ones a state is, or 0 for any number, the last of which may be less.
template <int64_t Vectors>
inline Vec advance_channel(
    const ScanStep& step, int64_t channel, const float* rates, const float* source, float* target) {
  const Vec time(step.times[channel]), added(step.added[channel]);
  Vec sum(0.0f);
  const auto advance = [&](int64_t n, int64_t count) {
    const auto load = [&](const float* from) {
      return Vectors ? Vec::loadu(from + n) : Vec::loadu(from + n, count);
    };
    const Vec factor = power_of_two(load(rates) * time);
    const Vec state = at::vec::fmadd(factor, load(source), added * Vec::loadu(step.key + n));
    Vectors ? state.store(target + n) : state.store(target + n, count);
    sum = at::vec::fmadd(state, Vec::loadu(step.query + n), sum);
  };
  if constexpr (Vectors > 0) {
    for (int64_t i = 0; i < Vectors; ++i) advance(i * kLanes, kLanes);
  } else {
    for (int64_t n = 0; n < step.state_size; n += kLanes) advance(n, std::min(kLanes, step.state_size - n));
  }
  return sum;
}

// One position of `count` channels, whose outputs become `sums`. Meanwhile the states that come next are fetched, if
// there are any, and the rates of channels further on.
template <int64_t Vectors>
inline void advance_channels(
    const ScanStep& step, int64_t count, const float* rates, const float* source, float* target, const float* next,
    float* sums) {
  const int64_t size = step.state_size;
  for (int64_t first = 0; first < count; first += kLanes) {
    Vec products[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t channel = first + i, place = channel * size;
      if (channel >= count) {
        products[i] = Vec(0.0f);
        continue;
      }
      if (next) {
        __builtin_prefetch(next + place, 0, kSecondCache);
        __builtin_prefetch(rates + place + kChannelsAhead * size, 0, kSecondCache);
      }
      products[i] = advance_channel<Vectors>(step, channel, rates + place, source + place, target + place);
    }
    sums_of_lanes(products).store(sums + first);
  }
}

// Channels from `first` on, at most kChannels, of every segment.
template <int64_t Vectors, typename Number>
void scan_channels(const SelectiveScan<Number>& problem, const std::vector<Segment>& segments, int64_t first) {
  static thread_local std::vector<float> memory;
  const WithoutDenormals mode;
  const int64_t size = problem.state_size, padded = round_up(size, kLanes);
  const int64_t count = std::min(kChannels, problem.channels - first);
  float* query = Scratch(memory).take(2 * padded + 3 * kChannels);
  float *key = query + padded, *times = key + padded, *added = times + kChannels, *sums = added + kChannels;
  std::fill(query, query + 2 * padded, 0.0f);
  const float* rates = problem.rates + first * size;
  for (size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    float* target = problem.state(segment.target, first);
    const float* source = target;
    if (segment.source < 0)
      std::fill(target, target + count * size, 0.0f);
    else
      source = problem.state(segment.source, first);
    // After the last position comes the next row, after the only row the channels further on.
    const bool is_read_next = s + 1 < segments.size() && segments[s + 1].source >= 0;
    const float* behind = is_read_next ? problem.state(segments[s + 1].source, first) : source + kChannelsAhead * size;
    for (int64_t token = segment.begin; token < segment.end; ++token) {
      const Number* values = problem.value + token * problem.value_stride + first;
      const float* time_steps = problem.time_step + token * problem.channels + first;
      convert_scaled(problem.query + token * problem.query_stride, query, size, 1.0f);
      convert_scaled(problem.key + token * problem.key_stride, key, size, 1.0f);
      convert_scaled(values, added, count, 1.0f);
      convert_scaled(time_steps, times, count, kLog2E);
      for (int64_t c = 0; c < count; ++c) added[c] *= time_steps[c];
      const float* next = token + 1 == segment.end ? behind : nullptr;
      advance_channels<Vectors>({query, key, times, added, size}, count, rates, source, target, next, sums);
      convert_back(sums, problem.out + token * problem.channels + first, count);
      source = target;
    }
  }
}

template <typename Number>
void scan(const SelectiveScan<Number>& problem, const std::vector<Segment>& segments, int64_t tokens) {
  const auto scan_some = [&](int64_t item) {
    if (problem.state_size == kUsualStateSize)
      scan_channels<kUsualStateSize / kLanes>(problem, segments, item * kChannels);
    else
      scan_channels<0>(problem, segments, item * kChannels);
  };
  share_out(
      divide_up(problem.channels, kChannels), 4 * tokens * problem.channels * problem.state_size, scan_some);
}

inline void selective_scan(
    const at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& time_step, const at::Tensor& rates, const at::Tensor& states, const at::Tensor& table) {
  const at::ScalarType type = out.scalar_type();
  for (const at::Tensor* tensor : {&query, &key, &value})
    TORCH_CHECK(
        tensor->scalar_type() == type && tensor->dim() == 2 && tensor->size(0) == out.size(0),
        "selective_scan: query, key, value must have a row for each token, in the dtype of out");
  const int64_t tokens = value.size(0), channels = value.size(1), state_size = key.size(1);
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == value.sizes() && query.sizes() == key.sizes(),
      "selective_scan: contiguous out like value, and keys like queries, needed");
  TORCH_CHECK(
      time_step.scalar_type() == at::kFloat && time_step.sizes() == value.sizes(),
      "selective_scan: time_step must be float32 [T, channels]");
  TORCH_CHECK(
      rates.scalar_type() == at::kFloat && rates.is_contiguous() && rates.dim() == 2 && rates.size(0) == channels &&
          rates.size(1) == state_size,
      "selective_scan: rates must be contiguous float32 [channels, state_size]");
  TORCH_CHECK(
      states.scalar_type() == at::kFloat && states.dim() == 3 && states.size(1) == channels &&
          states.size(2) == state_size && (states.size(0) == 0 || states[0].is_contiguous()),
      "selective_scan: states must be float32 [slots, channels, state_size], each slot contiguous");
  const std::vector<Segment> segments = read_segments(table, tokens, states.size(0));
  const auto last_together = [](const at::Tensor& tensor) {
    return tensor.stride(1) == 1 ? tensor : tensor.contiguous();
  };
  const at::Tensor queries = last_together(query), keys = last_together(key), values = last_together(value);
  const at::Tensor time_steps = time_step.contiguous();
  run_in_format(type, "selective_scan", [&](auto number) {
    using Number = decltype(number);
    scan(
        SelectiveScan<Number>{
            out.mutable_data_ptr<Number>(), queries.const_data_ptr<Number>(), keys.const_data_ptr<Number>(),
            values.const_data_ptr<Number>(), time_steps.const_data_ptr<float>(), rates.const_data_ptr<float>(),
            states.mutable_data_ptr<float>(), channels, state_size, queries.stride(0), keys.stride(0),
            values.stride(0), states.stride(0)},
        segments, tokens);
  });
}

}  // namespace nanoserve
