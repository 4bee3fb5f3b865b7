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

// Operands of both directions, in the order of the custom calls.
struct Operands {
  ffi::AnyBuffer x, expert_ids, expert_weights, w_gate, w_up, w_down, place;
};

// Cuts buffers into the slices of several ranks on one GPU: there each has a leading dimension for
// the ranks of all groups.
struct Slice {
  int index = 0, count = 1;

  template <class T>
  T* of(const ffi::AnyBuffer& buffer) const {
    return reinterpret_cast<T*>(static_cast<char*>(buffer.untyped_data()) +
                                buffer.size_bytes() / count * index);
  }
};

void set_operands(ExpertCall& call, const CallAttributes& attributes,
                  const CudaWorkspace& workspace, int self, const Slice& slice,
                  const Operands& in) {
  call.shape = workspace.shape;
  call.directory = directory_of(workspace, self, attributes.timeout_s);
  call.x = slice.of<const void>(in.x);
  call.expert_ids = slice.of<const int32_t>(in.expert_ids);
  call.expert_weights = slice.of<const float>(in.expert_weights);
  call.w_gate = slice.of<const void>(in.w_gate);
  call.w_up = slice.of<const void>(in.w_up);
  call.w_down = slice.of<const void>(in.w_down);
  call.place = slice.of<const int32_t>(in.place);
  call.swiglu_limit = attributes.swiglu_limit;
  call.reserved_sms = static_cast<int32_t>(attributes.reserved_sms);
}

// Checks element types and counts against what the workspace was made for.
class Checker {
 public:
  Checker(const CallAttributes& attributes, const CudaWorkspace* workspace, bool ranks_on_one_gpu) {
    if (workspace == nullptr) {
      error_ = ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                          "the workspace does not exist in this process; it is made when the "
                          "operation is traced, so trace it here before running a program that "
                          "another process compiled");
      return;
    }
    if (ranks_on_one_gpu) slices_ = static_cast<int>(workspace->block.size());
    const PlanShape& plan = workspace->shape.plan;
    require(attributes.precision == "bf16" && attributes.ranks == plan.ranks &&
            attributes.capacity_rows == plan.capacity_rows);
    rows_ = int64_t{plan.tokens} * workspace->shape.hidden;
    slots_ = int64_t{plan.tokens} * plan.top_k;
    weights_ =
        int64_t{plan.local_experts} * workspace->shape.hidden * workspace->shape.intermediate;
    experts_ = plan.local_experts;
  }

  void operands(const Operands& in) {
    require(holds(in.x, ffi::BF16, rows_) && holds(in.expert_ids, ffi::S32, slots_) &&
            holds(in.expert_weights, ffi::F32, slots_) && holds(in.place, ffi::S32, 2));
    for (const auto& w : {in.w_gate, in.w_up, in.w_down}) require(holds(w, ffi::BF16, weights_));
  }
  void rows(const ffi::AnyBuffer& buffer) {
    require(holds(buffer, ffi::BF16, rows_) || holds(buffer, ffi::F32, rows_));
  }
  void bf16_rows(const ffi::AnyBuffer& buffer) { require(holds(buffer, ffi::BF16, rows_)); }
  void slots(const ffi::AnyBuffer& buffer) { require(holds(buffer, ffi::F32, slots_)); }
  void weights(const ffi::AnyBuffer& buffer, ffi::DataType type) {
    require(holds(buffer, type, weights_) && (type == ffi::BF16 || type == ffi::F32));
  }
  void stats(const ffi::AnyBuffer& expert_load, const ffi::AnyBuffer& counters) {
    require(holds(expert_load, ffi::S32, experts_) && holds(counters, ffi::S32, 2));
  }

  const ffi::Error& error() const { return error_; }

 private:
  bool holds(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) const {
    return buffer.element_type() == type &&
           static_cast<int64_t>(buffer.element_count()) == count * slices_;
  }
  void require(bool right) {
    if (!right && error_.success()) {
      error_ = ffi::Error::InvalidArgument(
          "operands, results or attributes differ from what the workspace was made for");
    }
  }

  int slices_ = 1;
  int64_t rows_ = 0, slots_ = 0, weights_ = 0, experts_ = 0;
  ffi::Error error_ = ffi::Error::Success();
};

