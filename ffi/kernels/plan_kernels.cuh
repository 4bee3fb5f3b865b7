// The phases of ffi/plan on the device, one warp per team; a kernel boundary between phases.
#pragma once

#include "ffi/kernels/sync.cuh"
#include "ffi/plan/plan.h"
#include "ffi/workspace/device_block.h"

namespace megamoe {

constexpr int kPlanWarps = 8;

struct PlanArgs {
  PlanShape shape;
  PlanBuffers plan;
  Board* board;
  DeviceLayout layout;
  char* block;
  int32_t row_bytes;  // of a row of the return buffer
};

__device__ __forceinline__ int plan_warp() { return blockIdx.x * kPlanWarps + threadIdx.x / 32; }
__device__ __forceinline__ int plan_warps() { return gridDim.x * kPlanWarps; }

// Gathers the ids of all ranks and counts rows per (expert, chunk).
__global__ void plan_count_kernel(PlanArgs args) {
  extern __shared__ uint32_t scratch[];
  const PlanShape& shape = args.shape;
  uint32_t* mine = scratch + threadIdx.x / 32 * shape.scratch_words();
  for (int chunk = plan_warp(); chunk < shape.chunks(); chunk += plan_warps()) {
    const int64_t token = int64_t{chunk} * kLanes + threadIdx.x % 32;
    if (token < shape.source_tokens()) {
      const int source = static_cast<int>(token / shape.tokens);
      const int32_t* from =
          args.board->ids[source] + (token - int64_t{source} * shape.tokens) * shape.top_k;
      int32_t* to = args.plan.ids + token * shape.top_k;
      for (int slot = 0; slot < shape.top_k; ++slot) to[slot] = from[slot];
    }
    __syncwarp();
    CountChunk(WarpTeam(), shape, args.board->rank, args.plan, chunk, mine);
  }
}

__global__ void plan_scan_kernel(PlanArgs args) {
  __shared__ uint32_t scratch[kPlanWarps * kLanes];
  for (int e = plan_warp(); e <= args.shape.local_experts; e += plan_warps()) {
    ScanCounts(WarpTeam(), args.shape, args.plan, e, scratch + threadIdx.x / 32 * kLanes);
  }
}

// Every CTA works out all segment starts for itself; the first one also writes them down.
__device__ __forceinline__ void sum_starts(const int32_t* rows, int experts, int align,
                                           int32_t* starts) {
  if (threadIdx.x < 32) {
    int before = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + threadIdx.x;
      const int own = e < experts ? static_cast<int>(AlignUp(rows[e], align)) : 0;
      int sum = own;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      if (e < experts) starts[e] = before + sum - own;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) starts[experts] = before;
  }
  __syncthreads();
}

__global__ void plan_place_kernel(PlanArgs args, int32_t* expert_load, int32_t* counters) {
  extern __shared__ uint32_t scratch[];
  __shared__ int32_t starts[kMaxLocalExperts + 1];
  const PlanShape& shape = args.shape;
  const int experts = shape.local_experts;
  sum_starts(args.plan.expert_rows, experts, kTileM, starts);
  PlanBuffers plan = args.plan;
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
      plan.expert_start[e] = starts[e];
      if (e < experts) expert_load[e] = plan.expert_rows[e];
    }
    if (threadIdx.x == 0) {
      counters[0] = plan.expert_rows[experts];
      counters[1] = static_cast<int32_t>((int64_t{starts[experts]} + shape.capacity_rows - 1) /
                                         shape.capacity_rows);
    }
  }
  plan.expert_start = starts;
  for (int e = plan_warp(); e < experts; e += plan_warps()) FillExpert(WarpTeam(), plan, e);

  float* row_weight = reinterpret_cast<float*>(args.block + args.layout.row_weight);
  uint64_t* row_target = reinterpret_cast<uint64_t*>(args.block + args.layout.row_target);
  uint32_t* mine = scratch + threadIdx.x / 32 * shape.scratch_words();
  for (int chunk = plan_warp(); chunk < shape.chunks(); chunk += plan_warps()) {
    PlaceChunk(WarpTeam(), shape, args.board->rank, plan, chunk, mine);
    const int64_t token = int64_t{chunk} * kLanes + threadIdx.x % 32;
    if (token >= shape.source_tokens()) continue;
    const int source = static_cast<int>(token / shape.tokens);
    const int64_t local = token - int64_t{source} * shape.tokens;
    char* returned = args.board->block[source] + args.layout.common.returned;
    for (int slot = 0; slot < shape.top_k; ++slot) {
      const int row = plan.row_of[token * shape.top_k + slot];
      if (row < 0) continue;
      row_weight[row] = args.board->weights[source][local * shape.top_k + slot];
      row_target[row] = reinterpret_cast<uint64_t>(
          returned + (int64_t{slot} * shape.tokens + local) * args.row_bytes);
    }
  }
}

// Starts a round: nothing claimed, nothing arrived; counts the tokens to pull.
__global__ void pull_count_kernel(PlanArgs args, int round) {
  extern __shared__ uint32_t scratch[];
  const PlanShape& shape = args.shape;
  if (round >= NumRounds(shape, args.plan)) return;
  int32_t* arrived = reinterpret_cast<int32_t*>(args.block + args.layout.arrived);
  int32_t* activated = reinterpret_cast<int32_t*>(args.block + args.layout.activated);
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int tile = thread; tile < shape.capacity_rows / kTileM; tile += gridDim.x * blockDim.x) {
    arrived[tile] = 0;
    activated[tile] = 0;
  }
  if (thread == 0) {
    args.board->tile_claim = 0;
    args.board->pull_claim = 0;
  }
  uint32_t* mine = scratch + threadIdx.x / 32 * shape.scratch_words();
  for (int chunk = plan_warp(); chunk < shape.chunks(); chunk += plan_warps()) {
    CountPullChunk(WarpTeam(), shape, args.plan, round, chunk, mine);
  }
}

__global__ void pull_scan_kernel(PlanArgs args, int round) {
  __shared__ uint32_t scratch[kPlanWarps * kLanes];
  if (round >= NumRounds(args.shape, args.plan)) return;
  for (int e = plan_warp(); e < args.shape.local_experts; e += plan_warps()) {
    ScanPullCounts(WarpTeam(), args.shape, args.plan, e, scratch + threadIdx.x / 32 * kLanes);
  }
}

__global__ void pull_place_kernel(PlanArgs args, int round) {
  extern __shared__ uint32_t scratch[];
  __shared__ int32_t starts[kMaxLocalExperts + 1];
  const PlanShape& shape = args.shape;
  if (round >= NumRounds(shape, args.plan)) return;
  sum_starts(args.plan.pull_rows, shape.local_experts, 1, starts);
  PlanBuffers plan = args.plan;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    plan.pull_start[shape.local_experts] = starts[shape.local_experts];
  }
  plan.pull_start = starts;
  uint32_t* mine = scratch + threadIdx.x / 32 * shape.scratch_words();
  for (int chunk = plan_warp(); chunk < shape.chunks(); chunk += plan_warps()) {
    PlacePullChunk(WarpTeam(), shape, plan, round, chunk, mine);
  }
}

}  // namespace megamoe
