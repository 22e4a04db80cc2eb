// Drawing a token from each row of logits, and log probabilities: no vocabulary is sorted, and noise is computed in full
// for the few tokens that may win.
//
// Every result is a function of its row alone. Threads that share a row compare, add integers, or leave sums to be added
// in order, so it does not matter how many they are. Loops over arrays of kBlock are vectorized by the compiler.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <functional>
#include <limits>

#include "vectors.h"

namespace nanoserve {

// Logits of which the maximum is kept: a block is passed over if that says that nothing in it matters.
constexpr int64_t kBlock = 128;
constexpr int64_t kPiece = 64 * kBlock;  // the least that is worth a thread
constexpr int64_t kLargestToken = std::numeric_limits<uint32_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Noise is at least 2^-33, and no logarithm of it below -22.9.
constexpr float kLargestGain = 23.0f;
// Probabilities are added as integers: 2^44 times a weight of at most 1. Below this logarithm a weight counts as 0.
constexpr double kFixedPoint = 0x1p44;
constexpr float kWeightless = -31.0f;
constexpr int64_t kBins = 2048;

// A row of logits, and what is made of them before a token is drawn: (logit - maximum) / temperature.
struct Scaled {
  const float* logits;
  int64_t count;
  float maximum = 0.0f, temperature = 1.0f;

  float operator()(float logit) const { return (logit - maximum) / temperature; }
  int64_t blocks() const { return divide_up(count, kBlock); }
  int64_t in_block(int64_t block) const { return std::min(kBlock, count - block * kBlock); }
  // Scales a block; returns the number of tokens in it.
  int64_t scale(int64_t block, float* scaled) const {
    const int64_t size = in_block(block);
    const float* source = logits + block * kBlock;
    for (int64_t i = 0; i < size; ++i) scaled[i] = (*this)(source[i]);
    return size;
  }
};

// How a token is drawn from a row.
struct Setting {
  uint32_t keys[2];
  int64_t top_k;
  double top_p, min_p;
};

// The number of pieces in which a row is looked at: one in a thread that has the row for itself.
inline int64_t pieces_of(const Scaled& row) {
  const int64_t most = at::in_parallel_region() ? 1 : 2 * at::get_num_threads();
  return std::clamp<int64_t>(row.count / kPiece, 1, most);
}

// Calls body(piece, first block, last block) for each piece of a row.
template <typename Body>
void share_blocks(const Scaled& row, const Body& body) {
  const int64_t pieces = pieces_of(row), blocks = row.blocks();
  share_out(pieces, row.count, [&](int64_t piece) {
    body(piece, piece * blocks / pieces, (piece + 1) * blocks / pieces);
  });
}

// The larger or smaller of all numbers, NaN if one of them is.
template <typename Choose>
inline float extreme(const float* source, int64_t count, const Choose& choose) {
  const Vec first(source[0]);
  Vec found[4] = {first, first, first, first};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int64_t n = 0; n < 4; ++n) found[n] = choose(found[n], Vec::loadu(source + i + n * kLanes));
  for (; i < count; ++i) found[0] = choose(found[0], Vec(source[i]));
  return at::vec::vec_reduce_all<float>(choose, choose(choose(found[0], found[1]), choose(found[2], found[3])));
}

inline float largest(const float* source, int64_t count) {
  return extreme(source, count, [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); });
}

inline float smallest(const float* source, int64_t count) {
  return extreme(source, count, [](const Vec& a, const Vec& b) { return at::vec::minimum(a, b); });
}

inline void find_maxima(const Scaled& row, std::vector<float>& maxima) {
  maxima.resize(row.blocks());
  share_blocks(row, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block)
      maxima[block] = largest(row.logits + block * kBlock, row.in_block(block));
  });
}

// The first token with a logit that is the largest.
inline int64_t first_of(const Scaled& row, const std::vector<float>& maxima, float maximum) {
  const float* block = row.logits + (std::find(maxima.begin(), maxima.end(), maximum) - maxima.begin()) * kBlock;
  return std::find(block, row.logits + row.count, maximum) - row.logits;
}

// ---- order --------------------------------------------------------------------------------------------------------

