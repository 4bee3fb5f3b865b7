// From accumulator registers to memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ffi/gemm/core.h"
#include "ffi/gemm/pack.h"

namespace megamoe {

// Accumulator layout (PTX, wgmma D fragment): value 4 b + 2 h + i of a thread is row
// 16 warp + 8 h + lane / 4 and column 8 b + 2 (lane % 4) + i of its 64-row block.

// The thread's lane, read where it is needed: an epilogue's addresses, derived from it, must not be
// kept in registers through the main loop, which the compiler would do with threadIdx.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The first of the warp's 16 rows in row block m of its tile.
__device__ __forceinline__ int first_of_block(int m) { return m * 64 + warp_of_group_here() * 16; }

// The accumulators 32 b to 32 b + 31 are 64 columns of a row block: the first of them and the first
// row of the block, in the tile.
__device__ constexpr int column_of_accumulators(int b) { return b % (kTileN / 64) * 64; }
__device__ constexpr int row_of_accumulators(int b) { return b / (kTileN / 64) * 64; }

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

// A NaN stays one; 0 where exp(-x) is not finite.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  return reciprocal_approx(1.0f + exp2_approx(x * kMinusLog2E));
}

// The smaller and the larger value, or NaN if one is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Results leave through shared memory of each consumer warp, in blocks of 16 rows x 128 bytes: by
// TMA where rows lie together (store_block), which takes fewer instructions and registers, else so
// that eight lanes store 128 contiguous bytes of a row (store_rows_f32, push_tile). On H200 the
// rate was measured to be about the same.
constexpr int kBufferBytes = 16 * 128;
constexpr int kWarpBuffers = 3;

struct WarpBuffers {
  alignas(1024) uint8_t blocks[kConsumerWarps][kWarpBuffers][kBufferBytes];

  // This warp's.
  __device__ __forceinline__ uint8_t* here(int which = 0) {
    return blocks[consumer_warp_here()][which];
  }
};

// What an epilogue needs to know of each row of its tile, one value of 4 or 8 bytes. It is fetched
// while the tile is multiplied: an epilogue that began with a wait for memory would not end before
// the other warpgroup's next tile does.
struct RowFacts {
  alignas(16) uint8_t bytes[kConsumerWarps][kRowBlocks][16 * 8];

  // Of this warp's 16 rows in row block m.
  template <class Fact>
  __device__ __forceinline__ const Fact* here(int m) const {
    return reinterpret_cast<const Fact*>(bytes[consumer_warp_here()][m]);
  }
  // A warp, before it multiplies. `facts` are those of the tile's rows.
  template <class Fact>
  __device__ __forceinline__ void fetch(const Fact* facts) {
    static_assert(sizeof(Fact) == 4 || sizeof(Fact) == 8);
    constexpr int kLanes = sizeof(Fact);  // 16 bytes each for 16 rows
    const int lane = lane_here(), m = lane / kLanes, first = lane % kLanes * (16 / kLanes);
    if (m >= kRowBlocks) return;
    const void* from = facts + first_of_block(m) + first;
    const uint32_t to = cute::cast_smem_ptr_to_uint(here<Fact>(m) + first);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  // A warp, before it reads.
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
};

// Byte offset of a 16-byte chunk of a row (128-byte swizzle).
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Where rows of a warp's tile go when they lie at equal distances: this lane's 16 bytes of the
// first of them.
struct RowAddress {
  uint8_t* first;
  uint32_t step;  // bytes, four rows on

  __device__ __forceinline__ RowAddress(void* matrix, int64_t row, int columns, int column,
                                        int element_bytes)
      : first(static_cast<uint8_t*>(matrix) +
              ((row + lane_here() / 8) * columns + column) * element_bytes + lane_here() % 8 * 16),
        step(4u * columns * element_bytes) {}
};

// Where this lane's part of the j-th 16 columns goes in the buffer, see store_16_columns.
__device__ __forceinline__ uint8_t* fragment(uint8_t* buffer, int j) {
  const int lane = lane_here();
  return buffer + swizzled(fragment_row(lane), 2 * j + fragment_chunk(lane));
}

// Fills the buffer with 64 columns, values d[0..32), of the warp's 16 rows as bf16.
__device__ __forceinline__ void fill_64_columns(const float* d, uint8_t* buffer) {
#pragma unroll
  for (int j = 0; j < 4; ++j) store_16_columns(d + 8 * j, fragment(buffer, j));
}

// The other way: values of the j-th 16 columns of the buffer, which this warp may then overwrite.
__device__ __forceinline__ void load_16_columns(uint8_t* buffer, int j, float (&d)[8]) {
  uint4 packed;
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(fragment(buffer, j)), packed.x,
                                packed.y, packed.z, packed.w);
  unpack_bf16x8(packed, d);
}

