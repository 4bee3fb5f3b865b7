#include <cutlass/arch/reg_reconfig.h>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/grouped_gemm.h"
#include "ffi/gemm/tensor_map.h"
#include "ffi/gemm/tiles.h"
#include "ffi/plan/tile_order.h"

namespace megamoe {
namespace {

constexpr int kMaxGroups = 256;

struct Work {
  TilePlace place;
  int k_blocks;  // negative: no more work
  bool up;       // kGateUp: a gate tile, then the up tile of the same place
};

struct Shared {
  Stages stages;
  WarpBuffers buffers;
  TileRing<Work> tiles;
  int32_t tile_start[kMaxGroups + 1];
};

struct Maps {
  CUtensorMap a0, a1, b0, b1, out;
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

template <Product kProduct>
__device__ __forceinline__ void load_stage(const Maps& maps, const Geometry& geometry,
                                           const Work& work, const int* tile_start, int kb,
                                           Stages& stages, int stage) {
  const TilePlace& tile = work.place;
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
    Load4::copy(work.up ? &maps.b1 : &maps.b0, bar, 0, b, 0, k, column / 64, tile.group);
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
    if (group >= geometry.groups) return {{}, -1, false};
    const int left = index - group * per_group;
    const int k_blocks = (tile_start[group + 1] - tile_start[group]) * (kTileM / kBlockK);
    return {
        {group, group * geometry.row_tiles + left % geometry.row_tiles, left / geometry.row_tiles},
        k_blocks,
        false};
  } else {
    if (index >= tile_start[geometry.groups] * geometry.column_tiles) return {{}, -1, false};
    return {place_tile(tile_start, geometry.groups, geometry.column_tiles, index),
            geometry.k_blocks, false};
  }
}

template <Product kProduct>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Maps maps, Geometry geometry,
                        const int32_t* __restrict__ tile_starts, int32_t* counter) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);

  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.tiles.init();
    cutlass::arch::fence_barrier_init();
  }
  int32_t* tile_start = shared.tile_start;
  for (int g = threadIdx.x; g <= geometry.groups; g += kThreads) tile_start[g] = tile_starts[g];
  __syncthreads();

  // Of the register pool of 64,512; a larger sum than 128 * 56 + 256 * 224 never returns.
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    RingState<kTileSlots> tile_ring;
    if (threadIdx.x == 32) {
      Work work{};
      while (work.k_blocks >= 0) {
        work = place_work<kProduct>(geometry, tile_start, atomicAdd(counter, 1));
        shared.tiles.push(tile_ring, work);
        if (kProduct != Product::kGateUp || work.k_blocks < 0) continue;
        work.up = true;
        shared.tiles.push(tile_ring, work);
      }
    } else if (threadIdx.x == 0) {
      RingState<kStages> ring;
      for (;; shared.tiles.next_of_thread(tile_ring)) {
        const Work work = shared.tiles.peek(tile_ring);
        if (work.k_blocks < 0) break;
        for (int kb = 0; kb < work.k_blocks; ++kb) {
          shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
          shared.stages.full[ring.index()].arrive_and_expect_tx(kStageBytesA + kStageBytesB);
          load_stage<kProduct>(maps, geometry, work, tile_start, kb, shared.stages, ring.index());
          ring.advance();
        }
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    const uint32_t warpgroup = warp / 4 - 1;
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    Turns::start(warpgroup);
    for (;; shared.tiles.next(tile_ring)) {
      const int k_blocks = shared.tiles.peek(tile_ring).k_blocks;
      if (k_blocks < 0) break;
      if (tile_ring.count % 2 != warpgroup_here()) {
        ring.advance(k_blocks);
        continue;
      }
      float acc[kAccumulators] = {};
      const Work& before = shared.tiles.here(tile_ring);
      multiply<Majors<kProduct>::kA, Majors<kProduct>::kB>(
          shared.stages, ring, warpgroup_here(), kTileM,
          columns_of_tile(geometry.out_columns, before.place.n), before.k_blocks * kBlockK, acc,
          [] {
            if (kProduct == Product::kGateUp && warpgroup_here() == 1) GateExchange::release();
          });
      const Work& work = shared.tiles.here(tile_ring);
      if (kProduct == Product::kGateUp && warpgroup_here() == 0) {
        GateExchange::wait_until_free();
        GateExchange::give(shared.buffers, acc);
        continue;
      }
      if (kProduct == Product::kGateUp) GateExchange::wait_until_full();
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const int row = work.place.m * kTileM + first_of_block(m);
        const int columns = columns_of_tile(geometry.out_columns, work.place.n);
#pragma unroll
        for (int c = 0; c < kTileN / 64; ++c) {
          const float* d = acc + m * (kTileN / 2) + 32 * c;
          uint8_t* buffer = shared.buffers.here(c);
          if constexpr (kProduct == Product::kGateUp) {
            buffer = GateExchange::block(shared.buffers, m * (kTileN / 64) + c);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float gate[8];
              load_16_columns(buffer, j, gate);
#pragma unroll
              for (int i = 0; i < 8; ++i) gate[i] *= sigmoid(gate[i]) * d[8 * j + i];
              store_16_columns(gate, fragment(buffer, j));
            }
          } else {
            wait_for_buffer();
            fill_64_columns(d, buffer);
          }
          store_block(maps.out, buffer, work.place.n * kTileN + 64 * c, row, 64 * c < columns);
        }
      }
      if (kProduct == Product::kGateUp) wait_for_buffer<1>();
    }
    wait_bulk_stores<0>();
  }
}

template <Product kProduct>
std::string launch(const GroupedGemm& call, cudaStream_t stream) {
  const int64_t h = call.hidden, i = call.intermediate;
  Maps maps{};
  Geometry geometry{};
  geometry.groups = static_cast<int>(call.groups);
  int64_t out_columns = 0;
  if (call.groups > kMaxGroups) return "at most 256 groups";
  std::string error;
  const auto check = [&](std::string e) {
    if (error.empty()) error = std::move(e);
  };
  if constexpr (kProduct == Product::kGateUp) {
    out_columns = i;
    geometry.k_blocks = static_cast<int>(h / kBlockK);
    check(encode_k_major(&maps.a0, call.a0, 1, call.rows, h, kTileM));
    check(encode_mn_major(&maps.b0, call.b0, call.groups, h, i, kTileN));
    check(encode_mn_major(&maps.b1, call.b1, call.groups, h, i, kTileN));
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
    if (h % kTileM != 0) return "the weight gradient's H must be a multiple of 128";
    out_columns = i;
    geometry.row_tiles = static_cast<int>(h / kTileM);
    check(encode_mn_major(&maps.a0, call.a0, 1, call.rows, h, kTileM));
    check(encode_mn_major(&maps.b0, call.b0, 1, call.rows, i, kTileN));
  }
  const int64_t out_rows = kProduct == Product::kWeightGrad ? call.groups * h : call.rows;
  check(encode_k_major(&maps.out, call.out, 1, out_rows, out_columns, kBlockRows));
  geometry.column_tiles = column_tiles(static_cast<int>(out_columns));
  geometry.out_columns = static_cast<int>(out_columns);
  if (!error.empty()) return error;

  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = grouped_gemm_kernel<kProduct>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(sizeof(Shared)));
  if (status == cudaSuccess) {
    kernel<<<sms, kThreads, sizeof(Shared), stream>>>(maps, geometry, call.tile_start,
                                                      call.counter);
    status = cudaGetLastError();
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
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
