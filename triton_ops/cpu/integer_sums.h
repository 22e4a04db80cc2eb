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

// Weights of some rows in 4 columns, the columns of a row in the bytes of its lane. `codes` are of 32 columns, which
// are 8 quads. Weights of 8 bits are signed, the others not.
template <int64_t Bits, int64_t Quad>
C10_ALWAYS_INLINE Ints unpack(const uint8_t* codes, int64_t part) {
  constexpr int64_t kHalf = Quad / kQuad, kLineOfHalf = Quad % kQuad;
  const uint8_t* place = codes + part * kLanes * kQuad;
  if constexpr (Bits == 8) return bytes_at(place + Quad * kLine);
  const Ints pair = bytes_at(place + kLineOfHalf * kLine);
  Ints weights = (kHalf ? pair >> Ints(4) : pair) & Ints(0x0f0f0f0f);
  if constexpr (Bits == 5) {
    const Ints plane = bytes_at(place + kQuad * kLine);
    weights = weights | ((plane >> Ints(Quad)) & Ints(0x01010101)) << Ints(4);
  }
  if constexpr (Bits == 6) {
    const Ints plane = bytes_at(place + (kQuad + kHalf) * kLine);
    weights = weights | ((plane >> Ints(2 * kLineOfHalf)) & Ints(0x03030303)) << Ints(4);
  }
  return weights;
}

inline int32_t quad_at(const int8_t* inputs) {
  int32_t word;
  std::memcpy(&word, inputs, sizeof(word));
  return word;
}

// What unpacked weights of 8 bits are above their values: the instruction of VNNI takes unsigned ones.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
template <int64_t Bits>
constexpr int32_t kLift = Bits == 8 ? 128 : 0;
#else
template <int64_t Bits>
constexpr int32_t kLift = 0;
#endif

// sums[m][part] += for each row, the products of weights(quad, part) with inputs[m], which has `Quads` times 4 columns.
template <int64_t Bits, int64_t Quads, int64_t Inputs, typename Weights>
C10_ALWAYS_INLINE void add_products(
    const Weights& weights, const int8_t (*inputs)[Quads * kQuad], Ints (&sums)[Inputs][kParts]) {
#if defined(CPU_CAPABILITY_AVX2)
  // Pairs are summed in 16 bits: at most 8 of 4 bits, 4 of 5 bits, 2 of 6 bits or 1 of 8 bits times 127 fit.
  constexpr int64_t kFitting = Bits == 8 ? 1 : 128 >> Bits;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i pairs[Inputs][kParts];
#endif
  c10::ForcedUnroll<Quads>{}([&](auto quad) C10_ALWAYS_INLINE_ATTRIBUTE {
    Ints weight[kParts];
    for (int64_t part = 0; part < kParts; ++part) {
      weight[part] = weights(quad, part);
      if constexpr (kLift<Bits> != 0) weight[part] = weight[part] ^ Ints(static_cast<int32_t>(0x80808080));
    }
    for (int64_t m = 0; m < Inputs; ++m) {
      const Ints input(quad_at(inputs[m] + quad * kQuad));
      for (int64_t part = 0; part < kParts; ++part) {
        Ints& sum = sums[m][part];
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
        sum = _mm512_dpbusd_epi32(sum, weight[part], input);
#elif defined(CPU_CAPABILITY_AVX2)
        __m256i products = Bits == 8
            ? _mm256_maddubs_epi16(_mm256_abs_epi8(weight[part]), _mm256_sign_epi8(input, weight[part]))
            : _mm256_maddubs_epi16(weight[part], input);
        if constexpr (quad % kFitting != 0) products = _mm256_add_epi16(pairs[m][part], products);
        if constexpr ((quad + 1) % kFitting == 0 || quad + 1 == Quads)
          products = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
        // Else the compiler sums in another order, for which there are not enough registers.
        asm("" : "+x"(products));
        if constexpr ((quad + 1) % kFitting == 0 || quad + 1 == Quads) sum = products;
        else pairs[m][part] = products;
#else
        int32_t total[kLanes];
        uint8_t codes[kLanes * kQuad];
        int8_t factors[kLanes * kQuad];
        sum.store(total);
        weight[part].store(codes);
        input.store(factors);
        for (int64_t i = 0; i < kLanes * kQuad; ++i)
          total[i / kQuad] += (Bits == 8 ? static_cast<int8_t>(codes[i]) : codes[i]) * factors[i];
        sum = Ints::loadu(total);
#endif
      }
    }
  });
}

}  // namespace nanoserve
