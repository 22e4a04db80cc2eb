// Recurrences whose state is a matrix for each head, [key_dim, value_dim]: a position multiplies it by a factor and adds
// the product of its key and what it writes. A step takes single positions, a scan of chunks takes prompts.
//
// A thread takes some heads of a row, whose segments follow one another. Nothing that it computes depends on other rows.
// A rule is a class that says what a position writes. It has
// - step_token: one position of a head, whose state moves from one place to another, which may be the same;
// - scan_chunk: some positions of one chunk, with the states of the heads in tiles;
// - kHeadsTogether: most heads of a thread, which all have the same key;
// - kName and kRate: its name, and that of its factor of what is written.
#pragma once

#include <cmath>
#include <utility>

#include "recurrent_segments.h"
#include "tile_product.h"

namespace nanoserve {

// Positions of a chunk, which begins at a multiple of this. It divides the CHUNK of recurrent.py: a shorter chunk takes
// fewer multiplications, until the products become too small.
constexpr int64_t kChunk = 32;
constexpr int64_t kRowsTogether = 2 * kTileRows;  // of a triangular matrix, which is multiplied by them up to its last
// Vectors of a state's row that a step takes together: with their sums, as many as there are registers for.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kStepVectors = 8;
#else
constexpr int64_t kStepVectors = 4;
#endif

template <typename Number>
struct MatrixRecurrence {
  Number* out;          // [T, heads, value_dim]
  const Number* query;  // [T, key_heads, key_dim], with strides; the key likewise
  const Number* key;
  const Number* value;  // [T, heads, value_dim], with strides
  const float* decay;   // [T, heads]
  const float* rates;   // [T, heads]
  float* states;        // [slots, heads, key_dim, value_dim], slots `state_stride` apart
  int64_t query_strides[2], key_strides[2], value_strides[2];
  int64_t state_stride, heads, key_dim, value_dim, group;  // heads that share a key head

  int64_t size() const { return key_dim * value_dim; }
  float* state(int64_t slot, int64_t head) const { return states + slot * state_stride + head * size(); }
  float rate(int64_t token, int64_t head) const { return rates[token * heads + head]; }
  float log_factor(int64_t token, int64_t head) const { return decay[token * heads + head]; }

  const Number* query_at(int64_t token, int64_t head) const { return at(query, query_strides, token, head / group); }
  const Number* key_at(int64_t token, int64_t head) const { return at(key, key_strides, token, head / group); }
  const Number* value_at(int64_t token, int64_t head) const { return at(value, value_strides, token, head); }
  Number* out_at(int64_t token, int64_t head) const { return out + (token * heads + head) * value_dim; }

 private:
  static const Number* at(const Number* numbers, const int64_t (&strides)[2], int64_t token, int64_t head) {
    return numbers + token * strides[0] + head * strides[1];
  }
};

// Fetches the numbers of one head, which are needed soon.
template <typename Number>
inline void prefetch_head(const Number* place, int64_t count) {
  for (int64_t d = 0; d < count; d += 64 / sizeof(Number)) __builtin_prefetch(place + d);
}

// One thread's matrices; rows are padded to whole vectors, and those of matrices that are transposed to kTransposed.
struct ChunkTiles {
  int64_t depth, width, state_size;  // key_dim and value_dim, padded; numbers of a state
  float *keys, *queries, *turned;    // [kChunk, depth], and the keys as [depth, kChunk]
  float *products, *scores;          // [kChunk, kChunk]
  float *written, *outputs;          // [kChunk, width]
  float* states;                     // [heads, key_dim, width]
  float *between, *left, *grown;     // [kChunk]

