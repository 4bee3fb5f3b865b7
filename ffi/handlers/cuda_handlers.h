// What the CUDA part adds to the module; compiled only with MEGAMOE_WITH_CUDA.
#ifndef JAX_MEGAMOE_FFI_HANDLERS_CUDA_HANDLERS_H_
#define JAX_MEGAMOE_FFI_HANDLERS_CUDA_HANDLERS_H_

#include <nanobind/nanobind.h>

namespace megamoe {

// Adds "target name" -> {"stage": capsule} entries.
void add_cuda_targets(nanobind::dict& targets);
// Adds "type name" -> {"type_id": capsule, "type_info": capsule} entries.
void add_cuda_types(nanobind::dict& types);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_HANDLERS_CUDA_HANDLERS_H_
