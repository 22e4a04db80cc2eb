// Attention of rows with several queries in bfloat16, where the processor multiplies in bfloat16: blocks of queries
// against panels of keys with an online softmax (arXiv 2205.14135). Products are summed up in float32, in which the
// softmax is computed; its weights are rounded to bfloat16 to be multiplied with values.
//
// All is computed transposed: scores are [keys, queries] and results [value_dim, queries]. A key then is a row of the
// left operand as it lies in the cache, and the softmax takes 16 queries at a time, one in each lane, without a sum over
// lanes. All heads that share a key-value head are queries of the same product.
//
// Panels begin at fixed positions, and a query's result depends on nothing but what it sees: neither on how a prompt is
// cut into steps, nor on the other rows of a step.
#pragma once

#include "attention_problem.h"
#include "bfloat16_products.h"

#if defined(NANOSERVE_BFLOAT16_PRODUCTS)
#include <array>
#include <cfloat>
#include <utility>

namespace nanoserve {

constexpr int64_t kPanelKeys = 256;
// Queries times heads of a group: each block lays out all its keys and values anew.
constexpr int64_t kMostQueriesInBlock = 512, kLeastQueriesInBlock = 128;
constexpr int64_t kBlocksPerThread = 4;
constexpr int64_t kQueriesTogether = 2 * kTileSide;  // queries that are multiplied with a panel together
// Exponents are differences from a query's largest score, which is only taken anew when it has grown by more than this:
// sums then are seldom multiplied anew (as in FlashAttention-4). Weights of up to 2^8 are as exact as those of up to 1.
constexpr float kLeastGrowth = 8.0f;

// Where 32 keys or values lie in a cache; null where nothing may be read.
using PlacesOfRows = std::array<const BFloat16*, kTileDepth>;

// One thread's operands and sums. Queries, scores, weights and sums lie by groups of queries that are multiplied together.
struct BlockMemory {
  int64_t steps, width;  // head_dim in steps of tiles, value_dim in tiles
  BFloat16 *query, *keys, *values, *weights;
  float *scores, *sums, *rows, *largest, *totals;
  int32_t *first_seen, *ends;  // the first positions that queries see, and those behind the last ones

  BlockMemory(std::vector<float>& memory, int64_t queries, int64_t head_dim, int64_t value_dim)
      : steps(divide_up(head_dim, kTileDepth)), width(divide_up(value_dim, kTileSide)) {
    constexpr int64_t kFloats = kTileNumbers / 2;  // floats that take the room of a tile of bfloat16
    const int64_t columns = divide_up(queries, kTileSide), panel = kPanelKeys / kTileSide;
    const int64_t query_size = columns * steps * kFloats, key_size = panel * steps * kFloats;
    const int64_t value_size = width * kPanelKeys / kTileDepth * kFloats, sum_size = columns * width * kTileSums;
    const int64_t score_size = kPanelKeys * kQueriesTogether, weight_size = score_size / 2;
    const int64_t row_size = kTileSide * width * kTileSide;
    float* next = Scratch(memory).take(
        query_size + key_size + value_size + weight_size + score_size + sum_size + row_size + 4 * columns * kTileSide);
    const auto floats = [&next](int64_t size) { return std::exchange(next, next + size); };
    const auto numbers = [&](int64_t size) { return reinterpret_cast<BFloat16*>(floats(size)); };
    query = numbers(query_size), keys = numbers(key_size), values = numbers(value_size);
    weights = numbers(weight_size), scores = floats(score_size), sums = floats(sum_size), rows = floats(row_size);
    largest = floats(columns * kTileSide), totals = floats(columns * kTileSide);
    first_seen = reinterpret_cast<int32_t*>(floats(columns * kTileSide));
    ends = reinterpret_cast<int32_t*>(floats(columns * kTileSide));
  }
};

// The part of a vector of 32 or 16 numbers that lies before the end of a row, from column `first` of `columns`.
template <int64_t Width>
inline uint32_t columns_left(int64_t first, int64_t columns) {
  const int64_t count = std::min(columns - first, Width);
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

// Where positions begin..begin + 32 lie; null for those outside first..last.
inline PlacesOfRows places_of(
    const Problem<BFloat16>& problem, const BFloat16* cache, int64_t stride, int64_t row, int64_t kv_head,
    int64_t begin, int64_t first, int64_t last) {
  PlacesOfRows places{};
  problem.stretches(
      row, kv_head, std::max(begin, first), std::min(begin + kTileDepth, last),
      [&](int64_t slot, int64_t position, int64_t count) {
        for (int64_t j = 0; j < count; ++j) places[position - begin + j] = cache + (slot + j) * stride;
      });
  return places;
}

// 32 keys as two rows of left tiles, zeros behind their columns.
inline void lay_out_keys(const PlacesOfRows& places, int64_t head_dim, int64_t steps, BFloat16* tiles) {
  const __mmask32 last_mask = columns_left<kTileDepth>((steps - 1) * kTileDepth, head_dim);
  for (int64_t j = 0; j < kTileDepth; ++j) {
    BFloat16* target = tiles + j / kTileSide * steps * kTileNumbers + j % kTileSide * kTileDepth;
    for (int64_t step = 0; step < steps; ++step, target += kTileNumbers) {
      const __mmask32 mask = step + 1 < steps ? ~__mmask32{0} : last_mask;
      _mm512_store_si512(
          target,
          places[j] == nullptr ? _mm512_setzero_si512()
                               : _mm512_maskz_loadu_epi16(mask, places[j] + step * kTileDepth));
    }
  }
}

// 32 values, transposed, as one column of left tiles, which lie `stride` numbers apart.
inline void lay_out_values(const PlacesOfRows& places, int64_t value_dim, int64_t stride, BFloat16* tiles) {
  alignas(64) float pairs[kTileSums];  // [16 pairs of positions][16 columns], a number of either in 32 bits
  for (int64_t column = 0; column < value_dim; column += kTileSide, tiles += stride) {
    const __mmask16 mask = columns_left<kTileSide>(column, value_dim);
    const auto numbers = [&](const BFloat16* value) {
      if (value == nullptr) return _mm512_setzero_si512();
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value + column));
    };
    for (int64_t pair = 0; pair < kTileSide; ++pair) {
      const __m512i lower = numbers(places[2 * pair]), upper = numbers(places[2 * pair + 1]);
      _mm512_store_si512(pairs + pair * kTileSide, _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)));
    }
    at::vec::transpose_mxn<float, kTileSide, kTileSide>(
        pairs, kTileSide, reinterpret_cast<float*>(tiles), kTileSide);
  }
}

