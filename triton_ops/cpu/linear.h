// The product of rows with a matrix stored in 16 bits. Few rows are bound by how fast the matrix is read, once.
//
// With up to kFewRows of them every sum runs lane by lane over the whole depth before the lanes are added: the result
// of a row does not depend on the other rows.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "tile_product.h"
#include "tiled_linear.h"

namespace nanoserve {

// Inputs and rows of weights whose sums stay in registers together. Beyond kFewRows inputs a product that needs no sum
// over lanes is faster: of wide lanes sooner.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kInputsAtOnce = 6, kWeightsAtOnce = 4, kFewRows = 20;
#else
constexpr int64_t kInputsAtOnce = 4, kWeightsAtOnce = 3, kFewRows = 48;
#endif
constexpr int64_t kWeightsOfOneInput = 4;
// 16-bit numbers of a cache line: the step of the innermost loop.
constexpr int64_t kStep = 32;
// Beyond this many inputs it is faster to make floats of the weights first.
constexpr int64_t kMostDirectInputs = 7;
// Rows of weights that a thread takes at a time where it reads them in order, and where it makes floats of them first.
constexpr int64_t kDirectRows = 96;
constexpr int64_t kPanelRows = 24;
// As many columns of those floats as the first cache holds. No power of two lies between two rows, or they would share
// the same places of the cache.
constexpr int64_t kPanelDepth = 256;
constexpr int64_t kPanelStride = kPanelDepth + 16;
// Numbers between those that are multiplied and those that are fetched meanwhile.
constexpr int64_t kFetchedAhead = 512;
// On a processor that multiplies in 16 bits itself, torch's product is faster beyond the inputs that one pass takes, and
// one of tiles sooner.
constexpr int64_t kFewRowsBesideTorch = kInputsAtOnce;
constexpr int64_t kFewRowsBesideTiles = 4;
// What is multiplied with more inputs at a time: rows of weights, and their columns.
constexpr int64_t kTransposedRows = 64;
constexpr int64_t kTransposedDepth = 128;

// Inputs as floats, rows `stride` apart, zeros behind each.
struct Inputs {
  const float* data;
  int64_t count, stride;
};

// `count` rows of weights as given, and the sums with every input: kLanes floats each, [inputs, count].
template <typename Number>
struct Share {
  const Number* weights;
  int64_t count, depth;
  float* sums;

