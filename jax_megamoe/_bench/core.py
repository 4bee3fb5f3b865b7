"""The five products of the CUDA matrix core alone, against dense products of the same FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _mesh, _runtime
from jax_megamoe._bench import timing
from jax_megamoe._bench.layer import Shape, normal

TARGET = "jax_megamoe_product"
_TILE_ROWS = 128


class Product(NamedTuple):
    """One product of the core.

    Attributes:
      number: the attribute `product` of the custom call.
      flops: in multiples of rows * H * I.
    """

    number: int
    flops: int


PRODUCTS = {
    "gate_up": Product(0, 4),
    "down": Product(1, 2),
    "down_grad": Product(2, 2),
    "input_grad": Product(3, 4),
    "weight_grad": Product(4, 2),
}


class Timing(NamedTuple):
    """Seconds of a product and of the dense one, or None and why."""

    product: str
    seconds: float | None
    dense_seconds: float | None
    error: str | None


def run(shape: Shape, *, rows: int, groups: int, rounds: int, turn_ms: int) -> Iterator[Timing]:
    """Times every product.

    Args:
      shape: hidden and intermediate size.
      rows: in all groups; their sizes are multinomial.
      groups: number of experts.
      rounds, turn_ms: see `timing.measure`.
    """
    why_not = _why_not()
    data = None if why_not else _make_data(shape, rows, groups)
    for name in PRODUCTS:
        seconds, failures = {}, {}
        if data is not None:
            programs = {
                "core": _program(data, shape, name),
                "dense": _dense(shape, rows, groups, name),
            }
            seconds, failures = timing.measure(programs, rounds, turn_ms)
        yield Timing(
            name, seconds.get("core"), seconds.get("dense"), why_not or failures.get("core")
        )


def _why_not():
    if _mesh.platform() != "gpu":
        return f"the matrix core is for CUDA and JAX runs on {_mesh.platform()!r}"
    if not _runtime.with_cuda():
        return _runtime.unavailable() or "the compiled module was built without CUDA"
    return None


def _make_data(shape, rows, groups):
    """Operands of all products; the rows that pad each group to whole tiles are zero."""
    sizes = np.random.default_rng(7).multinomial(rows, np.full(groups, 1 / groups))
    tile_start = np.concatenate([[0], np.cumsum(-(-sizes // _TILE_ROWS))]).astype(np.int32)
    valid = np.zeros((tile_start[-1] * _TILE_ROWS, 1), bool)
    for first, size in zip(tile_start * _TILE_ROWS, sizes, strict=False):
        valid[first : first + size] = True
    return _random_data(tile_start, valid, shape, groups)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _random_data(tile_start, valid, shape, groups):
    h, i, rows = shape.hidden, shape.intermediate, valid.shape[0]
    keys = jax.random.split(jax.random.key(0), 6)

    return dict(
        tile_start=tile_start,
        x=jnp.where(valid, normal(keys[0], (rows, h)), 0),
        gate=jnp.where(valid, normal(keys[1], (rows, i)), 0),
        up=jnp.where(valid, normal(keys[2], (rows, i)), 0),
        w_gate=normal(keys[3], (groups, h, i), h),
        w_up=normal(keys[4], (groups, h, i), h),
        w_down=normal(keys[5], (groups, i, h), i),
    )


# a0, a1, b0, b1 of each product; those with one pair of operands get it twice.
_OPERANDS = {
    "gate_up": ("x", "x", "w_gate", "w_up"),
    "down": ("gate", "gate", "w_down", "w_down"),
    "down_grad": ("x", "x", "w_down", "w_down"),
    "input_grad": ("gate", "up", "w_gate", "w_up"),
    "weight_grad": ("x", "x", "gate", "gate"),
}


def _program(data, shape, name):
    h, i = shape.hidden, shape.intermediate
    rows, groups = data["x"].shape[0], data["w_gate"].shape[0]
    out = {"gate_up": (rows, i), "down_grad": (rows, i), "weight_grad": (groups, h, i)}
    results = (
        jax.ShapeDtypeStruct(out.get(name, (rows, h)), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    attributes = dict(
        product=np.int64(PRODUCTS[name].number),
        hidden=np.int64(h),
        intermediate=np.int64(i),
    )
    call = jax.jit(lambda *operands: jax.ffi.ffi_call(TARGET, results)(*operands, **attributes)[0])
    operands = [data[operand] for operand in _OPERANDS[name]]
    return lambda: call(*operands, data["tile_start"])


def _dense(shape, rows, groups, name):
    h, i = shape.hidden, shape.intermediate
    if name == "weight_grad":
        sizes = (groups, rows // groups, h), (groups, rows // groups, i)
        product = jax.jit(lambda a, b: jnp.einsum("grh,gri->ghi", a, b))
    else:
        sizes = {
            "gate_up": ((rows, h), (h, 2 * i)),
            "down": ((rows, i), (i, h)),
            "down_grad": ((rows, h), (h, i)),
            "input_grad": ((rows, 2 * i), (2 * i, h)),
        }[name]
        product = jax.jit(jnp.dot)
    keys = jax.random.split(jax.random.key(1), 2)
    a, b = (normal(k, s) for k, s in zip(keys, sizes, strict=True))
    return lambda: product(a, b)
