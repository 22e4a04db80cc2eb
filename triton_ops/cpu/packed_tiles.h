// The product of many rows with a matrix of packed integers, on a processor that multiplies tiles (AMX). Some rows of
// weights become bfloat16 in a core's second cache, laid out as tiles, and are multiplied with all inputs there.
//
// Inputs stay as they are (float16 is rounded to bfloat16), weights are rounded to bfloat16, and sums are float32.
#pragma once

#include "amx_tiles.h"
#include "packed_format.h"

#if defined(NANOSERVE_TILES)

namespace nanoserve {

// Tiles of weights, and as many of inputs, whose products fill four registers: each tile that is loaded is multiplied
// twice.
constexpr int64_t kTilesAcross = 2;
constexpr int64_t kPairWidth = kTilesAcross * kTileSide;
constexpr int64_t kPairNumbers = kTilesAcross * kTileNumbers;
// The most blocks of 16 rows of weights that a thread unpacks at a time: with more, longer stretches of the result are
// written together, which are quicker than many short ones.
constexpr int64_t kPanelBlocks = 8;
// Rows of inputs that are multiplied with such a panel, if there are more: they stay in the second cache meanwhile.
constexpr int64_t kInputRowsTogether = 512;

// Two vectors of floats, rounded to bfloat16, and side by side in each lane.
inline __m512i bfloat16_pairs(__m512 first, __m512 second) {
  const __m512i places = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(places, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Unsigned codes, of a byte of each lane, become floats by two instructions: their bits go into the fraction of a power
// of two, kRaised, at which the fraction counts in ones. The floats are too large by that.
template <int64_t Bits>
constexpr int64_t kRaised = Bits == 8 ? 256 : 128;

template <int64_t Bits, int64_t Byte>
C10_ALWAYS_INLINE __m512 raised_codes(__m512i bytes) {
  constexpr int kLowestBit = Bits == 8 ? 15 : 16, kShift = kLowestBit - 8 * Byte, kAndOr = 0xea;
  if constexpr (kShift > 0) bytes = _mm512_slli_epi32(bytes, kShift);
  if constexpr (kShift < 0) bytes = _mm512_srli_epi32(bytes, -kShift);
  const __m512i power = _mm512_castps_si512(_mm512_set1_ps(kRaised<Bits>));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bytes, _mm512_set1_epi32(0xff << kLowestBit), power, kAndOr));
}

// A block of 16 rows as tiles: [depth / 32][16 pairs of columns][16 rows][2], every tile kPairNumbers behind the last.
template <int64_t Bits>
inline void dequantize_tiles(const PackedFormat& format, const uint8_t* packed, int64_t depth, at::BFloat16* tiles) {
  const auto write = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, auto half)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
    // Codes of 8 bits are signed: with the other sign bit they are unsigned, and 128 more.
    constexpr int64_t kTooLarge = kRaised<Bits> + (Bits == 8 ? 128 : 0);
    const Vec scales = Vec::loadu(numbers.scales);
    const Vec minimums = format.has_minimums() ? Vec::loadu(numbers.minimums) : scales * Vec(format.zero);
    const Vec offsets = at::vec::fmadd(scales, Vec(kTooLarge), minimums);
    at::BFloat16* target = tiles + column / kTileDepth * kPairNumbers + half * kTileNumbers / 2;
    c10::ForcedUnroll<kWidth<Bits> / kQuad>{}([&](auto quad) C10_ALWAYS_INLINE_ATTRIBUTE {
      __m512i bytes = unpack<Bits, half * kQuad + quad>(codes, 0);
      if constexpr (Bits == 8) bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
      c10::ForcedUnroll<kQuad / 2>{}([&](auto pair) C10_ALWAYS_INLINE_ATTRIBUTE {
        const __m512 first = _mm512_fmsub_ps(raised_codes<Bits, 2 * pair>(bytes), scales, offsets);
        const __m512 second = _mm512_fmsub_ps(raised_codes<Bits, 2 * pair + 1>(bytes), scales, offsets);
        _mm512_store_si512(target + (quad * kQuad / 2 + pair) * kTileDepth, bfloat16_pairs(first, second));
      });
    });
  };
  for_each_run<Bits>(format, packed, 0, depth, write);
}

// 16 rows of inputs as tiles: [depth / 32][16][32], zeros for rows that are not there.
template <typename Number>
inline void lay_out_inputs(const Number* rows, int64_t count, int64_t depth, at::BFloat16* tiles) {
  for (int64_t k = 0; k < depth; k += kTileDepth, tiles += kTileNumbers) {
    for (int64_t m = 0; m < count; ++m)
      for (int64_t i = 0; i < kTileDepth; ++i)
        tiles[m * kTileDepth + i] = static_cast<at::BFloat16>(rows[m * depth + k + i]);
    std::fill(tiles + count * kTileDepth, tiles + kTileNumbers, at::BFloat16(0.0f));
  }
}

