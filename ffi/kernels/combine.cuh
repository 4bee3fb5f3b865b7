// The weighted sum at the home rank.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ffi/workspace/device_block.h"

namespace megamoe {

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], const uint4& packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void store_row(__nv_bfloat16* to, const float (&sum)[8]) {
  uint4 packed;
  uint32_t* words = &packed.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  *reinterpret_cast<uint4*>(to) = packed;
}

__device__ __forceinline__ void store_row(float* to, const float (&sum)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

// out[t] = sum over routed slots k, in slot order, of returned[k][t], in fp32. One warp a token;
// unrouted slots are never read, so what they hold does not matter.
template <class Out>
__global__ void combine_kernel(const char* returned, const int32_t* ids, int32_t tokens,
                               int32_t top_k, int32_t num_experts, int32_t hidden, Out* out) {
  const int lane = threadIdx.x % 32;
  const int warps = gridDim.x * (blockDim.x / 32);
  const int64_t slot_bytes = int64_t{tokens} * hidden * 2;
  for (int t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; t < tokens; t += warps) {
    const int id = lane < top_k ? ids[int64_t{t} * top_k + lane] : -1;
    const uint32_t routed = __ballot_sync(~0u, id >= 0 && id < num_experts);
    const char* row = returned + int64_t{t} * hidden * 2;
    for (int column = lane * 8; column < hidden; column += 32 * 8) {
      float sum[8] = {};
      for (int first = 0; first < top_k; first += 8) {
        uint4 part[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (routed >> (first + i) & 1) {
            part[i] = *reinterpret_cast<const uint4*>(row + (first + i) * slot_bytes + column * 2);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (routed >> (first + i) & 1) add_bf16x8(sum, part[i]);
        }
      }
      store_row(out + int64_t{t} * hidden + column, sum);
    }
  }
}

}  // namespace megamoe
