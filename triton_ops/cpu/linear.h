// The product of a few rows with a matrix stored in 16 bits: bound by how fast the matrix is read, once.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "tile_product.h"

namespace nanoserve {

// Rows of the weight matrix that a thread takes at a time, and that it multiplies together.
constexpr int64_t kWeightRows = 32;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kWeightsAtOnce = 4;
#else
constexpr int64_t kWeightsAtOnce = 2;
#endif
// Beyond this many rows of input the arithmetic takes longer than the reading, and a matrix product is the better tool;
// on a processor that multiplies in 16 bits itself, torch's.
constexpr int64_t kFewRows = 48;
constexpr int64_t kFewRowsBesideTorch = 4;
// Of the weights that are multiplied with many rows at a time: 64 columns of the result, 128 of the depth, in float32.
constexpr int64_t kPanel = 64;
constexpr int64_t kPanelDepth = 128;

// Weights that are fetched while others are multiplied. More can be asked for than the memory brings at a time, so it is
// done evenly: `advance` numbers of each row at a step.
template <typename Number>
struct Fetch {
  const Number* place;
  int64_t advance;
};

// out[Inputs, Weights] = inputs[Inputs, depth] weights[Weights, depth]^T, with `Chains` independent sums along depth so
// that additions do not wait for one another.
template <typename Number, int64_t Inputs, int64_t Weights, int64_t Chains>
inline void dot_products(
    const float* inputs, int64_t input_stride, const Number* weights, int64_t depth, Fetch<Number> fetch, float* out,
    int64_t out_stride) {
  Vec sums[Chains][Inputs][Weights];
  for (auto& chain : sums)
    for (auto& row : chain)
      for (auto& sum : row) sum = Vec(0.0f);
  int64_t k = 0;
  for (; k + Chains * kLanes <= depth; k += Chains * kLanes) {
    for (int64_t chain = 0; chain < Chains; ++chain) {
      const int64_t at = k + chain * kLanes;
      for (int64_t n = 0; n < Weights; ++n) {
        __builtin_prefetch(fetch.place + n * depth);
        const Vec weight = floats_at(weights + n * depth + at);
        for (int64_t m = 0; m < Inputs; ++m)
          sums[chain][m][n] = at::vec::fmadd(Vec::loadu(inputs + m * input_stride + at), weight, sums[chain][m][n]);
      }
      fetch.place += fetch.advance;
    }
  }
  for (; k < depth; k += kLanes) {
    const int64_t rest = std::min(kLanes, depth - k);
    for (int64_t n = 0; n < Weights; ++n) {
      const Number* place = weights + n * depth + k;
      const Vec weight = rest == kLanes ? floats_at(place) : some_floats_at(place, rest);
      for (int64_t m = 0; m < Inputs; ++m)
        sums[0][m][n] = at::vec::fmadd(Vec::loadu(inputs + m * input_stride + k), weight, sums[0][m][n]);
    }
  }
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t n = 0; n < Weights; ++n) {
      Vec sum = sums[0][m][n];
      for (int64_t chain = 1; chain < Chains; ++chain) sum = sum + sums[chain][m][n];
      out[m * out_stride + n] = sum_of_lanes(sum);
    }
}

// The same with any number of inputs. They pass the weights by a few at a time; each time fetches as much of the weights
// that come next.
template <typename Number, int64_t Weights>
inline void dot_some_inputs(
    const float* inputs, int64_t stride, int64_t count, const Number* weights, int64_t depth, float* out,
    int64_t out_stride) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int64_t kMost = Weights == 4 ? 6 : 4;
#else
  constexpr int64_t kMost = 4;
#endif
  const int64_t passes = std::max<int64_t>(1, count / kMost + __builtin_popcountll(count % kMost));
  Fetch<Number> fetch{weights + Weights * depth, divide_up(kLanes, passes)};
  const auto pass = [&]<int64_t Inputs, int64_t Chains>(int64_t m) {
    dot_products<Number, Inputs, Weights, Chains>(
        inputs + m * stride, stride, weights, depth, fetch, out + m * out_stride, out_stride);
    fetch.place += depth / kLanes * fetch.advance;
  };
  int64_t m = 0;
  if constexpr (kMost == 6)
    for (; m + 6 <= count; m += 6) pass.template operator()<6, 1>(m);
  for (; m + 4 <= count; m += 4) pass.template operator()<4, 1>(m);
  for (; m + 2 <= count; m += 2) pass.template operator()<2, 1>(m);
  for (; m < count; ++m) pass.template operator()<1, 2>(m);
}

// One thread's share: `count` rows of weights for all inputs. out is [inputs, count].
template <typename Number>
inline void multiply_share(
    const float* inputs, int64_t stride, int64_t num_inputs, const Number* weights, int64_t count, int64_t depth,
    float* out) {
  int64_t n = 0;
  for (; n + kWeightsAtOnce <= count; n += kWeightsAtOnce)
    dot_some_inputs<Number, kWeightsAtOnce>(inputs, stride, num_inputs, weights + n * depth, depth, out + n, count);
  for (; n < count; ++n)
    dot_some_inputs<Number, 1>(inputs, stride, num_inputs, weights + n * depth, depth, out + n, count);
}

