// What attention over the paged cache reads and writes, and which part of it a single token needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

#include "vectors.h"

namespace nanoserve {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

template <typename Number>
struct Problem {
  Number* out;           // [T, num_heads * value_dim]
  const Number* query;   // [T, num_heads, head_dim], with strides
  const Number* keys;    // [num_blocks, num_kv_heads, block_size, head_dim]
  const Number* values;  // [num_blocks, num_kv_heads, block_size, value_dim], the slots at a distance of their own
  const int32_t* block_tables;
  const int32_t* query_starts;
  const int32_t* contexts;
  const float* sinks;  // [num_heads], or null
  const int32_t* spans;  // [rows, 2]: a length, and where one begins; or null: all are of length 1
  int64_t table_width, rows;
  int64_t query_token_stride, query_head_stride;
  int64_t num_heads, num_kv_heads, group, head_dim, value_dim, value_stride, block_size;
  int64_t window;
  float scale, soft_cap;

  int64_t queries(int64_t row) const { return query_starts[row + 1] - query_starts[row]; }
  // The first position of the span that a position of the row lies in. It may lie before the row.
  int64_t start_of_span(int64_t row, int64_t position) const {
    if (spans == nullptr) return position;
    const int64_t length = spans[2 * row], distance = (position - spans[2 * row + 1]) % length;
    return position - (distance < 0 ? distance + length : distance);
  }
  // The first position that a query of the row at `position` sees.
  int64_t first_seen(int64_t row, int64_t position) const {
    return window ? std::max<int64_t>(0, start_of_span(row, position) + 1 - window) : 0;
  }
  // The position behind the last one that a query of the row at `position` sees.
  int64_t seen_end(int64_t row, int64_t position) const {
    if (spans == nullptr) return position + 1;
    return std::min<int64_t>(contexts[row], start_of_span(row, position) + spans[2 * row]);
  }
  const Number* query_at(int64_t token, int64_t head) const {
    return query + token * query_token_stride + head * query_head_stride;
  }
  Number* out_at(int64_t token, int64_t head) const { return out + (token * num_heads + head) * value_dim; }
  // Which slot of a cache holds the key or value of a row's position; behind it follow the rest of its block.
  int64_t slot(int64_t row, int64_t kv_head, int64_t position) const {
    const int64_t block = block_tables[row * table_width + position / block_size];
    return (block * num_kv_heads + kv_head) * block_size + position % block_size;
  }
  const Number* key_at(int64_t slot) const { return keys + slot * head_dim; }
  const Number* value_at(int64_t slot) const { return values + slot * value_stride; }

  // Calls body(slot, first, count) for each stretch of positions first..last that lies together in the caches.
  template <typename Body>
  void stretches(int64_t row, int64_t kv_head, int64_t first, int64_t last, const Body& body) const {
    while (first < last) {
      const int64_t count = std::min(last - first, block_size - first % block_size);
      body(slot(row, kv_head, first), first, count);
      first += count;
    }
  }
};

// Cuts the queries of some rows into blocks of about `size` queries times heads of a group, and calls
// body(row, kv_head, first query, last query), counted within the row, for each block on the thread that is free next.
template <typename Number, typename Body>
void share_queries(
    const Problem<Number>& problem, const std::vector<int64_t>& rows, int64_t size, const Body& body) {
  struct Block {
    int64_t row, first_query, last_query;
  };
  std::vector<Block> blocks;
  const int64_t queries_at_once = std::max<int64_t>(1, size / problem.group);
  int64_t work = 0;
  for (const int64_t row : rows) {
    const int64_t queries = problem.queries(row);
    work += queries * problem.contexts[row] * problem.num_heads * (problem.head_dim + problem.value_dim);
    // The last queries see most: begun first, they leave no thread waiting for a long block at the end.
    for (int64_t first = (queries - 1) / queries_at_once * queries_at_once; first >= 0; first -= queries_at_once)
      blocks.push_back({row, first, std::min(first + queries_at_once, queries)});
  }
  share_out(static_cast<int64_t>(blocks.size()) * problem.num_kv_heads, work, [&](int64_t place) {
    // A head's keys and values stay in the cache from block to block.
    const int64_t count = static_cast<int64_t>(blocks.size());
    const Block& block = blocks[place % count];
    body(block.row, place / count, block.first_query, block.last_query);
  });
}

// scores[0..count] of any sign become cap * tanh(score / cap); count is a multiple of kLanes.
inline void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t j = 0; j < count; j += kLanes)
    (Vec(cap) * (Vec::loadu(scores + j) * Vec(1.0f / cap)).tanh()).store(scores + j);
}

template <typename Number>
Problem<Number> make_problem(
    const at::Tensor& out, const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& block_tables, const at::Tensor& query_starts, const at::Tensor& context_lengths, double scale,
    int64_t window, double soft_cap, const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& spans) {
  Problem<Number> problem;
  problem.out = out.mutable_data_ptr<Number>();
  problem.query = query.const_data_ptr<Number>();
  problem.keys = key_cache.const_data_ptr<Number>();
  problem.values = value_cache.const_data_ptr<Number>();
  problem.block_tables = block_tables.const_data_ptr<int32_t>();
  problem.query_starts = query_starts.const_data_ptr<int32_t>();
  problem.contexts = context_lengths.const_data_ptr<int32_t>();
  problem.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  problem.spans = spans ? spans->const_data_ptr<int32_t>() : nullptr;
  problem.table_width = block_tables.size(1);
  problem.rows = context_lengths.size(0);
  problem.query_token_stride = query.stride(0);
  problem.query_head_stride = query.stride(1);
  problem.num_heads = query.size(1);
  problem.num_kv_heads = key_cache.size(1);
  problem.group = problem.num_heads / problem.num_kv_heads;
  problem.head_dim = query.size(2);
  problem.value_dim = value_cache.size(3);
  problem.value_stride = value_cache.stride(2);
  problem.block_size = key_cache.size(2);
  problem.window = window;
  problem.scale = static_cast<float>(scale);
  problem.soft_cap = static_cast<float>(soft_cap);
  return problem;
}

}  // namespace nanoserve
