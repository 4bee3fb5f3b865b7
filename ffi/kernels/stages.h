// The kernels that both directions enqueue around their own.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "ffi/kernels/kernels.h"

namespace megamoe {

struct Combine;

// One call on its way onto a stream.
class Launch {
 public:
  Launch(const ExpertCall& call, int32_t copied_rows, cudaStream_t stream);

  // Stages the operands where the workspace spans processes. `dy` is null in the forward pass.
  void meet(const void* dy) const;
  // `expert_load` and `counters` may be null.
  void plan(int round, int32_t* expert_load, int32_t* counters) const;
  void finish() const;
  // out [T, H] = sum over slots of the rows that were pushed here.
  Combine combine_of(void* out, bool is_f32) const;
  // `claimed`: chunks that the experts kernel has combined, may be null.
  void combine(const Combine& combine, const int32_t* claimed) const;

  // Rounds that the shape may need; at least one, which also makes the plan.
  int rounds() const;
  int32_t* progress(Progress which) const;
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(block + offset);
  }

  const ExpertCall& call;
  WorkspaceShape shape;  // the call's, with copied_rows
  const DeviceLayout layout;
  char* const block;
  Board* const board;
  const PlanBuffers buffers;
  const int sms;  // that our kernels use
  const cudaStream_t stream;
};

std::string load_forward_kernel();
std::string load_backward_kernels();
std::string status_text(cudaError_t status);

}  // namespace megamoe
