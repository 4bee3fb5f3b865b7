// XLA FFI handlers of the CPU platform.
#ifndef JAX_MEGAMOE_FFI_HANDLERS_HOST_HANDLERS_H_
#define JAX_MEGAMOE_FFI_HANDLERS_HOST_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

// Both targets share the instantiate stage.
XLA_FFI_DECLARE_HANDLER_SYMBOL(MegamoeHostInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MegamoeHostForward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MegamoeHostBackward);

namespace megamoe {

// The type of the state that the instantiate stage makes; to be registered before the targets.
xla::ffi::TypeId* host_state_type_id();
const xla::ffi::TypeInfo* host_state_type_info();

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_HANDLERS_HOST_HANDLERS_H_
