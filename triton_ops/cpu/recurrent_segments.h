// The segments of a step's tokens, for the layers that have a recurrent state: some consecutive positions of one
// sequence each, and the slots that hold the state before them and after them.
#pragma once

#include <ATen/core/Tensor.h>

#include "vectors.h"

namespace nanoserve {

// Positions between the one that is computed and the one that is fetched meanwhile: they lie too far apart for the
// processor to see what comes next.
constexpr int64_t kPositionsAhead = 4;

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

}  // namespace nanoserve
