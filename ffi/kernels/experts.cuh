// The expert path of one round as one persistent kernel.
//
// 384 threads a CTA, one CTA an SM. The first warpgroup feeds: a placing thread (claims tiles,
// waits for their operands), a loader thread (loads them by TMA), a puller warp (fetches token rows
// from other ranks) and a copying warp (this rank's own rows; the puller helps when it is done).
// The other two warpgroups multiply and store.
//
//   pull      x row of a source token -> every pool row that needs it     (puller, bulk copies)
//   copy      x rows of this rank's tokens -> pool rows, in their order
//   gate/up   x_pool @ w_gate, w_up -> SwiGLU, times routing weight -> act_pool: a gate tile, then
//             the up tile of the same place, whose epilogue needs the gates
//   down      act_pool @ w_down -> row segments pushed to the home rank's [slot][token] buffer
//
// Each product's tiles are claimed in order, by an atomic counter, so a tile only waits for tiles
// that a running CTA has claimed before it. (A push may also wait for its CTA's next tile, but no
// other CTA waits for a push.) Both products are at work all the time (Claims in
// ffi/plan/tile_order.h): in the down projection alone the pushes would be more than a link
// carries.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <climits>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/tiles.h"
#include "ffi/kernels/announce.cuh"
#include "ffi/kernels/pull.cuh"
#include "ffi/kernels/push.cuh"
#include "ffi/kernels/sync.cuh"
#include "ffi/kernels/timeline.cuh"
#include "ffi/plan/plan.h"
#include "ffi/plan/tile_order.h"

namespace megamoe {

// Claims of own rows by each consumer warp before it multiplies: all of them together are more rows
// than the CTAs' first tiles have in the layers of Qwen3-MoE.
constexpr int kFirstClaims = 2;
// Gate/up tiles, for each CTA, that have been claimed after those that a down tile needs: about as
// many are being multiplied or wait in the CTAs' rings. On H200, 3 gave the same times.
constexpr int kLeadTiles = 2;

struct ExpertsMaps {
  CUtensorMap x_pool, gate, up, act_pool, down, act_blocks;
};

struct ExpertsArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  int32_t* own_claim;  // the board's; derived here, it would keep a register in the main loops
  PullSource source[1];
  const float* row_weight;
  const uint64_t* row_target;
  int32_t* activated;
  int32_t hidden, intermediate;
  int32_t round;
  float swiglu_limit;
};

enum class Kind : int32_t { kGate, kUp, kDown, kNothing, kEnd };

struct Work {
  Kind kind;
  TilePlace place;
  int32_t rows, columns;  // from the tile's first that are not padding
};

struct ExpertsShared {
  Stages stages;
  WarpBuffers buffers;
  RowFacts facts;
  PullBuffers pull;
  TileRing<Work> tiles;
  // Of the round's window, in tiles and rows from its first.
  int32_t tile_start[kMaxLocalExperts + 1];
  int32_t row_end[kMaxLocalExperts];
};

static_assert(sizeof(ExpertsShared) <= 232448);

struct Experts {
  const ExpertsMaps& maps;
  const ExpertsArgs& args;
  ExpertsShared& shared;

  __device__ int first_row() const { return args.round * args.shape.capacity_rows; }
  __device__ int gate_up_columns() const { return column_tiles(args.intermediate); }

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

  // ---- placing thread -------------------------------------------------------------------------

  struct Counters {
    Board* board;
    __device__ int first() const { return atomicAdd(&board->tile_claim, 1); }
    __device__ int second() const { return atomicAdd(&board->down_claim, 1); }
    __device__ int first_claimed() const { return load_acquire_device(&board->tile_claim); }
  };

  __device__ Work claim(Claims<Counters>& claims) const {
    bool down;
    TilePlace place;
    if (!claims.next(&down, &place)) return {Kind::kEnd, {}, 0, 0};
    return {down ? Kind::kDown : Kind::kGate, place,
            min(kTileM, shared.row_end[place.group] - place.m * kTileM),
            columns_of_tile(down ? args.hidden : args.intermediate, place.n)};
  }

