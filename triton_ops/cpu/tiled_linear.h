// The product of some rows with a bfloat16 matrix, on a processor that multiplies tiles (AMX). The matrix is read once,
// as it lies in the checkpoint: its rows are the rows of tiles, and the inputs, which are few, are laid out anew.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace nanoserve {

// A tile of weights has this many rows of kTileDepth numbers, a tile of inputs as many pairs of these of as many inputs.
constexpr int64_t kTileSide = 16, kTileDepth = 32, kTileNumbers = kTileSide * kTileDepth;
// One tile of weights and one of inputs leave so many for sums.
constexpr int64_t kMostTiledInputs = 6 * kTileSide;
constexpr int64_t kTiledRows = 6 * kTileSide;     // rows of weights that a thread takes at a time
constexpr int64_t kTilesAhead = 8;                // tiles of weights that are fetched before they are multiplied

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Linux gives a process the registers for tiles when it asks for them.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

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
inline void multiply_tiles(const at::BFloat16* weights, const at::BFloat16* inputs, int64_t depth, float* sums) {
  // The numbers of tiles are part of the instructions.
#define NANOSERVE_EACH_SUM(ACTION)                 \
  do {                                             \
    ACTION(0, 2);                                  \
    if constexpr (Blocks > 1) { ACTION(1, 3); }    \
    if constexpr (Blocks > 2) { ACTION(2, 4); }    \
    if constexpr (Blocks > 3) { ACTION(3, 5); }    \
    if constexpr (Blocks > 4) { ACTION(4, 6); }    \
    if constexpr (Blocks > 5) { ACTION(5, 7); }    \
  } while (false)
#define NANOSERVE_ZERO(BLOCK, TILE) _tile_zero(TILE)
#define NANOSERVE_ADD(BLOCK, TILE)                                             \
  _tile_loadd(1, inputs + (k / kTileDepth * Blocks + BLOCK) * kTileNumbers, 64); \
  _tile_dpbf16ps(TILE, 0, 1)
#define NANOSERVE_STORE(BLOCK, TILE) _tile_stored(TILE, sums + BLOCK * kTileSide * kTileSide, 64)
  NANOSERVE_EACH_SUM(NANOSERVE_ZERO);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    int64_t ahead = k + kTilesAhead * kTileDepth;
    const at::BFloat16* fetched = weights + ahead;
    if (ahead >= depth) fetched = weights + kTileSide * depth + ahead - depth;
    for (int64_t n = 0; n < kTileSide; ++n) __builtin_prefetch(fetched + n * depth);
    _tile_loadd(0, weights + k, depth * sizeof(at::BFloat16));
    NANOSERVE_EACH_SUM(NANOSERVE_ADD);
  }
  NANOSERVE_EACH_SUM(NANOSERVE_STORE);
#undef NANOSERVE_EACH_SUM
#undef NANOSERVE_ZERO
#undef NANOSERVE_ADD
#undef NANOSERVE_STORE
}

template <int64_t Blocks = kMostTiledInputs / kTileSide>
inline void multiply_blocks(
    int64_t blocks, const at::BFloat16* weights, const at::BFloat16* inputs, int64_t depth, float* sums) {
  if constexpr (Blocks > 1)
    if (blocks < Blocks) return multiply_blocks<Blocks - 1>(blocks, weights, inputs, depth, sums);
  multiply_tiles<Blocks>(weights, inputs, depth, sums);
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
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
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
    _tile_release();
  });
}

}  // namespace nanoserve
#else
namespace nanoserve {

inline bool suits_tiles(const at::Tensor&, const at::Tensor&) { return false; }
inline void multiply_by_tiles(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&) {}

}  // namespace nanoserve
#endif
