// Storing new keys and values in their slots of the paged cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

#include "vectors.h"

namespace nanoserve {

inline void cache_write(
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& slot_mapping) {
  const int64_t tokens = key.size(0), heads = key.size(1), block_size = key_cache.size(2);
  TORCH_CHECK(
      key_cache.is_contiguous() && value_cache.is_contiguous() && slot_mapping.is_contiguous() &&
          slot_mapping.scalar_type() == at::kLong && slot_mapping.numel() == tokens,
      "cache_write: contiguous caches and one int64 slot per token are needed");
  TORCH_CHECK(
      key.scalar_type() == key_cache.scalar_type() && value.scalar_type() == value_cache.scalar_type(),
      "cache_write: keys and values must have the dtype of their cache");
  TORCH_CHECK(
      key.size(2) == key_cache.size(3) && value.size(2) == value_cache.size(3),
      "cache_write: keys and values must be as wide as their cache");
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  const int64_t slots_in_all = key_cache.size(0) * block_size;
  for (int64_t token = 0; token < tokens; ++token)
    TORCH_CHECK(slots[token] < slots_in_all, "cache_write: slot ", slots[token], " of ", slots_in_all);
  const auto store = [&](const at::Tensor& source, const at::Tensor& cache) {
    const int64_t head_dim = cache.size(3);
    if (head_dim == 0) return;
    const at::Tensor rows = source.stride(2) == 1 ? source : source.contiguous();
    const int64_t size = rows.element_size();
    const char* from = static_cast<const char*>(rows.const_data_ptr());
    char* to = static_cast<char*>(cache.mutable_data_ptr());
    share_out(divide_up(tokens, 16), tokens * heads * head_dim, [&](int64_t item) {
      for (int64_t token = item * 16; token < std::min(tokens, item * 16 + 16); ++token) {
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < heads; ++head)
          std::memcpy(
              to + ((block * heads + head) * block_size + offset) * head_dim * size,
              from + (token * rows.stride(0) + head * rows.stride(1)) * size, head_dim * size);
      }
    });
  };
  store(key, key_cache);
  store(value, value_cache);
}

}  // namespace nanoserve
