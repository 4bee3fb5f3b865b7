"""Grouped matrix products over rows that are sorted by group, fp32 accumulation and result.

`lax.ragged_dot` expands to a dense [groups, rows, ...] product on CPUs and GPUs, so a loop over row
tiles stands in for it there. Rows beyond the last group may hold anything, NaN included: they reach
no result, and their own results are zero. Groups without rows get exact zeros.

On Hopper `grouped_matmul` takes tokamax's kernel where that is installed. `grouped_outer` does not:
with tokamax 0.0.17 and JAX 0.11.2 on an H200 its product for the gradients of weights was 3% to 6%
off and differed from call to call.
"""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe import _mesh

# Rows of a tile at most. A round may be far from full, so its rows alone would make tiles of
# several times the rows of a group.
_CPU_TILE, _GPU_TILE = 128, 1152

# [M, K], [G, K, N] -> [M, N]
_MATMUL_DIMS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# Contraction over the rows of a group: [M, K], [M, N] -> [G, K, N]
_OUTER_DIMS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


# Under vmap one product after the other: a batched loop would copy, and ragged_dot refuses it.
@jax.custom_batching.sequential_vmap
def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies the rows of each group by the matrix of the group.

    Args:
      lhs: [M, K], the rows of group g are contiguous and follow those of group g - 1.
      rhs: [G, K, N], of the dtype of `lhs`.
      group_sizes: int32 [G], with a sum of at most M.

    Returns:
      float32 [M, N].
    """
    loop, small = _matmul_loop, functools.partial(_matmul_loop, largest=_CPU_TILE)
    cuda = _matmul_tokamax if _has_tokamax() and lhs.dtype == jnp.bfloat16 else loop
    return lax.platform_dependent(
        lhs, rhs, group_sizes, cpu=small, cuda=cuda, rocm=loop, default=_matmul_ragged
    )


@jax.custom_batching.sequential_vmap
def grouped_outer(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, init: jax.Array
) -> jax.Array:
    """Adds lhs^T rhs over the rows of each group to `init`.

    Args:
      lhs: [M, K] and rhs: [M, N], of one dtype, rows as in `grouped_matmul`.
      group_sizes: int32 [G], with a sum of at most M.
      init: float32 [G, K, N].

    Returns:
      float32 [G, K, N].
    """
    loop, small = _outer_loop, functools.partial(_outer_loop, largest=_CPU_TILE)
    return lax.platform_dependent(
        lhs, rhs, group_sizes, init, cpu=small, cuda=loop, rocm=loop, default=_outer_ragged
    )


def _matmul_loop(lhs, rhs, group_sizes, *, largest=_GPU_TILE):
    tiles, tile, locate = _row_tiles(group_sizes, lhs.shape[0], largest)

    def body(t, out):
        group, start, mine = locate(t)
        rows = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, start, tile), 0)
        product = jnp.dot(rows, rhs[group], preferred_element_type=jnp.float32)
        product = jnp.where(mine, product, lax.dynamic_slice_in_dim(out, start, tile))
        return lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = _mesh.zeros((lhs.shape[0], rhs.shape[2]), jnp.float32, lhs)
    return lax.fori_loop(0, tiles, body, out)


def _outer_loop(lhs, rhs, group_sizes, init, *, largest=_GPU_TILE):
    tiles, tile, locate = _row_tiles(group_sizes, lhs.shape[0], largest)

    def body(t, out):
        group, start, mine = locate(t)
        a = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, start, tile), 0)
        b = jnp.where(mine, lax.dynamic_slice_in_dim(rhs, start, tile), 0)
        product = jnp.dot(a.T, b, preferred_element_type=jnp.float32)
        return out.at[group].add(product)

    return lax.fori_loop(0, tiles, body, init)


def _row_tiles(group_sizes, rows, largest):
    """Returns the number of row tiles of all groups, their rows, and where the t-th lies.

    No tile crosses a group. A tile is read at `start`, moved back where it would pass the end of
    the array; `mine` [tile, 1] marks the rows that belong to it. A tile has more rows than the mean
    group of a full round, at most `largest`: an iteration costs a GPU the more, the less it does.
    """
    tile = min(rows, largest, 128 * (rows // group_sizes.shape[0] // 128 + 1))
    ends = jnp.cumsum(group_sizes)
    tiles = (group_sizes + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles)

    def locate(t):
        group = (tile_ends <= t).sum()
        first = ends[group] - group_sizes[group] + (t - tile_ends[group] + tiles[group]) * tile
        start = jnp.minimum(first, rows - tile)
        row = start + jnp.arange(tile)
        mine = (row >= first) & (row < jnp.minimum(first + tile, ends[group]))
        return group, start, mine[:, None]

    return tile_ends[-1], tile, locate


def _matmul_ragged(lhs, rhs, group_sizes):
    return _of_groups(lax.ragged_dot_general, lhs, rhs, group_sizes)


def _matmul_tokamax(lhs, rhs, group_sizes):
    import tokamax

    kind = jax.typeof(lhs).manual_axis_type
    product = functools.partial(
        tokamax.ragged_dot_general, manual_axis_type=kind if kind.varying else None
    )
    return _of_groups(product, lhs, rhs, group_sizes)


def _of_groups(product, lhs, rhs, group_sizes):
    mine = jnp.arange(lhs.shape[0])[:, None] < group_sizes.sum()
    lhs = jnp.where(mine, lhs, 0)
    out = product(lhs, rhs, group_sizes, _MATMUL_DIMS, preferred_element_type=jnp.float32)
    return jnp.where(mine, out, 0)


def _outer_ragged(lhs, rhs, group_sizes, init):
    mine = jnp.arange(lhs.shape[0])[:, None] < group_sizes.sum()
    lhs, rhs = jnp.where(mine, lhs, 0), jnp.where(mine, rhs, 0)
    return init + lax.ragged_dot_general(
        lhs, rhs, group_sizes, _OUTER_DIMS, preferred_element_type=jnp.float32
    )


def _has_tokamax() -> bool:
    """Whether tokamax is installed and its Mosaic GPU kernels support the device (Hopper)."""
    if _mesh.platform() != "gpu" or importlib.util.find_spec("tokamax") is None:
        return False
    return jax.local_devices(backend="gpu")[0].compute_capability == "9.0"
