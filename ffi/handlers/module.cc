// The Python module _ffi: registrations, workspaces, and the plan for its tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/handlers/host_handlers.h"
#include "ffi/plan/host_plan.h"
#include "ffi/plan/tile_order.h"
#include "ffi/workspace/device_block.h"
#include "ffi/workspace/host_workspace.h"
#include "ffi/workspace/layout.h"
#include "xla/ffi/api/c_api.h"

#ifdef MEGAMOE_WITH_CUDA
#include "ffi/handlers/cuda_handlers.h"
#include "ffi/kernels/kernels.h"
#include "ffi/workspace/cuda_workspace.h"
#endif

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace megamoe {
namespace {

template <class T>
nb::capsule handler(T* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>);
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict host_target(nb::capsule execute) {
  nb::dict stages;
  stages["instantiate"] = handler(MegamoeHostInstantiate);
  stages["execute"] = execute;
  return stages;
}

nb::dict host_targets() {
  nb::dict targets;
  targets["jax_megamoe_forward"] = host_target(handler(MegamoeHostForward));
  targets["jax_megamoe_backward"] = host_target(handler(MegamoeHostBackward));
  return targets;
}

nb::dict host_types() {
  nb::dict state;
  state["type_id"] = nb::capsule(static_cast<void*>(host_state_type_id()));
  state["type_info"] = nb::capsule(static_cast<const void*>(host_state_type_info()));
  nb::dict types;
  types["jax_megamoe_host_call_site"] = state;
  return types;
}

nb::dict cuda_targets() {
  nb::dict targets;
#ifdef MEGAMOE_WITH_CUDA
  add_cuda_targets(targets);
#endif
  return targets;
}

nb::dict cuda_types() {
  nb::dict types;
#ifdef MEGAMOE_WITH_CUDA
  add_cuda_types(types);
#endif
  return types;
}

WorkspaceShape make_shape(int32_t ranks, int32_t tokens, int32_t top_k, int32_t local_experts,
                          int32_t hidden, int32_t intermediate, int32_t capacity_rows,
                          int32_t staged_bytes) {
  WorkspaceShape shape;
  shape.plan.ranks = ranks;
  shape.plan.tokens = tokens;
  shape.plan.top_k = top_k;
  shape.plan.local_experts = local_experts;
  shape.plan.capacity_rows = capacity_rows;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.staged_bytes = staged_bytes;
  return shape;
}

void check_shape(const PlanShape& plan) {
  if (plan.ranks < 1 || plan.tokens < 0 || plan.top_k < 1 || plan.local_experts < 1) {
    throw nb::value_error(
        "ranks, top_k and local_experts must be at least 1 and tokens at least 0");
  }
  if (plan.capacity_rows < kTileM || plan.capacity_rows % kTileM != 0) {
    const std::string message = "capacity_rows is " + std::to_string(plan.capacity_rows) +
                                "; it must be a positive multiple of " + std::to_string(kTileM);
    throw nb::value_error(message.c_str());
  }
}

// The GPU kernels keep every row in bf16. Operands are staged where processes share a workspace.
WorkspaceShape make_cuda_shape(int32_t ranks, int32_t tokens, int32_t top_k, int32_t local_experts,
                               int32_t hidden, int32_t intermediate, int32_t capacity_rows,
                               bool staged) {
  constexpr int32_t kBf16Bytes = 2;
  WorkspaceShape shape = make_shape(ranks, tokens, top_k, local_experts, hidden, intermediate,
                                    capacity_rows, staged ? kBf16Bytes : 0);
  shape.pool_bytes = shape.return_bytes = kBf16Bytes;
  shape.carried_copies = 2;
  check_shape(shape.plan);
  return shape;
}

void register_workspace(int64_t key, int32_t ranks, int32_t tokens, int32_t top_k,
                        int32_t local_experts, int32_t hidden, int32_t intermediate,
                        int32_t capacity_rows, int32_t staged_bytes) {
  const WorkspaceShape shape = make_shape(ranks, tokens, top_k, local_experts, hidden, intermediate,
                                          capacity_rows, staged_bytes);
  check_shape(shape.plan);
  const std::string refusal = register_host_workspace(key, shape);
  if (!refusal.empty()) throw nb::value_error(refusal.c_str());
}

#ifdef MEGAMOE_WITH_CUDA
// For what may wait for a GPU: meanwhile other threads of Python go on, among them one that may be
// about to make the call for which that GPU's kernel waits.
template <class F>
std::string without_gil(const F& f) {
  const nb::gil_scoped_release release;
  return f();
}

void register_cuda_workspace(int64_t key, int32_t ranks, int32_t tokens, int32_t top_k,
                             int32_t local_experts, int32_t hidden, int32_t intermediate,
                             int32_t capacity_rows, const std::vector<int>& devices) {
  const WorkspaceShape shape = make_cuda_shape(ranks, tokens, top_k, local_experts, hidden,
                                               intermediate, capacity_rows, false);
  const std::string refusal = without_gil([&] { return make_cuda_workspace(key, shape, devices); });
  if (!refusal.empty()) throw nb::value_error(refusal.c_str());
}

nb::list allocate_workspace(int64_t key, int32_t ranks, int32_t tokens, int32_t top_k,
                            int32_t local_experts, int32_t hidden, int32_t intermediate,
                            int32_t capacity_rows, const std::vector<int>& devices) {
  const WorkspaceShape shape = make_cuda_shape(ranks, tokens, top_k, local_experts, hidden,
                                               intermediate, capacity_rows, true);
  std::vector<cudaIpcMemHandle_t> handles;
  const std::string refusal =
      without_gil([&] { return allocate_cuda_workspace(key, shape, devices, &handles); });
  if (!refusal.empty()) throw nb::value_error(refusal.c_str());
  nb::list list;
  for (const auto& handle : handles) list.append(nb::bytes(&handle, sizeof(handle)));
  return list;
}

void open_workspace(int64_t key, nb::list handles, const std::vector<std::string>& names,
                    int first) {
  std::vector<cudaIpcMemHandle_t> opened(nb::len(handles));
  for (size_t i = 0; i < opened.size(); ++i) {
    const nb::bytes bytes = nb::cast<nb::bytes>(handles[i]);
    if (bytes.size() != sizeof(opened[i])) throw nb::value_error("not a handle of GPU memory");
    std::memcpy(&opened[i], bytes.data(), bytes.size());
  }
  const std::string refusal =
      without_gil([&] { return open_cuda_workspace(key, opened, names, first); });
  if (!refusal.empty()) throw nb::value_error(refusal.c_str());
}
#endif

int64_t workspace_bytes(int32_t ranks, int32_t tokens, int32_t top_k, int32_t local_experts,
                        int32_t hidden, int32_t intermediate, int32_t capacity_rows,
                        int32_t staged_bytes, int32_t pool_bytes, int32_t return_bytes) {
  WorkspaceShape shape = make_shape(ranks, tokens, top_k, local_experts, hidden, intermediate,
                                    capacity_rows, staged_bytes);
  check_shape(shape.plan);
  shape.pool_bytes = pool_bytes;
  shape.return_bytes = return_bytes;
  return WorkspaceLayout::of(shape).bytes;
}

int64_t cuda_workspace_bytes(int32_t ranks, int32_t tokens, int32_t top_k, int32_t local_experts,
                             int32_t hidden, int32_t intermediate, int32_t capacity_rows,
                             bool staged) {
  return DeviceLayout::of(make_cuda_shape(ranks, tokens, top_k, local_experts, hidden, intermediate,
                                          capacity_rows, staged))
      .bytes;
}

using IdArray = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

nb::list list(const int32_t* values, int64_t n) {
  nb::list list;
  for (int64_t i = 0; i < n; ++i) list.append(values[i]);
  return list;
}

// The whole plan of `rank` for ids [R, T, K], with the pull list of every round, as lists.
nb::dict plan(IdArray ids, int32_t rank, int32_t local_experts, int32_t capacity_rows,
              int32_t copied_rows) {
  PlanShape shape;
  shape.ranks = static_cast<int32_t>(ids.shape(0));
  shape.tokens = static_cast<int32_t>(ids.shape(1));
  shape.top_k = static_cast<int32_t>(ids.shape(2));
  shape.local_experts = local_experts;
  shape.capacity_rows = capacity_rows;
  shape.copied_rows = copied_rows;
  check_shape(shape);
  const PlanLayout layout = PlanLayout::of(shape);
  // Poisoned, so that a plan that reads what it has not written shows.
  std::vector<char> block(layout.bytes, static_cast<char>(0xa5));
  const PlanBuffers plan = layout.at(block.data());
  std::copy_n(ids.data(), shape.slots(), plan.ids);
  build_plan(shape, rank, plan);
  const int64_t pool_rows = plan.expert_start[local_experts];
  nb::dict result;
  result["expert_rows"] = list(plan.expert_rows, local_experts);
  result["invalid_ids"] = plan.expert_rows[local_experts];
  result["expert_start"] = list(plan.expert_start, local_experts + 1);
  result["row_of"] = list(plan.row_of, shape.slots());
  nb::list rows;
  for (int64_t r = 0; r < pool_rows; ++r) {
    rows.append(nb::make_tuple(plan.rows[r].token, plan.rows[r].slot));
  }
  result["rows"] = rows;
  nb::list pulls;
  for (int32_t round = 0; round < num_rounds(shape, plan); ++round) {
    build_pull_list(shape, rank, plan, round);
    pulls.append(list(plan.pull, plan.pull_start[local_experts]));
  }
  result["pulls"] = pulls;
  return result;
}

// Claims of both products' tiles by CTAs that go on in turns drawn by `seed`, in their order, as
// tuples (CTA, second, group, m, n).
nb::list tile_claims(const std::vector<int>& tile_start, int first_columns, int second_columns,
                     int lead, int ctas, uint32_t seed) {
  struct Counters {
    int* claimed;
    int first() const { return claimed[0]++; }
    int second() const { return claimed[1]++; }
    int first_claimed() const { return claimed[0]; }
  };
  int claimed[2] = {};
  std::vector<std::pair<int, Claims<Counters>>> busy;
  for (int cta = 0; cta < ctas; ++cta) {
    busy.emplace_back(
        cta, Claims<Counters>({claimed}, tile_start.data(), static_cast<int>(tile_start.size()) - 1,
                              first_columns, second_columns, lead, cta % kSecondShare == 0));
  }
  nb::list order;
  std::mt19937 random(seed);
  while (!busy.empty()) {
    const size_t which = random() % busy.size();
    bool second;
    TilePlace at;
    if (busy[which].second.next(&second, &at)) {
      order.append(nb::make_tuple(busy[which].first, second, at.group, at.m, at.n));
    } else {
      busy.erase(busy.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  return order;
}

}  // namespace

NB_MODULE(_ffi, m) {
#ifdef MEGAMOE_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  // XLA FFI version of the headers that this module was compiled with.
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("tile_rows") = kTileM;
  m.def("host_targets", host_targets);
  m.def("host_types", host_types);
  m.def("cuda_targets", cuda_targets);
  m.def("cuda_types", cuda_types);
  m.def("register_workspace", register_workspace, "key"_a, nb::kw_only(), "ranks"_a, "tokens"_a,
        "top_k"_a, "local_experts"_a, "hidden"_a, "intermediate"_a, "capacity_rows"_a,
        "staged_bytes"_a);
#ifdef MEGAMOE_WITH_CUDA
  m.def("register_cuda_workspace", register_cuda_workspace, "key"_a, nb::kw_only(), "ranks"_a,
        "tokens"_a, "top_k"_a, "local_experts"_a, "hidden"_a, "intermediate"_a, "capacity_rows"_a,
        "devices"_a);
  m.def("has_cuda_workspace", [](int64_t key) { return find_cuda_workspace(key) != nullptr; });
  m.def("allocate_cuda_workspace", allocate_workspace, "key"_a, nb::kw_only(), "ranks"_a,
        "tokens"_a, "top_k"_a, "local_experts"_a, "hidden"_a, "intermediate"_a, "capacity_rows"_a,
        "devices"_a);
  m.def("open_cuda_workspace", open_workspace, "key"_a, "handles"_a, "names"_a, "first"_a);
  using WithoutGil = nb::call_guard<nb::gil_scoped_release>;
  m.def("keep_cuda_workspace", keep_cuda_workspace, WithoutGil());
  m.def("drop_cuda_workspace", drop_cuda_workspace, WithoutGil());
  m.def("cuda_device_name", cuda_device_name);
  m.def("fill_cuda_workspace", [](int64_t key, int byte) {
    const std::string refusal = fill_cuda_workspace(key, byte);
    if (!refusal.empty()) throw nb::value_error(refusal.c_str());
  });
  m.attr("timeline_marks") = kTimelineMarks;
  m.def("forward_timeline", forward_timeline);
  m.def("forward_pulled_bytes", forward_pulled_bytes);
  m.def("backward_pulled_bytes", backward_pulled_bytes);
  m.def("backward_timeline", backward_timeline);
#endif
  m.def("workspace_bytes", workspace_bytes, nb::kw_only(), "ranks"_a, "tokens"_a, "top_k"_a,
        "local_experts"_a, "hidden"_a, "intermediate"_a, "capacity_rows"_a, "staged_bytes"_a,
        "pool_bytes"_a, "return_bytes"_a);
  m.def("cuda_workspace_bytes", cuda_workspace_bytes, nb::kw_only(), "ranks"_a, "tokens"_a,
        "top_k"_a, "local_experts"_a, "hidden"_a, "intermediate"_a, "capacity_rows"_a,
        "staged"_a = false);
  m.def("plan", plan, "ids"_a, nb::kw_only(), "rank"_a, "local_experts"_a, "capacity_rows"_a,
        "copied_rows"_a = 0);
  m.def("tile_claims", tile_claims, "tile_start"_a, "first_columns"_a, "second_columns"_a, "lead"_a,
        "ctas"_a, "seed"_a);
}

}  // namespace megamoe
