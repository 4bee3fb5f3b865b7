// The sum over a token's slots at its home rank.
#pragma once

#include <cstdint>

#include "ffi/gemm/pack.h"
#include "ffi/workspace/device_block.h"

namespace megamoe {

__device__ __forceinline__ void store_row(__nv_bfloat16* to, const float (&sum)[8]) {
  *reinterpret_cast<uint4*>(to) = pack_bf16x8(sum);
}

__device__ __forceinline__ void store_row(float* to, const float (&sum)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

// What the home rank sums: out[t] = sum over routed slots k, in slot order, of returned[k][t], in
// fp32. Unrouted slots are never read, so what they hold does not matter.
struct Combine {
  const char* returned;  // [K, T, H] bf16
  const int32_t* ids;    // [T, K]
  int32_t tokens, top_k, num_experts, hidden;
  void* out;  // [T, H]
  bool out_is_f32;

  // A warp; loads of kBatch slots do not wait for each other.
  template <int kBatch>
  __device__ __forceinline__ void token(int t) const {
    const int lane = threadIdx.x % 32;
    const int64_t slot_bytes = int64_t{tokens} * hidden * 2;
    const int id = lane < top_k ? ids[int64_t{t} * top_k + lane] : -1;
    const uint32_t routed = __ballot_sync(~0u, id >= 0 && id < num_experts);
    const char* row = returned + int64_t{t} * hidden * 2;
    for (int column = lane * 8; column < hidden; column += 32 * 8) {
      float sum[8] = {};
      for (int first = 0; first < top_k; first += kBatch) {
        uint4 part[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (routed >> (first + i) & 1) {
            part[i] = *reinterpret_cast<const uint4*>(row + (first + i) * slot_bytes + column * 2);
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (routed >> (first + i) & 1) {
            float values[8];
            unpack_bf16x8(part[i], values);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += values[j];
          }
        }
      }
      const int64_t at = int64_t{t} * hidden + column;
      if (out_is_f32) {
        store_row(static_cast<float*>(out) + at, sum);
      } else {
        store_row(static_cast<__nv_bfloat16*>(out) + at, sum);
      }
    }
  }
};

constexpr int kCombineTokens = 4;  // of a chunk that a warp claims

}  // namespace megamoe
