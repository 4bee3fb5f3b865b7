#include "ffi/handlers/host_handlers.h"

#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ffi/handlers/call_attributes.h"
#include "ffi/handlers/host_moe.h"
#include "ffi/workspace/host_workspace.h"
#include "ffi/workspace/rendezvous.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

// State of one call site of one executable, shared by all devices of the process. The rendezvous
// hangs on it, and not on an attribute, because a jaxpr that is inlined twice has the same
// attributes in both places.
struct HostCallSite {
  static ffi::TypeId id;

  HostCallSite(const CallAttributes& attributes, HostWorkspace* workspace)
      : workspace(workspace),
        swiglu_limit(attributes.swiglu_limit),
        rendezvous(static_cast<int32_t>(attributes.ranks), attributes.timeout_s, "dispatch") {}

  HostWorkspace* workspace;
  float swiglu_limit;
  Rendezvous<HostOperands> rendezvous;
};

ffi::TypeId HostCallSite::id = {};

constexpr ffi::TypeInfo kHostStateTypeInfo = ffi::MakeTypeInfo<HostCallSite>();

ffi::ErrorOr<std::unique_ptr<HostCallSite>> instantiate(CallAttributes attributes) {
  if (attributes.precision != "bf16") {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "precision is '" + std::string(attributes.precision) +
        "'; the host handlers compute in f32 and accept only 'bf16', which rounds nothing there"));
  }
  HostWorkspace* workspace = find_host_workspace(attributes.workspace);
  if (workspace == nullptr) {
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "workspace " + std::to_string(attributes.workspace) +
            " does not exist in this process; it is made when the operation is traced, so trace it "
            "here before running a program that another process compiled or exported"));
  }
  const PlanShape& plan = workspace->shape().plan;
  if (attributes.ranks != plan.ranks || attributes.capacity_rows != plan.capacity_rows) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "ranks and capacity_rows are " + std::to_string(attributes.ranks) + " and " +
        std::to_string(attributes.capacity_rows) + "; the workspace was made for " +
        std::to_string(plan.ranks) + " and " + std::to_string(plan.capacity_rows)));
  }
  return std::make_unique<HostCallSite>(attributes, workspace);
}

std::string describe(const ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t dimension : buffer.dimensions()) {
    text += (text.empty() ? "" : ", ") + std::to_string(dimension);
  }
  return "[" + text + "]";
}

// Checks operands one by one and keeps the first complaint.
class Checker {
 public:
  void shape(const char* name, const ffi::AnyBuffer& buffer,
             std::initializer_list<int64_t> wanted) {
    const auto dimensions = buffer.dimensions();
    bool same = dimensions.size() == wanted.size();
    std::string text;
    size_t i = 0;
    for (int64_t dimension : wanted) {
      same = same && dimensions[i++] == dimension;
      text += (text.empty() ? "" : ", ") + std::to_string(dimension);
    }
    if (!same)
      complain(std::string(name) + " is " + describe(buffer) + "; expected [" + text + "]");
  }

  void type(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType wanted,
            const char* wanted_name) {
    if (buffer.element_type() != wanted) {
      complain(std::string(name) + " has the wrong element type; expected " + wanted_name);
    }
  }

  DType float_type(const char* name, const ffi::AnyBuffer& buffer) {
    if (buffer.element_type() == ffi::F32) return DType::kF32;
    if (buffer.element_type() != ffi::BF16) {
      complain(std::string(name) + " has the wrong element type; expected bf16 or f32");
    }
    return DType::kBf16;
  }