  ChunkTiles(std::vector<float>& memory, int64_t key_dim, int64_t value_dim, int64_t heads)
      : depth(round_up(key_dim, kTransposed)), width(round_up(value_dim, kLanes)), state_size(key_dim * width) {
    float* next =
        Scratch(memory).take(kChunk * (3 * depth + 2 * kChunk + 2 * width + 3) + heads * state_size);
    const auto part = [&next](int64_t size) { return std::exchange(next, next + size); };
    keys = part(kChunk * depth), queries = part(kChunk * depth), turned = part(depth * kChunk);
    products = part(kChunk * kChunk), scores = part(kChunk * kChunk);
    written = part(kChunk * width), outputs = part(kChunk * width), states = part(heads * state_size);
    between = part(kChunk), left = part(kChunk), grown = part(kChunk);
    std::fill(written, written + kChunk * width, 0.0f);  // and so the padding, whatever a chunk writes
  }
};

// The columns of a state's rows in parts: part.operator()<Vectors, Whole>(column, count), where `count` is that of a
// vector that is not whole.
template <typename Part>
inline void by_columns(int64_t value_dim, const Part& part) {
  int64_t column = 0;
  const auto whole = [&]<int64_t Vectors>() {
    for (; column + Vectors * kLanes <= value_dim; column += Vectors * kLanes)
      part.template operator()<Vectors, true>(column, 0);
  };
  whole.template operator()<kStepVectors>();
  whole.template operator()<kStepVectors / 2>();
  whole.template operator()<1>();
  if (column < value_dim) part.template operator()<1, false>(column, value_dim - column);
}

template <bool Whole>
inline Vec load_columns(const float* source, int64_t count) {
  return Whole ? Vec::loadu(source) : Vec::loadu(source, count);
}

template <bool Whole>
inline void store_columns(const Vec& vector, float* target, int64_t count) {
  Whole ? vector.store(target) : vector.store(target, count);
}

// The keys of a chunk with their positions as columns; those behind the last are zeros.
inline void turn_keys(const ChunkTiles& tiles, int64_t count) {
  const int64_t depth = tiles.depth, padded = round_up(count, kTransposed);
  std::fill(tiles.keys + count * depth, tiles.keys + padded * depth, 0.0f);
  for (int64_t j = 0; j < padded; j += kTransposed)
    for (int64_t d = 0; d < depth; d += kTransposed)
      at::vec::transpose_mxn<float, kTransposed, kTransposed>(
          tiles.keys + j * depth + d, depth, tiles.turned + d * kChunk + j, kChunk);
}

// What is left of the state before a chunk at each of its positions: `grown`.
template <typename Number>
inline void decays_of_state(
    const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles) {
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    total += problem.log_factor(first + i, head);
    tiles.grown[i] = std::exp(total);
  }
}

// The factors between the positions of a chunk: weigh(i, j, factors) takes those of kLanes positions from j on up to i,
// and whatever lies beyond i. The logarithms of these factors are added up from row to row: differences of totals would
// be less exact where one factor is all but 0. The factors of the last row stay in `left`.
template <typename Number, typename Weigh>
inline void decays_between(
    const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles,
    const Weigh& weigh) {
  std::fill(tiles.between, tiles.between + kChunk, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const Vec decay(problem.log_factor(first + i, head));
    for (int64_t j = 0; j <= i; j += kLanes) {
      const Vec is_behind = Vec::arange(static_cast<float>(j), 1) >= Vec(static_cast<float>(i));
      const Vec between = Vec::blendv(Vec::loadu(tiles.between + j) + decay, Vec(0.0f), is_behind);
      const Vec factors = between.exp();
      between.store(tiles.between + j);
      factors.store(tiles.left + j);
      weigh(i, j, factors);
    }
  }
}

// The outputs of a chunk, from what its positions read in the state before it and in what those up to them write, by
// `scores`.
template <typename Number>
void write_outputs(
    const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles,
    const float* state) {
  const int64_t width = tiles.width;
  multiply<false>(
      tiles.queries, tiles.depth, state, width, tiles.outputs, width, count, problem.key_dim, width);
  for (int64_t begin = 0; begin < count; begin += kRowsTogether) {
    const int64_t end = std::min(begin + kRowsTogether, count);
    for (int64_t i = begin; i < end; ++i) {
      float* row = tiles.outputs + i * width;
      for (int64_t d = 0; d < width; d += kLanes) (Vec::loadu(row + d) * Vec(tiles.grown[i])).store(row + d);
    }
    multiply<true>(
        tiles.scores + begin * kChunk, kChunk, tiles.written, width, tiles.outputs + begin * width, width,
        end - begin, end, width);
    for (int64_t i = begin; i < end; ++i)
      convert_back(tiles.outputs + i * width, problem.out_at(first + i, head), problem.value_dim);
  }
}

// The state after a chunk; what its positions write is multiplied by what is left of it in the end.
inline void advance_state(int64_t key_dim, int64_t count, const ChunkTiles& tiles, float* state) {
  const int64_t width = tiles.width;
  const Vec factor(tiles.grown[count - 1]);
  for (int64_t d = 0; d < tiles.state_size; d += kLanes) (Vec::loadu(state + d) * factor).store(state + d);
  for (int64_t i = 0; i < count; ++i) {
    float* row = tiles.written + i * width;
    for (int64_t d = 0; d < width; d += kLanes) (Vec::loadu(row + d) * Vec(tiles.left[i])).store(row + d);
  }
  multiply<true>(tiles.turned, kChunk, tiles.written, width, state, width, key_dim, count, width);
}

