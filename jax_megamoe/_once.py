"""Says in one sentence that a gradient has no derivative."""

from __future__ import annotations

from collections.abc import Callable

import jax


def once_differentiable(gradients: Callable) -> Callable:
    """Returns the function with a derivative that is an error where one is needed.

    The error is raised in the reverse pass and not when the function is traced, so that
    `jax.lax.stop_gradient` of a gradient can be differentiated.
    """
    wrapped = jax.custom_vjp(gradients)

    def forward(*operands):
        return gradients(*operands), None

    def backward(_, cotangents):
        raise TypeError(
            "moe_mlp is differentiable once and in reverse mode; what was asked for is the "
            "derivative of its gradient"
        )

    wrapped.defvjp(forward, backward)
    return wrapped
