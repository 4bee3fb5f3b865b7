#include "ffi/plan/host_plan.h"

#include <vector>

namespace megamoe {

void BuildPlan(const PlanShape& shape, int32_t rank, const PlanBuffers& plan) {
  std::vector<uint32_t> scratch(shape.scratch_words());
  const HostTeam team;
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    CountChunk(team, shape, rank, plan, c, scratch.data());
  }
  for (int32_t e = 0; e <= shape.local_experts; ++e) {
    ScanCounts(team, shape, plan, e);
  }
  StartExperts(team, shape, plan);
  for (int32_t e = 0; e < shape.local_experts; ++e) FillExpert(team, plan, e);
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    PlaceChunk(team, shape, rank, plan, c, scratch.data(), [](int64_t, int32_t, int32_t) {});
  }
}

void BuildPullList(const PlanShape& shape, int32_t rank, const PlanBuffers& plan, int32_t round) {
  std::vector<uint32_t> scratch(shape.scratch_words());
  const HostTeam team;
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    CountPullChunk(team, shape, rank, plan, round, c, scratch.data());
  }
  for (int32_t e = 0; e < shape.local_experts; ++e) {
    ScanPullCounts(team, shape, plan, e);
  }
  StartPulls(team, shape, plan);
  for (int32_t c = 0; c < shape.chunks(); ++c) {
    PlacePullChunk(team, shape, rank, plan, round, c, scratch.data());
  }
}

}  // namespace megamoe
