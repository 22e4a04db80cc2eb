// Products with matrices of packed integers: 16 rows of weights together, one to a lane, so that no sum runs across
// lanes. triton_ops/packed.py describes the layout.
//
// In float32 the weights become floats and the arithmetic is that of floats. In 16 bits the inputs are rounded to 8
// bits, with a scale for each token and 32 columns, and products are summed as integers.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "integer_sums.h"
#include "tile_product.h"

namespace nanoserve {

// Bytes of weights between those that are multiplied and those that are fetched meanwhile.
constexpr int64_t kAhead = 3072;
// Blocks of 16 rows that a thread takes at a time, and columns of them that it unpacks at a time: they fit in a core's
// first cache.
constexpr int64_t kBlocksTogether = 4;
constexpr int64_t kSlice = 256;
// The most blocks of 16 rows that a thread takes at a time where few rows are multiplied.
constexpr int64_t kStretch = 16;
constexpr int64_t kStride = kBlocksTogether * kPackedRows;
// Rows of inputs that are multiplied together.
constexpr int64_t kTile = 4;

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

// A run of columns of up to 4 rows of inputs, rounded to 8 bits: input k of row m is about values[m][k] * scales[m],
// where the scale is that of 32 columns.
template <int64_t Bits>
struct InputRun {
  int8_t values[kTile][kWidth<Bits>];
  float scales[kTile];
  float sums[kTile];     // minus the sum of the rounded inputs
  int32_t lifts[kTile];  // minus the sum of the integers, times what all codes are too large by
};

// Writes a row of inputs as row m of its runs.
template <int64_t Bits, typename Number>
inline void round_row(const Number* source, int64_t depth, int64_t zero, int64_t m, InputRun<Bits>* runs) {
  constexpr int64_t kVectors = kPackedColumns / kLanes;
  for (int64_t first = 0; first < depth; first += kPackedColumns) {
    Vec numbers[kVectors];
    Vec largest(0.0f);
    for (int64_t i = 0; i < kVectors; ++i) {
      numbers[i] = floats_at(source + first + i * kLanes);
      largest = at::vec::maximum(largest, numbers[i].abs());
    }
    const float most = largest_lane(largest), scale = most / 127.0f;
    const Vec inverse(most > 0.0f ? 127.0f / most : 0.0f);
    int32_t integers[kPackedColumns];
    for (int64_t i = 0; i < kVectors; ++i)
      at::vec::convert_to_int_of_same_size((numbers[i] * inverse).round()).store(integers + i * kLanes);
    for (int64_t k = 0; k < kPackedColumns; k += kWidth<Bits>, ++runs) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kWidth<Bits>; ++i) {
        runs->values[m][i] = static_cast<int8_t>(integers[k + i]);
        sum += integers[k + i];
      }
      runs->scales[m] = scale;
      runs->sums[m] = static_cast<float>(-sum) * scale;
      runs->lifts[m] = static_cast<int32_t>(-sum * (zero + kLift<Bits>));
    }
  }
}

// Adds a run of weights times the inputs of some rows to their totals. The order of operations on floats is the same
// for any number of rows, so that no result depends on the others.
template <int64_t Bits, int64_t Inputs, typename Weights>
C10_ALWAYS_INLINE void add_run(
    const Weights& weights, const GroupNumbers& numbers, bool minimums, const InputRun<Bits>& inputs,
    Vec (&totals)[Inputs][kParts]) {
  Ints sums[Inputs][kParts];
  for (int64_t m = 0; m < Inputs; ++m)
    for (Ints& sum : sums[m]) sum = Ints(inputs.lifts[m]);
  add_products<Bits, kWidth<Bits> / kQuad>(weights, inputs.values, sums);
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t part = 0; part < kParts; ++part) {
      const Vec scales = Vec::loadu(numbers.scales + part * kLanes) * Vec(inputs.scales[m]);
      Vec& total = totals[m][part];
      total = at::vec::fmadd(at::vec::convert_to_fp_of_same_size<float>(sums[m][part]), scales, total);
      if (minimums) total = at::vec::fmadd(Vec::loadu(numbers.minimums + part * kLanes), Vec(inputs.sums[m]), total);
    }
}

