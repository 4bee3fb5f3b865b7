// The matrix core: bf16 operands in swizzled shared memory, fp32 accumulators in registers.
//
// One producer thread fills a ring of stages by TMA; two consumer warpgroups multiply. Every
// product of the layer (gate/up, down, dA, dX, weight gradients) is this core with another pair of
// operand majors and another epilogue. Two ways to share a tile:
//   kCooperative: both warpgroups work on one 128 x 256 tile, 64 rows each.
//   kPingPong:    each warpgroup owns a whole 128 x 192 tile; one multiplies while the other runs
//                 its epilogue. The larger tile per warpgroup reads less shared memory per FLOP.
// Gate and up projections go cooperatively, 128 + 128 columns, so that a thread holds matching
// pairs. In turns they would have to be transposed (weights as the tile's rows), which was measured
// on H200 to be no faster: the card is then limited by its power, not by the epilogue that turns
// would hide. Five stages instead of four gave nothing either.
#pragma once

#include <cuda_bf16.h>
#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "ffi/plan/plan.h"

namespace megamoe {

using cute::SM90::GMMA::Major;
using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kBlockK = 64;  // one 128-byte swizzle row of bf16
constexpr int kWarpgroup = 128;
constexpr int kConsumerWarpgroups = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumerWarpgroups);

enum class Sharing { kCooperative, kPingPong };

template <Sharing kSharing>
struct Tile;

template <>
struct Tile<Sharing::kCooperative> {
  static constexpr int kN = 256;
  static constexpr int kRowBlocks = 1;  // 64-row blocks that a warpgroup accumulates
};

template <>
struct Tile<Sharing::kPingPong> {
  static constexpr int kN = 192;
  static constexpr int kRowBlocks = 2;
};

constexpr int kStageBytesA = kTileM * kBlockK * 2;
constexpr int kStageBytesB = Tile<Sharing::kCooperative>::kN * kBlockK * 2;

template <int kStages>
struct Stages {
  alignas(1024) uint8_t a[kStages][kStageBytesA];
  alignas(1024) uint8_t b[kStages][kStageBytesB];
  TransactionBarrier full[kStages];
  Barrier empty[kStages];

  // Eight arrivals free a stage: one of each consumer warp under kCooperative, two of each warp of
  // the owning warpgroup under kPingPong.
  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(8);
    }
  }
};

// The thread's number, read where it is needed: what is derived from it must not take a register of
// the main loops, in which the compiler would keep it with threadIdx.
__device__ __forceinline__ uint32_t thread_here() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The consumer's number.
__device__ __forceinline__ uint32_t warpgroup_here() { return thread_here() / kWarpgroup - 1; }

// Position in a ring of kSlots: one register, which matters to the consumers.
template <int kSlots>
struct RingState {
  static_assert((kSlots & (kSlots - 1)) == 0);
  uint32_t count = 0;

  __device__ int index() const { return static_cast<int>(count % kSlots); }
  __device__ uint32_t phase() const { return count / kSlots & 1; }
  __device__ void advance(int steps = 1) { count += steps; }
};

// Shared-memory matrix descriptor of a 128-byte swizzled operand, in units of 16 bytes.
// K-major:  [rows][64 k], 8-row groups 1024 bytes apart.
// MN-major: [64-row block][64 k][64 rows], 8-k groups 1024 bytes apart, blocks 8192 bytes apart.
template <Major kMajor>
__device__ __forceinline__ uint64_t matrix_descriptor(const void* tile) {
  cute::GmmaDescriptor desc;
  desc.bitfield.start_address_ = static_cast<uint16_t>(cute::cast_smem_ptr_to_uint(tile) >> 4);
  desc.bitfield.leading_byte_offset_ = kMajor == Major::K ? 1 : (kBlockK * 128) >> 4;
  desc.bitfield.stride_byte_offset_ = 1024 >> 4;
  desc.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return desc;
}

// Descriptor steps: 16 along k, 64 along the rows (the same for both majors).
template <Major kMajor>
constexpr uint64_t kStepK16 = kMajor == Major::K ? 32 >> 4 : (16 * 128) >> 4;
constexpr uint64_t kStepM64 = (64 * 128) >> 4;

template <int kN, Major kA, Major kB>
struct Wgmma;
template <Major kA, Major kB>
struct Wgmma<256, kA, kB> {
  using Atom = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kA, kB>;
};
template <Major kA, Major kB>
struct Wgmma<192, kA, kB> {
  using Atom = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<kA, kB>;
};

