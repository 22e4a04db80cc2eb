// The gated delta rule (arXiv 2412.06464): a position writes what its value is more than what the state has of its key.
#pragma once

#include "matrix_recurrence.h"

namespace nanoserve {

constexpr float kNormEpsilon = 1e-6f;

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
struct DeltaStep {
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
inline void correct_columns(
    const DeltaStep& step, const float* source, float* target, int64_t stride, int64_t column, int64_t count) {
  Vec known[Vectors], asked[Vectors];
  for (int64_t j = 0; j < Vectors; ++j) known[j] = asked[j] = Vec(0.0f);
  for (int64_t k = 0; k < step.key_dim; ++k) {
    const Vec key(step.key[k]), query(step.query[k]);
    for (int64_t j = 0; j < Vectors; ++j) {
      const Vec state = load_columns<Whole>(source + k * stride + column + j * kLanes, count);
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
      const Vec state = load_columns<Whole>(source + k * stride + column + j * kLanes, count);
      store_columns<Whole>(
          at::vec::fmadd(key, corrections[j], factor * state), target + k * stride + column + j * kLanes, count);
    }
  }
}

struct DeltaRule {
  static constexpr const char *kName = "gated_delta_rule", *kRate = "beta";
  static constexpr int64_t kHeadsTogether = 1;

  template <typename Number>
  static void step_token(
      const MatrixRecurrence<Number>& problem, int64_t token, int64_t head, const float* source, float* target,
      int64_t stride) {
    static thread_local std::vector<float> memory;
    const int64_t key_dim = problem.key_dim, value_dim = problem.value_dim;
    const int64_t depth = round_up(key_dim, kLanes), width = round_up(value_dim, kLanes);
    float* key = Scratch(memory).take(2 * depth + 2 * width);
    float *query = key + depth, *value = query + depth, *out = value + width;
    const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
    load_normed(problem.key_at(token, head), key_dim, depth, 1.0f, key);
    load_normed(problem.query_at(token, head), key_dim, depth, scale, query);
    convert_scaled(problem.value_at(token, head), value, value_dim, 1.0f);
    Vec products(0.0f);
    for (int64_t d = 0; d < depth; d += kLanes)
      products = at::vec::fmadd(Vec::loadu(key + d), Vec::loadu(query + d), products);
    const DeltaStep step{
        key, query, value, out, std::exp(problem.log_factor(token, head)), problem.rate(token, head),
        sum_of_lanes(products), key_dim};
    by_columns(value_dim, [&]<int64_t Vectors, bool Whole>(int64_t column, int64_t count) {
      correct_columns<Vectors, Whole>(step, source, target, stride, column, count);
    });
    convert_back(out, problem.out_at(token, head), value_dim);
  }

  // As `delta_rule_chunk` of recurrent.py computes it.
  template <typename Number>
  static void scan_chunk(
      const MatrixRecurrence<Number>& problem, int64_t head, int64_t /*heads*/, int64_t first, int64_t count,
      const ChunkTiles& tiles) {
    const int64_t depth = tiles.depth, width = tiles.width, key_dim = problem.key_dim;
    const int64_t columns = round_up(count, kLanes);
    load_chunk(problem, head, first, count, tiles);
    multiply<false>(tiles.keys, depth, tiles.turned, kChunk, tiles.products, kChunk, count, key_dim, columns);
    multiply<false>(tiles.queries, depth, tiles.turned, kChunk, tiles.scores, kChunk, count, key_dim, columns);
    weigh_products(problem, head, first, count, tiles);
    multiply<false>(tiles.keys, depth, tiles.states, width, tiles.outputs, width, count, key_dim, width);
    for (int64_t i = 0; i < count; ++i) {
      const Vec factor(-tiles.grown[i]), rate(problem.rate(first + i, head));
      float *known = tiles.outputs + i * width, *values = tiles.written + i * width;
      for (int64_t d = 0; d < width; d += kLanes)
        (rate * at::vec::fmadd(factor, Vec::loadu(known + d), Vec::loadu(values + d))).store(values + d);
    }
    solve(tiles, count);
    write_outputs(problem, head, first, count, tiles, tiles.states);
    advance_state(key_dim, count, tiles, tiles.states);
  }

 private:
  // Keys, queries and values of a chunk, the keys a second time with their positions as columns.
  template <typename Number>
  static void load_chunk(
      const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles) {
    const int64_t depth = tiles.depth, key_dim = problem.key_dim, value_dim = problem.value_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
    for (int64_t i = 0; i < count; ++i) {
      const Number *key = problem.key_at(first + i, head), *query = problem.query_at(first + i, head);
      const Number* value = problem.value_at(first + i, head);
      prefetch_head(key + kPositionsAhead * problem.key_strides[0], key_dim);
      prefetch_head(query + kPositionsAhead * problem.query_strides[0], key_dim);
      prefetch_head(value + kPositionsAhead * problem.value_strides[0], value_dim);
      load_normed(key, key_dim, depth, 1.0f, tiles.keys + i * depth);
      load_normed(query, key_dim, depth, scale, tiles.queries + i * depth);
      convert_scaled(value, tiles.written + i * tiles.width, value_dim, 1.0f);
    }
    decays_of_state(problem, head, first, count, tiles);
    turn_keys(tiles, count);
  }

  // The products of keys with keys become the negative system below its diagonal, those of queries with keys the weights
  // of corrections. Each is multiplied by the factor of the positions between both.
  template <typename Number>
  static void weigh_products(
      const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles) {
    decays_between(problem, head, first, count, tiles, [&](int64_t i, int64_t j, const Vec& factors) {
      float *system = tiles.products + i * kChunk + j, *scores = tiles.scores + i * kChunk + j;
      (Vec::loadu(system) * factors * Vec(-problem.rate(first + i, head))).store(system);
      (Vec::loadu(scores) * factors).store(scores);
    });
    for (int64_t i = 0; i < count; ++i) {
      std::fill(tiles.products + i * kChunk + i, tiles.products + (i + 1) * kChunk, 0.0f);
      std::fill(tiles.scores + i * kChunk + i + 1, tiles.scores + (i + 1) * kChunk, 0.0f);
    }
  }

  // The corrections of a chunk, which are given as the right side of their system: by rows, each less its share of those
  // before it.
  static void solve(const ChunkTiles& tiles, int64_t count) {
    const int64_t width = tiles.width;
    const float* system = tiles.products;
    for (int64_t begin = 0; begin < count; begin += kRowsTogether) {
      const int64_t end = std::min(begin + kRowsTogether, count);
      float* rows = tiles.written + begin * width;
      multiply<true>(
          system + begin * kChunk, kChunk, tiles.written, width, rows, width, end - begin, begin, width);
      for (int64_t i = begin + 1; i < end; ++i)
        multiply<true>(
            system + i * kChunk + begin, kChunk, rows, width, tiles.written + i * width, width, 1, i - begin, width);
    }
  }
};

}  // namespace nanoserve
