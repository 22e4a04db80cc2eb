// Products with matrices of packed integers: 16 rows of weights together, one to a lane, so that no sum runs across
// lanes. triton_ops/packed.py describes the layout.
//
// In float32 the weights become floats and the arithmetic is that of floats. In 16 bits the inputs are rounded to 8
// bits, or weights to bfloat16 where many rows are multiplied by tiles.
#pragma once

#include <ATen/ops/empty.h>

#include "packed_rounded.h"
#include "packed_tiles.h"
#include "tile_product.h"

namespace nanoserve {

// Columns first to after of 16 rows as floats, a column to a row of `panel`, whose rows are `stride` apart.
template <int64_t Bits>
inline void dequantize_panel(
    const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, float* panel, int64_t stride) {
  const auto write = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, auto half)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
    for (int64_t part = 0; part < kParts; ++part) {
      const Vec scales = Vec::loadu(numbers.scales + part * kLanes);
      const Vec minimums =
          format.has_minimums() ? Vec::loadu(numbers.minimums + part * kLanes) : scales * Vec(format.zero);
      c10::ForcedUnroll<kWidth<Bits> / kQuad>{}([&](auto quad) C10_ALWAYS_INLINE_ATTRIBUTE {
        const Ints weights = unpack<Bits, half * kQuad + quad>(codes, part);
        for (int64_t i = 0; i < kQuad; ++i) {
          Ints code = (weights << Ints(static_cast<int32_t>(24 - 8 * i))) >> Ints(24);
          if constexpr (Bits != 8) code = code & Ints(0xff);
          const Vec value = at::vec::convert_to_fp_of_same_size<float>(code) * scales - minimums;
          value.store(panel + (column - first + quad * kQuad + i) * stride + part * kLanes);
        }
      });
    }
  };
  for_each_run<Bits>(format, packed, first, after, write);
}

template <typename Body>
inline void with_bits(int64_t bits, const Body& body) {
  switch (bits) {
    case 4: return body.template operator()<4>();
    case 5: return body.template operator()<5>();
    case 6: return body.template operator()<6>();
    default: return body.template operator()<8>();
  }
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

#if defined(NANOSERVE_TILES)
// Measured on 2 cores with AVX-512 VNNI and AMX. Up to kMostVectorRows inputs, sums of vectors are as fast as those of
// tiles; runs of 16 columns, of 6 bits, fill a quarter of a tile, and gain nothing. Beyond kMostRoundedRows it is faster
// to make bfloat16 of the weights.
constexpr int64_t kMostVectorRows = 12;
template <int64_t Bits>
constexpr int64_t kMostRoundedRows = Bits == 6 ? 16 : 32;
#endif

// In 16 bits, by the kernel that is fastest for so many rows. Both that round inputs to 8 bits give the same bits.
template <int64_t Bits, typename Number>
void multiply_packed(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const Number* biases,
    at::Tensor& out) {
#if defined(NANOSERVE_TILES)
  if (has_tiles()) {
    if (input.size(0) > kMostRoundedRows<Bits> && !batch_invariant)
      return multiply_packed_by_tiles<Bits>(format, input, packed, biases, out);
    if constexpr (Bits != 6)
      if (input.size(0) > kMostVectorRows)
        return multiply_packed_rounded<Bits, TileKernel<Bits>>(format, input, packed, biases, out);
  }
#endif
  multiply_packed_rounded<Bits, VectorKernel<Bits>>(format, input, packed, biases, out);
}

inline at::Tensor packed_linear(
    const at::Tensor& input, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t columns,
    int64_t bits, int64_t group, int64_t scale, int64_t offset, int64_t zero) {
  const PackedFormat format{bits, group, scale, offset, zero};
  TORCH_CHECK(
      (bits == 6 ? group == 16 : group % kPackedColumns == 0 && (bits == 4 || bits == 5 || bits == 8)),
      "packed_linear: no implementation for ", bits, " bits in groups of ", group);
  TORCH_CHECK(
      input.dim() == 2 && packed.dim() == 2 && packed.scalar_type() == at::kByte && packed.stride(1) == 1 &&
          input.size(1) % format.span() == 0 && packed.size(0) == divide_up(columns, kPackedRows) &&
          packed.size(1) == input.size(1) / format.span() * format.cell_bytes(),
      "packed_linear: input [M, K] and packed rows of K columns are needed, not ", input.sizes(), " and ",
      packed.sizes());
  const at::Tensor rows = input.contiguous(), added = bias ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty({input.size(0), columns}, input.options());
  const auto rounded = [&](auto number) {
    using Number = decltype(number);
    with_bits(bits, [&]<int64_t Bits>() {
      multiply_packed<Bits>(format, rows, packed, bias ? added.const_data_ptr<Number>() : nullptr, out);
    });
  };
  switch (input.scalar_type()) {
    case at::kFloat:
      multiply_packed_exact(format, rows, packed, bias ? added.const_data_ptr<float>() : nullptr, out);
      break;
    case at::kBFloat16: rounded(at::BFloat16()); break;
    case at::kHalf: rounded(at::Half()); break;
    default: TORCH_CHECK(false, "packed_linear: no implementation for ", input.scalar_type());
  }
  return out;
}

}  // namespace nanoserve
