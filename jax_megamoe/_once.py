"""Says in one sentence that a gradient has no derivative."""

from __future__ import annotations

from collections.abc import Callable

import jax


def once_differentiable(gradients: Callable) -> Callable:
    """Returns the function with a derivative that is an error when it is traced."""
    wrapped = jax.custom_jvp(gradients)

    @wrapped.defjvp
    def _(primals, tangents):
        raise TypeError(
            "moe_mlp is differentiable once and in reverse mode; what was asked for is the "
            "derivative of its gradient"
        )

    return wrapped