// Enqueues the call of this device's rank: enqueue(its place in the directory, slice, stream).
template <class Enqueue>
ffi::Error run_on_device(const CudaWorkspace& workspace, int32_t device, cudaStream_t stream,
                         const Enqueue& enqueue) {
  const auto found = std::find(workspace.device.begin(), workspace.device.end(), device);
  if (found == workspace.device.end()) {
    return ffi::Error::Internal("GPU " + std::to_string(device) + " has no block of the workspace");
  }
  const int self = static_cast<int>(found - workspace.device.begin());
  if (const std::string failed = failure_message(workspace, self); !failed.empty()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failed);
  }
  return as_error(enqueue(self, Slice{}, stream));
}

// Enqueues the calls of all ranks, of one group or of several, on one GPU, each on a stream of its
// own: how more ranks are tested than there are GPUs.
template <class Enqueue>
ffi::Error run_ranks(const CudaWorkspace& workspace, cudaStream_t stream, const Enqueue& enqueue) {
  cudaEvent_t event;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
    return ffi::Error::Internal("cudaEventCreate failed");
  }
  const int slices = static_cast<int>(workspace.block.size());
  cudaEventRecord(event, stream);
  std::string error;
  for (int i = 0; i < slices && error.empty(); ++i) {
    cudaStreamWaitEvent(workspace.stream[i], event);
    error = enqueue(i, Slice{i, slices}, workspace.stream[i]);
  }
  for (int i = 0; i < slices; ++i) {
    cudaEventRecord(event, workspace.stream[i]);
    cudaStreamWaitEvent(stream, event);
  }
  cudaEventDestroy(event);
  return as_error(error);
}

// Runs `enqueue` on the device's rank, or, where operands have a leading dimension for it, on all.
template <bool kRanksOnOneGpu, class Enqueue>
ffi::Error run(const CudaWorkspace& workspace, int32_t device, cudaStream_t stream,
               const Enqueue& enqueue) {
  if constexpr (kRanksOnOneGpu) return run_ranks(workspace, stream, enqueue);
  return run_on_device(workspace, device, stream, enqueue);
}

template <bool kRanksOnOneGpu>
ffi::Error forward(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids,
                   ffi::AnyBuffer expert_weights, ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up,
                   ffi::AnyBuffer w_down, ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> expert_load, ffi::Result<ffi::AnyBuffer> counters,
                   CallAttributes attributes) {
  const Operands in{x, expert_ids, expert_weights, w_gate, w_up, w_down, place};
  const CudaWorkspace* workspace = find_cuda_workspace(attributes.workspace);
  Checker check(attributes, workspace, kRanksOnOneGpu);
  check.operands(in);
  check.rows(*y);
  check.stats(*expert_load, *counters);
  if (check.error().failure()) return check.error();
  return run<kRanksOnOneGpu>(*workspace, device, stream,
                             [&](int self, const Slice& slice, cudaStream_t on) {
                               ForwardCall call{};
                               set_operands(call, attributes, *workspace, self, slice, in);
                               call.y = slice.of<void>(*y);
                               call.y_is_f32 = y->element_type() == ffi::F32;
                               call.expert_load = slice.of<int32_t>(*expert_load);
                               call.counters = slice.of<int32_t>(*counters);
                               return enqueue_forward(call, on);
                             });
}

