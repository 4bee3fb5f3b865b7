"""The "ffi" implementation: one custom call forward, one backward.

The same calls serve the GPU and the host. They are pure: nothing is handed out between the forward
and the backward but the layer's inputs, so rematerialisation, which needs only those, re-runs no
forward call whose output nobody wants.

On the GPU matrix operands are bf16: others are rounded before the call.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _mesh, _workspace
from jax_megamoe._once import once_differentiable


class Call(NamedTuple):
    """The static part of a call.

    Attributes:
      axis_name: the expert axis, None for one device.
      platform: that of the devices, "cpu" or "gpu".
      attributes: name and value of each attribute of the custom calls.
    """

    axis_name: str | None
    platform: str
    attributes: tuple[tuple[str, int | float | str], ...]


def make_call(config, axis_name, ranks, x, expert_ids, expert_weights, w_gate, *_) -> Call:
    """Returns the static part of a call; makes its workspace."""
    local_experts, hidden, intermediate = w_gate.shape
    workspace = _workspace.make(
        axis_name=axis_name,
        ranks=ranks,
        tokens=x.shape[0],
        top_k=expert_ids.shape[1],
        local_experts=local_experts,
        hidden=hidden,
        intermediate=intermediate,
        dtype=x.dtype,
        capacity_factor=config.capacity_factor,
        timeout_s=config.timeout_s,
    )
    limit = math.inf if config.swiglu_limit is None else config.swiglu_limit
    return Call(
        axis_name,
        _mesh.platform(),
        (
            ("workspace", workspace.key),
            ("ranks", ranks),
            ("capacity_rows", workspace.capacity_rows),
            ("precision", config.precision),
            ("wgrad_precision", config.wgrad_precision),
            ("swiglu_limit", float(limit)),
            ("timeout_s", float(config.timeout_s)),
            ("reserved_sms", config.reserved_sms),
        ),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def moe_mlp(call: Call, x, expert_ids, expert_weights, w_gate, w_up, w_down):
    """Returns y [T, H] and the stats (expert_load [E_l], invalid_ids [], rounds [])."""
    rounded, *weights = (_operand(call, a) for a in (x, w_gate, w_up, w_down))
    operands = (rounded, expert_ids, expert_weights, *weights, _mesh.place(call.axis_name))
    load, counters = _like(x, (w_gate.shape[0],), jnp.int32), _like(x, (2,), jnp.int32)
    results = (_like(x), load, counters)
    y, load, counters = _custom_call("jax_megamoe_forward", call, results, operands)
    return y, (load, counters[0], counters[1])


def _forward(call, *args):
    return moe_mlp(call, *args), args


def _backward(call, residuals, cotangents):
    x, expert_ids, expert_weights, *weights = residuals
    rounded, dy = _operand(call, x), _operand(call, cotangents[0])
    weight_operands = (_operand(call, w) for w in weights)
    place = _mesh.place(call.axis_name)
    operands = (rounded, expert_ids, expert_weights, *weight_operands, dy, place)
    results = tuple(_like(a) for a in (x, expert_weights, *weights))
    run = functools.partial(_custom_call, "jax_megamoe_backward", call, results)
    dx, d_expert_weights, *dws = once_differentiable(run)(operands)
    return dx, None, d_expert_weights, *dws


moe_mlp.defvjp(_forward, _backward)


def _operand(call, a):
    return a.astype(jnp.bfloat16) if call.platform == "gpu" else a


def _custom_call(target, call, results, operands):
    attributes = {name: _typed(value) for name, value in call.attributes}

    # Under vmap one call after the other: each meets those of the other ranks.
    @jax.custom_batching.sequential_vmap
    def run(*operands):
        return tuple(jax.ffi.ffi_call(target, results)(*operands, **attributes))

    return run(*operands)


def _like(a, shape=None, dtype=None):
    """The type of `a` with another shape and dtype: it keeps the axes over which `a` varies."""
    kind = jax.typeof(a)
    return kind.update(shape=shape or kind.shape, dtype=dtype or kind.dtype)


def _typed(value):
    if isinstance(value, int):
        return np.int64(value)
    return np.float32(value) if isinstance(value, float) else value
