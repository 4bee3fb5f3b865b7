// Telling other CTAs that a tile is in memory.
#pragma once

#include "ffi/gemm/epilogue.h"
#include "ffi/kernels/sync.cuh"

namespace megamoe {

constexpr int kTileWarps = kWarpgroup / 32;  // that announce a tile: those of its warpgroup

// By each warp of a tile once it has stored its part. Waits until the stores have arrived, while
// the other warpgroup multiplies. Also counts in `all`, if there is one.
__device__ __forceinline__ void announce(int32_t* counter, int32_t* all = nullptr) {
  wait_bulk_stores<0>();
  fence_bulk_copies();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  __threadfence();
  atomicAdd(counter, 1);
  if (all != nullptr) atomicAdd(all, 1);
}

}  // namespace megamoe
