// Routing plan of one rank: which (token, slot) pairs its experts work on, in which order and in
// which round. A pure function of the ids of all ranks and of this rank's number.
//
// Terms. A source token is a token of any rank, numbered source rank * tokens + token. A pool row
// is one (source token, slot) pair that this rank's experts work on. The pool rows of local expert
// e lie together, ordered by (source rank, token, slot), and each expert's segment starts at a
// multiple of kTileM, so no tile holds rows of two experts. Pool rows are numbered through all
// experts, as if the pool had no end; padding rows count.
//
// Rounds. Round j works on the pool rows [j * capacity_rows, (j + 1) * capacity_rows). Splitting
// this rank's rows, not the tokens of all ranks, needs no agreement between the ranks: sources
// (staged x) and destinations ([slot][token] buffers) hold still during a call, so each rank may
// take as many rounds as its own load asks for. A round ends at the end of a tile, and what is
// summed over an expert's rows, the weight gradients, goes on in the next round with the same
// accumulators, so no bit of a result depends on the capacity.
//
// Pull list. The source tokens of a round that are fetched from their owners, each once for all of
// its pool rows, in the order of first use. Only the rows of a round's first `copied_rows` that
// come from this rank's own tokens are not in it: they are copied one by one, in the order of the
// pool, so that the first tiles need not wait until their tokens' other rows have been written,
// too.
//
// The functions below are phases. Each is written for a team of 32 lanes and is the same text on
// the device (a warp) and on the host (a loop). Between two phases everything written by the first
// must be visible to all teams of the second: a grid barrier on the device, unless both are of
// every chunk and the same team does the same chunks. Order of the phases:
//
//   count_chunk       every chunk
//   scan_counts       every row of the count table (local_experts + 1 of them)
//   start_experts     one team
//   fill_expert       every expert        (these two in
//   place_chunk       every chunk          either order)
//
// then for each round, once the plan is complete:
//
//   count_pull_chunk   every chunk
//   scan_pull_counts   every expert
//   start_pulls       one team
//   place_pull_chunk   every chunk
#ifndef JAX_MEGAMOE_FFI_PLAN_PLAN_H_
#define JAX_MEGAMOE_FFI_PLAN_PLAN_H_

#include <cstdint>

#ifdef __CUDACC__
#define MEGAMOE_HD __host__ __device__
#else
#define MEGAMOE_HD
#endif
#ifdef __CUDA_ARCH__
#define MEGAMOE_UNROLL _Pragma("unroll")
#else
#define MEGAMOE_UNROLL
#endif

namespace megamoe {

constexpr int32_t kTileM = 128;  // rows of a matrix tile; segments and rounds are multiples of it
constexpr int32_t kLanes = 32;   // lanes of a team, source tokens of a chunk
constexpr int32_t kBatch = 8;    // loads of a lane that do not wait for each other

MEGAMOE_HD constexpr int64_t align_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sizes of one call, equal on all ranks.
struct PlanShape {
  int32_t ranks = 1;
  int32_t tokens = 0;              // per rank
  int32_t top_k = 1;               // slots per token
  int32_t local_experts = 1;       // per rank
  int32_t capacity_rows = kTileM;  // pool rows of a round, a multiple of kTileM
  int32_t copied_rows = 0;         // see "Pull list" above; a multiple of kTileM

