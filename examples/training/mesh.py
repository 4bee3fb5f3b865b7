"""The device mesh, and how batches and parameters get on and off it."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, EXPERT = "data", "expert"
BATCH = P((DATA, EXPERT))  # every device takes its own tokens


def make_mesh(num_experts: int, expert_parallel: int | None = None, devices=None) -> Mesh:
    """A mesh (data, expert) over all devices.

    By default the expert axis is as long as the devices of one process and the number of experts
    allow, so that tokens travel to their experts inside one machine.

    Raises:
      ValueError: if `expert_parallel` divides neither the devices nor the experts evenly.
    """
    devices = list(jax.devices() if devices is None else devices)
    if expert_parallel is None:
        local = sum(d.process_index == devices[0].process_index for d in devices)
        expert_parallel = math.gcd(math.gcd(local, len(devices)), num_experts)
    if (
        expert_parallel < 1
        or len(devices) % expert_parallel
        or (num_experts and num_experts % expert_parallel)
    ):
        raise ValueError(
            f"--expert-parallel is {expert_parallel}; it must divide the {len(devices)} devices "
            f"and the {num_experts} experts"
        )
    grid = np.asarray(devices).reshape(-1, expert_parallel)
    return Mesh(grid, (DATA, EXPERT), axis_types=(AxisType.Auto, AxisType.Auto))


def path_names(path) -> tuple[str, ...]:
    """Names along a path of `jax.tree_util`, without the ".value" of a flax variable."""
    names = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return tuple(n for n in names if n != "value")


def put_batch(batch, mesh: Mesh, accumulate: int):
    """Each array [B, S] as a global array [accumulate, B / accumulate, S].

    Rows are spread over all devices; every process holds the whole batch and hands its own
    devices their part.
    """
    sharding = NamedSharding(mesh, P(None, *BATCH))

    def put(x):
        x = x.reshape(accumulate, -1, x.shape[-1])
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, batch)


def local_copy(tree, mesh: Mesh):
    """The whole tree on the first device of this process; every process must call it."""
    whole = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)
