// The backward pass of one round as one persistent kernel, organised as the forward one
// (experts.cuh): a placing and a loader thread, a puller warp, two multiplying and storing
// warpgroups; and a warp that combines, with the puller's when that is done.
//
//   pull         x and dy rows -> pools; the first of this rank's own the consumers copy
//   recompute    x_pool @ w_gate, w_up                     -> gate_pool, up_pool
//   hidden grad  dA = dy_pool @ w_down^T; with g and u from the pools:
//                A' = w silu(g) u -> act_pool, dG -> gate_pool, dU -> up_pool,
//                parts of the routing-weight gradient <dA, silu(g) u> of each row
//   input grad   dG @ w_gate^T + dU @ w_up^T -> row segments pushed to the home rank
//   weight grad  x^T dG, x^T dU, A'^T dy over an expert's rows; no communication, so it covers the
//                return of the input gradients
//   combine      meanwhile: the sum of a token's input gradients, once all ranks have pushed theirs
//
// All tiles of one product are claimed before those of the next. Rows beyond an expert's last are
// zero up to the next multiple of 16 in every pool, because the weight gradient contracts over
// them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <climits>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/gemm/tiles.h"
#include "ffi/kernels/announce.cuh"
#include "ffi/kernels/combine.cuh"
#include "ffi/kernels/pull.cuh"
#include "ffi/kernels/push.cuh"
#include "ffi/kernels/sync.cuh"
#include "ffi/kernels/timeline.cuh"
#include "ffi/plan/plan.h"
#include "ffi/plan/tile_order.h"

namespace megamoe {

// Named by operand and by the way it is read: rows (K-major) or columns (MN-major).
struct BackwardMaps {
  CUtensorMap x_rows, gate_columns, up_columns;                                // recompute
  CUtensorMap dy_rows, down_rows;                                              // hidden grad
  CUtensorMap gate_blocks, up_blocks;                                          // both
  CUtensorMap act_blocks;                                                      // hidden grad
  CUtensorMap gate_pool_rows, up_pool_rows;                                    // input grad
  CUtensorMap gate_rows, up_rows;                                              // input grad
  CUtensorMap x_columns, act_columns, dgate_columns, dup_columns, dy_columns;  // weight grad
  CUtensorMap dw_blocks[3];  // unless the weight gradients are f32
};

struct BackwardArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  // The board's; derived here, they would keep registers in the main loops.
  int32_t* own_claim;
  int32_t* hidden_grad_parts;
  int32_t* pushed_parts;
  PullSource source[2];  // x, dy
  const float* row_weight;
  const uint64_t* row_target;
  int32_t* gate_up_done;
  int32_t* hidden_grad_done;
  float* partial_dots;
  float* carried;  // [3][2][H, I] f32, down: [I, H]
  void* dw[3];
  Combine combine;
  int64_t board_offset;
  int32_t hidden, intermediate;
  int32_t round;
  float swiglu_limit;
  bool dw_is_f32;
};

// Whether the rows of expert e span rounds.
__device__ inline bool spans_rounds(const BackwardArgs& args, int e) {
  const int rows = args.plan.expert_rows[e], start = args.plan.expert_start[e];
  const int capacity = args.shape.capacity_rows;
  return rows > 0 && start / capacity != (start + rows - 1) / capacity;
}

// Where the weight gradients of expert e are carried from round to round, in fp32: -1 if its rows
// span none. Two slots in turn, because in one round one such expert may end and the next begin.
// A round's accumulators begin as those of the round before ended, so no bit depends on rounds.
__device__ inline int carried_slot(const BackwardArgs& args, int e) {
  if (!spans_rounds(args, e)) return -1;
  int before = 0;
  for (int other = 0; other < e; ++other) before += spans_rounds(args, other);
  return before % 2;
}

struct Backward {
  enum class Kind : int32_t { kRecompute, kHiddenGrad, kInputGrad, kWeightGrad, kEnd, kNothing };