// Integers ordered as the numbers are, and the way back.
inline uint32_t order_key(float value) {
  const uint32_t bits = c10::bit_cast<uint32_t>(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float keyed(uint32_t key) {
  return c10::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token with its value in one integer: greater ones are larger, and of equal ones have the lower id.
struct Candidate {
  uint64_t key;

  Candidate() = default;
  Candidate(float value, int64_t token)
      : key(static_cast<uint64_t>(order_key(value)) << 32 | static_cast<uint64_t>(kLargestToken - token)) {}
  float value() const { return keyed(static_cast<uint32_t>(key >> 32)); }
  int64_t token() const { return kLargestToken - static_cast<int64_t>(key & kLargestToken); }
  bool operator>(const Candidate& other) const { return key > other.key; }
};

// The `count` tokens of the largest values, best first. As many blocks have a maximum that is no smaller than the
// count-th largest of all maxima, so nothing below that is among them.
inline void find_best(
    const Scaled& row, const std::vector<float>& maxima, int64_t count, std::vector<Candidate>& best) {
  static thread_local std::vector<float> sorted;
  best.clear();
  if (count == 0) return;
  float least = -kInfinity;
  if (count < row.blocks()) {
    sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<>());
    least = row(sorted[count - 1]);
  }
  float scaled[kBlock];
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (row(maxima[block]) < least) continue;
    const int64_t size = row.scale(block, scaled);
    for (int64_t i = 0; i < size; ++i)
      if (scaled[i] >= least) best.emplace_back(scaled[i], block * kBlock + i);
  }
  if (count < static_cast<int64_t>(best.size())) {
    std::nth_element(best.begin(), best.begin() + count, best.end(), std::greater<>());
    best.resize(count);
  }
  std::sort(best.begin(), best.end(), std::greater<>());
}

// ---- weights ------------------------------------------------------------------------------------------------------

// e^x for x up to 0, to about a unit in the last place; what counts as 0 is only small.
inline Vec exponential_below_zero(const Vec& given) {
  using Words = at::vec::Vectorized<int32_t>;
  const Vec x = at::vec::maximum(given, Vec(2 * kWeightless));
  const Vec power = (x * Vec(1.44269504088896341f)).round();
  const Vec rest = at::vec::fmadd(power, Vec(2.12194440e-4f), at::vec::fmadd(power, Vec(-0.693359375f), x));
  Vec sum(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    sum = at::vec::fmadd(sum, rest, Vec(coefficient));
  sum = at::vec::fmadd(sum * rest, rest, rest) + Vec(1.0f);
  const Words exponent = at::vec::convert_to_int_of_same_size(power) << Words(23);
  return at::vec::cast<float, int32_t>(at::vec::cast<int32_t, float>(sum) + exponent);
}

inline int64_t fixed_point(float weight) { return static_cast<int64_t>(weight * kFixedPoint); }

inline int64_t weight_of(float scaled) {
  float weights[kLanes];
  exponential_below_zero(Vec(scaled)).store(weights);
  return fixed_point(weights[0]);
}

inline int64_t share_of(int64_t total, double top_p) {
  return std::min(static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))), total);
}

// Equal bins of scaled logits from 0 down; the last one has whatever is below.
struct Bins {
  float width_inverse;

  explicit Bins(float span) : width_inverse(kBins / std::clamp(span, 1e-6f, -kWeightless)) {}
  int32_t of(float scaled) const {
    return static_cast<int32_t>(std::min(-scaled * width_inverse, static_cast<float>(kBins - 1)));
  }
};

// Adds the weights of some blocks to bins.
inline void add_weights(
    const Scaled& row, const std::vector<float>& maxima, const Bins& bins, int64_t first, int64_t last,
    int64_t* histogram) {
  float scaled[kBlock] = {}, weights[kBlock];
  int32_t places[kBlock];
  for (int64_t block = first; block < last; ++block) {
    if (row(maxima[block]) < kWeightless) continue;
    const int64_t size = row.scale(block, scaled);
    for (int64_t i = 0; i < size; ++i) places[i] = bins.of(scaled[i]);
    for (int64_t i = 0; i < size; i += kLanes) exponential_below_zero(Vec::loadu(scaled + i)).store(weights + i);
    for (int64_t i = 0; i < size; ++i) histogram[places[i]] += fixed_point(weights[i]);
  }
}

