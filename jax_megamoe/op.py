"""The mixture-of-experts operation: `moe_mlp` per shard, `moe` for the global view."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_megamoe import _check, _ffi_op, _implementation, _mesh, _xla
from jax_megamoe.config import MoEConfig

# Compiled also where the caller does not: one program instead of one per primitive.
_run_ffi = jax.jit(_ffi_op.moe_mlp, static_argnums=0)
_run_xla = jax.jit(_xla.moe_mlp, static_argnums=0)


class MoEStats(NamedTuple):
    """What the routing did on this shard.

    Attributes:
      expert_load: int32 [E_l], rows that each expert of this rank received from all ranks.
      invalid_ids: int32 [], ids outside [-1, E) among this shard's tokens; they contribute nothing.
      rounds: int32 [], passes over the dispatch buffer that this rank's rows needed.
    """

    expert_load: jax.Array
    invalid_ids: jax.Array
    rounds: jax.Array


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
) -> jax.Array | tuple[jax.Array, MoEStats]:
    """Sends tokens to their experts, applies the experts, and sums what comes back.

    For token t with the experts e = expert_ids[t, k]:

      y[t] = sum_k expert_weights[t, k] * (silu(x[t] w_gate[e]) * (x[t] w_up[e])) w_down[e]

    (SwiGLU experts: Shazeer 2020, https://arxiv.org/abs/2002.05202; top-k routing: Shazeer et al.
    2017, https://arxiv.org/abs/1701.06538). Every routed row is computed, however skewed the
    routing is. Differentiable, once and in reverse mode, in x, expert_weights and the three
    weights; each gradient has its argument's dtype. Sums are in float32.

    This is the per-shard function. With `axis_name` it is called inside a `jax.shard_map` over that
    axis, with tokens and experts split over it; other axes of the mesh may split the tokens
    further. `check_vma` may be True or False. See `moe` for the global view.

    Args:
      x: [T, H] bfloat16 or float32, the T tokens of this shard; T is equal on all ranks.
      expert_ids: [T, K] int32, numbers of the experts among all E; -1 for a slot that is not
        routed. Other ids outside [0, E) contribute nothing and are counted.
      expert_weights: [T, K] float32, the routing weights.
      w_gate: [E_l, H, I] bfloat16 or float32, the gate projections of this shard's E_l = E / R
        experts, R being the size of the axis; rank r holds experts r * E_l to (r + 1) * E_l - 1.
      w_up: [E_l, H, I] in the dtype of w_gate, the up projections.
      w_down: [E_l, I, H] in the dtype of w_gate, the down projections.
      axis_name: the mesh axis over which experts are split; None where the weights hold all
        experts: on one device, or inside a shard_map that does not split them.
      config: implementation, precision and resources; static.
      return_stats: also return the statistics of the routing.

    Returns:
      y, [T, H] in the dtype of x; or (y, MoEStats) if `return_stats`.

    Raises:
      TypeError: if an argument has a dtype other than these, `config` is no MoEConfig, or
        `return_stats` no bool.
      ValueError: if an argument has another shape, if no shard_map binds `axis_name`, or if
        `config` asks for what this machine cannot run.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_megamoe import moe_mlp
      >>> x = jnp.ones((2, 4))
      >>> expert_ids = jnp.array([[0, 2], [1, -1]], jnp.int32)
      >>> expert_weights = jnp.array([[0.5, 0.5], [1.0, 0.0]])
      >>> w_gate = w_up = jnp.ones((3, 4, 8))
      >>> w_down = jnp.ones((3, 8, 4))
      >>> moe_mlp(x, expert_ids, expert_weights, w_gate, w_up, w_down).shape
      (2, 4)
    """
    _check.config(config)
    _check.flag("return_stats", return_stats)
    ranks = _mesh.axis_size(axis_name)
    _check.arguments(x, expert_ids, expert_weights, w_gate, w_up, w_down, ranks=ranks)
    _mesh.check_unsharded(x=x, expert_ids=expert_ids, expert_weights=expert_weights)
    _mesh.check_unsharded(w_gate=w_gate, w_up=w_up, w_down=w_down)
    local_experts, hidden, intermediate = w_gate.shape
    chosen = _implementation.choose(
        config,
        axis_name,
        hidden=hidden,
        intermediate=intermediate,
        top_k=expert_ids.shape[1],
        local_experts=local_experts,
    )
    args = _mesh.vary_alike(axis_name, x, expert_ids, expert_weights, w_gate, w_up, w_down)
    if x.shape[0] == 0:
        load = _mesh.zeros((w_gate.shape[0],), jnp.int32, args[0])
        none = load.sum(dtype=jnp.int32)
        y, stats = args[0], (load, none, none)
    elif chosen == "ffi":
        y, stats = _run_ffi(_ffi_op.make_call(config, axis_name, ranks, *args), *args)
    else:
        call = _xla.Call(axis_name, ranks, config.capacity_factor, config.swiglu_limit)
        y, stats = _run_xla(call, *args)
    return (y, MoEStats(*stats)) if return_stats else y


def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    mesh: Mesh | None = None,
    expert_axis: str,
    token_axes: str | Sequence[str] | None = None,
    config: MoEConfig = MoEConfig(),
) -> jax.Array:
    """Computes `moe_mlp` for global arrays; opens the `jax.shard_map` itself.

    Tokens are split over `token_axes`, experts over `expert_axis`, and the weights are replicated
    over the other axes, whose gradients are summed. Arrays that lie elsewhere are moved. Works with
    Auto and Explicit mesh axes, inside and outside `jax.jit`; under `jax.vmap` only inside
    `jax.jit` and with the mesh of `jax.set_mesh`.

    Args:
      x: [..., H] bfloat16 or float32, at least one leading dimension.
      expert_ids: [..., K] int32, with the leading dimensions of x.
      expert_weights: [..., K] float32.
      w_gate: [E, H, I] bfloat16 or float32.
      w_up: [E, H, I] in the dtype of w_gate.
      w_down: [E, I, H] in the dtype of w_gate.
      mesh: None takes the mesh of `jax.set_mesh`.
      expert_axis: the mesh axis over which experts are split.
      token_axes: the mesh axes over which tokens are split; None for all of them, the expert axis
        included. They are dealt to the leading dimensions from the left, each to the first that it
        divides: [B, S, H] on a mesh of data=2, expert=4 splits B by 8 if it can, else B by 2 and S
        by 4. Where that is impossible, the flattened tokens are padded. Tokens are replicated over
        an axis that is not named.
      config: as in `moe_mlp`; static.

    Returns:
      y, [..., H] in the dtype of x; with Explicit axes also in the sharding of x.

    Raises:
      TypeError, ValueError: as `moe_mlp`, and if the mesh lacks an axis or E is not a multiple of
        the size of the expert axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_megamoe import moe
      >>> mesh = jax.make_mesh((1,), ("expert",))
      >>> x = jnp.ones((2, 3, 4))
      >>> expert_ids = jnp.zeros((2, 3, 1), jnp.int32)
      >>> expert_weights = jnp.ones((2, 3, 1))
      >>> w_gate = w_up = jnp.ones((2, 4, 8))
      >>> w_down = jnp.ones((2, 8, 4))
      >>> moe(
      ...     x, expert_ids, expert_weights, w_gate, w_up, w_down, mesh=mesh, expert_axis="expert"
      ... ).shape
      (2, 3, 4)
    """
    _check.config(config)
    mesh = _mesh.resolve(mesh, expert_axis)
    token_axes = mesh.axis_names if token_axes is None else _mesh.axis_tuple(token_axes)
    _mesh.check_axes("token_axes", token_axes, mesh)
    _check.leading_dimensions(x, expert_ids, expert_weights)
    _check.weights(w_gate, w_up, w_down, hidden=x.shape[-1])
    _check.divisible(w_gate.shape[0], expert_axis, mesh.shape[expert_axis])
    tokens, spec = (x, expert_ids, expert_weights), _mesh.token_spec(mesh, x.shape[:-1], token_axes)
    if spec is None:
        tokens, spec = _flatten_and_pad(tokens, mesh, token_axes), PartitionSpec(token_axes)

    experts = PartitionSpec(expert_axis)
    tokens = (_mesh.reshard(a, mesh, spec) for a in tokens)
    weights = (_mesh.reshard(a, mesh, experts) for a in (w_gate, w_up, w_down))
    y = _sharded_moe(mesh, spec, expert_axis, config)(*tokens, *weights)
    if y.shape != x.shape:
        y = _mesh.reshard(y, mesh, PartitionSpec())[: x.size // x.shape[-1]].reshape(x.shape)
    return _mesh.reshard_like(y, x)


@functools.cache
def _sharded_moe(mesh, tokens, expert_axis, config):
    def shard(x, expert_ids, expert_weights, *weights):
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, expert_ids, expert_weights))
        return moe_mlp(*flat, *weights, axis_name=expert_axis, config=config).reshape(x.shape)

    specs = (tokens,) * 3 + (PartitionSpec(expert_axis),) * 3
    # Where tokens are replicated over the expert axis, so is y, which its type cannot show.
    return jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    )


def _flatten_and_pad(tokens, mesh, token_axes):
    """Makes [tokens, ...] of each array; tokens without an expert fill up the last shards."""
    tokens = [_mesh.reshard(a, mesh, PartitionSpec()).reshape(-1, a.shape[-1]) for a in tokens]
    rows = ((0, -tokens[0].shape[0] % _mesh.shards(mesh, token_axes)), (0, 0))
    return [jnp.pad(a, rows, constant_values=v) for a, v in zip(tokens, (0, -1, 0), strict=True)]
