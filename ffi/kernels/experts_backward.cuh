// The backward pass of one round as one persistent kernel, organised as the forward one
// (experts.cuh): a loader thread, a puller warp, two multiplying and storing warpgroups; and two
// warps that combine.
//
//   pull         x and dy rows -> pools
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
// zero up to the next multiple of 64 in every pool, because the weight gradient contracts over
// them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

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

namespace megamoe {

// Named by operand and by the way it is read: rows (K-major) or columns (MN-major).
struct BackwardMaps {
  CUtensorMap x_rows, gate_columns, up_columns;                                // recompute
  CUtensorMap dy_rows, down_rows;                                              // hidden grad
  CUtensorMap gate_pool_rows, up_pool_rows;                                    // and input grad
  CUtensorMap gate_rows, up_rows;                                              // input grad
  CUtensorMap x_columns, act_columns, dgate_columns, dup_columns, dy_columns;  // weight grad
};

struct BackwardArgs {
  PlanShape shape;
  PlanBuffers plan;
  Directory directory;
  Board* board;
  PullSource source[2];      // x, dy
  __nv_bfloat16* gate_pool;  // [capacity rows, I] each
  __nv_bfloat16* up_pool;
  __nv_bfloat16* act_pool;
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
// They are summed round by round, so the last bits of these experts' weight gradients depend on the
// capacity.
__device__ inline int carried_slot(const BackwardArgs& args, int e) {
  if (!spans_rounds(args, e)) return -1;
  int before = 0;
  for (int other = 0; other < e; ++other) before += spans_rounds(args, other);
  return before % 2;
}

template <int kColumns>
__device__ __forceinline__ int column_tiles(int columns) {
  return (columns + kColumns - 1) / kColumns;
}

struct Backward {
  static constexpr Sharing kPingPong = Sharing::kPingPong;
  static constexpr Sharing kCooperative = Sharing::kCooperative;
  static constexpr int kRecomputeN = Tile<kCooperative>::kN / 2;  // of gate and of up
  static constexpr int kHiddenN = Tile<kCooperative>::kN;
  static constexpr int kN = Tile<kPingPong>::kN;
  static constexpr int kStages = 4;
  static constexpr int kTileSlots = 4;

  enum class Kind : int32_t { kRecompute, kHiddenGrad, kInputGrad, kWeightGrad, kEnd, kNothing };

  struct Work {
    Kind kind;
    int32_t group, m, n;
    int32_t row, rows;  // of the pools
    int32_t k_blocks;
    // Weight grad: 0 gate, 1 up, 2 down; where the gradient of an expert whose rows span rounds is
    // carried, or -1; whether an earlier round has begun it.
    int32_t matrix, carried;
    bool continues;
  };

  struct Shared {
    megamoe::Stages<kStages> stages;
    WarpBuffers buffers;
    PullBuffers pull;
    TileRing<Work, kTileSlots> tiles;
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
  __device__ int recompute_columns() const { return column_tiles<kRecomputeN>(args.intermediate); }
  __device__ int hidden_columns() const { return column_tiles<kHiddenN>(args.intermediate); }
  __device__ int input_columns() const { return column_tiles<kN>(args.hidden); }

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

  // ---- loader thread --------------------------------------------------------------------------

  __device__ Work row_work(Kind kind, int columns, int index, int k_blocks) const {
    const TilePlace place = place_tile(shared.tile_start, args.shape.local_experts, columns, index);
    const int row = place.m * kTileM;
    const int end = shared.row_start[place.group] + shared.rows[place.group];
    return {kind,     place.group, place.m, place.n, row, min(kTileM, end - row),
            k_blocks, 0,           -1,      false};
  }

