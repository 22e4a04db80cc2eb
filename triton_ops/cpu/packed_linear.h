// Products with matrices of packed integers: 16 rows of weights together, one to a lane, so that no sum runs across
// lanes. triton_ops/packed.py describes the layout.
//
// In float32 the weights become floats and the arithmetic is that of floats. In 16 bits the inputs are rounded to 8 bits,
// with a scale for each token and 32 columns, and products are summed as integers.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "integer_sums.h"
#include "tile_product.h"

namespace nanoserve {

// Bytes of weights between those that are multiplied and those that are fetched meanwhile.
constexpr int64_t kAhead = 3072;
// Blocks of 16 rows that a thread takes at a time.
constexpr int64_t kBlocksTogether = 4;

enum ScaleKind : int64_t { kHalfScales, kBFloat16Scales, kFloatScales, kSuperScales };
enum OffsetKind : int64_t { kOneZero, kZeros, kMinimums, kSuperMinimums };

struct PackedFormat {
  int64_t bits, group, scale, offset, zero;

  int64_t span() const { return scale == kSuperScales ? 256 : group; }
  int64_t groups() const { return span() / group; }
  int64_t scale_bytes() const {
    if (scale == kSuperScales) return (groups() + 2) * kPackedRows;
    return groups() * kPackedRows * (scale == kFloatScales ? 4 : 2);
  }
  int64_t offset_bytes() const {
    constexpr int64_t kBytes[] = {0, 1, 2, 1};
    return groups() * kPackedRows * kBytes[offset] + (offset == kSuperMinimums ? 2 * kPackedRows : 0);
  }
  int64_t cell_bytes() const {
    return scale_bytes() + offset_bytes() + span() / kPackedColumns * code_bytes(bits);
  }
};

// Of one group of columns: a value of row n is code * scales[n] - minimums[n].
struct GroupNumbers {
  float scales[kPackedRows];
  float minimums[kPackedRows];
};

template <typename Number>
inline void read_numbers(const uint8_t* place, float* numbers) {
  Number stored[kPackedRows];
  std::memcpy(stored, place, sizeof(stored));
  convert_scaled(stored, numbers, kPackedRows, 1.0f);
}

template <typename Number>
inline void multiply_each(float* numbers, const uint8_t* place) {
  for (int64_t n = 0; n < kPackedRows; ++n)
    numbers[n] *= static_cast<float>(static_cast<Number>(place[n]));
}

inline void read_group(const PackedFormat& format, const uint8_t* cell, int64_t group, GroupNumbers& numbers) {
  switch (format.scale) {
    case kHalfScales: read_numbers<at::Half>(cell + group * 2 * kPackedRows, numbers.scales); break;
    case kBFloat16Scales: read_numbers<at::BFloat16>(cell + group * 2 * kPackedRows, numbers.scales); break;
    case kFloatScales: read_numbers<float>(cell + group * 4 * kPackedRows, numbers.scales); break;
    default:
      read_numbers<at::Half>(cell, numbers.scales);
      multiply_each<int8_t>(numbers.scales, cell + (2 + group) * kPackedRows);
  }
  const uint8_t* offsets = cell + format.scale_bytes();
  switch (format.offset) {
    case kOneZero:
      for (int64_t n = 0; n < kPackedRows; ++n) numbers.minimums[n] = numbers.scales[n] * format.zero;
      break;
    case kZeros:
      // Codes of 8 bits are signed, their zeros are stored without a sign.
      for (int64_t n = 0; n < kPackedRows; ++n) {
        const int32_t zero = offsets[group * kPackedRows + n] - (format.bits == 8 ? 128 : 0);
        numbers.minimums[n] = numbers.scales[n] * static_cast<float>(zero);
      }
      break;
    case kMinimums: read_numbers<at::Half>(offsets + group * 2 * kPackedRows, numbers.minimums); break;
    default:
      read_numbers<at::Half>(offsets, numbers.minimums);
      multiply_each<uint8_t>(numbers.minimums, offsets + (2 + group) * kPackedRows);
  }
}

// Calls body(column, codes, numbers, first, last) for every run of columns of one group within 32 columns: `codes` are of the
// 32 columns from `column` on, and halves first to last of them belong to the group.
template <typename Body>
inline void for_each_run(const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, const Body& body) {
  GroupNumbers numbers;
  const int64_t span = format.span(), header = format.scale_bytes() + format.offset_bytes();
  for (int64_t column = first; column < after; column += kPackedColumns) {
    const uint8_t* cell = packed + column / span * format.cell_bytes();
    const int64_t within = column % span;
    const uint8_t* codes = cell + header + within / kPackedColumns * code_bytes(format.bits);
    if (format.group < kPackedColumns) {
      for (int64_t half = 0; half < 2; ++half) {
        read_group(format, cell, within / format.group + half, numbers);
        body(column, codes, numbers, half, half);
      }
    } else {
      if (column == first || within % format.group == 0) read_group(format, cell, within / format.group, numbers);
      body(column, codes, numbers, 0, 1);
    }
  }
}

// Inputs rounded to 8 bits: inputs[m][k] is about values[m][k] * scales[m][k / 32].
struct RoundedInputs {
  std::vector<int8_t> values;
  std::vector<float> scales;  // [rows, depth / 32]
  std::vector<float> sums;    // [rows, depth / 16], of the rounded values times the scale
};

template <typename Number>
void round_inputs(const Number* source, int64_t rows, int64_t depth, RoundedInputs& rounded) {
  constexpr int64_t kHalf = kPackedColumns / 2;
  rounded.values.resize(rows * depth);
  rounded.scales.resize(rows * depth / kPackedColumns);
  rounded.sums.resize(rows * depth / kHalf);
  for (int64_t first = 0; first < rows * depth; first += kPackedColumns) {
    Vec numbers[kPackedColumns / kLanes];
    Vec largest(0.0f);
    for (int64_t i = 0; i < kPackedColumns / kLanes; ++i) {
      numbers[i] = floats_at(source + first + i * kLanes);
      largest = at::vec::maximum(largest, numbers[i].abs());
    }
    const float most = largest_lane(largest), scale = most / 127.0f;
    const Vec inverse(most > 0.0f ? 127.0f / most : 0.0f);
    rounded.scales[first / kPackedColumns] = scale;
    int32_t integers[kPackedColumns];
    for (int64_t i = 0; i < kPackedColumns / kLanes; ++i)
      at::vec::convert_to_int_of_same_size((numbers[i] * inverse).round()).store(integers + i * kLanes);
    for (int64_t half = 0; half < 2; ++half) {
      int32_t sum = 0;
      for (int64_t k = half * kHalf; k < (half + 1) * kHalf; ++k) {
        rounded.values[first + k] = static_cast<int8_t>(integers[k]);
        sum += integers[k];
      }
      rounded.sums[first / kHalf + half] = static_cast<float>(sum) * scale;
    }
  }
}

// out[Inputs, 16] = inputs[Inputs, depth] times 16 rows of weights.
template <int64_t Bits, int64_t Inputs>
inline void multiply_rounded(
    const PackedFormat& format, const uint8_t* packed, const RoundedInputs& inputs, int64_t row, int64_t depth,
    float* out) {
  Vec totals[Inputs][kParts];
  for (auto& total : totals)
    for (auto& vector : total) vector = Vec(0.0f);
  const auto add = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, int64_t first, int64_t last) {
    if (first == 0)
      for (int64_t line = 0; line < code_bytes(Bits) + kLine; line += kLine) __builtin_prefetch(codes + kAhead + line);
    for (int64_t part = 0; part < kParts; ++part) {
      Ints sums[Inputs];
      for (int64_t half = first; half <= last; ++half) {
        Ints weights[kQuad];
        unpack<Bits>(codes, half, part, weights);
        for (int64_t m = 0; m < Inputs; ++m) {
          const int8_t* place = inputs.values.data() + (row + m) * depth + column + half * kPackedRows;
          const Ints sum = sum_of_products<Bits>(weights, place);
          sums[m] = half == first ? sum : sums[m] + sum;
        }
      }
      const Vec scales = Vec::loadu(numbers.scales + part * kLanes);
      const Vec minimums = Vec::loadu(numbers.minimums + part * kLanes);
      for (int64_t m = 0; m < Inputs; ++m) {
        const int64_t place = (row + m) * depth + column;
        const float* halves = inputs.sums.data() + place / kPackedRows;
        const float sum = first == last ? halves[first] : halves[0] + halves[1];
        const Vec scaled = scales * Vec(inputs.scales[place / kPackedColumns]);
        Vec& total = totals[m][part];
        total = at::vec::fmadd(at::vec::convert_to_fp_of_same_size<float>(sums[m]), scaled, total);
        total = total - minimums * Vec(sum);
      }
    }
  };
  for_each_run(format, packed, 0, depth, add);
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t part = 0; part < kParts; ++part) totals[m][part].store(out + m * kPackedRows + part * kLanes);
}

