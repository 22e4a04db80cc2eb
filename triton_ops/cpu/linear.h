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
// With this many groups of inputs it is faster to make floats of the weights anew for each.
constexpr int64_t kMostDirectGroups = 2;
// Rows of weights that a thread takes at a time: where it reads them in order, and where it keeps their floats.
constexpr int64_t kDirectRows = 96;
constexpr int64_t kPanelRows = 48;
// Columns of those floats. Fewer would leave more of the first cache to the inputs, but sums go to memory after them.
constexpr int64_t kPanelDepth = 1024;
// Inputs that pass by the same floats, full groups of them. So many columns of more would not stay in the second cache.
constexpr int64_t kPanelInputs = 96;
static_assert(kPanelInputs % kInputsAtOnce == 0);
// Numbers between those that are multiplied and those that are fetched meanwhile.
constexpr int64_t kFetchedAhead = 512;
// On a processor that multiplies in 16 bits itself, torch's product is faster beyond the inputs that one pass takes, and
// one of tiles sooner.
constexpr int64_t kFewRowsBesideTorch = kInputsAtOnce;
constexpr int64_t kFewRowsBesideTiles = 4;
// What is multiplied with more inputs at a time: rows of weights, and their columns.
constexpr int64_t kTransposedRows = 64;
constexpr int64_t kTransposedDepth = 128;

// Inputs as floats, in groups of kInputsAtOnce and a last one of those that are left:
// [depth / kLanes][inputs of the group][kLanes] each, so that a product reads one stretch of memory.
struct Inputs {
  const float* data;
  int64_t count, depth;

  int64_t groups() const { return divide_up(count, kInputsAtOnce); }
};

// `count` rows of weights as given, and the sums with every input: kLanes floats each, [inputs, count].
template <typename Number>
struct Share {
  const Number* weights;
  int64_t count, depth;
  float* sums;

  float* sum(int64_t input, int64_t row) const { return sums + (input * count + row) * kLanes; }
};

// Rows of weights that are multiplied together, `stride` numbers apart. Meanwhile others are fetched, as far apart. More
// can be asked for than the memory brings at a time, so it is done evenly: `advance` numbers of each row at a step.
template <typename Number>
struct Rows {
  const Number* data;
  int64_t stride;
  const Number* fetched;
  int64_t advance;
};

// The vectors of sums of a product, and the floats from one to the next. New ones begin at zero.
struct Sums {
  float* data;
  int64_t from_input, from_weight;
  bool begun;
};

// Where a product has its weights from: the rows, the rows that it also leaves in a panel as floats, or that panel.
enum class Source { kRows, kRowsToPanel, kPanel };

// Adds inputs[Count, depth] weights[Weights, depth]^T. A panel is [depth / kLanes][Weights][kLanes].
template <Source From, int64_t Count, int64_t Weights, typename Number>
inline void add_products(const float* inputs, int64_t depth, Rows<Number> rows, float* panel, const Sums& sums) {
  Vec totals[Count][Weights];
  for (int64_t m = 0; m < Count; ++m)
    for (int64_t n = 0; n < Weights; ++n)
      totals[m][n] = sums.begun ? Vec::loadu(sums.data + m * sums.from_input + n * sums.from_weight) : Vec(0.0f);
  const float* end = inputs + depth * Count;
  for (; inputs != end; inputs += kStep * Count, panel += kStep * Weights) {
    for (int64_t n = 0; n < Weights; ++n) __builtin_prefetch(rows.fetched + n * rows.stride);
    c10::ForcedUnroll<kStep / kLanes>{}([&](auto i) {
      Vec weight[Weights];
      for (int64_t n = 0; n < Weights; ++n) {
        float* kept = panel + (i * Weights + n) * kLanes;
        if constexpr (From == Source::kPanel)
          weight[n] = Vec::loadu(kept);
        else
          weight[n] = half_of_pair<i % 2>(rows.data + n * rows.stride + i / 2 * 2 * kLanes);
        if constexpr (From == Source::kRowsToPanel) weight[n].store(kept);
      }
      for (int64_t m = 0; m < Count; ++m) {
        const Vec input = Vec::loadu(inputs + (i * Count + m) * kLanes);
        for (int64_t n = 0; n < Weights; ++n) totals[m][n] = at::vec::fmadd(input, weight[n], totals[m][n]);
      }
    });
    rows.data += kStep;
    rows.fetched += rows.advance;
  }
  for (int64_t m = 0; m < Count; ++m)
    for (int64_t n = 0; n < Weights; ++n) totals[m][n].store(sums.data + m * sums.from_input + n * sums.from_weight);
}

// Calls body<count>(); a count beyond kInputsAtOnce is taken for that.
template <int64_t Count = kInputsAtOnce, typename Body>
inline void with_inputs(int64_t count, const Body& body) {
  if constexpr (Count > 1)
    if (count < Count) return with_inputs<Count - 1>(count, body);
  body.template operator()<Count>();
}

