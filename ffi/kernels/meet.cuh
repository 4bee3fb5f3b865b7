// Where the ranks of a call meet.
#pragma once

#include "ffi/kernels/sync.cuh"

namespace megamoe {

// One warp. Tells every device of the directory this rank's place and operands, and waits until the
// other ranks of its group have told theirs. Which device holds which rank is learnt here, because
// the mesh of a shard_map may order the devices in any way.
//
// Staged operands were copied into the block by earlier work of this stream, so all of this device
// sees them here, and the release of `epoch` passes them on to whoever acquires it.
//
// After it: the operands of every rank may be read, and every rank is done with the previous call,
// so its return buffer may be written.
__global__ void meet_kernel(Directory directory, int64_t board_offset, int32_t ranks,
                            const int32_t* place, const void* x, const void* dy, const int32_t* ids,
                            const float* weights) {
  const auto board_of = [&](int device) {
    return reinterpret_cast<Board*>(directory.block[device] + board_offset);
  };
  const int lane = threadIdx.x;
  const auto address = [](const void* p) { return reinterpret_cast<uint64_t>(p); };
  // What the mail's operands are relative to.
  const auto origin_of = [&](int device) {
    return directory.staged ? address(directory.block[device]) : 0;
  };
  Board* own = board_of(directory.self);
  const uint64_t epoch = own->epoch + 1;
  const int group = place[0], rank = place[1];
  __syncwarp();
  if (lane == 0) {
    own->epoch = epoch;
    own->group = group;
    own->rank = rank;
  }
  // A rank alone has no peers, and the first store over a sleeping link takes 0.1 ms.
  const bool meets = ranks > 1 ? lane < directory.devices : lane == directory.self;
  if (meets) {
    volatile Mail* mail = &board_of(lane)->mail[directory.self];
    const uint64_t origin = origin_of(directory.self);
    mail->group = group;
    mail->rank = rank;
    mail->x = address(x) - origin;
    mail->dy = address(dy) - origin;
    mail->ids = address(ids) - origin;
    mail->weights = address(weights) - origin;
    store_release_system(const_cast<uint64_t*>(&mail->epoch), epoch);
  }
  // Lane i listens to device i; devices of other groups may be late without being missed.
  bool found = false;
  uint32_t present = 0;
  const uint64_t start = global_timer_ns();
  while (true) {
    if (meets && !found && load_acquire_system(&own->mail[lane].epoch) == epoch) {
      const volatile Mail* mail = &own->mail[lane];
      if (mail->group == group) {
        found = true;
        const int peer = mail->rank;
        const uint64_t origin = origin_of(lane);
        own->block[peer] = directory.block[lane];
        own->x[peer] = reinterpret_cast<const void*>(origin + mail->x);
        own->dy[peer] = reinterpret_cast<const void*>(origin + mail->dy);
        own->ids[peer] = reinterpret_cast<const int32_t*>(origin + mail->ids);
        own->weights[peer] = reinterpret_cast<const float*>(origin + mail->weights);
        present = 1u << peer;
      }
    }
    if (__popc(__ballot_sync(~0u, found)) >= ranks) break;
    if (global_timer_ns() - start > static_cast<uint64_t>(directory.timeout_ns)) {
      for (int step = 16; step > 0; step /= 2) present |= __shfl_xor_sync(~0u, present, step);
      if (lane == 0) {
        fail(directory, rank, Phase::kDispatch, __ffs(~present) - 1, __popc(present), ranks);
      }
    }
    __nanosleep(100);
  }
}

// One warp. After it: every rank has pushed all rows for this rank's tokens, and reads none of this
// rank's operands any more, so staged ones may be overwritten: a rank reads its peers' ids and
// weights in the plan and their rows in the expert kernels, all before its own finish.
__global__ void finish_kernel(Directory directory, int64_t board_offset, int32_t ranks) {
  Board* own = reinterpret_cast<Board*>(directory.block[directory.self] + board_offset);
  const int lane = threadIdx.x;
  if (lane >= ranks) return;
  const uint64_t epoch = own->epoch;
  __threadfence_system();
  Board* peer = reinterpret_cast<Board*>(own->block[lane] + board_offset);
  store_release_system(&peer->done[own->rank], epoch);
  const uint64_t start = global_timer_ns();
  uint64_t seen;
  while ((seen = load_acquire_system(&own->done[lane])) < epoch) {
    if (global_timer_ns() - start > static_cast<uint64_t>(directory.timeout_ns)) {
      fail(directory, own->rank, Phase::kCombine, lane, static_cast<int64_t>(seen),
           static_cast<int64_t>(epoch));
    }
    __nanosleep(100);
  }
}

}  // namespace megamoe