// sums[16 * Tiles, 32] = inputs of that many tiles times two blocks of weights. Sums lie kPanelBlocks * 16 apart.
template <int64_t Tiles>
inline void multiply_pair(const at::BFloat16* inputs, const at::BFloat16* weights, int64_t depth, float* sums) {
  constexpr int64_t kStride = kPanelBlocks * kTileSide, kRowBytes = kStride * sizeof(float);
  c10::ForcedUnroll<Tiles * kTilesAcross>{}([](auto sum) { clear_tile<sum>(); });
  for (int64_t k = 0; k < depth; k += kTileDepth, inputs += kTileNumbers, weights += kPairNumbers) {
    load_tile<6>(weights);
    load_tile<7>(weights + kTileNumbers);
    c10::ForcedUnroll<Tiles>{}([&](auto tile) {
      load_tile<4 + tile>(inputs + tile * kTileSide * depth);
      multiply_tiles<tile * kTilesAcross, 4 + tile, 6>();
      multiply_tiles<tile * kTilesAcross + 1, 4 + tile, 7>();
    });
  }
  c10::ForcedUnroll<Tiles>{}([&](auto tile) {
    float* target = sums + tile * kTileSide * kStride;
    store_tile<tile * kTilesAcross>(target, kRowBytes);
    store_tile<tile * kTilesAcross + 1>(target + kTileSide, kRowBytes);
  });
}

// Inputs as tiles, [rows / 16][depth / 32][16][32].
struct InputTiles {
  const at::BFloat16* data;
  int64_t rows, depth;
};

// Columns first to first + count of the result: inputs times a panel, [blocks / 2][depth / 32][2] tiles of weights.
template <typename Number>
void multiply_panel(
    const InputTiles& inputs, int64_t first_row, const at::BFloat16* panel, int64_t first, int64_t count,
    const Number* biases, Number* outputs, int64_t columns) {
  constexpr int64_t kStride = kPanelBlocks * kTileSide;
  alignas(kLine) float sums[kPairWidth * kStride];
  const int64_t end = std::min(inputs.rows, first_row + kInputRowsTogether);
  for (int64_t row = first_row; row < end; row += kPairWidth) {
    const at::BFloat16* tiles = inputs.data + row * inputs.depth;
    for (int64_t n = 0; n < count; n += kPairWidth) {
      const bool both = end - row > kTileSide;
      (both ? multiply_pair<2> : multiply_pair<1>)(tiles, panel + n * inputs.depth, inputs.depth, sums + n);
    }
    for (int64_t m = 0; m < std::min(kPairWidth, end - row); ++m) {
      float* products = sums + m * kStride;
      if (biases)
        for (int64_t n = 0; n < count; ++n) products[n] += static_cast<float>(biases[first + n]);
      convert_back(products, outputs + (row + m) * columns + first, count);
    }
  }
}

template <int64_t Bits, typename Number>
void multiply_packed_by_tiles(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const Number* biases,
    at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = out.size(1), stride = packed.stride(0);
  const int64_t tile_rows = divide_up(rows, kTileSide), blocks = packed.size(0);
  static thread_local std::vector<float> input_memory;
  auto* tiles = reinterpret_cast<at::BFloat16*>(Scratch(input_memory).take(tile_rows * kTileSide * depth / 2));
  const Number* numbers = input.const_data_ptr<Number>();
  share_out(tile_rows, rows * depth, [&](int64_t index) {
    const int64_t first = index * kTileSide * depth, count = std::min(kTileSide, rows - index * kTileSide);
    lay_out_inputs(numbers + first, count, depth, tiles + first);
  });
  const InputTiles inputs{tiles, rows, depth};
  Number* outputs = out.mutable_data_ptr<Number>();
  const int64_t each = round_up(divide_up(blocks, 4 * at::get_num_threads()), kTilesAcross);
  const int64_t together = std::min(each, kPanelBlocks);
  const int64_t panels = divide_up(blocks, together), parts = divide_up(rows, kInputRowsTogether);
  share_out(parts * panels, rows * columns * depth, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    auto* panel = reinterpret_cast<at::BFloat16*>(Scratch(memory).take(kPanelBlocks * kTileSide * depth / 2));
    const TileRegisters registers;
    const int64_t block = item % panels * together, first = block * kPackedRows;
    const int64_t taken = std::min(together, blocks - block);
    for (int64_t i = 0; i < taken; ++i) {
      at::BFloat16* target = panel + i / kTilesAcross * kPairWidth * depth + i % kTilesAcross * kTileNumbers;
      dequantize_tiles<Bits>(format, packed.const_data_ptr<uint8_t>() + (block + i) * stride, depth, target);
    }
    multiply_panel(
        inputs, item / panels * kInputRowsTogether, panel, first, std::min(taken * kPackedRows, columns - first),
        biases, outputs, columns);
  });
}

}  // namespace nanoserve

#endif
