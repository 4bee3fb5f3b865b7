"""The "xla" implementation: plain JAX on any backend.

Tokens, ids and weights of all ranks are gathered, each rank runs its own experts on the rows routed
to them, and the results are summed back to the ranks they came from. One custom_vjp whose residuals
are only its inputs: the backward gathers and recomputes.

Rows are sorted by (expert, source rank, token, slot) and worked through in rounds of at most
capacity_factor * T * K, so memory does not depend on the routing. No collective is inside the loop
over rounds: its trip count may differ from rank to rank.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe import _mesh
from jax_megamoe._grouped import grouped_matmul, grouped_outer
from jax_megamoe._once import once_differentiable


class Call(NamedTuple):
    """The static part of a call.

    Attributes:
      axis_name: the expert axis, None for one device.
      ranks: its size.
      capacity_factor: rows of a round as a multiple of T * K.
      swiglu_limit: as in MoEConfig.
    """

    axis_name: str | None
    ranks: int
    capacity_factor: float
    swiglu_limit: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def moe_mlp(call: Call, x, expert_ids, expert_weights, w_gate, w_up, w_down):
    """Returns y [T, H] and the stats (expert_load [E_l], invalid_ids [], rounds [])."""
    plan = _make_plan(call, expert_ids, w_gate.shape[0])
    x_all = _gather(call, x)
    row_weights = _gather(call, expert_weights).reshape(-1)
    gate, up, down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))

    def one_round(j, y):
        window = plan.window(j)
        rows = window.rows_of(x_all)
        weight = window.pick(row_weights)[:, None]
        g = grouped_matmul(rows, gate, window.group_sizes)
        u = grouped_matmul(rows, up, window.group_sizes)
        a = (weight * _swiglu(g, u, call.swiglu_limit)).astype(x.dtype)
        return window.add_to_tokens(y, grouped_matmul(a, down, window.group_sizes))

    y = _mesh.zeros(x_all.shape, jnp.float32, x)
    y = _scatter_sum(call, plan.each_round(one_round, y)).astype(x.dtype)
    experts = call.ranks * w_gate.shape[0]
    invalid = ((expert_ids < -1) | (expert_ids >= experts)).sum(dtype=jnp.int32)
    return y, (plan.group_sizes, invalid, plan.rounds)


def _forward(call, *args):
    return moe_mlp(call, *args), args


def backward(call, residuals, cotangents):
    """Returns the cotangents of the six arguments; `residuals` are the arguments."""
    dx, *others = once_differentiable(functools.partial(_gradients, call))(residuals, cotangents[0])
    return dx, None, *others


def _gradients(call, residuals, dy):
    x, expert_ids, expert_weights, w_gate, w_up, w_down = residuals
    plan = _make_plan(call, expert_ids, w_gate.shape[0])
    x_all, dy_all = _gather(call, x), _gather(call, dy)
    row_weights = _gather(call, expert_weights).reshape(-1)
    gate, up, down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    gate_t, up_t, down_t = (jnp.swapaxes(w, 1, 2) for w in (gate, up, down))

    def one_round(j, carry):
        dx, d_weights, dw_gate, dw_up, dw_down = carry
        window = plan.window(j)
        sizes = window.group_sizes
        rows, d_rows = window.rows_of(x_all), window.rows_of(dy_all)
        weight = window.pick(row_weights)[:, None]
        g, u = grouped_matmul(rows, gate, sizes), grouped_matmul(rows, up, sizes)
        swiglu, pullback = jax.vjp(lambda g, u: _swiglu(g, u, call.swiglu_limit), g, u)
        da = grouped_matmul(d_rows, down_t, sizes)
        dg, du = (d.astype(x.dtype) for d in pullback(weight * da))
        a = (weight * swiglu).astype(x.dtype)
        d_hidden = grouped_matmul(dg, gate_t, sizes) + grouped_matmul(du, up_t, sizes)
        return (
            window.add_to_tokens(dx, d_hidden),
            window.add_to_slots(d_weights, (da * swiglu).sum(axis=1)),
            grouped_outer(rows, dg, sizes, dw_gate),
            grouped_outer(rows, du, sizes, dw_up),
            grouped_outer(a, d_rows, sizes, dw_down),
        )

    shapes = (x_all.shape, row_weights.shape, w_gate.shape, w_up.shape, w_down.shape)
    init = tuple(_mesh.zeros(shape, jnp.float32, x) for shape in shapes)
    dx, d_weights, *dws = plan.each_round(one_round, init)
    dx = _scatter_sum(call, dx).astype(x.dtype)
    d_weights = _scatter_sum(call, d_weights.reshape(-1, expert_weights.shape[1]))
    return dx, d_weights, *(dw.astype(w_gate.dtype) for dw in dws)


moe_mlp.defvjp(_forward, backward)


class _Window(NamedTuple):
    """The rows of one round.

    Attributes:
      slot: int32 [C], which of the gathered R * T * K slots each row is; arbitrary beyond the rows.
      valid: bool [C], whether there is such a row.
      group_sizes: int32 [E_l], rows of each expert in the round.
      row_of: int32 [R * T, K], the row of each slot; outside [0, C) if it is not in this round.
    """

    slot: jax.Array
    valid: jax.Array
    group_sizes: jax.Array
    row_of: jax.Array

    def rows_of(self, tokens):
        return jnp.where(self.valid[:, None], tokens[self.slot // self.row_of.shape[1]], 0)

    def pick(self, per_slot):
        return jnp.where(self.valid, per_slot[self.slot], 0)

    def add_to_tokens(self, total, rows):
        """Adds each token's rows, slot after slot: gathers, so the order of the sum is fixed."""

        def add_slot(k, total):
            row, here = self._locate(self.row_of[:, k])
            return total + jnp.where(here[:, None], rows[row], 0)

        return lax.fori_loop(0, self.row_of.shape[1], add_slot, total, unroll=8)

    def add_to_slots(self, total, row_values):
        row, here = self._locate(self.row_of.reshape(-1))
        return total + jnp.where(here, row_values[row], 0)

    def _locate(self, row):
        here = (row >= 0) & (row < self.slot.shape[0])
        return jnp.where(here, row, 0), here