  MEGAMOE_HD int64_t source_tokens() const { return int64_t{ranks} * tokens; }
  MEGAMOE_HD int64_t slots() const { return source_tokens() * top_k; }
  MEGAMOE_HD int32_t chunks() const {
    return static_cast<int32_t>((source_tokens() + kLanes - 1) / kLanes);
  }
  // Every slot may name an expert of this rank, and the same one twice in a token.
  MEGAMOE_HD int64_t max_pool_rows() const {
    const int64_t busy = slots() < local_experts ? slots() : local_experts;
    return align_up(slots() + busy * (kTileM - 1), kTileM);
  }
  // Words of scratch of a team.
  MEGAMOE_HD int32_t scratch_words() const { return local_experts + 2; }
  // Row and slot numbers are int32: every caller must refuse a shape that does not fit.
  MEGAMOE_HD bool fits_int32() const {
    return max_pool_rows() + capacity_rows < (int64_t{1} << 31);
  }
};

struct PoolRow {
  int32_t token;  // source token, -1 in a padding row
  int32_t slot;   // -1 in a padding row
};

// Arrays of one rank's plan. R ranks, T tokens, K slots, E local experts, C chunks.
struct PlanBuffers {
  int32_t* ids;           // [R*T*K] ids of all ranks, gathered by the caller before count_chunk
  int32_t* counts;        // [E + 1][C] table that is counted and scanned
  int32_t* expert_rows;   // [E + 1] rows of each expert; the last entry is this rank's invalid ids
  int32_t* expert_start;  // [E + 1] first pool row of each segment; the last entry is their end
  int32_t* row_of;        // [R*T*K] pool row of each (source token, slot), -1 if it is not ours
  PoolRow* rows;          // [max_pool_rows] inverse of row_of
  int32_t* pull_rows;     // [E] pull entries of the round by first expert
  int32_t* pull_start;    // [E + 1] first entry of each expert; the last entry is the list's length
  int32_t* pull;          // [R*T] source tokens to pull in this round, in the order of first use
};

// Byte offsets of the plan's arrays in one block.
struct PlanLayout {
  int64_t ids, counts, expert_rows, expert_start, row_of, rows;
  int64_t pull_rows, pull_start, pull;
  int64_t bytes;

  MEGAMOE_HD static PlanLayout of(const PlanShape& shape) {
    PlanLayout at{};
    const int64_t word = sizeof(int32_t);
    const int64_t experts = shape.local_experts;
    at.ids = at.take(shape.slots() * word);
    at.counts = at.take((experts + 1) * shape.chunks() * word);
    at.expert_rows = at.take((experts + 1) * word);
    at.expert_start = at.take((experts + 1) * word);
    at.row_of = at.take(shape.slots() * word);
    at.rows = at.take(shape.max_pool_rows() * static_cast<int64_t>(sizeof(PoolRow)));
    at.pull_rows = at.take(experts * word);
    at.pull_start = at.take((experts + 1) * word);
    at.pull = at.take(shape.source_tokens() * word);
    return at;
  }

  MEGAMOE_HD PlanBuffers at(char* base) const {
    PlanBuffers b;
    b.ids = reinterpret_cast<int32_t*>(base + ids);
    b.counts = reinterpret_cast<int32_t*>(base + counts);
    b.expert_rows = reinterpret_cast<int32_t*>(base + expert_rows);
    b.expert_start = reinterpret_cast<int32_t*>(base + expert_start);
    b.row_of = reinterpret_cast<int32_t*>(base + row_of);
    b.rows = reinterpret_cast<PoolRow*>(base + rows);
    b.pull_rows = reinterpret_cast<int32_t*>(base + pull_rows);
    b.pull_start = reinterpret_cast<int32_t*>(base + pull_start);
    b.pull = reinterpret_cast<int32_t*>(base + pull);
    return b;
  }

 private:
  MEGAMOE_HD int64_t take(int64_t size) {
    const int64_t offset = bytes;
    bytes = align_up(bytes + size, 256);
    return offset;
  }
};

// 32 lanes on the host: one after the other.
struct HostTeam {
  template <class F>
  void each(F f) const {
    for (int32_t lane = 0; lane < kLanes; ++lane) f(lane);
  }
  // Sets bits in scratch that all lanes share; returns what was there before.
  uint32_t bit_or(uint32_t* word, uint32_t bits) const {
    const uint32_t old = *word;
    *word = old | bits;
    return old;
  }
  void add(uint32_t* word, uint32_t value) const { *word += value; }
  // Replaces values[0..n) by their exclusive prefix sums; returns the sum.
  int32_t exclusive_scan(int32_t* values, int32_t n) const {
    int32_t sum = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t value = values[i];
      values[i] = sum;
      sum += value;
    }
    return sum;
  }
};

