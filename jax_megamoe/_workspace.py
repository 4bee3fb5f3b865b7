"""Registry of the symmetric workspaces that the custom calls find by an integer key.

A workspace is made when an operation is traced. Making it again with the same arguments returns the
same key, and the key depends on nothing else, so compiled programs may be cached and shared.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
import socket
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src import distributed

from jax_megamoe import _exchange, _mesh, _runtime

_INT32_MAX = 2**31 - 1

_lock = threading.Lock()
_processes: tuple[_exchange.Process, ...] | None = None


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
    timeout_s: float,
) -> Workspace:
    """Makes the workspace of one operation, or finds it.

    On GPUs every local device gets a block of memory that the others can reach; this allocates and
    waits for the devices, once for each key. If the expert axis may reach into other processes, the
    blocks are those of all processes of this host, and all of them must make the workspace.

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
      timeout_s: seconds that this process waits for the others.

    Raises:
      ValueError: the sizes exceed what row numbers in int32 can hold, or GPUs have no memory for
        the workspace or cannot reach each other's.
      TimeoutError: another process did not make the same workspace.
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
    for name in ("hidden", "intermediate", "capacity_rows"):
        if sizes[name] > _INT32_MAX:
            raise ValueError(
                f"the workspace of the custom calls has {name} {sizes[name]}; it must not exceed "
                f"{_INT32_MAX}, and the 'xla' implementation needs no workspace"
            )
    if _mesh.platform() == "gpu":
        key = _key(axis_name, sizes)
        _make_on_gpus(key, sizes, timeout_s)
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


def processes(timeout_s: float) -> tuple[_exchange.Process, ...]:
    """Returns what each process of the job tells of itself. Collective on the first call.

    Raises:
      TimeoutError: a process did not take part.
    """
    global _processes
    with _lock:
        if _processes is None:
            gpus = tuple(map(_runtime.load().cuda_device_name, _ordinals()))
            _processes = _exchange.find_processes(
                distributed.global_state.client,
                jax.process_index(),
                _exchange.Process(_host(), gpus),
                jax.process_count(),
                timeout_s,
            )
        return _processes


def _make_on_gpus(key, sizes, timeout_s):
    module, own = _runtime.load(), jax.process_index()
    shared = False
    if sizes["ranks"] > 1 and jax.process_count() > 1:
        everyone = processes(timeout_s)
        shared = sum(process.host == everyone[own].host for process in everyone) > 1
    if not shared:
        module.register_cuda_workspace(key, **sizes, devices=_ordinals())
        return
    with _lock:
        if not module.has_cuda_workspace(key):
            client = distributed.global_state.client
            _exchange.share(_Blocks(key, sizes), client, everyone, own, f"{key:x}", timeout_s)


class _Blocks:
    """This process's blocks of a workspace, as `_exchange.share` makes them."""

    def __init__(self, key, sizes):
        self.key, self.sizes, self.module = key, sizes, _runtime.load()

    def allocate(self):
        handles = self.module.allocate_cuda_workspace(self.key, **self.sizes, devices=_ordinals())
        return [handle.hex() for handle in handles]

    def open(self, handles, names, first):
        self.module.open_cuda_workspace(self.key, list(map(bytes.fromhex, handles)), names, first)

    def keep(self):
        self.module.keep_cuda_workspace(self.key)

    def drop(self):
        self.module.drop_cuda_workspace(self.key)


def _ordinals():
    return [device.local_hardware_id for device in jax.local_devices(backend="gpu")]


def _host():
    """The same in processes of one host, unless they are in containers apart."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def _key(axis_name: str | None, sizes: dict[str, int]) -> int:
    text = repr((axis_name, sorted(sizes.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # an int64 attribute
