// The segments of a step's tokens, for the layers that have a recurrent state: some consecutive positions of one
// sequence each, and the slots that hold the state before them and after them.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace nanoserve {

// Positions between the one that is computed and the one that is fetched meanwhile: they lie too far apart for the
// processor to see what comes next.
constexpr int64_t kPositionsAhead = 4;
constexpr int64_t kChannels = 128;  // that a thread takes at a time, where each has a state of its own

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

struct Segment {
  int64_t begin, end;      // its tokens among those of the step
  int64_t source, target;  // slots; a source below 0 is a state of zeros
  int64_t position;        // of its first token in the sequence
};

inline std::vector<Segment> read_segments(const at::Tensor& table, int64_t tokens, int64_t slots) {
  TORCH_CHECK(
      table.scalar_type() == at::kInt && table.is_contiguous() && table.dim() == 2 && table.size(1) == 5,
      "segments must be a contiguous int32 table of 5 columns");
  std::vector<Segment> segments;
  const int32_t* fields = table.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < table.size(0); ++i, fields += 5) {
    segments.push_back({fields[0], fields[1], fields[2], fields[3], fields[4]});
    const Segment& segment = segments.back();
    TORCH_CHECK(
        0 <= segment.begin && segment.begin < segment.end && segment.end <= tokens && segment.position >= 0,
        "segment ", i, " must have some of the step's ", tokens, " tokens");
    TORCH_CHECK(
        segment.source < slots && 0 <= segment.target && segment.target < slots, "segment ", i,
        " must have two of the ", slots, " slots");
  }
  return segments;
}

// Where the rows of a table begin, and its end: a segment that reads what the one before it wrote belongs to its row.
inline std::vector<int64_t> row_starts(const std::vector<Segment>& segments) {
  std::vector<int64_t> starts;
  const int64_t count = static_cast<int64_t>(segments.size());
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || segments[i].source != segments[i - 1].target) starts.push_back(i);
  starts.push_back(count);
  return starts;
}

// Calls `run` with a number of the tensors' format.
template <typename Run>
inline void run_in_format(at::ScalarType type, const char* name, const Run& run) {
  switch (type) {
    case at::kFloat: return run(float());
    case at::kBFloat16: return run(at::BFloat16());
    case at::kHalf: return run(at::Half());
    default: TORCH_CHECK(false, name, ": no implementation for ", type);
  }
}

}  // namespace nanoserve
