// The kernels of one call, in the order in which a handler enqueues them:
//
//   meet       tell the peers where this rank's operands are, learn theirs
//   for each round that the shape may need (a kernel ends at once if the plan needs fewer):
//     plan     first round: gather all ids; rows and targets of this rank's experts
//              every round: which rows to pull, in the order of use
//     experts  pull and copy rows; gate/up, SwiGLU, down; push result rows home
//              (experts.cuh; in the backward pass experts_backward.cuh and small kernels around it)
//   finish     every rank has pushed
//   combine    sum each token's slots (the backward pass has begun it in experts)
//
// Why a row of kernels and not one: a kernel boundary is the cheapest grid barrier, and a rank
// waits for its peers only in meet and finish, which are one warp each. A CTA of the expert kernels
// waits only for work that a running CTA of the same kernel has claimed, so none of them needs all
// of its CTAs to be resident, and collectives that hold some of the SMs can delay us but not
// deadlock us. The plan is a cooperative kernel with barriers inside; its CTAs are few and small,
// and several fit on an SM beside others. It also follows that several ranks can run on one GPU,
// which the tests use.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/workspace/device_block.h"

namespace megamoe {

// Operands that both directions share; device memory.
struct ExpertCall {
  WorkspaceShape shape;
  Directory directory;
  const void* x;                // [T, H] bf16
  const int32_t* expert_ids;    // [T, K]
  const float* expert_weights;  // [T, K]
  const void* w_gate;           // [E_l, H, I] bf16
  const void* w_up;
  const void* w_down;    // [E_l, I, H] bf16
  const int32_t* place;  // {group, rank}
  float swiglu_limit;    // infinity: none
  int32_t reserved_sms;
};

struct ForwardCall : ExpertCall {
  void* y;  // [T, H]
  bool y_is_f32;
  int32_t* expert_load;  // [E_l]
  int32_t* counters;     // {invalid_ids, rounds}
};

struct BackwardCall : ExpertCall {
  const void* dy;  // [T, H] bf16
  void* dx;        // [T, H]
  bool dx_is_f32;
  float* d_expert_weights;  // [T, K]
  void* dw_gate;            // [E_l, H, I]
  void* dw_up;
  void* dw_down;  // [E_l, I, H]
  bool dw_is_f32;
};

// Each returns an empty string, or what went wrong.
std::string enqueue_forward(const ForwardCall& call, cudaStream_t stream);
std::string enqueue_backward(const BackwardCall& call, cudaStream_t stream);

// When each CTA of the pass's newest launch on the first GPU began and ended its phases, in
// nanoseconds, [CTA][kTimelineMarks]; empty where the build keeps none. See timeline.cuh.
constexpr int kTimelineMarks = 8;
std::vector<uint64_t> forward_timeline();
std::vector<uint64_t> backward_timeline();
// Bytes that the pass's kernels on the first GPU have read from other ranks since this was last
// asked; 0 where the build does not count them.
uint64_t forward_pulled_bytes();
uint64_t backward_pulled_bytes();

// Loads every kernel on the current device, so that no first use waits while a peer spins.
std::string load_kernels();

}  // namespace megamoe
