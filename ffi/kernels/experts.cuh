// The expert path of one round as one persistent kernel.
//
// 384 threads a CTA, one CTA an SM. The first warpgroup feeds: a loader thread (claims tiles, loads
// operands by TMA), a puller warp (fetches token rows from their owners), two storer warps (write
// activation tiles). The other two warpgroups multiply.
//
//   pull      x row of a source token -> every pool row that needs it     (puller, bulk copies)
//   gate/up   x_pool @ w_gate, w_up -> SwiGLU, times routing weight -> act_pool   (transposed)
//   down      act_pool @ w_down -> row segments pushed to the home rank's [slot][token] buffer
//
// All gate/up tiles are claimed before all down tiles, each by one atomic counter, so a tile only
// waits for tiles that a running CTA has claimed before it.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/tiles.h"
#include "ffi/kernels/sync.cuh"
#include "ffi/plan/plan.h"

namespace megamoe {

constexpr int kTileSlots = 4;
constexpr int kPullStages = 3;
constexpr int kPullBytes = 4096;
constexpr int kPullEntries = 4;  // source tokens claimed at a time, at most
constexpr Sharing kSharing = Sharing::kPingPong;
constexpr int kWide = Tile<kSharing>::kN;  // tokens of a gate/up tile, columns of a down tile
constexpr int kGateUpColumns = 64;         // columns of a gate/up tile
// Rows are counted in and handed on in blocks; the tiles of both products are made of whole blocks.
constexpr int kBlockRows = 64;

struct ExpertsMaps {
  CUtensorMap x_pool, gate, up, act_store, act_pool, down;
};

struct ExpertsArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  char* x_pool;
  const float* row_weight;
  const uint64_t* row_target;
  int32_t* arrived;
  int32_t* activated;
  int32_t hidden, intermediate;
  int32_t round;
  float swiglu_limit;
};

enum class Kind : int32_t { kGateUp, kDown, kEnd };

struct Work {
  Kind kind;
  int32_t group, column_tile;
  int32_t row, rows;  // in the pool; rows that are not padding
};

struct ExpertsShared {
  Stages<4, kWide> stages;
  StoreQueue store[kConsumerWarpgroups];
  alignas(128) uint8_t pull[kPullStages][kPullBytes];
  TransactionBarrier pulled[kPullStages];
  TileRing<Work, kTileSlots> tiles;
  // Of each expert's rows in this round, in rows from the round's first; then the first tile of
  // each product.
  int32_t row_begin[kMaxLocalExperts], row_end[kMaxLocalExperts];
  int32_t gate_up_start[kMaxLocalExperts + 1], down_start[kMaxLocalExperts + 1];
};
static_assert(sizeof(ExpertsShared) <= 232448);

// How a row is cut into pieces that fit a pull stage.
struct Pieces {
  int32_t row_bytes, count, bytes;

  __device__ explicit Pieces(int32_t hidden) {
    row_bytes = hidden * 2;
    count = (row_bytes + kPullBytes - 1) / kPullBytes;
    bytes = static_cast<int32_t>(AlignUp((row_bytes + count - 1) / count, 16));
  }
  __device__ int32_t size(int32_t piece) const {
    return piece + 1 < count ? bytes : row_bytes - (count - 1) * bytes;
  }
};

struct Experts {
  const ExpertsMaps& maps;
  const ExpertsArgs& args;
  ExpertsShared& shared;

  __device__ int first_row() const { return args.round * args.shape.capacity_rows; }
  __device__ int gate_up_columns() const { return args.intermediate / kGateUpColumns; }
  __device__ int down_columns() const { return (args.hidden + kWide - 1) / kWide; }

