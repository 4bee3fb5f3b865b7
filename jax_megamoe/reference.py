"""The oracle of every test: the expert path in plain jnp, fp32, one expert at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_megamoe import _mesh
from jax_megamoe.config import MoEConfig
from jax_megamoe.op import MoEStats


def moe_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    axis_name: str | None = None,
    config: MoEConfig = MoEConfig(),
    return_stats: bool = False,
):
    """Computes `jax_megamoe.moe_mlp` slowly and exactly; see there for the arguments.

    Every operand is taken to fp32 as it is, each expert multiplies every token, and a mask picks
    what was routed. With `axis_name` the experts of all ranks are gathered first. Differentiable by
    ordinary autodiff. Arguments are not checked; of `config` only `swiglu_limit` counts.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_megamoe import moe_mlp, reference
      >>> x = jnp.ones((1, 2))
      >>> expert_ids = jnp.array([[1, -1]], jnp.int32)
      >>> expert_weights = jnp.array([[0.5, 0.5]])
      >>> w_gate = w_up = w_down = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
      >>> print(reference.moe_mlp(x, expert_ids, expert_weights, w_gate, w_up, w_down).round(2))
      [[3.52 3.52]]
      >>> print(moe_mlp(x, expert_ids, expert_weights, w_gate, w_up, w_down).round(2))
      [[3.52 3.52]]
    """
    ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    tokens = x.shape[0]
    local_experts = w_gate.shape[0]
    num_experts = local_experts * ranks

    def gather(a):
        return a if axis_name is None else jax.lax.all_gather(a, axis_name, tiled=True)

    # One kind of carry, whatever the arguments vary over inside a shard_map.
    x32, ids, weights, *experts = _mesh.vary_alike(
        axis_name,
        x.astype(jnp.float32),
        expert_ids,
        expert_weights,
        *(gather(w).astype(jnp.float32) for w in (w_gate, w_up, w_down)),
    )

    def add_expert(y, expert):
        e, gate, up, down = expert
        weight = jnp.where(ids == e, weights, 0.0)
        routed = (ids == e).any(axis=1, keepdims=True)
        xe = jnp.where(routed, x32, 0.0)
        g, u = xe @ gate, xe @ up
        if (limit := config.swiglu_limit) is not None:
            # Not jnp.minimum, which halves the gradient of a value equal to the limit.
            g = jnp.where(g > limit, limit, g)
            u = jnp.where(u > limit, limit, jnp.where(u < -limit, -limit, u))
        out = (jax.nn.silu(g) * u) @ down
        return y + jnp.where(routed, weight.sum(axis=1, keepdims=True) * out, 0.0), None

    with jax.default_matmul_precision("highest"):
        y = _mesh.zeros((tokens, w_down.shape[-1]), jnp.float32, like=x32)
        y, _ = jax.lax.scan(add_expert, y, (jnp.arange(num_experts), *experts))
    y = y.astype(x.dtype)
    if not return_stats:
        return y
    ids = gather(expert_ids)
    rank = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    mine = rank * local_experts + jnp.arange(local_experts)
    load = (ids[..., None] == mine).sum(axis=(0, 1), dtype=jnp.int32)
    invalid = ((expert_ids < -1) | (expert_ids >= num_experts)).sum(dtype=jnp.int32)
    return y, MoEStats(expert_load=load, invalid_ids=invalid, rounds=jnp.int32(1))
