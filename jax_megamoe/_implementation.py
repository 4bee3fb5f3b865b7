"""Which implementation runs a call, or why the one that was asked for cannot."""

from __future__ import annotations

import jax

from jax_megamoe import _exchange, _mesh, _runtime, _workspace
from jax_megamoe.config import MoEConfig

# What the kernels are made for: multiples of a tile, a warp's lanes, tables in shared memory.
_GPU_MULTIPLE = 64
_GPU_MAX_TOP_K = 32
_GPU_MAX_LOCAL_EXPERTS = 256
_GPU_MAX_RANKS = 16


def choose(
    config: MoEConfig,
    axis_name: str | None,
    *,
    hidden: int,
    intermediate: int,
    top_k: int = 1,
    local_experts: int = 1,
) -> str:
    """Returns "ffi" or "xla".

    "auto" takes the custom calls on Hopper GPUs if a host has as many as the axis has ranks, also
    where they then refuse the sizes: a size that falls off the fast path should be seen.

    Raises:
      ValueError: the implementation, or its precision, cannot run here.
      TimeoutError: there are other processes with GPUs and one did not trace the call in time.
    """
    name = config.implementation
    platform = _mesh.platform()
    if name == "auto":
        fast = platform == "gpu" and not (why_not_ffi("gpu") or _why_not_ranks(axis_name, config))
        name = "ffi" if fast else "xla"
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
        or (platform == "gpu" and _why_not_ranks(axis_name, config))
        or _why_not_precision(platform, config.precision)
        or (platform == "gpu" and _why_not_sizes(hidden, intermediate, top_k, local_experts))
    )
    if reason:
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


def _why_not_ranks(axis_name, config):
    ranks = _mesh.axis_size(axis_name)
    if ranks > _GPU_MAX_RANKS:
        return f"axis {axis_name!r} has {ranks} ranks and the kernels take at most {_GPU_MAX_RANKS}"
    if ranks > 1 and jax.process_count() > 1:
        processes = _workspace.processes(config.timeout_s)
        groups = _mesh.rank_processes(axis_name)
        return _exchange.why_not_ranks(axis_name, ranks, _GPU_MAX_RANKS, processes, groups)
    return None


def _why_not_precision(platform, precision):
    return None if precision == "bf16" else f"on {platform} precision {precision!r} has no handler"


def _why_not_sizes(hidden, intermediate, top_k, local_experts):
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % _GPU_MULTIPLE:
            return f"the {name} size is {size} and must be a multiple of {_GPU_MULTIPLE}"
    if top_k > _GPU_MAX_TOP_K:
        return f"expert_ids has {top_k} slots a token and the kernels take at most {_GPU_MAX_TOP_K}"
    if local_experts > _GPU_MAX_LOCAL_EXPERTS:
        return (
            f"w_gate has {local_experts} experts on this rank and the kernels take at most "
            f"{_GPU_MAX_LOCAL_EXPERTS}"
        )
    return None