  __device__ Work weight_work(int index) const {
    const int gate_m = column_tiles<kTileM>(args.hidden);
    const int gate_tiles = gate_m * column_tiles<kN>(args.intermediate);
    const int down_m = column_tiles<kTileM>(args.intermediate);
    const int per_expert = 2 * gate_tiles + down_m * input_columns();
    const int e = index / per_expert;
    Work work{Kind::kEnd, e, 0, 0, 0, 0, 0, 0, -1, false};
    if (e >= args.shape.local_experts) return work;
    int left = index - e * per_expert;
    work.matrix = min(left / gate_tiles, 2);
    left -= work.matrix * gate_tiles;
    const int m_tiles = work.matrix == 2 ? down_m : gate_m;
    work.m = left % m_tiles;
    work.n = left / m_tiles;
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
    const int hidden_blocks = args.hidden / kBlockK;
    const int intermediate_blocks = args.intermediate / kBlockK;
    int count = tiles * recompute_columns();
    if (index < count) {
      return row_work(Kind::kRecompute, recompute_columns(), index, hidden_blocks);
    }
    index -= count;
    count = tiles * hidden_columns();
    if (index < count) return row_work(Kind::kHiddenGrad, hidden_columns(), index, hidden_blocks);
    index -= count;
    count = tiles * input_columns();
    if (index < count) {
      return row_work(Kind::kInputGrad, input_columns(), index, 2 * intermediate_blocks);
    }
    return weight_work(index - count);
  }

  __device__ int claim() const { return atomicAdd(&args.board->tile_claim, 1); }

  // The work of a claim, or of the next that has some.
  __device__ Work claimed_work(int index) const {
    Work work = place_work(index);
    while (work.kind == Kind::kNothing) work = place_work(claim());
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
    constexpr int kParts = kConsumerWarps;
    switch (work.kind) {
      case Kind::kRecompute:
        wait_for(args.source[0].arrived, work.m, work.rows * pieces.count, Phase::kGateUp);
        break;
      case Kind::kHiddenGrad:
        wait_for(args.source[1].arrived, work.m, work.rows * pieces.count, Phase::kHiddenGrad);
        wait_for(args.gate_up_done, work.m, recompute_columns() * kParts, Phase::kHiddenGrad);
        break;
      case Kind::kInputGrad:
        wait_for(args.hidden_grad_done, work.m, hidden_columns() * kParts, Phase::kInputGrad);
        break;
      default:
        if (hidden_grads_done) return;
        wait_for(&args.board->hidden_grad_parts, 0,
                 shared.tile_start[args.shape.local_experts] * hidden_columns() * kParts,
                 Phase::kWeightGrad);
        hidden_grads_done = true;
    }
    fence_bulk_copies();
  }

  // Stages behind a hidden-grad tile's k blocks, with 64 columns each of gate and up for its
  // epilogue.
  __device__ int epilogue_stages(const Work& work) const {
    if (work.kind != Kind::kHiddenGrad) return 0;
    return min(kHiddenN, args.intermediate - work.n * kHiddenN) / kBlockK;
  }

  __device__ void load_epilogue_stage(const Work& work, int chunk, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    using Load3 = cute::SM90_TMA_LOAD_3D;
    const int column = work.n * kHiddenN + chunk * kBlockK;
    shared.stages.full[stage].arrive_and_expect_tx(2 * kStageBytesA);
    Load3::copy(&maps.gate_pool_rows, bar, 0, shared.stages.a[stage], column, work.row, 0);
    Load3::copy(&maps.up_pool_rows, bar, 0, shared.stages.b[stage], column, work.row, 0);
  }

