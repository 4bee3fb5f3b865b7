#include "ffi/workspace/cuda_workspace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>

#include "ffi/kernels/kernels.h"

namespace megamoe {
namespace {

constexpr char kWayOut[] = "; the 'xla' implementation does not need it";

// Calls take `mutex` to find their workspace, so it is never held while a GPU is waited for: its
// kernel may wait for a peer whose call has yet to find its own. Who makes a workspace holds
// `making` all along.
std::mutex mutex, making;
using Workspaces = std::map<int64_t, std::unique_ptr<CudaWorkspace>>;
Workspaces& workspaces() {
  static auto* all = new Workspaces;
  return *all;
}
// Those that processes are still agreeing on; under `making`.
Workspaces& unfinished() {
  static auto* all = new Workspaces;
  return *all;
}

class DeviceGuard {
 public:
  DeviceGuard() { cudaGetDevice(&device_); }
  ~DeviceGuard() { cudaSetDevice(device_); }

 private:
  int device_ = 0;
};

// First failure of a row of CUDA calls.
class Status {
 public:
  void operator()(cudaError_t status, const std::string& what) {
    if (status != cudaSuccess && message_.empty()) {
      message_ = what + ": " + cudaGetErrorString(status);
    }
  }
  void operator()(const std::string& message) {
    if (message_.empty()) message_ = message;
  }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

std::string enable_peers(const std::set<int>& devices) {
  for (int from : devices) {
    cudaSetDevice(from);
    for (int to : devices) {
      if (from == to) continue;
      int can = 0;
      cudaDeviceCanAccessPeer(&can, from, to);
      if (!can) {
        return "GPU " + std::to_string(from) + " cannot reach the memory of GPU " +
               std::to_string(to) + kWayOut;
      }
      const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
      if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled) {
        return std::string("cudaDeviceEnablePeerAccess: ") + cudaGetErrorString(status);
      }
      cudaGetLastError();  // "already enabled" would be found by the next check
    }
  }
  return "";
}

const char* phase_name(int32_t phase) {
  switch (static_cast<Phase>(phase)) {
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kPlan:
      return "plan";
    case Phase::kGateUp:
      return "gate/up";
    case Phase::kDown:
      return "down";
    case Phase::kHiddenGrad:
      return "hidden gradients";
    case Phase::kInputGrad:
      return "input gradients";
    case Phase::kWeightGrad:
      return "weight gradients";
    case Phase::kCombine:
      return "combine";
  }
  return "unknown";
}

bool process_ends = false;  // under `mutex`

// Prints each failure once. Stops when the process ends, before the driver takes the memory away.
void watch_for_failures() {
  std::set<const Failure*> told;
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::lock_guard<std::mutex> lock(mutex);
    if (process_ends) return;
    for (const auto& [key, workspace] : workspaces()) {
      for (size_t i = 0; i < workspace->failure.size(); ++i) {
        if (workspace->failure[i] == nullptr) continue;
        const std::string message = failure_message(*workspace, static_cast<int>(i));
        if (message.empty() || !told.insert(workspace->failure[i]).second) continue;
        std::fprintf(stderr,
                     "jax_megamoe: %s (the GPU's program is stopped by an illegal memory access, "
                     "which is the error that CUDA reports)\n",
                     message.c_str());
        std::fflush(stderr);
      }
    }
  }
}

// Gives back what this process holds of a workspace that was never used. A peer may still map a
// block that is freed here, but it has no kernel that reads it.
void free_blocks(const CudaWorkspace& workspace) {
  const DeviceGuard guard;
  for (size_t i = 0; i < workspace.block.size(); ++i) {
    if (workspace.device[i] < 0) continue;
    cudaSetDevice(workspace.device[i]);
    for (size_t j = 0; j < workspace.address[i].size(); ++j) {
      if (workspace.device[j] < 0) cudaIpcCloseMemHandle(workspace.address[i][j]);
    }
    if (workspace.stream[i] != nullptr) cudaStreamDestroy(workspace.stream[i]);
    cudaFree(workspace.block[i]);
    cudaFreeHost(workspace.failure[i]);
  }
  cudaGetLastError();
}

std::string allocate_blocks(const WorkspaceShape& shape, const std::vector<int>& devices,
                            CudaWorkspace* made) {
  if (devices.size() > kMaxDevices) {
    return "there are " + std::to_string(devices.size()) + " GPUs; at most " +
           std::to_string(kMaxDevices) + " can share a workspace";
  }
  if (!shape.plan.fits_int32()) {
    return "ranks x tokens x top_k is " + std::to_string(shape.plan.slots()) +
           "; with padding it must stay below 2**31";
  }
  if (shape.plan.top_k > kMaxTopK || shape.plan.local_experts > kMaxLocalExperts) {
    return "a token has " + std::to_string(shape.plan.top_k) + " slots and a rank " +
           std::to_string(shape.plan.local_experts) + " experts; the kernels take at most " +
           std::to_string(kMaxTopK) + " and " + std::to_string(kMaxLocalExperts);
  }
  const DeviceGuard guard;
  const std::set<int> distinct(devices.begin(), devices.end());
  Status check;
  check(enable_peers(distinct));
  made->shape = shape;
  made->layout = DeviceLayout::of(shape);
  // The driver exports memory in pages of 2 MiB, with whatever else is in them.
  const int64_t bytes = align_up(made->layout.bytes, shape.staged_bytes > 0 ? 2 << 20 : 1);
  for (int device : devices) {
    if (!check.message().empty()) break;
    cudaSetDevice(device);
    void* block = nullptr;
    void* failure = nullptr;
    cudaStream_t stream = nullptr;
    check(
        cudaMalloc(&block, bytes),
        "the workspace of " + std::to_string(bytes) + " bytes on GPU " + std::to_string(device) +
            " (a smaller capacity_factor needs less; XLA_PYTHON_CLIENT_MEM_FRACTION leaves more)");
    if (block == nullptr) break;
    check(cudaMemset(static_cast<char*>(block) + made->layout.common.flags, 0, sizeof(Board)),
          "cudaMemset");
    check(cudaHostAlloc(&failure, sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    if (failure != nullptr) *static_cast<Failure*>(failure) = Failure{};
    if (distinct.size() < devices.size()) {
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    check(load_kernels());
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    made->device.push_back(device);
    made->block.push_back(static_cast<char*>(block));
    made->failure.push_back(static_cast<Failure*>(failure));
    made->stream.push_back(stream);
  }
  made->address.assign(made->block.size(), made->block);
  if (!check.message().empty()) free_blocks(*made);
  return check.message();
}

void publish(int64_t key, std::unique_ptr<CudaWorkspace> made) {
  std::lock_guard<std::mutex> lock(mutex);
  workspaces()[key] = std::move(made);
  static const bool watching = [] {
    std::thread(watch_for_failures).detach();
    std::atexit([] {
      std::lock_guard<std::mutex> lock(mutex);
      process_ends = true;
    });
    return true;
  }();
  (void)watching;
}

}  // namespace

std::string make_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                const std::vector<int>& devices) {
  std::lock_guard<std::mutex> lock(making);
  if (find_cuda_workspace(key) != nullptr) return "";
  auto made = std::make_unique<CudaWorkspace>();
  const std::string error = allocate_blocks(shape, devices, made.get());
  if (error.empty()) publish(key, std::move(made));
  return error;
}

std::string allocate_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                    const std::vector<int>& devices,
                                    std::vector<cudaIpcMemHandle_t>* handles) {
  std::lock_guard<std::mutex> lock(making);
  auto made = std::make_unique<CudaWorkspace>();
  const std::string error = allocate_blocks(shape, devices, made.get());
  if (!error.empty()) return error;
  const DeviceGuard guard;
  Status check;
  for (size_t i = 0; i < made->block.size(); ++i) {
    cudaSetDevice(made->device[i]);
    cudaIpcMemHandle_t handle{};
    check(cudaIpcGetMemHandle(&handle, made->block[i]),
          "GPU " + std::to_string(made->device[i]) + " cannot share memory with other processes" +
              kWayOut);
    handles->push_back(handle);
  }
  if (check.message().empty()) {
    unfinished()[key] = std::move(made);
  } else {
    free_blocks(*made);
  }
  return check.message();
}

std::string open_cuda_workspace(int64_t key, const std::vector<cudaIpcMemHandle_t>& handles,
                                const std::vector<std::string>& names, int first) {
  std::lock_guard<std::mutex> lock(making);
  const size_t count = handles.size();
  if (count > kMaxDevices) {
    return "the processes of this host drive " + std::to_string(count) + " GPUs; at most " +
           std::to_string(kMaxDevices) + " can share a workspace";
  }
  CudaWorkspace& made = *unfinished().at(key);
  const auto spread = [&](auto& by_place, auto absent) {
    std::vector<std::decay_t<decltype(absent)>> all(count, absent);
    std::copy(by_place.begin(), by_place.end(), all.begin() + first);
    by_place = std::move(all);
  };
  spread(made.device, -1);
  spread(made.block, static_cast<char*>(nullptr));
  spread(made.failure, static_cast<Failure*>(nullptr));
  spread(made.stream, static_cast<cudaStream_t>(nullptr));
  made.address.assign(count, {});
  const DeviceGuard guard;
  // Each device of this process opens for itself: what the driver maps is good for one device.
  for (size_t i = 0; i < count; ++i) {
    if (made.device[i] < 0) continue;
    cudaSetDevice(made.device[i]);
    for (size_t j = 0; j < count; ++j) {
      void* block = made.block[j];
      if (block == nullptr) {
        const cudaError_t status =
            cudaIpcOpenMemHandle(&block, handles[j], cudaIpcMemLazyEnablePeerAccess);
        if (status != cudaSuccess) {
          cudaGetLastError();
          return "GPU " + std::to_string(made.device[i]) + " cannot reach the memory of " +
                 names[j] + " (" + cudaGetErrorString(status) + ")" + kWayOut;
        }
      }
      made.address[i].push_back(static_cast<char*>(block));
    }
  }
  return "";
}

void keep_cuda_workspace(int64_t key) {
  std::lock_guard<std::mutex> lock(making);
  publish(key, std::move(unfinished().at(key)));
  unfinished().erase(key);
}

void drop_cuda_workspace(int64_t key) {
  std::lock_guard<std::mutex> lock(making);
  const auto found = unfinished().find(key);
  if (found == unfinished().end()) return;
  free_blocks(*found->second);
  unfinished().erase(found);
}

std::string cuda_device_name(int device) {
  char name[32] = "";
  cudaDeviceGetPCIBusId(name, sizeof(name), device);
  return name;
}

std::string fill_cuda_workspace(int64_t key, int byte) {
  const CudaWorkspace* workspace = find_cuda_workspace(key);
  if (workspace == nullptr) return "there is no such workspace";
  const DeviceGuard guard;
  Status check;
  const int64_t flags = workspace->layout.common.flags;
  const int64_t behind = flags + WorkspaceLayout::kFlagBytes;
  for (size_t i = 0; i < workspace->block.size(); ++i) {
    if (workspace->device[i] < 0) continue;
    cudaSetDevice(workspace->device[i]);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemset(workspace->block[i], byte, flags), "cudaMemset");
    check(cudaMemset(workspace->block[i] + behind, byte, workspace->layout.bytes - behind),
          "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  return check.message();
}

const CudaWorkspace* find_cuda_workspace(int64_t key) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = workspaces().find(key);
  return found == workspaces().end() ? nullptr : found->second.get();
}

Directory directory_of(const CudaWorkspace& workspace, int self, double timeout_s) {
  Directory directory{};
  directory.devices = static_cast<int32_t>(workspace.block.size());
  directory.self = self;
  directory.staged = workspace.shape.staged_bytes > 0;
  const std::vector<char*>& address = workspace.address[self];
  std::copy(address.begin(), address.end(), directory.block);
  directory.failure = workspace.failure[self];
  directory.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
  return directory;
}

std::string failure_message(const CudaWorkspace& workspace, int self) {
  const volatile Failure* failure = workspace.failure[self];
  if (!failure->happened) return "";
  const Phase phase = static_cast<Phase>(failure->phase);
  const bool on_rank =
      phase == Phase::kDispatch || phase == Phase::kPlan || phase == Phase::kCombine;
  return "rank " + std::to_string(failure->rank) + " of " +
         std::to_string(workspace.shape.plan.ranks) + " waited too long in phase '" +
         phase_name(failure->phase) + "' for " + (on_rank ? "rank " : "tile ") +
         std::to_string(failure->waited_for) + " (saw " + std::to_string(failure->seen) +
         ", needed " + std::to_string(failure->wanted) +
         "); every rank of the expert axis must make the same calls" +
         (workspace.shape.staged_bytes > 0 ? std::string(", and all must be on one host") + kWayOut
                                           : "");
}

}  // namespace megamoe
