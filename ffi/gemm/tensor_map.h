// TMA descriptors of the operands and results of the matrix core.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace megamoe {

// Encodes tensor maps through the driver, which is found at run time: nothing links to libcuda.
// Every function returns an empty string, or what went wrong.
//
// `matrix` is row-major bf16 [batch][rows][columns], columns a multiple of 8; what a box reads
// beyond the matrix is zero.

// Operand whose contraction index is the fast one: boxes of [tile_rows][64 columns], 128-byte
// swizzle. Coordinates: column, row, batch.
std::string encode_k_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                           int64_t columns, int tile_rows);

// Also, with kBlockRows rows, results: blocks of [16 rows][64 columns].
constexpr int kBlockRows = 16;

// Operand whose contraction index is the row: boxes of [tile_columns / 64][64 rows][64 columns].
// Columns must be a multiple of 64. Coordinates: 0, row, column / 64, batch.
std::string encode_mn_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                            int64_t columns, int tile_columns);

}  // namespace megamoe
