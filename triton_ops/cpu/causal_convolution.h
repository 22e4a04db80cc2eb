// Short causal convolutions: each channel over the last positions of its sequence.
//
// A thread takes some channels for all segments in order. Channels are lanes, so the last inputs and the weights, which
// lie with their channels first, are turned.
#pragma once

#include <optional>

#include "recurrent_segments.h"

namespace nanoserve {

template <typename Number>
struct Convolution {
  Number* out;           // [T, channels]
  const Number* inputs;  // [T, channels], rows `input_stride` apart
  const Number* weight;  // [channels, kernel_size]
  const Number* bias;    // [channels], or null
  Number* states;        // [slots, channels, kernel_size - 1], slots `state_stride` apart
  int64_t channels, kernel_size, input_stride, state_stride;
  bool silu;
};

// What the compiler can shuffle: a struct of 16 bits it cannot.
template <typename Number>
using Word = std::conditional_t<std::is_same_v<Number, float>, float, uint16_t>;

// source[count, Columns] -> target[Columns, kChannels]. Where Columns is known, the compiler makes shuffles of it; 0
// stands for any number.
template <int64_t Columns, typename Number>
inline void turn(const Number* source, int64_t count, int64_t any_columns, Number* target) {
  const int64_t columns = Columns ? Columns : any_columns;
  const auto* __restrict from = reinterpret_cast<const Word<Number>*>(source);
  auto* __restrict to = reinterpret_cast<Word<Number>*>(target);
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < columns; ++j) to[j * kChannels + c] = from[c * columns + j];
}

// The way back.
template <int64_t Columns, typename Number>
inline void turn_back(const Number* source, int64_t count, int64_t any_columns, Number* target) {
  const int64_t columns = Columns ? Columns : any_columns;
  const auto* __restrict from = reinterpret_cast<const Word<Number>*>(source);
  auto* __restrict to = reinterpret_cast<Word<Number>*>(target);
  for (int64_t c = 0; c < count; ++c)
    for (int64_t j = 0; j < columns; ++j) to[c * columns + j] = from[j * kChannels + c];
}

// One position of `count` channels: window[i] and weights[i] are rows of kChannels floats, the oldest first.
template <typename Number, typename Rows>
inline void convolve_position(
    const Rows& window, const float* weights, int64_t kernel_size, const float* bias, int64_t count, bool silu,
    float* sums, Number* out) {
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sum = Vec::loadu(bias + c);
    for (int64_t j = 0; j < kernel_size; ++j)
      sum = at::vec::fmadd(Vec::loadu(weights + j * kChannels + c), Vec::loadu(window(j) + c), sum);
    if (silu) sum = sum / (Vec(1.0f) + sum.neg().exp_u20());
    sum.store(sums + c);
  }
  convert_back(sums, out, count);
}