// 2^x for x of at most about 0, to 3e-7 of it; 0 for minus infinity. The polynomial is that of least relative error.
inline __m512 power_of_two(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 result = _mm512_set1_ps(0.00187757670f);
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.00898933969f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.0558263175f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.240153611f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.693153083f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.99999994f));
  return _mm512_scalef_ps(result, x);  // which multiplies by 2 to the power of the rounded x
}

// Queries first_query..last_query of a row, counted within it, of all heads of one group.
struct QueryBlock {
  const Problem<BFloat16>& problem;
  int64_t row, kv_head, first_query, last_query;

  int64_t count() const { return (last_query - first_query) * problem.group; }
  int64_t head(int64_t i) const { return kv_head * problem.group + i % problem.group; }
  int64_t token(int64_t i) const { return problem.query_starts[row] + first_query + i / problem.group; }
  int64_t position(int64_t i) const {
    return problem.contexts[row] - problem.queries(row) + first_query + i / problem.group;
  }
  int64_t first_seen(int64_t i) const { return problem.first_seen(row, position(i)); }
  int64_t seen_end(int64_t i) const { return problem.seen_end(row, position(i)); }
};

// 16 queries of a block, one in each lane, and the keys that each of them sees.
struct Lanes {
  __m512i end, first_seen;
  int64_t all_see_from, all_see_to;

  Lanes(const int32_t* firsts, const int32_t* ends)
      : end(_mm512_loadu_si512(ends)), first_seen(_mm512_loadu_si512(firsts)), all_see_from(firsts[kTileSide - 1]),
        all_see_to(ends[0]) {}

  __mmask16 see(int64_t key) const {
    const __m512i keys = _mm512_set1_epi32(static_cast<int32_t>(key));
    return _mm512_cmple_epi32_mask(first_seen, keys) & _mm512_cmplt_epi32_mask(keys, end);
  }
};

// How scores become exponents of two.
struct Scores {
  float soft_cap, scale, factor;  // with a soft cap, products are multiplied by `scale` before it

  explicit Scores(const Problem<BFloat16>& problem)
      : soft_cap(problem.soft_cap), scale(problem.scale), factor(soft_cap > 0.0f ? kLog2E : scale * kLog2E) {}