// The same for the j-th 8 columns: fewer registers at a time.
__device__ __forceinline__ cute::uint128_t& fragment_of_8(uint8_t* buffer, int j) {
  return *reinterpret_cast<cute::uint128_t*>(buffer + swizzled(lane_here() % 16, j));
}
__device__ __forceinline__ void load_8_columns(uint8_t* buffer, int j, float (&d)[4]) {
  uint32_t packed[2];
  cute::SM75_U32x2_LDSM_N::copy(fragment_of_8(buffer, j), packed[0], packed[1]);
  unpack_bf16(packed[0], d[0], d[1]);
  unpack_bf16(packed[1], d[2], d[3]);
}
__device__ __forceinline__ void store_8_columns(const float* d, uint8_t* buffer, int j) {
  cute::SM90_U32x2_STSM_N::copy(pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]),
                                fragment_of_8(buffer, j));
}

// Gates cross from warpgroup 0, which multiplies the gate tiles, to warpgroup 1, which multiplies
// the up tiles and needs them in its epilogue; as bf16, through all buffers. A warp finds the gates
// of its accumulators 32 b to 32 b + 31 in block b, and may put its results in their place.
struct GateExchange {
  static constexpr int kBlocks = kAccumulators / 32;
  static constexpr uint32_t kFree = 2, kFull = 3;  // named barriers; Turns has 0 and 1
  static_assert(kWarpgroup / 32 * kBlocks == kConsumerWarps * kWarpBuffers);

  static __device__ __forceinline__ uint8_t* block(WarpBuffers& buffers, int b) {
    return buffers.blocks[0][0] + (warp_of_group_here() * kBlocks + b) * kBufferBytes;
  }
  // By warpgroup 1 whenever it has taken its turn: its epilogue before is over, and warpgroup 0's
  // wait before, too. (Arriving sooner, it could arrive twice for one wait.) The last turn must be
  // warpgroup 1's.
  static __device__ __forceinline__ void release() {
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kFree);
  }
  // By warpgroup 0 in each of its epilogues, before it uses buffers.
  static __device__ __forceinline__ void wait_until_free() {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, kFree);
  }
  // By warpgroup 0.
  static __device__ __forceinline__ void give(WarpBuffers& buffers, const float* acc) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) fill_64_columns(acc + 32 * b, block(buffers, b));
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kFull);
  }
  // By warpgroup 1.
  static __device__ __forceinline__ void wait_until_full() {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, kFull);
  }
};

// Fills the buffer with 32 columns, values d[0..16), of the warp's 16 rows as f32.
__device__ __forceinline__ void fill_32_columns_f32(const float* d, uint8_t* buffer) {
  const int lane = lane_here();
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(buffer + swizzled(lane / 4 + 8 * h, 2 * b + lane % 4 / 2) +
                                 lane % 2 * 8) =
          make_float2(d[4 * b + 2 * h], d[4 * b + 2 * h + 1]);
    }
  }
}

// Stores the buffer's rows of f32 `offset` bytes from `to`, if they are `inside` the matrix. (A
// branch around an epilogue's parts would make the compiler move accumulators.)
__device__ __forceinline__ void store_rows_f32(const uint8_t* buffer, const RowAddress& to,
                                               int offset, bool inside) {
  __syncwarp();
  const int lane = lane_here();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float4 here =
        *reinterpret_cast<const float4*>(buffer + swizzled(4 * i + lane / 8, lane % 8));
    if (inside) *reinterpret_cast<float4*>(to.first + offset + i * to.step) = here;
  }
  __syncwarp();
}

// Two accumulators from memory, if they are `wanted`. A branch in its place makes the compiler
// serialise the multiplication that adds onto them.
__device__ __forceinline__ void load_pair_if(bool wanted, const float* from, float* d) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted ld.global.v2.f32 {%0, %1}, [%2];\n}"
      : "+f"(d[0]), "+f"(d[1])
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// ---- blocks by TMA --------------------------------------------------------------------------
// Lane 0 of a warp issues its stores; those of store_block are a group for each block.

// A warp: the buffer of the block `kBehind` blocks before the next one may be filled again.
template <int kBehind = kWarpBuffers>
__device__ __forceinline__ void wait_for_buffer() {
  if (lane_here() == 0) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBehind - 1) : "memory");
  }
  __syncwarp();
}

// Stores the warp's block to (column, row) of the matrix if it is to be `stored`.
__device__ __forceinline__ void store_block(const CUtensorMap& matrix, const uint8_t* block,
                                            int column, int row, bool stored) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane_here() != 0) return;
  if (stored) cute::SM90_TMA_STORE_3D::copy(&matrix, block, column, row, 0);
  cute::tma_store_arrive();
}

// Waits until the bulk stores of this thread, but the newest kPending groups, have been written.
template <int kPending>
__device__ __forceinline__ void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace megamoe