class _Plan(NamedTuple):
    """The routing of all ranks' slots to this rank's experts.

    Attributes:
      order: int32 [rounds * C], slots sorted by (expert, source rank, token, slot), those of other
        ranks' experts last, then padding.
      row_of: int32 [R * T, K], inverse of `order`; -1 for a slot that this rank does not serve.
      group_sizes: int32 [E_l], rows of each local expert.
      capacity: C, rows of a round.
    """

    order: jax.Array
    row_of: jax.Array
    group_sizes: jax.Array
    capacity: int

    @property
    def rounds(self):
        rows = self.group_sizes.sum(dtype=jnp.int32)
        return (rows + self.capacity - 1) // self.capacity

    def window(self, j):
        first = j * self.capacity
        ends = jnp.cumsum(self.group_sizes)
        before = jnp.clip(ends - self.group_sizes - first, 0, self.capacity)
        return _Window(
            slot=lax.dynamic_slice_in_dim(self.order, first, self.capacity),
            valid=first + jnp.arange(self.capacity) < ends[-1],
            group_sizes=jnp.clip(ends - first, 0, self.capacity) - before,
            row_of=jnp.where(self.row_of < 0, -1, self.row_of - first),
        )

    def each_round(self, body, init):
        if self.order.shape[0] == self.capacity:
            return body(0, init)
        return lax.fori_loop(0, self.rounds, body, init)


def _make_plan(call, expert_ids, local_experts):
    tokens, slots = expert_ids.shape
    first_expert = 0 if call.axis_name is None else lax.axis_index(call.axis_name) * local_experts
    local = (_gather(call, expert_ids) - first_expert).reshape(-1)
    mine = (local >= 0) & (local < local_experts)
    key = jnp.where(mine, local, local_experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    all_slots = call.ranks * tokens * slots
    rows = jnp.arange(all_slots, dtype=jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(rows, unique_indices=True)
    capacity = min(math.ceil(call.capacity_factor * tokens * slots), all_slots)
    return _Plan(
        order=jnp.pad(order, (0, -all_slots % capacity)),
        row_of=jnp.where(mine, row_of, -1).reshape(-1, slots),
        group_sizes=jnp.bincount(key, length=local_experts + 1)[:-1].astype(jnp.int32),
        capacity=capacity,
    )


def _swiglu(g, u, limit):
    if limit is not None:
        # A value equal to the limit passes its gradient; jnp.minimum would halve it.
        g = jnp.where(g > limit, limit, g)
        u = jnp.where(u > limit, limit, jnp.where(u < -limit, -limit, u))
    return jax.nn.silu(g) * u


def _gather(call, a):
    return a if call.axis_name is None else lax.all_gather(a, call.axis_name, tiled=True)


def _scatter_sum(call, a):
    return a if call.axis_name is None else lax.psum_scatter(a, call.axis_name, tiled=True)
