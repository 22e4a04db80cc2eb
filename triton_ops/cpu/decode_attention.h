// Attention of rows with a single query: every key and value is read once, for all the heads that share it.
//
// The context is cut into spans of fixed places. A span's result depends on nothing but the row itself, and so neither
// on the other rows of the step nor on the number of threads.
#pragma once

#include <bit>

#include "attention_problem.h"

namespace nanoserve {

constexpr int64_t kSpan = 256;       // positions
constexpr int64_t kHeadsAtOnce = 4;  // query heads whose sums stay in registers together

// The products of some heads' queries with some keys, lane by lane: of query g and key j at place g * Keys + j.
template <int64_t Heads, int64_t Keys>
struct Products {
  Vec places[Heads * Keys];
};

// For keys lying together and queries in the order of `convert_scaled_pairs`. What is `ahead` of a key in memory is
// fetched meanwhile. Loops are unrolled by hand, or the compiler would keep the products in memory.
template <int64_t Heads, int64_t Keys, typename Number>
C10_ALWAYS_INLINE Products<Heads, Keys> multiply_keys(
    const float* query, int64_t query_stride, const Number* keys, int64_t head_dim, int64_t ahead) {
  Products<Heads, Keys> products;
  c10::ForcedUnroll<Heads * Keys>{}([&](auto place) { products.places[place] = Vec(0.0f); });
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes)
    c10::ForcedUnroll<Keys>{}([&](auto j) {
      prefetch_pair(keys + j * head_dim + d + ahead);
      const Pair key = pair_at(keys + j * head_dim + d);
      c10::ForcedUnroll<Heads>{}([&](auto g) {
        const float* part = query + g * query_stride + d;
        Vec& product = products.places[g * Keys + j];
        product = at::vec::fmadd(floats_at(part), key.first, product);
        product = at::vec::fmadd(floats_at(part + kLanes), key.second, product);
      });
    });
  for (; d < head_dim; d += kLanes) {
    const int64_t columns = std::min(head_dim - d, kLanes);
    c10::ForcedUnroll<Keys>{}([&](auto j) {
      const Number* place = keys + j * head_dim + d;
      const Vec key = columns < kLanes ? some_floats_at(place, columns) : floats_at(place);
      c10::ForcedUnroll<Heads>{}([&](auto g) {
        Vec& product = products.places[g * Keys + j];
        product = at::vec::fmadd(floats_at(query + g * query_stride + d), key, product);
      });
    });
  }
  return products;
}

// scores[g][j] = query[g] . keys[j] for `count` keys lying together. As many keys at once as their sums, those of all
// heads, fill a vector: adding up lanes takes several times as long for one at a time.
template <typename Number, int64_t Heads>
inline void score_keys(
    const float* query, int64_t query_stride, const Number* keys, int64_t count, int64_t head_dim, const Number* next,
    float* scores) {
  constexpr int64_t kKeys = kLanes / std::bit_ceil(static_cast<uint64_t>(Heads));
  const int64_t ahead = next - keys;
  int64_t j = 0;
  for (; j + kKeys <= count; j += kKeys) {
    const auto products = multiply_keys<Heads, kKeys>(query, query_stride, keys + j * head_dim, head_dim, ahead);
    float sums[kLanes];
    sums_of_lanes(products.places).store(sums);
    for (int64_t g = 0; g < Heads; ++g) std::copy_n(sums + g * kKeys, kKeys, scores + g * kSpan + j);
  }
  for (; j < count; ++j) {
    const auto products = multiply_keys<Heads, 1>(query, query_stride, keys + j * head_dim, head_dim, ahead);
    for (int64_t g = 0; g < Heads; ++g) scores[g * kSpan + j] = sum_of_lanes(products.places[g]);
  }
}

// Scores become weights exp(score - largest); returns {largest, sum of weights}.
inline std::pair<float, float> weigh(float* scores, int64_t count, float soft_cap) {
  const int64_t padded = round_up(count, kLanes);
  if (soft_cap > 0.0f) cap_scores(scores, padded, soft_cap);
  std::fill(scores + count, scores + padded, kNothing);
  Vec largest(kNothing);
  for (int64_t j = 0; j < padded; j += kLanes) largest = at::vec::maximum(largest, Vec::loadu(scores + j));
  const float top = largest_lane(largest);
  Vec total(0.0f);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec weight = (Vec::loadu(scores + j) - Vec(top)).exp_u20();
    weight.store(scores + j);
    total = total + weight;
  }
  return {top, sum_of_lanes(total)};
}