  __device__ void wait_for_operands(const Work& work, const Pieces& pieces) const {
    const int m = work.place.m;
    if (work.kind == Kind::kDown) {
      wait_for_count(&args.activated[m], gate_up_columns() * kTileWarps, args.directory,
                     *args.board, Phase::kDown, m);
    } else {
      wait_for_count(&args.source[0].arrived[m], work.rows * pieces.count, args.directory,
                     *args.board, Phase::kGateUp, m);
    }
    fence_bulk_copies();
  }

  // Claims tiles and hands them on once their operands are there.
  __device__ void place() {
    const Pieces pieces(args.hidden);
    RingState<kTileSlots> tile_ring;
    const int ctas = static_cast<int>(gridDim.x);
    Claims<Counters> claims({args.board}, shared.tile_start, args.shape.local_experts,
                            gate_up_columns(), column_tiles(args.hidden), kLeadTiles * ctas,
                            blockIdx.x % kSecondShare == 0);
    for (;;) {
      Work work = claim(claims);
      // Gate tiles are warpgroup 0's; the last tile is warpgroup 1's (GateExchange::release).
      if (work.kind != Kind::kDown && tile_ring.count % 2 == 1) {
        shared.tiles.push(tile_ring, {Kind::kNothing, {}, 0, 0});
      }
      if (work.kind != Kind::kEnd) wait_for_operands(work, pieces);
      shared.tiles.push(tile_ring, work);
      if (work.kind == Kind::kEnd) return;
      if (work.kind != Kind::kGate) continue;
      work.kind = Kind::kUp;
      shared.tiles.push(tile_ring, work);
    }
  }

  __device__ int k_blocks(Kind kind) const {
    if (kind == Kind::kNothing) return 0;
    return (kind == Kind::kDown ? args.intermediate : args.hidden) / kBlockK;
  }

  // ---- loader thread --------------------------------------------------------------------------

  __device__ void load_stage(const Work& work, int kb, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    uint8_t* a = shared.stages.a[stage];
    uint8_t* b = shared.stages.b[stage];
    const TilePlace& tile = work.place;
    // The up tile goes through the depth backwards: what the gate tile has just read of the rows is
    // still in L2. On H200 the 30B layer's kernel so read 6% less from memory.
    const int k = (work.kind == Kind::kUp ? k_blocks(work.kind) - 1 - kb : kb) * kBlockK;
    const int row = tile.m * kTileM;
    using Load3 = cute::SM90_TMA_LOAD_3D;
    using Load4 = cute::SM90_TMA_LOAD_4D;
    shared.stages.full[stage].arrive_and_expect_tx(kStageBytesA + kStageBytesB);
    Load3::copy(work.kind == Kind::kDown ? &maps.act_pool : &maps.x_pool, bar, 0, a, k, row, 0);
    Load4::copy(work.kind == Kind::kGate ? &maps.gate
                : work.kind == Kind::kUp ? &maps.up
                                         : &maps.down,
                bar, 0, b, 0, k, tile.n * (kTileN / 64), tile.group);
  }

