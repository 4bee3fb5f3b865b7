// Bringing token rows into pools: a puller warp fetches them from their owners, each for every
// place that needs it; this rank's own may also be copied, row by row.
//
// There are pools because TMA cannot gather rows on Hopper: a box for each row of a stage took
// three to six times as long as one box for all. Gathering them into the stages with cp.async,
// without a pool, made the 30B forward pass 8% slower on one H200.
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
    bytes = static_cast<int32_t>(align_up((row_bytes + count - 1) / count, 16));
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

constexpr int kOwnRows = 4;  // rows claimed at a time, all of one tile
static_assert(kTileM % kOwnRows == 0);

// A warp's part in copying the rows of this rank's own tokens that are not pulled (see "Pull list"
// in ffi/plan/plan.h), in the order of the pool, all of the first source before those of the
// second; it ends after so many claims. Of a lane's loads, kBatch do not wait for each other.
//
// The consumers begin, which have nothing else to do yet: in the 30B forward pass on one H200 the
// tensor cores waited 0.1 ms for the first tiles without it.
template <int kSources, int kBatch, class Args>
__device__ void copy_own_rows(const Args& args, int first_row, int claims) {
  const int lane = threadIdx.x % 32, rank = args.board->rank;
  const int pool_rows = args.plan.expert_start[args.shape.local_experts] - first_row;
  const int rows = min(args.shape.copied_rows, min(args.shape.capacity_rows, pool_rows));
  const Pieces pieces(args.hidden);
  const int words = pieces.row_bytes / 16;
  for (; claims > 0; --claims) {
    int first = 0;
    if (lane == 0) first = atomicAdd(args.own_claim, kOwnRows);
    first = __shfl_sync(~0u, first, 0);
    if (first >= kSources * rows) return;
    const bool second = kSources > 1 && first >= rows;
    if (second) first -= rows;
    const PullSource& source = args.source[second];
    const uint4* const owned = static_cast<const uint4*>(source.owner[rank]);
    uint4* to = reinterpret_cast<uint4*>(source.pool) + int64_t{first} * words;
    // Of the claim's rows, which are this rank's own tokens; -1: none of its own.
    int token = lane < kOwnRows ? args.plan.rows[first_row + first + lane].token : -1;
    if (token >= 0) token = token / args.shape.tokens == rank ? token % args.shape.tokens : -1;
    int copied = 0;
#pragma unroll 1
    for (int i = 0; i < kOwnRows; ++i, to += words) {
      const int own = __shfl_sync(~0u, token, i);
      if (own < 0) continue;
      ++copied;
      const uint4* from = owned + int64_t{own} * words;
#pragma unroll 1
      for (int base = lane; base < words; base += kBatch * 32) {
        const int left = words - base;
        uint4 part[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (32 * j < left) part[j] = from[base + 32 * j];
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (32 * j < left) to[base + 32 * j] = part[j];
        }
      }
    }
    fence_bulk_copies();
    __syncwarp();
    if (lane == 0 && copied > 0) {
      add_release_device(&source.arrived[first / kTileM], copied * pieces.count);
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
      if (row >= (own ? args.shape.copied_rows : 0) && row < args.shape.capacity_rows) {
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
