// The CPU's own implementations of nanoserve's operators; their schemas are defined in Python (triton_ops).
//
// Written on ATen's portable vectors: the same source serves AVX2, AVX-512 and NEON, chosen by CPU_CAPABILITY.

#include <ATen/core/Tensor.h>
#include <omp.h>
#include <torch/library.h>

#include "amx_tiles.h"
#include "cache_write.h"
#include "causal_convolution.h"
#include "decode_attention.h"
#include "gated_delta_rule.h"
#include "linear.h"
#include "packed_linear.h"
#include "prefill_attention.h"
#include "sampling.h"
#include "selective_scan.h"
#include "state_space_dual.h"

namespace nanoserve {

template <typename Number>
void attend(const Problem<Number>& problem) {
  std::vector<int64_t> single, several;
  for (int64_t row = 0; row < problem.rows; ++row) {
    // The two kernels add in another order.
    const bool alone = problem.queries(row) == 1 && !batch_invariant;
    if (alone) single.push_back(row);
    if (!alone && problem.queries(row) > 0) several.push_back(row);
  }
  if (!several.empty()) attend_several_queries(problem, several);
  if (!single.empty()) attend_single_queries(problem, single);
}

void paged_attention(
    const at::Tensor& out, const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& block_tables, const at::Tensor& query_starts, const at::Tensor& context_lengths, double scale,
    int64_t sliding_window, double soft_cap, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& spans) {
  const at::ScalarType type = out.scalar_type();
  for (const at::Tensor* tensor : {&query, &key_cache, &value_cache})
    TORCH_CHECK(tensor->scalar_type() == type, "paged_attention: query, caches and out must have the same dtype");
  for (const at::Tensor* tensor : {&block_tables, &query_starts, &context_lengths})
    TORCH_CHECK(
        tensor->scalar_type() == at::kInt && tensor->is_contiguous(),
        "paged_attention: block tables, starts and lengths must be contiguous int32");
  TORCH_CHECK(
      out.is_contiguous() && key_cache.is_contiguous() && query.dim() == 3 && query.size(1) % key_cache.size(1) == 0 &&
          query.size(2) == key_cache.size(3) && out.size(1) == query.size(1) * value_cache.size(3),
      "paged_attention: contiguous out [T, heads * value_dim] and keys [blocks, kv_heads, block_size, head_dim] needed");
  TORCH_CHECK(
      value_cache.stride(3) == 1 && value_cache.stride(1) == value_cache.size(2) * value_cache.stride(2) &&
          value_cache.stride(0) == value_cache.size(1) * value_cache.stride(1) &&
          value_cache.sizes().slice(0, 3) == key_cache.sizes().slice(0, 3),
      "paged_attention: values must lie in slots of equal distance, as many as keys");
  TORCH_CHECK(
      !sinks || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous() && sinks->numel() == query.size(1)),
      "paged_attention: sinks must be contiguous float32, one per head");
  TORCH_CHECK(
      !spans || (spans->scalar_type() == at::kInt && spans->is_contiguous() && spans->dim() == 2 &&
                 spans->size(0) == context_lengths.size(0) && spans->size(1) == 2),
      "paged_attention: spans must be contiguous int32, a length and a position per row");
  const at::Tensor rows = query.stride(2) == 1 ? query : query.contiguous();
  const auto run = [&](auto number) {
    attend(make_problem<decltype(number)>(
        out, rows, key_cache, value_cache, block_tables, query_starts, context_lengths, scale, sliding_window,
        soft_cap, sinks, spans));
  };
  switch (type) {
    case at::kFloat: return run(float());
    case at::kBFloat16: return run(at::BFloat16());
    case at::kHalf: return run(at::Half());
    default: TORCH_CHECK(false, "paged_attention: no implementation for ", type);
  }
}

}  // namespace nanoserve

TORCH_LIBRARY_FRAGMENT(nanoserve, library) {
  // Both return what was allowed before.
  library.def("allow_tiles(bool value) -> bool", [](bool value) { return nanoserve::tiles_allowed.exchange(value); });
  library.def("allow_dots(bool value) -> bool", [](bool value) { return nanoserve::dots_allowed.exchange(value); });
  library.def("has_tiles() -> bool", [] { return nanoserve::has_tiles(); });
  library.def("set_batch_invariant(bool value) -> ()", [](bool value) { nanoserve::batch_invariant = value; });
  // With 0 levels and 1 thread the calling thread computes alone what it would share with others. Compiled layers have
  // a number of threads of their own, so they need the levels. oneDNN divides a product among the threads that there
  // may be, and leaves the parts of those that do not come: it needs the number. Returns both as they were before.
  library.def("set_parallel(int levels, int threads) -> (int, int)", [](int64_t levels, int64_t threads) {
    const std::tuple<int64_t, int64_t> before{omp_get_max_active_levels(), omp_get_max_threads()};
    omp_set_max_active_levels(static_cast<int>(levels));
    omp_set_num_threads(static_cast<int>(threads));
    return before;
  });
}

TORCH_LIBRARY_IMPL(nanoserve, CPU, library) {
  library.impl("allow_tokens", &nanoserve::allow_tokens);
  library.impl("cache_write", &nanoserve::cache_write);
  library.impl("causal_convolution", &nanoserve::causal_convolution);
  library.impl("draw_tokens", &nanoserve::draw_tokens);
  library.impl("likeliest_tokens", &nanoserve::likeliest_tokens);
  library.impl("gated_delta_rule", &nanoserve::matrix_recurrence<nanoserve::DeltaRule>);
  library.impl("linear", &nanoserve::linear);
  library.impl("packed_linear", &nanoserve::packed_linear);
  library.impl("paged_attention", &nanoserve::paged_attention);
  library.impl("selective_scan", &nanoserve::selective_scan);
  library.impl("state_space_dual", &nanoserve::matrix_recurrence<nanoserve::StateSpaceDual>);
  library.impl("token_logprobs", &nanoserve::token_logprobs);
}
