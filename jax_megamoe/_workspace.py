"""Registry of the symmetric workspaces that the custom calls find by an integer key.

A workspace is made when an operation is traced. Making it again with the same arguments returns the
same key, and the key depends on nothing else, so compiled programs may be cached and shared.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_megamoe import _mesh, _runtime


class Workspace(NamedTuple):
    """What the custom calls need to know of a workspace.

    Attributes:
      key: value of the attribute `workspace`.
      capacity_rows: rows of the pool, a multiple of the tile's rows; a rank with more takes several
        rounds.
    """

    key: int
    capacity_rows: int


def make(
    *,
    axis_name: str | None,
    ranks: int,
    tokens: int,
    top_k: int,
    local_experts: int,
    hidden: int,
    intermediate: int,
    dtype,
    capacity_factor: float,
) -> Workspace:
    """Makes the workspace of one operation, or finds it.

    On GPUs every local device gets a block of memory that the others can reach; this allocates and
    waits for the devices, once for each key.

    Args:
      axis_name: expert axis; None for one device.
      ranks: size of the expert axis.
      tokens: tokens per rank.
      top_k: slots per token.
      local_experts: experts per rank.
      hidden: width of a token.
      intermediate: width of an expert.
      dtype: of the tokens, bf16 or f32; GPUs keep all rows in bf16.
      capacity_factor: see `MoEConfig.capacity_factor`.

    Raises:
      ValueError: the sizes exceed what row numbers in int32 can hold, or GPUs have no memory for
        the workspace or cannot reach each other's.
      RuntimeError: the compiled module cannot be used here.
    """
    rows = capacity_rows(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        local_experts=local_experts,
        capacity_factor=capacity_factor,
    )
    sizes = dict(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        local_experts=local_experts,
        hidden=hidden,
        intermediate=intermediate,
        capacity_rows=rows,
    )
    if _mesh.platform() == "gpu":
        devices = [d.local_hardware_id for d in jax.local_devices(backend="gpu")]
        key = _key(axis_name, sizes)
        _runtime.load().register_cuda_workspace(key, **sizes, devices=devices)
    else:
        sizes["staged_bytes"] = jnp.dtype(dtype).itemsize
        key = _key(axis_name, sizes)
        _runtime.load().register_workspace(key, **sizes)
    return Workspace(key, rows)


def capacity_rows(
    *, ranks: int, tokens: int, top_k: int, local_experts: int, capacity_factor: float
) -> int:
    """Returns the rows of the pool: capacity_factor x tokens x top_k, and room for the padding.

    Each expert's rows are padded to whole tiles, so a load of that many rows takes one round. Never
    more than all tokens of all ranks could need.
    """
    tile = _runtime.load().tile_rows
    padding = local_experts * (tile - 1)
    wanted = math.ceil(capacity_factor * tokens * top_k) + padding
    most = ranks * tokens * top_k + padding
    return max(tile, -(-min(wanted, most) // tile) * tile)


def _key(axis_name: str | None, sizes: dict[str, int]) -> int:
    text = repr((axis_name, sorted(sizes.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # an int64 attribute