  // All threads.
  __device__ void read_window() {
    const int experts = args.shape.local_experts;
    const int capacity = args.shape.capacity_rows;
    for (int e = threadIdx.x; e < experts; e += kThreads) {
      const int begin = args.plan.expert_start[e] - first_row();
      shared.row_begin[e] = min(max(begin, 0), capacity);
      shared.row_end[e] = min(max(begin + args.plan.expert_rows[e], 0), capacity);
    }
    __syncthreads();
    const auto rows = [this](int e) { return max(shared.row_end[e] - shared.row_begin[e], 0); };
    if (threadIdx.x < 32) {
      sum_tiles<kWide>(experts, rows, shared.gate_up_start);
    } else if (threadIdx.x < 64) {
      sum_tiles<kTileM>(experts, rows, shared.down_start);
    }
    __syncthreads();
  }

  // ---- puller warp ----------------------------------------------------------------------------

  // One claim of pull entries: lane i holds entry i / K's source token and, for slot i % K, the
  // pool row of this round, or -1.
  struct Claim {
    int token, row;
  };

  __device__ Claim claim_entries(int per_claim, int total) {
    const int lane = threadIdx.x % 32, top_k = args.shape.top_k;
    int first = 0;
    if (lane == 0) first = atomicAdd(&args.board->pull_claim, per_claim);
    first = __shfl_sync(~0u, first, 0);
    const int entry = first + lane / top_k;
    Claim claim{-1, -1};
    if (lane / top_k < per_claim && entry < total) {
      claim.token = args.plan.pull[entry];
      const int row = args.plan.row_of[int64_t{claim.token} * top_k + lane % top_k] - first_row();
      if (row >= 0 && row < args.shape.capacity_rows) claim.row = row;
    }
    return claim;
  }

  __device__ void pull() {
    const int lane = threadIdx.x % 32, top_k = args.shape.top_k;
    const int per_claim = min(kPullEntries, 32 / top_k);
    const int total = args.plan.pull_start[args.shape.local_experts];
    const Pieces pieces(args.hidden);

    Claim claim = claim_entries(per_claim, total);
    Claim next = claim_entries(per_claim, total);
    int entry = 0, piece = 0;
    int target[kPullStages];  // this lane's pool row for the stage's piece, or -1
    int which[kPullStages];   // the piece, -1: the stage is idle
    uint32_t phase = 0;

    // Starts the next piece into a stage that nothing reads any more.
    const auto fetch = [&](int stage) {
      const int token = __shfl_sync(~0u, claim.token, entry * top_k);
      which[stage] = token >= 0 ? piece : -1;
      target[stage] = lane / top_k == entry ? claim.row : -1;
      if (token < 0) return;
      if (lane == 0) {
        const int source = token / args.shape.tokens;
        const char* from = static_cast<const char*>(args.board->x[source]) +
                           int64_t{token - source * args.shape.tokens} * pieces.row_bytes +
                           piece * pieces.bytes;
        shared.pulled[stage].arrive_and_expect_tx(pieces.size(piece));
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&shared.pulled[stage]),
                                       shared.pull[stage], pieces.size(piece));
      }
      if (++piece < pieces.count) return;
      piece = 0;
      if (++entry < per_claim) return;
      entry = 0;
      claim = next;
      next = claim_entries(per_claim, total);
    };
    // Tells the loaders that this lane's row has one more piece.
    const auto announce = [&](int stage) {
      if (which[stage] >= 0 && target[stage] >= 0) {
        fence_bulk_copies();
        add_release_device(&args.arrived[target[stage] / kBlockRows], 1);
      }
    };

#pragma unroll
    for (int stage = 0; stage < kPullStages; ++stage) which[stage] = target[stage] = -1;
