// The expert path of one round as one persistent kernel.
//
// 384 threads a CTA, one CTA an SM. The first warpgroup feeds: a loader thread (claims tiles, loads
// operands by TMA) and a puller warp (fetches token rows from their owners). The other two
// warpgroups multiply and store.
//
//   pull      x row of a source token -> every pool row that needs it     (puller, bulk copies)
//   gate/up   x_pool @ w_gate, w_up -> SwiGLU, times routing weight -> act_pool
//   down      act_pool @ w_down -> row segments pushed to the home rank's [slot][token] buffer
//
// All gate/up tiles are claimed before all down tiles, each by one atomic counter, so a tile only
// waits for tiles that a running CTA has claimed before it.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/tiles.h"
#include "ffi/kernels/announce.cuh"
#include "ffi/kernels/pull.cuh"
#include "ffi/kernels/push.cuh"
#include "ffi/kernels/sync.cuh"
#include "ffi/kernels/timeline.cuh"
#include "ffi/plan/plan.h"

namespace megamoe {

constexpr int kStages = 4;
constexpr int kTileSlots = 4;
constexpr int kGateUpColumns = 128;

struct ExpertsMaps {
  CUtensorMap x_pool, gate, up, act_pool, down;
};

struct ExpertsArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  PullSource source[1];
  const float* row_weight;
  const uint64_t* row_target;
  __nv_bfloat16* act_pool;
  int32_t* activated;
  int32_t hidden, intermediate;
  int32_t round;
  float swiglu_limit;
};

enum class Kind : int32_t { kGateUp, kDown, kEnd };

struct Work {
  Kind kind;
  TilePlace place;
  int32_t rows;  // of the tile that are not padding; a 64-row half of padding is not multiplied
};

struct ExpertsShared {
  Stages<kStages> stages;
  WarpBuffers buffers;
  PullBuffers pull;
  TileRing<Work, kTileSlots> tiles;
  // Of the round's window, in tiles and rows from its first.
  int32_t tile_start[kMaxLocalExperts + 1];
  int32_t row_end[kMaxLocalExperts];
};

static_assert(sizeof(ExpertsShared) <= 232448);

struct Experts {
  static constexpr Sharing kDownSharing = Sharing::kPingPong;
  static constexpr int kDownN = Tile<kDownSharing>::kN;

  const ExpertsMaps& maps;
  const ExpertsArgs& args;
  ExpertsShared& shared;

  __device__ int first_row() const { return args.round * args.shape.capacity_rows; }
  __device__ int gate_up_columns() const {
    return (args.intermediate + kGateUpColumns - 1) / kGateUpColumns;
  }

  __device__ void read_window() {
    const int experts = args.shape.local_experts;
    const int first = first_row();
    const int rows = args.shape.capacity_rows;
    for (int e = threadIdx.x; e <= experts; e += kThreads) {
      const int start = args.plan.expert_start[e] - first;
      shared.tile_start[e] = min(max(start, 0), rows) / kTileM;
      if (e < experts) shared.row_end[e] = start + args.plan.expert_rows[e];
    }
  }

  // ---- loader thread --------------------------------------------------------------------------

  __device__ Work place_work(int index) const {
    const int experts = args.shape.local_experts;
    const int tiles = shared.tile_start[experts];
    const int gate_up = tiles * gate_up_columns();
    const int down_columns = (args.hidden + kDownN - 1) / kDownN;
    const bool down = index >= gate_up;
    if (down) index -= gate_up;
    if (down && index >= tiles * down_columns) return {Kind::kEnd, {}, 0};
    const TilePlace place =
        place_tile(shared.tile_start, experts, down ? down_columns : gate_up_columns(), index);
    return {down ? Kind::kDown : Kind::kGateUp, place,
            min(kTileM, shared.row_end[place.group] - place.m * kTileM)};
  }

  // Rows or parts that a tile waits for, and how many it needs.
  __device__ const int32_t* awaited(const Work& work, const Pieces& pieces, int& wanted) const {
    const int m = work.place.m;
    if (work.kind == Kind::kDown) {
      wanted = gate_up_columns() * kConsumerWarps;
      return &args.activated[m];
    }
    wanted = work.rows * pieces.count;
    return &args.source[0].arrived[m];
  }

