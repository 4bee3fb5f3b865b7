"""Says what would run on this machine, and why the rest would not: `python -m jax_megamoe.info`.

With a shape it also gives the size of the workspace:

  python -m jax_megamoe.info --tokens 16384 --hidden 4096 --intermediate 1536 --experts 128 \
      --top-k 8 --ranks 8
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jax_megamoe import _grouped, _implementation, _mesh, _runtime, _workspace
from jax_megamoe.config import PRECISIONS, MoEConfig

_PACKAGES = ("jax_megamoe", "jax", "jaxlib", "flax", "numpy", "tokamax")

# Bytes of one rank's workspace, within 0.6%. The sum is over: the rows that peers read (x, dy), the
# rows that they return (y or dx), the pools of the routed rows, the weight gradients carried
# between rounds, ids and weights, the routing plan, and what the GPU kernels note of each row.
WORKSPACE_FORMULA = (
    "(2*S*T*H + T*K*H + C*(2*H + 3*I))*row_bytes + 48*H*I/row_bytes + 12*T*K"
    " + 16*R*T*K + R*T*(E/R + 33)/8 + 1020*E/R"
    " + G*(12*R*T*K + 1524*E/R + 4*C*ceil(I/192))"
)
_TERMS = (
    "T tokens of a rank, K experts a token, H hidden, I intermediate, E experts, R ranks;\n"
    "C = rows of the pool = min(capacity_factor, R)*T*K + 127*E/R, up to a multiple of 128;\n"
    "row_bytes 2 (bf16) and G = 1 on a GPU, 4 (f32) and 0 on the host;\n"
    "S = 0 on GPUs that one process drives, which read each other's operands in place; else 1"
)


class Choice(NamedTuple):
    """One way to compute the experts.

    Attributes:
      name: what it is called in the report.
      implementation: value of `MoEConfig.implementation` that asks for it.
      why_not: why it would not run on this machine; None if it would.
    """

    name: str
    implementation: str
    why_not: str | None


def choices() -> list[Choice]:
    """Returns every way to compute the experts, the fastest first.

    Raises:
      RuntimeError: JAX cannot start its backend.
    """
    backend = _mesh.platform()
    return [
        Choice("ffi on CUDA", "ffi", _why_not_cuda(backend)),
        Choice("ffi on the host", "ffi", _why_not_host(backend)),
        Choice("xla with tokamax", "xla", _why_not_tokamax(backend)),
        Choice("xla with lax.ragged_dot", "xla", _why_not_ragged_dot(backend)),
        Choice("xla with a loop over tiles", "xla", _why_not_loop(backend)),
    ]


def _why_not_cuda(backend):
    if backend == "gpu":
        return _implementation.why_not_ffi("gpu")
    reasons = [f"JAX runs on {backend!r}" + _missing_plugin()]
    if _runtime.unavailable() is not None:
        reasons.append(_runtime.unavailable())
    elif not _runtime.with_cuda():
        reasons.append("the compiled module was built without CUDA")
    return "; ".join(reasons)


def _missing_plugin():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return " and its CUDA plugin is not installed: pip install 'jax_megamoe[cuda13]'"
    return " and sees no GPU"


def _why_not_host(backend):
    if backend != "cpu":
        return f"JAX runs on {backend!r} and the host handlers are for 'cpu'"
    return _implementation.why_not_ffi("cpu")


def _why_not_tokamax(backend):
    if _grouped._has_tokamax():
        return None
    if backend != "gpu":
        return f"JAX runs on {backend!r} and tokamax's fast kernels are for Hopper GPUs"
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    return "the GPU is not of the Hopper generation"


def _why_not_ragged_dot(backend):
    if backend in ("cpu", "gpu"):
        return f"on a {backend.upper()} it multiplies every row by every expert"
    return None


def _why_not_loop(backend):
    if backend not in ("cpu", "gpu"):
        return f"JAX runs on {backend!r}, where lax.ragged_dot is faster"
    return "tokamax is there and faster" if _grouped._has_tokamax() else None


def precisions() -> dict[str, tuple[str, ...]]:
    """Returns the implementations that have each precision on this machine."""
    return {p: tuple(i for i in ("ffi", "xla") if _runs(i, p)) for p in PRECISIONS}


def _runs(implementation, precision):
    config = MoEConfig(implementation=implementation, precision=precision)
    try:
        _implementation.choose(config, None, hidden=128, intermediate=128)
    except ValueError:
        return False
    return True


def workspace_bytes(
    kernels: str,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    ranks: int,
    capacity_factor: float,
    several_processes: bool = False,
) -> int:
    """Returns the bytes of one rank's workspace, by the struct that the kernels address it with.

    Args:
      kernels: "gpu", which keep rows in bf16, or "cpu", which keep them in f32.
      tokens: per rank.
      hidden, intermediate: sizes of an expert.
      experts: in all, a multiple of `ranks`.
      top_k: experts per token.
      ranks: size of the expert axis.
      capacity_factor: see `MoEConfig`.
      several_processes: whether the expert axis is spread over processes of a host, on GPUs.

    Raises:
      RuntimeError: the compiled module cannot be used here.
    """
    plan = dict(ranks=ranks, tokens=tokens, top_k=top_k, local_experts=experts // ranks)
    rows = _workspace.capacity_rows(**plan, capacity_factor=capacity_factor)
    sizes = dict(plan, hidden=hidden, intermediate=intermediate, capacity_rows=rows)
    if kernels == "gpu":
        return _runtime.load().cuda_workspace_bytes(**sizes, staged=several_processes)
    return _runtime.load().workspace_bytes(**sizes, staged_bytes=4, pool_bytes=4, return_bytes=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if JAX cannot start its backend."""
    options = _parse(arguments)
    print("Versions\n  " + ", ".join([f"Python {platform.python_version()}", *_versions()]))
    try:
        devices = Counter(map(_describe, jax.devices()))
    except RuntimeError as error:
        print(f"Devices\n  none: JAX cannot start its backend ({error})")
        return 1
    print("Devices\n  " + ", ".join(f"{n} x {name}" for name, n in devices.items()))
    print(f"Compiled module\n  {_module()}")

    auto = _implementation.choose(MoEConfig(), None, hidden=128, intermediate=128)
    print("Implementations")
    for choice in choices():
        if choice.why_not is not None:
            verdict = f"no: {choice.why_not}"
        elif choice.implementation == auto:
            verdict = 'yes, with implementation="auto" (the default)'
        else:
            verdict = f'yes, with implementation="{choice.implementation}"'
        print(f"  {choice.name:27s} {verdict}")

    print("Precisions")
    for precision, implementations in precisions().items():
        print(f"  {precision:8s} {', '.join(implementations) or 'not on this machine'}")

    _print_workspace(vars(options))
    return 0


