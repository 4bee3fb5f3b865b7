// Sending result rows to the ranks that own the tokens, straight from the accumulators.
#pragma once

#include "ffi/gemm/epilogue.h"

namespace megamoe {

// Pushes 16 rows of a warp's tile, values d[0..96), to their homes. `target` is, in lanes 0-15, the
// address of the return row of each of them, 0 for padding.
__device__ __forceinline__ void push_rows(const float* d, uint8_t* buffer, uint64_t target,
                                          int column, int hidden) {
#pragma unroll
  for (int c = 0; c < kTileN / 64; ++c) {
    const bool inside = column + 64 * c < hidden;  // hidden is a multiple of 64
    fill_64_columns(d + 32 * c, buffer);
    for_rows(buffer, [&](int i, const uint4& bytes) {
      const uint64_t to = __shfl_sync(~0u, target, 4 * i + lane_here() / 8);
      if (inside && to != 0)
        *reinterpret_cast<uint4*>(to + (column + 64 * c) * 2 + lane_here() % 8 * 16) = bytes;
    });
  }
}

}  // namespace megamoe
