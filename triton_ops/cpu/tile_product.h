// A small matrix product in registers, for the tiles of attention over many queries.
#pragma once

#include "vectors.h"

namespace nanoserve {

constexpr int64_t kTransposed = 16;  // the side of the squares that at::vec transposes
constexpr int64_t kTileRows = 6;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kTileVectors = 4;
#else
constexpr int64_t kTileVectors = 2;
#endif

// c[Rows, Vectors * kLanes] (+)= a[Rows, depth] b[depth, Vectors * kLanes]; each matrix with its distance between rows.
template <int64_t Rows, int64_t Vectors, bool Accumulate>
inline void multiply_tile(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  Vec sums[Rows][Vectors];
  for (int64_t i = 0; i < Rows; ++i)
    for (int64_t j = 0; j < Vectors; ++j)
      sums[i][j] = Accumulate ? Vec::loadu(c + i * c_stride + j * kLanes) : Vec(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[Vectors];
    for (int64_t j = 0; j < Vectors; ++j) right[j] = Vec::loadu(b + k * b_stride + j * kLanes);
    for (int64_t i = 0; i < Rows; ++i) {
      const Vec left(a[i * a_stride + k]);
      for (int64_t j = 0; j < Vectors; ++j) sums[i][j] = at::vec::fmadd(left, right[j], sums[i][j]);
    }
  }
  for (int64_t i = 0; i < Rows; ++i)
    for (int64_t j = 0; j < Vectors; ++j) sums[i][j].store(c + i * c_stride + j * kLanes);
}

template <int64_t Rows, bool Accumulate>
inline void multiply_rows(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
    int64_t columns) {
  int64_t j = 0;
  for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes)
    multiply_tile<Rows, kTileVectors, Accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  for (; j + kTileVectors / 2 * kLanes <= columns; j += kTileVectors / 2 * kLanes)
    multiply_tile<Rows, kTileVectors / 2, Accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  for (; j < columns; j += kLanes)
    multiply_tile<Rows, 1, Accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]; columns is a multiple of kLanes.
template <bool Accumulate>
inline void multiply(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t rows,
    int64_t depth, int64_t columns) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows)
    multiply_rows<kTileRows, Accumulate>(
        a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth, columns);
  for (; i + 2 <= rows; i += 2)
    multiply_rows<2, Accumulate>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth, columns);
  for (; i < rows; ++i)
    multiply_rows<1, Accumulate>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth, columns);
}

}  // namespace nanoserve
