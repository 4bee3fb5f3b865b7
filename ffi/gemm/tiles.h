// Order of the output tiles of a grouped product, and their hand-over inside a CTA.
#pragma once

#include "ffi/gemm/core.h"

namespace megamoe {

// Row tiles of a group that are walked before the next column tile. Within such a block m runs
// fastest, so that the CTAs at work at one time share few weight tiles and few row tiles; an
// unbounded block would re-read all rows of a very large group for every column tile.
constexpr int kBlockTiles = 16;

__host__ __device__ constexpr int column_tiles(int columns) {
  return (columns + kTileN - 1) / kTileN;
}

struct TilePlace {
  int group;
  int m;  // row tile, counted through all groups
  int n;  // column tile
};

// Place of tile `index` of a product with `column_tiles` column tiles; group g has the row tiles
// [tile_start[g], tile_start[g + 1]).
__device__ __forceinline__ TilePlace place_tile(const int* tile_start, int groups, int column_tiles,
                                                int index) {
  const int m_before = index / column_tiles;
  int low = 0, high = groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tile_start[middle] <= m_before) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int first = tile_start[low];
  const int tiles = tile_start[low + 1] - first;
  const int in_group = index - first * column_tiles;
  const int block = in_group / (kBlockTiles * column_tiles);
  const int in_block = in_group - block * kBlockTiles * column_tiles;
  const int left = tiles - block * kBlockTiles;
  const int block_tiles = left < kBlockTiles ? left : kBlockTiles;
  return {low, first + block * kBlockTiles + in_block % block_tiles, in_block / block_tiles};
}

// Ring of tiles on their way from the thread that places them to the loader thread and the consumer
// warps. Placing is a thread's work of its own: a loader that finds its next tile itself keeps the
// stages waiting, which cost the down projection 12% of its rate on H200.
template <class Work, int kSlots>
struct TileRing {
  Work work[kSlots];
  Barrier full[kSlots];
  Barrier empty[kSlots];

  __device__ void init() {
    for (int s = 0; s < kSlots; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps + 1);
    }
  }
  // One thread.
  __device__ __forceinline__ void push(RingState<kSlots>& at, const Work& next) {
    empty[at.index()].wait(at.phase() ^ 1);
    work[at.index()] = next;
    full[at.index()].arrive();
    at.advance();
  }
  // A reader: the work at its place in the ring, which stays readable until the reader moves on.
  __device__ __forceinline__ const Work& peek(const RingState<kSlots>& at) {
    full[at.index()].wait(at.phase());
    return work[at.index()];
  }
  // The same, read again: what is derived from it must not take a register of the main loops.
  __device__ __forceinline__ const Work& here(RingState<kSlots>& at) const {
    asm volatile("" : "+r"(at.count));
    return work[at.index()];
  }
  // A consumer warp.
  __device__ __forceinline__ void next(RingState<kSlots>& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[at.index()].arrive();
    at.advance();
  }
  // The loader.
  __device__ __forceinline__ void next_of_thread(RingState<kSlots>& at) {
    empty[at.index()].arrive();
    at.advance();
  }
};

}  // namespace megamoe