// out[g][d] = sum over positions of weights[g][position] * value[position][d], for Pairs * 2 * kLanes columns from d.
template <typename Number, int64_t Heads, int64_t Pairs>
inline void add_values(
    const Problem<Number>& problem, int64_t row, int64_t kv_head, int64_t first, int64_t last, const float* weights,
    int64_t d, float* out, int64_t out_stride) {
  Pair sums[Heads][Pairs];
  for (auto& head : sums)
    for (auto& sum : head) sum = {Vec(0.0f), Vec(0.0f)};
  const int64_t stride = problem.value_stride;
  problem.stretches(row, kv_head, first, last, [&](int64_t slot, int64_t position, int64_t count) {
    const Number* values = problem.value_at(slot) + d;
    const int64_t after = position + count;
    const Number* next = after < last ? problem.value_at(problem.slot(row, kv_head, after)) + d : values;
    for (int64_t j = 0; j < count; ++j, values += stride, next += stride) {
      Pair value[Pairs];
      for (int64_t pair = 0; pair < Pairs; ++pair) {
        prefetch_pair(next + pair * 2 * kLanes);
        value[pair] = pair_at(values + pair * 2 * kLanes);
      }
      for (int64_t g = 0; g < Heads; ++g) {
        const Vec weight(weights[g * kSpan + position - first + j]);
        for (int64_t pair = 0; pair < Pairs; ++pair) {
          sums[g][pair].first = at::vec::fmadd(weight, value[pair].first, sums[g][pair].first);
          sums[g][pair].second = at::vec::fmadd(weight, value[pair].second, sums[g][pair].second);
        }
      }
    }
  });
  for (int64_t g = 0; g < Heads; ++g)
    for (int64_t pair = 0; pair < Pairs; ++pair)
      store_in_order<Number>(sums[g][pair], out + g * out_stride + d + pair * 2 * kLanes);
}

// The same for the columns from d that make no pair: at most kLanes of them.
template <typename Number, int64_t Heads>
inline void add_last_values(
    const Problem<Number>& problem, int64_t row, int64_t kv_head, int64_t first, int64_t last, const float* weights,
    int64_t d, float* out, int64_t out_stride) {
  Vec sums[Heads];
  for (auto& sum : sums) sum = Vec(0.0f);
  const int64_t columns = std::min(problem.value_dim - d, kLanes);
  problem.stretches(row, kv_head, first, last, [&](int64_t slot, int64_t position, int64_t count) {
    const Number* values = problem.value_at(slot) + d;
    for (int64_t j = 0; j < count; ++j, values += problem.value_stride) {
      const Vec value = columns < kLanes ? some_floats_at(values, columns) : floats_at(values);
      for (int64_t g = 0; g < Heads; ++g)
        sums[g] = at::vec::fmadd(Vec(weights[g * kSpan + position - first + j]), value, sums[g]);
    }
  });
  for (int64_t g = 0; g < Heads; ++g) sums[g].store(out + g * out_stride + d);
}

// A span for some heads of a group. Each result is [padded value_dim] sums, then the largest score and the sum of weights.
template <typename Number, int64_t Heads>
void attend_span(
    const Problem<Number>& problem, int64_t row, int64_t kv_head, int64_t head, int64_t first, int64_t last,
    float* results, int64_t result_stride) {
  const int64_t head_dim = problem.head_dim, padded = round_up(head_dim, kLanes);
  const int64_t value_dim = problem.value_dim, padded_value = round_up(value_dim, kLanes);
  static thread_local std::vector<float> query_memory;
  float* query = Scratch(query_memory).take(Heads * padded);
  const int64_t token = problem.query_starts[row];
  for (int64_t g = 0; g < Heads; ++g) {
    std::fill(query + g * padded + head_dim, query + (g + 1) * padded, 0.0f);
    convert_scaled_pairs(problem.query_at(token, head + g), query + g * padded, head_dim, problem.scale);
  }
  float scores[Heads * kSpan];
  problem.stretches(row, kv_head, first, last, [&](int64_t slot, int64_t position, int64_t count) {
    const int64_t after = position + count;
    const Number* next = after < last ? problem.key_at(problem.slot(row, kv_head, after))
                                      : problem.value_at(problem.slot(row, kv_head, first));
    score_keys<Number, Heads>(query, padded, problem.key_at(slot), count, head_dim, next, scores + position - first);
  });
  for (int64_t g = 0; g < Heads; ++g) {
    float* result = results + g * result_stride + padded_value;
    std::tie(result[0], result[1]) = weigh(scores + g * kSpan, last - first, problem.soft_cap);
  }
  // As many columns at once as there are registers for their sums, about.
  constexpr int64_t kPairs = Heads > 2 || kLanes < 16 ? 2 : 4;
  const auto add = [&]<int64_t Pairs>(int64_t d) {
    for (; d + Pairs * 2 * kLanes <= value_dim; d += Pairs * 2 * kLanes)
      add_values<Number, Heads, Pairs>(problem, row, kv_head, first, last, scores, d, results, result_stride);
    return d;
  };
  int64_t d = add.template operator()<1>(add.template operator()<kPairs>(0));
  for (; d < value_dim; d += kLanes)
    add_last_values<Number, Heads>(problem, row, kv_head, first, last, scores, d, results, result_stride);
}