  struct Work {
    Kind kind;
    int32_t group, m, n;
    int32_t row, rows;  // of the pools
    int32_t columns;    // from the tile's first that are not padding
    int32_t k_blocks;
    int32_t matrix;  // 0 gate, 1 up, 2 down
    // Weight grad: where the gradient of an expert whose rows span rounds is carried, or -1;
    // whether an earlier round has begun it.
    int32_t carried;
    bool continues;
  };

  struct Shared {
    Stages stages;
    WarpBuffers buffers;
    RowFacts facts;
    PullBuffers pull;
    // Of a hidden grad tile's gates and ups, into the buffers.
    TransactionBarrier fetched[kConsumerWarps];
    TileRing<Work> tiles;
    // In rows and tiles from the first of the round.
    int32_t tile_start[kMaxLocalExperts + 1];
    int32_t row_start[kMaxLocalExperts];
    int32_t rows[kMaxLocalExperts];
    int8_t carried[kMaxLocalExperts];
    int32_t ending;  // the loader has no more tiles
  };

  const BackwardMaps& maps;
  const BackwardArgs& args;
  Shared& shared;

  __device__ int first_row() const { return args.round * args.shape.capacity_rows; }
  // Column tiles of matrices with H and with I columns.
  __device__ int hidden_columns() const { return column_tiles(args.hidden); }
  __device__ int intermediate_columns() const { return column_tiles(args.intermediate); }

  __device__ void read_window() {
    const int experts = args.shape.local_experts;
    const int capacity = args.shape.capacity_rows;
    for (int e = threadIdx.x; e <= experts; e += kThreads) {
      const int start = args.plan.expert_start[e] - first_row();
      shared.tile_start[e] = min(max(start, 0), capacity) / kTileM;
      if (e == experts) continue;
      shared.row_start[e] = start;
      shared.rows[e] = args.plan.expert_rows[e];
      shared.carried[e] = static_cast<int8_t>(carried_slot(args, e));
    }
  }

  // ---- placing thread -------------------------------------------------------------------------

  // A tile of `matrices` results side by side, which have `columns` columns each; `depth` is that
  // of the contraction.
  __device__ Work row_work(Kind kind, int matrices, int columns, int depth, int index) const {
    const int tiles = column_tiles(columns);
    const TilePlace place =
        place_tile(shared.tile_start, args.shape.local_experts, matrices * tiles, index);
    Work work{};
    work.kind = kind;
    work.group = place.group;
    work.m = place.m;
    work.matrix = place.n / tiles;
    work.n = place.n % tiles;
    work.row = place.m * kTileM;
    work.rows = min(kTileM, shared.row_start[work.group] + shared.rows[work.group] - work.row);
    work.columns = columns_of_tile(columns, work.n);
    work.k_blocks = depth / kBlockK;
    return work;
  }

  __device__ Work weight_work(int index) const {
    const int gate_m = (args.hidden + kTileM - 1) / kTileM;
    const int gate_tiles = gate_m * intermediate_columns();
    const int down_m = (args.intermediate + kTileM - 1) / kTileM;
    const int per_expert = 2 * gate_tiles + down_m * hidden_columns();
    const int e = index / per_expert;
    Work work{};
    work.kind = Kind::kEnd;
    work.group = e;
    if (e >= args.shape.local_experts) return work;
    int left = index - e * per_expert;
    work.matrix = min(left / gate_tiles, 2);
    left -= work.matrix * gate_tiles;
    const int m_tiles = work.matrix == 2 ? down_m : gate_m;
    work.m = left % m_tiles;
    work.n = left / m_tiles;
    work.columns = columns_of_tile(work.matrix == 2 ? args.hidden : args.intermediate, work.n);
    const int capacity = args.shape.capacity_rows;
    const int start = shared.row_start[e], end = start + shared.rows[e];
    work.row = max(start, 0);
    work.rows = max(min(end, capacity) - work.row, 0);
    work.k_blocks = (work.rows + kBlockK - 1) / kBlockK;
    work.carried = shared.carried[e];
    work.continues = start < 0;
    // An expert without rows gets its zeros in the first round.
    const bool here = work.rows > 0 || (shared.rows[e] == 0 && args.round == 0);
    work.kind = here ? Kind::kWeightGrad : Kind::kNothing;
    return work;
  }