// Several positions of a row: the states of heads from `head` on are copied to the tiles and back.
template <typename Rule, typename Number>
void scan_segment(const MatrixRecurrence<Number>& problem, int64_t head, int64_t heads, const Segment& segment) {
  static thread_local std::vector<float> memory;
  const ChunkTiles tiles(memory, problem.key_dim, problem.value_dim, heads);
  const int64_t width = tiles.width, rows = heads * problem.key_dim, value_dim = problem.value_dim;
  std::fill(tiles.states, tiles.states + rows * width, 0.0f);
  if (segment.source >= 0)
    for (int64_t d = 0; d < rows; ++d)
      std::copy_n(problem.state(segment.source, head) + d * value_dim, value_dim, tiles.states + d * width);
  int64_t position = segment.position;
  for (int64_t first = segment.begin; first < segment.end;) {
    const int64_t count = std::min(segment.end - first, kChunk - position % kChunk);
    if (count > 1) {
      Rule::scan_chunk(problem, head, heads, first, count, tiles);
    } else {
      for (int64_t h = 0; h < heads; ++h) {
        float* state = tiles.states + h * tiles.state_size;
        Rule::step_token(problem, first, head + h, state, state, width);
      }
    }
    first += count, position += count;
  }
  for (int64_t d = 0; d < rows; ++d)
    std::copy_n(tiles.states + d * width, value_dim, problem.state(segment.target, head) + d * value_dim);
}

template <typename Rule, typename Number>
void apply_rule(const MatrixRecurrence<Number>& problem, const std::vector<Segment>& segments, int64_t tokens) {
  const std::vector<int64_t> starts = row_starts(segments);
  const int64_t rows = static_cast<int64_t>(starts.size()) - 1;
  const int64_t parts = divide_up(problem.group, Rule::kHeadsTogether), key_heads = problem.heads / problem.group;
  share_out(rows * key_heads * parts, 4 * tokens * problem.heads * problem.size(), [&](int64_t item) {
    const WithoutDenormals mode;
    const int64_t row = item / (key_heads * parts), key_head = item / parts % key_heads;
    const int64_t skipped = item % parts * Rule::kHeadsTogether, head = key_head * problem.group + skipped;
    const int64_t heads = std::min(Rule::kHeadsTogether, problem.group - skipped);
    for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
      const Segment& segment = segments[i];
      if (segment.end - segment.begin > 1) {
        scan_segment<Rule>(problem, head, heads, segment);
        continue;
      }
      float* target = problem.state(segment.target, head);
      if (segment.source < 0) std::fill(target, target + heads * problem.size(), 0.0f);
      const float* source = segment.source < 0 ? target : problem.state(segment.source, head);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t place = h * problem.size();
        Rule::step_token(problem, segment.begin, head + h, source + place, target + place, problem.value_dim);
      }
    }
  });
}

// The operator of a rule, as recurrent.py and state_space.py define them.
template <typename Rule>
void matrix_recurrence(
    const at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& decay, const at::Tensor& rates, const at::Tensor& states, const at::Tensor& table) {
  const at::ScalarType type = out.scalar_type();
  for (const at::Tensor* tensor : {&query, &key, &value})
    TORCH_CHECK(
        tensor->scalar_type() == type && tensor->dim() == 3, Rule::kName,
        ": query, key, value must be [T, heads, head_dim] in the dtype of out");
  const int64_t tokens = value.size(0), heads = value.size(1), key_heads = key.size(1);
  for (const at::Tensor* tensor : {&decay, &rates})
    TORCH_CHECK(
        tensor->scalar_type() == at::kFloat && tensor->dim() == 2 && tensor->size(0) == tokens &&
            tensor->size(1) == heads,
        Rule::kName, ": decay and ", Rule::kRate, " must be float32 [T, heads of values]");
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == value.sizes() && key.sizes() == query.sizes() && key.size(0) == tokens &&
          key_heads > 0 && heads % key_heads == 0,
      Rule::kName, ": contiguous out like value, and keys like queries whose heads divide those of values, needed");
  TORCH_CHECK(
      states.scalar_type() == at::kFloat && states.dim() == 4 && states.size(1) == heads &&
          states.size(2) == key.size(2) && states.size(3) == value.size(2) &&
          (states.size(0) == 0 || states[0].is_contiguous()),
      Rule::kName, ": states must be float32 [slots, heads, key_dim, value_dim], each slot contiguous");
  const std::vector<Segment> segments = read_segments(table, tokens, states.size(0));
  const auto last_together = [](const at::Tensor& tensor) {
    return tensor.stride(2) == 1 ? tensor : tensor.contiguous();
  };
  const at::Tensor queries = last_together(query), keys = last_together(key), values = last_together(value);
  const at::Tensor decays = decay.contiguous(), contiguous_rates = rates.contiguous();
  run_in_format(type, Rule::kName, [&](auto number) {
    using Number = decltype(number);
    apply_rule<Rule>(
        MatrixRecurrence<Number>{
            out.mutable_data_ptr<Number>(),
            queries.const_data_ptr<Number>(),
            keys.const_data_ptr<Number>(),
            values.const_data_ptr<Number>(),
            decays.const_data_ptr<float>(),
            contiguous_rates.const_data_ptr<float>(),
            states.mutable_data_ptr<float>(),
            {queries.stride(0), queries.stride(1)},
            {keys.stride(0), keys.stride(1)},
            {values.stride(0), values.stride(1)},
            states.stride(0),
            heads,
            key.size(2),
            value.size(2),
            heads / key_heads},
        segments, tokens);
  });
}

}  // namespace nanoserve