  __device__ void load() {
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    for (;; shared.tiles.next_of_thread(tile_ring)) {
      const Work work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) return;
      const int blocks = k_blocks(work.kind);
      for (int kb = 0; kb < blocks; ++kb) {
        shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
        load_stage(work, kb, ring.index());
        ring.advance();
      }
    }
  }

  // ---- consumer warpgroups --------------------------------------------------------------------

  // gate = gate * sigmoid(gate) * up * weight, clamped first by the limit, which may be infinite;
  // weight[h] is of the rows of values 2 h, 2 h + 1 in each four. A NaN passes through.
  __device__ __forceinline__ void swiglu(float (&gate)[8], const float* up,
                                         const float (&weight)[2]) const {
    const float limit = args.swiglu_limit;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float g = min_or_nan(gate[i], limit);
      const float u = max_or_nan(min_or_nan(up[i], limit), -limit);
      gate[i] = g * sigmoid(g) * (u * weight[i / 2 % 2]);
    }
  }

  // Multiplies a tile over `depth` columns of rows; returns its work, read again.
  template <class Taken = Nothing>
  __device__ __forceinline__ const Work& multiply_tile(uint32_t warpgroup, int depth,
                                                       RingState<kTileSlots>& tile_ring,
                                                       RingState<kStages>& ring, float* acc,
                                                       const Taken& taken = {}) const {
    const Work& work = shared.tiles.here(tile_ring);
    multiply<Major::K, Major::MN>(shared.stages, ring, warpgroup, work.rows, work.columns, depth,
                                  acc, taken);
    return shared.tiles.here(tile_ring);
  }

  // Warpgroup 0.
  __device__ __forceinline__ void gate_tile(RingState<kTileSlots>& tile_ring,
                                            RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    multiply_tile(0, args.hidden, tile_ring, ring, acc);
    GateExchange::wait_until_free();
    GateExchange::give(shared.buffers, acc);
  }

  // Of the tile at hand, whose rows have these facts.
  template <class Fact>
  __device__ __forceinline__ void fetch_facts(RingState<kTileSlots>& tile_ring,
                                              const Fact* of_rows) const {
    shared.facts.fetch(of_rows + first_row() + shared.tiles.here(tile_ring).place.m * kTileM);
  }

  // Warpgroup 1.
  __device__ __forceinline__ void up_tile(RingState<kTileSlots>& tile_ring,
                                          RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    fetch_facts(tile_ring, args.row_weight);
    const Work& work =
        multiply_tile(1, args.hidden, tile_ring, ring, acc, [] { GateExchange::release(); });
    RowFacts::wait();
    GateExchange::wait_until_full();
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      const float* weights = shared.facts.here<float>(m) + lane_here() / 4;
      const float weight[2] = {weights[0], weights[8]};
#pragma unroll
      for (int c = 0; c < kTileN / 64; ++c) {
        const int b = m * (kTileN / 64) + c;
        uint8_t* block = GateExchange::block(shared.buffers, b);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float gate[8];
          load_16_columns(block, j, gate);
          swiglu(gate, acc + 32 * b + 8 * j, weight);
          store_16_columns(gate, fragment(block, j));
        }
        store_block(maps.act_blocks, block, work.place.n * kTileN + 64 * c,
                    work.place.m * kTileM + first_of_block(m),
                    m * 64 < work.rows && 64 * c < work.columns);
      }
    }
    announce(&args.activated[work.place.m]);
  }

  __device__ __forceinline__ void down_tile(RingState<kTileSlots>& tile_ring,
                                            RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    fetch_facts(tile_ring, args.row_target);
    const Work& work = multiply_tile(warpgroup_here(), args.intermediate, tile_ring, ring, acc, [] {
      if (warpgroup_here() == 1) GateExchange::release();
    });
    RowFacts::wait();
    if (warpgroup_here() == 0) GateExchange::wait_until_free();
    push_tile(acc, shared.buffers, shared.facts, work.rows, work.place.n * kTileN, work.columns);
  }

  // The warpgroups take tiles in turn.
  __device__ void consume(uint32_t warpgroup) {
    mark(0);
    copy_own_rows<1, 8>(args, first_row(), kFirstClaims);
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    Turns::start(warpgroup);
    shared.tiles.peek(tile_ring);  // the first rows are here
    mark(1);
    for (;; shared.tiles.next(tile_ring)) {
      const Kind kind = shared.tiles.peek(tile_ring).kind;
      if (kind == Kind::kEnd) break;
      if (tile_ring.count % 2 != warpgroup_here()) {
        ring.advance(k_blocks(kind));
        continue;
      }
      if (kind == Kind::kGate) {
        gate_tile(tile_ring, ring);
      } else if (kind == Kind::kUp) {
        up_tile(tile_ring, ring);
      } else if (kind == Kind::kDown) {
        down_tile(tile_ring, ring);
      } else {
        Turns::take(1);
        GateExchange::release();
        Turns::pass(1);
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
  if (args.round >= num_rounds(args.shape, args.plan)) return;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.pull.init();
    shared.tiles.init();
    cutlass::arch::fence_barrier_init();
  }
  experts.read_window();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (threadIdx.x == 0) experts.load();
    if (threadIdx.x == 64) experts.place();
    if (warp == 1) Puller<1, ExpertsArgs>{args, shared.pull, experts.first_row()}.run();
    if (warp % 2 == 1) copy_own_rows<1, 4>(args, experts.first_row(), INT_MAX);
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    experts.consume(warp / 4 - 1);
  }
}

}  // namespace megamoe
