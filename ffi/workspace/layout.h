// Byte layout of the symmetric workspace: one block per rank, all of the same layout, so that an
// address in a peer's block is the peer's base plus an offset of this struct.
#ifndef JAX_MEGAMOE_FFI_WORKSPACE_LAYOUT_H_
#define JAX_MEGAMOE_FFI_WORKSPACE_LAYOUT_H_

#include <cstdint>

#include "ffi/plan/plan.h"

namespace megamoe {

// What a workspace is made for. The byte counts are the size of one element of each kind of buffer:
// the host works in f32 (4), the GPU kernels in bf16 (2); staged rows keep the caller's dtype.
struct WorkspaceShape {
  PlanShape plan;
  int32_t hidden = 0;
  int32_t intermediate = 0;
  int32_t staged_bytes = 4;
  int32_t pool_bytes = 4;
  int32_t return_bytes = 4;
  int32_t carried_copies = 1;  // the GPU kernels alternate between two
};

// The one owner of every offset. Sizes: R ranks, T tokens, K slots, E local experts, H hidden,
// I intermediate, C capacity_rows. Regions are aligned to 256 bytes.
struct WorkspaceLayout {
  // Read by peers. GPU kernels whose peers are all in this process read the operands in place:
  // their staged_bytes is 0.
  int64_t staged_x;        // [T, H]
  int64_t staged_dy;       // [T, H], backward
  int64_t staged_ids;      // [T, K] int32
  int64_t staged_weights;  // [T, K] f32
  // Written by peers, each element by one of them; read by the owner after the last barrier.
  int64_t returned;          // [K, T, H] rows of y, or of dx in the backward pass
  int64_t returned_weights;  // [T, K] f32, gradients of the routing weights
  // Barrier and arrival counters of the GPU kernels.
  int64_t flags;  // kFlagBytes
  // Local to the rank.
  PlanLayout plan;  // relative to plan_base
  int64_t plan_base;
  int64_t x_pool;     // [C, H]
  int64_t dy_pool;    // [C, H], backward
  int64_t gate_pool;  // [C, I] gate projection; its gradient later
  int64_t up_pool;    // [C, I] up projection; its gradient later
  int64_t act_pool;   // [C, I] weighted SwiGLU, the operand of the down projection
  // [3, carried_copies, H, I] f32 weight gradients of an expert that continues in the next round.
  int64_t carried;
  int64_t bytes;

  static constexpr int64_t kFlagBytes = 4096;

  static WorkspaceLayout of(const WorkspaceShape& shape) {
    WorkspaceLayout at{};
    const int64_t tokens = shape.plan.tokens;
    const int64_t slots = tokens * shape.plan.top_k;
    const int64_t rows = shape.plan.capacity_rows;
    const int64_t hidden = shape.hidden;
    const int64_t intermediate = shape.intermediate;
    const int64_t word = 4;
    at.staged_x = at.take(tokens * hidden * shape.staged_bytes);
    at.staged_dy = at.take(tokens * hidden * shape.staged_bytes);
    at.staged_ids = at.take(slots * word);
    at.staged_weights = at.take(slots * word);
    at.returned = at.take(slots * hidden * shape.return_bytes);
    at.returned_weights = at.take(slots * word);
    at.flags = at.take(kFlagBytes);
    at.plan = PlanLayout::of(shape.plan);
    at.plan_base = at.take(at.plan.bytes);
    at.x_pool = at.take(rows * hidden * shape.pool_bytes);
    at.dy_pool = at.take(rows * hidden * shape.pool_bytes);
    at.gate_pool = at.take(rows * intermediate * shape.pool_bytes);
    at.up_pool = at.take(rows * intermediate * shape.pool_bytes);
    at.act_pool = at.take(rows * intermediate * shape.pool_bytes);
    at.carried = at.take(3 * shape.carried_copies * hidden * intermediate * word);
    return at;
  }

 private:
  int64_t take(int64_t size) {
    const int64_t offset = bytes;
    bytes = align_up(bytes + size, 256);
    return offset;
  }
};

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_WORKSPACE_LAYOUT_H_
