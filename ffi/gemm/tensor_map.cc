#include "ffi/gemm/tensor_map.h"

namespace megamoe {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      pointer = nullptr;
    }
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

template <int kRank>
std::string encode(CUtensorMap* map, const void* matrix, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  if (encode_tiled() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  cuuint32_t steps[kRank];
  for (auto& step : steps) step = 1;
  const CUresult result =
      encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(matrix), sizes,
                     strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return "cuTensorMapEncodeTiled failed with code " + std::to_string(result);
}

cuuint64_t u(int64_t value) { return static_cast<cuuint64_t>(value); }

}  // namespace

std::string encode_k_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                           int64_t columns, int tile_rows) {
  return encode<3>(map, matrix, {u(columns), u(rows), u(batch)},
                   {u(columns * 2), u(rows * columns * 2)},
                   {64, static_cast<cuuint32_t>(tile_rows), 1});
}

std::string encode_mn_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                            int64_t columns, int tile_columns) {
  return encode<4>(map, matrix, {64, u(rows), u(columns / 64), u(batch)},
                   {u(columns * 2), 128, u(rows * columns * 2)},
                   {64, 64, static_cast<cuuint32_t>(tile_columns / 64), 1});
}

}  // namespace megamoe