template <typename Number>
void multiply_few_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = weight.size(0);
  const int64_t stride = round_up(depth, kLanes);
  const Number* weights = weight.const_data_ptr<Number>();
  const Number* biases = bias.defined() ? bias.const_data_ptr<Number>() : nullptr;
  Number* outputs = out.mutable_data_ptr<Number>();
  static thread_local std::vector<float> input_memory;
  float* inputs = Scratch(input_memory).take(rows * stride);
  for (int64_t m = 0; m < rows; ++m) {
    convert_scaled(input.const_data_ptr<Number>() + m * depth, inputs + m * stride, depth, 1.0f);
    std::fill(inputs + m * stride + depth, inputs + (m + 1) * stride, 0.0f);
  }
  share_out(divide_up(columns, kWeightRows), rows * columns * depth, [&](int64_t item) {
    const int64_t first = item * kWeightRows, count = std::min(kWeightRows, columns - first);
    float products[kFewRows * kWeightRows];
    multiply_share(inputs, stride, rows, weights + first * depth, count, depth, products);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < count; ++n) {
        const float added = biases ? static_cast<float>(biases[first + n]) : 0.0f;
        outputs[m * columns + first + n] = static_cast<Number>(products[m * count + n] + added);
      }
  });
}

// `count` rows of weights from column `first` on, as floats with the columns first: [columns, kPanel], padded with zeros.
template <typename Number>
void transpose_panel(
    const Number* weights, int64_t count, int64_t depth, int64_t first, int64_t columns, float* panel) {
  float square[kTransposed * kTransposed];
  for (int64_t n = 0; n < kPanel; n += kTransposed)
    for (int64_t k = 0; k < columns; k += kTransposed) {
      const int64_t width = std::min(kTransposed, columns - k);
      std::fill(square, square + kTransposed * kTransposed, 0.0f);
      for (int64_t i = 0; i < std::min(kTransposed, count - n); ++i)
        convert_scaled(weights + (n + i) * depth + first + k, square + i * kTransposed, width, 1.0f);
      at::vec::transpose_mxn<float, kTransposed, kTransposed>(square, kTransposed, panel + k * kPanel + n, kPanel);
    }
}

// Many rows on a processor without 16-bit arithmetic: each piece of the weights becomes floats once, in a core's cache,
// and is multiplied with all inputs there.
template <typename Number>
void multiply_many_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = weight.size(0);
  const Number* weights = weight.const_data_ptr<Number>();
  const Number* biases = bias.defined() ? bias.const_data_ptr<Number>() : nullptr;
  Number* outputs = out.mutable_data_ptr<Number>();
  const at::Tensor exact = input.to(at::kFloat);
  const float* inputs = exact.const_data_ptr<float>();
  share_out(divide_up(columns, kPanel), rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* panel = Scratch(memory).take((round_up(kPanelDepth, kTransposed) + rows) * kPanel);
    float* products = panel + round_up(kPanelDepth, kTransposed) * kPanel;
    const int64_t first = item * kPanel, count = std::min(kPanel, columns - first);
    std::fill(products, products + rows * kPanel, 0.0f);
    for (int64_t k = 0; k < depth; k += kPanelDepth) {
      const int64_t width = std::min(kPanelDepth, depth - k);
      transpose_panel(weights + first * depth, count, depth, k, width, panel);
      multiply<true>(inputs + k, depth, panel, kPanel, products, kPanel, rows, width, kPanel);
    }
    for (int64_t m = 0; m < rows; ++m) {
      if (biases)
        for (int64_t n = 0; n < count; ++n) products[m * kPanel + n] += static_cast<float>(biases[first + n]);
      convert_back(products + m * kPanel, outputs + m * columns + first, count);
    }
  });
}

inline bool multiplies_in(at::ScalarType type) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16)
  return type == at::kBFloat16;
#else
  return false;
#endif
}

inline at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::ScalarType type = weight.scalar_type();
  TORCH_CHECK(
      input.dim() == 2 && weight.dim() == 2 && input.size(1) == weight.size(1),
      "linear: input [M, K] and weight [N, K] are needed, not ", input.sizes(), " and ", weight.sizes());
  const bool same = input.scalar_type() == type && (!bias || bias->scalar_type() == type);
  const bool halves = type == at::kBFloat16 || type == at::kHalf;
  const bool few = input.size(0) <= (multiplies_in(type) ? kFewRowsBesideTorch : kFewRows);
  if (!same || !halves || !weight.is_contiguous() || weight.numel() == 0 || (!few && multiplies_in(type)))
    return at::linear(input, weight, bias);
  const at::Tensor rows = input.contiguous(), added = bias ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty({input.size(0), weight.size(0)}, input.options());
  if (type == at::kBFloat16)
    (few ? multiply_few_rows<at::BFloat16> : multiply_many_rows<at::BFloat16>)(rows, weight, added, out);
  else
    (few ? multiply_few_rows<at::Half> : multiply_many_rows<at::Half>)(rows, weight, added, out);
  return out;
}

}  // namespace nanoserve
