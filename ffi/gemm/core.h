// The matrix core: bf16 operands in swizzled shared memory, fp32 accumulators in registers.
//
// One producer thread fills a ring of stages by TMA; two consumer warpgroups multiply in turns,
// each a whole 128 x 192 tile: one multiplies while the other runs its epilogue, so the tensor
// cores stay busy at a clock that the card's power allows. Every product of the layer (gate, up,
// down, dA, dX, weight gradients) is this core with another pair of operand majors and another
// epilogue.
//
// SwiGLU needs a gate and an up value together. One warpgroup takes the gate tiles and the other
// the up tiles, and the gates cross in shared memory (epilogue.h): sharing a tile of 128 gate and
// 128 up columns between the warpgroups instead leaves the tensor cores idle in its epilogue. A
// tile of 96 gate and 96 up columns needs no exchange, but boxes with rows of 64 bytes, with which
// TMA does not keep up: the 30B forward pass took 8% to 10% longer on H200.
#pragma once

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
constexpr int kInstructionK = 16;
constexpr int kWarpgroup = 128;
constexpr int kConsumerWarpgroups = 2;
constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroup / 32;
constexpr int kThreads = kWarpgroup * (1 + kConsumerWarpgroups);

constexpr int kTileN = 192;
constexpr int kRowBlocks = 2;  // 64-row blocks of a tile
constexpr int kStageBytesA = kTileM * kBlockK * 2;
constexpr int kStageBytesB = kTileN * kBlockK * 2;
constexpr int kStages = 4;

struct Stages {
  alignas(1024) uint8_t a[kStages][kStageBytesA];
  alignas(1024) uint8_t b[kStages][kStageBytesB];
  TransactionBarrier full[kStages];
  Barrier empty[kStages];