template <int64_t Bits>
inline void multiply_all_rounded(
    const PackedFormat& format, const uint8_t* packed, const RoundedInputs& inputs, int64_t rows, int64_t depth,
    float* out) {
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) multiply_rounded<Bits, 4>(format, packed, inputs, m, depth, out + m * kPackedRows);
  for (; m + 2 <= rows; m += 2) multiply_rounded<Bits, 2>(format, packed, inputs, m, depth, out + m * kPackedRows);
  for (; m < rows; ++m) multiply_rounded<Bits, 1>(format, packed, inputs, m, depth, out + m * kPackedRows);
}

// Columns first to after of 16 rows as floats, a column to a row of `panel`, whose rows are `stride` apart.
template <int64_t Bits>
inline void dequantize_panel(
    const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, float* panel, int64_t stride) {
  const auto write = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, int64_t from, int64_t to) {
    for (int64_t half = from; half <= to; ++half)
      for (int64_t part = 0; part < kParts; ++part) {
        const Vec scales = Vec::loadu(numbers.scales + part * kLanes);
        const Vec minimums = Vec::loadu(numbers.minimums + part * kLanes);
        Ints weights[kQuad];
        unpack<Bits>(codes, half, part, weights);
        for (int64_t j = 0; j < kQuad; ++j)
          for (int64_t i = 0; i < kQuad; ++i) {
            const Ints top = weights[j] << Ints(static_cast<int32_t>(24 - 8 * i));
            Ints code = top >> Ints(24);
            if constexpr (Bits != 8) code = code & Ints(0xff);
            const int64_t row = column - first + half * kPackedRows + j * kQuad + i;
            const Vec value = at::vec::convert_to_fp_of_same_size<float>(code) * scales - minimums;
            value.store(panel + row * stride + part * kLanes);
          }
      }
  };
  for_each_run(format, packed, first, after, write);
}

