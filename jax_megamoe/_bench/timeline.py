"""Where the time of the expert kernels goes: `python -m jax_megamoe._bench.timeline`.

Also what goes over the link. Needs a GPU and a build that notes it:
`pip install . -C cmake.define.JAX_MEGAMOE_TIMELINE=ON`.
"""

from __future__ import annotations

import itertools
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


def pulled_tokens(expert_ids: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    """Returns, of each rank, how many tokens of others it serves: it reads each of them once.

    Args:
      expert_ids: int [ranks * tokens, K], those of rank 0 first.
      ranks: size of the expert axis.
      experts: in all.
    """
    home = np.arange(len(expert_ids)) // (len(expert_ids) // ranks)
    server = np.where(expert_ids >= 0, expert_ids // (experts // ranks), -1)
    return np.array([((server == r).any(axis=1) & (home != r)).sum() for r in range(ranks)])


def main() -> int:
    """Prints the phases of both passes of both layers, and what the first GPU reads over the link.

    With one GPU and, where there are two, with two.
    """
    if (reason := _runtime.unavailable()) is not None:
        sys.exit(f"timeline: {reason}")
    ffi = _runtime.load()
    if not hasattr(ffi, "timeline_marks") or jax.default_backend() != "gpu":
        sys.exit("timeline: needs a Hopper GPU and a module that was built with CUDA")
    if not ffi.forward_timeline():
        sys.exit("timeline: this module was built without JAX_MEGAMOE_TIMELINE")
    ranks = [1, 2][: jax.device_count()]
    for name, gpus in itertools.product(("qwen3-30b-a3b", "qwen3-235b-a22b"), ranks):
        shape, tokens, mesh = layer.SHAPES[name], 16384, layer.mesh_of(gpus)
        arguments = layer.make_arguments(mesh, shape, tokens)
        routing = layer.make_routing(mesh, shape, tokens, "random")
        tokens_read = pulled_tokens(np.asarray(routing[0]), gpus, shape.experts)[0]
        for pass_, phases in PHASES.items():
            run = layer.layer_program(mesh, pass_, MoEConfig(implementation="ffi"))
            head = f"{name} EP={gpus} {pass_:8s}"
            jax.block_until_ready([run(*arguments, *routing) for _ in range(_CALLS)])
            marks = np.array(getattr(ffi, f"{pass_}_timeline")(), np.uint64)
            marks = marks.reshape(-1, ffi.timeline_marks)
            for phase, took, spread in zip(phases, *durations(marks, len(phases)), strict=True):
                print(f"{head} {phase:17s} {took:8.0f} us, ends within {spread:.0f} us")
            pulled = getattr(ffi, f"{pass_}_pulled_bytes")
            pulled()  # those of the calls before
            jax.block_until_ready(run(*arguments, *routing))
            rows = tokens_read * (1 if pass_ == "forward" else 2)  # of x, and of dy
            planned = rows * 2 * shape.hidden
            print(f"{head} read over the link {pulled()} bytes, planned {planned}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
