// Sending result rows to the ranks that own the tokens, straight from the accumulators.
#pragma once

#include "ffi/gemm/epilogue.h"

namespace megamoe {

// Pushes the warp's part of a tile, of which `rows` rows and `columns` columns are not padding, to
// their homes. `targets` are the addresses of the return rows of the tile's rows, `column` is the
// tile's first.
__device__ __forceinline__ void push_tile(const float* acc, uint8_t* buffer,
                                          const uint64_t* targets, int rows, int column,
                                          int columns) {
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m) {
    // Lanes 0 to 15 have the warp's rows.
    const int row = m * 64 + thread_here() % kWarpgroup / 32 * 16 + lane_here() % 16;
    const uint64_t target = row < rows ? targets[row] : 0;
    if (m * 64 >= rows) continue;
#pragma unroll
    for (int c = 0; c < kTileN / 64; ++c) {
      const bool inside = 64 * c < columns;  // a multiple of 64
      fill_64_columns(acc + m * (kTileN / 2) + 32 * c, buffer);
      for_rows(buffer, [&](int i, const uint4& bytes) {
        const uint64_t to = __shfl_sync(~0u, target, 4 * i + lane_here() / 8);
        if (inside && to != 0)
          *reinterpret_cast<uint4*>(to + (column + 64 * c) * 2 + lane_here() % 8 * 16) = bytes;
      });
    }
  }
}

}  // namespace megamoe