// Channels from `first` on, at most kChannels, of every segment. Kernel is the kernel's size, or 0 for any.
template <int64_t Kernel, typename Number>
void convolve_channels(const Convolution<Number>& problem, const std::vector<Segment>& segments, int64_t first) {
  constexpr int64_t kKept = Kernel ? Kernel - 1 : 0;
  static thread_local std::vector<float> memory;
  static thread_local std::vector<Number> turned;
  const int64_t kernel_size = Kernel ? Kernel : problem.kernel_size, kept = kernel_size - 1;
  const int64_t count = std::min(kChannels, problem.channels - first);
  turned.resize(kernel_size * kChannels);
  float* weights = Scratch(memory).take((2 * kernel_size + 2) * kChannels);
  float* window = weights + kernel_size * kChannels;
  float *bias = window + kernel_size * kChannels, *sums = bias + kChannels;
  turn<Kernel>(problem.weight + first * kernel_size, count, kernel_size, turned.data());
  convert_scaled(turned.data(), weights, kernel_size * kChannels, 1.0f);
  std::fill(bias, bias + kChannels, 0.0f);
  if (problem.bias) convert_scaled(problem.bias + first, bias, count, 1.0f);
  for (const Segment& segment : segments) {
    // The inputs before the segment and those of its tokens, in order, each kept until its row is taken again.
    const auto row = [&](int64_t place) { return window + place % kernel_size * kChannels; };
    const int64_t length = segment.end - segment.begin;
    if (segment.source < 0) {
      std::fill(window, window + kept * kChannels, 0.0f);
    } else {
      const Number* state = problem.states + segment.source * problem.state_stride + first * kept;
      turn<kKept>(state, count, kept, turned.data());
      convert_scaled(turned.data(), window, kept * kChannels, 1.0f);
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t token = segment.begin + i;
      const Number* inputs = problem.inputs + token * problem.input_stride + first;
      Number* out = problem.out + token * problem.channels + first;
      if (i + kPositionsAhead < length)
        for (int64_t c = 0; c < count; c += 64 / sizeof(Number)) {
          __builtin_prefetch(inputs + kPositionsAhead * problem.input_stride + c);
          __builtin_prefetch(out + kPositionsAhead * problem.channels + c, 1);
        }
      convert_scaled(inputs, row(i + kept), count, 1.0f);
      convolve_position(
          [&](int64_t j) { return row(i + j); }, weights, kernel_size, bias, count, problem.silu, sums, out);
    }
    for (int64_t j = 0; j < kept; ++j) convert_back(row(length + j), turned.data() + j * kChannels, kChannels);
    turn_back<kKept>(
        turned.data(), count, kept, problem.states + segment.target * problem.state_stride + first * kept);
  }
}

template <typename Number>
void convolve(const Convolution<Number>& problem, const std::vector<Segment>& segments, int64_t tokens) {
  const auto convolve_some = [&](int64_t item) {
    const int64_t first = item * kChannels;
    switch (problem.kernel_size) {
      case 3: return convolve_channels<3>(problem, segments, first);
      case 4: return convolve_channels<4>(problem, segments, first);
      default: return convolve_channels<0>(problem, segments, first);
    }
  };
  share_out(
      divide_up(problem.channels, kChannels), tokens * problem.channels * problem.kernel_size, convolve_some);
}

inline void causal_convolution(
    const at::Tensor& out, const at::Tensor& inputs, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& states, const at::Tensor& table, bool silu) {
  const at::ScalarType type = out.scalar_type();
  const int64_t tokens = inputs.size(0), channels = inputs.size(1), kernel_size = weight.size(1);
  for (const at::Tensor* tensor : {&inputs, &weight, &states})
    TORCH_CHECK(tensor->scalar_type() == type, "causal_convolution: inputs, weight, states and out differ in dtype");
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == inputs.sizes() && weight.is_contiguous() && weight.size(0) == channels,
      "causal_convolution: out [T, channels] and weight [channels, kernel_size] must be contiguous");
  TORCH_CHECK(
      !bias || (bias->scalar_type() == type && bias->is_contiguous() && bias->numel() == channels),
      "causal_convolution: the bias must be one contiguous number a channel, in the dtype of the inputs");
  TORCH_CHECK(
      states.dim() == 3 && states.size(1) == channels && states.size(2) == kernel_size - 1 &&
          (states.size(0) == 0 || states[0].is_contiguous()),
      "causal_convolution: states must be [slots, channels, kernel_size - 1], each slot contiguous");
  const std::vector<Segment> segments = read_segments(table, tokens, states.size(0));
  const at::Tensor rows = inputs.stride(1) == 1 ? inputs : inputs.contiguous();
  run_in_format(type, "causal_convolution", [&](auto number) {
    using Number = decltype(number);
    convolve(
        Convolution<Number>{
            out.mutable_data_ptr<Number>(), rows.const_data_ptr<Number>(), weight.const_data_ptr<Number>(),
            bias ? bias->const_data_ptr<Number>() : nullptr, states.mutable_data_ptr<Number>(), channels, kernel_size,
            rows.stride(0), states.stride(0), silu},
        segments, tokens);
  });
}

}  // namespace nanoserve