  __device__ Work place_work(int index) const {
    const int tiles = shared.tile_start[args.shape.local_experts];
    const int h = args.hidden, i = args.intermediate;
    const int gate_up = 2 * tiles * intermediate_columns();
    if (index < gate_up) return row_work(Kind::kRecompute, 2, i, h, index);
    index -= gate_up;
    const int hidden_grad = tiles * intermediate_columns();
    if (index < hidden_grad) return row_work(Kind::kHiddenGrad, 1, i, h, index);
    index -= hidden_grad;
    const int input_grad = tiles * hidden_columns();
    if (index < input_grad) return row_work(Kind::kInputGrad, 1, h, 2 * i, index);
    return weight_work(index - input_grad);
  }

  // The next claim that has work.
  __device__ Work claimed_work() const {
    Work work;
    do {
      work = place_work(atomicAdd(&args.board->tile_claim, 1));
    } while (work.kind == Kind::kNothing);
    return work;
  }

  __device__ void wait_for(const int32_t* counters, const int32_t& tile, int wanted,
                           Phase phase) const {
    wait_for_count(&counters[tile], wanted, args.directory, *args.board, phase, tile);
  }

  // The weight gradients need all hidden grad tiles of an expert. They wait for those of all
  // experts, once, which are done long before: looking at each would take longer than loading.
  __device__ void wait_for_operands(const Work& work, const Pieces& pieces,
                                    bool& hidden_grads_done) const {
    switch (work.kind) {
      case Kind::kRecompute:
        wait_for(args.source[0].arrived, work.m, work.rows * pieces.count, Phase::kGateUp);
        break;
      case Kind::kHiddenGrad:
        wait_for(args.source[1].arrived, work.m, work.rows * pieces.count, Phase::kHiddenGrad);
        wait_for(args.gate_up_done, work.m, 2 * intermediate_columns() * kTileWarps,
                 Phase::kHiddenGrad);
        break;
      case Kind::kInputGrad:
        wait_for(args.hidden_grad_done, work.m, intermediate_columns() * kTileWarps,
                 Phase::kInputGrad);
        break;
      default:
        if (hidden_grads_done) return;
        wait_for(args.hidden_grad_parts, 0,
                 shared.tile_start[args.shape.local_experts] * intermediate_columns() * kTileWarps,
                 Phase::kWeightGrad);
        hidden_grads_done = true;
    }
    fence_bulk_copies();
  }

  // As in the forward pass.
  __device__ void place() {
    const Pieces pieces(args.hidden);
    RingState<kTileSlots> tile_ring;
    bool hidden_grads_done = false;
    for (;;) {
      const Work work = claimed_work();
      if (work.kind != Kind::kEnd) wait_for_operands(work, pieces, hidden_grads_done);
      shared.tiles.push(tile_ring, work);
      if (work.kind == Kind::kEnd) return;
    }
  }

  // ---- loader thread --------------------------------------------------------------------------

  __device__ void load_stage(const Work& work, int kb, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    uint8_t* a = shared.stages.a[stage];
    uint8_t* b = shared.stages.b[stage];
    using Load3 = cute::SM90_TMA_LOAD_3D;
    using Load4 = cute::SM90_TMA_LOAD_4D;
    const int k = kb * kBlockK;
    shared.stages.full[stage].arrive_and_expect_tx(kStageBytesA + kStageBytesB);
    switch (work.kind) {
      case Kind::kRecompute:
        Load3::copy(&maps.x_rows, bar, 0, a, k, work.row, 0);
        Load4::copy(work.matrix == 0 ? &maps.gate_columns : &maps.up_columns, bar, 0, b, 0, k,
                    work.n * (kTileN / 64), work.group);
        break;
      case Kind::kHiddenGrad:
        Load3::copy(&maps.dy_rows, bar, 0, a, k, work.row, 0);
        Load3::copy(&maps.down_rows, bar, 0, b, k, work.n * kTileN, work.group);
        break;
      case Kind::kInputGrad: {
        const bool up = k >= args.intermediate;
        const int column = up ? k - args.intermediate : k;
        Load3::copy(up ? &maps.up_pool_rows : &maps.gate_pool_rows, bar, 0, a, column, work.row, 0);
        Load3::copy(up ? &maps.up_rows : &maps.gate_rows, bar, 0, b, column, work.n * kTileN,
                    work.group);
        break;
      }
      default:
        Load4::copy(work.matrix == 2 ? &maps.act_columns : &maps.x_columns, bar, 0, a, 0,
                    work.row + k, work.m * (kTileM / 64), 0);
        Load4::copy(work.matrix == 0   ? &maps.dgate_columns
                    : work.matrix == 1 ? &maps.dup_columns
                                       : &maps.dy_columns,
                    bar, 0, b, 0, work.row + k, work.n * (kTileN / 64), 0);
    }
  }

