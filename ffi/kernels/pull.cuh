// Fetching token rows from their owners: the work of a puller warp.
//
// The rows are copied into pools, each to every place that needs it, because TMA cannot gather rows
// on Hopper. Gathering them into the stages with cp.async instead, without a pool, was measured on
// H200 and made the 30B forward pass 7% slower: two warps cannot fill stages as fast as TMA does.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "ffi/gemm/core.h"
#include "ffi/gemm/epilogue.h"
#include "ffi/kernels/sync.cuh"
#include "ffi/kernels/timeline.cuh"
#include "ffi/plan/plan.h"

namespace megamoe {

constexpr int kPullStages = 3;
constexpr int kPullBytes = 4096;
constexpr int kPullEntries = 4;  // source tokens claimed at a time, at most

struct PullBuffers {
  alignas(128) uint8_t stage[kPullStages][kPullBytes];
  TransactionBarrier full[kPullStages];

  __device__ void init() {
    for (auto& barrier : full) barrier.init(1);
  }
};

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

// One matrix of token rows: where each rank keeps it, the pool it is pulled into, and the pieces
// that have arrived in each row tile.
struct PullSource {
  const void* const* owner;  // [ranks]
  char* pool;
  int32_t* arrived;
};

constexpr int kHeadEntries = 4;  // rows claimed at a time

// A warp's part in copying the head rows of this rank's own tokens (see "Pull list" in
// ffi/plan/plan.h): by the consumers, which have nothing else to do yet. In the 30B forward pass on
// one H200 the tensor cores waited 0.1 ms for the first tiles without it.
template <int kSources, class Args>
__device__ void copy_head(const Args& args, int first_row) {
  constexpr int kBatch = 8;  // loads that do not wait for each other
  const int lane = threadIdx.x % 32, rank = args.board->rank;
  const int pool_rows = args.plan.expert_start[args.shape.local_experts] - first_row;
  const int end = min(args.shape.head_rows, min(args.shape.capacity_rows, pool_rows));
  const Pieces pieces(args.hidden);
  const int words = pieces.row_bytes / 16;
  for (;;) {
    int first = 0;
    if (lane == 0) first = atomicAdd(args.head_claim, kHeadEntries);
    first = __shfl_sync(~0u, first, 0);
    if (first >= end) return;
    for (int row = first; row < min(first + kHeadEntries, end); ++row) {
      const int token = args.plan.rows[first_row + row].token;
      if (token < 0 || token / args.shape.tokens != rank) continue;
      const int64_t local = token - rank * args.shape.tokens;
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        const PullSource& source = args.source[s];
        const uint4* from = static_cast<const uint4*>(source.owner[rank]) + local * words;
        uint4* to = reinterpret_cast<uint4*>(source.pool) + int64_t{row} * words;
        for (int base = lane; base < words; base += kBatch * 32) {
          uint4 part[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (base + 32 * i < words) part[i] = from[base + 32 * i];
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (base + 32 * i < words) to[base + 32 * i] = part[i];
          }
        }
        fence_bulk_copies();
        __syncwarp();
        if (lane == 0) add_release_device(&source.arrived[row / kTileM], pieces.count);
      }
    }
  }
}

// Pulls the rows of the round, each once, into all pool rows that need them; all of the first
// source before those of the second. `Args` has shape, plan, board, hidden, and source[kSources].
template <int kSources, class Args>
struct Puller {
  const Args& args;
  PullBuffers& buffers;
  const int first_row;

  // One claim of pull entries: lane i holds entry i / K's source token and, for slot i % K, the
  // pool row of this round, or -1.
  struct Claim {
    int token, row, source;
  };

  __device__ Claim claim_entries(int per_claim, int total) {
    const int lane = threadIdx.x % 32, top_k = args.shape.top_k;
    int first = 0;
    if (lane == 0) first = atomicAdd(&args.board->pull_claim, per_claim);
    first = __shfl_sync(~0u, first, 0);
    int entry = first + lane / top_k;
    Claim claim{-1, -1, 0};
    if (kSources > 1 && entry >= total) {
      claim.source = 1;
      entry -= total;
    }
    if (lane / top_k < per_claim && entry < total) {
      claim.token = args.plan.pull[entry];
      const int row = args.plan.row_of[int64_t{claim.token} * top_k + lane % top_k] - first_row;
      const bool own = claim.token / args.shape.tokens == args.board->rank;
      if (row >= (own ? args.shape.head_rows : 0) && row < args.shape.capacity_rows) {
        claim.row = row;
      }
    }
    return claim;
  }

  __device__ void run() {
    const int lane = threadIdx.x % 32, top_k = args.shape.top_k;
    const int per_claim = min(kPullEntries, 32 / top_k);
    const int total = args.plan.pull_start[args.shape.local_experts];
    const Pieces pieces(args.hidden);

    Claim claim = claim_entries(per_claim, total);
    Claim next = claim_entries(per_claim, total);
    int entry = 0, piece = 0;
    int target[kPullStages];  // this lane's pool row for the stage's piece, or -1
    int which[kPullStages];   // the piece, -1: the stage is idle
    int origin[kPullStages];  // the source
    uint32_t phase = 0;

    // Starts the next piece into a stage that nothing reads any more.
    const auto fetch = [&](int stage) {
      const int token = __shfl_sync(~0u, claim.token, entry * top_k);
      origin[stage] = kSources > 1 ? __shfl_sync(~0u, claim.source, entry * top_k) : 0;
      which[stage] = token >= 0 ? piece : -1;
      target[stage] = lane / top_k == entry ? claim.row : -1;
      if (token < 0) return;
      if (lane == 0) {
        const int source = token / args.shape.tokens;
        const char* from = static_cast<const char*>(args.source[origin[stage]].owner[source]) +
                           int64_t{token - source * args.shape.tokens} * pieces.row_bytes +
                           piece * pieces.bytes;
        if (source != args.board->rank) count_pulled_bytes(pieces.size(piece));
        buffers.full[stage].arrive_and_expect_tx(pieces.size(piece));
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&buffers.full[stage]),
                                       buffers.stage[stage], pieces.size(piece));
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
        add_release_device(&args.source[origin[stage]].arrived[target[stage] / kTileM], 1);
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
          buffers.full[stage].wait(phase);
          if (target[stage] >= 0) {
            cute::SM90_BULK_COPY_S2G::copy(buffers.stage[stage],
                                           args.source[origin[stage]].pool +
                                               int64_t{target[stage]} * pieces.row_bytes +
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
};

}  // namespace megamoe