  void complain(std::string message) {
    if (message_.empty()) message_ = std::move(message);
  }

  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

// The operands that both directions share.
struct CommonOperands {
  ffi::AnyBuffer x, expert_ids, expert_weights, w_gate, w_up, w_down, place;
};

HostCall check_common(const HostCallSite& site, const CommonOperands& in, Checker& check) {
  const WorkspaceShape& shape = site.workspace->shape();
  const int64_t tokens = shape.plan.tokens, top_k = shape.plan.top_k;
  const int64_t experts = shape.plan.local_experts;
  const int64_t hidden = shape.hidden, intermediate = shape.intermediate;
  HostCall call{shape, check.float_type("x", in.x), check.float_type("w_gate", in.w_gate),
                site.swiglu_limit};
  check.shape("x", in.x, {tokens, hidden});
  check.shape("expert_ids", in.expert_ids, {tokens, top_k});
  check.type("expert_ids", in.expert_ids, ffi::S32, "int32");
  check.shape("expert_weights", in.expert_weights, {tokens, top_k});
  check.type("expert_weights", in.expert_weights, ffi::F32, "f32");
  check.shape("w_gate", in.w_gate, {experts, hidden, intermediate});
  check.shape("w_up", in.w_up, {experts, hidden, intermediate});
  check.shape("w_down", in.w_down, {experts, intermediate, hidden});
  check.type("w_up", in.w_up, in.w_gate.element_type(), "that of w_gate");
  check.type("w_down", in.w_down, in.w_gate.element_type(), "that of w_gate");
  check.shape("place", in.place, {2});
  check.type("place", in.place, ffi::S32, "int32");
  if (size_of(call.x_type) != shape.staged_bytes) {
    check.complain("x has another element size than the workspace was made for");
  }
  return call;
}

HostOperands common_pointers(const CommonOperands& in) {
  HostOperands operands;
  operands.x = in.x.untyped_data();
  operands.expert_ids = static_cast<const int32_t*>(in.expert_ids.untyped_data());
  operands.expert_weights = static_cast<const float*>(in.expert_weights.untyped_data());
  operands.w_gate = in.w_gate.untyped_data();
  operands.w_up = in.w_up.untyped_data();
  operands.w_down = in.w_down.untyped_data();
  return operands;
}

ffi::Future refuse(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::InvalidArgument(message));
  return future;
}

using Direction = void (*)(const HostCall&, const HostBlocks&, const std::vector<HostOperands>&);

// Meets the other ranks; the last one runs the direction for all of them.
ffi::Future meet(HostCallSite* site, int64_t run, const ffi::AnyBuffer& place, const HostCall& call,
                 const HostOperands& operands, Direction direction) {
  const auto* group_and_rank = static_cast<const int32_t*>(place.untyped_data());
  const int32_t group = group_and_rank[0], rank = group_and_rank[1];
  const int32_t ranks = call.shape.plan.ranks;
  if (rank < 0 || rank >= ranks) {
    const std::string message =
        "rank is " + std::to_string(rank) + "; it must be in [0, " + std::to_string(ranks) + ")";
    site->rendezvous.fail(run, group, ffi::Error::InvalidArgument(message));
    return refuse(message);
  }
  const auto work = [&](const std::vector<HostOperands>& all) {
    try {
      const HostWorkspace::Lease lease = site->workspace->acquire();
      direction(call, lease.blocks(), all);
      return ffi::Error::Success();
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "no host memory for the workspace of " + std::to_string(ranks) +
                            " ranks, " + std::to_string(WorkspaceLayout::of(call.shape).bytes) +
                            " bytes each; a smaller capacity_factor needs less");
    } catch (const std::exception& error) {
      return ffi::Error::Internal(error.what());
    }
  };
  try {
    return site->rendezvous.arrive(run, group, rank, operands, work);
  } catch (const std::exception& error) {
    const std::string message =
        "rank " + std::to_string(rank) + " could not wait for its peers: " + error.what();
    site->rendezvous.fail(run, group, ffi::Error::Internal(message));
    return refuse(message);
  }
}

ffi::Future forward(HostCallSite* site, ffi::RunId run, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids,
                    ffi::AnyBuffer expert_weights, ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up,
                    ffi::AnyBuffer w_down, ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::AnyBuffer> expert_load, ffi::Result<ffi::AnyBuffer> counters) {
  const CommonOperands in{x, expert_ids, expert_weights, w_gate, w_up, w_down, place};
  Checker check;
  const HostCall call = check_common(*site, in, check);
  check.shape("y", *y, {call.shape.plan.tokens, call.shape.hidden});
  check.type("y", *y, x.element_type(), "that of x");
  check.shape("expert_load", *expert_load, {call.shape.plan.local_experts});
  check.type("expert_load", *expert_load, ffi::S32, "int32");
  check.shape("counters", *counters, {2});
  check.type("counters", *counters, ffi::S32, "int32");
  if (!check.message().empty()) return refuse(check.message());
  HostOperands operands = common_pointers(in);
  operands.y = y->untyped_data();
  operands.expert_load = static_cast<int32_t*>(expert_load->untyped_data());
  operands.invalid_ids = static_cast<int32_t*>(counters->untyped_data());
  operands.rounds = operands.invalid_ids + 1;
  return meet(site, run.run_id, place, call, operands, host_forward);
}

