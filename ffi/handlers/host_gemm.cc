#include "ffi/handlers/host_gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi/workspace/threads.h"

namespace megamoe {
namespace {

// One task makes a kTaskRows x kPanel piece of the result, kBlock rows at a time in registers.
constexpr int64_t kTaskRows = 256;
constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 4;

// The same code for the processor at hand: 256-bit fused multiply-add where it has them. (Not
// "arch=haswell": that asks for this very processor, by its maker.)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MEGAMOE_CLONES __attribute__((target_clones("fma", "default")))
#else
#define MEGAMOE_CLONES
#endif

float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Eight columns. Written with a vector type because compilers vectorise the plain loops across
// rows.
typedef float Lanes __attribute__((vector_size(32), may_alias));
constexpr int64_t kLanesPerPanel = kPanel / 8;

struct alignas(32) PanelRow {
  float columns[kPanel];
};

// sums[i][:] += sum over s of left(i, s) * panel[s][:], for kRows rows.
template <int64_t kRows>
__attribute__((always_inline)) inline void multiply(int64_t k, const float* left, int64_t stride_m,
                                                    int64_t stride_k, const float* panel,
                                                    float* sums) {
  Lanes acc[kRows][kLanesPerPanel];
  Lanes* sum_lanes = reinterpret_cast<Lanes*>(sums);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows * kLanesPerPanel; ++i) {
    acc[i / kLanesPerPanel][i % kLanesPerPanel] = sum_lanes[i];
  }
  for (int64_t s = 0; s < k; ++s) {
    const Lanes* columns = reinterpret_cast<const Lanes*>(panel + s * kPanel);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kRows * kLanesPerPanel; ++i) {
      acc[i / kLanesPerPanel][i % kLanesPerPanel] +=
          left[i / kLanesPerPanel * stride_m + s * stride_k] * columns[i % kLanesPerPanel];
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows * kLanesPerPanel; ++i) {
    sum_lanes[i] = acc[i / kLanesPerPanel][i % kLanesPerPanel];
  }
}

MEGAMOE_CLONES void multiply_block(int64_t k, const float* left, int64_t stride_m, int64_t stride_k,
                                   const float* panel, float* sums) {
  multiply<kBlock>(k, left, stride_m, stride_k, panel, sums);
}

MEGAMOE_CLONES void multiply_row(int64_t k, const float* left, int64_t stride_k, const float* panel,
                                 float* sums) {
  multiply<1>(k, left, 0, stride_k, panel, sums);
}

template <class T, class Convert>
void pack(const T* source, int64_t stride_k, int64_t stride_n, int64_t k, int64_t width,
          float* panel, Convert convert) {
  for (int64_t s = 0; s < k; ++s) {
    for (int64_t j = 0; j < width; ++j) {
      panel[s * kPanel + j] = convert(source[s * stride_k + j * stride_n]);
    }
    for (int64_t j = width; j < kPanel; ++j) panel[s * kPanel + j] = 0;
  }
}

void pack_panel(const RightMatrix& right, int64_t column, int64_t k, int64_t width, float* panel) {
  const char* source = offset(right.data, right.type, column * right.stride_n);
  if (right.type == DType::kF32) {
    pack(reinterpret_cast<const float*>(source), right.stride_k, right.stride_n, k, width, panel,
         [](float value) { return value; });
  } else {
    pack(reinterpret_cast<const uint16_t*>(source), right.stride_k, right.stride_n, k, width, panel,
         bf16_to_f32);
  }
}

void load_row(const float* row, int64_t width, bool accumulate, float* sums) {
  std::fill_n(sums, kPanel, 0.0f);
  if (accumulate) std::copy_n(row, width, sums);
}

}  // namespace

void to_f32(const void* source, DType type, int64_t n, float* target) {
  if (type == DType::kF32) {
    std::memcpy(target, source, n * sizeof(float));
    return;
  }
  const auto* bits = static_cast<const uint16_t*>(source);
  for (int64_t i = 0; i < n; ++i) target[i] = bf16_to_f32(bits[i]);
}

void from_f32(const float* source, DType type, int64_t n, void* target) {
  if (type == DType::kF32) {
    std::memcpy(target, source, n * sizeof(float));
    return;
  }
  auto* bits = static_cast<uint16_t*>(target);
  for (int64_t i = 0; i < n; ++i) bits[i] = f32_to_bf16(source[i]);
}

void gemm(int64_t m, int64_t n, int64_t k, const LeftMatrix& left, const RightMatrix& right,
          float* const* rows, bool accumulate) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  const int64_t row_tasks = (m + kTaskRows - 1) / kTaskRows;
  const int64_t cost = std::min(m, kTaskRows) * std::min(n, kPanel) * k;
  parallel_for(panels * row_tasks, cost, [&](int64_t task) {
    const int64_t column = task / row_tasks * kPanel;
    const int64_t begin = task % row_tasks * kTaskRows;
    const int64_t end = std::min(m, begin + kTaskRows);
    const int64_t width = std::min(kPanel, n - column);
    std::vector<PanelRow> storage(k);
    float* panel = reinterpret_cast<float*>(storage.data());
    pack_panel(right, column, k, width, panel);
    alignas(32) float sums[kBlock * kPanel];
    for (int64_t row = begin; row < end;) {
      const int64_t block = end - row >= kBlock ? kBlock : 1;
      for (int64_t i = 0; i < block; ++i) {
        load_row(rows[row + i] + column, width, accumulate, sums + i * kPanel);
      }
      const float* first = left.data + row * left.stride_m;
      if (block == kBlock) {
        multiply_block(k, first, left.stride_m, left.stride_k, panel, sums);
      } else {
        multiply_row(k, first, left.stride_k, panel, sums);
      }
      for (int64_t i = 0; i < block; ++i) {
        std::copy_n(sums + i * kPanel, width, rows[row + i] + column);
      }
      row += block;
    }
  });
}

}  // namespace megamoe
