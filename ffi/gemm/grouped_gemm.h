// The five products of the layer as grouped GEMMs of their own, without communication: what the
// fused kernels build on, so that the core can be tested and timed alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace megamoe {

enum class Product : int32_t {
  kGateUp = 0,      // out[M,I]   = silu(x[M,H] w_gate[E,H,I]) * (x w_up[E,H,I])
  kDown = 1,        // out[M,H]   = a[M,I] w_down[E,I,H]
  kDownGrad = 2,    // out[M,I]   = dy[M,H] w_down[E,I,H]^T                          (dA)
  kInputGrad = 3,   // out[M,H]   = dg[M,I] w_gate[E,H,I]^T + du[M,I] w_up[E,H,I]^T  (dX)
  kWeightGrad = 4,  // out[E,H,I] = x[rows of e]^T dg[rows of e]                     (dW)
};

// bf16 operands and result. Rows of group e are [128 tile_start[e], 128 tile_start[e + 1]). For
// kWeightGrad those beyond the group's own must be zero, and H a multiple of 128.
struct GroupedGemm {
  Product product;
  int64_t groups, rows, hidden, intermediate;
  const void *a0, *a1, *b0, *b1;
  void* out;
  const int32_t* tile_start;  // [groups + 1], device memory
  int32_t* counter;           // one zero, device memory
};

// Enqueues the product; returns an empty string or what went wrong.
std::string grouped_gemm(const GroupedGemm& call, cudaStream_t stream);

}  // namespace megamoe
