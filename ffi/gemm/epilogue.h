// From accumulator registers to memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ffi/gemm/core.h"

namespace megamoe {

// Accumulator layout (PTX, wgmma D fragment): value 4 b + 2 h + i of a thread is row
// 16 warp + 8 h + lane / 4 and column 8 b + 2 (lane % 4) + i of its 64-row block.

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The thread's lane, read where it is needed: an epilogue's addresses, derived from it, must not be
// kept in registers through the main loop, which the compiler would do with threadIdx.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Row of the warp's 16 and 16-byte chunk (0 or 1) of 16 columns that this lane addresses in
// store_16_columns.
__device__ __forceinline__ int fragment_row(int lane) { return lane % 16; }
__device__ __forceinline__ int fragment_chunk(int lane) { return lane / 16; }

// Stores 16 columns (values d[0..8)) of the warp's 16 rows as bf16; `address` is where this lane's
// fragment_row() and fragment_chunk() go.
__device__ __forceinline__ void store_16_columns(const float* d, void* address) {
  cute::SM90_U32x4_STSM_N::copy(pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), pack_bf16(d[4], d[5]),
                                pack_bf16(d[6], d[7]),
                                *reinterpret_cast<cute::uint128_t*>(address));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sigmoids of two values with one reciprocal: 1/a = b/(ab). The special-function unit bounds the
// gate/up epilogue, and this takes three of its operations where two divisions take four. Exponents
// are cut at 60, so the product stays finite and neither value can touch the other; a NaN comes
// back as a number here and must reach the result through the factor that the sigmoid multiplies.
__device__ __forceinline__ void sigmoid2(float x0, float x1, float& s0, float& s1) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  const float a = 1.0f + exp2_approx(fminf(x0 * kMinusLog2E, 60.0f));
  const float b = 1.0f + exp2_approx(fminf(x1 * kMinusLog2E, 60.0f));
  const float r = reciprocal_approx(a * b);
  s0 = r * b;
  s1 = r * a;
}

// Results leave a warpgroup in boxes of 64 rows x 64 bytes, double-buffered: consumers fill a box,
// a storer warp writes it by TMA, so that no consumer waits for a store to complete.
constexpr int kBoxRows = 64;
constexpr int kBoxRowBytes = 64;

struct StoreQueue {
  alignas(512) uint8_t box[2][kBoxRows * kBoxRowBytes];
  Barrier full[2];
  Barrier empty[2];

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      full[i].init(kWarpgroup);
      empty[i].init(1);
    }
  }
};

// Byte offset of a 16-byte chunk in a box (64-byte TMA swizzle).
__device__ __forceinline__ int box_offset(int row, int chunk) {
  return row * kBoxRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// Consumer side; `count` is the number of boxes that this warpgroup has filled so far.
__device__ __forceinline__ uint8_t* acquire_box(StoreQueue& queue, uint32_t count) {
  queue.empty[count & 1].wait(((count >> 1) & 1) ^ 1);
  return queue.box[count & 1];
}

__device__ __forceinline__ void commit_box(StoreQueue& queue, uint32_t& count) {
  cutlass::arch::fence_view_async_shared();
  queue.full[count & 1].arrive();
  ++count;
}

// Fills one box with 32 bf16 columns, values d[0..16) of the 64-row block.
__device__ __forceinline__ void fill_box(uint8_t* box, const float* d) {
  const int lane = lane_here();
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + fragment_row(lane);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    store_16_columns(d + 8 * j, box + box_offset(row, 2 * j + fragment_chunk(lane)));
  }
}

// Fills one box with 32 bf16 columns that are packed already: pair 2 b + h is columns 8 b and row
// half h of the accumulator layout.
__device__ __forceinline__ void fill_box(uint8_t* box, const uint32_t (&pairs)[8]) {
  const int lane = lane_here();
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + fragment_row(lane);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t* p = pairs + 4 * j;
    cute::SM90_U32x4_STSM_N::copy(
        p[0], p[1], p[2], p[3],
        *reinterpret_cast<cute::uint128_t*>(box + box_offset(row, 2 * j + fragment_chunk(lane))));
  }
}

// Fills one box with 16 f32 columns, values d[0..8) of the 64-row block.
__device__ __forceinline__ void fill_box_f32(uint8_t* box, const float* d) {
  const int lane = lane_here();
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = 2 * b + lane % 4 / 2;
      *reinterpret_cast<float2*>(box + box_offset(row + 8 * h, chunk) + lane % 2 * 8) =
          make_float2(d[4 * b + 2 * h], d[4 * b + 2 * h + 1]);
    }
  }
}

// Waits until the bulk stores of this thread, but the newest kPending groups, have been written.
template <int kPending>
__device__ __forceinline__ void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Storer side, one thread: writes `boxes` boxes with write(i, box) and returns once they are in
// memory. `count` as above.
template <class Write>
__device__ __forceinline__ void drain_boxes(StoreQueue& queue, uint32_t& count, int boxes,
                                            Write write) {
  for (int i = 0; i < boxes; ++i, ++count) {
    queue.full[count & 1].wait((count >> 1) & 1);
    write(i, queue.box[count & 1]);
    cute::tma_store_arrive();
    if (i > 0) {
      cute::tma_store_wait<1>();
      queue.empty[(count - 1) & 1].arrive();
    }
  }
  wait_bulk_stores<0>();
  queue.empty[(count - 1) & 1].arrive();
}

}  // namespace megamoe
