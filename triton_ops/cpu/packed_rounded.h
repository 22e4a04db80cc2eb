// Products of inputs rounded to 8 bits, with a scale for each token and 32 columns, with matrices of packed integers:
// products are summed as integers. On a processor that multiplies tiles (AMX) these are sums of tiles, with the same
// bits as those of vectors.
#pragma once

#include "amx_tiles.h"
#include "packed_format.h"

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

// A run of columns of some rows of inputs, rounded to 8 bits: input k of row m is about values[m][k] * scales[m], where
// the scale is that of 32 columns.
template <int64_t Bits, int64_t Rows>
struct alignas(kLine) InputRun {
  int8_t values[Rows][kWidth<Bits>];
  float scales[Rows];
  float sums[Rows];     // minus the sum of the rounded inputs
  int32_t lifts[Rows];  // minus the sum of the integers, times what all codes are too large by
};

// Writes a row of inputs as row m of its runs.
template <int64_t Bits, int64_t Rows, typename Number>
inline void round_row(const Number* source, int64_t depth, int64_t zero, int64_t m, InputRun<Bits, Rows>* runs) {
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
    const Weights& weights, const GroupNumbers& numbers, bool minimums, const InputRun<Bits, kTile>& inputs,
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

// Kernel::prepared says how a kernel wants to have the codes, given what is subtracted from each of them.
template <int64_t Bits, typename Kernel>
inline void unpack_runs(
    const PackedFormat& format, const uint8_t* packed, int64_t first, int64_t after, UnpackedRun<Bits>* runs) {
  const int64_t zero = format.has_minimums() ? 0 : format.zero;
  const auto write = [&](int64_t column, const uint8_t* codes, const GroupNumbers& numbers, auto half)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
    UnpackedRun<Bits>& run = runs[(column - first) / kWidth<Bits>];
    run.numbers = numbers;
    c10::ForcedUnroll<kWidth<Bits> / kQuad>{}([&](auto quad) C10_ALWAYS_INLINE_ATTRIBUTE {
      for (int64_t part = 0; part < kParts; ++part)
        Kernel::prepared(unpack<Bits, half * kQuad + quad>(codes, part), zero)
            .store(run.codes + quad * kLine + part * kLanes * kQuad);
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
    const UnpackedRun<Bits>* runs, int64_t count, bool minimums, const InputRun<Bits, kTile>* inputs,
    Fetching& fetching, float* out) {
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
    const PackedFormat& format, const uint8_t* packed, int64_t depth, const InputRun<Bits, kTile>* inputs,
    float* out) {
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

// Vectors multiply up to 4 rows of inputs together.
template <int64_t Bits>
struct VectorKernel {
  static constexpr int64_t kRows = kTile;
  struct Registers {};

  static Ints prepared(Ints codes, int64_t) { return codes; }

  static void multiply(
      const UnpackedRun<Bits>* runs, int64_t count, bool minimums, const InputRun<Bits, kRows>* inputs, int64_t rows,
      Fetching& fetching, float* out) {
    with_count(rows, [&]<int64_t Inputs>() {
      multiply_runs<Bits, Inputs>(runs, count, minimums, inputs, fetching, out);
    });
  }
};

#if defined(NANOSERVE_TILES)
// Tiles multiply up to 16 rows of inputs together. Both factors are signed: codes are lowered by their zero.
template <int64_t Bits>
struct TileKernel {
  static constexpr int64_t kRows = kTileSide;
  static constexpr int kSums = 0, kInputs = 1, kWeights = 2;

  struct Registers : TileRegisters {
    Registers() : TileRegisters(shapes()) {}
  };

  static TileShapes shapes() {
    TileShapes shapes;
    shapes.row_bytes[kInputs] = kWidth<Bits>;
    shapes.rows[kWeights] = kWidth<Bits> / kQuad;
    return shapes;
  }

  static Ints prepared(Ints codes, int64_t zero) {
    return _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(zero)));
  }

  static void multiply(
      const UnpackedRun<Bits>* runs, int64_t count, bool minimums, const InputRun<Bits, kRows>* inputs, int64_t rows,
      Fetching& fetching, float* out) {
    with_count(divide_up(rows, kTile), [&]<int64_t Count>() {
      multiply_runs_by_tiles<Count * kTile>(runs, count, minimums, inputs, fetching, out);
    });
  }

  // Adds some runs to the totals of the first inputs: each sum of a tile while the next one is computed. Floats are
  // added in the order in which vectors add them.
  template <int64_t Inputs>
  static void multiply_runs_by_tiles(
      const UnpackedRun<Bits>* runs, int64_t count, bool minimums, const InputRun<Bits, kRows>* inputs,
      Fetching& fetching, float* out) {
    alignas(kLine) int32_t sums[2][kTileSums];
    Vec totals[Inputs];
    for (int64_t m = 0; m < Inputs; ++m) totals[m] = Vec::loadu(out + m * kStride);
    const auto start = [&](int64_t run) {
      fetching.step();
      load_tile<kInputs>(inputs[run].values, kWidth<Bits>);
      load_tile<kWeights>(runs[run].codes);
      clear_tile<kSums>();
      multiply_byte_tiles<kSums, kInputs, kWeights>();
      store_tile<kSums>(sums[run % 2]);
    };
    start(0);
    for (int64_t run = 0; run < count; ++run) {
      if (run + 1 < count) start(run + 1);
      const Vec scales = Vec::loadu(runs[run].numbers.scales), offsets = Vec::loadu(runs[run].numbers.minimums);
      for (int64_t m = 0; m < Inputs; ++m) {
        const Vec sum = at::vec::convert_to_fp_of_same_size<float>(Ints::loadu(sums[run % 2] + m * kTileSide));
        totals[m] = at::vec::fmadd(sum, scales * Vec(inputs[run].scales[m]), totals[m]);
        if (minimums) totals[m] = at::vec::fmadd(offsets, Vec(inputs[run].sums[m]), totals[m]);
      }
    }
    for (int64_t m = 0; m < Inputs; ++m) totals[m].store(out + m * kStride);
  }
};
#endif

// out[rows, kStride] = inputs[rows, depth] times some blocks of 16 rows of weights, whose bytes lie `block_bytes`
// apart. Weights are unpacked once, into the first cache, for all inputs.
template <int64_t Bits, typename Kernel>
void multiply_unpacked_blocks(
    const PackedFormat& format, const uint8_t* packed, int64_t block_bytes, int64_t blocks,
    const InputRun<Bits, Kernel::kRows>* inputs, int64_t rows, int64_t depth, float* out) {
  constexpr int64_t kRuns = kSlice / kWidth<Bits>, kRows = Kernel::kRows;
  static thread_local UnpackedRun<Bits> runs[kBlocksTogether][kRuns];
  const int64_t slice_bytes = block_bytes * kSlice / depth, steps = divide_up(rows, kRows) * kRuns;
  std::fill(out, out + rows * kStride, 0.0f);
  for (int64_t column = 0; column < depth; column += kSlice) {
    const int64_t after = std::min(depth, column + kSlice);
    Fetching fetching[kBlocksTogether];
    for (int64_t block = 0; block < blocks; ++block) {
      const uint8_t* place = packed + block * block_bytes;
      unpack_runs<Bits, Kernel>(format, place, column, after, runs[block]);
      fetching[block] = {place + (column / kSlice + 1) * slice_bytes, round_up(divide_up(slice_bytes, steps), kLine)};
    }
    for (int64_t m = 0; m < rows; m += kRows)
      for (int64_t block = 0; block < blocks; ++block)
        Kernel::multiply(
            runs[block], (after - column) / kWidth<Bits>, format.has_minimums(),
            inputs + (m / kRows * depth + column) / kWidth<Bits>, std::min(kRows, rows - m), fetching[block],
            out + m * kStride + block * kPackedRows);
  }
}

// The same in whichever way is faster for so many rows.
template <int64_t Bits, typename Kernel>
void multiply_blocks(
    const PackedFormat& format, const uint8_t* packed, int64_t block_bytes, int64_t blocks,
    const InputRun<Bits, Kernel::kRows>* inputs, int64_t rows, int64_t depth, float* out) {
  if constexpr (Kernel::kRows == kTile)
    if (rows <= kTile) {
      for (int64_t block = 0; block < blocks; ++block)
        with_count(rows, [&]<int64_t Inputs>() {
          multiply_packed_block<Bits, Inputs>(
              format, packed + block * block_bytes, depth, inputs, out + block * kPackedRows);
        });
      return;
    }
  multiply_unpacked_blocks<Bits, Kernel>(format, packed, block_bytes, blocks, inputs, rows, depth, out);
}

template <int64_t Bits, typename Kernel, typename Number>
void multiply_packed_rounded(
    const PackedFormat& format, const at::Tensor& input, const at::Tensor& packed, const Number* biases,
    at::Tensor& out) {
  constexpr int64_t kRows = Kernel::kRows;
  const int64_t rows = input.size(0), depth = input.size(1), columns = out.size(1), stride = packed.stride(0);
  static thread_local std::vector<InputRun<Bits, kRows>> input_memory;
  input_memory.resize(round_up(rows, kRows) * depth / kWidth<Bits> / kRows);
  InputRun<Bits, kRows>* inputs = input_memory.data();
  const Number* numbers = input.const_data_ptr<Number>();
  share_out(rows, rows * depth, [&](int64_t m) {
    const int64_t zero = format.has_minimums() ? 0 : format.zero;
    round_row(numbers + m * depth, depth, zero, m % kRows, inputs + m / kRows * depth / kWidth<Bits>);
  });
  Number* outputs = out.mutable_data_ptr<Number>();
  // Few rows are bound by the reading of the weights, which is fastest in long stretches; a thread has several.
  const int64_t each = round_up(divide_up(packed.size(0), 4 * at::get_num_threads()), kBlocksTogether);
  const int64_t most = rows <= kTile ? std::min(each, kStretch) : kBlocksTogether;
  share_out(divide_up(packed.size(0), most), rows * columns * depth / 4, [&](int64_t item) {
    static thread_local std::vector<float> memory;
    float* products = Scratch(memory).take(round_up(rows, kRows) * kStride);
    [[maybe_unused]] const typename Kernel::Registers registers;
    for (int64_t block = item * most; block < std::min((item + 1) * most, packed.size(0)); block += kBlocksTogether) {
      const int64_t blocks = std::min(kBlocksTogether, packed.size(0) - block);
      const uint8_t* weights = packed.const_data_ptr<uint8_t>() + block * stride;
      multiply_blocks<Bits, Kernel>(format, weights, stride, blocks, inputs, rows, depth, products);
      const int64_t first = block * kPackedRows, count = std::min(kStride, columns - first);
      for (int64_t m = 0; m < rows; ++m) {
        if (biases)
          for (int64_t n = 0; n < count; ++n) products[m * kStride + n] += static_cast<float>(biases[first + n]);
        convert_back(products + m * kStride, outputs + m * columns + first, count);
      }
    }
  });
}

}  // namespace nanoserve
