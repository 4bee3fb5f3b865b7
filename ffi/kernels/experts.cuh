// The expert path of one round as one persistent kernel.
//
// 384 threads a CTA, one CTA an SM. The first warpgroup feeds: a loader thread (claims tiles, loads
// operands by TMA), a puller warp (fetches token rows from their owners), two storer warps (write
// activation tiles). The other two warpgroups multiply.
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
#include "ffi/kernels/pull.cuh"
#include "ffi/kernels/push.cuh"
#include "ffi/kernels/sync.cuh"
#include "ffi/plan/plan.h"

namespace megamoe {

constexpr int kStages = 4;
constexpr int kTileSlots = 4;
constexpr int kGateUpColumns = 128;

struct ExpertsMaps {
  CUtensorMap x_pool, gate, up, act_store, act_pool, down;
};

struct ExpertsArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  PullSource source[1];
  const float* row_weight;
  const uint64_t* row_target;
  int32_t* activated;
  int32_t hidden, intermediate;
  int32_t round;
  float swiglu_limit;
};

enum class Kind : int32_t { kGateUp, kDown, kEnd };

struct Work {
  Kind kind;
  TilePlace place;
};

struct ExpertsShared {
  Stages<kStages> stages;
  StoreQueue store[kConsumerWarpgroups];
  PullBuffers pull;
  TileRing<Work, kTileSlots> tiles;
  // Of the round's window, in tiles and rows from its first.
  int32_t tile_start[kMaxLocalExperts + 1];
  int32_t row_end[kMaxLocalExperts];
};