#pragma unroll
    for (int stage = 0; stage < kPullStages - 1; ++stage) fetch(stage);
    for (bool busy = true; busy; phase ^= 1) {
#pragma unroll
      for (int stage = 0; stage < kPullStages; ++stage) {
        constexpr int kBack = kPullStages - 1;
        const int previous = (stage + kBack) % kPullStages;
        if (which[stage] >= 0) {
          shared.pulled[stage].wait(phase);
          if (target[stage] >= 0) {
            cute::SM90_BULK_COPY_S2G::copy(shared.pull[stage],
                                           args.x_pool + int64_t{target[stage]} * pieces.row_bytes +
                                               which[stage] * pieces.bytes,
                                           pieces.size(which[stage]));
          }
        }
        cute::tma_store_arrive();
        // The previous stage's piece is in the pool; its stage is free.
        wait_bulk_stores<1>();
        __syncwarp();
        announce(previous);
        busy = which[stage] >= 0;
        fetch(previous);
      }
    }
    wait_bulk_stores<0>();
  }

  // ---- loader thread --------------------------------------------------------------------------

  __device__ Work place_work(int index) const {
    const int experts = args.shape.local_experts;
    const int gate_up = shared.gate_up_start[experts] * gate_up_columns();
    const bool down = index >= gate_up;
    const int32_t* starts = down ? shared.down_start : shared.gate_up_start;
    const int columns = down ? down_columns() : gate_up_columns();
    if (down) index -= gate_up;
    if (index >= starts[experts] * columns) return {Kind::kEnd, 0, 0, 0, 0};
    const TilePlace place = place_tile(starts, experts, columns, index);
    const int tile_rows = down ? kTileM : kWide;
    const int row = shared.row_begin[place.group] + (place.m - starts[place.group]) * tile_rows;
    return {down ? Kind::kDown : Kind::kGateUp, place.group, place.n, row,
            min(tile_rows, shared.row_end[place.group] - row)};
  }

  // Calls f(counter, wanted, block) for every block of rows that the tile waits for.
  template <class F>
  __device__ void each_awaited(const Work& work, const Pieces& pieces, const F& f) const {
    for (int row = 0; row < work.rows; row += kBlockRows) {
      const int block = (work.row + row) / kBlockRows;
      if (work.kind == Kind::kDown) {
        f(&args.activated[block], gate_up_columns(), block);
      } else {
        f(&args.arrived[block], min(kBlockRows, work.rows - row) * pieces.count, block);
      }
    }
  }

  __device__ void load_stage(const Work& work, int kb, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    uint8_t* a = shared.stages.a[stage];
    uint8_t* b = shared.stages.b[stage];
    const int k = kb * kBlockK;
    using Load3 = cute::SM90_TMA_LOAD_3D;
    using Load4 = cute::SM90_TMA_LOAD_4D;
    shared.stages.full[stage].arrive_and_expect_tx(kStageBytesA + decltype(shared.stages)::kBytesB);
    if (work.kind == Kind::kDown) {
      Load3::copy(&maps.act_pool, bar, 0, a, k, work.row, 0);
      Load4::copy(&maps.down, bar, 0, b, 0, k, work.column_tile * (kWide / 64), work.group);
    } else {
      Load4::copy(&maps.gate, bar, 0, a, 0, k, work.column_tile, work.group);
      Load4::copy(&maps.up, bar, 0, a + kStageBytesA / 2, 0, k, work.column_tile, work.group);
      Load3::copy(&maps.x_pool, bar, 0, b, k, work.row, 0);
    }
  }

  // Claims and places the next tile while the current one is being loaded, when the ring is full
  // and there is time: at a tile's end the consumers would wait for it.
  __device__ void load() {
    const Pieces pieces(args.hidden);
    RingState<decltype(shared.stages)::kStages> ring;
    RingState<kTileSlots> tile_ring;
    Work next = place_work(atomicAdd(&args.board->tile_claim, 1));
    bool next_ready = false;
    for (;;) {
      const Work work = next;
      shared.tiles.push(tile_ring, work);
      if (work.kind == Kind::kEnd) return;
      const bool down = work.kind == Kind::kDown;
      const int index = atomicAdd(&args.board->tile_claim, 1);
      if (!next_ready) {
        each_awaited(work, pieces, [&](const int32_t* counter, int wanted, int block) {
          wait_for_count(counter, wanted, args.directory, args.board->rank,
                         down ? Phase::kDown : Phase::kGateUp, block);
        });
        fence_bulk_copies();
      }
      const int k_blocks = (down ? args.intermediate : args.hidden) / kBlockK;
      const int look_ahead = min(decltype(shared.stages)::kStages, k_blocks - 1);
      for (int kb = 0; kb < k_blocks; ++kb) {
        if (kb == look_ahead) {
          next = place_work(index);
          next_ready = next.kind != Kind::kEnd;
          each_awaited(next, pieces, [&](const int32_t* counter, int wanted, int) {
            next_ready = next_ready && load_acquire_device(counter) >= wanted;
          });
          fence_bulk_copies();
        }
        shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
        load_stage(work, kb, ring.index());
        ring.advance();
      }
    }
  }

  // ---- storer warps ---------------------------------------------------------------------------

  __device__ void store(uint32_t warpgroup) {
    RingState<kTileSlots> tile_ring;
    uint32_t boxes = 0;
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) return;
      if (work.kind == Kind::kDown || tile_ring.count % 2 != warpgroup) continue;
      if (threadIdx.x % 32 != 0) continue;
      const int count = (work.rows + kTransposedRows - 1) / kTransposedRows;
      drain_boxes(shared.store[warpgroup], boxes, count, [&](int i, const void* box) {
        cute::SM90_TMA_STORE_2D::copy(&maps.act_store, box, work.column_tile * kGateUpColumns,
                                      work.row + i * kTransposedRows);
      });
      fence_bulk_copies();
      for (int row = 0; row < work.rows; row += kBlockRows) {
        add_release_device(&args.activated[(work.row + row) / kBlockRows], 1);
      }
    }
  }

  // ---- consumer warpgroups --------------------------------------------------------------------

  // out = silu(gate) * up * weight, clamped first where a limit is set. `weight` is that of the
  // first of this thread's tokens. The accumulators are not written: wgmma alone may do that.
  __device__ __forceinline__ void swiglu(const float* gate, const float* up, const float* weight,
                                         float (&out)[16]) const {
    const bool limited = args.swiglu_limit < INFINITY;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float2 w = *reinterpret_cast<const float2*>(weight + 8 * b);
#pragma unroll
      for (int i = 4 * b; i < 4 * b + 4; i += 2) {
        float g[2] = {gate[i], gate[i + 1]}, u[2] = {up[i], up[i + 1]}, s[2];
        if (limited) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            // Comparisons that a NaN fails, so that it passes through.
            g[j] = g[j] > args.swiglu_limit ? args.swiglu_limit : g[j];
            u[j] = u[j] > args.swiglu_limit ? args.swiglu_limit : u[j];
            u[j] = u[j] < -args.swiglu_limit ? -args.swiglu_limit : u[j];
          }
        }
        sigmoid2(g[0], g[1], s[0], s[1]);
        out[i] = g[0] * (s[0] * (u[0] * w.x));
        out[i + 1] = g[1] * (s[1] * (u[1] * w.y));
      }
    }
  }

  __device__ __forceinline__ void gate_up_tile(const Work& work, uint32_t warpgroup,
                                               RingState<decltype(shared.stages)::kStages>& ring,
                                               uint32_t& boxes, float* acc) {
    const auto multiply_tokens = [&](auto tokens) {
      multiply<kSharing, Major::MN, Major::K, 2, tokens>(shared.stages, ring, warpgroup,
                                                         args.hidden / kBlockK, false, acc);
    };
    if (work.rows > 128) {
      multiply_tokens(std::integral_constant<int, 192>{});
    } else if (work.rows > 64) {
      multiply_tokens(std::integral_constant<int, 128>{});
    } else {
      multiply_tokens(std::integral_constant<int, 64>{});
    }
    // A thread's tokens of a block of 8 are 2 (lane % 4) and the next.
    const float* weight = args.row_weight + first_row() + work.row + lane_here() % 4 * 2;
    StoreQueue& queue = shared.store[warpgroup];
#pragma unroll
    for (int c = 0; c < kWide / kTransposedRows; ++c) {
      if (c * kTransposedRows >= work.rows) continue;
      float out[16];
      swiglu(acc + 16 * c, acc + kWide / 2 + 16 * c, weight + c * kTransposedRows, out);
      uint8_t* box = acquire_box(queue, boxes);
      fill_transposed_box(box, out);
      commit_box(queue, boxes);
    }
  }

  // Pushes 64 accumulator rows to their homes. `target` is, in lanes 0-15, the address of the
  // return row of each of the warp's rows, 0 for padding; `buffer` is 2 KB of this warp.
  __device__ __forceinline__ void push_rows(const float* d, uint8_t* buffer, uint64_t target,
                                            int column) {
    const int lane = lane_here();
    const auto at = [buffer](int row, int chunk) {
      return buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
    };
#pragma unroll
    for (int c = 0; c < kWide / 64; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_16_columns(d + 32 * c + 8 * j, at(fragment_row(lane), 2 * j + fragment_chunk(lane)));
      }
      __syncwarp();
      const bool inside = column + 64 * c < args.hidden;  // hidden is a multiple of 64
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * i + lane / 8;
        const uint64_t to = __shfl_sync(~0u, target, row);
        const uint4 value = *reinterpret_cast<const uint4*>(at(row, lane % 8));
        if (inside && to != 0) {
          *reinterpret_cast<uint4*>(to + (column + 64 * c + lane % 8 * 8) * 2) = value;
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void down_tile(const Work& work, uint32_t warpgroup,
                                            RingState<decltype(shared.stages)::kStages>& ring,
                                            float* acc) {
    const int k_blocks = args.intermediate / kBlockK;
    if (work.rows > 64) {
      multiply<kSharing, Major::K, Major::MN>(shared.stages, ring, warpgroup, k_blocks, false, acc);
    } else {
      multiply<kSharing, Major::K, Major::MN, 1>(shared.stages, ring, warpgroup, k_blocks, false,
                                                 acc);
    }
    const int warp = threadIdx.x % kWarpgroup / 32;
    uint8_t* buffer = shared.store[warpgroup].box[0] + warp * 2048;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = m * 64 + warp * 16 + lane_here() % 16;
      const uint64_t target = row < work.rows ? args.row_target[first_row() + work.row + row] : 0;
      if (m * 64 < work.rows) {
        push_rows(acc + m * (kWide / 2), buffer, target, work.column_tile * kWide);
      }
    }
  }

  // The warpgroups take the tiles in turn. All gate/up tiles come before all down tiles: two loops,
  // so that each has accumulators of its own and the compiler never moves them.
  __device__ void consume(uint32_t warpgroup) {
    RingState<decltype(shared.stages)::kStages> ring;
    RingState<kTileSlots> tile_ring;
    uint32_t boxes = 0;
    Turns::start(warpgroup, 0);
    {
      float acc[kAccumulators<kSharing>] = {};
      for (;; shared.tiles.next(tile_ring)) {
        const Work& work = shared.tiles.peek(tile_ring);
        if (work.kind != Kind::kGateUp) break;
        if (tile_ring.count % 2 != warpgroup) {
          ring.advance(args.hidden / kBlockK);
        } else {
          gate_up_tile(work, warpgroup, ring, boxes, acc);
        }
      }
    }
    // From here on the boxes are the warps' own: the last stores have read them.
    acquire_box(shared.store[warpgroup], boxes);
    acquire_box(shared.store[warpgroup], boxes + 1);
    float acc[kAccumulators<kSharing>] = {};
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) break;
      if (tile_ring.count % 2 != warpgroup) {
        ring.advance(args.intermediate / kBlockK);
      } else {
        down_tile(work, warpgroup, ring, acc);
      }
    }
    __threadfence_system();
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
    for (auto& queue : shared.store) queue.init();
    for (auto& barrier : shared.pulled) barrier.init(1);
    shared.tiles.init(kConsumerWarpgroups * 4 + kConsumerWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  experts.read_window();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) {
      if (threadIdx.x == 0) experts.load();
    } else if (warp == 1) {
      experts.pull();
    } else {
      experts.store(warp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    experts.consume(warp / 4 - 1);
  }
}

}  // namespace megamoe