  __device__ void load_stage(const Work& work, int kb, int stage) {
    uint64_t* bar = reinterpret_cast<uint64_t*>(&shared.stages.full[stage]);
    uint8_t* a = shared.stages.a[stage];
    uint8_t* b = shared.stages.b[stage];
    using Load3 = cute::SM90_TMA_LOAD_3D;
    using Load4 = cute::SM90_TMA_LOAD_4D;
    const int k = kb * kBlockK;
    TransactionBarrier& full = shared.stages.full[stage];
    switch (work.kind) {
      case Kind::kRecompute: {
        const int block = work.n * (kRecomputeN / 64);
        full.arrive_and_expect_tx(kStageBytesA + kStageBytesB);
        Load3::copy(&maps.x_rows, bar, 0, a, k, work.row, 0);
        Load4::copy(&maps.gate_columns, bar, 0, b, 0, k, block, work.group);
        Load4::copy(&maps.up_columns, bar, 0, b + kStageBytesB / 2, 0, k, block, work.group);
        break;
      }
      case Kind::kHiddenGrad:
        full.arrive_and_expect_tx(kStageBytesA + kStageBytesB);
        Load3::copy(&maps.dy_rows, bar, 0, a, k, work.row, 0);
        Load3::copy(&maps.down_rows, bar, 0, b, k, work.n * kHiddenN, work.group);
        break;
      case Kind::kInputGrad: {
        const bool up = k >= args.intermediate;
        const int column = up ? k - args.intermediate : k;
        full.arrive_and_expect_tx(kStageBytesA + kN * kBlockK * 2);
        Load3::copy(up ? &maps.up_pool_rows : &maps.gate_pool_rows, bar, 0, a, column, work.row, 0);
        Load3::copy(up ? &maps.up_rows : &maps.gate_rows, bar, 0, b, column, work.n * kN,
                    work.group);
        break;
      }
      default:
        full.arrive_and_expect_tx(kStageBytesA + kN * kBlockK * 2);
        Load4::copy(work.matrix == 2 ? &maps.act_columns : &maps.x_columns, bar, 0, a, 0,
                    work.row + k, work.m * (kTileM / 64), 0);
        Load4::copy(work.matrix == 0   ? &maps.dgate_columns
                    : work.matrix == 1 ? &maps.dup_columns
                                       : &maps.dy_columns,
                    bar, 0, b, 0, work.row + k, work.n * (kN / 64), 0);
    }
  }

  // The next tile is found while the ring is full, as in the forward pass, and goes into the ring
  // of tiles at once; this thread reads it there, too.
  __device__ void load() {
    const Pieces pieces(args.hidden);
    RingState<kStages> ring;
    RingState<kTileSlots> pushed, loading;
    bool hidden_grads_done = false;
    shared.tiles.push(pushed, claimed_work(claim()));
    for (;; loading.advance()) {
      const Work& work = shared.tiles.work[loading.index()];
      if (work.kind == Kind::kEnd) {
        atomicExch(&shared.ending, 1);
        return;
      }
      const int next = claim();
      wait_for_operands(work, pieces, hidden_grads_done);
      const int k_blocks = work.k_blocks, stages = k_blocks + epilogue_stages(work);
      const int look_ahead = min(kStages, stages - 1);
      if (stages == 0) shared.tiles.push(pushed, claimed_work(next));
      for (int i = 0; i < stages; ++i) {
        if (i == look_ahead) shared.tiles.push(pushed, claimed_work(next));
        shared.stages.empty[ring.index()].wait(ring.phase() ^ 1);
        if (i < k_blocks) {
          load_stage(work, i, ring.index());
        } else {
          load_epilogue_stage(work, i - k_blocks, ring.index());
        }
        ring.advance();
      }
    }
  }

  // ---- combining warps ------------------------------------------------------------------------

  __device__ bool last_round() const { return args.round + 1 >= NumRounds(args.shape, args.plan); }