  // Each warp of the warpgroup that owns the tile frees a stage.
  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(kWarpgroup / 32);
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

// The consumer warpgroup's number, the consumer warp's, and the warp's in its warpgroup.
__device__ __forceinline__ uint32_t warpgroup_here() { return thread_here() / kWarpgroup - 1; }
__device__ __forceinline__ uint32_t consumer_warp_here() {
  return thread_here() / 32 - kWarpgroup / 32;
}
__device__ __forceinline__ uint32_t warp_of_group_here() { return thread_here() % kWarpgroup / 32; }

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

template <class Atom, int... I>
__device__ __forceinline__ void wgmma(uint64_t a, uint64_t b, float* d, bool accumulate,
                                      std::integer_sequence<int, I...>) {
  Atom::fma(a, b, d[I]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Accumulators of a thread. Each tile of the layer's kernels has its own array, set to zero: wgmma
// reads its accumulators even where it ignores them, so an array kept from tile to tile would hold
// its registers through the epilogue.
constexpr int kAccumulators = kRowBlocks * kTileN / 2;

__device__ __forceinline__ void fence_accumulators(float* d) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
}

// The warpgroups multiply in turns. Besides keeping one ahead of the other, this keeps a
// warpgroup from waiting for a stage more than one turn of the ring before it is filled: a
// barrier's parity cannot tell two turns apart, and the wait would end too early.
struct Turns {
  // Before the first tile, which is warpgroup 0's, by all consumers.
  static __device__ void start(uint32_t warpgroup) {
    if (warpgroup == 1) pass(warpgroup);
  }
  static __device__ __forceinline__ void take(uint32_t warpgroup) {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  }
  static __device__ __forceinline__ void pass(uint32_t warpgroup) {
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, 1 - warpgroup);
  }
};

__device__ __forceinline__ void release_stage(Stages& stages, int index) {
  if (threadIdx.x % 32 == 0) stages.empty[index].arrive();
}

// Whether the depth, the contraction's length, need not be a multiple of kBlockK: where it is one
// of token rows. What the last stage holds beyond the next multiple of kInstructionK is not
// multiplied.
template <Major kA, Major kB>
constexpr bool kRaggedDepth = kA == Major::MN && kB == Major::MN;

struct Nothing {
  __device__ void operator()() const {}
};

// 64 rows by kColumns of a product.
template <int kColumns, Major kA, Major kB>
struct Instruction {
  using type = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<kA, kB>;
};
template <Major kA, Major kB>
struct Instruction<128, kA, kB> {
  using type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB>;
};
template <Major kA, Major kB>
struct Instruction<64, kA, kB> {
  using type = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kA, kB>;
};

// multiply() for the first kUsedBlocks of the tile's row blocks and the first kColumns of its
// columns.
template <Major kA, Major kB, bool kOnto, int kUsedBlocks, int kColumns, class Taken>
__device__ __forceinline__ void multiply_part(Stages& stages, RingState<kStages>& ring,
                                              uint32_t warpgroup, int depth, float* d,
                                              const Taken& taken) {
  static_assert(kColumns == kTileN || kColumns == 128 || kColumns == 64);
  using Atom = typename Instruction<kColumns, kA, kB>::type;
  fence_accumulators(d);
  Turns::take(warpgroup);
  taken();
#pragma unroll 1
  for (int kb = 0; kb < depth / kBlockK; ++kb) {
    stages.full[ring.index()].wait(ring.phase());
    const uint64_t a = matrix_descriptor<kA>(stages.a[ring.index()]);
    const uint64_t b = matrix_descriptor<kB>(stages.b[ring.index()]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBlockK / kInstructionK; ++k) {
#pragma unroll
      for (int m = 0; m < kUsedBlocks; ++m) {
        wgmma<Atom>(a + k * kStepK16<kA> + m * kStepM64, b + k * kStepK16<kB>, d + m * (kTileN / 2),
                    kOnto || kb > 0 || k > 0, std::make_integer_sequence<int, kColumns / 2>{});
      }
    }
    cute::warpgroup_commit_batch();
    if (kb > 0) {
      cute::warpgroup_wait<1>();
      release_stage(stages, (ring.count - 1) % kStages);
    }
    ring.advance();
  }
  if (kRaggedDepth<kA, kB> && depth % kBlockK != 0) {
    stages.full[ring.index()].wait(ring.phase());
    uint64_t a = matrix_descriptor<kA>(stages.a[ring.index()]);
    uint64_t b = matrix_descriptor<kB>(stages.b[ring.index()]);
#pragma unroll 1
    for (int k = 0; k < depth % kBlockK; k += kInstructionK) {
      cute::warpgroup_arrive();
#pragma unroll
      for (int m = 0; m < kUsedBlocks; ++m) {
        wgmma<Atom>(a + m * kStepM64, b, d + m * (kTileN / 2), true,
                    std::make_integer_sequence<int, kColumns / 2>{});
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (k == 0 && depth >= kBlockK) release_stage(stages, (ring.count - 1) % kStages);
      a += kStepK16<kA>;
      b += kStepK16<kB>;
    }
    ring.advance();
  }
  Turns::pass(warpgroup);
  cute::warpgroup_wait<0>();
  fence_accumulators(d);
  if (depth > 0) release_stage(stages, (ring.count - 1) % kStages);
}

// Multiplies the ring's next stages, `depth` of the contraction, into d[kAccumulators], which are
// zeros before or, with kOnto, what the product is added to; of a tile of which `rows` rows and
// `columns` columns lie inside the matrix; columns are a multiple of 64. `warpgroup` is the
// consumer's number, 0 or 1. taken() is called when its turn has come.
template <Major kA, Major kB, bool kOnto = false, class Taken = Nothing>
__device__ __forceinline__ void multiply(Stages& stages, RingState<kStages>& ring,
                                         uint32_t warpgroup, int rows, int columns, int depth,
                                         float* d, const Taken& taken = {}) {
  if (columns > 128) {
    if (rows > kTileM / kRowBlocks) {
      multiply_part<kA, kB, kOnto, kRowBlocks, kTileN>(stages, ring, warpgroup, depth, d, taken);
    } else {
      multiply_part<kA, kB, kOnto, 1, kTileN>(stages, ring, warpgroup, depth, d, taken);
    }
  } else if (columns > 64) {
    multiply_part<kA, kB, kOnto, kRowBlocks, 128>(stages, ring, warpgroup, depth, d, taken);
  } else {
    multiply_part<kA, kB, kOnto, kRowBlocks, 64>(stages, ring, warpgroup, depth, d, taken);
  }
}

}  // namespace megamoe