template <typename Body>
inline void with_bits(int64_t bits, const Body& body) {
  switch (bits) {
    case 4: return body.template operator()<4>();
    case 5: return body.template operator()<5>();
    case 6: return body.template operator()<6>();
    case 8: return body.template operator()<8>();
    default: TORCH_CHECK(false, "packed_linear: no implementation for ", bits, " bits");
  }
}

template <typename Number>
void multiply_packed_rounded(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const Number* biases,
    at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = out.size(1), stride = packed.stride(0);
  static thread_local RoundedInputs inputs;
  round_inputs(input.const_data_ptr<Number>(), rows, depth, inputs);
  const RoundedInputs& shared = inputs;
  Number* outputs = out.mutable_data_ptr<Number>();
  const int64_t blocks = packed.size(0);
  share_out(divide_up(blocks, kBlocksTogether), rows * columns * depth / 4, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* products = Scratch(memory).take(rows * kPackedRows);
    for (int64_t block = item * kBlocksTogether; block < std::min(blocks, (item + 1) * kBlocksTogether); ++block) {
      with_bits(format.bits, [&]<int64_t Bits>() {
        multiply_all_rounded<Bits>(
            format, packed.const_data_ptr<uint8_t>() + block * stride, shared, rows, depth, products);
      });
      const int64_t first = block * kPackedRows, count = std::min(kPackedRows, columns - first);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < count; ++n) {
          const float added = biases ? static_cast<float>(biases[first + n]) : 0.0f;
          outputs[m * columns + first + n] = static_cast<Number>(products[m * kPackedRows + n] + added);
        }
    }
  });
}

