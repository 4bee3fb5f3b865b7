"""Mesh axes as the operation sees them: sizes, varying types, placement, resharding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import mesh as mesh_lib
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def axis_size(axis_name: str | None) -> int:
    """Returns the number of ranks on the expert axis; 1 without an axis.

    Raises:
      ValueError: if no enclosing `jax.shard_map` binds the axis.
      TypeError: if `axis_name` is no name.
    """
    if axis_name is None:
        return 1
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name is {axis_name!r}; it must be the name of one axis, or None")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name is {axis_name!r}, which no enclosing jax.shard_map binds; "
            f"{_known_axes(manual_axes())} (None is for one device)"
        ) from None


def rank_processes(axis_name: str) -> list[list[int]]:
    """Returns the process of each rank, for each expert group, where `jax.set_mesh` tells.

    Empty where only a shard_map knows the mesh: what is traced inside sees no devices.
    """
    mesh = mesh_lib.get_concrete_mesh()
    if axis_name not in mesh.axis_names:
        return []
    ranks_last = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1)
    groups = ranks_last.reshape(-1, mesh.shape[axis_name])
    return [[device.process_index for device in group] for group in groups]


def platform() -> str:
    """Returns the platform of the devices that the code being traced will run on."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = device or jax.config.jax_default_device or jax.default_backend()
    return getattr(device, "platform", device)


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes that the enclosing `jax.shard_map` made manual, in mesh order."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name in mesh.manual_axes)


def varying(a: jax.Array) -> frozenset[str]:
    """Returns the manual axes over which `a` varies; empty under `check_vma=False`."""
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def check_unsharded(**arrays: jax.Array) -> None:
    """Refuses arrays that are sharded over Explicit axes where one shard is expected."""
    for name, a in arrays.items():
        axes = [axis for axis in jax.typeof(a).sharding.spec if axis is not None]
        if axes:
            raise ValueError(
                f"{name} is sharded over {', '.join(map(repr, axes))}; moe_mlp takes one shard: "
                "call it inside a jax.shard_map, or call moe"
            )


def vary_alike(axis_name: str | None, *arrays: jax.Array) -> list[jax.Array]:
    """Makes all arrays vary over the same axes: those of any of them, and the expert axis.

    The cast is free, and its transpose is the sum over the added axes. So the backward rule returns
    the rank's own gradients, and JAX sums those of replicated arguments: here under
    `check_vma=True`, at the edge of the shard_map under `check_vma=False`, where the cast is void.
    """
    axes = frozenset().union(*map(varying, arrays))
    if axis_name in manual_axes():
        axes |= {axis_name}
    return [_vary(a, axes) for a in arrays]


def zeros(shape: Sequence[int], dtype, like: jax.Array) -> jax.Array:
    """Returns zeros that vary over the axes of `like`, as a loop carry must."""
    return _vary(jnp.zeros(shape, dtype), varying(like))


def place(axis_name: str | None) -> jax.Array:
    """Returns int32 [group, rank]: which expert group this device belongs to, and where in it.

    An operand and not an attribute, because inside a shard_map the device order is not known.
    """
    group, rank = jnp.int32(0), jnp.int32(0)
    if axis_name is not None:
        rank = lax.axis_index(axis_name)
        for name in manual_axes():
            if name != axis_name:
                group = group * lax.axis_size(name) + lax.axis_index(name)
    group, rank = vary_alike(None, group, rank)
    return jnp.stack([group, rank])


def resolve(mesh: Mesh | None, expert_axis: str) -> Mesh | AbstractMesh:
    """Returns the mesh to use: the argument, or the one of `jax.set_mesh`.

    Raises:
      ValueError: if there is no mesh, it lacks the axis, it has no devices, its axes are not those
        of `jax.set_mesh` where there is one, or the call is already inside a shard_map.
      TypeError: if `mesh` is something else.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        raise ValueError(
            "moe opens its own jax.shard_map and was called inside one over "
            f"{', '.join(map(repr, manual_axes()))}; inside a shard_map use moe_mlp"
        )
    if mesh is None:
        mesh = _context_mesh()
        if mesh.empty:
            raise ValueError("mesh is None and there is no jax.set_mesh; one of the two is needed")
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh")
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    if not context.empty and abstract != context:
        raise ValueError(f"mesh is {abstract}; it must be that of jax.set_mesh, {context}, or None")
    if mesh is abstract and _context_mesh().empty:
        raise ValueError(
            f"mesh is {mesh}, which has no devices; it must be a jax.sharding.Mesh, or None with "
            "jax.set_mesh"
        )
    if expert_axis not in mesh.axis_names:
        raise _unknown_axis("expert_axis is", "the name of one axis", expert_axis, mesh)
    return mesh


def axis_tuple(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names as a tuple; one name may stand alone, and so does what is no sequence."""
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def check_axes(argument: str, axes: Sequence[str], mesh: Mesh) -> None:
    """Checks that an argument names axes of the mesh, none twice."""
    for axis in axes:
        if axis not in mesh.axis_names:
            raise _unknown_axis(f"{argument} names", "a name or a sequence of names", axis, mesh)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{argument} is {tuple(axes)}; an axis may be named only once")


def check_divides(name: str, value: int, argument: str, axis: str, mesh: Mesh) -> None:
    """Checks that the size of the axis that `argument` names divides a size of the layer."""
    size = mesh.shape[axis]
    if value % size:
        raise ValueError(
            f"{name} is {value}; it must be a multiple of the size of {argument} {axis!r}, {size}"
        )


def token_spec(
    mesh: Mesh, shape: tuple[int, ...], token_axes: tuple[str, ...]
) -> PartitionSpec | None:
    """Spreads `token_axes` over the leading dimensions of `shape`, from the left.

    Each axis goes to the first dimension, not before the previous axis's, that it still divides.
    Returns None if some axis finds no such dimension.
    """
    spec = [()] * len(shape)
    dim = 0
    for axis in token_axes:
        while dim < len(shape) and shape[dim] % (shards(mesh, spec[dim]) * mesh.shape[axis]):
            dim += 1
        if dim == len(shape):
            return None
        spec[dim] += (axis,)
    return PartitionSpec(*(axes or None for axes in spec))


def shards(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of shards over the given axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def reshard(a: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Places `a` on the mesh as `spec` says, from wherever it is."""
    if isinstance(mesh, Mesh):
        return jax.device_put(a, NamedSharding(mesh, spec))
    # Under jit, with the mesh of jax.set_mesh: only Explicit axes are in the type of an array, and
    # over Auto axes the shard_map moves it.
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return a

    def explicit(axes):
        return tuple(axis for axis in axis_tuple(axes) if kinds[axis] == AxisType.Explicit) or None

    return jax.sharding.reshard(a, PartitionSpec(*(axes and explicit(axes) for axes in spec)))


def reshard_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Gives `y` the sharding of `x` over Explicit axes, so that `x + y` is well-typed."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return y
    return jax.sharding.reshard(y, sharding)


def _vary(a, axes):
    missing = axes - varying(a)
    return lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a


def _context_mesh():
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # Under jit only the abstract mesh can be seen.
        return jax.sharding.get_abstract_mesh()


def _unknown_axis(found, accepted, axis, mesh):
    must = "" if isinstance(axis, str) else f"it must be {accepted}; "
    return ValueError(f"{found} {axis!r}; {must}{_known_axes(mesh.axis_names)}")


def _known_axes(names):
    return f"the axes are {', '.join(map(repr, names))}" if names else "mesh has no axes"