// The keys of what is in a bin, greatest first.
inline void sort_bin(
    const Scaled& row, const std::vector<float>& maxima, const Bins& bins, int32_t bin, std::vector<uint32_t>& keys) {
  keys.clear();
  float scaled[kBlock];
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (bins.of(row(maxima[block])) > bin) continue;
    const int64_t size = row.scale(block, scaled);
    int32_t found = 0;
    for (int64_t i = 0; i < size; ++i) found |= bins.of(scaled[i]) == bin;
    for (int64_t i = 0; found && i < size; ++i)
      if (bins.of(scaled[i]) == bin) keys.push_back(order_key(scaled[i]));
  }
  std::sort(keys.begin(), keys.end(), std::greater<>());
}

// The largest key such that what is at or above it has a share of at least top_p of all weights.
inline uint32_t smallest_sufficient_key(const Scaled& row, const std::vector<float>& maxima, double top_p) {
  static thread_local std::vector<int64_t> kept_histograms;
  static thread_local std::vector<uint32_t> keys;
  std::vector<int64_t>& histograms = kept_histograms;  // this thread's, in the others too
  const int64_t pieces = pieces_of(row);
  const Bins bins(-row(smallest(row.logits, row.count)));
  histograms.assign(pieces * kBins, 0);
  share_blocks(row, [&](int64_t piece, int64_t first, int64_t last) {
    add_weights(row, maxima, bins, first, last, histograms.data() + piece * kBins);
  });
  int64_t total = 0;
  for (int64_t bin = 0; bin < kBins; ++bin) {
    for (int64_t piece = 1; piece < pieces; ++piece) histograms[bin] += histograms[piece * kBins + bin];
    total += histograms[bin];
  }
  int64_t needed = share_of(total, top_p);
  int32_t bin = 0;
  for (; bin < kBins - 1 && histograms[bin] < needed; ++bin) needed -= histograms[bin];
  sort_bin(row, maxima, bins, bin, keys);
  size_t place = 0;
  for (; place + 1 < keys.size(); ++place) {
    needed -= weight_of(keyed(keys[place]));
    if (needed <= 0) break;
  }
  return keys[place];
}

// ---- the race -----------------------------------------------------------------------------------------------------

inline uint32_t mixed(uint32_t value) {
  value = (value ^ value >> 16) * 0x7feb352du;
  value = (value ^ value >> 15) * 0x846ca68bu;
  return value ^ value >> 16;
}

// The random bits of a token: the same as the plain sampler's.
inline uint32_t random_bits(const uint32_t* keys, int64_t token) {
  return mixed(mixed(static_cast<uint32_t>(token) ^ keys[0]) ^ keys[1]);
}

