"""The layers, routings and programs that the benchmark times."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_megamoe import _grouped, _mesh, _runtime, info, moe_mlp
from jax_megamoe.config import MoEConfig

AXIS = "expert"


class Shape(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(hidden=2048, intermediate=768, experts=128, top_k=8),
    "qwen3-235b-a22b": Shape(hidden=4096, intermediate=1536, experts=128, top_k=8),
    "tiny": Shape(hidden=128, intermediate=64, experts=8, top_k=2),
}
ROUTINGS = ("random", "skewed")
PASSES = ("forward", "backward", "layer")

# The dense product is [rows, H] @ [H, columns * I], 2 * rows * H * columns * I FLOPs. Forward: 6
# (three products). Backward: 16 (gate and up again, then two products for each of the three).
DENSE_COLUMNS = {"forward": 3, "backward": 8, "layer": 11}

# Times of the dense product that a bf16 pass may take at most, by (shape, pass).
LIMITS = {
    ("qwen3-30b-a3b", "forward"): 1.30,
    ("qwen3-235b-a22b", "forward"): 1.18,
    ("qwen3-30b-a3b", "backward"): 1.35,
    ("qwen3-235b-a22b", "backward"): 1.25,
}

# The popularity of an expert is (1 + its place)^-0.6, places dealt out by a fixed permutation. With
# 128 experts and top-8 the fullest expert gets 6.8 times the mean and four get more than 3 times.
SKEW_EXPONENT = 0.6
SEED = 0


def mesh_of(gpus: int) -> Mesh:
    """Returns the mesh of the first devices.

    Raises:
      ValueError: there are fewer.
    """
    devices = jax.devices()
    if gpus > len(devices):
        raise ValueError(f"gpus is {gpus} and this process has {len(devices)} device(s)")
    return jax.make_mesh((gpus,), (AXIS,), (AxisType.Auto,), devices=devices[:gpus])


def make_arguments(mesh: Mesh, shape: Shape, tokens: int) -> tuple[jax.Array, ...]:
    """Returns x, w_gate, w_up, w_down, dy, made on the devices."""
    local = shape.experts // mesh.size

    def make(seed):
        keys = jax.random.split(_own_key(seed, 0), 5)
        up = (local, shape.hidden, shape.intermediate)
        down = (local, shape.intermediate, shape.hidden)
        return (
            normal(keys[0], (tokens, shape.hidden)),
            normal(keys[1], up, shape.hidden),
            normal(keys[2], up, shape.hidden),
            normal(keys[3], down, shape.intermediate),
            normal(keys[4], (tokens, shape.hidden)),
        )

    return _on_each(mesh, make, P())(jnp.array(SEED))


def make_routing(mesh: Mesh, shape: Shape, tokens: int, routing: str) -> tuple[jax.Array, ...]:
    """Returns expert_ids and expert_weights, made on the devices."""

    def make(seed):
        # The top-k of perturbed popularities: draws without replacement.
        scores = jax.random.gumbel(_own_key(seed, 1), (tokens, shape.experts))
        if routing == "skewed":
            place = jax.random.permutation(jax.random.key(seed), shape.experts)
            scores -= SKEW_EXPONENT * jnp.log1p(place)
        chosen, ids = jax.lax.top_k(scores, shape.top_k)
        return ids, jax.nn.softmax(chosen)

    return _on_each(mesh, make, P())(jnp.array(SEED))


def make_dense(mesh: Mesh, shape: Shape, tokens: int, pass_: str) -> tuple[jax.Array, ...]:
    """Returns the operands, on each device, of the dense product of the same FLOPs."""
    columns = DENSE_COLUMNS[pass_] * shape.intermediate

    def make(seed):
        keys = jax.random.split(_own_key(seed, 2), 2)
        rows = normal(keys[0], (tokens * shape.top_k, shape.hidden))
        return rows, normal(keys[1], (shape.hidden, columns), shape.hidden)

    return _on_each(mesh, make, P())(jnp.array(SEED))


def dense_program(mesh: Mesh):
    """Returns the jitted dense product, every device its own."""
    return _on_each(mesh, jnp.dot, P(AXIS))


def layer_program(mesh: Mesh, pass_: str, config: MoEConfig):
    """Returns the jitted pass of x, w_gate, w_up, w_down, dy, expert_ids, expert_weights.

    "layer" is forward and backward of a checkpointed layer: only its inputs are kept between them.
    """
    operation = functools.partial(moe_mlp, axis_name=AXIS, config=config)

    def forward(x, w_gate, w_up, w_down, dy, expert_ids, expert_weights):
        return operation(x, expert_ids, expert_weights, w_gate, w_up, w_down)

    def vjp(f, x, w_gate, w_up, w_down, dy, expert_ids, expert_weights):
        return jax.vjp(
            lambda x, *rest: f(x, expert_ids, *rest), x, expert_weights, w_gate, w_up, w_down
        )

    def backward(*args):
        return vjp(operation, *args)[1](args[4])

    def layer(*args):
        y, pullback = vjp(jax.checkpoint(operation), *args)
        return y, pullback(args[4])

    body = {"forward": forward, "backward": backward, "layer": layer}[pass_]
    return _on_each(mesh, body, P(AXIS))


def describe(implementation: str) -> str:
    """Returns what ran behind the name of an implementation."""
    if implementation == "xla":
        if _mesh.platform() not in ("cpu", "gpu"):
            return "lax.ragged_dot"
        return "tokamax" if _grouped._has_tokamax() else "loop over tiles"
    return "host handlers" if _mesh.platform() == "cpu" else "CUDA"


def load_of(mesh: Mesh, shape: Shape, expert_ids: jax.Array) -> tuple[float, float]:
    """Returns the load of the fullest expert and of the fullest rank, over the mean."""
    load = jnp.bincount(expert_ids.ravel(), length=shape.experts)
    ranks = load.reshape(mesh.size, -1).sum(1)
    return float(load.max() / load.mean()), float(ranks.max() / ranks.mean())


def peak_bytes(compiled, shape: Shape, tokens: int, gpus: int, config: MoEConfig) -> int | None:
    """Returns the bytes that a program holds on a device: operands, results, temporaries and, of
    "ffi", the workspace, which XLA does not know of; None where XLA does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return total + workspace_bytes(shape, tokens, gpus, config)


def workspace_bytes(shape: Shape, tokens: int, gpus: int, config: MoEConfig) -> int:
    """Returns the bytes that an implementation holds on a device and XLA does not know of."""
    if config.implementation != "ffi" or _runtime.unavailable() is not None:
        return 0
    return info.workspace_bytes(
        _mesh.platform(),
        tokens=tokens,
        ranks=gpus,
        capacity_factor=config.capacity_factor,
        **shape._asdict(),
    )


def _own_key(seed, stream):
    """A key that differs between devices."""
    key = jax.random.fold_in(jax.random.key(seed), stream)
    return jax.random.fold_in(key, jax.lax.axis_index(AXIS))


def normal(key: jax.Array, size: tuple[int, ...], fan_in: int = 1) -> jax.Array:
    """Returns bf16 samples of the normal distribution with variance 1 / fan_in."""
    return (jax.random.normal(key, size) / fan_in**0.5).astype(jnp.bfloat16)


def _on_each(mesh, f, in_specs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P(AXIS)))
