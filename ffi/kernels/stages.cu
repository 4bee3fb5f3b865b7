#include <algorithm>

#include "ffi/kernels/combine.cuh"
#include "ffi/kernels/meet.cuh"
#include "ffi/kernels/plan_kernels.cuh"
#include "ffi/kernels/stages.h"

namespace megamoe {
namespace {

// One warp a token; those before the chunk *claimed have been combined already, if it is given.
__global__ void combine_kernel(Combine combine, const int32_t* claimed) {
  const int first = claimed == nullptr ? 0 : *claimed * kCombineTokens;
  const int warps = gridDim.x * (blockDim.x / 32);
  for (int t = first + blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; t < combine.tokens;
       t += warps) {
    combine.token<8>(t);
  }
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace

std::string status_text(cudaError_t status) {
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

Launch::Launch(const ExpertCall& call, int32_t copied_rows, cudaStream_t stream)
    : call(call),
      shape(call.shape),
      layout(DeviceLayout::of(call.shape)),
      block(call.directory.block[call.directory.self]),
      board(at<Board>(layout.common.flags)),
      buffers(layout.common.plan.at(block + layout.common.plan_base)),
      sms(std::max(1, multiprocessors() - call.reserved_sms)),
      stream(stream) {
  shape.plan.copied_rows = copied_rows;
}

void Launch::meet(const void* dy) const {
  // The call before has finished, so no peer reads the staged operands any more.
  const auto shown = [&](const auto* operand, int64_t offset, int64_t size) {
    if (!call.directory.staged || operand == nullptr) return operand;
    cudaMemcpyAsync(block + offset, operand, size, cudaMemcpyDeviceToDevice, stream);
    return reinterpret_cast<decltype(operand)>(block + offset);
  };
  const WorkspaceLayout& at = layout.common;
  const int64_t rows = int64_t{shape.plan.tokens} * shape.hidden * shape.staged_bytes;
  const int64_t slots = int64_t{shape.plan.tokens} * shape.plan.top_k * 4;
  meet_kernel<<<1, 32, 0, stream>>>(call.directory, at.flags, shape.plan.ranks, call.place,
                                    shown(call.x, at.staged_x, rows), shown(dy, at.staged_dy, rows),
                                    shown(call.expert_ids, at.staged_ids, slots),
                                    shown(call.expert_weights, at.staged_weights, slots));
}

void Launch::plan(int round, int32_t* expert_load, int32_t* counters) const {
  PlanArgs args{shape.plan, buffers, call.directory, board, layout, block, shape.hidden * 2};
  const int ctas = std::max(1, std::min(sms, (shape.plan.chunks() + kPlanWarps - 1) / kPlanWarps));
  void* parameters[] = {&args, &round, &expert_load, &counters};
  cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(plan_kernel), ctas, kPlanWarps * 32,
                              parameters, kPlanWarps * shape.plan.scratch_words() * 4, stream);
}

void Launch::finish() const {
  finish_kernel<<<1, 32, 0, stream>>>(call.directory, layout.common.flags, shape.plan.ranks);
}

Combine Launch::combine_of(void* out, bool is_f32) const {
  const PlanShape& plan = shape.plan;
  return {at<const char>(layout.common.returned), call.expert_ids, plan.tokens, plan.top_k,
          plan.ranks * plan.local_experts,        shape.hidden,    out,         is_f32};
}

void Launch::combine(const Combine& combine, const int32_t* claimed) const {
  const int ctas = std::max(1, std::min(8 * sms, (combine.tokens + 7) / 8));
  combine_kernel<<<ctas, 256, 0, stream>>>(combine, claimed);
}

int Launch::rounds() const {
  const int64_t capacity = shape.plan.capacity_rows;
  return static_cast<int>(
      std::max<int64_t>(1, align_up(shape.plan.max_pool_rows(), capacity) / capacity));
}

int32_t* Launch::progress(Progress which) const {
  return at<int32_t>(layout.counters) + int64_t{which} * (shape.plan.capacity_rows / kTileM);
}

std::string load_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(meet_kernel), reinterpret_cast<const void*>(finish_kernel),
        reinterpret_cast<const void*>(plan_kernel),
        reinterpret_cast<const void*>(combine_kernel)}) {
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status_text(status);
  }
  const std::string error = load_forward_kernel();
  return error.empty() ? load_backward_kernels() : error;
}

}  // namespace megamoe