template <bool kRanksOnOneGpu>
ffi::Error backward(cudaStream_t stream, int32_t device, ffi::AnyBuffer x,
                    ffi::AnyBuffer expert_ids, ffi::AnyBuffer expert_weights, ffi::AnyBuffer w_gate,
                    ffi::AnyBuffer w_up, ffi::AnyBuffer w_down, ffi::AnyBuffer dy,
                    ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> dx,
                    ffi::Result<ffi::AnyBuffer> d_expert_weights,
                    ffi::Result<ffi::AnyBuffer> dw_gate, ffi::Result<ffi::AnyBuffer> dw_up,
                    ffi::Result<ffi::AnyBuffer> dw_down, CallAttributes attributes) {
  const Operands in{x, expert_ids, expert_weights, w_gate, w_up, w_down, place};
  const CudaWorkspace* workspace = find_cuda_workspace(attributes.workspace);
  Checker check(attributes, workspace, kRanksOnOneGpu);
  check.operands(in);
  check.bf16_rows(dy);
  check.rows(*dx);
  check.slots(*d_expert_weights);
  for (const auto& dw : {*dw_gate, *dw_up, *dw_down}) check.weights(dw, dw_gate->element_type());
  if (check.error().failure()) return check.error();
  return run<kRanksOnOneGpu>(*workspace, device, stream,
                             [&](int self, const Slice& slice, cudaStream_t on) {
                               BackwardCall call{};
                               set_operands(call, attributes, *workspace, self, slice, in);
                               call.dy = slice.of<const void>(dy);
                               call.dx = slice.of<void>(*dx);
                               call.dx_is_f32 = dx->element_type() == ffi::F32;
                               call.d_expert_weights = slice.of<float>(*d_expert_weights);
                               call.dw_gate = slice.of<void>(*dw_gate);
                               call.dw_up = slice.of<void>(*dw_up);
                               call.dw_down = slice.of<void>(*dw_down);
                               call.dw_is_f32 = dw_gate->element_type() == ffi::F32;
                               return enqueue_backward(call, on);
                             });
}

ffi::Error product(cudaStream_t stream, ffi::Buffer<ffi::BF16> a0, ffi::Buffer<ffi::BF16> a1,
                   ffi::Buffer<ffi::BF16> b0, ffi::Buffer<ffi::BF16> b1,
                   ffi::Buffer<ffi::S32> tile_start, ffi::Result<ffi::Buffer<ffi::BF16>> out,
                   ffi::Result<ffi::Buffer<ffi::S32>> counter, int64_t which, int64_t hidden,
                   int64_t intermediate) {
  GroupedGemm call{};
  call.product = static_cast<Product>(which);
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

namespace {

// x, expert_ids, expert_weights, w_gate, w_up, w_down, place -> y, expert_load, counters
constexpr auto bind_forward = [] {
  using Buffer = xla::ffi::AnyBuffer;
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Attrs<megamoe::CallAttributes>();
};

// x, expert_ids, expert_weights, w_gate, w_up, w_down, dy, place
// -> dx, d_expert_weights, dw_gate, dw_up, dw_down
constexpr auto bind_backward = [] {
  using Buffer = xla::ffi::AnyBuffer;
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Attrs<megamoe::CallAttributes>();
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaForward, megamoe::forward<false>, bind_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaForwardRanks, megamoe::forward<true>, bind_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaBackward, megamoe::backward<false>, bind_backward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeCudaBackwardRanks, megamoe::backward<true>, bind_backward());

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
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("intermediate"));

namespace megamoe {

void add_cuda_targets(nanobind::dict& targets) {
  const auto add = [&](const char* name, auto* handler) {
    nanobind::dict stages;
    stages["execute"] = nanobind::capsule(reinterpret_cast<void*>(handler));
    targets[name] = stages;
  };
  add("jax_megamoe_forward", MegamoeCudaForward);
  add("jax_megamoe_forward_ranks", MegamoeCudaForwardRanks);
  add("jax_megamoe_backward", MegamoeCudaBackward);
  add("jax_megamoe_backward_ranks", MegamoeCudaBackwardRanks);
  add("jax_megamoe_product", MegamoeCudaProduct);
}

void add_cuda_types(nanobind::dict&) {}

}  // namespace megamoe
