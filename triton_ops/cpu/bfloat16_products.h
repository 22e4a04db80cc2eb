// Products of small matrices of bfloat16 with sums in float32, in the two ways that processors offer: tiles (AMX), and
// dot products of pairs (AVX-512). Either way the operands lie in tiles of 1 KiB, one behind the other:
//
//   left   [rows / 16][steps][16 rows][32 columns]            a step is 32 columns of the left matrix
//   right  [steps][Columns][16 pairs of rows][16 columns][2]  and 32 rows of the right one
//   sums   [rows / 16][Columns][16][16] float32
#pragma once

#include <cstring>

#include "amx_tiles.h"
#include "vectors.h"

namespace nanoserve {

// Whether products of bfloat16 by dots of pairs are faster than those of float32. A dot does twice the work of a
// multiply-add. Intel's cores take 2 cycles for it and half a cycle for a multiply-add (measured on one with AMX); on
// AMD's (Zen 4), whole products of bfloat16 were measured to be twice as fast.
inline bool dots_pay() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Whether dots are used where there are no tiles. Tests set it, to see the ways of other processors.
inline std::atomic<bool> dots_allowed{dots_pay()};

}  // namespace nanoserve

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define NANOSERVE_BFLOAT16_PRODUCTS 1
#include <immintrin.h>

namespace nanoserve {

using at::BFloat16;

// A number of left tiles, `stride` numbers apart, of which `steps` are multiplied.
struct LeftTiles {
  const BFloat16* data;
  int64_t count, stride, steps;
};

struct DotProducts {
  static bool available() { return dots_allowed; }

  template <int64_t Columns, bool Accumulate>
  void multiply(const LeftTiles& left, const BFloat16* right, float* sums) const {
    for (int64_t place = 0; place < left.count; ++place)
      for (int64_t column = 0; column < Columns; ++column)
        multiply_one<Columns, Accumulate>(
            left.data + place * left.stride, right + column * kTileNumbers, left.steps,
            sums + (place * Columns + column) * kTileSums);
  }

 private:
  // The sums of a tile are 16 vectors, which stay in registers.
  template <int64_t Columns, bool Accumulate>
  static void multiply_one(const BFloat16* left, const BFloat16* right, int64_t steps, float* sums) {
    __m512 totals[kTileSide];
    c10::ForcedUnroll<kTileSide>{}([&](auto row) {
      totals[row] = Accumulate ? _mm512_load_ps(sums + row * kTileSide) : _mm512_setzero_ps();
    });
    for (int64_t step = 0; step < steps; ++step, left += kTileNumbers, right += Columns * kTileNumbers)
      for (int64_t pair = 0; pair < kTileSide; ++pair) {
        const auto columns = reinterpret_cast<__m512bh>(_mm512_load_ps(right + pair * kTileDepth));
        c10::ForcedUnroll<kTileSide>{}([&](auto row) {
          float both;  // the row's numbers of this pair of columns
          std::memcpy(&both, left + row * kTileDepth + pair * 2, sizeof(both));
          totals[row] = _mm512_dpbf16_ps(totals[row], reinterpret_cast<__m512bh>(_mm512_set1_ps(both)), columns);
        });
      }
    c10::ForcedUnroll<kTileSide>{}([&](auto row) { _mm512_store_ps(sums + row * kTileSide, totals[row]); });
  }
};

#if defined(NANOSERVE_TILES)

struct TileProducts {
  static bool available() { return has_tiles(); }

  template <int64_t Columns, bool Accumulate>
  void multiply(const LeftTiles& left, const BFloat16* right, float* sums) const {
    int64_t place = 0;
    for (; place + 2 <= left.count; place += 2)
      multiply_some<2, Columns, Accumulate>(left, place, right, sums + place * Columns * kTileSums);
    if (place < left.count)
      multiply_some<1, Columns, Accumulate>(left, place, right, sums + place * Columns * kTileSums);
  }

 private:
  TileRegisters registers_;

  // Two by two tiles of sums: each tile that is loaded is multiplied twice, so that loading does not hold up.
  template <int64_t Rows, int64_t Columns, bool Accumulate>
  static void multiply_some(const LeftTiles& left, int64_t place, const BFloat16* right, float* sums) {
    constexpr int kLeft = 4, kRight = 6;  // the first registers of either operand
    const auto each_sum = [](const auto& body) {
      c10::ForcedUnroll<Rows>{}([&](auto row) { c10::ForcedUnroll<Columns>{}([&](auto column) { body(row, column); }); });
    };
    each_sum([&](auto row, auto column) {
      if constexpr (Accumulate)
        load_tile<row * 2 + column>(sums + (row * Columns + column) * kTileSums);
      else
        clear_tile<row * 2 + column>();
    });
    const BFloat16* data = left.data + place * left.stride;
    for (int64_t step = 0; step < left.steps; ++step, data += kTileNumbers, right += Columns * kTileNumbers) {
      c10::ForcedUnroll<Rows>{}([&](auto row) { load_tile<kLeft + row>(data + row * left.stride); });
      c10::ForcedUnroll<Columns>{}([&](auto column) { load_tile<kRight + column>(right + column * kTileNumbers); });
      each_sum([](auto row, auto column) { multiply_tiles<row * 2 + column, kLeft + row, kRight + column>(); });
    }
    each_sum([&](auto row, auto column) {
      store_tile<row * 2 + column>(sums + (row * Columns + column) * kTileSums);
    });
  }
};

#endif

}  // namespace nanoserve
#endif