  // Products of 16 keys from `begin` on with 16 queries become scores, minus infinity where a query does not see a key.
  void finish(float* tile, int64_t begin, const Lanes& lanes) const {
    if (soft_cap > 0.0f) {
      for (int64_t i = 0; i < kTileSums; i += kLanes) (Vec::loadu(tile + i) * Vec(scale)).store(tile + i);
      cap_scores(tile, kTileSums, soft_cap);
    }
    if (begin >= lanes.all_see_from && begin + kTileSide <= lanes.all_see_to) return;
    for (int64_t j = 0; j < kTileSide; ++j) {
      const __m512 scores = _mm512_load_ps(tile + j * kTileSide);
      _mm512_store_ps(
          tile + j * kTileSide, _mm512_mask_mov_ps(_mm512_set1_ps(kNothing), lanes.see(begin + j), scores));
    }
  }
};

// The nearest bfloat16 to each positive number, still as a float.
inline __m512 rounded(__m512 numbers) {
  const __m512i halved = _mm512_add_epi32(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(halved, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

// The scores of 16 queries with a panel's keys, in tiles `stride` apart, become weights 2^(score - largest) in right
// tiles. Returns by what factors earlier sums are to be multiplied. The total is that of the rounded weights, with which
// values are multiplied: the roundings of a weight that is nearly all of it cancel.
inline __m512 weigh_panel(
    const float* scores, int64_t tiles, int64_t stride, float factor, float* largest, float* totals,
    BFloat16* weights) {
  __m512 tops[4];
  for (__m512& top : tops) top = _mm512_set1_ps(kNothing);
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t j = 0; j < kTileSide; j += 4)
      c10::ForcedUnroll<4>{}([&](auto n) {
        tops[n] = _mm512_max_ps(tops[n], _mm512_load_ps(scores + tile * stride + (j + n) * kTileSide));
      });
  const __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  const __m512 before = _mm512_load_ps(largest), scale = _mm512_set1_ps(factor);
  const __m512 found = _mm512_mul_ps(top, scale);
  const __mmask16 larger = _mm512_cmp_ps_mask(found, _mm512_add_ps(before, _mm512_set1_ps(kLeastGrowth)), _CMP_GT_OQ);
  const __m512 now = _mm512_mask_mov_ps(before, larger, found);
  __m512 even_total = _mm512_setzero_ps(), odd_total = _mm512_setzero_ps();
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t j = 0; j < kTileSide; j += 2) {
      const float* place = scores + tile * stride + j * kTileSide;
      const __m512 even = rounded(power_of_two(_mm512_fmsub_ps(_mm512_load_ps(place), scale, now)));
      const __m512 odd = rounded(power_of_two(_mm512_fmsub_ps(_mm512_load_ps(place + kTileSide), scale, now)));
      even_total = _mm512_add_ps(even_total, even);
      odd_total = _mm512_add_ps(odd_total, odd);
      const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(even), 16), upper = _mm512_castps_si512(odd);
      // A right tile has the 16 pairs of 32 keys, which are two tiles of scores.
      BFloat16* row = weights + tile / 2 * (stride / kTileSums) * kTileNumbers + (tile % 2 * kTileSide + j) * kTileSide;
      _mm512_store_si512(row, _mm512_or_si512(lower, upper));
    }
  // Exactly 1 for a query that found nothing larger: it may have seen nothing of the panel at all.
  const __m512 rescale = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), larger, power_of_two(_mm512_sub_ps(before, now)));
  const __m512 total = _mm512_fmadd_ps(_mm512_load_ps(totals), rescale, _mm512_add_ps(even_total, odd_total));
  _mm512_store_ps(totals, total);
  _mm512_store_ps(largest, now);
  return rescale;
}

// Multiplies the sums of 16 queries, in tiles `stride` apart, by a factor each.
inline void rescale_sums(float* sums, int64_t tiles, int64_t stride, __m512 factors) {
  if (_mm512_cmpneq_ps_mask(factors, _mm512_set1_ps(1.0f)) == 0) return;
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t j = 0; j < kTileSums; j += kTileSide) {
      float* place = sums + tile * stride + j;
      _mm512_store_ps(place, _mm512_mul_ps(_mm512_load_ps(place), factors));
    }
}

// A panel of keys and values: positions first..last of those from `begin` on.
struct Panel {
  int64_t begin, first, last;
};

