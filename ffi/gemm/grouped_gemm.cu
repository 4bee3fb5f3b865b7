#include <cutlass/arch/reg_reconfig.h>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/grouped_gemm.h"
#include "ffi/gemm/tensor_map.h"
#include "ffi/gemm/tiles.h"

namespace megamoe {
namespace {

constexpr int kStages = 4;
constexpr int kTileSlots = 4;
constexpr int kMaxGroups = 256;

struct Work {
  TilePlace place;
  int k_blocks;  // negative: no more work
};

struct Shared {
  Stages<kStages> stages;
  WarpBuffers buffers;
  TileRing<Work, kTileSlots> tiles;
  int32_t tile_start[kMaxGroups + 1];
};

struct Maps {
  CUtensorMap a0, a1, b0, b1;
};

struct Geometry {
  int groups, column_tiles, row_tiles, k_blocks;
  int out_columns;
};

template <Product kProduct>
struct Majors {
  static constexpr Major kA = kProduct == Product::kWeightGrad ? Major::MN : Major::K;
  static constexpr Major kB =
      kProduct == Product::kDownGrad || kProduct == Product::kInputGrad ? Major::K : Major::MN;
};

template <Product kProduct, int kTileN>
__device__ __forceinline__ void load_stage(const Maps& maps, const Geometry& geometry,
                                           const TilePlace& tile, const int* tile_start, int kb,
                                           Stages<kStages>& stages, int stage) {
  uint64_t* bar = reinterpret_cast<uint64_t*>(&stages.full[stage]);
  uint8_t* a = stages.a[stage];
  uint8_t* b = stages.b[stage];
  const int row = tile.m * kTileM;
  const int column = tile.n * kTileN;
  const int k = kb * kBlockK;
  using Load3 = cute::SM90_TMA_LOAD_3D;
  using Load4 = cute::SM90_TMA_LOAD_4D;
  if constexpr (kProduct == Product::kGateUp) {
    Load3::copy(&maps.a0, bar, 0, a, k, row, 0);
    Load4::copy(&maps.b0, bar, 0, b, 0, k, tile.n * 2, tile.group);
    Load4::copy(&maps.b1, bar, 0, b + kStageBytesB / 2, 0, k, tile.n * 2, tile.group);
  } else if constexpr (kProduct == Product::kDown) {
    Load3::copy(&maps.a0, bar, 0, a, k, row, 0);
    Load4::copy(&maps.b0, bar, 0, b, 0, k, column / 64, tile.group);
  } else if constexpr (kProduct == Product::kDownGrad) {
    Load3::copy(&maps.a0, bar, 0, a, k, row, 0);
    Load3::copy(&maps.b0, bar, 0, b, k, column, tile.group);
  } else if constexpr (kProduct == Product::kInputGrad) {
    const int half = geometry.k_blocks / 2;
    const bool up = kb >= half;
    const int k_half = (up ? kb - half : kb) * kBlockK;
    Load3::copy(up ? &maps.a1 : &maps.a0, bar, 0, a, k_half, row, 0);
    Load3::copy(up ? &maps.b1 : &maps.b0, bar, 0, b, k_half, column, tile.group);
  } else {
    const int pool_row = tile_start[tile.group] * kTileM + k;
    const int m = tile.m - tile.group * geometry.row_tiles;
    Load4::copy(&maps.a0, bar, 0, a, 0, pool_row, m * (kTileM / 64), 0);
    Load4::copy(&maps.b0, bar, 0, b, 0, pool_row, column / 64, 0);
  }
}

template <Product kProduct>
__device__ __forceinline__ Work place_work(const Geometry& geometry, const int* tile_start,
                                           int index) {
  if constexpr (kProduct == Product::kWeightGrad) {
    const int per_group = geometry.row_tiles * geometry.column_tiles;
    const int group = index / per_group;
    if (group >= geometry.groups) return {{}, -1};
    const int left = index - group * per_group;
    const int k_blocks = (tile_start[group + 1] - tile_start[group]) * (kTileM / kBlockK);
    return {
        {group, group * geometry.row_tiles + left % geometry.row_tiles, left / geometry.row_tiles},
        k_blocks};
  } else {
    if (index >= tile_start[geometry.groups] * geometry.column_tiles) return {{}, -1};
    return {place_tile(tile_start, geometry.groups, geometry.column_tiles, index),
            geometry.k_blocks};
  }
}

template <Product kProduct, Sharing kSharing>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Maps maps, Geometry geometry,
                        const int32_t* __restrict__ tile_starts, int32_t* counter,
                        __nv_bfloat16* out) {
  constexpr int kTileN = Tile<kSharing>::kN;
  constexpr int kOutN = kProduct == Product::kGateUp ? kTileN / 2 : kTileN;
  constexpr int kRowBlocks = Tile<kSharing>::kRowBlocks;
  constexpr bool kAlternate = kSharing == Sharing::kPingPong;
  // Of the register pool of 64,512; a larger sum never returns from setmaxnreg.
  constexpr int kProducerRegisters = kAlternate ? 56 : 80;
  constexpr int kConsumerRegisters = kAlternate ? 224 : 208;
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);

  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.tiles.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  int32_t* tile_start = shared.tile_start;
  for (int g = threadIdx.x; g <= geometry.groups; g += kThreads) tile_start[g] = tile_starts[g];
  __syncthreads();

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == 0 && threadIdx.x == 0) {
      RingState<kStages> ring;
      RingState<kTileSlots> tile_ring;
      Work next = place_work<kProduct>(geometry, tile_start, atomicAdd(counter, 1));
      for (;;) {
        const Work work = next;
        shared.tiles.push(tile_ring, work);
        if (work.k_blocks < 0) break;
        const int index = atomicAdd(counter, 1);
        const int look_ahead = min(kStages, work.k_blocks - 1);
        if (work.k_blocks == 0) next = place_work<kProduct>(geometry, tile_start, index);
        for (int kb = 0; kb < work.k_blocks; ++kb) {
          if (kb == look_ahead) next = place_work<kProduct>(geometry, tile_start, index);
          shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
          shared.stages.full[ring.index()].arrive_and_expect_tx(kStageBytesA +
                                                                kTileN * kBlockK * 2);
          load_stage<kProduct, kTileN>(maps, geometry, work.place, tile_start, kb, shared.stages,
                                       ring.index());
          ring.advance();
        }
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    const uint32_t warpgroup = warp / 4 - 1;
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    uint8_t* buffer = shared.buffers.here();
    float acc[kAccumulators<kSharing>] = {};
    if (kAlternate) Turns::start(warpgroup, 0);
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.k_blocks < 0) break;
      if (kAlternate && tile_ring.count % 2 != warpgroup) {
        ring.advance(work.k_blocks);
        continue;
      }
      if (work.k_blocks == 0) {
#pragma unroll
        for (float& value : acc) value = 0.0f;
      }
      multiply<kSharing, Majors<kProduct>::kA, Majors<kProduct>::kB>(shared.stages, ring, warpgroup,
                                                                     work.k_blocks, acc);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const int row = work.place.m * kTileM + (kAlternate ? m : warpgroup) * 64 +
                        threadIdx.x % kWarpgroup / 32 * 16;
        const int column = work.place.n * kOutN;
        const RowAddress to(out, row, geometry.out_columns, column, 2);
#pragma unroll
        for (int c = 0; c < kOutN / 64; ++c) {
          float* d = acc + m * (kTileN / 2) + 32 * c;
          if constexpr (kProduct == Product::kGateUp) {
#pragma unroll
            for (int i = 0; i < 32; i += 2) {
              float s[2];
              sigmoid2(d[i], d[i + 1], s[0], s[1]);
              d[i] *= s[0] * d[kTileN / 4 + i];
              d[i + 1] *= s[1] * d[kTileN / 4 + i + 1];
            }
          }
          fill_64_columns(d, buffer);
          store_rows(buffer, to, 128 * c, column + 64 * c < geometry.out_columns);
        }
      }
    }
  }
}