template <Sharing kDownSharing>
struct Experts {
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
    if (index < gate_up) {
      return {Kind::kGateUp, place_tile(shared.tile_start, experts, gate_up_columns(), index)};
    }
    index -= gate_up;
    if (index >= tiles * down_columns) return {Kind::kEnd, {}};
    return {Kind::kDown, place_tile(shared.tile_start, experts, down_columns, index)};
  }

  // Rows or parts that a tile waits for, and how many it needs.
  __device__ const int32_t* awaited(const Work& work, const Pieces& pieces, int& wanted) const {
    const int m = work.place.m;
    if (work.kind == Kind::kDown) {
      wanted = gate_up_columns() * kConsumerWarpgroups;
      return &args.activated[m];
    }
    wanted = min(kTileM, shared.row_end[work.place.group] - m * kTileM) * pieces.count;
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
        wait_for_count(counter, wanted, args.directory, args.board->rank,
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

  // ---- storer warps ---------------------------------------------------------------------------

  __device__ void store(int warpgroup) {
    RingState<kTileSlots> tile_ring;
    uint32_t boxes = 0;
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) return;
      if (work.kind == Kind::kDown || threadIdx.x % 32 != 0) continue;
      const TilePlace tile = work.place;
      if (tile_rows(tile) > warpgroup * kBoxRows) {
        drain_boxes(
            shared.store[warpgroup], boxes, kGateUpColumns / 32, [&](int i, const void* box) {
              cute::SM90_TMA_STORE_2D::copy(&maps.act_store, box, tile.n * kGateUpColumns + i * 32,
                                            tile.m * kTileM + warpgroup * kBoxRows);
            });
      }
      fence_bulk_copies();
      add_release_device(&args.activated[tile.m], 1);
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

  // Rows of the tile that are not padding. A 64-row half of padding is not multiplied.
  __device__ int tile_rows(const TilePlace& tile) const {
    return min(kTileM, shared.row_end[tile.group] - tile.m * kTileM);
  }

  __device__ __forceinline__ void gate_up_tile(const TilePlace& tile, int warpgroup,
                                               RingState<kStages>& ring, uint32_t& boxes,
                                               float* acc) {
    if (tile_rows(tile) <= warpgroup * 64) return skip(shared.stages, ring, args.hidden / kBlockK);
    const int row = first_row() + tile.m * kTileM + warpgroup * 64 +
                    threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const float weight[2] = {args.row_weight[row], args.row_weight[row + 8]};
    multiply<Sharing::kCooperative, Major::K, Major::MN>(shared.stages, ring, warpgroup,
                                                         args.hidden / kBlockK, false, acc);
    // Columns 0-127 of the tile are gate, 128-255 up: a thread holds matching pairs.
    StoreQueue& queue = shared.store[warpgroup];
#pragma unroll
    for (int c = 0; c < kGateUpColumns / 32; ++c) {
      float* d = acc + 16 * c;
      swiglu(d, d + 64, weight);
      uint8_t* box = acquire_box(queue, boxes);
      fill_box(box, d);
      commit_box(queue, boxes);
    }
  }

  __device__ __forceinline__ void down_tile(const TilePlace& tile, int warpgroup,
                                            RingState<kStages>& ring, float* acc) {
    constexpr int kRowBlocks = Tile<kDownSharing>::kRowBlocks;
    const int k_blocks = args.intermediate / kBlockK;
    const bool half = tile_rows(tile) <= 64;
    if (kDownSharing == Sharing::kCooperative && half && warpgroup == 1) {
      return skip(shared.stages, ring, k_blocks);
    }
    if (kRowBlocks == 2 && half) {
      multiply<kDownSharing, Major::K, Major::MN, 1>(shared.stages, ring, warpgroup, k_blocks,
                                                     false, acc);
    } else {
      multiply<kDownSharing, Major::K, Major::MN>(shared.stages, ring, warpgroup, k_blocks, false,
                                                  acc);
    }
    const int warp = threadIdx.x % kWarpgroup / 32;
    const int first =
        tile.m * kTileM + warp * 16 + (kDownSharing == Sharing::kCooperative ? warpgroup * 64 : 0);
    uint8_t* buffer = shared.store[warpgroup].box[0] + warp * 2048;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      const int row = first + m * 64 + lane_here() % 16;
      const uint64_t target =
          row < shared.row_end[tile.group] ? args.row_target[first_row() + row] : 0;
      if (m == 0 || !half)
        push_rows<kDownN>(acc + m * (kDownN / 2), buffer, target, tile.n * kDownN, args.hidden);
    }
  }

  // All gate/up tiles come before all down tiles. Two loops, so that the accumulators and addresses
  // of one take no registers in the other; each loop's accumulators start defined for the same
  // reason.
  __device__ void consume(uint32_t warpgroup) {
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    uint32_t boxes = 0;
    {
      float acc[kAccumulators<Sharing::kCooperative>] = {};
      for (;; shared.tiles.next(tile_ring)) {
        const Work& work = shared.tiles.peek(tile_ring);
        if (work.kind != Kind::kGateUp) break;
        gate_up_tile(work.place, warpgroup, ring, boxes, acc);
      }
    }
    // From here on the boxes are the warps' own: the last stores have read them.
    acquire_box(shared.store[warpgroup], boxes);
    acquire_box(shared.store[warpgroup], boxes + 1);
    float acc[kAccumulators<kDownSharing>] = {};
    if (kDownSharing == Sharing::kPingPong) Turns::start(warpgroup, tile_ring.count % 2);
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) break;
      if (kDownSharing == Sharing::kPingPong && tile_ring.count % 2 != warpgroup) {
        ring.advance(args.intermediate / kBlockK);
      } else {
        down_tile(work.place, warpgroup, ring, acc);
      }
    }
    __threadfence_system();
  }
};

template <Sharing kDownSharing>
__global__ void __launch_bounds__(kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsMaps maps,
                   const __grid_constant__ ExpertsArgs args) {
  constexpr bool kPingPong = kDownSharing == Sharing::kPingPong;
  extern __shared__ __align__(1024) uint8_t raw[];
  ExpertsShared& shared = *reinterpret_cast<ExpertsShared*>(raw);
  Experts<kDownSharing> experts{maps, args, shared};
  if (args.round >= NumRounds(args.shape, args.plan)) return;
  if (threadIdx.x == 0) {
    shared.stages.init();
    for (auto& queue : shared.store) queue.init();
    shared.pull.init();
    shared.tiles.init(kConsumerWarpgroups * 4 + kConsumerWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  experts.read_window();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kPingPong ? 40 : 80>();
    if (warp == 0) {
      if (threadIdx.x == 0) experts.load();
    } else if (warp == 1) {
      Puller<1, ExpertsArgs>{args, shared.pull, experts.first_row()}.run();
    } else {
      experts.store(warp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kPingPong ? 232 : 208>();
    experts.consume(warp / 4 - 1);
  }
}

}  // namespace megamoe
