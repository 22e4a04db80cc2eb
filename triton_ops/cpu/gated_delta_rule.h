// The gated delta rule (arXiv 2412.06464): a step for single positions, and a scan of chunks for prompts.
//
// A thread takes a head of a row, whose segments follow one another. Nothing that it computes depends on other rows.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "recurrent_segments.h"
#include "tile_product.h"

namespace nanoserve {

// Positions of a chunk, which begins at a multiple of this. It divides the CHUNK of recurrent.py: a shorter chunk takes
// fewer multiplications, until the products become too small.
constexpr int64_t kChunk = 32;
constexpr int64_t kSolvedRows = 2 * kTileRows;  // of the triangular system that are solved one by one
constexpr float kNormEpsilon = 1e-6f;
// Vectors of a state's row that a step takes together: with their sums, as many as there are registers for.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kStepVectors = 8;
#else
constexpr int64_t kStepVectors = 4;
#endif

// While it lives, a thread takes numbers below float32's normal range (1e-38) for 0. Factors of positions far apart are
// such, where a head forgets fast, and an Intel core takes a hundred times as long to multiply them. Other processors
// than x86 multiply them as fast as any.
class WithoutDenormals {
#if defined(__SSE2__)
 public:
  WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~WithoutDenormals() { _mm_setcsr(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;

 private:
  static constexpr unsigned int kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned int before_;
#else
 public:
  WithoutDenormals() {}
#endif
};

template <typename Number>
struct DeltaRule {
  Number* out;          // [T, value_heads, value_dim]
  const Number* query;  // [T, key_heads, key_dim], with strides; the key likewise
  const Number* key;
  const Number* value;  // [T, value_heads, value_dim], with strides
  const float* decay;   // [T, value_heads]
  const float* beta;
  float* states;  // [slots, value_heads, key_dim, value_dim], slots `state_stride` apart
  int64_t query_strides[2], key_strides[2], value_strides[2];
  int64_t state_stride, value_heads, key_dim, value_dim, group;  // value heads that share a key head

  int64_t size() const { return key_dim * value_dim; }
  float* state(int64_t slot, int64_t head) const { return states + slot * state_stride + head * size(); }
  float rate(int64_t token, int64_t head) const { return beta[token * value_heads + head]; }
  float log_factor(int64_t token, int64_t head) const { return decay[token * value_heads + head]; }
};

// One thread's matrices; rows are padded to whole vectors, and those of matrices that are transposed to kTransposed.
struct DeltaTiles {
  int64_t depth, width;  // key_dim and value_dim, padded
  float *keys, *queries, *turned, *system, *scores, *corrections, *outputs, *state, *between, *left, *grown;

  DeltaTiles(std::vector<float>& memory, int64_t key_dim, int64_t value_dim)
      : depth(round_up(key_dim, kTransposed)), width(round_up(value_dim, kLanes)) {
    float* next =
        Scratch(memory).take(kChunk * (3 * depth + 2 * kChunk + 2 * width + 3) + key_dim * width);
    const auto part = [&next](int64_t size) { return std::exchange(next, next + size); };
    keys = part(kChunk * depth), queries = part(kChunk * depth), turned = part(depth * kChunk);
    system = part(kChunk * kChunk), scores = part(kChunk * kChunk);
    corrections = part(kChunk * width), outputs = part(kChunk * width), state = part(key_dim * width);
    between = part(kChunk), left = part(kChunk), grown = part(kChunk);
  }
};

// A head as floats of length 1, times `scale`; zeros behind it up to `padded`.
template <typename Number>
inline void load_normed(const Number* source, int64_t count, int64_t padded, float scale, float* target) {
  std::fill(target + count, target + padded, 0.0f);
  convert_scaled(source, target, count, 1.0f);
  Vec squares(0.0f);
  for (int64_t d = 0; d < padded; d += kLanes) {
    const Vec part = Vec::loadu(target + d);
    squares = at::vec::fmadd(part, part, squares);
  }
  const Vec factor(scale / std::sqrt(sum_of_lanes(squares) + kNormEpsilon));
  for (int64_t d = 0; d < padded; d += kLanes) (Vec::loadu(target + d) * factor).store(target + d);
}

// One position of a head. Its vectors are padded to whole ones.
struct Step {
  const float *key, *query, *value;
  float* out;
  float factor, rate, product;  // of the state; of the correction; of query and key
  int64_t key_dim;
};

// Columns from `column` on of one step: Vectors of them, or `count` of one vector. Rows of a state are `stride` apart.
//
// With the state S before it, the correction is u = rate (v - factor S^T k), and the state after it factor S + k u^T.
// The output is factor S^T q + (k . q) u, so one pass over S gives both products.
template <int64_t Vectors, bool Whole>
inline void step_columns(
    const Step& step, const float* source, float* target, int64_t stride, int64_t column, int64_t count) {
  const auto load = [&](const float* from, int64_t j) {
    return Whole ? Vec::loadu(from + j * kLanes) : Vec::loadu(from, count);
  };
  const auto store = [&](const Vec& vector, float* to, int64_t j) {
    Whole ? vector.store(to + j * kLanes) : vector.store(to, count);
  };
  Vec known[Vectors], asked[Vectors];
  for (int64_t j = 0; j < Vectors; ++j) known[j] = asked[j] = Vec(0.0f);
  for (int64_t k = 0; k < step.key_dim; ++k) {
    const Vec key(step.key[k]), query(step.query[k]);
    for (int64_t j = 0; j < Vectors; ++j) {
      const Vec state = load(source + k * stride + column, j);
      known[j] = at::vec::fmadd(key, state, known[j]);
      asked[j] = at::vec::fmadd(query, state, asked[j]);
    }
  }
  const Vec factor(step.factor);
  Vec corrections[Vectors];
  for (int64_t j = 0; j < Vectors; ++j) {
    const Vec value = Vec::loadu(step.value + column + j * kLanes);
    corrections[j] = Vec(step.rate) * at::vec::fmadd(Vec(-step.factor), known[j], value);
    at::vec::fmadd(Vec(step.product), corrections[j], factor * asked[j]).store(step.out + column + j * kLanes);
  }
  for (int64_t k = 0; k < step.key_dim; ++k) {
    const Vec key(step.key[k]);
    for (int64_t j = 0; j < Vectors; ++j) {
      const Vec state = load(source + k * stride + column, j);
      store(at::vec::fmadd(key, corrections[j], factor * state), target + k * stride + column, j);
    }
  }
}

// A single position: the state moves from one place to another, which may be the same.
template <typename Number>
void step_token(
    const DeltaRule<Number>& problem, int64_t token, int64_t head, const float* source, float* target, int64_t stride) {
  static thread_local std::vector<float> memory;
  const int64_t depth = round_up(problem.key_dim, kLanes), width = round_up(problem.value_dim, kLanes);
  float* key = Scratch(memory).take(2 * depth + 2 * width);
  float *query = key + depth, *value = query + depth, *out = value + width;
  const auto* queries = problem.query + token * problem.query_strides[0];
  const auto* keys = problem.key + token * problem.key_strides[0];
  const float scale = 1.0f / std::sqrt(static_cast<float>(problem.key_dim));
  load_normed(keys + head / problem.group * problem.key_strides[1], problem.key_dim, depth, 1.0f, key);
  load_normed(queries + head / problem.group * problem.query_strides[1], problem.key_dim, depth, scale, query);
  convert_scaled(
      problem.value + token * problem.value_strides[0] + head * problem.value_strides[1], value, problem.value_dim,
      1.0f);
  Vec products(0.0f);
  for (int64_t d = 0; d < depth; d += kLanes)
    products = at::vec::fmadd(Vec::loadu(key + d), Vec::loadu(query + d), products);
  const Step step{
      key, query, value, out, std::exp(problem.log_factor(token, head)), problem.rate(token, head),
      sum_of_lanes(products), problem.key_dim};
  int64_t column = 0;
  for (; column + kStepVectors * kLanes <= problem.value_dim; column += kStepVectors * kLanes)
    step_columns<kStepVectors, true>(step, source, target, stride, column, 0);
  for (; column + kLanes <= problem.value_dim; column += kLanes)
    step_columns<1, true>(step, source, target, stride, column, 0);
  if (column < problem.value_dim)
    step_columns<1, false>(step, source, target, stride, column, problem.value_dim - column);
  convert_back(out, problem.out + (token * problem.value_heads + head) * problem.value_dim, problem.value_dim);
}

// Keys, queries and values of a chunk, the keys a second time with their positions as columns.
template <typename Number>
void load_chunk(
    const DeltaRule<Number>& problem, int64_t head, int64_t first, int64_t count, const DeltaTiles& tiles) {
  const int64_t depth = tiles.depth, padded = round_up(count, kTransposed), key_head = head / problem.group;
  const float scale = 1.0f / std::sqrt(static_cast<float>(problem.key_dim));
  const auto head_at = [](const Number* numbers, const int64_t (&strides)[2], int64_t some_head, int64_t token,
                          int64_t dim) {
    const Number* place = numbers + token * strides[0] + some_head * strides[1];
    for (int64_t d = 0; d < dim; d += 64 / sizeof(Number)) __builtin_prefetch(place + kPositionsAhead * strides[0] + d);
    return place;
  };
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i, key_dim = problem.key_dim, value_dim = problem.value_dim;
    const Number* key = head_at(problem.key, problem.key_strides, key_head, token, key_dim);
    const Number* query = head_at(problem.query, problem.query_strides, key_head, token, key_dim);
    const Number* value = head_at(problem.value, problem.value_strides, head, token, value_dim);
    load_normed(key, key_dim, depth, 1.0f, tiles.keys + i * depth);
    load_normed(query, key_dim, depth, scale, tiles.queries + i * depth);
    convert_scaled(value, tiles.corrections + i * tiles.width, value_dim, 1.0f);
    total += problem.log_factor(token, head);
    tiles.grown[i] = std::exp(total);
  }
  std::fill(tiles.keys + count * depth, tiles.keys + padded * depth, 0.0f);
  for (int64_t j = 0; j < padded; j += kTransposed)
    for (int64_t d = 0; d < depth; d += kTransposed)
      at::vec::transpose_mxn<float, kTransposed, kTransposed>(
          tiles.keys + j * depth + d, depth, tiles.turned + d * kChunk + j, kChunk);
}

// The products of keys with keys become the negative system below its diagonal, those of queries with keys the weights
// of corrections. Each is multiplied by the factor of the positions between both. The logarithms of these factors are
// added up from row to row: differences of totals would be less exact where one factor is all but 0. The factors of the
// last row stay in `left`.
template <typename Number>
void weigh_products(
    const DeltaRule<Number>& problem, int64_t head, int64_t first, int64_t count, const DeltaTiles& tiles) {
  std::fill(tiles.between, tiles.between + kChunk, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    float *system = tiles.system + i * kChunk, *scores = tiles.scores + i * kChunk;
    const Vec decay(problem.log_factor(first + i, head)), rate(-problem.rate(first + i, head));
    for (int64_t j = 0; j <= i; j += kLanes) {
      const Vec is_behind = Vec::arange(static_cast<float>(j), 1) >= Vec(static_cast<float>(i));
      const Vec between = Vec::blendv(Vec::loadu(tiles.between + j) + decay, Vec(0.0f), is_behind);
      const Vec factors = between.exp();
      between.store(tiles.between + j);
      factors.store(tiles.left + j);
      (Vec::loadu(system + j) * factors * rate).store(system + j);
      (Vec::loadu(scores + j) * factors).store(scores + j);
    }
    std::fill(system + i, system + kChunk, 0.0f);
    std::fill(scores + i + 1, scores + kChunk, 0.0f);
  }
}

// The corrections of a chunk, which are given as the right side of their system: by rows, each less its share of those
// before it.
inline void solve(const DeltaTiles& tiles, int64_t count) {
  const int64_t width = tiles.width;
  for (int64_t begin = 0; begin < count; begin += kSolvedRows) {
    const int64_t end = std::min(begin + kSolvedRows, count);
    float* rows = tiles.corrections + begin * width;
    multiply<true>(
        tiles.system + begin * kChunk, kChunk, tiles.corrections, width, rows, width, end - begin, begin, width);
    for (int64_t i = begin + 1; i < end; ++i)
      multiply<true>(
          tiles.system + i * kChunk + begin, kChunk, rows, width, tiles.corrections + i * width, width, 1, i - begin,
          width);
  }
}

// Some positions of one chunk, as `delta_rule_chunk` of recurrent.py computes them; the state is that of the tiles.
template <typename Number>
void scan_chunk(
    const DeltaRule<Number>& problem, int64_t head, int64_t first, int64_t count, const DeltaTiles& tiles) {
  const int64_t depth = tiles.depth, width = tiles.width, key_dim = problem.key_dim;
  const int64_t columns = round_up(count, kLanes);
  load_chunk(problem, head, first, count, tiles);
  multiply<false>(tiles.keys, depth, tiles.turned, kChunk, tiles.system, kChunk, count, key_dim, columns);
  multiply<false>(tiles.queries, depth, tiles.turned, kChunk, tiles.scores, kChunk, count, key_dim, columns);
  weigh_products(problem, head, first, count, tiles);
  multiply<false>(tiles.keys, depth, tiles.state, width, tiles.outputs, width, count, key_dim, width);
  for (int64_t i = 0; i < count; ++i) {
    const Vec factor(-tiles.grown[i]), rate(problem.rate(first + i, head));
    float *known = tiles.outputs + i * width, *values = tiles.corrections + i * width;
    for (int64_t d = 0; d < width; d += kLanes)
      (rate * at::vec::fmadd(factor, Vec::loadu(known + d), Vec::loadu(values + d))).store(values + d);
  }
  solve(tiles, count);
  multiply<false>(tiles.queries, depth, tiles.state, width, tiles.outputs, width, count, key_dim, width);
  for (int64_t begin = 0; begin < count; begin += kSolvedRows) {
    const int64_t end = std::min(begin + kSolvedRows, count);
    for (int64_t i = begin; i < end; ++i) {
      float* row = tiles.outputs + i * width;
      for (int64_t d = 0; d < width; d += kLanes) (Vec::loadu(row + d) * Vec(tiles.grown[i])).store(row + d);
    }
    multiply<true>(
        tiles.scores + begin * kChunk, kChunk, tiles.corrections, width, tiles.outputs + begin * width, width,
        end - begin, end, width);
    for (int64_t i = begin; i < end; ++i)
      convert_back(
          tiles.outputs + i * width, problem.out + ((first + i) * problem.value_heads + head) * problem.value_dim,
          problem.value_dim);
  }
  const Vec factor(tiles.grown[count - 1]);
  for (int64_t d = 0; d < key_dim * width; d += kLanes)
    (Vec::loadu(tiles.state + d) * factor).store(tiles.state + d);
  for (int64_t d = 0; d < key_dim; ++d)
    for (int64_t j = 0; j < columns; j += kLanes) {
      float* keys = tiles.turned + d * kChunk + j;
      (Vec::loadu(keys) * Vec::loadu(tiles.left + j)).store(keys);
    }
  multiply<true>(
      tiles.turned, kChunk, tiles.corrections, width, tiles.state, width, key_dim, count, width);
}

// Several positions of a row: the state is copied to the tiles and back.
template <typename Number>
void scan_segment(const DeltaRule<Number>& problem, int64_t head, const Segment& segment) {
  static thread_local std::vector<float> memory;
  const DeltaTiles tiles(memory, problem.key_dim, problem.value_dim);
  const int64_t width = tiles.width, value_dim = problem.value_dim;
  std::fill(tiles.state, tiles.state + problem.key_dim * width, 0.0f);
  std::fill(tiles.corrections, tiles.corrections + kChunk * width, 0.0f);
  if (segment.source >= 0)
    for (int64_t d = 0; d < problem.key_dim; ++d)
      std::copy_n(problem.state(segment.source, head) + d * value_dim, value_dim, tiles.state + d * width);
  int64_t position = segment.position;
  for (int64_t first = segment.begin; first < segment.end;) {
    const int64_t count = std::min(segment.end - first, kChunk - position % kChunk);
    if (count == 1)
      step_token(problem, first, head, tiles.state, tiles.state, width);
    else
      scan_chunk(problem, head, first, count, tiles);
    first += count, position += count;
  }
  for (int64_t d = 0; d < problem.key_dim; ++d)
    std::copy_n(tiles.state + d * width, value_dim, problem.state(segment.target, head) + d * value_dim);
}

template <typename Number>
void apply_delta_rule(const DeltaRule<Number>& problem, const std::vector<Segment>& segments, int64_t tokens) {
  const std::vector<int64_t> starts = row_starts(segments);
  const int64_t rows = static_cast<int64_t>(starts.size()) - 1;
  share_out(rows * problem.value_heads, 4 * tokens * problem.value_heads * problem.size(), [&](int64_t item) {
    const WithoutDenormals mode;
    const int64_t row = item / problem.value_heads, head = item % problem.value_heads;
    for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
      const Segment& segment = segments[i];
      if (segment.end - segment.begin > 1) {
        scan_segment(problem, head, segment);
        continue;
      }
      float* target = problem.state(segment.target, head);
      if (segment.source < 0) std::fill(target, target + problem.size(), 0.0f);
      const float* source = segment.source < 0 ? target : problem.state(segment.source, head);
      step_token(problem, segment.begin, head, source, target, problem.value_dim);
    }
  });
}

inline void gated_delta_rule(
    const at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& decay, const at::Tensor& beta, const at::Tensor& states, const at::Tensor& table) {
  const at::ScalarType type = out.scalar_type();
  for (const at::Tensor* tensor : {&query, &key, &value})
    TORCH_CHECK(
        tensor->scalar_type() == type && tensor->dim() == 3,
        "gated_delta_rule: query, key, value must be [T, heads, head_dim] in the dtype of out");
  const int64_t tokens = value.size(0), heads = value.size(1), key_heads = key.size(1);
  for (const at::Tensor* tensor : {&decay, &beta})
    TORCH_CHECK(
        tensor->scalar_type() == at::kFloat && tensor->dim() == 2 && tensor->size(0) == tokens &&
            tensor->size(1) == heads,
        "gated_delta_rule: decay and beta must be float32 [T, value_heads]");
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == value.sizes() && key.sizes() == query.sizes() && key.size(0) == tokens &&
          key_heads > 0 && heads % key_heads == 0,
      "gated_delta_rule: contiguous out like value, and keys like queries whose heads divide the value heads, needed");
  TORCH_CHECK(
      states.scalar_type() == at::kFloat && states.dim() == 4 && states.size(1) == heads &&
          states.size(2) == key.size(2) && states.size(3) == value.size(2) &&
          (states.size(0) == 0 || states[0].is_contiguous()),
      "gated_delta_rule: states must be float32 [slots, value_heads, key_dim, value_dim], each slot contiguous");
  const std::vector<Segment> segments = read_segments(table, tokens, states.size(0));
  const auto last_together = [](const at::Tensor& tensor) {
    return tensor.stride(2) == 1 ? tensor : tensor.contiguous();
  };
  const at::Tensor queries = last_together(query), keys = last_together(key), values = last_together(value);
  const at::Tensor decays = decay.contiguous(), rates = beta.contiguous();
  const auto run = [&](auto number) {
    using Number = decltype(number);
    apply_delta_rule(
        DeltaRule<Number>{
            out.mutable_data_ptr<Number>(),
            queries.const_data_ptr<Number>(),
            keys.const_data_ptr<Number>(),
            values.const_data_ptr<Number>(),
            decays.const_data_ptr<float>(),
            rates.const_data_ptr<float>(),
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
  };
  switch (type) {
    case at::kFloat: return run(float());
    case at::kBFloat16: return run(at::BFloat16());
    case at::kHalf: return run(at::Half());
    default: TORCH_CHECK(false, "gated_delta_rule: no implementation for ", type);
  }
}

}  // namespace nanoserve
