"""Which implementation runs a call, or why the one that was asked for cannot."""

from __future__ import annotations

import jax

from jax_megamoe import _mesh, _runtime
from jax_megamoe.config import MoEConfig

# Multiples of the kernels' tiles.
_GPU_MULTIPLE = 64


def choose(config: MoEConfig, axis_name: str | None, *, hidden: int, intermediate: int) -> str:
    """Returns "ffi" or "xla".

    Raises:
      ValueError: the implementation, or its precision, cannot run here.
    """
    name = config.implementation
    platform = _mesh.platform()
    if name == "auto":
        name = "ffi" if platform == "gpu" and why_not_ffi("gpu") is None else "xla"
    if name == "xla":
        if config.precision != "bf16":
            raise ValueError(
                f"config.precision is {config.precision!r}; the 'xla' implementation, "
                f"{'asked for' if config.implementation == 'xla' else 'the one that runs here'}, "
                "has only 'bf16'"
            )
        return name
    reason = (
        why_not_ffi(platform)
        or _why_not_axis(axis_name)
        or _why_not_sizes(platform, config.precision, hidden, intermediate)
    )
    if reason is not None:
        raise ValueError(
            f"config.implementation is {config.implementation!r} and 'ffi' cannot run: {reason}; "
            "'xla' runs on any backend"
        )
    return name


def why_not_ffi(platform: str) -> str | None:
    """Returns why the custom calls cannot run on devices of this platform, or None if they can."""
    reason = _runtime.unavailable()
    if reason is not None:
        return reason
    if platform == "cpu":
        if jax.process_count() > 1:
            return (
                f"there are {jax.process_count()} processes and the ranks of the host handlers "
                "meet inside one process"
            )
        return None
    if platform != "gpu":
        return f"the platform is {platform!r} and the handlers are for 'cpu' and Hopper GPUs"
    if not _runtime.with_cuda():
        return "the compiled module was built without CUDA"
    capability = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", None)
    if capability != "9.0":
        return f"the GPU has compute capability {capability} and the kernels are for 9.0 (Hopper)"
    return None


def _why_not_axis(axis_name):
    if axis_name is None:
        return None
    manual = _mesh.manual_axes()
    if axis_name not in manual:
        return f"axis_name {axis_name!r} is not an axis of a jax.shard_map"
    mesh = jax.sharding.get_abstract_mesh()
    rest = [a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1]
    if rest:
        return (
            f"the jax.shard_map leaves the mesh axes {', '.join(map(repr, rest))} to the compiler "
            "(axis_names=) and all must be manual, for a rank to know its group"
        )
    return None


def _why_not_sizes(platform, precision, hidden, intermediate):
    if platform == "cpu":
        return None if precision == "bf16" else f"on CPU precision {precision!r} has no handler"
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % _GPU_MULTIPLE:
            return f"the {name} size is {size} and must be a multiple of {_GPU_MULTIPLE}"
    return None
