// Matrix product of the host handlers, in f32.
#ifndef JAX_MEGAMOE_FFI_HANDLERS_HOST_GEMM_H_
#define JAX_MEGAMOE_FFI_HANDLERS_HOST_GEMM_H_

#include <cstdint>

namespace megamoe {

enum class DType { kF32, kBf16 };

// Converts n elements to f32, exactly.
void to_f32(const void* source, DType type, int64_t n, float* target);
// Rounds n elements to `type`, to nearest even.
void from_f32(const float* source, DType type, int64_t n, void* target);

inline int64_t size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

inline const char* offset(const void* base, DType type, int64_t elements) {
  return static_cast<const char*>(base) + elements * size_of(type);
}

// Left operand: element (m, k) is data[m * stride_m + k * stride_k].
struct LeftMatrix {
  const float* data;
  int64_t stride_m, stride_k;
};

// Right operand: element (k, n) is data[k * stride_k + n * stride_n].
struct RightMatrix {
  const void* data;
  DType type;
  int64_t stride_k, stride_n;
};

// rows[m][n] = (accumulate ? rows[m][n] : 0) + sum over k of left(m, k) * right(k, n).
//
// Every element is one chain of additions in ascending k, so the bits do not depend on how the
// product is cut into tasks, nor on the other rows, and a sum over k may be continued by a later
// call.
void gemm(int64_t m, int64_t n, int64_t k, const LeftMatrix& left, const RightMatrix& right,
          float* const* rows, bool accumulate);

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_HANDLERS_HOST_GEMM_H_