#ifdef __CUDACC__
// 32 lanes on the device: one converged warp. Scratch is shared or global memory of this warp.
struct WarpTeam {
  template <class F>
  MEGAMOE_HD void each(F f) const {
#ifdef __CUDA_ARCH__
    f(static_cast<int32_t>(threadIdx.x % kLanes));
    __syncwarp();
#endif
  }
  MEGAMOE_HD uint32_t bit_or(uint32_t* word, uint32_t bits) const {
#ifdef __CUDA_ARCH__
    return atomicOr(word, bits);
#else
    return 0;
#endif
  }
  MEGAMOE_HD void add(uint32_t* word, uint32_t value) const {
#ifdef __CUDA_ARCH__
    atomicAdd(word, value);
#endif
  }
  MEGAMOE_HD int32_t exclusive_scan(int32_t* values, int32_t n) const {
    int32_t sum = 0;
#ifdef __CUDA_ARCH__
    const int32_t lane = threadIdx.x % kLanes;
    for (int32_t base = 0; base < n; base += kBatch * kLanes) {
      int32_t own[kBatch];
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        const int32_t i = base + b * kLanes + lane;
        own[b] = i < n ? values[i] : 0;
      }
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        int32_t up_to = own[b];
#pragma unroll
        for (int32_t step = 1; step < kLanes; step *= 2) {
          const int32_t other = __shfl_up_sync(~0u, up_to, step);
          if (lane >= step) up_to += other;
        }
        const int32_t i = base + b * kLanes + lane;
        if (i < n) values[i] = sum + up_to - own[b];
        sum += __shfl_sync(~0u, up_to, kLanes - 1);
      }
    }
#endif
    return sum;
  }
};
#endif

namespace plan_internal {

MEGAMOE_HD inline int32_t pop_count(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Local expert of an id, or -1 if the id is unrouted, invalid or another rank's.
MEGAMOE_HD inline int32_t local_expert(const PlanShape& shape, int32_t rank, int32_t id) {
  // In int64: an invalid id may be any int32.
  const int64_t local = int64_t{id} - int64_t{rank} * shape.local_experts;
  return local >= 0 && local < shape.local_experts ? static_cast<int32_t>(local) : -1;
}

MEGAMOE_HD inline bool is_invalid(const PlanShape& shape, int32_t id) {
  return id < -1 || id >= int64_t{shape.ranks} * shape.local_experts;
}

// Scratch of a chunk: one mask of the chunk's tokens for each local expert, then two words.
struct ChunkScratch {
  uint32_t* masks;
  uint32_t* repeated;  // bit of each token that names one local expert more than once
  uint32_t* invalid;   // invalid ids among this rank's own tokens

  MEGAMOE_HD ChunkScratch(const PlanShape& shape, uint32_t* words)
      : masks(words),
        repeated(words + shape.local_experts),
        invalid(words + shape.local_experts + 1) {}
};

template <class Team>
MEGAMOE_HD void mask_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                           const PlanBuffers& plan, int32_t chunk, const ChunkScratch& scratch) {
  team.each([&](int32_t lane) {
    for (int32_t e = lane; e < shape.local_experts + 2; e += kLanes) scratch.masks[e] = 0;
  });
  team.each([&](int32_t lane) {
    const int64_t token = int64_t{chunk} * kLanes + lane;
    if (token >= shape.source_tokens()) return;
    const uint32_t bit = uint32_t{1} << lane;
    const int32_t* ids = plan.ids + token * shape.top_k;
    const bool own = token / shape.tokens == rank;
    for (int32_t first = 0; first < shape.top_k; first += kBatch) {
      int32_t batch[kBatch];
      MEGAMOE_UNROLL
      for (int32_t i = 0; i < kBatch; ++i) batch[i] = first + i < shape.top_k ? ids[first + i] : -1;
      MEGAMOE_UNROLL
      for (int32_t i = 0; i < kBatch; ++i) {
        const int32_t e = local_expert(shape, rank, batch[i]);
        if (e >= 0 && (team.bit_or(&scratch.masks[e], bit) & bit)) {
          team.bit_or(scratch.repeated, bit);
        }
        if (own && is_invalid(shape, batch[i])) team.add(scratch.invalid, 1);
      }
    }
  });
}

// Rows of expert e among the first `tokens` tokens of the chunk, and in the first `slots` slots of
// the next one. Exact for any ids; used only for chunks with a repeated expert.
MEGAMOE_HD inline int32_t count_slowly(const PlanShape& shape, int32_t rank,
                                       const PlanBuffers& plan, int32_t chunk, int32_t e,
                                       int32_t tokens, int32_t slots) {
  const int64_t first = int64_t{chunk} * kLanes * shape.top_k;
  const int64_t wanted = int64_t{tokens} * shape.top_k + slots;
  const int64_t end = first + wanted < shape.slots() ? first + wanted : shape.slots();
  int32_t count = 0;
  for (int64_t i = first; i < end; ++i) count += local_expert(shape, rank, plan.ids[i]) == e;
  return count;
}

// First local expert for which this source token is pulled in the round, or -1. Pool rows are
// ordered by expert, so it is the expert of the lowest row inside the round's window.
MEGAMOE_HD inline int32_t first_expert(const PlanShape& shape, int32_t rank,
                                       const PlanBuffers& plan, int32_t round, int64_t token) {
  const int64_t end = (int64_t{round} + 1) * shape.capacity_rows;
  const int64_t begin =
      end - shape.capacity_rows + (token / shape.tokens == rank ? shape.copied_rows : 0);
  if (begin >= end) return -1;
  int64_t lowest = end;
  int32_t first_expert = -1;
  for (int32_t first = 0; first < shape.top_k; first += kBatch) {
    MEGAMOE_UNROLL
    for (int32_t i = 0; i < kBatch; ++i) {
      if (first + i >= shape.top_k) continue;
      const int64_t at = token * shape.top_k + first + i;
      const int64_t row = plan.row_of[at];
      if (row < begin || row >= lowest) continue;
      lowest = row;
      first_expert = local_expert(shape, rank, plan.ids[at]);
    }
  }
  return first_expert;
}

template <class Team>
MEGAMOE_HD void mask_pull_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                                const PlanBuffers& plan, int32_t round, int32_t chunk,
                                uint32_t* masks) {
  team.each([&](int32_t lane) {
    for (int32_t e = lane; e < shape.local_experts; e += kLanes) masks[e] = 0;
  });
  team.each([&](int32_t lane) {
    const int64_t token = int64_t{chunk} * kLanes + lane;
    if (token >= shape.source_tokens()) return;
    const int32_t e = first_expert(shape, rank, plan, round, token);
    if (e >= 0) team.bit_or(&masks[e], uint32_t{1} << lane);
  });
}

}  // namespace plan_internal

