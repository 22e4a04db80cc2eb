// Attention of rows with several queries: blocks of queries against tiles of keys, as matrix products with an online
// softmax (arXiv 2205.14135). All heads that share a key-value head are rows of the same product.
#pragma once

#include "attention_problem.h"
#include "bfloat16_attention.h"
#include "tile_product.h"

namespace nanoserve {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kBlockRows = 128;  // queries times heads of a group

// One thread's tiles.
struct Tiles {
  int64_t rows, depth, width;  // head_dim and value_dim, padded
  float *query, *loaded, *keys, *values, *scores, *sums, *largest, *totals;

  Tiles(std::vector<float>& memory, int64_t most_rows, int64_t head_dim, int64_t value_dim)
      : rows(most_rows), depth(round_up(head_dim, kTransposed)), width(round_up(value_dim, kTransposed)) {
    float* next =
        Scratch(memory).take((rows + 2 * kTileKeys) * depth + (rows + kTileKeys) * width + rows * (kTileKeys + 2));
    const auto part = [&next](int64_t size) { return std::exchange(next, next + size); };
    query = part(rows * depth), loaded = part(kTileKeys * depth), keys = part(depth * kTileKeys);
    values = part(kTileKeys * width), scores = part(rows * kTileKeys), sums = part(rows * width);
    largest = part(rows), totals = part(rows);
  }
};

// Positions first..last of a tile that begins at `begin`, as floats; zeros where nothing may be read. Slots of the cache
// are `stride` apart and hold `columns` numbers, rows of the tile are `depth` apart.
template <typename Number>
void load_tile(
    const Problem<Number>& problem, const Number* cache, int64_t stride, int64_t columns, int64_t row, int64_t kv_head,
    int64_t begin, int64_t first, int64_t last, int64_t depth, float* tile) {
  if (last - first < kTileKeys || columns < depth) std::fill(tile, tile + kTileKeys * depth, 0.0f);
  problem.stretches(row, kv_head, first, last, [&](int64_t slot, int64_t position, int64_t count) {
    for (int64_t j = 0; j < count; ++j)
      convert_scaled(cache + (slot + j) * stride, tile + (position - begin + j) * depth, columns, 1.0f);
  });
}

// Scores of one row of a tile become weights; returns by what factor earlier sums are to be multiplied.
inline float weigh_tile(float* scores, int64_t from, int64_t to, float soft_cap, float& largest, float& total) {
  if (soft_cap > 0.0f) cap_scores(scores, kTileKeys, soft_cap);
  std::fill(scores, scores + from, kNothing);
  std::fill(scores + to, scores + kTileKeys, kNothing);
  Vec top(largest);
  for (int64_t j = 0; j < kTileKeys; j += kLanes) top = at::vec::maximum(top, Vec::loadu(scores + j));
  const float now = largest_lane(top), factor = largest == now ? 1.0f : std::exp(largest - now);
  Vec sum(0.0f);
  for (int64_t j = 0; j < kTileKeys; j += kLanes) {
    const Vec weight = (Vec::loadu(scores + j) - Vec(now)).exp_u20();
    weight.store(scores + j);
    sum = sum + weight;
  }
  total = total * factor + sum_of_lanes(sum);
  largest = now;
  return factor;
}

// Queries first_query..last_query (counted within the row) of all heads of one group.
template <typename Number>
void attend_block(
    const Problem<Number>& problem, int64_t row, int64_t kv_head, int64_t first_query, int64_t last_query,
    const Tiles& tiles) {
  const int64_t group = problem.group, depth = tiles.depth, width = tiles.width, head_dim = problem.head_dim;
  const int64_t rows = (last_query - first_query) * group, token = problem.query_starts[row];
  const int64_t before = problem.contexts[row] - problem.queries(row);  // position of the row's first query
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t head = kv_head * group + i % group;
    std::fill(tiles.query + i * depth + head_dim, tiles.query + (i + 1) * depth, 0.0f);
    convert_scaled(
        problem.query_at(token + first_query + i / group, head), tiles.query + i * depth, head_dim, problem.scale);
  }
  std::fill(tiles.sums, tiles.sums + rows * width, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {  // a sink is there before any key
    tiles.largest[i] = problem.sinks ? problem.sinks[kv_head * group + i % group] : kNothing;
    tiles.totals[i] = tiles.largest[i] == kNothing ? 0.0f : 1.0f;
  }
  const int64_t seen = problem.first_seen(row, before + first_query);
  const int64_t end = problem.seen_end(row, before + last_query - 1);
  for (int64_t begin = seen / kTileKeys * kTileKeys; begin < end; begin += kTileKeys) {
    const int64_t first = std::max(begin, seen), last = std::min(begin + kTileKeys, end);
    load_tile(problem, problem.keys, head_dim, head_dim, row, kv_head, begin, first, last, depth, tiles.loaded);
    for (int64_t j = 0; j < kTileKeys; j += kTransposed)
      for (int64_t d = 0; d < depth; d += kTransposed)
        at::vec::transpose_mxn<float, kTransposed, kTransposed>(
            tiles.loaded + j * depth + d, depth, tiles.keys + d * kTileKeys + j, kTileKeys);
    load_tile(
        problem, problem.values, problem.value_stride, problem.value_dim, row, kv_head, begin, first, last, width,
        tiles.values);
    multiply<false>(tiles.query, depth, tiles.keys, kTileKeys, tiles.scores, kTileKeys, rows, depth, kTileKeys);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = before + first_query + i / group;
      const int64_t from = std::max(first, problem.first_seen(row, position)) - begin;
      const int64_t to = std::min(last, problem.seen_end(row, position)) - begin;
      float* scores = tiles.scores + i * kTileKeys;
      if (from >= to) {  // this query sees nothing of the tile
        std::fill(scores, scores + kTileKeys, 0.0f);
        continue;
      }
      const float factor = weigh_tile(scores, from, to, problem.soft_cap, tiles.largest[i], tiles.totals[i]);
      float* sums = tiles.sums + i * width;
      if (factor != 1.0f)
        for (int64_t d = 0; d < width; d += kLanes) (Vec::loadu(sums + d) * Vec(factor)).store(sums + d);
    }
    multiply<true>(tiles.scores, kTileKeys, tiles.values, width, tiles.sums, width, rows, kTileKeys, width);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* sums = tiles.sums + i * width;
    for (int64_t d = 0; d < width; d += kLanes) (Vec::loadu(sums + d) / Vec(tiles.totals[i])).store(sums + d);
    convert_back(sums, problem.out_at(token + first_query + i / group, kv_head * group + i % group), problem.value_dim);
  }
}

template <typename Number>
void attend_several_queries(const Problem<Number>& problem, const std::vector<int64_t>& rows) {
  if constexpr (std::is_same_v<Number, at::BFloat16>)
    if (attend_in_bfloat16(problem, rows)) return;
  share_queries(problem, rows, kBlockRows, [&](int64_t row, int64_t kv_head, int64_t first, int64_t last) {
    static thread_local std::vector<float> memory;
    const Tiles tiles(memory, (last - first) * problem.group, problem.head_dim, problem.value_dim);
    attend_block(problem, row, kv_head, first, last, tiles);
  });
}

}  // namespace nanoserve
