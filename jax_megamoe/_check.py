"""Argument checks of the operation. All at trace time, one plain sentence each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import MoEConfig

FLOATS = ("bfloat16", "float32")
_INT32_MAX = 2**31 - 1


def arguments(x, expert_ids, expert_weights, w_gate, w_up, w_down, *, ranks: int) -> None:
    """Checks dtype, rank and size of every argument of one shard.

    Args:
      ranks: size of the expert axis, R.

    Raises:
      TypeError: for an argument that is no array, or has another dtype.
      ValueError: for another rank or size.
    """
    _typed_array("x", x, 2, "[tokens, hidden]", FLOATS)
    _typed_array("expert_ids", expert_ids, 2, "[tokens, experts per token]", ("int32",))
    _typed_array("expert_weights", expert_weights, 2, "[tokens, experts per token]", ("float32",))
    weights(w_gate, w_up, w_down, hidden=x.shape[1])
    tokens, slots, experts = x.shape[0], expert_ids.shape[1], ranks * w_gate.shape[0]
    if expert_ids.shape[0] != tokens:
        raise ValueError(
            f"expert_ids has {expert_ids.shape[0]} rows; it must have one per token of x, {tokens}"
        )
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights has shape {expert_weights.shape}; "
            f"it must be that of expert_ids, {expert_ids.shape}"
        )
    if not 1 <= slots <= experts:
        raise ValueError(
            f"expert_ids has {slots} experts per token; "
            f"it must be between 1 and the number of experts, {experts}"
        )
    if ranks * tokens * slots > _INT32_MAX:
        raise ValueError(
            f"x has {tokens} tokens on each of {ranks} ranks with {slots} experts each; "
            f"ranks * tokens * experts per token must not exceed {_INT32_MAX}"
        )


def config(value: MoEConfig) -> None:
    """Checks the type of the options."""
    if not isinstance(value, MoEConfig):
        raise TypeError(f"config is a {type(value).__name__}; it must be a jax_megamoe.MoEConfig")


def weights(w_gate, w_up, w_down, *, hidden: int) -> None:
    """Checks the three weights against each other and against the hidden size."""
    _typed_array("w_gate", w_gate, 3, "[experts, hidden, intermediate]", FLOATS)
    _typed_array("w_up", w_up, 3, "[experts, hidden, intermediate]", FLOATS)
    _typed_array("w_down", w_down, 3, "[experts, intermediate, hidden]", FLOATS)
    experts, width, inner = w_gate.shape
    if 0 in w_gate.shape:
        raise ValueError(f"w_gate has shape {w_gate.shape}; no dimension may be 0")
    if width != hidden:
        raise ValueError(f"w_gate has hidden size {width}; it must be that of x, {hidden}")
    for name, w, shape in (
        ("w_up", w_up, (experts, width, inner)),
        ("w_down", w_down, (experts, inner, width)),
    ):
        if w.shape != shape:
            raise ValueError(
                f"{name} has shape {w.shape}; with w_gate {w_gate.shape} it must be {shape}"
            )
        if w.dtype != w_gate.dtype:
            raise TypeError(f"{name} is {w.dtype}; it must be {w_gate.dtype}, as w_gate")


def leading_dimensions(x, expert_ids, expert_weights) -> None:
    """Checks that the three arrays of the global view agree in all but their last dimension."""
    for name, a in (("x", x), ("expert_ids", expert_ids), ("expert_weights", expert_weights)):
        _array(name, a)
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {a.shape}; it must have at least 2 dimensions")
        if a.shape[-1] == 0:
            raise ValueError(f"{name} has shape {a.shape}; the last dimension must not be 0")
        if a.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"{name} has shape {a.shape}; its leading dimensions must be those of x, "
                f"{x.shape[:-1]}"
            )


def divisible(experts: int, axis: str, ranks: int) -> None:
    """Checks that the experts can be spread evenly over the expert axis."""
    if experts % ranks:
        raise ValueError(
            f"w_gate has {experts} experts on axis {axis!r} of size {ranks}; "
            "the expert count must be a multiple of it"
        )


def flag(name: str, value) -> None:
    """Checks that an option is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; it must be True or False")


def score(value) -> None:
    """Checks that a score of the router is known."""
    if not isinstance(value, str) or value not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {value!r}; it must be 'softmax' or 'sigmoid'")


def array_like(name: str, a) -> None:
    """Checks that a value has a shape and a dtype, as arrays of JAX and numpy do.

    Raises:
      TypeError: it has not.
    """
    if not (hasattr(a, "shape") and hasattr(a, "dtype")):
        raise TypeError(f"{name} is a {type(a).__name__}; it must be an array")


def float_dtype(name: str, dtype) -> jnp.dtype:
    """Returns the dtype that an option names.

    Raises:
      ValueError: it is neither bfloat16 nor float32.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in FLOATS:
        value = repr(dtype) if found is None else found.name
        raise ValueError(f"{name} is {value}; it must be {' or '.join(FLOATS)}")
    return found


def _array(name, a):
    if not isinstance(a, jax.Array):
        raise TypeError(f"{name} is a {type(a).__name__}; it must be a jax.Array")


def _typed_array(name, a, rank, dims, dtypes):
    _array(name, a)
    if a.ndim != rank:
        raise ValueError(f"{name} has shape {a.shape}; it must have {rank} dimensions, {dims}")
    if a.dtype not in map(jnp.dtype, dtypes):
        raise TypeError(f"{name} is {a.dtype}; it must be {' or '.join(dtypes)}")
