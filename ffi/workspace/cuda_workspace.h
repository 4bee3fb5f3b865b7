// Symmetric workspaces on GPUs, by key.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/workspace/device_block.h"

namespace megamoe {

// Vectors are by place in the directory. A place that belongs to another process has device -1 and
// null pointers.
struct CudaWorkspace {
  WorkspaceShape shape;
  DeviceLayout layout;
  std::vector<int> device;           // CUDA device of each block
  std::vector<char*> block;          // as this process allocated it
  std::vector<Failure*> failure;     // host memory that the block's device can write
  std::vector<cudaStream_t> stream;  // one a block, only where blocks share a device
  // address[i][j]: where the device of this process's place i sees block j. Empty for places i of
  // other processes.
  std::vector<std::vector<char*>> address;
};

// Makes the workspace of `key` with one block on each of the devices, which must reach each other's
// memory, and loads the kernels there. A device may be named more than once: its blocks are then
// ranks of one GPU. Making it again changes nothing. Allocates, synchronizes; never call it while a
// kernel of ours is in flight on another device. Returns an empty string, or what went wrong.
std::string make_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                const std::vector<int>& devices);

// The same for a workspace that spans processes of this host, in steps, because all processes must
// have done each before any does the next. The shape must have staged_bytes.
//
// 1. Allocates this process's blocks; returns the handle by which others open each.
std::string allocate_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                    const std::vector<int>& devices,
                                    std::vector<cudaIpcMemHandle_t>* handles);
// 2. Opens the others' blocks. `handles` and `names`, for messages, are by place in the directory;
//    the places of this process begin at `first`.
std::string open_cuda_workspace(int64_t key, const std::vector<cudaIpcMemHandle_t>& handles,
                                const std::vector<std::string>& names, int first);
// 3. The custom calls find it from now on.
void keep_cuda_workspace(int64_t key);
// Instead, at any step: frees what there is.
void drop_cuda_workspace(int64_t key);

// PCI bus id, which all processes of a host know a device by.
std::string cuda_device_name(int device);

// nullptr if there is none. Never freed: while a process lives its peers' kernels may be using its
// blocks, and when it ends the driver frees what no other process maps.
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