  float* sum(int64_t input, int64_t row) const { return sums + (input * count + row) * kLanes; }
};

// Weights that are fetched while others are multiplied. More can be asked for than the memory brings at a time, so it
// is done evenly: `advance` numbers of each row at a step.
template <typename Number>
struct Fetch {
  const Number* place;
  int64_t stride, advance;
};

// Adds inputs[Count, depth] weights[Weights, depth]^T to vectors of sums that lie `input_sums` and `weight_sums` floats
// apart.
template <int64_t Count, int64_t Weights, typename Number, typename Fetched>
inline void add_products(
    const float* inputs, int64_t input_stride, const Number* weights, int64_t weight_stride, int64_t depth,
    Fetch<Fetched> fetch, float* sums, int64_t input_sums, int64_t weight_sums) {
  Vec totals[Count][Weights];
  for (int64_t m = 0; m < Count; ++m)
    for (int64_t n = 0; n < Weights; ++n) totals[m][n] = Vec::loadu(sums + m * input_sums + n * weight_sums);
  for (int64_t k = 0; k < depth; k += kStep) {
    for (int64_t n = 0; n < Weights; ++n) __builtin_prefetch(fetch.place + n * fetch.stride);
    fetch.place += fetch.advance;
    c10::ForcedUnroll<kStep / kLanes>{}([&](auto i) {
      const int64_t at = k + i / 2 * 2 * kLanes;
      Vec weight[Weights];
      for (int64_t n = 0; n < Weights; ++n) weight[n] = half_of_pair<i % 2>(weights + n * weight_stride + at);
      for (int64_t m = 0; m < Count; ++m) {
        const Vec input = Vec::loadu(inputs + m * input_stride + at + i % 2 * kLanes);
        for (int64_t n = 0; n < Weights; ++n) totals[m][n] = at::vec::fmadd(input, weight[n], totals[m][n]);
      }
    });
  }
  for (int64_t m = 0; m < Count; ++m)
    for (int64_t n = 0; n < Weights; ++n) totals[m][n].store(sums + m * input_sums + n * weight_sums);
}

// Calls body<count>(); a count beyond kInputsAtOnce is taken for that.
template <int64_t Count = kInputsAtOnce, typename Body>
inline void with_inputs(int64_t count, const Body& body) {
  if constexpr (Count > 1)
    if (count < Count) return with_inputs<Count - 1>(count, body);
  body.template operator()<Count>();
}

// Weights straight from memory: as many stretches of them as are multiplied together, each read from end to end.
// Returns how many rows are done; the few behind them are left over.
template <int64_t Count, int64_t Weights, typename Number>
inline int64_t add_directly(const Inputs& inputs, const Share<Number>& share) {
  const int64_t apart = share.count / Weights, stride = apart * share.depth;
  for (int64_t n = 0; n < apart; ++n) {
    const Number* weights = share.weights + n * share.depth;
    add_products<Count, Weights>(
        inputs.data, inputs.stride, weights, stride, share.depth, Fetch<Number>{weights + kFetchedAhead, stride, kStep},
        share.sum(0, n), share.count * kLanes, apart * kLanes);
  }
  return apart * Weights;
}

// The same for some more inputs: they pass the weights by a few at a time. Each time fetches as much of the rows that
// come next.
template <int64_t Weights, typename Number>
inline int64_t add_in_passes(const Inputs& inputs, const Share<Number>& share) {
  const int64_t apart = share.count / Weights, stride = apart * share.depth;
  const int64_t advance = divide_up(kStep, divide_up(inputs.count, kInputsAtOnce));
  for (int64_t n = 0; n < apart; ++n) {
    const Number* weights = share.weights + n * share.depth;
    const Number* fetched = weights + share.depth;
    for (int64_t m = 0; m < inputs.count; m += kInputsAtOnce, fetched += share.depth / kStep * advance)
      with_inputs(inputs.count - m, [&]<int64_t Count>() {
        add_products<Count, Weights>(
            inputs.data + m * inputs.stride, inputs.stride, weights, stride, share.depth,
            Fetch<Number>{fetched, stride, advance}, share.sum(m, n), share.count * kLanes, apart * kLanes);
      });
  }
  return apart * Weights;
}

// Rows of weights from `first` on, at most kPanelRows, times any number of inputs: they become floats once, in a core's
// cache.
template <typename Number>
inline void add_panels(const Inputs& inputs, const Share<Number>& share, int64_t first) {
  alignas(64) static thread_local float panel[kPanelRows * kPanelStride];
  const int64_t depth = share.depth, count = share.count - first;
  const Number* weights = share.weights + first * depth;
  for (int64_t k = 0; k < depth; k += kPanelDepth) {
    const int64_t width = std::min(kPanelDepth, depth - k), padded = round_up(width, kStep);
    for (int64_t n = 0; n < count; ++n) {
      convert_scaled_pairs(weights + n * depth + k, panel + n * kPanelStride, width, 1.0f);
      std::fill(panel + n * kPanelStride + width, panel + n * kPanelStride + padded, 0.0f);
    }
    Fetch<Number> fetch{k + width < depth ? weights + k + width : weights + count * depth, depth, 0};
    fetch.advance = divide_up(kStep, divide_up(inputs.count, kInputsAtOnce));
    for (int64_t m = 0; m < inputs.count; m += kInputsAtOnce, fetch.place += padded / kStep * fetch.advance)
      with_inputs(inputs.count - m, [&]<int64_t Count>() {
        const auto add = [&]<int64_t Weights>(int64_t n) {
          for (; n + Weights <= count; n += Weights)
            add_products<Count, Weights>(
                inputs.data + m * inputs.stride + k, inputs.stride, panel + n * kPanelStride, kPanelStride, padded,
                Fetch<Number>{fetch.place + n * depth, depth, fetch.advance}, share.sum(m, first + n),
                share.count * kLanes, kLanes);
          return n;
        };
        add.template operator()<1>(add.template operator()<kWeightsAtOnce>(0));
      });
  }
}

template <typename Number>
inline void add_all(const Inputs& inputs, const Share<Number>& share, bool directly) {
  int64_t done = 0;
  if (directly && inputs.count == 1)
    done = add_directly<1, kWeightsOfOneInput>(inputs, share);
  else if (directly && inputs.count <= kInputsAtOnce)
    with_inputs(inputs.count, [&]<int64_t Count>() { done = add_directly<Count, kWeightsAtOnce>(inputs, share); });
  else if (directly)
    done = add_in_passes<kWeightsAtOnce>(inputs, share);
  if (done < share.count) add_panels(inputs, share, done);
}

template <typename Number>
void multiply_few_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = weight.size(0);
  const int64_t padded = round_up(depth, kStep), stride = padded + 16;
  const Number* biases = bias.defined() ? bias.const_data_ptr<Number>() : nullptr;
  Number* outputs = out.mutable_data_ptr<Number>();
  const at::Tensor exact = at::empty({rows, stride}, input.options().dtype(at::kFloat));
  float* inputs = exact.mutable_data_ptr<float>();
  for (int64_t m = 0; m < rows; ++m) {
    convert_scaled_pairs(input.const_data_ptr<Number>() + m * depth, inputs + m * stride, depth, 1.0f);
    std::fill(inputs + m * stride + depth, inputs + m * stride + padded, 0.0f);
  }
  const bool directly = rows <= kMostDirectInputs && depth % kStep == 0;
  const int64_t most = directly ? kDirectRows : kPanelRows;
  share_out(divide_up(columns, most), rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    const int64_t first = item * most, count = std::min(most, columns - first);
    float* sums = Scratch(memory).take((rows * count + kLanes) * kLanes);
    std::fill(sums, sums + (rows * count + kLanes) * kLanes, 0.0f);
    const Number* weights = weight.const_data_ptr<Number>() + first * depth;
    add_all(Inputs{inputs, rows, stride}, Share<Number>{weights, count, depth, sums}, directly);
    for (int64_t m = 0; m < rows; ++m) {
      float products[kDirectRows];
      for (int64_t n = 0; n < count; n += kLanes) {
        Vec vectors[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) vectors[i] = Vec::loadu(sums + (m * count + n + i) * kLanes);
        sums_of_lanes(vectors).store(products + n);
      }
      if (biases)
        for (int64_t n = 0; n < count; ++n) products[n] += static_cast<float>(biases[first + n]);
      convert_back(products, outputs + m * columns + first, count);
    }
  });
}

