#include "ffi/workspace/cuda_workspace.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "ffi/kernels/kernels.h"

namespace megamoe {
namespace {

std::mutex mutex;
std::map<int64_t, std::unique_ptr<CudaWorkspace>>& workspaces() {
  static auto* all = new std::map<int64_t, std::unique_ptr<CudaWorkspace>>;
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
               std::to_string(to) + "; the 'xla' implementation does not need it";
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

bool process_ends = false;  // under the mutex

// Prints each failure once. Stops when the process ends, before the driver takes the memory away.
void watch_for_failures() {
  std::set<const Failure*> told;
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::lock_guard<std::mutex> lock(mutex);
    if (process_ends) return;
    for (const auto& [key, workspace] : workspaces()) {
      for (size_t i = 0; i < workspace->failure.size(); ++i) {
        const std::string message = failure_message(*workspace, static_cast<int>(i));
        if (message.empty() || !told.insert(workspace->failure[i]).second) continue;
        std::fprintf(stderr, "jax_megamoe: %s\n", message.c_str());
        std::fflush(stderr);
      }
    }
  }
}

}  // namespace

std::string make_cuda_workspace(int64_t key, const WorkspaceShape& shape,
                                const std::vector<int>& devices) {
  std::lock_guard<std::mutex> lock(mutex);
  if (workspaces().count(key)) return "";
  if (devices.size() > kMaxDevices) {
    return "there are " + std::to_string(devices.size()) + " GPUs; at most " +
           std::to_string(kMaxDevices) + " can share a workspace";
  }
  const DeviceGuard guard;
  const std::set<int> distinct(devices.begin(), devices.end());
  Status check;
  check(enable_peers(distinct));
  auto made = std::make_unique<CudaWorkspace>();
  made->shape = shape;
  made->layout = DeviceLayout::For(shape);
  made->device = devices;
  for (int device : devices) {
    if (!check.message().empty()) break;
    cudaSetDevice(device);
    void* block = nullptr;
    void* failure = nullptr;
    cudaStream_t stream = nullptr;
    check(
        cudaMalloc(&block, made->layout.bytes),
        "the workspace of " + std::to_string(made->layout.bytes) + " bytes on GPU " +
            std::to_string(device) +
            " (a smaller capacity_factor needs less; XLA_PYTHON_CLIENT_MEM_FRACTION leaves more)");
    if (block == nullptr) break;
    check(cudaMemset(static_cast<char*>(block) + made->layout.common.flags, 0, sizeof(Board)),
          "cudaMemset");
    check(cudaHostAlloc(&failure, sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    if (failure == nullptr) break;
    *static_cast<Failure*>(failure) = Failure{};
    if (distinct.size() < devices.size()) {
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    check(load_kernels());
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    made->block.push_back(static_cast<char*>(block));
    made->failure.push_back(static_cast<Failure*>(failure));
    made->stream.push_back(stream);
  }
  if (!check.message().empty()) {
    for (char* block : made->block) cudaFree(block);
    for (Failure* failure : made->failure) cudaFreeHost(failure);
    return check.message();
  }
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
  return "";
}

std::string fill_cuda_workspace(int64_t key, int byte) {
  const CudaWorkspace* workspace = find_cuda_workspace(key);
  if (workspace == nullptr) return "there is no such workspace";
  const DeviceGuard guard;
  Status check;
  const int64_t flags = workspace->layout.common.flags;
  const int64_t behind = flags + WorkspaceLayout::kFlagBytes;
  for (size_t i = 0; i < workspace->block.size(); ++i) {
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
  for (size_t i = 0; i < workspace.block.size(); ++i) directory.block[i] = workspace.block[i];
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
         "); every rank of the expert axis must make the same calls";
}

}  // namespace megamoe
