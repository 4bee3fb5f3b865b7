"""AdamW with warm-up, cosine decay and clipping by the global norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from training.mesh import path_names


def schedule(peak: float, *, warmup: int, steps: int, final: float = 0.1) -> optax.Schedule:
    """Linear to `peak` in `warmup` steps, then along a cosine to `final * peak` at `steps`."""
    start = peak / (warmup + 1)  # not 0, which would waste the first batch
    return optax.warmup_cosine_decay_schedule(
        start, peak, warmup, max(steps, warmup + 1), end_value=final * peak
    )


def decays(path, _leaf=None) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    names = path_names(path)
    return not any("norm" in name or "bias" in name for name in names)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales the gradients down to a norm over all parameters of at most `limit`.

    By one factor: optax's divides each element, which the compiler does not repeat in every use but
    keeps, a second copy of all gradients.
    """

    def update(grads, state, params=None):
        factor = jnp.minimum(1.0, limit / optax.tree.norm(grads))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def adamw(
    learning_rate: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """The norm is over all parameters; under `jit` with global arrays that needs no more care."""
    return optax.chain(
        clip_by_global_norm(clip_norm),
        optax.adamw(
            learning_rate,
            b1=0.9,
            b2=0.95,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(decays, params),
        ),
    )
