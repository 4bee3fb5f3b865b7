#include <algorithm>

#include "ffi/gemm/tensor_map.h"
#include "ffi/kernels/combine.cuh"
#include "ffi/kernels/experts.cuh"
#include "ffi/kernels/kernels.h"
#include "ffi/kernels/meet.cuh"
#include "ffi/kernels/plan_kernels.cuh"

namespace megamoe {
namespace {

constexpr Sharing kDownSharing = Sharing::kPingPong;

std::string status_text(cudaError_t status) {
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace

std::string enqueue_forward(const ForwardCall& call, cudaStream_t stream) {
  const WorkspaceShape& shape = call.shape;
  const PlanShape& sizes = shape.plan;
  const DeviceLayout layout = DeviceLayout::For(shape);
  char* block = call.directory.block[call.directory.self];
  Board* board = reinterpret_cast<Board*>(block + layout.common.flags);
  const int sms = std::max(1, multiprocessors() - call.reserved_sms);
  const int plan_threads = kPlanWarps * 32;
  const int scratch_bytes = kPlanWarps * sizes.scratch_words() * 4;
  const int plan_ctas = std::max(1, std::min(sms, (sizes.chunks() + kPlanWarps - 1) / kPlanWarps));

  ExpertsMaps maps;
  const int64_t capacity = sizes.capacity_rows;
  const int64_t experts = sizes.local_experts;
  const int64_t h = shape.hidden, i = shape.intermediate;
  const char* x_pool = block + layout.common.x_pool;
  char* act_pool = block + layout.common.act_pool;
  std::string error;
  for (const std::string& result :
       {encode_k_major(&maps.x_pool, x_pool, 1, capacity, h, kTileM),
        encode_mn_major(&maps.gate, call.w_gate, experts, h, i, kGateUpColumns),
        encode_mn_major(&maps.up, call.w_up, experts, h, i, kGateUpColumns),
        encode_store(&maps.act_store, act_pool, capacity, i, kBoxRows),
        encode_k_major(&maps.act_pool, act_pool, 1, capacity, i, kTileM),
        encode_mn_major(&maps.down, call.w_down, experts, i, h, Tile<kDownSharing>::kN)}) {
    if (error.empty()) error = result;
  }
  if (!error.empty()) return error;

  meet_kernel<<<1, 32, 0, stream>>>(call.directory, layout.common.flags, sizes.ranks, call.place,
                                    call.x, call.expert_ids, call.expert_weights);
  PlanArgs plan{sizes,           layout.common.plan.At(block + layout.common.plan_base),
                call.directory,  board,
                layout,          block,
                shape.hidden * 2};
  ExpertsArgs args{};
  args.shape = sizes;
  args.plan = plan.plan;
  args.directory = call.directory;
  args.board = board;
  args.row_weight = reinterpret_cast<const float*>(block + layout.row_weight);
  args.row_target = reinterpret_cast<const uint64_t*>(block + layout.row_target);
  args.source[0] = {board->x, block + layout.common.x_pool,
                    reinterpret_cast<int32_t*>(block + layout.arrived)};
  args.activated = reinterpret_cast<int32_t*>(block + layout.activated);
  args.hidden = shape.hidden;
  args.intermediate = shape.intermediate;
  args.swiglu_limit = call.swiglu_limit;
  // Round 0 also makes the plan, which reports the loads even where there is nothing to do.
  const int64_t rounds = std::max<int64_t>(1, AlignUp(sizes.max_pool_rows(), capacity) / capacity);
  for (int round = 0; round < rounds; ++round) {
    int32_t* expert_load = call.expert_load;
    int32_t* counters = call.counters;
    void* plan_args[] = {&plan, &round, &expert_load, &counters};
    cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(plan_kernel), plan_ctas, plan_threads,
                                plan_args, scratch_bytes, stream);
    args.round = round;
    experts_kernel<kDownSharing><<<sms, kThreads, sizeof(ExpertsShared), stream>>>(maps, args);
  }
  finish_kernel<<<1, 32, 0, stream>>>(call.directory, layout.common.flags, sizes.ranks);
  const char* returned = block + layout.common.returned;
  const int num_experts = sizes.ranks * sizes.local_experts;
  const int combine_ctas = std::max(1, std::min(8 * sms, (sizes.tokens + 7) / 8));
  if (call.y_is_f32) {
    combine_kernel<<<combine_ctas, 256, 0, stream>>>(returned, call.expert_ids, sizes.tokens,
                                                     sizes.top_k, num_experts, shape.hidden,
                                                     static_cast<float*>(call.y));
  } else {
    combine_kernel<<<combine_ctas, 256, 0, stream>>>(returned, call.expert_ids, sizes.tokens,
                                                     sizes.top_k, num_experts, shape.hidden,
                                                     static_cast<__nv_bfloat16*>(call.y));
  }
  return status_text(cudaGetLastError());
}

std::string load_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(meet_kernel), reinterpret_cast<const void*>(finish_kernel),
        reinterpret_cast<const void*>(plan_kernel),
        reinterpret_cast<const void*>(experts_kernel<kDownSharing>),
        reinterpret_cast<const void*>(combine_kernel<float>),
        reinterpret_cast<const void*>(combine_kernel<__nv_bfloat16>)}) {
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status_text(status);
  }
  return status_text(cudaFuncSetAttribute(experts_kernel<kDownSharing>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(sizeof(ExpertsShared))));
}

}  // namespace megamoe
