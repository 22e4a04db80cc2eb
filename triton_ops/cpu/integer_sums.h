// Sums of products of unsigned or signed weights of 4 to 8 bits with signed inputs of 8 bits, exact in 32 bits.
#pragma once

#include <cstring>

#include "vectors.h"

namespace nanoserve {

using Ints = at::vec::Vectorized<int32_t>;

constexpr int64_t kPackedRows = 16;     // rows of weights that lie together
constexpr int64_t kPackedColumns = 32;  // columns whose codes lie together
constexpr int64_t kQuad = 4;            // columns in a lane, one to a byte
constexpr int64_t kLine = kPackedRows * kQuad;
constexpr int64_t kParts = kPackedRows / kLanes;  // vectors for the 16 rows

constexpr int64_t code_bytes(int64_t bits) { return bits * kPackedRows * kPackedColumns / 8; }

inline Ints bytes_at(const uint8_t* place) { return Ints::loadu(place); }

// Weights of some rows in 16 columns: those of column 4 * j + i are the bytes i of vector j. `codes` are of 32 columns;
// `half` chooses their first or last 16. Weights of 8 bits are signed, the others not.
template <int64_t Bits>
inline void unpack(const uint8_t* codes, int64_t half, int64_t part, Ints (&weights)[kQuad]) {
  const uint8_t* place = codes + part * kLanes * kQuad;
  for (int64_t j = 0; j < kQuad; ++j) {
    if constexpr (Bits == 8) {
      weights[j] = bytes_at(place + (half * kQuad + j) * kLine);
    } else {
      const Ints low(0x0f0f0f0f);
      const Ints pair = bytes_at(place + j * kLine);
      weights[j] = (half ? pair >> Ints(4) : pair) & low;
    }
  }
  if constexpr (Bits == 5) {
    const Ints plane = bytes_at(place + kQuad * kLine);
    for (int64_t j = 0; j < kQuad; ++j) {
      const Ints bits = (plane >> Ints(static_cast<int32_t>(half * kQuad + j))) & Ints(0x01010101);
      weights[j] = weights[j] | (bits << Ints(4));
    }
  }
  if constexpr (Bits == 6) {
    const Ints plane = bytes_at(place + (kQuad + half) * kLine);
    for (int64_t j = 0; j < kQuad; ++j) {
      const Ints bits = (plane >> Ints(static_cast<int32_t>(2 * j))) & Ints(0x03030303);
      weights[j] = weights[j] | (bits << Ints(4));
    }
  }
}

inline int32_t quad_at(const int8_t* inputs) {
  int32_t word;
  std::memcpy(&word, inputs, sizeof(word));
  return word;
}

// For each row, the sum over 16 columns of weights times inputs.
template <int64_t Bits>
inline Ints sum_of_products(const Ints (&weights)[kQuad], const int8_t* inputs) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
  // The instruction takes unsigned weights: signed ones are moved up by 128, and the sum down again.
  __m512i sum = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1), lift = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i lifted = _mm512_setzero_si512();
  for (int64_t j = 0; j < kQuad; ++j) {
    const __m512i input = _mm512_set1_epi32(quad_at(inputs + j * kQuad));
    __m512i weight = weights[j];
    if constexpr (Bits == 8) {
      weight = _mm512_xor_si512(weight, lift);
      lifted = _mm512_dpbusd_epi32(lifted, ones, input);
    }
    sum = _mm512_dpbusd_epi32(sum, weight, input);
  }
  if constexpr (Bits == 8) sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(lifted, 7));
  return sum;
#elif defined(CPU_CAPABILITY_AVX2)
  // Pairs are summed in 16 bits: at most 4 of 5 bits, 2 of 6 bits or 1 of 8 bits times 127 fit.
  constexpr int64_t kFitting = Bits <= 5 ? 4 : Bits == 6 ? 2 : 1;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256(), pairs = _mm256_setzero_si256();
  for (int64_t j = 0; j < kQuad; ++j) {
    const __m256i input = _mm256_set1_epi32(quad_at(inputs + j * kQuad));
    const __m256i weight = weights[j];
    const __m256i products = Bits == 8
        ? _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(input, weight))
        : _mm256_maddubs_epi16(weight, input);
    pairs = j % kFitting ? _mm256_add_epi16(pairs, products) : products;
    if ((j + 1) % kFitting == 0) {
      const __m256i added = _mm256_madd_epi16(pairs, ones);
      sum = j < kFitting ? added : _mm256_add_epi32(sum, added);
    }
  }
  return sum;
#else
  int32_t sums[kLanes] = {};
  for (int64_t j = 0; j < kQuad; ++j) {
    uint8_t bytes[kLanes * kQuad];
    weights[j].store(bytes);
    for (int64_t n = 0; n < kLanes; ++n)
      for (int64_t i = 0; i < kQuad; ++i) {
        const uint8_t code = bytes[n * kQuad + i];
        const int32_t weight = Bits == 8 ? static_cast<int8_t>(code) : code;
        sums[n] += weight * inputs[j * kQuad + i];
      }
  }
  return Ints::loadu(sums);
#endif
}

}  // namespace nanoserve