// A token's value in the race: its logit less the logarithm of its noise, each rounded to a float on the way.
inline float raced(float scaled, uint32_t bits) {
  const float high = static_cast<float>(bits >> 16), low = static_cast<float>(bits & 0xffff);
  const float uniform = std::min(high * 0x1p-16f + (low + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  const float noise = static_cast<float>(-std::log1p(-static_cast<double>(uniform)));
  return scaled - static_cast<float>(std::log(static_cast<double>(noise)));
}

// At least what `raced` gives. Noise is no smaller than the uniform number that it is made of, and a logarithm to base 2
// no smaller than exponent plus mantissa, which are a float's bits.
inline float raced_at_most(float scaled, uint32_t bits) {
  constexpr float kLogarithm = 0.693147180559945f, kSlack = 0.01f;
  const float uniform = static_cast<float>(static_cast<int32_t>(bits >> 1));  // times 2^-31
  const float exponent = static_cast<float>(c10::bit_cast<int32_t>(uniform)) * 0x1p-23f;
  return scaled + ((127 + 31) * kLogarithm + kSlack - exponent * kLogarithm);
}

struct Winner {
  float value = -kInfinity;
  int64_t token = 0;

  void meet(float other, int64_t its_token) {
    if (other < value || (other == value && its_token > token)) return;
    value = other;
    token = its_token;
  }
};

// The winner among the tokens of some blocks that have at least this key and this value. `best` is one to beat.
inline Winner race(
    const Scaled& row, const std::vector<float>& maxima, const uint32_t* keys, uint32_t least_key, float least,
    int64_t first, int64_t last, Winner best) {
  float scaled[kBlock], bounds[kBlock];
  uint32_t bits[kBlock];
  for (int64_t block = first; block < last; ++block) {
    const float maximum = row(maxima[block]);
    if (maximum < least || maximum + kLargestGain < best.value) continue;
    const int64_t size = row.scale(block, scaled);
    for (int64_t i = 0; i < size; ++i) bits[i] = random_bits(keys, block * kBlock + i);
    for (int64_t i = 0; i < size; ++i) bounds[i] = raced_at_most(scaled[i], bits[i]);
    int32_t found = 0;
    for (int64_t i = 0; i < size; ++i) found |= bounds[i] >= best.value;
    for (int64_t i = 0; found && i < size; ++i)
      if (bounds[i] >= best.value && scaled[i] >= least && order_key(scaled[i]) >= least_key)
        best.meet(raced(scaled[i], bits[i]), block * kBlock + i);
  }
  return best;
}

// How many of the candidates, best first, have a share of top_p of their weights.
inline int64_t sufficient_number(const std::vector<Candidate>& candidates, double top_p) {
  int64_t total = 0, number = 0;
  for (const Candidate& one : candidates) total += weight_of(one.value());
  int64_t needed = share_of(total, top_p);
  for (; number < static_cast<int64_t>(candidates.size()) && needed > 0; ++number)
    needed -= weight_of(candidates[number].value());
  return number;
}

inline int64_t draw_of_best(const std::vector<Candidate>& candidates, const Setting& setting, float least) {
  const int64_t all = static_cast<int64_t>(candidates.size());
  const int64_t number = setting.top_p < 1.0 ? sufficient_number(candidates, setting.top_p) : all;
  float best = -kInfinity;
  int64_t token = candidates[0].token();
  for (int64_t place = 0; place < number; ++place) {
    const float scaled = candidates[place].value();
    const int64_t its_token = candidates[place].token();
    if (scaled < least) break;
    const float value = raced(scaled, random_bits(setting.keys, its_token));
    if (value > best) std::tie(best, token) = std::pair(value, its_token);
  }
  return token;
}

inline int64_t draw(const Scaled& row, const Setting& setting) {
  static thread_local std::vector<float> kept_maxima;
  static thread_local std::vector<Candidate> candidates;
  std::vector<float>& maxima = kept_maxima;  // this thread's, in the others too
  find_maxima(row, maxima);
  const float least = static_cast<float>(std::log(setting.min_p));
  if (setting.top_k > 0 && setting.top_k < row.count) {
    find_best(row, maxima, setting.top_k, candidates);
    return draw_of_best(candidates, setting, least);
  }
  const uint32_t least_key = setting.top_p < 1.0 ? smallest_sufficient_key(row, maxima, setting.top_p) : 0;
  const int64_t likeliest = first_of(row, maxima, row.maximum);
  const Winner to_beat{raced(0.0f, random_bits(setting.keys, likeliest)), likeliest};
  std::vector<Winner> winners(pieces_of(row));
  share_blocks(row, [&](int64_t piece, int64_t first, int64_t last) {
    winners[piece] = race(row, maxima, setting.keys, least_key, least, first, last, to_beat);
  });
  Winner best = to_beat;
  for (const Winner& one : winners) best.meet(one.value, one.token);
  return best.token;
}

// Calls body(row) for every row: all threads for one row after the other if there are fewer rows than threads.
template <typename Body>
void share_rows(int64_t rows, int64_t columns, const Body& body) {
  share_out(rows, rows < at::get_num_threads() ? 0 : rows * columns, body);
}

inline void check_logits(const at::Tensor& logits) {
  TORCH_CHECK(
      logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.size(1) > 0 &&
          (logits.stride(1) == 1 || logits.size(1) == 1),
      "logits must be float32 [R, V] with rows that lie together, not ", logits.sizes(), " of ", logits.scalar_type());
}

inline void check_rows(const at::Tensor& rows, const at::Tensor& logits) {
  const int64_t* places = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i)
    TORCH_CHECK(places[i] >= 0 && places[i] < logits.size(0), "row ", places[i], " of ", logits.size(0), " rows");
}

// Logits of 16 bits as float32; others as they are.
inline at::Tensor widened(const at::Tensor& logits) {
  return logits.element_size() == 2 ? logits.to(at::kFloat) : logits;
}

inline at::Tensor draw_tokens(
    const at::Tensor& given, const at::Tensor& maxima, const at::Tensor& rows, const at::Tensor& keys,
    const at::Tensor& temperature, const at::Tensor& top_k, const at::Tensor& top_p, const at::Tensor& min_p,
    int64_t, bool, bool) {
  const at::Tensor logits = widened(given);
  check_logits(logits);
  const int64_t drawn = rows.size(0);
  for (const at::Tensor* tensor : {&maxima, &rows, &keys, &temperature, &top_k, &top_p, &min_p})
    TORCH_CHECK(tensor->is_contiguous(), "draw_tokens: maxima and settings must be contiguous");
  for (const at::Tensor* tensor : {&temperature, &top_k, &top_p, &min_p})
    TORCH_CHECK(tensor->numel() == drawn, "draw_tokens: each setting needs a number for each row that is drawn");
  TORCH_CHECK(
      maxima.numel() == logits.size(0) && keys.numel() == 2 * drawn,
      "draw_tokens: a maximum for each row of logits and two keys for each row that is drawn are needed");
  check_rows(rows, logits);
  const int64_t* places = rows.const_data_ptr<int64_t>();
  at::Tensor tokens = at::empty({drawn}, rows.options());
  int64_t* found = tokens.mutable_data_ptr<int64_t>();
  const auto* words = reinterpret_cast<const uint32_t*>(keys.const_data_ptr<int32_t>());
  const float *numbers = logits.const_data_ptr<float>(), *largest = maxima.const_data_ptr<float>();
  const float* temperatures = temperature.const_data_ptr<float>();
  const int64_t* top_ks = top_k.const_data_ptr<int64_t>();
  const double *top_ps = top_p.const_data_ptr<double>(), *min_ps = min_p.const_data_ptr<double>();
  share_rows(drawn, logits.size(1), [&](int64_t i) {
    const float* row = numbers + places[i] * logits.stride(0);
    const Scaled scaled{row, logits.size(1), largest[places[i]], temperatures[i]};
    const Setting setting{{words[2 * i], words[2 * i + 1]}, top_ks[i], top_ps[i], min_ps[i]};
    found[i] = std::isfinite(scaled.maximum) ? draw(scaled, setting) : 0;
  });
  return tokens;
}

// ---- the likeliest tokens ------------------------------------------------------------------------------------------

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> likeliest_tokens(const at::Tensor& logits) {
  auto [largest, tokens] = logits.max(1);
  const at::Tensor maxima = widened(largest);
  const at::Tensor finite = maxima.abs().lt(std::numeric_limits<float>::infinity());
  return {maxima, tokens, finite};
}

// ---- what a grammar forbids ----------------------------------------------------------------------------------------

inline at::Tensor allow_tokens(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& allowed) {
  check_logits(logits);
  const int64_t masked = rows.numel(), columns = logits.size(1), bytes = divide_up(columns, 8);
  TORCH_CHECK(
      rows.is_contiguous() && allowed.is_contiguous() && allowed.numel() == masked * bytes,
      "allow_tokens: a bit for each token of each row that is masked is needed");
  check_rows(rows, logits);
  at::Tensor out = logits.clone(at::MemoryFormat::Contiguous);
  const int64_t* places = rows.const_data_ptr<int64_t>();
  const uint8_t* bits = allowed.const_data_ptr<uint8_t>();
  float* numbers = out.mutable_data_ptr<float>();
  share_out(masked, masked * columns, [&](int64_t i) {
    float* row = numbers + places[i] * columns;
    for (int64_t token = 0; token < columns; ++token)
      if (!(bits[i * bytes + token / 8] >> token % 8 & 1)) row[token] = -kInfinity;
  });
  return out;
}

// ---- log probabilities --------------------------------------------------------------------------------------------

// The logarithm of the sum of all exponentials. Sums of blocks are added in order.
inline float normalizer(const Scaled& row, const std::vector<float>& maxima, float maximum) {
  static thread_local std::vector<float> kept_sums;
  std::vector<float>& sums = kept_sums;  // this thread's, in the others too
  sums.resize(row.blocks());
  share_blocks(row, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const float* logits = row.logits + block * kBlock;
      const int64_t size = row.in_block(block), whole = size / kLanes * kLanes;
      Vec sum(0.0f);
      for (int64_t i = 0; i < whole; i += kLanes)
        sum = sum + exponential_below_zero(Vec::loadu(logits + i) - Vec(maximum));
      if (whole < size) {
        const Vec rest = exponential_below_zero(some_floats_at(logits + whole, size - whole) - Vec(maximum));
        sum = sum + Vec::set(Vec(0.0f), rest, size - whole);
      }
      sums[block] = sum_of_lanes(sum);
    }
  });
  double total = 0.0;
  for (const float sum : sums) total += sum;
  return static_cast<float>(maximum + std::log(total));
}