// A run of unpacked weights of 16 rows.
template <int64_t Bits>
struct alignas(kLine) UnpackedRun {
  uint8_t codes[kWidth<Bits> * kPackedRows];
  GroupNumbers numbers;
};

template <int64_t Bits>
inline void unpack_runs(
    const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, UnpackedRun<Bits>* runs) {
  const auto write = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, auto half)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
    UnpackedRun<Bits>& run = runs[(column - first) / kWidth<Bits>];
    run.numbers = numbers;
    c10::ForcedUnroll<kWidth<Bits> / kQuad>{}([&](auto quad) C10_ALWAYS_INLINE_ATTRIBUTE {
      for (int64_t part = 0; part < kParts; ++part)
        unpack<Bits, half * kQuad + quad>(codes, part).store(run.codes + quad * kLine + part * kLanes * kQuad);
    });
  };
  for_each_run<Bits>(format, packed, first, after, write);
}

// Bytes that are fetched while others are multiplied: some at every run, because more can be asked for than the memory
// brings at a time.
struct Fetching {
  const uint8_t* place;
  int64_t advance;

  void step() {
    for (const uint8_t* after = place + advance; place < after; place += kLine) __builtin_prefetch(place);
  }
};

// out[Inputs, 16] += some runs of inputs times weights.
template <int64_t Bits, int64_t Inputs>
inline void multiply_runs(
    const UnpackedRun<Bits>* runs, int64_t count, bool minimums, const InputRun<Bits>* inputs, Fetching& fetching,
    float* out) {
  Vec totals[Inputs][kParts];
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t part = 0; part < kParts; ++part) totals[m][part] = Vec::loadu(out + m * kStride + part * kLanes);
  for (int64_t run = 0; run < count; ++run) {
    fetching.step();
    const uint8_t* codes = runs[run].codes;
    const auto weights_at = [&](int64_t quad, int64_t part) C10_ALWAYS_INLINE_ATTRIBUTE {
      return bytes_at(codes + quad * kLine + part * kLanes * kQuad);
    };
    add_run<Bits>(weights_at, runs[run].numbers, minimums, inputs[run], totals);
  }
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t part = 0; part < kParts; ++part) totals[m][part].store(out + m * kStride + part * kLanes);
}

// out[Inputs, 16] = inputs times a block of 16 rows of weights, which are unpacked in registers.
template <int64_t Bits, int64_t Inputs>
inline void multiply_packed_block(
    const PackedFormat& format, const uint8_t* packed, int64_t depth, const InputRun<Bits>* inputs, float* out) {
  Vec totals[Inputs][kParts];
  for (auto& total : totals)
    for (auto& vector : total) vector = Vec(0.0f);
  const bool minimums = format.has_minimums();
  const auto add = [&](int64_t, const uint8_t* codes, const GroupNumbers& numbers, auto half)
                       C10_ALWAYS_INLINE_ATTRIBUTE {
    if (half == 0)
      for (int64_t line = 0; line < code_bytes(Bits) + kLine; line += kLine) __builtin_prefetch(codes + kAhead + line);
    const auto weights_at = [&](auto quad, int64_t part) C10_ALWAYS_INLINE_ATTRIBUTE {
      return unpack<Bits, half * kQuad + quad>(codes, part);
    };
    add_run<Bits>(weights_at, numbers, minimums, *inputs++, totals);
  };
  for_each_run<Bits>(format, packed, 0, depth, add);
  for (int64_t m = 0; m < Inputs; ++m)
    for (int64_t part = 0; part < kParts; ++part) totals[m][part].store(out + m * kStride + part * kLanes);
}

// Calls body.operator()<Count>() for 1 to 4.
template <typename Body>
inline void with_count(int64_t count, const Body& body) {
  switch (count) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3: return body.template operator()<3>();
    default: return body.template operator()<kTile>();
  }
}