// Some queries of a block, from `start` on, in `Columns` tiles: what a panel adds to them.
template <int64_t Columns, typename Products>
void attend_panel(
    const QueryBlock& block, int64_t start, const Panel& panel, const Products& products, const BlockMemory& memory) {
  const int64_t last_query = std::min(start + Columns * kTileSide, block.count()) - 1;
  const int64_t from = std::max(panel.first, block.first_seen(start)) - panel.begin;
  const int64_t to = std::min(panel.last, block.seen_end(last_query)) - panel.begin;
  if (from >= to) return;  // these queries see nothing of it
  const int64_t first_step = from / kTileDepth, steps = divide_up(to, kTileDepth) - first_step;
  constexpr int64_t kTilesInStep = kTileDepth / kTileSide;
  const int64_t key_stride = memory.steps * kTileNumbers, value_stride = kPanelKeys / kTileDepth * kTileNumbers;
  const LeftTiles keys{
      memory.keys + first_step * kTilesInStep * key_stride, steps * kTilesInStep, key_stride, memory.steps};
  products.template multiply<Columns, false>(keys, memory.query + start * memory.steps * kTileDepth, memory.scores);
  const Scores finishing(block.problem);
  float* sums = memory.sums + start * memory.width * kTileSide;
  for (int64_t column = 0; column < Columns; ++column) {
    const int64_t lane = start + column * kTileSide;
    const Lanes lanes(memory.first_seen + lane, memory.ends + lane);
    float* scores = memory.scores + column * kTileSums;
    for (int64_t tile = 0; tile < keys.count; ++tile)
      finishing.finish(
          scores + tile * Columns * kTileSums, panel.begin + first_step * kTileDepth + tile * kTileSide, lanes);
    const __m512 factors = weigh_panel(
        scores, keys.count, Columns * kTileSums, finishing.factor, memory.largest + lane, memory.totals + lane,
        memory.weights + column * kTileNumbers);
    rescale_sums(sums + column * kTileSums, memory.width, Columns * kTileSums, factors);
  }
  const LeftTiles values{memory.values + first_step * kTileNumbers, memory.width, value_stride, steps};
  products.template multiply<Columns, true>(values, memory.weights, sums);
}

// Calls body<columns>(start) for each group of queries that are multiplied together.
template <typename Body>
inline void each_group(int64_t queries, const Body& body) {
  int64_t start = 0;
  for (; start + kTileSide < queries; start += kQueriesTogether) body.template operator()<2>(start);
  if (start < queries) body.template operator()<1>(start);
}

// 16 queries from `first` on as a column of right tiles, which lie `stride` numbers apart, and what is known of them before
// any key.
inline void begin_queries(
    const QueryBlock& block, int64_t first, int64_t stride, BFloat16* tiles, const BlockMemory& memory) {
  const Problem<BFloat16>& problem = block.problem;
  std::array<const BFloat16*, kTileSide> queries{};
  for (int64_t i = first; i < first + kTileSide; ++i) {
    const int64_t known = std::min(i, block.count() - 1);  // lanes without a query repeat the last one
    queries[i - first] = problem.query_at(block.token(known), block.head(known));
    for (int64_t d = 0; d < problem.head_dim; d += kTileDepth) __builtin_prefetch(queries[i - first] + d);
    const float sink = problem.sinks ? problem.sinks[block.head(known)] : kNothing;
    // A sink is there before any key. Exponents stay finite, so that differences are defined.
    memory.largest[i] = std::max(sink * kLog2E, -FLT_MAX);
    memory.totals[i] = sink == kNothing ? 0.0f : 1.0f;
    memory.first_seen[i] = static_cast<int32_t>(block.first_seen(known));
    memory.ends[i] = static_cast<int32_t>(block.seen_end(known));
  }
  alignas(64) float rows[kTileSums];  // pairs of numbers
  for (int64_t step = 0; step < memory.steps; ++step, tiles += stride) {
    const __mmask32 mask = columns_left<kTileDepth>(step * kTileDepth, problem.head_dim);
    for (int64_t i = 0; i < kTileSide; ++i)
      _mm512_store_si512(rows + i * kTileSide, _mm512_maskz_loadu_epi16(mask, queries[i] + step * kTileDepth));
    at::vec::transpose_mxn<float, kTileSide, kTileSide>(rows, kTileSide, reinterpret_cast<float*>(tiles), kTileSide);
  }
}

