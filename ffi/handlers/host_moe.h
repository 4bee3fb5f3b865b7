// The expert path of a whole group on the host, forward and backward: the phases of the fused
// kernels one after the other, in f32. No XLA in here.
#ifndef JAX_MEGAMOE_FFI_HANDLERS_HOST_MOE_H_
#define JAX_MEGAMOE_FFI_HANDLERS_HOST_MOE_H_

#include <cstdint>
#include <vector>

#include "ffi/handlers/host_gemm.h"
#include "ffi/workspace/host_workspace.h"

namespace megamoe {

struct HostCall {
  WorkspaceShape shape;
  DType x_type;
  DType weight_type;
  float swiglu_limit;  // infinity: no clamp
};

// Operands and results of one rank. T tokens, K slots, E local experts, H hidden, I intermediate.
struct HostOperands {
  const void* x = nullptr;                // [T, H]
  const int32_t* expert_ids = nullptr;    // [T, K]
  const float* expert_weights = nullptr;  // [T, K]
  const void* w_gate = nullptr;           // [E, H, I]
  const void* w_up = nullptr;             // [E, H, I]
  const void* w_down = nullptr;           // [E, I, H]
  const void* dy = nullptr;               // [T, H], backward
  // Forward.
  void* y = nullptr;               // [T, H]
  int32_t* expert_load = nullptr;  // [E]
  int32_t* invalid_ids = nullptr;  // scalar
  int32_t* rounds = nullptr;       // scalar
  // Backward.
  void* dx = nullptr;                 // [T, H]
  float* d_expert_weights = nullptr;  // [T, K]
  void* dw_gate = nullptr;            // as the weights
  void* dw_up = nullptr;
  void* dw_down = nullptr;
};

// ranks[r] are the operands of rank r.
void host_forward(const HostCall& call, const HostBlocks& blocks,
                  const std::vector<HostOperands>& ranks);
void host_backward(const HostCall& call, const HostBlocks& blocks,
                   const std::vector<HostOperands>& ranks);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_HANDLERS_HOST_MOE_H_
