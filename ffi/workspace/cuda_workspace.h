// Symmetric workspaces on GPUs, by key.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/workspace/device_block.h"

namespace megamoe {

struct CudaWorkspace {
  WorkspaceShape shape;
  DeviceLayout layout;
  std::vector<int> device;           // CUDA device of each block
  std::vector<char*> block;          // by place in the directory
  std::vector<Failure*> failure;     // host memory that the block's device can write
  std::vector<cudaStream_t> stream;  // one a block, only where blocks share a device
};

// Makes the workspace of `key` with one block on each of the devices, which must reach each other's
// memory, and loads the kernels there. A device may be named more than once: its blocks are then
// ranks of one GPU. Making it again changes nothing. Allocates, synchronizes; never call it while a
// kernel of ours is in flight on another device. Returns an empty string, or what went wrong.
std::string make_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                const std::vector<int>& devices);

// nullptr if there is none. Never freed.
const CudaWorkspace* find_cuda_workspace(int64_t key);

// What a block's kernels may know of the others.
Directory directory_of(const CudaWorkspace& workspace, int self, double timeout_s);

// The message of a kernel that stopped while waiting, or an empty string. It is also printed to
// stderr when it happens: the error that reaches the caller from a stopped kernel is a bare CUDA
// one.
std::string failure_message(const CudaWorkspace& workspace, int self);

// Fills everything in the blocks but flags with the byte: for tests that nothing unwritten is read.
std::string fill_cuda_workspace(int64_t key, int byte);

}  // namespace megamoe