// out[rows, kStride] = inputs[rows, depth] times some blocks of 16 rows of weights, whose bytes lie `block_bytes`
// apart.
template <int64_t Bits>
void multiply_blocks(
    const PackedFormat& format, const uint8_t* packed, int64_t block_bytes, int64_t blocks,
    const InputRun<Bits>* inputs, int64_t rows, int64_t depth, float* out) {
  const bool minimums = format.has_minimums();
  if (rows <= kTile) {
    for (int64_t block = 0; block < blocks; ++block)
      with_count(rows, [&]<int64_t Inputs>() {
        multiply_packed_block<Bits, Inputs>(
            format, packed + block * block_bytes, depth, inputs, out + block * kPackedRows);
      });
    return;
  }
  // Weights are unpacked once, into the first cache, for all inputs.
  constexpr int64_t kRuns = kSlice / kWidth<Bits>;
  static thread_local UnpackedRun<Bits> runs[kBlocksTogether][kRuns];
  const int64_t slice_bytes = block_bytes * kSlice / depth, steps = divide_up(rows, kTile) * kRuns;
  std::fill(out, out + rows * kStride, 0.0f);
  for (int64_t column = 0; column < depth; column += kSlice) {
    const int64_t after = std::min(depth, column + kSlice);
    Fetching fetching[kBlocksTogether];
    for (int64_t block = 0; block < blocks; ++block) {
      const uint8_t* place = packed + block * block_bytes;
      unpack_runs<Bits>(format, place, column, after, runs[block]);
      fetching[block] = {place + (column / kSlice + 1) * slice_bytes, round_up(divide_up(slice_bytes, steps), kLine)};
    }
    for (int64_t m = 0; m < rows; m += kTile)
      with_count(std::min(kTile, rows - m), [&]<int64_t Inputs>() {
        for (int64_t block = 0; block < blocks; ++block)
          multiply_runs<Bits, Inputs>(
              runs[block], (after - column) / kWidth<Bits>, minimums,
              inputs + (m / kTile * depth + column) / kWidth<Bits>, fetching[block],
              out + m * kStride + block * kPackedRows);
      });
  }
}

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

template <int64_t Bits, typename Number>
void multiply_packed_rounded(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const Number* biases,
    at::Tensor& out) {
  const int64_t rows = input.size(0), depth = input.size(1), columns = out.size(1), stride = packed.stride(0);
  static thread_local std::vector<InputRun<Bits>> input_memory;
  input_memory.resize(round_up(rows, kTile) * depth / kWidth<Bits> / kTile);
  InputRun<Bits>* inputs = input_memory.data();
  const Number* numbers = input.const_data_ptr<Number>();
  share_out(rows, rows * depth, [&](int64_t m) {
    const int64_t zero = format.has_minimums() ? 0 : format.zero;
    round_row(numbers + m * depth, depth, zero, m % kTile, inputs + m / kTile * depth / kWidth<Bits>);
  });
  Number* outputs = out.mutable_data_ptr<Number>();
  // Few rows are bound by the reading of the weights, which is fastest in long stretches; a thread has several.
  const int64_t each = round_up(divide_up(packed.size(0), 4 * at::get_num_threads()), kBlocksTogether);
  const int64_t most = rows <= kTile ? std::min(each, kStretch) : kBlocksTogether;
  share_out(divide_up(packed.size(0), most), rows * columns * depth / 4, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* products = Scratch(memory).take(rows * kStride);
    for (int64_t block = item * most; block < std::min((item + 1) * most, packed.size(0)); block += kBlocksTogether) {
      const int64_t blocks = std::min(kBlocksTogether, packed.size(0) - block);
      const uint8_t* weights = packed.const_data_ptr<uint8_t>() + block * stride;
      multiply_blocks<Bits>(format, weights, stride, blocks, inputs, rows, depth, products);
      const int64_t first = block * kPackedRows, count = std::min(kStride, columns - first);
      for (int64_t m = 0; m < rows; ++m) {
        if (biases)
          for (int64_t n = 0; n < count; ++n) products[m * kStride + n] += static_cast<float>(biases[first + n]);
        convert_back(products + m * kStride, outputs + m * columns + first, count);
      }
    }
  });
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
      multiply_packed_rounded<Bits, Number>(
          format, rows, packed, bias ? added.const_data_ptr<Number>() : nullptr, out);
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