// Counts the chunk's rows of every local expert, and the invalid ids among this rank's own tokens.
template <class Team>
MEGAMOE_HD void count_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                            const PlanBuffers& plan, int32_t chunk, uint32_t* scratch_words) {
  using namespace plan_internal;
  const ChunkScratch scratch(shape, scratch_words);
  mask_chunk(team, shape, rank, plan, chunk, scratch);
  team.each([&](int32_t lane) {
    const bool repeated = *scratch.repeated != 0;
    for (int32_t e = lane; e < shape.local_experts; e += kLanes) {
      plan.counts[int64_t{e} * shape.chunks() + chunk] =
          repeated ? count_slowly(shape, rank, plan, chunk, e, kLanes, 0)
                   : pop_count(scratch.masks[e]);
    }
    if (lane == 0) {
      plan.counts[int64_t{shape.local_experts} * shape.chunks() + chunk] = *scratch.invalid;
    }
  });
}

// Row `e` of the count table becomes the number of the expert's rows before each chunk.
// e = local_experts sums the invalid ids.
template <class Team>
MEGAMOE_HD void scan_counts(const Team& team, const PlanShape& shape, const PlanBuffers& plan,
                            int32_t e) {
  plan.expert_rows[e] =
      team.exclusive_scan(plan.counts + int64_t{e} * shape.chunks(), shape.chunks());
}

// Start of every expert's segment.
template <class Team>
MEGAMOE_HD void start_experts(const Team& team, const PlanShape& shape, const PlanBuffers& plan) {
  team.each([&](int32_t lane) {
    if (lane != 0) return;
    int32_t start = 0;
    for (int32_t e = 0; e < shape.local_experts; ++e) {
      plan.expert_start[e] = start;
      start += static_cast<int32_t>(align_up(plan.expert_rows[e], kTileM));
    }
    plan.expert_start[shape.local_experts] = start;
  });
}

// Padding rows of one expert.
template <class Team>
MEGAMOE_HD void fill_expert(const Team& team, const PlanBuffers& plan, int32_t e) {
  team.each([&](int32_t lane) {
    const int32_t end = plan.expert_start[e + 1];
    for (int32_t row = plan.expert_start[e] + plan.expert_rows[e] + lane; row < end;
         row += kLanes) {
      plan.rows[row] = PoolRow{-1, -1};
    }
  });
}

