// When each CTA went from one phase to the next, in builds for measuring only
// (JAX_MEGAMOE_TIMELINE; jax_megamoe/_bench/timeline.py prints them).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "ffi/gemm/core.h"
#include "ffi/kernels/kernels.h"
#include "ffi/kernels/sync.cuh"

namespace megamoe {

constexpr int kTimelineCtas = 160;

#ifdef MEGAMOE_TIMELINE
static __device__ unsigned long long pulled_bytes;
static __device__ uint64_t timeline[kTimelineCtas][kTimelineMarks];
#endif

// Which GPU is current depends on the thread and on what it did last.
template <class F>
static inline void on_first_gpu(const F& f) {
  int device = 0;
  cudaGetDevice(&device);
  cudaSetDevice(0);
  f();
  cudaSetDevice(device);
}

// [CTA][mark], of the newest launch on the first GPU; empty in other builds.
static inline std::vector<uint64_t> copy_timeline() {
  std::vector<uint64_t> marks;
#ifdef MEGAMOE_TIMELINE
  marks.resize(kTimelineCtas * kTimelineMarks);
  on_first_gpu(
      [&] { cudaMemcpyFromSymbol(marks.data(), timeline, marks.size() * sizeof(uint64_t)); });
#endif
  return marks;
}

// Nanoseconds of the GPU's clock, by the first consumer thread of a CTA.
__device__ __forceinline__ void mark(int which) {
#ifdef MEGAMOE_TIMELINE
  if (threadIdx.x == kWarpgroup && blockIdx.x < kTimelineCtas)
    timeline[blockIdx.x][which] = global_timer_ns();
#endif
}

// Adds to the bytes that this device has read from others. By one thread.
__device__ __forceinline__ void count_pulled_bytes(int32_t bytes) {
#ifdef MEGAMOE_TIMELINE
  atomicAdd(&pulled_bytes, static_cast<unsigned long long>(bytes));
#endif
}

// The bytes counted on the first GPU since the last call; 0 in other builds.
static inline uint64_t take_pulled_bytes() {
  unsigned long long bytes = 0;
#ifdef MEGAMOE_TIMELINE
  const unsigned long long zero = 0;
  on_first_gpu([&] {
    cudaMemcpyFromSymbol(&bytes, pulled_bytes, sizeof(bytes));
    cudaMemcpyToSymbol(pulled_bytes, &zero, sizeof(zero));
  });
#endif
  return bytes;
}

}  // namespace megamoe
