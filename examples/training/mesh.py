"""The device mesh, and where parameters and batches lie on it."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, EXPERT = "data", "expert"
BATCH = P((DATA, EXPERT))  # every device takes its own tokens
EXPERT_WEIGHTS = ("w_gate", "w_up", "w_down")  # [..., experts, in, out]

# Smaller tensors are replicated: gathering them each time costs more than the memory they take.
MIN_SHARDED_SIZE = 2**16


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


def parameter_spec(
    path, shape: tuple[int, ...], mesh: Mesh, *, min_size: int = MIN_SHARDED_SIZE
) -> P:
    """Fully sharded: expert weights by expert and over the data axis, others over all devices.

    A tensor is cut along its last axis that divides evenly, and left whole if there is none.
    """
    spec = [None] * len(shape)
    if path_names(path)[-1] in EXPERT_WEIGHTS:
        free, axes = [len(shape) - 1, len(shape) - 2], DATA
        spec[-3] = EXPERT
        parts = mesh.shape[DATA]
    else:
        free, axes = list(range(len(shape)))[::-1], (DATA, EXPERT)
        parts = mesh.size
    if parts > 1 and math.prod(shape) >= min_size:
        axis = next((i for i in free if shape[i] % parts == 0), None)
        if axis is not None:
            spec[axis] = axes
    return P(*spec)


def parameter_shardings(params, mesh: Mesh, *, min_size: int = MIN_SHARDED_SIZE):
    """The sharding of each leaf of a tree of parameters (arrays or their shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(
            mesh, parameter_spec(path, leaf.shape, mesh, min_size=min_size)
        ),
        params,
    )


def put_batch(batch, mesh: Mesh, accumulate: int):
    """Each array [B, S] as a global array [accumulate, B / accumulate, S], rows spread over devices.

    Every process holds the whole batch and hands its devices their rows.
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