  __device__ void load_stage(const Work& work, int kb, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    uint8_t* a = shared.stages.a[stage];
    uint8_t* b = shared.stages.b[stage];
    const TilePlace& tile = work.place;
    const int k = kb * kBlockK, row = tile.m * kTileM;
    using Load3 = cute::SM90_TMA_LOAD_3D;
    using Load4 = cute::SM90_TMA_LOAD_4D;
    if (work.kind == Kind::kDown) {
      shared.stages.full[stage].arrive_and_expect_tx(kStageBytesA + kDownN * kBlockK * 2);
      Load3::copy(&maps.act_pool, bar, 0, a, k, row, 0);
      Load4::copy(&maps.down, bar, 0, b, 0, k, tile.n * (kDownN / 64), tile.group);
    } else {
      const int block = tile.n * (kGateUpColumns / 64);
      shared.stages.full[stage].arrive_and_expect_tx(kStageBytesA + kStageBytesB);
      Load3::copy(&maps.x_pool, bar, 0, a, k, row, 0);
      Load4::copy(&maps.gate, bar, 0, b, 0, k, block, tile.group);
      Load4::copy(&maps.up, bar, 0, b + kStageBytesB / 2, 0, k, block, tile.group);
    }
  }

  // Claims and places the next tile while the current one is being loaded, when the ring is full
  // and there is time: at a tile's end the consumers would wait for it.
  __device__ void load() {
    const Pieces pieces(args.hidden);
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    Work next = place_work(atomicAdd(&args.board->tile_claim, 1));
    bool next_ready = false;
    for (;;) {
      const Work work = next;
      shared.tiles.push(tile_ring, work);
      if (work.kind == Kind::kEnd) return;
      int wanted;
      const int32_t* counter = awaited(work, pieces, wanted);
      const int index = atomicAdd(&args.board->tile_claim, 1);
      if (!next_ready) {
        const bool down = work.kind == Kind::kDown;
        wait_for_count(counter, wanted, args.directory, *args.board,
                       down ? Phase::kDown : Phase::kGateUp, work.place.m);
        fence_bulk_copies();
      }
      const int k_blocks = (work.kind == Kind::kDown ? args.intermediate : args.hidden) / kBlockK;
      const int look_ahead = min(kStages, k_blocks - 1);
      for (int kb = 0; kb < k_blocks; ++kb) {
        if (kb == look_ahead) {
          next = place_work(index);
          next_ready = false;
          if (next.kind != Kind::kEnd) {
            counter = awaited(next, pieces, wanted);
            next_ready = load_acquire_device(counter) >= wanted;
            fence_bulk_copies();
          }
        }
        shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
        load_stage(work, kb, ring.index());
        ring.advance();
      }
    }
  }

  // ---- consumer warpgroups --------------------------------------------------------------------

