// Waiting between CTAs and between GPUs. Every wait ends: after the timeout it records who waited
// for what and stops the kernel.
#pragma once

#include <cstdint>

#include "ffi/workspace/device_block.h"

namespace megamoe {

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(uint64_t* p, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

__device__ __forceinline__ int32_t load_acquire_device(const int32_t* p) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire_device(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void add_release_device(int32_t* p, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Between writes by bulk copies and a release, and between an acquire and reads by bulk copies: the
// copy engine's accesses to global memory are ordered with a thread's own only by this fence.
__device__ __forceinline__ void fence_bulk_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Writes down who waited for what, and ends this kernel and all later ones of this process on this
// GPU by an access to memory that is mapped nowhere. Not by __trap(): where several processes share
// a GPU and trap at about the same time, the driver (580.159) does not tell one of them, whose host
// then waits for ever (docs/results/2026-11-30-h200-trap.txt).
__device__ __forceinline__ void fail(const Directory& directory, int32_t rank, Phase phase,
                                     int32_t waited_for, int64_t seen, int64_t wanted) {
  volatile Failure* failure = directory.failure;
  failure->rank = rank;
  failure->phase = static_cast<int32_t>(phase);
  failure->waited_for = waited_for;
  failure->seen = seen;
  failure->wanted = wanted;
  __threadfence_system();
  failure->happened = 1;
  __threadfence_system();
  constexpr uint64_t kNowhere = 16;
  asm volatile("st.global.u32 [%0], %1;" ::"l"(kNowhere), "r"(1) : "memory");
  __threadfence_system();  // waits for the store, which never ends
  __trap();                // only if it did
}

// Waits until *counter, which only grows, has reached `wanted`. `tile` is for the message, a
// reference because it must not take a register until there is one.
__device__ __forceinline__ void wait_for_count(const int32_t* counter, int32_t wanted,
                                               const Directory& directory, const Board& board,
                                               Phase phase, const int32_t& tile) {
  int32_t seen = load_acquire_device(counter);
  if (seen >= wanted) return;
  const uint64_t start = global_timer_ns();
  while ((seen = load_acquire_device(counter)) < wanted) {
    __nanosleep(64);
    if (global_timer_ns() - start > static_cast<uint64_t>(directory.timeout_ns)) {
      fail(directory, board.rank, phase, tile, seen, wanted);
    }
  }
}

}  // namespace megamoe
