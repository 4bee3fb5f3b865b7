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
// beyond the matrix is zero, what it writes there is dropped.

// Operand whose contraction index is the fast one: boxes of [tile_rows][64 columns], 128-byte
// swizzle. Coordinates: column, row, batch.
std::string encode_k_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                           int64_t columns, int tile_rows);

// Operand whose contraction index is the row: boxes of [tile_columns / 64][64 rows][64 columns].
// Columns must be a multiple of 64. Coordinates: 0, row, column / 64, batch.
std::string encode_mn_major(CUtensorMap* map, const void* matrix, int64_t batch, int64_t rows,
                            int64_t columns, int tile_columns);

// Result written in boxes of [box_rows][32 columns] bf16, 64-byte swizzle. Coordinates: column,
// row.
std::string encode_store(CUtensorMap* map, void* matrix, int64_t rows, int64_t columns,
                         int box_rows);

// Result [batch][rows][columns] written in boxes of [1][64 rows][64 bytes], 64-byte swizzle, in
// bf16 or f32. Coordinates: column, row, batch; rows beyond the batch's own are dropped.
std::string encode_batch_store(CUtensorMap* map, void* matrix, bool is_f32, int64_t batch,
                               int64_t rows, int64_t columns);

}  // namespace megamoe