// `count` rows of weights from column `first` on, as floats with the columns first: [columns, kTransposedRows], padded
// with zeros.
template <typename Number>
void transpose_panel(
    const Number* weights, int64_t count, int64_t depth, int64_t first, int64_t columns, float* panel) {
  float square[kTransposed * kTransposed];
  for (int64_t n = 0; n < kTransposedRows; n += kTransposed)
    for (int64_t k = 0; k < columns; k += kTransposed) {
      const int64_t width = std::min(kTransposed, columns - k);
      std::fill(square, square + kTransposed * kTransposed, 0.0f);
      for (int64_t i = 0; i < std::min(kTransposed, count - n); ++i)
        convert_scaled(weights + (n + i) * depth + first + k, square + i * kTransposed, width, 1.0f);
      at::vec::transpose_mxn<float, kTransposed, kTransposed>(
          square, kTransposed, panel + k * kTransposedRows + n, kTransposedRows);
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
  share_out(divide_up(columns, kTransposedRows), rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* panel = Scratch(memory).take((round_up(kTransposedDepth, kTransposed) + rows) * kTransposedRows);
    float* products = panel + round_up(kTransposedDepth, kTransposed) * kTransposedRows;
    const int64_t first = item * kTransposedRows, count = std::min(kTransposedRows, columns - first);
    std::fill(products, products + rows * kTransposedRows, 0.0f);
    for (int64_t k = 0; k < depth; k += kTransposedDepth) {
      const int64_t width = std::min(kTransposedDepth, depth - k);
      transpose_panel(weights + first * depth, count, depth, k, width, panel);
      multiply<true>(
          inputs + k, depth, panel, kTransposedRows, products, kTransposedRows, rows, width, kTransposedRows);
    }
    for (int64_t m = 0; m < rows; ++m) {
      if (biases)
        for (int64_t n = 0; n < count; ++n) products[m * kTransposedRows + n] += static_cast<float>(biases[first + n]);
      convert_back(products + m * kTransposedRows, outputs + m * columns + first, count);
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
  const bool any = input.numel() > 0 && weight.numel() > 0;
  const int64_t most = multiplies_in(type) ? kFewRowsBesideTorch : kFewRows;
  const bool tiled = !batch_invariant && input.size(0) > kFewRowsBesideTiles && suits_tiles(input, weight);
  const bool few = !tiled && (input.size(0) <= most || batch_invariant);
  if (!same || !halves || !any || !weight.is_contiguous() || (!few && !tiled && multiplies_in(type)))
    return at::linear(input, weight, bias);
  const at::Tensor rows = input.contiguous(), added = bias ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty({input.size(0), weight.size(0)}, input.options());
  if (tiled)
    multiply_by_tiles(rows, weight, added, out);
  else if (type == at::kBFloat16)
    (few ? multiply_few_rows<at::BFloat16> : multiply_many_rows<at::BFloat16>)(rows, weight, added, out);
  else
    (few ? multiply_few_rows<at::Half> : multiply_many_rows<at::Half>)(rows, weight, added, out);
  return out;
}

}  // namespace nanoserve