ffi::Future backward(HostCallSite* site, ffi::RunId run, ffi::AnyBuffer x,
                     ffi::AnyBuffer expert_ids, ffi::AnyBuffer expert_weights,
                     ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up, ffi::AnyBuffer w_down,
                     ffi::AnyBuffer dy, ffi::AnyBuffer place, ffi::Result<ffi::AnyBuffer> dx,
                     ffi::Result<ffi::AnyBuffer> d_expert_weights,
                     ffi::Result<ffi::AnyBuffer> dw_gate, ffi::Result<ffi::AnyBuffer> dw_up,
                     ffi::Result<ffi::AnyBuffer> dw_down) {
  const CommonOperands in{x, expert_ids, expert_weights, w_gate, w_up, w_down, place};
  Checker check;
  const HostCall call = check_common(*site, in, check);
  const int64_t tokens = call.shape.plan.tokens, hidden = call.shape.hidden;
  const int64_t experts = call.shape.plan.local_experts, intermediate = call.shape.intermediate;
  check.shape("dy", dy, {tokens, hidden});
  check.type("dy", dy, x.element_type(), "that of x");
  check.shape("dx", *dx, {tokens, hidden});
  check.type("dx", *dx, x.element_type(), "that of x");
  check.shape("d_expert_weights", *d_expert_weights, {tokens, call.shape.plan.top_k});
  check.type("d_expert_weights", *d_expert_weights, ffi::F32, "f32");
  check.shape("dw_gate", *dw_gate, {experts, hidden, intermediate});
  check.shape("dw_up", *dw_up, {experts, hidden, intermediate});
  check.shape("dw_down", *dw_down, {experts, intermediate, hidden});
  for (const auto& gradient : {*dw_gate, *dw_up, *dw_down}) {
    check.type("a weight gradient", gradient, w_gate.element_type(), "that of w_gate");
  }
  if (!check.message().empty()) return refuse(check.message());
  HostOperands operands = common_pointers(in);
  operands.dy = dy.untyped_data();
  operands.dx = dx->untyped_data();
  operands.d_expert_weights = static_cast<float*>(d_expert_weights->untyped_data());
  operands.dw_gate = dw_gate->untyped_data();
  operands.dw_up = dw_up->untyped_data();
  operands.dw_down = dw_down->untyped_data();
  return meet(site, run.run_id, place, call, operands, host_backward);
}

}  // namespace

ffi::TypeId* host_state_type_id() { return &HostCallSite::id; }
const ffi::TypeInfo* host_state_type_info() { return &kHostStateTypeInfo; }

}  // namespace megamoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeHostInstantiate, megamoe::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs<megamoe::CallAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeHostForward, megamoe::forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<megamoe::HostCallSite>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Arg<xla::ffi::AnyBuffer>()    // x
                                  .Arg<xla::ffi::AnyBuffer>()    // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()    // expert_weights
                                  .Arg<xla::ffi::AnyBuffer>()    // w_gate
                                  .Arg<xla::ffi::AnyBuffer>()    // w_up
                                  .Arg<xla::ffi::AnyBuffer>()    // w_down
                                  .Arg<xla::ffi::AnyBuffer>()    // place
                                  .Ret<xla::ffi::AnyBuffer>()    // y
                                  .Ret<xla::ffi::AnyBuffer>()    // expert_load
                                  .Ret<xla::ffi::AnyBuffer>());  // counters

XLA_FFI_DEFINE_HANDLER_SYMBOL(MegamoeHostBackward, megamoe::backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<megamoe::HostCallSite>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Arg<xla::ffi::AnyBuffer>()    // x
                                  .Arg<xla::ffi::AnyBuffer>()    // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()    // expert_weights
                                  .Arg<xla::ffi::AnyBuffer>()    // w_gate
                                  .Arg<xla::ffi::AnyBuffer>()    // w_up
                                  .Arg<xla::ffi::AnyBuffer>()    // w_down
                                  .Arg<xla::ffi::AnyBuffer>()    // dy
                                  .Arg<xla::ffi::AnyBuffer>()    // place
                                  .Ret<xla::ffi::AnyBuffer>()    // dx
                                  .Ret<xla::ffi::AnyBuffer>()    // d_expert_weights
                                  .Ret<xla::ffi::AnyBuffer>()    // dw_gate
                                  .Ret<xla::ffi::AnyBuffer>()    // dw_up
                                  .Ret<xla::ffi::AnyBuffer>());  // dw_down
