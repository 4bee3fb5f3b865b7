// Workspaces of the host handlers, by key.
#ifndef JAX_MEGAMOE_FFI_WORKSPACE_HOST_WORKSPACE_H_
#define JAX_MEGAMOE_FFI_WORKSPACE_HOST_WORKSPACE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/workspace/layout.h"

namespace megamoe {

// The blocks of all ranks for one call in flight.
class HostBlocks {
 public:
  // Throws std::bad_alloc.
  explicit HostBlocks(const WorkspaceShape& shape);

  const WorkspaceLayout& layout() const { return layout_; }

  template <class T>
  T* at(int32_t rank, int64_t offset) const {
    return reinterpret_cast<T*>(blocks_[rank].get() + offset);
  }

  PlanBuffers plan(int32_t rank) const {
    return layout_.plan.at(blocks_[rank].get() + layout_.plan_base);
  }

 private:
  struct Free {
    void operator()(char* block) const;
  };

  WorkspaceLayout layout_;
  std::vector<std::unique_ptr<char, Free>> blocks_;
};

// All calls with one key. Two calls in flight never share blocks; blocks are kept for later calls.
class HostWorkspace {
 public:
  explicit HostWorkspace(const WorkspaceShape& shape) : shape_(shape) {}

  const WorkspaceShape& shape() const { return shape_; }

  // Blocks for one call, given back when the pointer is destroyed.
  class Lease {
   public:
    Lease(HostWorkspace* owner, std::unique_ptr<HostBlocks> blocks)
        : owner_(owner), blocks_(std::move(blocks)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const HostBlocks& blocks() const { return *blocks_; }

   private:
    HostWorkspace* owner_;
    std::unique_ptr<HostBlocks> blocks_;
  };
  Lease acquire();

 private:
  const WorkspaceShape shape_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HostBlocks>> free_;
};

// Makes the workspace of `key`. The same key and shape again change nothing; another shape under
// the same key, or one that does not fit, is refused with the returned message. Empty: done.
std::string register_host_workspace(int64_t key, const WorkspaceShape& shape);

// nullptr if the key was not registered in this process. Never freed.
HostWorkspace* find_host_workspace(int64_t key);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_WORKSPACE_HOST_WORKSPACE_H_