// Divides the sums of 16 queries from `first` on, in tiles `stride` apart, by their weights: these are the results.
inline void finish_queries(
    const QueryBlock& block, int64_t first, int64_t stride, float* sums, const BlockMemory& memory) {
  const Problem<BFloat16>& problem = block.problem;
  const int64_t padded = memory.width * kTileSide, end = std::min(first + kTileSide, block.count());
  const auto out = [&](int64_t i) { return problem.out_at(block.token(i), block.head(i)); };
  for (int64_t i = first; i < end; ++i)
    for (int64_t d = 0; d < problem.value_dim; d += kTileDepth) __builtin_prefetch(out(i) + d, 1);
  const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(memory.totals + first));
  rescale_sums(sums, memory.width, stride, inverse);
  for (int64_t tile = 0; tile < memory.width; ++tile)
    at::vec::transpose_mxn<float, kTileSide, kTileSide>(
        sums + tile * stride, kTileSide, memory.rows + tile * kTileSide, padded);
  for (int64_t i = first; i < end; ++i) convert_back(memory.rows + (i - first) * padded, out(i), problem.value_dim);
}

template <typename Products>
void attend_block(const QueryBlock& block, const BlockMemory& memory) {
  const Problem<BFloat16>& problem = block.problem;
  const Products products;
  each_group(block.count(), [&]<int64_t Columns>(int64_t start) {
    for (int64_t column = 0; column < Columns; ++column)
      begin_queries(
          block, start + column * kTileSide, Columns * kTileNumbers,
          memory.query + start * memory.steps * kTileDepth + column * kTileNumbers, memory);
    float* sums = memory.sums + start * memory.width * kTileSide;
    std::fill(sums, sums + Columns * memory.width * kTileSums, 0.0f);
  });
  const int64_t seen = block.first_seen(0), end = block.seen_end(block.count() - 1);
  for (int64_t begin = seen / kPanelKeys * kPanelKeys; begin < end; begin += kPanelKeys) {
    const Panel panel{begin, std::max(begin, seen), std::min(begin + kPanelKeys, end)};
    for (int64_t step = (panel.first - begin) / kTileDepth; step < divide_up(panel.last - begin, kTileDepth); ++step) {
      const auto places = [&](const BFloat16* cache, int64_t stride) {
        return places_of(
            problem, cache, stride, block.row, block.kv_head, begin + step * kTileDepth, panel.first, panel.last);
      };
      lay_out_keys(
          places(problem.keys, problem.head_dim), problem.head_dim, memory.steps,
          memory.keys + 2 * step * memory.steps * kTileNumbers);
      lay_out_values(
          places(problem.values, problem.value_stride), problem.value_dim, kPanelKeys / kTileDepth * kTileNumbers,
          memory.values + step * kTileNumbers);
    }
    each_group(block.count(), [&]<int64_t Columns>(int64_t start) {
      attend_panel<Columns>(block, start, panel, products, memory);
    });
  }
  each_group(block.count(), [&]<int64_t Columns>(int64_t start) {
    for (int64_t column = 0; column < Columns; ++column)
      finish_queries(
          block, start + column * kTileSide, Columns * kTileSums,
          memory.sums + start * memory.width * kTileSide + column * kTileSums, memory);
  });
}

// Large blocks, unless they would leave threads without work. Results do not depend on it.
inline int64_t queries_in_block(const Problem<BFloat16>& problem, const std::vector<int64_t>& rows) {
  int64_t queries = 0;
  for (const int64_t row : rows) queries += problem.queries(row) * problem.num_heads;
  const int64_t share = queries / (kBlocksPerThread * at::get_num_threads());
  return std::clamp(share / kLeastQueriesInBlock * kLeastQueriesInBlock, kLeastQueriesInBlock, kMostQueriesInBlock);
}

template <typename Products>
void attend_with_products(const Problem<BFloat16>& problem, const std::vector<int64_t>& rows) {
  share_queries(problem, rows, queries_in_block(problem, rows), [&](int64_t row, int64_t kv_head, int64_t first, int64_t last) {
    static thread_local std::vector<float> memory;
    const QueryBlock block{problem, row, kv_head, first, last};
    attend_block<Products>(block, BlockMemory(memory, block.count(), problem.head_dim, problem.value_dim));
  });
}

// Attends if the processor multiplies in bfloat16; false if it does not.
inline bool attend_in_bfloat16(const Problem<BFloat16>& problem, const std::vector<int64_t>& rows) {
  if (!(problem.scale > 0.0f)) return false;  // the largest product would not be the largest score
#if defined(NANOSERVE_TILES)
  if (TileProducts::available()) {
    attend_with_products<TileProducts>(problem, rows);
    return true;
  }
#endif
  if (DotProducts::available()) {
    attend_with_products<DotProducts>(problem, rows);
    return true;
  }
  return false;
}

}  // namespace nanoserve
#else
namespace nanoserve {

inline bool attend_in_bfloat16(const Problem<at::BFloat16>&, const std::vector<int64_t>&) { return false; }

}  // namespace nanoserve
#endif
