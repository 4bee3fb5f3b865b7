// Sending result rows to the ranks that own the tokens, straight from the accumulators.
#pragma once

#include "ffi/gemm/epilogue.h"

namespace megamoe {

// Pushes 64 accumulator rows to their homes. `target` is, in lanes 0-15, the address of the
// return row of each of the warp's rows, 0 for padding; `buffer` is 2 KB of this warp.
template <int kColumns>
__device__ __forceinline__ void push_rows(const float* d, uint8_t* buffer, uint64_t target,
                                          int column, int hidden) {
  const int lane = lane_here();
  const auto at = [buffer](int row, int chunk) {
    return buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
  };
#pragma unroll
  for (int c = 0; c < kColumns / 64; ++c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_16_columns(d + 32 * c + 8 * j, at(fragment_row(lane), 2 * j + fragment_chunk(lane)));
    }
    __syncwarp();
    const bool inside = column + 64 * c < hidden;  // hidden is a multiple of 64
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;
      const uint64_t to = __shfl_sync(~0u, target, row);
      const uint4 value = *reinterpret_cast<const uint4*>(at(row, lane % 8));
      if (inside && to != 0) {
        *reinterpret_cast<uint4*>(to + (column + 64 * c + lane % 8 * 8) * 2) = value;
      }
    }
    __syncwarp();
  }
}

}  // namespace megamoe
