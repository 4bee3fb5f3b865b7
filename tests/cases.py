"""Shapes, routings, inputs and the comparison that the tests of every implementation share."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import MoEConfig, _implementation, moe_mlp, reference


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the global problem: all tokens of all ranks, all experts."""

    tokens: int = 160
    top_k: int = 3
    experts: int = 8
    hidden: int = 64
    intermediate: int = 128


class Inputs(NamedTuple):
    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    dy: jax.Array

    @property
    def args(self):
        return self[:6]


class Results(NamedTuple):
    y: jax.Array
    dx: jax.Array
    d_expert_weights: jax.Array
    dw_gate: jax.Array
    dw_up: jax.Array
    dw_down: jax.Array


def _random(rng, s):
    return rng.random((s.tokens, s.experts)).argsort(axis=1)[:, : s.top_k]


def _skewed(rng, s):
    popularity = 1.0 / np.arange(1, s.experts + 1) ** 2
    keys = rng.random((s.tokens, s.experts)) ** (1 / popularity)
    return (-keys).argsort(axis=1)[:, : s.top_k]


def _one_expert(rng, s):
    ids = np.full((s.tokens, s.top_k), -1)
    ids[:, -1] = s.experts - 2
    return ids


def _first_experts(rng, s):
    return rng.integers(0, max(1, s.experts // 8), (s.tokens, s.top_k))


def _none(rng, s):
    return np.full((s.tokens, s.top_k), -1)


def _holes(rng, s):
    ids = _random(rng, s)
    bad = np.array([-1, -1, -2, s.experts, 2**31 - 1, -(2**31)])
    return np.where(rng.random(ids.shape) < 0.4, rng.choice(bad, ids.shape), ids)


def _last_eighth_silent(rng, s):
    ids = _random(rng, s)
    ids[-(-s.tokens * 7 // 8) :] = -1
    return ids


def _duplicates(rng, s):
    return np.repeat(rng.integers(0, s.experts, (s.tokens, 1)), s.top_k, axis=1)


ROUTINGS = {
    "random": _random,
    "skewed": _skewed,
    "one_expert": _one_expert,
    "first_experts": _first_experts,  # one rank serves everything, with repeated ids
    "none": _none,
    "holes": _holes,  # -1 and ids outside the range
    "last_eighth_silent": _last_eighth_silent,  # a rank without a routed token
    "duplicates": _duplicates,
}


def make_inputs(
    shape: Shape = Shape(),
    routing: str = "random",
    *,
    scale: float = 1.0,
    dy_scale: float = 1.0,
    x_dtype=jnp.float32,
    w_dtype=jnp.float32,
    seed: int = 0,
) -> Inputs:
    rng = np.random.default_rng(seed)
    s = shape

    def normal(*size, std):
        return rng.standard_normal(size, np.float32) * np.float32(std)

    return Inputs(
        x=jnp.asarray(normal(s.tokens, s.hidden, std=scale), x_dtype),
        expert_ids=jnp.asarray(ROUTINGS[routing](rng, s), jnp.int32),
        expert_weights=jnp.asarray(rng.random((s.tokens, s.top_k), np.float32)),
        w_gate=jnp.asarray(normal(s.experts, s.hidden, s.intermediate, std=0.2), w_dtype),
        w_up=jnp.asarray(normal(s.experts, s.hidden, s.intermediate, std=0.2), w_dtype),
        w_down=jnp.asarray(normal(s.experts, s.intermediate, s.hidden, std=0.2), w_dtype),
        dy=jnp.asarray(normal(s.tokens, s.hidden, std=dy_scale), x_dtype),
    )


def results_of(f, inputs: Inputs) -> Results:
    """Runs f(x, expert_ids, expert_weights, weights...) -> y and pulls dy back."""

    def differentiable(x, expert_weights, *weights):
        return f(x, inputs.expert_ids, expert_weights, *weights)

    x, _, *rest = inputs.args
    y, pullback = jax.vjp(differentiable, x, *rest)
    return Results(y, *pullback(inputs.dy.astype(y.dtype)))


@functools.partial(jax.jit, static_argnames="swiglu_limit")
def oracle(inputs: Inputs, swiglu_limit: float | None = None) -> Results:
    """The fp32 oracle on the inputs as they are rounded; nothing of it is rounded to bf16."""
    inputs = Inputs(*(a if a.dtype == jnp.int32 else a.astype(jnp.float32) for a in inputs))
    config = MoEConfig(swiglu_limit=swiglu_limit)
    return results_of(functools.partial(reference.moe_mlp, config=config), inputs)


def make_mesh(shape=(8,), axes=("expert",), *, explicit=False, devices=None):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices() if devices is None else devices)[: np.prod(shape)]
    return jax.sharding.Mesh(devices.reshape(shape), axes, axis_types=(kind,) * len(axes))


def sharded(mesh, config, *, check_vma=True, **kwargs):
    """moe_mlp under a shard_map: tokens over all axes, experts over "expert"."""
    tokens, experts = P(mesh.axis_names), P("expert")
    stats = (P("expert"), P(mesh.axis_names), P(mesh.axis_names))
    with_stats = kwargs.get("return_stats", False)

    def shard(*args):
        out = moe_mlp(*args, axis_name="expert", config=config, **kwargs)
        if not with_stats:
            return out
        y, (load, invalid, rounds) = out
        return y, (load, invalid[None], rounds[None])

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(tokens,) * 3 + (experts,) * 3,
        out_specs=(tokens, stats) if with_stats else tokens,
        check_vma=check_vma,
    )


@functools.cache
def runner(implementation: str, ranks: int = 1, **config):
    """Returns the jitted inputs -> Results of moe_mlp on `ranks` devices, one per argument set."""
    config = MoEConfig(implementation=implementation, **config)
    f = sharded(make_mesh((ranks,)), config)
    return jax.jit(lambda inputs: results_of(f, inputs))


def require_ffi() -> None:
    """Skips the test, with the reason, where the custom calls cannot run."""
    reason = _implementation.why_not_ffi(jax.default_backend())
    if reason is not None:
        pytest.skip(reason)


def relative_error(got, want) -> float:
    """Relative Frobenius error; infinite where the norm of `want` is 0 and `got` is not 0."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want)
    error = np.linalg.norm(got - want)
    return error / norm if norm > 0 else (0.0 if error == 0 else np.inf)


def assert_close(got: Results, want: Results, tolerance: float, expert_ids=None) -> None:
    """Compares the output and the five gradients, whole and expert by expert.

    Of an expert are its weights' gradients and, if `expert_ids` is given, what its tokens get.
    """
    for name, a, b in zip(Results._fields, got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape, name
        assert np.isfinite(a).all(), name
        error = relative_error(a, b)
        assert error <= tolerance, f"{name}: {error:.2e}"
        for e in range(want.dw_gate.shape[0]):
            if name.startswith("dw_"):
                part = e
            elif expert_ids is not None:
                part = (np.asarray(expert_ids) == e).any(axis=1)
            else:
                continue
            error = relative_error(a[part], b[part])
            assert error <= tolerance, f"{name} of expert {e}: {error:.2e}"


def poison_memory_like(*arrays) -> None:
    """Fills freed memory of these arrays' sizes with NaN or -1, so that unwritten results show."""
    made = [jnp.full_like(a, np.nan if jnp.issubdtype(a.dtype, np.inexact) else -1) for a in arrays]
    jax.block_until_ready(made)


def assert_same_bits(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def run_processes(
    command: Callable[[str, int], list[str]],
    timeout: float,
    env: Callable[[int], dict[str, str]] = lambda i: {},
    count: int = 2,
) -> list[str]:
    """Runs Python in processes with 2 CPU devices each, and returns what each printed.

    Args:
      command: the arguments of Python for the coordinator's address and the process's number.
      timeout: seconds.
      env: environment variables of process i beside those of this process.
      count: processes.
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    tests = pathlib.Path(__file__).parent
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    common = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command(address, i)],
            env=common | env(i),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]

    def end():
        for p in processes:
            p.kill()

    outputs, late = [], []
    try:
        for i, p in enumerate(processes):
            try:
                outputs.append(p.communicate(timeout=timeout)[0])
            except subprocess.TimeoutExpired:
                late.append(i)
                end()
                outputs.append(p.communicate()[0])
    finally:
        end()
    assert not late, "\n".join([f"process {late[0]} did not end:", *outputs])
    assert not any(p.returncode for p in processes), "\n".join(outputs)
    return outputs
