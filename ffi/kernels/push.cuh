// Sending result rows to the ranks that own the tokens, straight from the accumulators.
#pragma once

#include "ffi/gemm/epilogue.h"

namespace megamoe {

__device__ __forceinline__ void store_global(uint64_t to, const uint4& bytes) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bytes.x), "r"(bytes.y),
               "r"(bytes.z), "r"(bytes.w)
               : "memory");
}

// Pushes the warp's part of a tile, of which `rows` rows and `columns` columns are not padding, to
// their homes. `facts` have the addresses of the rows there, `column` is the tile's first.
__device__ __forceinline__ void push_tile(const float* acc, WarpBuffers& buffers,
                                          const RowFacts& facts, int rows, int column,
                                          int columns) {
  static_assert(kTileN / 64 == kWarpBuffers);
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
    if (m * 64 >= rows) continue;
#pragma unroll
    for (int c = 0; c < kTileN / 64; ++c) {
      fill_64_columns(acc + m * (kTileN / 2) + 32 * c, buffers.here(c));
    }
    __syncwarp();
    const int lane = lane_here(), chunk = lane % 8;
    const int left = rows - first_of_block(m);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;  // of the warp's 16
      uint4 bytes[kTileN / 64];
#pragma unroll
      for (int c = 0; c < kTileN / 64; ++c) {
        bytes[c] = *reinterpret_cast<const uint4*>(buffers.here(c) + swizzled(row, chunk));
      }
      const uint64_t to = facts.here<uint64_t>(m)[row] + column * 2 + chunk * 16;
#pragma unroll
      for (int c = 0; c < kTileN / 64; ++c) {
        if (row < left && 64 * c < columns) store_global(to + 128 * c, bytes[c]);
      }
    }
    __syncwarp();
  }
}

}  // namespace megamoe
