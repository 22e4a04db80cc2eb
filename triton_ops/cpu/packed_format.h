// How matrices of packed integers lie in memory, and reading the numbers that their codes are multiplied by.
// triton_ops/packed.py describes the layout.
#pragma once

#include "integer_sums.h"

namespace nanoserve {

enum ScaleKind : int64_t { kHalfScales, kBFloat16Scales, kFloatScales, kSuperScales };
enum OffsetKind : int64_t { kOneZero, kZeros, kMinimums, kSuperMinimums };

struct PackedFormat {
  int64_t bits, group, scale, offset, zero;

  bool has_minimums() const { return offset != kOneZero; }
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

// Of one group of columns: a value of row n is code * scales[n] - minimums[n]; where the format has no minimums, it
// is (code - zero) * scales[n].
struct GroupNumbers {
  float scales[kPackedRows];
  float minimums[kPackedRows];
};

template <typename Number>
inline void read_numbers(const uint8_t* place, float* numbers) {
  Number stored[kPackedRows];
  std::memcpy(stored, place, sizeof(stored));
  for (int64_t n = 0; n < kPackedRows; n += kLanes) floats_at(stored + n).store(numbers + n);
}

// Numbers times integers of 8 bits from which `zero` is subtracted. Whole vectors of bytes are read: codes lie behind.
template <typename Number>
inline void multiply_each(const float* numbers, const uint8_t* place, int64_t zero, float* products) {
  for (int64_t n = 0; n < kPackedRows; n += kLanes) {
    const Vec factors = at::vec::convert<float>(at::vec::Vectorized<Number>::loadu(place + n)) - Vec(zero);
    (Vec::loadu(numbers + n) * factors).store(products + n);
  }
}

C10_ALWAYS_INLINE void read_group(
    const PackedFormat& format, const uint8_t* cell, int64_t group, GroupNumbers& numbers) {
  switch (format.scale) {
    case kHalfScales: read_numbers<at::Half>(cell + group * 2 * kPackedRows, numbers.scales); break;
    case kBFloat16Scales: read_numbers<at::BFloat16>(cell + group * 2 * kPackedRows, numbers.scales); break;
    case kFloatScales: read_numbers<float>(cell + group * 4 * kPackedRows, numbers.scales); break;
    default:
      read_numbers<at::Half>(cell, numbers.scales);
      multiply_each<int8_t>(numbers.scales, cell + (2 + group) * kPackedRows, 0, numbers.scales);
  }
  const uint8_t* offsets = cell + format.scale_bytes();
  switch (format.offset) {
    case kOneZero: break;
    case kZeros:
      // Codes of 8 bits are signed, their zeros are stored without a sign.
      multiply_each<uint8_t>(
          numbers.scales, offsets + group * kPackedRows, format.bits == 8 ? 128 : 0, numbers.minimums);
      break;
    case kMinimums: read_numbers<at::Half>(offsets + group * 2 * kPackedRows, numbers.minimums); break;
    default:
      read_numbers<at::Half>(offsets, numbers.minimums);
      multiply_each<uint8_t>(numbers.minimums, offsets + (2 + group) * kPackedRows, 0, numbers.minimums);
  }
}

// Columns of a run, which lies in one group: groups of weights of 6 bits have 16 columns, all others whole 32.
template <int64_t Bits>
constexpr int64_t kWidth = Bits == 6 ? 16 : kPackedColumns;

// Calls body(column, codes, numbers, half) for every run of columns: `codes` are of the 32 columns that it lies in;
// `half`, a constant of the compiler, says where in them a run of 16 columns lies.
template <int64_t Bits, typename Body>
C10_ALWAYS_INLINE void for_each_run(
    const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, const Body& body) {
  GroupNumbers numbers;
  const int64_t span = format.span(), group = format.group, cell_bytes = format.cell_bytes();
  const int64_t header = format.scale_bytes() + format.offset_bytes();
  const uint8_t* cell = packed + first / span * cell_bytes;
  int64_t within = first % span;
  for (int64_t start = first - within; start + within < after; start += span, cell += cell_bytes, within = 0) {
    const uint8_t* codes = cell + header + within / kPackedColumns * code_bytes(Bits);
    const int64_t end = std::min(span, after - start);
    for (int64_t index = within / group; within < end; ++index) {
      read_group(format, cell, index, numbers);
      if constexpr (kWidth<Bits> == kPackedColumns) {
        for (const int64_t last = std::min(end, (index + 1) * group); within < last; within += kPackedColumns) {
          body(start + within, codes, numbers, std::integral_constant<int64_t, 0>());
          codes += code_bytes(Bits);
        }
      } else {
        body(start + within, codes, numbers, std::integral_constant<int64_t, 0>());
        read_group(format, cell, ++index, numbers);
        body(start + within + kWidth<Bits>, codes, numbers, std::integral_constant<int64_t, 1>());
        within += kPackedColumns;
        codes += code_bytes(Bits);
      }
    }
  }
}

}  // namespace nanoserve
