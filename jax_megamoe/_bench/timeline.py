"""Where the time of the expert kernels goes: `python -m jax_megamoe._bench.timeline`.

Needs a GPU and a build that notes it: `pip install . -C cmake.define.JAX_MEGAMOE_TIMELINE=ON`.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

from jax_megamoe import _runtime
from jax_megamoe._bench import layer
from jax_megamoe.config import MoEConfig

PHASES = {
    "forward": ("first rows", "gate/up and down"),
    "backward": ("recompute", "hidden gradients", "input gradients", "weight gradients"),
}
_CALLS = 5  # the last one counts


def durations(marks: np.ndarray, phases: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the microseconds of each phase, and by how much the ends of its CTAs differ.

    Args:
      marks: uint64 [CTAs, marks] nanoseconds; mark 0 is the start, mark p the end of phase p.
        Rows of zeros are CTAs that were not launched.
      phases: how many.
    """
    marks = marks[marks[:, 0] > 0, : phases + 1].astype(np.int64)
    ends = np.median(marks, axis=0)
    return np.diff(ends) / 1e3, (marks.max(0) - marks.min(0))[1:] / 1e3


def main() -> int:
    """Prints the phases of both passes of both layers on one GPU."""
    if (reason := _runtime.unavailable()) is not None:
        sys.exit(f"timeline: {reason}")
    ffi = _runtime.load()
    if not hasattr(ffi, "timeline_marks") or jax.default_backend() != "gpu":
        sys.exit("timeline: needs a Hopper GPU and a module that was built with CUDA")
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        shape, tokens, mesh = layer.SHAPES[name], 16384, layer.mesh_of(1)
        arguments = layer.make_arguments(mesh, shape, tokens)
        routing = layer.make_routing(mesh, shape, tokens, "random")
        for pass_, phases in PHASES.items():
            run = layer.layer_program(mesh, pass_, MoEConfig(implementation="ffi"))
            jax.block_until_ready([run(*arguments, *routing) for _ in range(_CALLS)])
            read = ffi.forward_timeline if pass_ == "forward" else ffi.backward_timeline
            marks = np.array(read(), np.uint64).reshape(-1, ffi.timeline_marks)
            if not marks.size:
                sys.exit("timeline: this module was built without JAX_MEGAMOE_TIMELINE")
            for phase, took, spread in zip(phases, *durations(marks, len(phases)), strict=True):
                print(f"{name} {pass_:8s} {phase:17s} {took:8.0f} us, ends within {spread:.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
