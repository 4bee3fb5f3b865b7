#include "ffi/gemm/tensor_map.h"
#include "ffi/kernels/experts_backward.cuh"
#include "ffi/kernels/stages.h"

namespace megamoe {
namespace {

static_assert(sizeof(Backward::Shared) <= 232448);
static_assert(DeviceLayout::kTileColumns == kTileN);

// Rows of own tokens that are copied: more than the CTAs' first tiles have in the layers of
// Qwen3-MoE. Copying all of them, of x and dy, would take longer than the recomputation; it made
// the 30B backward pass 4% slower on H200.
constexpr int kCopiedRows = 48 * kTileM;

std::string encode_maps(const BackwardCall& call, const Launch& launch, BackwardMaps& maps) {
  const int64_t capacity = call.shape.plan.capacity_rows;
  const int64_t experts = call.shape.plan.local_experts;
  const int64_t h = call.shape.hidden, i = call.shape.intermediate;
  const WorkspaceLayout& at = launch.layout.common;
  char* x = launch.at<char>(at.x_pool);
  char* dy = launch.at<char>(at.dy_pool);
  char* gate = launch.at<char>(at.gate_pool);
  char* up = launch.at<char>(at.up_pool);
  char* act = launch.at<char>(at.act_pool);
  for (const std::string& error :
       {encode_k_major(&maps.x_rows, x, 1, capacity, h, kTileM),
        encode_k_major(&maps.dy_rows, dy, 1, capacity, h, kTileM),
        encode_mn_major(&maps.gate_columns, call.w_gate, experts, h, i, kTileN),
        encode_mn_major(&maps.up_columns, call.w_up, experts, h, i, kTileN),
        encode_k_major(&maps.down_rows, call.w_down, experts, i, h, kTileN),
        encode_k_major(&maps.gate_blocks, gate, 1, capacity, i, kBlockRows),
        encode_k_major(&maps.up_blocks, up, 1, capacity, i, kBlockRows),
        encode_k_major(&maps.act_blocks, act, 1, capacity, i, kBlockRows),
        encode_k_major(&maps.gate_pool_rows, gate, 1, capacity, i, kTileM),
        encode_k_major(&maps.up_pool_rows, up, 1, capacity, i, kTileM),
        encode_k_major(&maps.gate_rows, call.w_gate, experts, h, i, kTileN),
        encode_k_major(&maps.up_rows, call.w_up, experts, h, i, kTileN),
        encode_mn_major(&maps.x_columns, x, 1, capacity, h, kTileM),
        encode_mn_major(&maps.dy_columns, dy, 1, capacity, h, kTileN),
        encode_mn_major(&maps.act_columns, act, 1, capacity, i, kTileM),
        encode_mn_major(&maps.dgate_columns, gate, 1, capacity, i, kTileN),
        encode_mn_major(&maps.dup_columns, up, 1, capacity, i, kTileN)}) {
    if (!error.empty()) return error;
  }
  if (call.dw_is_f32) return "";
  const int64_t rows[3] = {h, h, i}, columns[3] = {i, i, h};
  void* const dw[3] = {call.dw_gate, call.dw_up, call.dw_down};
  for (int matrix = 0; matrix < 3; ++matrix) {
    const std::string error = encode_k_major(&maps.dw_blocks[matrix], dw[matrix], 1,
                                             experts * rows[matrix], columns[matrix], kBlockRows);
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace

std::string enqueue_backward(const BackwardCall& call, cudaStream_t stream) {
  const Launch launch(call, kCopiedRows, stream);
  const DeviceLayout& layout = launch.layout;
  const PlanShape& plan = launch.shape.plan;
  BackwardMaps maps;
  const std::string error = encode_maps(call, launch, maps);
  if (!error.empty()) return error;

  BackwardArgs args{};
  args.shape = plan;
  args.plan = launch.buffers;
  args.directory = call.directory;
  args.board = launch.board;
  args.own_claim = &launch.board->own_claim;
  args.hidden_grad_parts = &launch.board->hidden_grad_parts;
  args.pushed_parts = &launch.board->pushed_parts;
  args.source[0] = {launch.board->x, launch.at<char>(layout.common.x_pool),
                    launch.progress(kArrivedX)};
  args.source[1] = {launch.board->dy, launch.at<char>(layout.common.dy_pool),
                    launch.progress(kArrivedDy)};
  args.combine = launch.combine_of(call.dx, call.dx_is_f32);
  args.board_offset = layout.common.flags;
  args.row_weight = launch.at<const float>(layout.row_weight);
  args.row_target = launch.at<const uint64_t>(layout.row_target);
  args.gate_up_done = launch.progress(kGateUpDone);
  args.hidden_grad_done = launch.progress(kHiddenGradDone);
  args.partial_dots = launch.at<float>(layout.partial_dots);
  args.hidden = call.shape.hidden;
  args.intermediate = call.shape.intermediate;
  args.swiglu_limit = call.swiglu_limit;
  args.dw_is_f32 = call.dw_is_f32;
  args.carried = launch.at<float>(layout.common.carried);
  args.dw[0] = call.dw_gate;
  args.dw[1] = call.dw_up;
  args.dw[2] = call.dw_down;
  const int parts = column_tiles(call.shape.intermediate);

  launch.meet(call.dy);
  for (int round = 0; round < launch.rounds(); ++round) {
    launch.plan(round, nullptr, nullptr);
    args.round = round;
    zero_padding_kernel<<<plan.local_experts, 256, 0, stream>>>(args);
    const auto kernel = launch.rounds() > 1 ? backward_kernel<true> : backward_kernel<false>;
    kernel<<<launch.sms, kThreads, sizeof(Backward::Shared), stream>>>(maps, args);
    send_dots_kernel<<<launch.sms, 256, 0, stream>>>(args, layout.common.returned_weights, parts);
    if (launch.rounds() > 1) write_carried_kernel<<<launch.sms, 256, 0, stream>>>(args);
  }
  launch.finish();
  launch.combine(args.combine, &launch.board->combine_claim);
  const int64_t slots = int64_t{plan.tokens} * plan.top_k;
  collect_dots_kernel<<<launch.sms, 256, 0, stream>>>(
      launch.at<const float>(layout.common.returned_weights), call.expert_ids, slots,
      plan.ranks * plan.local_experts, call.d_expert_weights);
  return status_text(cudaGetLastError());
}

std::vector<uint64_t> backward_timeline() { return copy_timeline(); }
uint64_t backward_pulled_bytes() { return take_pulled_bytes(); }

std::string load_backward_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(zero_padding_kernel),
                             reinterpret_cast<const void*>(send_dots_kernel),
                             reinterpret_cast<const void*>(write_carried_kernel),
                             reinterpret_cast<const void*>(collect_dots_kernel)}) {
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status_text(status);
  }
  for (const auto kernel : {backward_kernel<true>, backward_kernel<false>}) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(Backward::Shared)));
    if (status != cudaSuccess) return status_text(status);
  }
  return "";
}

}  // namespace megamoe
