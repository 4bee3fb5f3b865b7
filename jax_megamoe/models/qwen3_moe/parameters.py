"""Every parameter of a Qwen3-MoE: name, shape, logical axes, and where it lies on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_megamoe.models.qwen3_moe.config import Qwen3MoEConfig


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of one kind: their parameters are stacked and scanned over."""

    first: int
    count: int
    has_experts: bool


def layer_groups(config: Qwen3MoEConfig) -> tuple[LayerGroup, ...]:
    """Splits the layers into the longest runs of one kind, in order."""
    groups: list[LayerGroup] = []
    for layer in range(config.num_hidden_layers):
        kind = layer in config.moe_layers
        if groups and groups[-1].has_experts == kind:
            last = groups.pop()
            groups.append(dataclasses.replace(last, count=last.count + 1))
        else:
            groups.append(LayerGroup(layer, 1, kind))
    return tuple(groups)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter's shape and the logical name of each of its axes.

    `axes` names: "layers", "experts", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab",
    "router". `ones` marks the norms, which start at one; biases ("bias") start at zero.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"


@functools.lru_cache
def parameters(config: Qwen3MoEConfig) -> dict[str, Any]:
    """The tree of `Parameter`: embed_tokens, norm, lm_head unless tied, and layers, a dict from
    the number of a layer group to its stacked parameters. Weights multiply from the right, x @ w
    ([in, out]), but for embed_tokens and lm_head, which are [vocab, hidden]."""
    hidden, vocab = config.hidden_size, (config.vocab_size, config.hidden_size)
    tree = {
        "embed_tokens": Parameter(vocab, ("vocab", "embed")),
        "norm": Parameter((hidden,), ("embed",), "ones"),
        "layers": {i: _layer(config, group) for i, group in enumerate(layer_groups(config))},
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = Parameter(vocab, ("vocab", "embed"))
    return tree


def _layer(config: Qwen3MoEConfig, group: LayerGroup) -> dict[str, Parameter]:
    hidden, head = config.hidden_size, config.head_dim
    q = config.num_attention_heads * head
    kv = config.num_key_value_heads * head
    layer = {
        "input_layernorm": Parameter((hidden,), ("embed",), "ones"),
        "q_proj": Parameter((hidden, q), ("embed", "heads")),
        "k_proj": Parameter((hidden, kv), ("embed", "kv_heads")),
        "v_proj": Parameter((hidden, kv), ("embed", "kv_heads")),
        "o_proj": Parameter((q, hidden), ("heads", "embed")),
        "q_norm": Parameter((head,), ("head_dim",), "ones"),
        "k_norm": Parameter((head,), ("head_dim",), "ones"),
        "post_attention_layernorm": Parameter((hidden,), ("embed",), "ones"),
    }
    if config.attention_bias:
        layer |= {
            "q_bias": Parameter((q,), ("heads",), "zeros"),
            "k_bias": Parameter((kv,), ("kv_heads",), "zeros"),
            "v_bias": Parameter((kv,), ("kv_heads",), "zeros"),
            "o_bias": Parameter((hidden,), ("embed",), "zeros"),
        }
    if group.has_experts:
        experts, inner = config.num_experts, config.moe_intermediate_size
        layer |= {
            "router": Parameter((hidden, experts), ("embed", "router")),
            "w_gate": Parameter((experts, hidden, inner), ("experts", "embed", "mlp")),
            "w_up": Parameter((experts, hidden, inner), ("experts", "embed", "mlp")),
            "w_down": Parameter((experts, inner, hidden), ("experts", "mlp", "embed")),
        }
    else:
        inner = config.intermediate_size
        layer |= {
            "gate_proj": Parameter((hidden, inner), ("embed", "mlp")),
            "up_proj": Parameter((hidden, inner), ("embed", "mlp")),
            "down_proj": Parameter((inner, hidden), ("mlp", "embed")),
        }
    return {
        name: Parameter((group.count, *p.shape), ("layers", *p.axes), p.init)
        for name, p in layer.items()
    }


def fsdp(parameter: Parameter, mesh: Mesh, expert_axis: str) -> tuple[int, tuple] | None:
    """The dimension that FSDP splits and the mesh axes it splits it over; None: replicated.

    Experts are spread over the axes beside the expert axis, everything else over all axes. FSDP
    takes the first dimension that divides, so that what a gather returns is contiguous where it
    can be; vectors, and matrices of which no dimension divides, are replicated.
    """
    has_experts = "experts" in parameter.axes
    spread = tuple(
        axis
        for axis in mesh.axis_names
        if mesh.shape[axis] > 1 and not (has_experts and axis == expert_axis)
    )
    dims = [dim for dim, name in enumerate(parameter.axes) if name != "layers"]
    if not spread or len(dims) < 2:
        return None
    size = math.prod(mesh.shape[axis] for axis in spread)
    for dim in dims:
        taken = mesh.shape[expert_axis] if parameter.axes[dim] == "experts" else 1
        if parameter.shape[dim] % (taken * size) == 0:
            return dim, spread
    return None


def partition_spec(parameter: Parameter, mesh: Mesh, expert_axis: str) -> PartitionSpec:
    """Where a parameter lies: its experts on the expert axis, and FSDP as in `fsdp`.

    Axes of one device are named too, though they split nothing: over those that a specification
    leaves out, gradients are summed, which would copy them.
    """
    spec: list[tuple[str, ...]] = [
        (expert_axis,) if name == "experts" else () for name in parameter.axes
    ]
    split = fsdp(parameter, mesh, expert_axis)
    if split is not None:
        spec[split[0]] += split[1]
    named = {axis for axes in spec for axis in axes}
    first = int(parameter.axes[0] == "layers")
    spec[first] += tuple(a for a in mesh.axis_names if mesh.shape[a] == 1 and a not in named)
    return PartitionSpec(*(axes or None for axes in spec))


def initialize(parameter: Parameter, key: jax.Array, std: float, dtype: Any) -> jax.Array:
    """A new parameter: ones, zeros, or normal with the given standard deviation."""
    if parameter.init == "ones":
        return jnp.ones(parameter.shape, dtype)
    if parameter.init == "zeros":
        return jnp.zeros(parameter.shape, dtype)
    return (std * jax.random.normal(key, parameter.shape, jnp.float32)).astype(dtype)
