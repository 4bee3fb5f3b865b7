#include "ffi/handlers/cuda_handlers.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ffi/gemm/grouped_gemm.h"
#include "ffi/handlers/call_attributes.h"
#include "ffi/kernels/kernels.h"
#include "ffi/workspace/cuda_workspace.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

ffi::Error as_error(const std::string& message) {
  return message.empty() ? ffi::Error::Success() : ffi::Error::Internal(message);
}

struct ForwardBuffers {
  ffi::AnyBuffer x, expert_ids, expert_weights, w_gate, w_up, w_down, place;
  ffi::AnyBuffer y, expert_load, counters;
};

// The call of one rank; with several ranks on one GPU every buffer has a leading rank dimension.
ForwardCall forward_call(const CallAttributes& attributes, const CudaWorkspace& workspace, int self,
                         int slice, int slices, const ForwardBuffers& buffers) {
  const auto at = [&](const ffi::AnyBuffer& buffer) {
    return static_cast<char*>(buffer.untyped_data()) + buffer.size_bytes() / slices * slice;
  };
  ForwardCall call{};
  call.shape = workspace.shape;
  call.directory = directory_of(workspace, self, attributes.timeout_s);
  call.x = at(buffers.x);
  call.expert_ids = reinterpret_cast<const int32_t*>(at(buffers.expert_ids));
  call.expert_weights = reinterpret_cast<const float*>(at(buffers.expert_weights));
  call.w_gate = at(buffers.w_gate);
  call.w_up = at(buffers.w_up);
  call.w_down = at(buffers.w_down);
  call.place = reinterpret_cast<const int32_t*>(at(buffers.place));
  call.y = at(buffers.y);
  call.y_is_f32 = buffers.y.element_type() == ffi::F32;
  call.expert_load = reinterpret_cast<int32_t*>(at(buffers.expert_load));
  call.counters = reinterpret_cast<int32_t*>(at(buffers.counters));
  call.swiglu_limit = attributes.swiglu_limit;
  call.reserved_sms = static_cast<int32_t>(attributes.reserved_sms);
  return call;
}

ffi::Error check_forward(const CallAttributes& attributes, const CudaWorkspace* workspace,
                         const ForwardBuffers& buffers, int slices) {
  if (workspace == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "the workspace does not exist in this process; it is made when the operation "
                      "is traced, so trace it here before running a program that another process "
                      "compiled");
  }
  const PlanShape& plan = workspace->shape.plan;
  const int64_t h = workspace->shape.hidden, i = workspace->shape.intermediate;
  const auto holds = [&](const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) {
    return buffer.element_type() == type &&
           static_cast<int64_t>(buffer.element_count()) == count * slices;
  };
  const int64_t weights = plan.local_experts * h * i;
  const int64_t slots = int64_t{plan.tokens} * plan.top_k;
  if (attributes.precision != "bf16" || attributes.ranks != plan.ranks ||
      attributes.capacity_rows != plan.capacity_rows ||
      !holds(buffers.x, ffi::BF16, plan.tokens * h) || !holds(buffers.w_gate, ffi::BF16, weights) ||
      !holds(buffers.w_up, ffi::BF16, weights) || !holds(buffers.w_down, ffi::BF16, weights) ||
      !holds(buffers.expert_ids, ffi::S32, slots) ||
      !holds(buffers.expert_weights, ffi::F32, slots) || !holds(buffers.place, ffi::S32, 2) ||
      !(holds(buffers.y, ffi::BF16, plan.tokens * h) ||
        holds(buffers.y, ffi::F32, plan.tokens * h)) ||
      !holds(buffers.expert_load, ffi::S32, plan.local_experts) ||
      !holds(buffers.counters, ffi::S32, 2)) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe_forward: operands, results or attributes differ from what the workspace was "
        "made for");
  }
  return ffi::Error::Success();
}

ffi::Error forward(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids,
                   ffi::AnyBuffer expert_weights, ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up,
                   ffi::AnyBuffer w_down, ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> expert_load, ffi::Result<ffi::AnyBuffer> counters,
                   CallAttributes attributes) {
  const ForwardBuffers buffers{x,     expert_ids, expert_weights, w_gate,   w_up, w_down,
                               place, *y,         *expert_load,   *counters};
  const CudaWorkspace* workspace = find_cuda_workspace(attributes.workspace);
  if (auto error = check_forward(attributes, workspace, buffers, 1); error.failure()) return error;
  const auto found = std::find(workspace->device.begin(), workspace->device.end(), device);
  if (found == workspace->device.end()) {
    return ffi::Error::Internal("GPU " + std::to_string(device) + " has no block of the workspace");
  }
  const int self = static_cast<int>(found - workspace->device.begin());
  if (const std::string failed = failure_message(*workspace, self); !failed.empty()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failed);
  }
  return as_error(
      enqueue_forward(forward_call(attributes, *workspace, self, 0, 1, buffers), stream));
}