// The spans of one query and head become its attention: their weights, and that of a `sink`, are brought to the same
// largest score.
template <typename Number>
void join_spans(float* results, int64_t spans, int64_t span_stride, int64_t value_dim, float sink, Number* out) {
  const int64_t padded = round_up(value_dim, kLanes);
  float top = sink, total = 0.0f;
  for (int64_t span = 0; span < spans; ++span) top = std::max(top, results[span * span_stride + padded]);
  if (sink != kNothing) total = std::exp(sink - top);
  for (int64_t span = 0; span < spans; ++span) {
    float* result = results + span * span_stride;
    const float factor = std::exp(result[padded] - top);
    total += factor * result[padded + 1];
    for (int64_t d = 0; d < padded; d += kLanes) {
      const Vec scaled = Vec::loadu(result + d) * Vec(factor);
      (span == 0 ? scaled : Vec::loadu(results + d) + scaled).store(results + d);
    }
  }
  for (int64_t d = 0; d < padded; d += kLanes) (Vec::loadu(results + d) / Vec(total)).store(results + d);
  convert_back(results, out, value_dim);
}

template <typename Number>
void attend_group(
    const Problem<Number>& problem, int64_t row, int64_t kv_head, int64_t first, int64_t last, float* results,
    int64_t result_stride) {
  const int64_t end = (kv_head + 1) * problem.group;
  for (int64_t head = kv_head * problem.group; head < end;) {
    switch (std::min(kHeadsAtOnce, end - head)) {
      case 4: attend_span<Number, 4>(problem, row, kv_head, head, first, last, results, result_stride); break;
      case 3: attend_span<Number, 3>(problem, row, kv_head, head, first, last, results, result_stride); break;
      case 2: attend_span<Number, 2>(problem, row, kv_head, head, first, last, results, result_stride); break;
      default: attend_span<Number, 1>(problem, row, kv_head, head, first, last, results, result_stride);
    }
    const int64_t done = std::min(kHeadsAtOnce, end - head);
    head += done;
    results += done * result_stride;
  }
}

template <typename Number>
void attend_single_queries(const Problem<Number>& problem, const std::vector<int64_t>& rows) {
  struct Item {
    int64_t row, span, first_span, result;
  };
  std::vector<Item> items;
  std::vector<int64_t> first_item;
  const int64_t size = round_up(problem.value_dim, kLanes) + kLanes;
  int64_t positions = 0;
  for (const int64_t row : rows) {
    const int64_t last = problem.contexts[row], seen = problem.first_seen(row, last - 1);
    first_item.push_back(static_cast<int64_t>(items.size()));
    for (int64_t span = seen / kSpan; span <= (last - 1) / kSpan; ++span)
      items.push_back({row, span, seen / kSpan, static_cast<int64_t>(items.size()) * problem.num_heads * size});
    positions += last - seen;
  }
  first_item.push_back(static_cast<int64_t>(items.size()));
  static thread_local std::vector<float> memory;
  float* results = Scratch(memory).take(static_cast<int64_t>(items.size()) * problem.num_heads * size);
  const int64_t work = positions * problem.num_heads * (problem.head_dim + problem.value_dim);
  share_out(static_cast<int64_t>(items.size()) * problem.num_kv_heads, work, [&](int64_t place) {
    const Item& item = items[place / problem.num_kv_heads];
    const int64_t kv_head = place % problem.num_kv_heads, context = problem.contexts[item.row];
    attend_group(
        problem, item.row, kv_head, std::max(item.span * kSpan, problem.first_seen(item.row, context - 1)),
        std::min((item.span + 1) * kSpan, context), results + item.result + kv_head * problem.group * size, size);
  });
  const int64_t row_count = static_cast<int64_t>(rows.size());
  share_out(row_count, static_cast<int64_t>(items.size()) * problem.num_heads * size, [&](int64_t place) {
    const int64_t first = first_item[place], spans = first_item[place + 1] - first;
    for (int64_t head = 0; head < problem.num_heads; ++head)
      join_spans(
          results + items[first].result + head * size, spans, problem.num_heads * size, problem.value_dim,
          problem.sinks ? problem.sinks[head] : kNothing, problem.out_at(problem.query_starts[rows[place]], head));
  });
}

}  // namespace nanoserve