inline void multiply_packed_exact(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const float* biases,
    at::Tensor& out) {
  constexpr int64_t kBlocks = 4, kWidth = kBlocks * kPackedRows, kDepth = 256;
  const int64_t rows = input.size(0), depth = input.size(1), columns = out.size(1), stride = packed.stride(0);
  const float* inputs = input.const_data_ptr<float>();
  float* outputs = out.mutable_data_ptr<float>();
  share_out(divide_up(packed.size(0), kBlocks), rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* panel = Scratch(memory).take((kDepth + rows) * kWidth);
    float* products = panel + kDepth * kWidth;
    std::fill(panel, products + rows * kWidth, 0.0f);
    const int64_t blocks = std::min(kBlocks, packed.size(0) - item * kBlocks);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t after = std::min(depth, k + kDepth);
      for (int64_t block = 0; block < blocks; ++block)
        with_bits(format.bits, [&]<int64_t Bits>() {
          const uint8_t* weights = packed.const_data_ptr<uint8_t>() + (item * kBlocks + block) * stride;
          dequantize_panel<Bits>(format, weights, k, after, panel + block * kPackedRows, kWidth);
        });
      multiply<true>(inputs + k, depth, panel, kWidth, products, kWidth, rows, after - k, kWidth);
    }
    const int64_t first = item * kWidth, count = std::min(kWidth, columns - first);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < count; ++n)
        outputs[m * columns + first + n] = products[m * kWidth + n] + (biases ? biases[first + n] : 0.0f);
  });
}

inline at::Tensor packed_linear(
    const at::Tensor& input, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t columns,
    int64_t bits, int64_t group, int64_t scale, int64_t offset, int64_t zero) {
  const PackedFormat format{bits, group, scale, offset, zero};
  TORCH_CHECK(
      input.dim() == 2 && packed.dim() == 2 && packed.scalar_type() == at::kByte && packed.stride(1) == 1 &&
          input.size(1) % format.span() == 0 && packed.size(0) == divide_up(columns, kPackedRows) &&
          packed.size(1) == input.size(1) / format.span() * format.cell_bytes(),
      "packed_linear: input [M, K] and packed rows of K columns are needed, not ", input.sizes(), " and ",
      packed.sizes());
  const at::Tensor rows = input.contiguous(), added = bias ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty({input.size(0), columns}, input.options());
  switch (input.scalar_type()) {
    case at::kFloat:
      multiply_packed_exact(format, rows, packed, bias ? added.const_data_ptr<float>() : nullptr, out);
      break;
    case at::kBFloat16:
      multiply_packed_rounded<at::BFloat16>(
          format, rows, packed, bias ? added.const_data_ptr<at::BFloat16>() : nullptr, out);
      break;
    case at::kHalf:
      multiply_packed_rounded<at::Half>(format, rows, packed, bias ? added.const_data_ptr<at::Half>() : nullptr, out);
      break;
    default: TORCH_CHECK(false, "packed_linear: no implementation for ", input.scalar_type());
  }
  return out;
}

}  // namespace nanoserve
