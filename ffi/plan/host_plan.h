// The plan's phases in order, on the host.
#ifndef JAX_MEGAMOE_FFI_PLAN_HOST_PLAN_H_
#define JAX_MEGAMOE_FFI_PLAN_HOST_PLAN_H_

#include "ffi/plan/plan.h"

namespace megamoe {

// Builds the plan of `rank` from the gathered ids in plan.ids.
void build_plan(const PlanShape& shape, int32_t rank, const PlanBuffers& plan);

// Builds the pull list of one round of a complete plan.
void build_pull_list(const PlanShape& shape, int32_t rank, const PlanBuffers& plan, int32_t round);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_PLAN_HOST_PLAN_H_