  __device__ void load() {
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    for (;; shared.tiles.next_of_thread(tile_ring)) {
      const Work work = shared.tiles.peek(tile_ring);
      if (work.kind == Kind::kEnd) break;
      for (int kb = 0; kb < work.k_blocks; ++kb) {
        shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
        load_stage(work, kb, ring.index());
        ring.advance();
      }
    }
    atomicExch(&shared.ending, 1);
  }

  // ---- combining warps ------------------------------------------------------------------------

  __device__ bool last_round() const { return args.round + 1 >= num_rounds(args.shape, args.plan); }

  // By each consumer warp once it has pushed its last row of the round. The last of all CTAs tells
  // every rank.
  __device__ void finish_pushing() const {
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    const int parts = gridDim.x * kConsumerWarps;
    if (atomicAdd(args.pushed_parts, 1) + 1 < parts || !last_round()) return;
    __threadfence_system();
    for (int rank = 0; rank < args.shape.ranks; ++rank) {
      Board* board = reinterpret_cast<Board*>(args.board->block[rank] + args.board_offset);
      store_release_system(&board->pushed[args.board->rank], args.board->epoch);
    }
  }

  __device__ bool all_pushed() const {
    const int lane = threadIdx.x % 32;
    const bool here = lane >= args.shape.ranks ||
                      load_acquire_system(&args.board->pushed[lane]) >= args.board->epoch;
    const bool all = __all_sync(~0u, here);
    __syncwarp();  // orders memory, as a vote does not: what one lane has acquired, all may read
    return all;
  }

  __device__ bool ending() const {
    const int32_t here = threadIdx.x % 32 == 0 ? atomicAdd(&shared.ending, 0) : 0;
    return __shfl_sync(~0u, here, 0) != 0;
  }

  // Combines while the consumers are at the weight gradients, never longer: a peer may be late, and
  // combine_kernel does what is left.
  __device__ void combine() const {
    if (!last_round()) return;
    while (!all_pushed()) {
      if (ending()) return;
      __nanosleep(1000);
    }
    const int chunks = (args.combine.tokens + kCombineTokens - 1) / kCombineTokens;
    while (!ending()) {
      int chunk = 0;
      if (threadIdx.x % 32 == 0) chunk = atomicAdd(&args.board->combine_claim, 1);
      chunk = __shfl_sync(~0u, chunk, 0);
      if (chunk >= chunks) return;
      const int end = min((chunk + 1) * kCombineTokens, args.combine.tokens);
      for (int t = chunk * kCombineTokens; t < end; ++t) args.combine.token<4>(t);
    }
  }

  // ---- consumer warpgroups --------------------------------------------------------------------

  // Multiplies a tile of rows; returns its work, read again.
  template <Major kA, Major kB>
  __device__ __forceinline__ const Work& multiply_tile(RingState<kTileSlots>& tile_ring,
                                                       RingState<kStages>& ring, int depth,
                                                       float* acc) {
    const Work& work = shared.tiles.here(tile_ring);
    multiply<kA, kB>(shared.stages, ring, warpgroup_here(), work.rows, work.columns, depth, acc);
    return shared.tiles.here(tile_ring);
  }