// Gives every slot of the chunk its pool row, and tells it to placed(source token, slot, row).
template <class Team, class Placed>
MEGAMOE_HD void place_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                            const PlanBuffers& plan, int32_t chunk, uint32_t* scratch_words,
                            const Placed& placed) {
  using namespace plan_internal;
  const ChunkScratch scratch(shape, scratch_words);
  mask_chunk(team, shape, rank, plan, chunk, scratch);
  team.each([&](int32_t lane) {
    const int64_t token = int64_t{chunk} * kLanes + lane;
    if (token >= shape.source_tokens()) return;
    const uint32_t lower_lanes = (uint32_t{1} << lane) - 1;
    for (int32_t first = 0; first < shape.top_k; first += kBatch) {
      const int64_t at = token * shape.top_k + first;
      int32_t rows[kBatch];
      MEGAMOE_UNROLL
      for (int32_t i = 0; i < kBatch; ++i) {
        rows[i] = -1;
        if (first + i >= shape.top_k) continue;
        const int32_t e = local_expert(shape, rank, plan.ids[at + i]);
        if (e < 0) continue;
        const int32_t before = *scratch.repeated != 0
                                   ? count_slowly(shape, rank, plan, chunk, e, lane, first + i)
                                   : pop_count(scratch.masks[e] & lower_lanes);
        rows[i] = plan.expert_start[e] + plan.counts[int64_t{e} * shape.chunks() + chunk] + before;
      }
      MEGAMOE_UNROLL
      for (int32_t i = 0; i < kBatch; ++i) {
        if (first + i >= shape.top_k) continue;
        plan.row_of[at + i] = rows[i];
        if (rows[i] < 0) continue;
        plan.rows[rows[i]] = PoolRow{static_cast<int32_t>(token), first + i};
        placed(token, first + i, rows[i]);
      }
    }
  });
}

// Rounds that this rank needs: 0 if it has no rows. Valid after start_experts.
MEGAMOE_HD inline int32_t num_rounds(const PlanShape& shape, const PlanBuffers& plan) {
  return static_cast<int32_t>(
      align_up(plan.expert_start[shape.local_experts], shape.capacity_rows) / shape.capacity_rows);
}

// Counts the chunk's tokens that the round pulls, by the first expert that needs them.
template <class Team>
MEGAMOE_HD void count_pull_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                                 const PlanBuffers& plan, int32_t round, int32_t chunk,
                                 uint32_t* masks) {
  plan_internal::mask_pull_chunk(team, shape, rank, plan, round, chunk, masks);
  team.each([&](int32_t lane) {
    for (int32_t e = lane; e < shape.local_experts; e += kLanes) {
      plan.counts[int64_t{e} * shape.chunks() + chunk] = plan_internal::pop_count(masks[e]);
    }
  });
}

template <class Team>
MEGAMOE_HD void scan_pull_counts(const Team& team, const PlanShape& shape, const PlanBuffers& plan,
                                 int32_t e) {
  plan.pull_rows[e] =
      team.exclusive_scan(plan.counts + int64_t{e} * shape.chunks(), shape.chunks());
}

template <class Team>
MEGAMOE_HD void start_pulls(const Team& team, const PlanShape& shape, const PlanBuffers& plan) {
  team.each([&](int32_t lane) {
    if (lane != 0) return;
    int32_t start = 0;
    for (int32_t e = 0; e < shape.local_experts; ++e) {
      plan.pull_start[e] = start;
      start += plan.pull_rows[e];
    }
    plan.pull_start[shape.local_experts] = start;
  });
}

// Writes the chunk's entries of the round's pull list.
template <class Team>
MEGAMOE_HD void place_pull_chunk(const Team& team, const PlanShape& shape, int32_t rank,
                                 const PlanBuffers& plan, int32_t round, int32_t chunk,
                                 uint32_t* masks) {
  plan_internal::mask_pull_chunk(team, shape, rank, plan, round, chunk, masks);
  team.each([&](int32_t lane) {
    const int64_t token = int64_t{chunk} * kLanes + lane;
    if (token >= shape.source_tokens()) return;
    const int32_t e = plan_internal::first_expert(shape, rank, plan, round, token);
    if (e < 0) return;
    const uint32_t lower_lanes = (uint32_t{1} << lane) - 1;
    plan.pull[plan.pull_start[e] + plan.counts[int64_t{e} * shape.chunks() + chunk] +
              plan_internal::pop_count(masks[e] & lower_lanes)] = static_cast<int32_t>(token);
  });
}

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_PLAN_PLAN_H_
