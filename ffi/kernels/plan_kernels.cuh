// The phases of ffi/plan on the device.
#pragma once

#include "ffi/kernels/sync.cuh"
#include "ffi/plan/plan.h"
#include "ffi/workspace/device_block.h"

namespace megamoe {

constexpr int kPlanWarps = 8;

struct PlanArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  DeviceLayout layout;
  char* block;
  int32_t row_bytes;  // of a row of the return buffer
};

// The phases of the plan as one cooperative kernel of few small CTAs, one warp a team.
struct Planner {
  const PlanArgs& args;
  uint32_t* scratch;  // of this warp
  int32_t* starts;    // [kMaxLocalExperts + 1] of this CTA

  __device__ int warp() const { return blockIdx.x * kPlanWarps + threadIdx.x / 32; }
  __device__ int warps() const { return gridDim.x * kPlanWarps; }

  // All CTAs. What they wrote before, all may read after. The counter's top bit turns over with
  // every barrier, so it is never reset.
  __device__ void barrier() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* counter = &args.board->plan_barrier;
      const uint32_t own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
      __threadfence();
      const uint32_t before = atomicAdd(counter, own);
      const uint64_t start = global_timer_ns();
      while (((load_acquire_device(counter) ^ before) & 0x80000000u) == 0) {
        if (global_timer_ns() - start > static_cast<uint64_t>(args.directory.timeout_ns)) {
          fail(args.directory, args.board->rank, Phase::kPlan, args.board->rank, 0, gridDim.x);
        }
      }
    }
    __syncthreads();
  }

  // Exclusive prefix sums of rows[0..experts), each aligned up; every CTA works them out for
  // itself.
  __device__ void sum_starts(const int32_t* rows, int align) const {
    const int experts = args.shape.local_experts;
    if (threadIdx.x < 32) {
      int before = 0;
      for (int base = 0; base < experts; base += 32) {
        const int e = base + threadIdx.x;
        const int own = e < experts ? static_cast<int>(align_up(rows[e], align)) : 0;
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

  // Gathers the ids of all ranks and counts rows per (expert, chunk).
  __device__ void count() const {
    const PlanShape& shape = args.shape;
    for (int chunk = warp(); chunk < shape.chunks(); chunk += warps()) {
      const int64_t token = int64_t{chunk} * kLanes + threadIdx.x % 32;
      if (token < shape.source_tokens()) {
        const int source = static_cast<int>(token / shape.tokens);
        const int32_t* from =
            args.board->ids[source] + (token - int64_t{source} * shape.tokens) * shape.top_k;
        int32_t* to = args.plan.ids + token * shape.top_k;
        for (int first = 0; first < shape.top_k; first += kBatch) {
          int32_t ids[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) ids[i] = first + i < shape.top_k ? from[first + i] : -1;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (first + i < shape.top_k) to[first + i] = ids[i];
          }
        }
      }
      __syncwarp();
      count_chunk(WarpTeam(), shape, args.board->rank, args.plan, chunk, scratch);
    }
    barrier();
    for (int e = warp(); e <= shape.local_experts; e += warps()) {
      scan_counts(WarpTeam(), shape, args.plan, e);
    }
    barrier();
  }

  // Rows, and where each row's weight and home are.
  __device__ void place(int32_t* expert_load, int32_t* counters) const {
    const PlanShape& shape = args.shape;
    const int experts = shape.local_experts;
    sum_starts(args.plan.expert_rows, kTileM);
    PlanBuffers plan = args.plan;
    if (blockIdx.x == 0) {
      for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
        plan.expert_start[e] = starts[e];
        if (e < experts && expert_load != nullptr) expert_load[e] = plan.expert_rows[e];
      }
      if (threadIdx.x == 0 && counters != nullptr) {
        counters[0] = plan.expert_rows[experts];
        counters[1] = static_cast<int32_t>((int64_t{starts[experts]} + shape.capacity_rows - 1) /
                                           shape.capacity_rows);
      }
    }
    plan.expert_start = starts;
    for (int e = warp(); e < experts; e += warps()) fill_expert(WarpTeam(), plan, e);
    float* row_weight = reinterpret_cast<float*>(args.block + args.layout.row_weight);
    uint64_t* row_target = reinterpret_cast<uint64_t*>(args.block + args.layout.row_target);
    for (int chunk = warp(); chunk < shape.chunks(); chunk += warps()) {
      place_chunk(WarpTeam(), shape, args.board->rank, plan, chunk, scratch,
                  [&](int64_t token, int32_t slot, int32_t row) {
                    const int source = static_cast<int>(token / shape.tokens);
                    const int64_t local = token - int64_t{source} * shape.tokens;
                    row_weight[row] = args.board->weights[source][local * shape.top_k + slot];
                    row_target[row] = reinterpret_cast<uint64_t>(
                        args.board->block[source] + args.layout.common.returned +
                        (int64_t{slot} * shape.tokens + local) * args.row_bytes);
                  });
    }
  }

  // Starts a round: nothing claimed, nothing arrived; the tokens to pull, in the order of use. A
  // warp counts the same chunks as it has placed.
  __device__ void pulls(int round) const {
    const PlanShape& shape = args.shape;
    // The first round starts even without rows: the backward pass has zeros to write.
    if (round > 0 && round >= num_rounds(shape, args.plan)) return;
    int32_t* counters = reinterpret_cast<int32_t*>(args.block + args.layout.counters);
    const int count = kProgressCounters * (shape.capacity_rows / kTileM);
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = thread; i < count; i += gridDim.x * blockDim.x) counters[i] = 0;
    if (thread == 0) {
      args.board->tile_claim = 0;
      args.board->pull_claim = 0;
      args.board->own_claim = 0;
      args.board->down_claim = 0;
      args.board->hidden_grad_parts = 0;
      args.board->pushed_parts = 0;
      args.board->combine_claim = 0;
    }
    // All rows are this rank's own and copied.
    if (shape.ranks == 1 && shape.copied_rows >= shape.capacity_rows) {
      if (thread == 0) args.plan.pull_start[shape.local_experts] = 0;
      return;
    }
    for (int chunk = warp(); chunk < shape.chunks(); chunk += warps()) {
      count_pull_chunk(WarpTeam(), shape, args.board->rank, args.plan, round, chunk, scratch);
    }
    barrier();
    for (int e = warp(); e < shape.local_experts; e += warps()) {
      scan_pull_counts(WarpTeam(), shape, args.plan, e);
    }
    barrier();
    sum_starts(args.plan.pull_rows, 1);
    PlanBuffers plan = args.plan;
    if (thread == 0) plan.pull_start[shape.local_experts] = starts[shape.local_experts];
    plan.pull_start = starts;
    for (int chunk = warp(); chunk < shape.chunks(); chunk += warps()) {
      place_pull_chunk(WarpTeam(), shape, args.board->rank, plan, round, chunk, scratch);
    }
  }
};

// Round 0: the plan and its pull list; a later round: the pull list alone.
__global__ void __launch_bounds__(kPlanWarps * 32, 1)
    plan_kernel(PlanArgs args, int round, int32_t* expert_load, int32_t* counters) {
  extern __shared__ uint32_t scratch[];
  __shared__ int32_t starts[kMaxLocalExperts + 1];
  const Planner planner{args, scratch + threadIdx.x / 32 * args.shape.scratch_words(), starts};
  if (round == 0) {
    planner.count();
    planner.place(expert_load, counters);
  }
  planner.pulls(round);
}

}  // namespace megamoe