// Weights straight from memory: as many stretches of them as are multiplied together, each read from end to end, while
// the inputs pass by a group at a time; then the few rows that are left over from `first` on, one by one.
template <int64_t Weights, typename Number>
inline void add_directly(const Inputs& inputs, const Share<Number>& share, int64_t first = 0) {
  const int64_t depth = share.depth, apart = (share.count - first) / Weights, stride = apart * depth;
  const int64_t ahead = inputs.groups() == 1 ? kFetchedAhead : depth;
  for (int64_t n = first; n < first + apart; ++n) {
    const Number* weights = share.weights + n * depth;
    Rows<Number> rows{weights, stride, weights + ahead, divide_up(kStep, inputs.groups())};
    for (int64_t m = 0; m < inputs.count; m += kInputsAtOnce, rows.fetched += depth / kStep * rows.advance)
      with_inputs(inputs.count - m, [&]<int64_t Count>() {
        add_products<Source::kRows, Count, Weights>(
            inputs.data + m * depth, depth, rows, nullptr,
            Sums{share.sum(m, n), share.count * kLanes, apart * kLanes, false});
      });
  }
  if constexpr (Weights > 1) add_directly<1>(inputs, share, first + apart * Weights);
}

// Some rows of weights from row n and column k on, times the inputs from `first` on. The first group of them leaves
// floats in a core's cache for the others. Together they fetch the rows that come next.
template <int64_t Weights, typename Number>
inline void add_by_panel(const Inputs& inputs, const Share<Number>& share, int64_t first, int64_t n, int64_t k) {
  alignas(64) static thread_local float panel[kWeightsAtOnce * kPanelDepth];
  const int64_t depth = std::min(kPanelDepth, share.depth - k);
  const Number* weights = share.weights + n * share.depth + k;
  const int64_t end = std::min(inputs.count, first + kPanelInputs), groups = divide_up(end - first, kInputsAtOnce);
  Rows<Number> rows{weights, share.depth, weights + Weights * share.depth, divide_up(kStep, groups)};
  for (int64_t m = first; m < end; m += kInputsAtOnce, rows.fetched += depth / kStep * rows.advance)
    with_inputs(end - m, [&]<int64_t Count>() {
      const float* group = inputs.data + m * inputs.depth + k * Count;
      const Sums sums{share.sum(m, n), share.count * kLanes, kLanes, k > 0};
      if (m == first)
        add_products<Source::kRowsToPanel, Count, Weights>(group, depth, rows, panel, sums);
      else
        add_products<Source::kPanel, Count, Weights>(group, depth, rows, panel, sums);
    });
}

template <typename Number>
inline void add_all(const Inputs& inputs, const Share<Number>& share) {
  if (inputs.count == 1) return add_directly<kWeightsOfOneInput>(inputs, share);
  if (inputs.groups() <= kMostDirectGroups) return add_directly<kWeightsAtOnce>(inputs, share);
  for (int64_t k = 0; k < share.depth; k += kPanelDepth)
    for (int64_t m = 0; m < inputs.count; m += kPanelInputs) {
      int64_t n = 0;
      for (; n + kWeightsAtOnce <= share.count; n += kWeightsAtOnce)
        add_by_panel<kWeightsAtOnce>(inputs, share, m, n, k);
      for (; n < share.count; ++n) add_by_panel<1>(inputs, share, m, n, k);
    }
}

// `count` rows with zeros behind them, [count, padded].
template <typename Number>
std::vector<Number> padded_rows(const Number* rows, int64_t count, int64_t depth, int64_t padded) {
  std::vector<Number> copies(count * padded, Number(0.0f));
  for (int64_t m = 0; m < count; ++m) std::copy_n(rows + m * depth, depth, copies.data() + m * padded);
  return copies;
}

// Lays rows out as `Inputs` has them.
template <typename Number>
void group_inputs(const Number* rows, int64_t count, int64_t depth, float* inputs) {
  for (int64_t m = 0; m < count; ++m) {
    const int64_t first = m / kInputsAtOnce * kInputsAtOnce, together = std::min(kInputsAtOnce, count - first);
    float* target = inputs + first * depth + (m - first) * kLanes;
    for (int64_t k = 0; k < depth; k += 2 * kLanes) {
      const Pair pair = pair_at(rows + m * depth + k);
      pair.first.store(target + k * together);
      pair.second.store(target + (k + kLanes) * together);
    }
  }
}

template <typename Number>
void multiply_few_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = weight.size(0);
  const int64_t padded = round_up(depth, kStep);
  const Number* biases = bias.defined() ? bias.const_data_ptr<Number>() : nullptr;
  Number* outputs = out.mutable_data_ptr<Number>();
  const at::Tensor exact = at::empty({rows, padded}, input.options().dtype(at::kFloat));
  const Number* given = input.const_data_ptr<Number>();
  const std::vector<Number> copied = depth < padded ? padded_rows(given, rows, depth, padded) : std::vector<Number>();
  group_inputs(depth < padded ? copied.data() : given, rows, padded, exact.mutable_data_ptr<float>());
  const Inputs inputs{exact.const_data_ptr<float>(), rows, padded};
  const int64_t most = inputs.groups() <= kMostDirectGroups ? kDirectRows : kPanelRows;
  share_out(divide_up(columns, most), rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    const int64_t first = item * most, count = std::min(most, columns - first);
    float* sums = Scratch(memory).take((rows * count + kLanes) * kLanes);
    std::fill_n(sums + rows * count * kLanes, kLanes * kLanes, 0.0f);  // the last vectors are added with some behind
    const Number* weights = weight.const_data_ptr<Number>() + first * depth;
    if (depth < padded) {
      const std::vector<Number> copies = padded_rows(weights, count, depth, padded);
      add_all(inputs, Share<Number>{copies.data(), count, padded, sums});
    } else {
      add_all(inputs, Share<Number>{weights, count, depth, sums});
    }
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
