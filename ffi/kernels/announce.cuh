// Telling other CTAs that a tile is in memory.
#pragma once

#include "ffi/gemm/epilogue.h"
#include "ffi/kernels/sync.cuh"

namespace megamoe {

// A consumer warp's newest part of a tile that no other CTA knows of yet. It is announced while the
// next tile is multiplied, when its stores have long arrived, because a release waits for them.
//
// A warp must announce what is pending before it works on a tile of another kind: other CTAs may
// wait for it.
class Announcer {
 public:
  __device__ __forceinline__ void set(int32_t* counter) { counter_ = counter; }

  // A warp. Also counts in `all`, if there is one.
  __device__ __forceinline__ void announce(int32_t* all = nullptr) {
    if (counter_ == nullptr) return;
    fence_bulk_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      add_release_device(counter_, 1);
      if (all != nullptr) add_release_device(all, 1);
    }
    counter_ = nullptr;
  }

 private:
  int32_t* counter_ = nullptr;
};

}  // namespace megamoe