template <Product kProduct, Sharing kSharing>
std::string launch(const GroupedGemm& call, cudaStream_t stream) {
  constexpr int kTileN = Tile<kSharing>::kN;
  const int64_t h = call.hidden, i = call.intermediate;
  Maps maps{};
  Geometry geometry{};
  geometry.groups = static_cast<int>(call.groups);
  int64_t out_columns = 0, out_tile = kTileN;
  if (call.groups > kMaxGroups) return "at most 256 groups";
  std::string error;
  const auto check = [&](std::string e) {
    if (error.empty()) error = std::move(e);
  };
  if constexpr (kProduct == Product::kGateUp) {
    out_columns = i, out_tile = kTileN / 2;
    geometry.k_blocks = static_cast<int>(h / kBlockK);
    check(encode_k_major(&maps.a0, call.a0, 1, call.rows, h, kTileM));
    check(encode_mn_major(&maps.b0, call.b0, call.groups, h, i, kTileN / 2));
    check(encode_mn_major(&maps.b1, call.b1, call.groups, h, i, kTileN / 2));
  } else if constexpr (kProduct == Product::kDown) {
    out_columns = h;
    geometry.k_blocks = static_cast<int>(i / kBlockK);
    check(encode_k_major(&maps.a0, call.a0, 1, call.rows, i, kTileM));
    check(encode_mn_major(&maps.b0, call.b0, call.groups, i, h, kTileN));
  } else if constexpr (kProduct == Product::kDownGrad) {
    out_columns = i;
    geometry.k_blocks = static_cast<int>(h / kBlockK);
    check(encode_k_major(&maps.a0, call.a0, 1, call.rows, h, kTileM));
    check(encode_k_major(&maps.b0, call.b0, call.groups, i, h, kTileN));
  } else if constexpr (kProduct == Product::kInputGrad) {
    out_columns = h;
    geometry.k_blocks = static_cast<int>(2 * i / kBlockK);
    check(encode_k_major(&maps.a0, call.a0, 1, call.rows, i, kTileM));
    check(encode_k_major(&maps.a1, call.a1, 1, call.rows, i, kTileM));
    check(encode_k_major(&maps.b0, call.b0, call.groups, h, i, kTileN));
    check(encode_k_major(&maps.b1, call.b1, call.groups, h, i, kTileN));
  } else {
    out_columns = i;
    geometry.row_tiles = static_cast<int>(h / kTileM);
    check(encode_mn_major(&maps.a0, call.a0, 1, call.rows, h, kTileM));
    check(encode_mn_major(&maps.b0, call.b0, 1, call.rows, i, kTileN));
  }
  geometry.column_tiles = static_cast<int>((out_columns + out_tile - 1) / out_tile);
  geometry.out_columns = static_cast<int>(out_columns);
  if (!error.empty()) return error;

  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = grouped_gemm_kernel<kProduct, kSharing>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(sizeof(Shared)));
  if (status == cudaSuccess) {
    kernel<<<sms, kThreads, sizeof(Shared), stream>>>(maps, geometry, call.tile_start, call.counter,
                                                      static_cast<__nv_bfloat16*>(call.out));
    status = cudaGetLastError();
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

template <Product kProduct>
std::string launch(const GroupedGemm& call, cudaStream_t stream) {
  if constexpr (kProduct != Product::kGateUp) {
    if (call.ping_pong) return launch<kProduct, Sharing::kPingPong>(call, stream);
  }
  return launch<kProduct, Sharing::kCooperative>(call, stream);
}

}  // namespace

std::string grouped_gemm(const GroupedGemm& call, cudaStream_t stream) {
  switch (call.product) {
    case Product::kGateUp:
      return launch<Product::kGateUp>(call, stream);
    case Product::kDown:
      return launch<Product::kDown>(call, stream);
    case Product::kDownGrad:
      return launch<Product::kDownGrad>(call, stream);
    case Product::kInputGrad:
      return launch<Product::kInputGrad>(call, stream);
    case Product::kWeightGrad:
      return launch<Product::kWeightGrad>(call, stream);
  }
  return "unknown product";
}

}  // namespace megamoe