// How many logits are larger than this one, and one more.
inline int64_t rank_of(const Scaled& row, const std::vector<float>& maxima, float logit) {
  int64_t rank = 1;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (maxima[block] <= logit) continue;
    int32_t larger = 0;
    for (int64_t i = 0; i < row.in_block(block); ++i) larger += row.logits[block * kBlock + i] > logit;
    rank += larger;
  }
  return rank;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> token_logprobs(
    const at::Tensor& logits, const at::Tensor& tokens, int64_t most) {
  check_logits(logits);
  const int64_t rows = logits.size(0), columns = logits.size(1), named = std::min(most, columns);
  TORCH_CHECK(tokens.numel() == rows && most >= 0, "token_logprobs: a token for each row of logits is needed");
  const at::Tensor together = tokens.contiguous();
  const int64_t* chosen = together.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i)
    TORCH_CHECK(chosen[i] >= 0 && chosen[i] < columns, "token_logprobs: token ", chosen[i], " of ", columns);
  at::Tensor logprobs = at::empty({rows}, logits.options()), ranks = at::empty({rows}, tokens.options());
  at::Tensor best = at::empty({rows, named}, tokens.options());
  at::Tensor best_logprobs = at::empty({rows, named}, logits.options());
  const float* numbers = logits.const_data_ptr<float>();
  float *its_logprob = logprobs.mutable_data_ptr<float>(), *values = best_logprobs.mutable_data_ptr<float>();
  int64_t *its_rank = ranks.mutable_data_ptr<int64_t>(), *ids = best.mutable_data_ptr<int64_t>();
  share_rows(rows, columns, [&](int64_t i) {
    static thread_local std::vector<float> kept_maxima;
    static thread_local std::vector<Candidate> candidates;
    std::vector<float>& maxima = kept_maxima;
    const Scaled row{numbers + i * logits.stride(0), columns};
    find_maxima(row, maxima);
    const float maximum = largest(maxima.data(), row.blocks());
    if (!std::isfinite(maximum)) {  // anything will do
      its_logprob[i] = std::numeric_limits<float>::quiet_NaN();
      its_rank[i] = 1;
      std::fill_n(ids + i * named, named, 0);
      std::fill_n(values + i * named, named, its_logprob[i]);
      return;
    }
    find_best(row, maxima, named, candidates);
    const float normal = normalizer(row, maxima, maximum), logit = row.logits[chosen[i]];
    its_logprob[i] = logit - normal;
    its_rank[i] = rank_of(row, maxima, logit);
    for (int64_t n = 0; n < named; ++n) {
      ids[i * named + n] = candidates[n].token();
      values[i * named + n] = candidates[n].value() - normal;
    }
  });
  return {logprobs, ranks, best, best_logprobs};
}

}  // namespace nanoserve