  // By each consumer warp once it has pushed its last row of the round. The last of all CTAs tells
  // every rank.
  __device__ void finish_pushing() const {
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    const int parts = gridDim.x * kConsumerWarps;
    if (atomicAdd(&args.board->pushed_parts, 1) + 1 < parts || !last_round()) return;
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
    return __all_sync(~0u, here);
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

  // With a limit, values beyond it are stored as infinities and others not beyond it, so that
  // rounding to bf16 does not change which gradients pass. A NaN fails the comparisons and stays.
  __device__ __forceinline__ float mark_clamped(float value, bool both_sides) const {
    const float limit = args.swiglu_limit;
    const float below = __uint_as_float(__float_as_uint(limit) & 0xffff0000u);
    if (value > limit) return INFINITY;
    if (both_sides && value < -limit) return -INFINITY;
    if (value > below) return below;
    if (both_sides && value < -below) return -below;
    return value;
  }

  __device__ __forceinline__ void recompute_tile(const Work& work, uint32_t warpgroup,
                                                 RingState<kStages>& ring, Announcer& announcer,
                                                 float* acc) {
    if (work.rows <= static_cast<int>(warpgroup) * 64) {
      announcer.announce();
      skip(shared.stages, ring, work.k_blocks);
    } else {
      multiply<kCooperative, Major::K, Major::MN>(shared.stages, ring, warpgroup, work.k_blocks,
                                                  acc, [&] { announcer.announce(); });
      const int first = work.row + warpgroup * 64 + threadIdx.x % kWarpgroup / 32 * 16;
      uint8_t* buffer = shared.buffers.here();
#pragma unroll
      for (int c = 0; c < 2 * kRecomputeN / 64; ++c) {
        const bool up = c >= kRecomputeN / 64;
        const int column = work.n * kRecomputeN + c % (kRecomputeN / 64) * 64;
        float* d = acc + 32 * c;
        if (args.swiglu_limit < INFINITY) {
#pragma unroll
          for (int i = 0; i < 32; ++i) d[i] = mark_clamped(d[i], up);
        }
        fill_64_columns(d, buffer);
        store_rows(
            buffer,
            RowAddress(up ? args.up_pool : args.gate_pool, first, args.intermediate, column, 2), 0,
            column < args.intermediate);
      }
    }
    announcer.set(&args.gate_up_done[work.m]);
  }

  // Backward of A' = w a with a = silu(g) u, for two neighbouring columns. Turns g and u into their
  // gradients and returns the columns' part of the routing weight's, <dA, a>.
  // With a limit l: g is min(g, l) and u is clamped to [-l, l]; no gradient passes a clamped value.
  template <bool kLimit>
  __device__ __forceinline__ float swiglu_backward(uint32_t& gate, uint32_t& up, const float* d,
                                                   float weight, uint32_t& act) const {
    float g[2] = {__uint_as_float(gate << 16), __uint_as_float(gate & 0xffff0000u)};
    float u[2] = {__uint_as_float(up << 16), __uint_as_float(up & 0xffff0000u)};
    bool pass_g[2] = {true, true}, pass_u[2] = {true, true};
    if constexpr (kLimit) {
      const float limit = args.swiglu_limit;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Comparisons that a NaN fails, so that it passes through.
        if (g[j] > limit) g[j] = limit, pass_g[j] = false;
        if (u[j] > limit) u[j] = limit, pass_u[j] = false;
        if (u[j] < -limit) u[j] = -limit, pass_u[j] = false;
      }
    }
    float s[2], a[2], dg[2], du[2], dot = 0.0f;
    sigmoid2(g[0], g[1], s[0], s[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float silu = g[j] * s[j];
      const float d_silu = d[j] * silu;
      dot += d_silu * u[j];
      a[j] = weight * silu * u[j];
      du[j] = pass_u[j] ? weight * d_silu : 0.0f;
      // silu'(g) = s (1 + g (1 - s))
      dg[j] = pass_g[j] ? weight * d[j] * u[j] * (s[j] + s[j] * (g[j] - silu)) : 0.0f;
    }
    act = pack_bf16(a[0], a[1]);
    gate = pack_bf16(dg[0], dg[1]);
    up = pack_bf16(du[0], du[1]);
    return dot;
  }

  // 64 columns of a hidden-grad tile's epilogue. `gate` and `up` are the warp's 16 rows of a stage;
  // their gradients replace them there, each value by the thread that has read it. Rows of padding
  // are zeros and stay zeros.
  template <bool kLimit>
  __device__ __forceinline__ void hidden_grad_columns(const float* acc, uint8_t* gate, uint8_t* up,
                                                      uint8_t* act, const float (&weight)[2],
                                                      float (&dot)[2]) const {
    const int lane = lane_here();
#pragma unroll
    for (int b = 0; b < 8; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = swizzled(lane / 4 + 8 * h, b) + lane % 4 * 4;
        uint32_t& g = *reinterpret_cast<uint32_t*>(gate + at);
        uint32_t& u = *reinterpret_cast<uint32_t*>(up + at);
        uint32_t dg = g, du = u, a;
        dot[h] += swiglu_backward<kLimit>(dg, du, acc + 4 * b + 2 * h, weight[h], a);
        g = dg;
        u = du;
        *reinterpret_cast<uint32_t*>(act + at) = a;
      }
    }
  }