  // values[0..16) *= sigmoid(values) * up * weight, clamped first where a limit is set.
  __device__ __forceinline__ void swiglu(float* gate, float* up, const float (&weight)[2]) const {
    if (args.swiglu_limit < INFINITY) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        // Comparisons that a NaN fails, so that it passes through.
        gate[i] = gate[i] > args.swiglu_limit ? args.swiglu_limit : gate[i];
        up[i] = up[i] > args.swiglu_limit ? args.swiglu_limit : up[i];
        up[i] = up[i] < -args.swiglu_limit ? -args.swiglu_limit : up[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      float s[2];
      sigmoid2(gate[i], gate[i + 1], s[0], s[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) gate[i + j] *= s[j] * (up[i + j] * weight[i / 2 % 2]);
    }
  }

  __device__ __forceinline__ void gate_up_tile(const Work& work, int warpgroup,
                                               RingState<kStages>& ring, Announcer& announcer,
                                               float* acc) {
    if (work.rows <= warpgroup * 64) {
      announcer.announce();
      skip(shared.stages, ring, args.hidden / kBlockK);
    } else {
      const int first = work.place.m * kTileM + warpgroup * 64 + threadIdx.x % kWarpgroup / 32 * 16;
      const float* weights = args.row_weight + first_row() + first + threadIdx.x % 32 / 4;
      const float weight[2] = {weights[0], weights[8]};
      multiply<Sharing::kCooperative, Major::K, Major::MN>(shared.stages, ring, warpgroup,
                                                           args.hidden / kBlockK, acc,
                                                           [&] { announcer.announce(); });
      // Columns 0-127 of the tile are gate, 128-255 up: a thread holds matching pairs.
      uint8_t* buffer = shared.buffers.here();
#pragma unroll
      for (int c = 0; c < kGateUpColumns / 64; ++c) {
        const int column = work.place.n * kGateUpColumns + 64 * c;
        float* d = acc + 32 * c;
        swiglu(d, d + 64, weight);
        swiglu(d + 16, d + 80, weight);
        fill_64_columns(d, buffer);
        store_rows(buffer, RowAddress(args.act_pool, first, args.intermediate, column, 2), 0,
                   column < args.intermediate);
      }
    }
    announcer.set(&args.activated[work.place.m]);
  }

  __device__ __forceinline__ void down_tile(RingState<kTileSlots>& tile_ring,
                                            RingState<kStages>& ring, float* acc) {
    const int k_blocks = args.intermediate / kBlockK;
    if (shared.tiles.here(tile_ring).rows > 64) {
      multiply<kDownSharing, Major::K, Major::MN>(shared.stages, ring, warpgroup_here(), k_blocks,
                                                  acc);
    } else {
      multiply<kDownSharing, Major::K, Major::MN, 1>(shared.stages, ring, warpgroup_here(),
                                                     k_blocks, acc);
    }
    const Work& work = shared.tiles.here(tile_ring);
    const int warp = threadIdx.x % kWarpgroup / 32;
    uint8_t* buffer = shared.buffers.here();
#pragma unroll
    for (int m = 0; m < Tile<kDownSharing>::kRowBlocks; ++m) {
      const int row = m * 64 + warp * 16 + lane_here() % 16;
      const uint64_t target =
          row < work.rows ? args.row_target[first_row() + work.place.m * kTileM + row] : 0;
      if (m * 64 < work.rows) {
        push_rows<kDownN>(acc + m * (kDownN / 2), buffer, target, work.place.n * kDownN,
                          args.hidden);
      }
    }
  }

  // All gate/up tiles come before all down tiles. Two loops, so that the accumulators and addresses
  // of one take no registers in the other; each loop's accumulators start defined for the same
  // reason.
  __device__ void consume(uint32_t warpgroup) {
    mark(0);
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    {
      Announcer announcer;
      float acc[kAccumulators<Sharing::kCooperative>] = {};
      for (;; shared.tiles.next(tile_ring)) {
        const Work& work = shared.tiles.peek(tile_ring);
        if (work.kind != Kind::kGateUp) break;
        gate_up_tile(work, warpgroup, ring, announcer, acc);
      }
      announcer.announce();
    }
    mark(1);
    float acc[kAccumulators<kDownSharing>] = {};
    Turns::start(warpgroup, tile_ring.count % 2);
    for (;; shared.tiles.next(tile_ring)) {
      if (shared.tiles.peek(tile_ring).kind == Kind::kEnd) break;
      if (tile_ring.count % 2 == warpgroup_here()) {
        down_tile(tile_ring, ring, acc);
      } else {
        ring.advance(args.intermediate / kBlockK);
      }
    }
    __threadfence_system();
    mark(2);
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsMaps maps,
                   const __grid_constant__ ExpertsArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  ExpertsShared& shared = *reinterpret_cast<ExpertsShared*>(raw);
  Experts experts{maps, args, shared};
  if (args.round >= NumRounds(args.shape, args.plan)) return;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.pull.init();
    shared.tiles.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  experts.read_window();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (warp == 0) {
      if (threadIdx.x == 0) experts.load();
    } else if (warp == 1) {
      Puller<1, ExpertsArgs>{args, shared.pull, experts.first_row()}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    experts.consume(warp / 4 - 1);
  }
}

}  // namespace megamoe
