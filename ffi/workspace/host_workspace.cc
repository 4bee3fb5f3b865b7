#include "ffi/workspace/host_workspace.h"

#include <cstdlib>
#include <map>
#include <new>
#include <utility>

namespace megamoe {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<HostWorkspace>> workspaces;
};

Registry& global_registry() {
  static Registry* registry = new Registry;
  return *registry;
}

bool same(const WorkspaceShape& a, const WorkspaceShape& b) {
  return a.plan.ranks == b.plan.ranks && a.plan.tokens == b.plan.tokens &&
         a.plan.top_k == b.plan.top_k && a.plan.local_experts == b.plan.local_experts &&
         a.plan.capacity_rows == b.plan.capacity_rows && a.hidden == b.hidden &&
         a.intermediate == b.intermediate && a.staged_bytes == b.staged_bytes &&
         a.pool_bytes == b.pool_bytes && a.return_bytes == b.return_bytes;
}

}  // namespace

void HostBlocks::Free::operator()(char* block) const { std::free(block); }

HostBlocks::HostBlocks(const WorkspaceShape& shape) : layout_(WorkspaceLayout::of(shape)) {
  for (int32_t rank = 0; rank < shape.plan.ranks; ++rank) {
    void* block = std::aligned_alloc(256, static_cast<size_t>(layout_.bytes));
    if (block == nullptr) throw std::bad_alloc();
    blocks_.emplace_back(static_cast<char*>(block));
  }
}

HostWorkspace::Lease::~Lease() {
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  owner_->free_.push_back(std::move(blocks_));
}

HostWorkspace::Lease HostWorkspace::acquire() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      std::unique_ptr<HostBlocks> blocks = std::move(free_.back());
      free_.pop_back();
      return Lease(this, std::move(blocks));
    }
  }
  return Lease(this, std::make_unique<HostBlocks>(shape_));
}

std::string register_host_workspace(int64_t key, const WorkspaceShape& shape) {
  if (!shape.plan.fits_int32()) {
    return "ranks x tokens x top_k is " + std::to_string(shape.plan.slots()) +
           "; with padding it must stay below 2**31";
  }
  Registry& registry = global_registry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto& workspace = registry.workspaces[key];
  if (workspace == nullptr) {
    workspace = std::make_unique<HostWorkspace>(shape);
  } else if (!same(workspace->shape(), shape)) {
    return "workspace key " + std::to_string(key) + " is already in use for another shape";
  }
  return "";
}

HostWorkspace* find_host_workspace(int64_t key) {
  Registry& registry = global_registry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto it = registry.workspaces.find(key);
  return it == registry.workspaces.end() ? nullptr : it->second.get();
}

}  // namespace megamoe