  __device__ __forceinline__ void recompute_tile(RingState<kTileSlots>& tile_ring,
                                                 RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    const Work& work = multiply_tile<Major::K, Major::MN>(tile_ring, ring, args.hidden, acc);
    const bool up = work.matrix != 0;
    // With a limit, values beyond it are stored as infinities and others not beyond the largest
    // bf16 value up to it, so that rounding does not change which gradients pass. A NaN stays.
    const float limit = args.swiglu_limit, least = up ? -limit : -INFINITY;
    const float below = __uint_as_float(__float_as_uint(limit) & 0xffff0000u);
    const float above = up ? -below : -INFINITY;
    const auto mark_clamped = [&](float value) {
      const float inside = max_or_nan(min_or_nan(value, below), above);
      return value > limit ? INFINITY : value < least ? -INFINITY : inside;
    };
#pragma unroll
    for (int b = 0; b < kAccumulators / 32; ++b) {
      const int column = column_of_accumulators(b), row = row_of_accumulators(b);
      uint8_t* buffer = shared.buffers.here(b % kWarpBuffers);
      wait_for_buffer();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = mark_clamped(acc[32 * b + 8 * j + i]);
        store_16_columns(value, fragment(buffer, j));
      }
      store_block(up ? maps.up_blocks : maps.gate_blocks, buffer, work.n * kTileN + column,
                  work.row + row + first_of_block(0), row < work.rows && column < work.columns);
    }
    announce(&args.gate_up_done[work.m]);
  }

  // Backward of A' = w a with a = silu(g) u, for one value: turns g, u and d, the gradient of A'
  // over w, into their gradients and A'; returns its part of the routing weight's gradient, <d, a>.
  // With a limit l, g is min(g, l) and u is clamped to [-l, l]; no gradient passes a clamped value.
  template <bool kLimited>
  __device__ __forceinline__ float swiglu_backward(float& g, float& u, float& d,
                                                   float weight) const {
    const float limit = args.swiglu_limit;
    // Comparisons that a NaN fails, so that it passes through.
    const bool pass_g = !kLimited || !(g > limit);
    const bool pass_u = !kLimited || !(fabsf(u) > limit);
    const float g_in = pass_g ? g : limit, u_in = pass_u ? u : copysignf(limit, u);
    const float s = sigmoid(g_in), silu = g_in * s, a = silu * u_in;
    const float gradient = weight * d, dot = d * a;
    // silu'(g) = s (1 + g (1 - s))
    g = pass_g ? gradient * u_in * (s + s * (g_in - silu)) : 0.0f;
    u = pass_u ? gradient * silu : 0.0f;
    d = weight * a;
    return dot;
  }

  // A warp takes its part of a hidden grad tile in blocks of 16 rows and 64 columns, whose gates,
  // ups and results pass through its three buffers: g and u, in whose place their gradients leave,
  // and A'. A block's g and u come by TMA, those of the first while the tile is multiplied.
  static constexpr int kHiddenGradBlocks = kAccumulators / 32;
  static_assert(kWarpBuffers == 3);
  // A tile completes an even number of phases of the barrier, so that each begins at the same: one
  // for each block, and of at most 64 rows those of the first row block and of the block behind it.
  static_assert(kHiddenGradBlocks % 2 == 0 && kTileN / 64 % 2 == 1);

  __device__ __forceinline__ static bool is_inside(const Work& work, int b) {
    return row_of_accumulators(b) < work.rows && column_of_accumulators(b) < work.columns;
  }
  __device__ __forceinline__ TransactionBarrier& gate_up_fetched() {
    return shared.fetched[consumer_warp_here()];
  }

  // Lane 0: stores the results of block b - 1, if there is one, and fetches the gates and ups of
  // block b, if there is one.
  __device__ __forceinline__ void exchange_blocks(const Work& work, int b) {
    uint8_t* gate = shared.buffers.here(0);
    uint8_t* up = shared.buffers.here(1);
    uint8_t* act = shared.buffers.here(2);
    const int first_column = work.n * kTileN, first_row = work.row + first_of_block(0);
    const auto column = [&](int block) { return first_column + column_of_accumulators(block); };
    const auto row = [&](int block) { return first_row + row_of_accumulators(block); };
    if (b > 0) {
      if (is_inside(work, b - 1)) {
        using Store = cute::SM90_TMA_STORE_3D;
        Store::copy(&maps.gate_blocks, gate, column(b - 1), row(b - 1), 0);
        Store::copy(&maps.up_blocks, up, column(b - 1), row(b - 1), 0);
        Store::copy(&maps.act_blocks, act, column(b - 1), row(b - 1), 0);
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
    }
    if (b < kHiddenGradBlocks) {
      TransactionBarrier& fetched = gate_up_fetched();
      uint64_t* bar = reinterpret_cast<uint64_t*>(&fetched);
      if (is_inside(work, b)) {
        using Load = cute::SM90_TMA_LOAD_3D;
        fetched.arrive_and_expect_tx(2 * kBufferBytes);
        Load::copy(&maps.gate_blocks, bar, 0, gate, column(b), row(b), 0);
        Load::copy(&maps.up_blocks, bar, 0, up, column(b), row(b), 0);
      } else {
        fetched.arrive();
      }
    }
  }

  __device__ __forceinline__ void hidden_grad_tile(RingState<kTileSlots>& tile_ring,
                                                   RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    const Work& before = shared.tiles.here(tile_ring);
    shared.facts.fetch(args.row_weight + first_row() + before.row);
    if (lane_here() == 0) exchange_blocks(before, 0);
    const Work& work = multiply_tile<Major::K, Major::K>(tile_ring, ring, args.hidden, acc);
    RowFacts::wait();
    if (args.swiglu_limit < INFINITY) {
      hidden_grad_blocks<true>(work, acc);
    } else {
      hidden_grad_blocks<false>(work, acc);
    }
    announce(&args.hidden_grad_done[work.m], args.hidden_grad_parts);
  }

  // Of padding, the rows up to the next multiple of 16 are zeros in all pools and stay zeros. Those
  // behind it may hold anything, here and in the other products of rows: no row's values come from
  // other rows, what belongs to padding is not sent, and the weight gradients stop before it.
  template <bool kLimited>
  __device__ __forceinline__ void hidden_grad_blocks(const Work& work, float* acc) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      if (m * 64 >= work.rows) break;
      const int row = first_of_block(m) + lane_here() / 4;  // and 8 further
      float weight[2], dot[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weight[h] =
            row + 8 * h < work.rows ? shared.facts.here<float>(m)[lane_here() / 4 + 8 * h] : 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kTileN / 64; ++c) {
        const int b = m * (kTileN / 64) + c;
        gate_up_fetched().wait(b % 2);
        if (64 * c < work.columns) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float* d = acc + 32 * b + 4 * j;
            float g[4], u[4];
            load_8_columns(shared.buffers.here(0), j, g);
            load_8_columns(shared.buffers.here(1), j, u);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              dot[i / 2] += swiglu_backward<kLimited>(g[i], u[i], d[i], weight[i / 2]);
            }
            store_8_columns(g, shared.buffers.here(0), j);
            store_8_columns(u, shared.buffers.here(1), j);
            store_8_columns(d, shared.buffers.here(2), j);
          }
          cutlass::arch::fence_view_async_shared();
        }
        __syncwarp();
        if (lane_here() == 0) exchange_blocks(work, b + 1);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
        dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
        if (row + 8 * h < work.rows && lane_here() % 4 == 0) {
          args.partial_dots[int64_t{work.row + row + 8 * h} * intermediate_columns() + work.n] =
              dot[h];
        }
      }
    }
  }

  __device__ __forceinline__ void input_grad_tile(RingState<kTileSlots>& tile_ring,
                                                  RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    shared.facts.fetch(args.row_target + first_row() + shared.tiles.here(tile_ring).row);
    const Work& work =
        multiply_tile<Major::K, Major::K>(tile_ring, ring, 2 * args.intermediate, acc);
    RowFacts::wait();
    push_tile(acc, shared.buffers, shared.facts, work.rows, work.n * kTileN, work.columns);
  }

  // The accumulators with which the round before ended, if there was one, in place of zeros. (If
  // there was none, the addresses mean nothing.)
  __device__ __forceinline__ void load_carried(const Work& work, float* acc) const {
    const bool down = work.matrix == 2;
    const int rows = down ? args.intermediate : args.hidden;
    const int columns = down ? args.hidden : args.intermediate;
    const float* from = args.carried + (2 * work.matrix + work.carried) * int64_t{rows} * columns +
                        work.n * kTileN + lane_here() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      const int row = work.m * kTileM + first_of_block(m) + lane_here() / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* at = from + int64_t{row + 8 * h} * columns;
#pragma unroll
        for (int b = 0; b < kTileN / 8; ++b) {
          const bool wanted = work.continues && row < rows && 8 * b < work.columns;
          load_pair_if(wanted, at + 8 * b, acc + m * (kTileN / 2) + 4 * b + 2 * h);
        }
      }
    }
  }

  template <bool kRounds>
  __device__ __forceinline__ void weight_grad_tile(RingState<kTileSlots>& tile_ring,
                                                   RingState<kStages>& ring) {
    float acc[kAccumulators] = {};
    const Work& before = shared.tiles.here(tile_ring);
    if constexpr (kRounds) load_carried(before, acc);
    multiply<Major::MN, Major::MN, kRounds>(shared.stages, ring, warpgroup_here(), kTileM,
                                            before.columns, before.rows, acc);
    const Work& work = shared.tiles.here(tile_ring);
    const bool down = work.matrix == 2;
    const int rows = down ? args.intermediate : args.hidden;
    const int columns = down ? args.hidden : args.intermediate;
    const int64_t size = int64_t{rows} * columns;
    // Into the result, or in fp32 to where they are carried.
    const bool carried = kRounds && work.carried >= 0;
    const bool f32 = args.dw_is_f32 || carried;
    float* matrix = carried ? args.carried + (2 * work.matrix + work.carried) * size
                            : static_cast<float*>(args.dw[work.matrix]) + work.group * size;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int first = work.m * kTileM + first_of_block(m);
      const int inside = first < rows ? work.columns : 0;
      if (f32) {
        wait_for_buffer<1>();
        const RowAddress to(matrix, first, columns, shared.tiles.here(tile_ring).n * kTileN, 4);
#pragma unroll
        for (int c = 0; c < kTileN / 32; ++c) {
          uint8_t* buffer = shared.buffers.here();
          fill_32_columns_f32(acc + m * (kTileN / 2) + 16 * c, buffer);
          store_rows_f32(buffer, to, 128 * c, 32 * c < inside);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kTileN / 64; ++c) {
          uint8_t* block = shared.buffers.here(c);
          wait_for_buffer();
          fill_64_columns(acc + m * (kTileN / 2) + 32 * c, block);
          store_block(maps.dw_blocks[work.matrix], block, work.n * kTileN + 64 * c,
                      work.group * rows + first, 64 * c < inside);
        }
      }
    }
  }

  // The tiles of a kind, which the warpgroups take in turn.
  template <class Run>
  __device__ __forceinline__ void take_turns(Kind kind, RingState<kTileSlots>& tile_ring,
                                             RingState<kStages>& ring, const Run& run) {
    for (;; shared.tiles.next(tile_ring)) {
      const Work& work = shared.tiles.peek(tile_ring);
      if (work.kind != kind) return;
      if (tile_ring.count % 2 == warpgroup_here()) {
        run();
      } else {
        ring.advance(work.k_blocks);
      }
    }
  }

  template <bool kRounds>
  __device__ void consume(uint32_t warpgroup) {
    mark(0);
    copy_own_rows<2, 8>(args, first_row(), INT_MAX);
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    Turns::start(warpgroup);
    take_turns(Kind::kRecompute, tile_ring, ring, [&] { recompute_tile(tile_ring, ring); });
    mark(1);
    take_turns(Kind::kHiddenGrad, tile_ring, ring, [&] { hidden_grad_tile(tile_ring, ring); });
    mark(2);
    take_turns(Kind::kInputGrad, tile_ring, ring, [&] { input_grad_tile(tile_ring, ring); });
    finish_pushing();
    mark(3);
    take_turns(Kind::kWeightGrad, tile_ring, ring,
               [&] { weight_grad_tile<kRounds>(tile_ring, ring); });
    wait_bulk_stores<0>();
    __threadfence_system();
    mark(4);
  }
};

