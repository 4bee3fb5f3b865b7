#include "ffi/gemm/tensor_map.h"
#include "ffi/kernels/combine.cuh"
#include "ffi/kernels/experts.cuh"
#include "ffi/kernels/stages.h"

namespace megamoe {

std::string enqueue_forward(const ForwardCall& call, cudaStream_t stream) {
  // All rows of own tokens are copied, so that they arrive in the order of use, which made the 30B
  // forward pass 1% faster on one H200 than pulling tokens.
  const Launch launch(call, call.shape.plan.capacity_rows, stream);
  const DeviceLayout& layout = launch.layout;
  ExpertsMaps maps;
  const int64_t capacity = call.shape.plan.capacity_rows;
  const int64_t experts = call.shape.plan.local_experts;
  const int64_t h = call.shape.hidden, i = call.shape.intermediate;
  char* x_pool = launch.at<char>(layout.common.x_pool);
  auto* act_pool = launch.at<__nv_bfloat16>(layout.common.act_pool);
  for (const std::string& error :
       {encode_k_major(&maps.x_pool, x_pool, 1, capacity, h, kTileM),
        encode_mn_major(&maps.gate, call.w_gate, experts, h, i, kTileN),
        encode_mn_major(&maps.up, call.w_up, experts, h, i, kTileN),
        encode_k_major(&maps.act_pool, act_pool, 1, capacity, i, kTileM),
        encode_k_major(&maps.act_blocks, act_pool, 1, capacity, i, kBlockRows),
        encode_mn_major(&maps.down, call.w_down, experts, i, h, kTileN)}) {
    if (!error.empty()) return error;
  }
  ExpertsArgs args{};
  args.shape = launch.shape.plan;
  args.plan = launch.buffers;
  args.directory = call.directory;
  args.board = launch.board;
  args.own_claim = &launch.board->own_claim;
  args.source[0] = {launch.board->x, x_pool, launch.progress(kArrivedX)};
  args.row_weight = launch.at<const float>(layout.row_weight);
  args.row_target = launch.at<const uint64_t>(layout.row_target);
  args.activated = launch.progress(kGateUpDone);
  args.hidden = call.shape.hidden;
  args.intermediate = call.shape.intermediate;
  args.swiglu_limit = call.swiglu_limit;

  launch.meet(nullptr);
  for (int round = 0; round < launch.rounds(); ++round) {
    launch.plan(round, call.expert_load, call.counters);
    args.round = round;
    experts_kernel<<<launch.sms, kThreads, sizeof(ExpertsShared), stream>>>(maps, args);
  }
  launch.finish();
  launch.combine(launch.combine_of(call.y, call.y_is_f32), nullptr);
  return status_text(cudaGetLastError());
}

std::vector<uint64_t> forward_timeline() { return copy_timeline(); }
uint64_t forward_pulled_bytes() { return take_pulled_bytes(); }

std::string load_forward_kernel() {
  return status_text(cudaFuncSetAttribute(experts_kernel,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(sizeof(ExpertsShared))));
}

}  // namespace megamoe