template <class Atom, int... I>
__device__ __forceinline__ void wgmma(uint64_t a, uint64_t b, float* d, bool accumulate,
                                      std::integer_sequence<int, I...>) {
  Atom::fma(a, b, d[I]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Accumulators of a warpgroup's thread: kN / 2 values for each of its 64-row blocks. A kernel whose
// tiles differ must give all of them the same array: wgmma reads its accumulators even where it
// ignores them, so two arrays would both hold registers all the time.
template <Sharing kSharing>
constexpr int kAccumulators = Tile<kSharing>::kRowBlocks * Tile<kSharing>::kN / 2;

template <int kCount>
__device__ __forceinline__ void fence_accumulators(float* d) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(d[i]);
}

// kPingPong: the warpgroups multiply in turns. Besides keeping one ahead of the other, this keeps a
// warpgroup from waiting for a stage more than one turn of the ring before it is filled: a
// barrier's parity cannot tell two turns apart, and the wait would end too early.
struct Turns {
  // Before the first tile, by all consumers: `first` is the warpgroup that owns it.
  static __device__ void start(uint32_t warpgroup, uint32_t first) {
    if (warpgroup != first) pass(warpgroup);
  }
  static __device__ __forceinline__ void take(uint32_t warpgroup) {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  }
  static __device__ __forceinline__ void pass(uint32_t warpgroup) {
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, 1 - warpgroup);
  }
};

template <Sharing kSharing, int kStages>
__device__ __forceinline__ void release_stage(Stages<kStages>& stages, int index) {
  if (threadIdx.x % 32 < (kSharing == Sharing::kCooperative ? 1 : 2)) stages.empty[index].arrive();
}

struct Nothing {
  __device__ void operator()() const {}
};

// Multiplies `k_blocks` stages of the ring into d[kAccumulators]. `warpgroup` is the consumer's
// number, 0 or 1. aside() is called once, if possible while the tensor cores are busy.
template <Sharing kSharing, Major kA, Major kB, int kRowBlocks = Tile<kSharing>::kRowBlocks,
          class Aside = Nothing, int kStages>
__device__ __forceinline__ void multiply(Stages<kStages>& stages, RingState<kStages>& ring,
                                         uint32_t warpgroup, int k_blocks, float* d,
                                         const Aside& aside = {}) {
  constexpr int kN = Tile<kSharing>::kN;
  using Atom = typename Wgmma<kN, kA, kB>::Atom;
  const uint64_t first_row_block = kSharing == Sharing::kCooperative ? warpgroup : 0;

  fence_accumulators<kAccumulators<kSharing>>(d);
  if constexpr (kSharing == Sharing::kPingPong) Turns::take(warpgroup);
#pragma unroll 1
  for (int kb = 0; kb < k_blocks; ++kb) {
    stages.full[ring.index()].wait(ring.phase());
    const uint64_t a = matrix_descriptor<kA>(stages.a[ring.index()]) + first_row_block * kStepM64;
    const uint64_t b = matrix_descriptor<kB>(stages.b[ring.index()]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        wgmma<Atom>(a + k * kStepK16<kA> + m * kStepM64, b + k * kStepK16<kB>, d + m * (kN / 2),
                    kb > 0 || k > 0, std::make_integer_sequence<int, kN / 2>{});
      }
    }
    cute::warpgroup_commit_batch();
    if (kb > 0) {
      cute::warpgroup_wait<1>();
      release_stage<kSharing>(stages, (ring.count - 1) % kStages);
    }
    if (kb == 1) aside();
    ring.advance();
  }
  if (k_blocks < 2) aside();
  if constexpr (kSharing == Sharing::kPingPong) Turns::pass(warpgroup);
  cute::warpgroup_wait<0>();
  fence_accumulators<kAccumulators<kSharing>>(d);
  if (k_blocks > 0) release_stage<kSharing>(stages, (ring.count - 1) % kStages);
}

// kCooperative: takes part in a tile whose rows all belong to the other warpgroup.
template <int kStages>
__device__ __forceinline__ void skip(Stages<kStages>& stages, RingState<kStages>& ring,
                                     int k_blocks) {
  for (int kb = 0; kb < k_blocks; ++kb) {
    stages.full[ring.index()].wait(ring.phase());
    release_stage<Sharing::kCooperative>(stages, ring.index());
    ring.advance();
  }
}

}  // namespace megamoe