  __device__ __forceinline__ void hidden_grad_tile(const Work& work, uint32_t warpgroup,
                                                   RingState<kStages>& ring, Announcer& announcer,
                                                   float* acc) {
    const int chunks = epilogue_stages(work);
    if (work.rows <= static_cast<int>(warpgroup) * 64) {
      announcer.announce(&args.board->hidden_grad_parts);
      skip(shared.stages, ring, work.k_blocks + chunks);
    } else {
      multiply<kCooperative, Major::K, Major::K>(
          shared.stages, ring, warpgroup, work.k_blocks, acc,
          [&] { announcer.announce(&args.board->hidden_grad_parts); });
      // Of the warp's 16 rows, in the tile.
      const int first = warpgroup * 64 + threadIdx.x % kWarpgroup / 32 * 16;
      float weight[2], dot[2] = {0.0f, 0.0f};
      bool valid[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + lane_here() / 4 + 8 * h;
        valid[h] = row < work.rows;
        weight[h] = valid[h] ? args.row_weight[first_row() + work.row + row] : 0.0f;
      }
      uint8_t* act = shared.buffers.here();
#pragma unroll
      for (int c = 0; c < kHiddenN / 64; ++c) {
        if (c >= chunks) continue;
        const int stage = ring.index();
        uint8_t* gate = shared.stages.a[stage] + first * 128;
        uint8_t* up = shared.stages.b[stage] + first * 128;
        shared.stages.full[stage].wait(ring.phase());
        if (args.swiglu_limit < INFINITY) {
          hidden_grad_columns<true>(acc + 32 * c, gate, up, act, weight, dot);
        } else {
          hidden_grad_columns<false>(acc + 32 * c, gate, up, act, weight, dot);
        }
        const auto store = [&](const uint8_t* rows, __nv_bfloat16* pool) {
          store_rows(rows, RowAddress(pool, work.row + first, args.intermediate,
                                      work.n * kHiddenN + 64 * c, 2));
        };
        store(gate, args.gate_pool);
        store(up, args.up_pool);
        store(act, args.act_pool);
        cutlass::arch::fence_view_async_shared();  // TMA writes the stage next
        release_stage<kCooperative>(shared.stages, stage);
        ring.advance();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
        dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
        const int row = work.row + first + lane_here() / 4 + 8 * h;
        if (valid[h] && lane_here() % 4 == 0) {
          args.partial_dots[int64_t{row} * hidden_columns() + work.n] = dot[h];
        }
      }
    }
    announcer.set(&args.hidden_grad_done[work.m]);
  }

  __device__ __forceinline__ void input_grad_tile(RingState<kTileSlots>& tile_ring,
                                                  RingState<kStages>& ring, float* acc) {
    const int k_blocks = 2 * args.intermediate / kBlockK;
    if (shared.tiles.here(tile_ring).rows > 64) {
      multiply<kPingPong, Major::K, Major::K>(shared.stages, ring, warpgroup_here(), k_blocks, acc);
    } else {
      multiply<kPingPong, Major::K, Major::K, 1>(shared.stages, ring, warpgroup_here(), k_blocks,
                                                 acc);
    }
    const Work& work = shared.tiles.here(tile_ring);
    const int warp = threadIdx.x % kWarpgroup / 32;
    uint8_t* buffer = shared.buffers.here();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = m * 64 + warp * 16 + lane_here() % 16;
      const uint64_t target = row < work.rows ? args.row_target[first_row() + work.row + row] : 0;
      if (m * 64 < work.rows) {
        push_rows<kN>(acc + m * (kN / 2), buffer, target, work.n * kN, args.hidden);
      }
    }
  }

