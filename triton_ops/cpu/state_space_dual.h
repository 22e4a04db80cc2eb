// The state-space duality of Mamba-2 (arXiv 2405.21060): a position writes its value times its time step, whatever the
// state has of its key. So the products of queries and keys serve all heads that share them.
#pragma once

#include "matrix_recurrence.h"

namespace nanoserve {

// Columns from `column` on of one step: Vectors of them, or `count` of one vector. Rows of a state are `stride` apart.
// One pass over the state reads it, writes it, and multiplies what is written by the query.
struct DualStep {
  const float *key, *query, *added;  // padded to whole vectors
  float* out;
  float factor;
  int64_t key_dim;

  template <int64_t Vectors, bool Whole>
  void advance(const float* source, float* target, int64_t stride, int64_t column, int64_t count) const {
    Vec written[Vectors], sums[Vectors];
    for (int64_t j = 0; j < Vectors; ++j) {
      written[j] = Vec::loadu(added + column + j * kLanes);
      sums[j] = Vec(0.0f);
    }
    const Vec decay(factor);
    for (int64_t k = 0; k < key_dim; ++k) {
      const Vec some_key(key[k]), some_query(query[k]);
      for (int64_t j = 0; j < Vectors; ++j) {
        const int64_t place = k * stride + column + j * kLanes;
        const Vec state =
            at::vec::fmadd(some_key, written[j], decay * load_columns<Whole>(source + place, count));
        store_columns<Whole>(state, target + place, count);
        sums[j] = at::vec::fmadd(some_query, state, sums[j]);
      }
    }
    for (int64_t j = 0; j < Vectors; ++j) sums[j].store(out + column + j * kLanes);
  }
};

struct StateSpaceDual {
  static constexpr const char *kName = "state_space_dual", *kRate = "time_step";
  static constexpr int64_t kHeadsTogether = 8;

  template <typename Number>
  static void step_token(
      const MatrixRecurrence<Number>& problem, int64_t token, int64_t head, const float* source, float* target,
      int64_t stride) {
    static thread_local std::vector<float> memory;
    const int64_t key_dim = problem.key_dim, value_dim = problem.value_dim;
    const int64_t depth = round_up(key_dim, kLanes), width = round_up(value_dim, kLanes);
    float* key = Scratch(memory).take(2 * depth + 2 * width);
    float *query = key + depth, *added = query + depth, *out = added + width;
    convert_scaled(problem.key_at(token, head), key, key_dim, 1.0f);
    convert_scaled(problem.query_at(token, head), query, key_dim, 1.0f);
    convert_scaled(problem.value_at(token, head), added, value_dim, problem.rate(token, head));
    const DualStep step{key, query, added, out, std::exp(problem.log_factor(token, head)), key_dim};
    by_columns(value_dim, [&]<int64_t Vectors, bool Whole>(int64_t column, int64_t count) {
      step.template advance<Vectors, Whole>(source, target, stride, column, count);
    });
    convert_back(out, problem.out_at(token, head), value_dim);
  }

  // As `dual_chunk` of state_space.py computes it.
  template <typename Number>
  static void scan_chunk(
      const MatrixRecurrence<Number>& problem, int64_t head, int64_t heads, int64_t first, int64_t count,
      const ChunkTiles& tiles) {
    const int64_t depth = tiles.depth, key_dim = problem.key_dim;
    for (int64_t i = 0; i < count; ++i) {
      load_row(problem.key_at(first + i, head), problem.key_strides[0], key_dim, tiles.keys + i * depth);
      load_row(problem.query_at(first + i, head), problem.query_strides[0], key_dim, tiles.queries + i * depth);
    }
    turn_keys(tiles, count);
    multiply<false>(
        tiles.queries, depth, tiles.turned, kChunk, tiles.products, kChunk, count, key_dim, round_up(count, kLanes));
    for (int64_t h = 0; h < heads; ++h) {
      float* state = tiles.states + h * tiles.state_size;
      load_written(problem, head + h, first, count, tiles);
      write_outputs(problem, head + h, first, count, tiles, state);
      advance_state(key_dim, count, tiles, state);
    }
  }

 private:
  template <typename Number>
  static void load_row(const Number* source, int64_t stride, int64_t count, float* target) {
    prefetch_head(source + kPositionsAhead * stride, count);
    convert_scaled(source, target, count, 1.0f);
  }

  // What the positions of a chunk write, and the weights of it in the outputs.
  template <typename Number>
  static void load_written(
      const MatrixRecurrence<Number>& problem, int64_t head, int64_t first, int64_t count, const ChunkTiles& tiles) {
    for (int64_t i = 0; i < count; ++i) {
      const Number* value = problem.value_at(first + i, head);
      prefetch_head(value + problem.value_strides[1], problem.value_dim);  // the next one's
      convert_scaled(value, tiles.written + i * tiles.width, problem.value_dim, problem.rate(first + i, head));
    }
    decays_of_state(problem, head, first, count, tiles);
    decays_between(problem, head, first, count, tiles, [&](int64_t i, int64_t j, const Vec& factors) {
      (Vec::loadu(tiles.products + i * kChunk + j) * factors).store(tiles.scores + i * kChunk + j);
    });
    for (int64_t i = 0; i < count; ++i)
      std::fill(tiles.scores + i * kChunk + i + 1, tiles.scores + (i + 1) * kChunk, 0.0f);
  }
};

}  // namespace nanoserve