// kRounds: the call may take several rounds. (To be able to go on with accumulators took the 30B
// backward pass about 1% more time.)
template <bool kRounds>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Backward::Shared& shared = *reinterpret_cast<Backward::Shared*>(raw);
  Backward backward{maps, args, shared};
  // The first round also writes the gradients of experts without rows.
  if (args.round > 0 && args.round >= num_rounds(args.shape, args.plan)) return;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.ending = 0;
    shared.pull.init();
    for (TransactionBarrier& barrier : shared.fetched) barrier.init(1);
    shared.tiles.init();
    cutlass::arch::fence_barrier_init();
  }
  backward.read_window();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (threadIdx.x == 0) backward.load();
    if (threadIdx.x == 64) backward.place();
    if (warp == 1) Puller<2, BackwardArgs>{args, shared.pull, backward.first_row()}.run();
    if (warp % 2 == 1) backward.combine();
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    backward.consume<kRounds>(warp / 4 - 1);
  }
}

// Zeros behind each expert's rows of the round, up to what the weight gradients contract over.
__global__ void zero_padding_kernel(BackwardArgs args) {
  const int first = args.round * args.shape.capacity_rows;
  const int words = args.hidden / 8;  // of 16 bytes
  for (int e = blockIdx.x; e < args.shape.local_experts; e += gridDim.x) {
    const int end = args.plan.expert_start[e] + args.plan.expert_rows[e] - first;
    if (args.plan.expert_rows[e] == 0 || end <= 0 || end >= args.shape.capacity_rows) continue;
    const int rows = static_cast<int>(align_up(end, kInstructionK)) - end;
    for (const PullSource& source : args.source) {
      uint4* pool = reinterpret_cast<uint4*>(source.pool) + int64_t{end} * words;
      for (int i = threadIdx.x; i < rows * words; i += blockDim.x) pool[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Writes the carried weight gradients of the expert whose rows end in this round.
__global__ void write_carried_kernel(BackwardArgs args) {
  const int64_t size = int64_t{args.hidden} * args.intermediate;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int e = 0; e < args.shape.local_experts; ++e) {
    const int last = args.plan.expert_start[e] + args.plan.expert_rows[e] - 1;
    if (last / args.shape.capacity_rows != args.round) continue;
    const int slot = carried_slot(args, e);
    if (slot < 0) continue;
    for (int matrix = 0; matrix < 3; ++matrix) {
      const float* from = args.carried + (2 * matrix + slot) * size;
      for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
        if (args.dw_is_f32) {
          static_cast<float*>(args.dw[matrix])[e * size + i] = from[i];
        } else {
          static_cast<__nv_bfloat16*>(args.dw[matrix])[e * size + i] = __float2bfloat16(from[i]);
        }
      }
    }
  }
}

// Sums the parts of each row's routing-weight gradient, in the order of the columns, and sends it
// home.
__global__ void send_dots_kernel(BackwardArgs args, int64_t returned_weights, int parts) {
  const int first = args.round * args.shape.capacity_rows;
  const int end =
      min(args.plan.expert_start[args.shape.local_experts] - first, args.shape.capacity_rows);
  for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < end; row += gridDim.x * blockDim.x) {
    const PoolRow from = args.plan.rows[first + row];
    if (from.token < 0) continue;
    float sum = 0.0f;
    for (int p = 0; p < parts; ++p) sum += args.partial_dots[int64_t{row} * parts + p];
    const int rank = from.token / args.shape.tokens;
    const int64_t slot =
        int64_t{from.token - rank * args.shape.tokens} * args.shape.top_k + from.slot;
    reinterpret_cast<float*>(args.board->block[rank] + returned_weights)[slot] = sum;
  }
}

// Gradients of the routing weights at home; zero where a slot is not routed.
__global__ void collect_dots_kernel(const float* returned, const int32_t* ids, int64_t slots,
                                    int num_experts, float* out) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots; i += step) {
    out[i] = ids[i] >= 0 && ids[i] < num_experts ? returned[i] : 0.0f;
  }
}

}  // namespace megamoe
