"""Cross entropy over a large vocabulary without the logits of all tokens at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# f32 logits of one chunk take at most this many bytes (twice that in the backward pass).
_CHUNK_BYTES = 512 * 2**20
_ROW_TILE = 128  # whole tiles of a matrix product
IGNORED = -100


def cross_entropy_sum(hidden: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum over tokens of -log softmax(hidden @ matrix^T)[target], as an f32 scalar.

    Both passes walk over chunks of tokens and compute the chunk's logits anew, so the memory is
    that of one chunk; the gradient of `matrix` is added up in f32.

    Args:
      hidden: [T, H].
      matrix: [V, H], cast to hidden's dtype for the products.
      targets: int32 [T]; -100 leaves a token out, any other value outside [0, V) makes the sum
        and its gradients NaN.
    """
    tokens, width = hidden.shape
    fit = max(1, _CHUNK_BYTES // (4 * matrix.shape[0]))
    chunk = min(tokens, fit - fit % _ROW_TILE if fit > _ROW_TILE else fit)
    padding = -tokens % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, width)
    targets = jnp.pad(targets, (0, padding), constant_values=IGNORED).reshape(-1, chunk)
    return _chunked(hidden, matrix, targets)


@jax.custom_vjp
def _chunked(hidden, matrix, targets):
    return _forward(hidden, matrix, targets)[0]


def _logits(hidden, matrix):
    return jnp.einsum("th,vh->tv", hidden, matrix, preferred_element_type=jnp.float32)


def _forward(hidden, matrix, targets):
    operand = matrix.astype(hidden.dtype)

    def step(total, chunk):
        h, t = chunk
        logits = _logits(h, operand)
        known = (t == IGNORED) | ((t >= 0) & (t < logits.shape[1]))
        norm = jnp.where(known, jax.nn.logsumexp(logits, axis=-1), jnp.nan)
        at_target = jnp.take_along_axis(logits, jnp.maximum(t, 0)[:, None], axis=1)[:, 0]
        return total + jnp.where(t == IGNORED, 0.0, norm - at_target).sum(), norm

    total, norms = lax.scan(step, jnp.float32(0), (hidden, targets))
    return total, (hidden, matrix, targets, norms)


def _backward(residuals, cotangent):
    hidden, matrix, targets, norms = residuals
    operand = matrix.astype(hidden.dtype)
    columns = jnp.arange(matrix.shape[0])

    def step(d_matrix, chunk):
        h, t, norm = chunk
        p = jnp.exp(_logits(h, operand) - norm[:, None]) - (t[:, None] == columns)
        p = jnp.where((t == IGNORED)[:, None], 0.0, p * cotangent).astype(h.dtype)
        dh = jnp.einsum("tv,vh->th", p, operand, preferred_element_type=jnp.float32)
        dm = jnp.einsum("tv,th->vh", p, h, preferred_element_type=jnp.float32)
        return d_matrix + dm, dh.astype(h.dtype)

    zeros = jnp.zeros(matrix.shape, jnp.float32)
    d_matrix, d_hidden = lax.scan(step, zeros, (hidden, targets, norms))
    return d_hidden, d_matrix.astype(matrix.dtype), None


_chunked.defvjp(_forward, _backward)