// All ranks of a group on one GPU, each on a stream of its own: how larger groups are tested than
// there are GPUs.
ffi::Error forward_ranks(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids,
                         ffi::AnyBuffer expert_weights, ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up,
                         ffi::AnyBuffer w_down, ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> expert_load,
                         ffi::Result<ffi::AnyBuffer> counters, CallAttributes attributes) {
  const ForwardBuffers buffers{x,     expert_ids, expert_weights, w_gate,   w_up, w_down,
                               place, *y,         *expert_load,   *counters};
  const CudaWorkspace* workspace = find_cuda_workspace(attributes.workspace);
  const int ranks = static_cast<int>(attributes.ranks);
  if (auto error = check_forward(attributes, workspace, buffers, ranks); error.failure()) {
    return error;
  }
  cudaEvent_t event;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
    return ffi::Error::Internal("cudaEventCreate failed");
  }
  cudaEventRecord(event, stream);
  std::string error;
  for (int rank = 0; rank < ranks && error.empty(); ++rank) {
    cudaStreamWaitEvent(workspace->stream[rank], event);
    error = enqueue_forward(forward_call(attributes, *workspace, rank, rank, ranks, buffers),
                            workspace->stream[rank]);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    cudaEventRecord(event, workspace->stream[rank]);
    cudaStreamWaitEvent(stream, event);
  }
  cudaEventDestroy(event);
  return as_error(error);
}

ffi::Error product(cudaStream_t stream, ffi::Buffer<ffi::BF16> a0, ffi::Buffer<ffi::BF16> a1,
                   ffi::Buffer<ffi::BF16> b0, ffi::Buffer<ffi::BF16> b1,
                   ffi::Buffer<ffi::S32> tile_start, ffi::Result<ffi::Buffer<ffi::BF16>> out,
                   ffi::Result<ffi::Buffer<ffi::S32>> counter, int64_t which, bool ping_pong,
                   int64_t hidden, int64_t intermediate) {
  GroupedGemm call{};
  call.product = static_cast<Product>(which);
  call.ping_pong = ping_pong;
  call.groups = static_cast<int64_t>(tile_start.element_count()) - 1;
  call.rows = a0.dimensions()[0];
  call.hidden = hidden;
  call.intermediate = intermediate;
  call.a0 = a0.untyped_data();
  call.a1 = a1.untyped_data();
  call.b0 = b0.untyped_data();
  call.b1 = b1.untyped_data();
  call.out = out->untyped_data();
  call.tile_start = tile_start.typed_data();
  call.counter = counter->typed_data();
  const cudaError_t status = cudaMemsetAsync(call.counter, 0, sizeof(int32_t), stream);
  if (status != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(status));
  return as_error(grouped_gemm(call, stream));
}

}  // namespace
}  // namespace megamoe

#define MEGAMOE_FORWARD_OPERANDS  \
  .Arg<xla::ffi::AnyBuffer>()     \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Ret<xla::ffi::AnyBuffer>() \
      .Ret<xla::ffi::AnyBuffer>() \
      .Ret<xla::ffi::AnyBuffer>() \
      .Attrs<megamoe::CallAttributes>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaForward, megamoe::forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>() MEGAMOE_FORWARD_OPERANDS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaForwardRanks, megamoe::forward_ranks,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  MEGAMOE_FORWARD_OPERANDS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaProduct, megamoe::product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int64_t>("product")
                                  .Attr<bool>("ping_pong")
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("intermediate"));

namespace megamoe {

void AddCudaTargets(nanobind::dict& targets) {
  const auto add = [&](const char* name, auto* handler) {
    nanobind::dict stages;
    stages["execute"] = nanobind::capsule(reinterpret_cast<void*>(handler));
    targets[name] = stages;
  };
  add("jax_megamoe_forward", MegamoeCudaForward);
  add("jax_megamoe_forward_ranks", MegamoeCudaForwardRanks);
  add("jax_megamoe_product", MegamoeCudaProduct);
}

void AddCudaTypes(nanobind::dict&) {}

}  // namespace megamoe
