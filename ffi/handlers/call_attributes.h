// Attributes of both custom calls, on every platform.
#ifndef JAX_MEGAMOE_FFI_HANDLERS_CALL_ATTRIBUTES_H_
#define JAX_MEGAMOE_FFI_HANDLERS_CALL_ATTRIBUTES_H_

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace megamoe {

struct CallAttributes {
  int64_t workspace;      // key made by jax_megamoe._workspace
  int64_t ranks;          // size of the expert axis
  int64_t capacity_rows;  // pool rows of a round
  std::string_view precision;
  std::string_view wgrad_precision;
  float swiglu_limit;  // infinity: no clamp
  float timeout_s;
  int64_t reserved_sms;
};

}  // namespace megamoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::megamoe::CallAttributes,
                                      ::xla::ffi::StructMember<int64_t>("workspace"),
                                      ::xla::ffi::StructMember<int64_t>("ranks"),
                                      ::xla::ffi::StructMember<int64_t>("capacity_rows"),
                                      ::xla::ffi::StructMember<std::string_view>("precision"),
                                      ::xla::ffi::StructMember<std::string_view>("wgrad_precision"),
                                      ::xla::ffi::StructMember<float>("swiglu_limit"),
                                      ::xla::ffi::StructMember<float>("timeout_s"),
                                      ::xla::ffi::StructMember<int64_t>("reserved_sms"));

#endif  // JAX_MEGAMOE_FFI_HANDLERS_CALL_ATTRIBUTES_H_
