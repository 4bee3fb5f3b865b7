// bf16 values in words, two in each.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace megamoe {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ void unpack_bf16(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ void unpack_bf16x8(const uint4& packed, float (&values)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack_bf16(words[i], values[2 * i], values[2 * i + 1]);
}

__device__ __forceinline__ uint4 pack_bf16x8(const float (&values)[8]) {
  return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                    pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
}

}  // namespace megamoe
