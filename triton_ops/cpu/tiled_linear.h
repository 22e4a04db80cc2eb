// The product of some rows with a bfloat16 matrix, on a processor that multiplies tiles (AMX). The matrix is read once,
// as it lies in the checkpoint: its rows are the rows of tiles, and the inputs, which are few, are laid out anew.
#pragma once

#include "amx_tiles.h"
#include "vectors.h"

#if defined(NANOSERVE_TILES)

namespace nanoserve {

// One tile of weights and one of inputs leave so many for sums.
constexpr int64_t kMostTiledInputs = 6 * kTileSide;
constexpr int64_t kTiledRows = 6 * kTileSide;     // rows of weights that a thread takes at a time
constexpr int64_t kTilesAhead = 8;                // tiles of weights that are fetched before they are multiplied

// Inputs as tiles: [depth / 32][Blocks][16 pairs of columns][16 inputs][2], zeros for inputs that are not there.
inline std::vector<at::BFloat16> tiles_of(const at::BFloat16* rows, int64_t count, int64_t depth) {
  const int64_t blocks = divide_up(count, kTileSide);
  std::vector<at::BFloat16> tiles(blocks * kTileSide * depth, at::BFloat16(0.0f));
  for (int64_t m = 0; m < count; ++m)
    for (int64_t k = 0; k < depth; k += 2) {
      const int64_t tile = k / kTileDepth * blocks + m / kTileSide;
      std::copy_n(
          rows + m * depth + k, 2, &tiles[tile * kTileNumbers + k % kTileDepth * kTileSide + m % kTileSide * 2]);
    }
  return tiles;
}

// 16 rows of weights times all inputs: sums [Blocks][16 rows of weights][16 inputs]. Meanwhile it fetches what is read
// next: of these rows, then of those behind them.
template <int64_t Blocks>
inline void multiply_weights(const at::BFloat16* weights, const at::BFloat16* inputs, int64_t depth, float* sums) {
  const auto each_sum = [](const auto& body) { c10::ForcedUnroll<Blocks>{}(body); };
  each_sum([](auto block) { clear_tile<2 + block>(); });
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    int64_t ahead = k + kTilesAhead * kTileDepth;
    const at::BFloat16* fetched = weights + ahead;
    if (ahead >= depth) fetched = weights + kTileSide * depth + ahead - depth;
    for (int64_t n = 0; n < kTileSide; ++n) __builtin_prefetch(fetched + n * depth);
    load_tile<0>(weights + k, depth * sizeof(at::BFloat16));
    each_sum([&](auto block) {
      load_tile<1>(inputs + (k / kTileDepth * Blocks + block) * kTileNumbers);
      multiply_tiles<2 + block, 0, 1>();
    });
  }
  each_sum([&](auto block) { store_tile<2 + block>(sums + block * kTileSums); });
}

template <int64_t Blocks = kMostTiledInputs / kTileSide>
inline void multiply_blocks(
    int64_t blocks, const at::BFloat16* weights, const at::BFloat16* inputs, int64_t depth, float* sums) {
  if constexpr (Blocks > 1)
    if (blocks < Blocks) return multiply_blocks<Blocks - 1>(blocks, weights, inputs, depth, sums);
  multiply_weights<Blocks>(weights, inputs, depth, sums);
}

// Whether `multiply_by_tiles` takes such a product.
inline bool suits_tiles(const at::Tensor& input, const at::Tensor& weight) {
  return weight.scalar_type() == at::kBFloat16 && input.size(0) <= kMostTiledInputs && weight.size(0) >= kTileSide &&
      weight.size(1) % kTileDepth == 0 && has_tiles();
}

inline void multiply_by_tiles(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = weight.size(0);
  const int64_t blocks = divide_up(rows, kTileSide);
  const at::BFloat16* weights = weight.const_data_ptr<at::BFloat16>();
  const at::BFloat16* biases = bias.defined() ? bias.const_data_ptr<at::BFloat16>() : nullptr;
  at::BFloat16* outputs = out.mutable_data_ptr<at::BFloat16>();
  const std::vector<at::BFloat16> inputs = tiles_of(input.const_data_ptr<at::BFloat16>(), rows, depth);
  share_out(divide_up(columns, kTiledRows), rows * columns * depth, [&](int64_t item) {
    alignas(64) float sums[kMostTiledInputs * kTileSide], products[kTileSide * kTileSide];
    const TileRegisters registers;
    const int64_t end = std::min(columns, (item + 1) * kTiledRows);
    for (int64_t first = item * kTiledRows; first < end; first += kTileSide) {
      const int64_t begin = std::min(first, columns - kTileSide);  // the last rows go with some before them
      multiply_blocks(blocks, weights + begin * depth, inputs.data(), depth, sums);
      for (int64_t m = 0; m < rows; ++m) {
        if (m % kTileSide == 0)
          at::vec::transpose_mxn<float, kTileSide, kTileSide>(
              sums + m * kTileSide, kTileSide, products, kTileSide);
        float* product = products + m % kTileSide * kTileSide;
        if (biases)
          for (int64_t n = 0; n < kTileSide; ++n) product[n] += static_cast<float>(biases[begin + n]);
        convert_back(product + first - begin, outputs + m * columns + first, kTileSide - (first - begin));
      }
    }
  });
}

}  // namespace nanoserve
#else
namespace nanoserve {

inline bool suits_tiles(const at::Tensor&, const at::Tensor&) { return false; }
inline void multiply_by_tiles(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&) {}

}  // namespace nanoserve
#endif
