// The symmetric workspace on GPUs: one block per device, all of the same layout, readable and
// writable by the devices of the same host.
#pragma once

#include <cstdint>

#include "ffi/workspace/layout.h"

namespace megamoe {

constexpr int kMaxDevices = 16;
constexpr int kMaxLocalExperts = 256;
constexpr int kMaxTopK = 32;  // a warp handles a token's slots in one step

// What a waiting kernel writes before it stops, in memory that the host can read at any time.
struct Failure {
  int32_t happened;
  int32_t rank;
  int32_t phase;       // Phase
  int32_t waited_for;  // rank, or tile
  int64_t seen, wanted;
};

enum class Phase : int32_t {
  kDispatch = 1,
  kPlan,
  kGateUp,
  kDown,
  kHiddenGrad,
  kInputGrad,
  kWeightGrad,
  kCombine
};

// A rank's operands for the call with number `epoch`, as it tells them to a peer: addresses, or
// offsets in its block where they are staged (see Directory).
struct Mail {
  uint64_t epoch;
  int32_t group, rank;
  uint64_t x;
  uint64_t dy;  // backward pass only
  uint64_t ids;
  uint64_t weights;
};

// Flags and small tables of a block, at WorkspaceLayout::flags.
struct Board {
  uint64_t epoch;              // calls that this device has begun
  Mail mail[kMaxDevices];      // written by device i of the directory
  uint64_t done[kMaxDevices];  // last epoch that rank r has finished: its rows are here
  // Backward pass: last epoch whose rows rank r has pushed here, told while its kernel still runs.
  uint64_t pushed[kMaxDevices];
  int32_t group, rank;       // of the call in progress
  char* block[kMaxDevices];  // by rank, in the call in progress
  const void* x[kMaxDevices];
  const void* dy[kMaxDevices];
  const int32_t* ids[kMaxDevices];
  const float* weights[kMaxDevices];
  int32_t tile_claim, pull_claim, own_claim;  // next work of the round
  int32_t down_claim;                         // forward pass: next down tile, tile_claim: gate/up
  int32_t hidden_grad_parts;                  // kHiddenGradDone of all tiles of the round
  int32_t pushed_parts;                       // consumer warps that push no more rows in the round
  int32_t combine_claim;                      // next chunk of tokens to combine
  uint32_t plan_barrier;
};
static_assert(sizeof(Board) <= WorkspaceLayout::kFlagBytes);

// What each row tile of the round has so far, counted by those that produce it.
enum Progress : int32_t {
  kArrivedX,        // pieces of x rows
  kArrivedDy,       // pieces of dy rows
  kGateUpDone,      // warps' parts of the gate/up tiles
  kHiddenGradDone,  // warps' parts of the tiles of the gradients of the hidden activations
  kProgressCounters,
};

// Offsets of what only the GPU kernels keep, behind the common layout.
struct DeviceLayout {
  WorkspaceLayout common;
  int64_t row_weight;  // [max_pool_rows] f32, routing weight of each pool row
  int64_t row_target;  // [max_pool_rows] address of the row's place in its home's return buffer
  int64_t counters;    // [4][capacity tiles] int32, zero at the start of a round: see `Progress`
  // Backward pass only: [capacity rows, column tiles of dA] f32, parts of the gradient of each
  // row's routing weight.
  int64_t partial_dots;
  int64_t bytes;

  static constexpr int kTileColumns = 192;  // of the matrix core, kTileN

  static DeviceLayout of(const WorkspaceShape& shape) {
    DeviceLayout at{};
    at.common = WorkspaceLayout::of(shape);
    const int64_t rows = shape.plan.max_pool_rows();
    const int64_t tiles = shape.plan.capacity_rows / kTileM;
    int64_t end = align_up(at.common.bytes, 256);
    const auto take = [&end](int64_t size) {
      const int64_t offset = end;
      end = align_up(end + size, 256);
      return offset;
    };
    at.row_weight = take(rows * 4);
    at.row_target = take(rows * 8);
    at.counters = take(kProgressCounters * tiles * 4);
    const int64_t column_tiles = (shape.intermediate + kTileColumns - 1) / kTileColumns;
    at.partial_dots = take(tiles * kTileM * column_tiles * 4);
    at.bytes = end;
    return at;
  }
};

// One device's view of the blocks of all devices that may be its peers.
struct Directory {
  int32_t devices;
  int32_t self;
  // Some peers are in other processes. They can reach this device's block, which they map at
  // addresses of their own, and nothing else here, so operands are copied into it.
  bool staged;
  char* block[kMaxDevices];
  Failure* failure;
  int64_t timeout_ns;
};

}  // namespace megamoe