def _print_workspace(sizes):
    print("Workspace of a rank, in bytes; made once for all layers of the same shape")
    print(f"  about {WORKSPACE_FORMULA}")
    print("  " + _TERMS.replace("\n", "\n  "))
    print("  for " + ", ".join(f"{name} {value}" for name, value in sizes.items()))
    if _runtime.unavailable() is not None:
        print("  (the numbers need the compiled module)")
        return
    for name, kernels, several in (
        ("on a GPU", "gpu", False),
        ("on a GPU, one process each", "gpu", True),
        ("on the host", "cpu", False),
    ):
        size = workspace_bytes(kernels, **sizes, several_processes=several)
        print(f"  {name:26s} {size} ({size / 2**30:.2f} GiB)")


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m jax_megamoe.info",
        description="What would run on this machine, and the workspace of a layer "
        "(default: one layer of Qwen3-30B-A3B on 8 ranks).",
    )
    for name, default, text in (
        ("tokens", 16384, "tokens of a rank"),
        ("hidden", 2048, "hidden size"),
        ("intermediate", 768, "intermediate size of an expert"),
        ("experts", 128, "experts in all"),
        ("top-k", 8, "experts per token"),
        ("ranks", 8, "size of the expert axis"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    default = MoEConfig().capacity_factor
    parser.add_argument("--capacity-factor", type=float, default=default, help=f"({default})")
    options = parser.parse_args(arguments)
    for name in ("tokens", "hidden", "intermediate", "experts", "top_k", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"{name} is {getattr(options, name)}; it must be at least 1")
    if options.experts % options.ranks:
        parser.error(
            f"experts is {options.experts} and ranks is {options.ranks}; "
            "the expert count must be a multiple of the ranks"
        )
    if options.top_k > options.experts:
        parser.error(
            f"top_k is {options.top_k}; it must be at most the number of experts, {options.experts}"
        )
    rows = options.ranks * options.tokens * options.top_k
    if rows >= 2**31:
        parser.error(f"ranks * tokens * top_k is {rows}; it must not exceed {2**31 - 1}")
    try:
        MoEConfig(capacity_factor=options.capacity_factor)
    except ValueError as error:
        parser.error(str(error))
    return options


def _versions():
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} not installed"


def _module():
    if _runtime.unavailable() is not None:
        return f"none: {_runtime.unavailable()}"
    module = _runtime.load()
    built, runs = module.ffi_api_version, _runtime._runtime_ffi_api_version()
    kind = "with CUDA" if module.with_cuda else "without CUDA"
    offered = "" if runs is None else f" (jaxlib offers {_dotted(runs)})"
    return f"{module.__file__}, built {kind}, XLA FFI {_dotted(built)}{offered}"


def _describe(device):
    capability = getattr(device, "compute_capability", None)
    return device.device_kind + (f", compute capability {capability}" if capability else "")


def _dotted(version):
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
