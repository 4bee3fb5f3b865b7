#include "ffi/plan/host_plan.h"

#include <vector>

namespace megamoe {

void build_plan(const PlanShape& shape, int32_t rank, const PlanBuffers& plan) {
  std::vector<uint32_t> scratch(shape.scratch_words());
  const HostTeam team;
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    count_chunk(team, shape, rank, plan, c, scratch.data());
  }
  for (int32_t e = 0; e <= shape.local_experts; ++e) {
    scan_counts(team, shape, plan, e);
  }
  start_experts(team, shape, plan);
  for (int32_t e = 0; e < shape.local_experts; ++e) fill_expert(team, plan, e);
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    place_chunk(team, shape, rank, plan, c, scratch.data(), [](int64_t, int32_t, int32_t) {});
  }
}

void build_pull_list(const PlanShape& shape, int32_t rank, const PlanBuffers& plan, int32_t round) {
  std::vector<uint32_t> scratch(shape.scratch_words());
  const HostTeam team;
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    count_pull_chunk(team, shape, rank, plan, round, c, scratch.data());
  }
  for (int32_t e = 0; e < shape.local_experts; ++e) {
    scan_pull_counts(team, shape, plan, e);
  }
  start_pulls(team, shape, plan);
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    place_pull_chunk(team, shape, rank, plan, round, c, scratch.data());
  }
}

}  // namespace megamoe