  __device__ __forceinline__ void weight_grad_tile(RingState<kTileSlots>& tile_ring,
                                                   RingState<kStages>& ring, float* acc) {
    multiply<kPingPong, Major::MN, Major::MN>(shared.stages, ring, warpgroup_here(),
                                              shared.tiles.here(tile_ring).k_blocks, acc);
    const Work& work = shared.tiles.here(tile_ring);
    if (work.k_blocks == 0) {
#pragma unroll
      for (int i = 0; i < kAccumulators<kPingPong>; ++i) acc[i] = 0.0f;
    }
    const bool down = work.matrix == 2;
    const int rows = down ? args.intermediate : args.hidden;
    const int columns = down ? args.hidden : args.intermediate;
    const int64_t size = int64_t{rows} * columns;
    uint8_t* buffer = shared.buffers.here();
    // Straight into the result, or in fp32 to or onto what earlier rounds have carried.
    const bool f32 = args.dw_is_f32 || work.carried >= 0;
    uint8_t* matrix =
        work.carried < 0
            ? static_cast<uint8_t*>(args.dw[work.matrix]) + work.group * size * (f32 ? 4 : 2)
            : reinterpret_cast<uint8_t*>(args.carried + (2 * work.matrix + work.carried) * size);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int first = work.m * kTileM + m * 64 + threadIdx.x % kWarpgroup / 32 * 16;
      const int inside = first < rows ? columns - work.n * kN : 0;  // columns; first is 64 m
      const RowAddress to(matrix, first, columns, work.n * kN, f32 ? 4 : 2);
      if (f32) {
#pragma unroll
        for (int c = 0; c < kN / 32; ++c) {
          fill_32_columns_f32(acc + m * (kN / 2) + 16 * c, buffer);
          store_rows_f32(buffer, to, 128 * c, 32 * c < inside, work.continues);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kN / 64; ++c) {
          fill_64_columns(acc + m * (kN / 2) + 32 * c, buffer);
          store_rows(buffer, to, 128 * c, 64 * c < inside);
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

  // A loop for each product: each has its own accumulators, which the compiler then never moves.
  __device__ void consume(uint32_t warpgroup) {
    mark(0);
    RingState<kStages> ring;
    RingState<kTileSlots> tile_ring;
    {
      Announcer announcer;
      float acc[kAccumulators<kCooperative>] = {};
      for (;; shared.tiles.next(tile_ring)) {
        const Work& work = shared.tiles.peek(tile_ring);
        if (work.kind != Kind::kRecompute) break;
        recompute_tile(work, warpgroup, ring, announcer, acc);
      }
      announcer.announce();
    }
    mark(1);
    {
      Announcer announcer;
      float acc[kAccumulators<kCooperative>] = {};
      for (;; shared.tiles.next(tile_ring)) {
        const Work& work = shared.tiles.peek(tile_ring);
        if (work.kind != Kind::kHiddenGrad) break;
        hidden_grad_tile(work, warpgroup, ring, announcer, acc);
      }
      announcer.announce(&args.board->hidden_grad_parts);
    }
    mark(2);
    Turns::start(warpgroup, tile_ring.count % 2);
    {
      float acc[kAccumulators<kPingPong>] = {};
      take_turns(Kind::kInputGrad, tile_ring, ring, [&] { input_grad_tile(tile_ring, ring, acc); });
    }
    finish_pushing();
    mark(3);
    float acc[kAccumulators<kPingPong>] = {};
    take_turns(Kind::kWeightGrad, tile_ring, ring, [&] { weight_grad_tile(tile_ring, ring, acc); });
    __threadfence_system();
    mark(4);
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Backward::Shared& shared = *reinterpret_cast<Backward::Shared*>(raw);
  Backward backward{maps, args, shared};
  // The first round also writes the gradients of experts without rows.
  if (args.round > 0 && args.round >= NumRounds(args.shape, args.plan)) return;
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.ending = 0;
    shared.pull.init();
    shared.tiles.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  backward.read_window();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (warp == 0) {
      if (threadIdx.x == 0) backward.load();
    } else if (warp == 1) {
      Puller<2, BackwardArgs>{args, shared.pull, backward.first_row()}.run();
    } else {
      backward.combine();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    backward.consume(warp / 4 - 1);
  }
}

// Zeros behind each expert's rows of the round, up to the next multiple of the contraction's block.
__global__ void zero_padding_kernel(BackwardArgs args) {
  const int first = args.round * args.shape.capacity_rows;
  const int words = args.hidden / 8;  // of 16 bytes
  for (int e = blockIdx.x; e < args.shape.local_experts; e += gridDim.x) {
    const int end = args.plan.expert_start[e] + args.plan.expert_rows[e] - first;
    if (args.plan.expert_rows[e] == 0 || end <= 0 || end >= args.shape.capacity_rows) continue;
    const int rows = static_cast<int>(AlignUp(end, kBlockK)) - end;
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
