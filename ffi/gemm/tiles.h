// The output tiles' hand-over inside a CTA.
#pragma once

#include "ffi/gemm/core.h"

namespace megamoe {

__host__ __device__ constexpr int column_tiles(int columns) {
  return (columns + kTileN - 1) / kTileN;
}

// Columns that column tile `n` of a matrix with `columns` columns has.
__host__ __device__ constexpr int columns_of_tile(int columns, int n) {
  return columns - n * kTileN < kTileN ? columns - n * kTileN : kTileN;
}

// Tiles that were known earlier would be claimed earlier, and those at work at one time would lie
// further apart: with 4 the 30B backward pass took 2% longer on one H200.
constexpr int kTileSlots = 2;

// Ring of tiles on their way from the thread that places them to the loader thread and the consumer
// warps. Placing is a thread's work of its own: a loader that finds its next tile itself keeps the
// stages waiting, which cost the down projection 12% of its rate on H200.
template <class Work>
struct TileRing {
  Work work[kTileSlots];
  Barrier full[kTileSlots];
  Barrier empty[kTileSlots];

  __device__ void init() {
    for (int s = 0; s < kTileSlots; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps * 32 + 1);
    }
  }
  // One thread.
  __device__ __forceinline__ void push(RingState<kTileSlots>& at, const Work& next) {
    empty[at.index()].wait(at.phase() ^ 1);
    work[at.index()] = next;
    full[at.index()].arrive();
    at.advance();
  }
  // A reader: the work at its place in the ring, which stays readable until the reader moves on.
  __device__ __forceinline__ const Work& peek(const RingState<kTileSlots>& at) {
    full[at.index()].wait(at.phase());
    return work[at.index()];
  }
  // The same, read again: what is derived from it must not take a register of the main loops.
  __device__ __forceinline__ const Work& here(RingState<kTileSlots>& at) const {
    asm volatile("" : "+r"(at.count));
    return work[at.index()];
  }
  // A consumer warp. One lane's arrival behind the barrier would be enough for the hardware, but
  // not for compute-sanitizer's racecheck, so each thread says for itself that it has read; the
  // barrier keeps the compiler from reading later.
  __device__ __forceinline__ void next(RingState<kTileSlots>& at) {
    __syncwarp();
    empty[at.index()].arrive();
    at.advance();
  }
  // The loader.
  __device__ __forceinline__ void next_of_thread(RingState<kTileSlots>& at) {
    empty[at.index()].arrive();
    at.advance();
  }
};

}  // namespace megamoe
