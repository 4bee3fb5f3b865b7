"""Text generation with a key-value cache: one compiled prefill and one compiled decoding loop."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_megamoe.config import is_integer
from jax_megamoe.models.qwen3_moe import layers
from jax_megamoe.models.qwen3_moe.model import (
    Qwen3MoE,
    check_batch,
    check_tokens,
    is_here,
    masks,
    place_batch,
    replicate,
    shard_map,
    specs,
)
from jax_megamoe.models.qwen3_moe.parameters import layer_groups

_INT32_MAX = 2**31 - 1


def generate(
    model: Qwen3MoE,
    prompt_ids: jax.Array,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    eos_ids: int | Sequence[int] | None = (),
    rng: jax.Array | None = None,
    attention_mask: jax.Array | None = None,
    pad_id: int = 0,
    return_logits: bool = False,
):
    """Continues each prompt by up to `max_new_tokens` tokens.

    Compiled once for each shape of the prompt and number of new tokens. The same tokens come out
    whatever the mesh, up to the rounding of the logits.

    Args:
      model: a `Qwen3MoE`.
      prompt_ids: integer [B, P], P >= 1, tokens of the model also where there is padding.
      max_new_tokens: N, at least 1.
      temperature: 0 takes the most likely token, otherwise tokens are drawn from
        softmax(logits / temperature).
      eos_ids: ids at which a row stops, one or several. () takes the model's own
        (`config.eos_token_ids`), None stops at none.
      rng: key of `jax.random`; needed if temperature is above 0.
      attention_mask: [B, P], 0 = padding, on the left: the last column must be tokens.
      pad_id: what a row holds after its end token. Rows that have ended are not routed.
      return_logits: also return the logits that the tokens were taken from, f32 [B, N, V], 0 after
        the end.

    Returns:
      int32 [B, N], the end token included.

    Raises:
      ValueError: a shape or number that does not fit, a token that the model does not have, or a
        temperature without `rng`.
      TypeError: `prompt_ids` or `attention_mask` is no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, generate
      >>> config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1)
      >>> model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
      >>> generate(model, jnp.zeros((1, 4), jnp.int32), 3).shape
      (1, 3)
    """
    check_batch("prompt_ids", prompt_ids, attention_mask=attention_mask)
    if not is_integer(max_new_tokens) or not 1 <= max_new_tokens <= _INT32_MAX:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens!r}; it must be an integer from 1 to {_INT32_MAX}"
        )
    number = isinstance(temperature, (numbers.Real, jax.Array))
    if not number or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature!r}; it must be a finite number, at least 0")
    if temperature > 0 and rng is None:
        raise ValueError(f"temperature is {temperature}; sampling needs rng, a jax.random key")
    check_tokens("prompt_ids", prompt_ids, model.config.vocab_size)
    if attention_mask is not None and is_here(attention_mask):
        _check_left_padding(attention_mask)
    stop = () if eos_ids is None else tuple(np.ravel(eos_ids).tolist())
    if eos_ids is not None and not stop:
        stop = model.config.eos_token_ids
    for name, token in [("eos_ids holds", token) for token in stop] + [("pad_id is", pad_id)]:
        if not is_integer(token) or not 0 <= token <= _INT32_MAX:
            raise ValueError(f"{name} {token!r}; a token is an integer from 0 to {_INT32_MAX}")
    # Operands, and at least four of them, so that other end tokens compile nothing anew.
    stop = np.array([*stop, *[-1] * (4 - len(stop))], np.int32)
    tokens, logits = _generate(
        model.runtime,
        max_new_tokens,
        return_logits,
        model.arrays(),
        prompt_ids,
        attention_mask,
        stop,
        np.int32(pad_id),
        rng if temperature > 0 else None,
        np.float32(temperature),
    )
    return (tokens, logits) if return_logits else tokens


def _check_left_padding(attention_mask):
    mask = np.asarray(attention_mask) != 0
    (rows,) = np.nonzero(mask.any(axis=1) & ~mask[:, -1])
    if rows.size:
        raise ValueError(
            f"attention_mask is 0 in the last column of row {rows[0]}; a prompt must be padded on "
            "the left"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(rt, new, keep_logits, arrays, prompt, attention_mask, stop, pad_id, rng, temperature):
    batch, one = PartitionSpec(rt.axes), PartitionSpec()
    rows, width = prompt.shape

    def f(arrays, prompt, keys, tokens, row, stop, pad_id, rng, temperature):
        def pick(logits, step):
            if rng is None:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32)
            # Keyed by the row of the whole batch, so that a token does not depend on the mesh.
            row_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(rng, step), row)
            return jax.vmap(jax.random.categorical)(row_keys, logits / temperature)

        def emit(state, logits):
            """Adds the token that these logits give to every row that has not ended."""
            step, done = state["step"], state["done"]
            token = jnp.where(done, pad_id, pick(logits, step)).astype(jnp.int32)
            state |= {"tokens": state["tokens"].at[:, step].set(token), "token": token}
            if keep_logits:
                logits = jnp.where(done[:, None], 0.0, logits)
                state |= {"logits": state["logits"].at[:, step].set(logits)}
            done |= (token[:, None] == stop).any(axis=1)
            # All devices leave the loop together: their experts are needed until then.
            alive = lax.psum((~done).sum(), rt.axes) > 0
            return state | {"step": step + 1, "done": done, "alive": alive}

        order = last = None
        if keys is not None:
            order = layers.tokens_first(keys)
            prompt, tokens = layers.reorder(prompt, order), layers.reorder(tokens, order)
            keys = layers.reorder(keys, order)
            last = jnp.maximum(keys.sum(axis=1) - 1, 0)[:, None]
        out = layers.decode(rt, arrays, prompt, order, tokens, keep_kv=True)
        hidden = out.hidden[:, -1:] if last is None else layers.reorder(out.hidden, last)
        matrix = layers.head(rt, arrays, rt.dtype)
        local = prompt.shape[0]
        state = {
            "step": jnp.int32(0),
            "done": jnp.zeros(local, bool) if tokens is None else ~tokens.any(axis=1),
            "tokens": jnp.full((local, new), pad_id, jnp.int32),
            "cache": [
                tuple(jnp.pad(a, ((0, 0), (0, 0), (0, new - 1), (0, 0), (0, 0))) for a in kv)
                for kv in out.kept
            ],
        }
        if keep_logits:
            state["logits"] = jnp.zeros((local, new, matrix.shape[0]), jnp.float32)
        state = emit(state, layers.to_logits(hidden[:, 0], matrix))
        keys = jnp.ones(prompt.shape, bool) if keys is None else keys
        keys = jnp.pad(keys, ((0, 0), (0, new - 1)), constant_values=True)

        def body(state):
            position = width + state["step"] - 1
            hidden, cache = _decode_one(
                rt, arrays, state["token"], position, keys, ~state["done"], state["cache"]
            )
            return emit(state | {"cache": cache}, layers.to_logits(hidden, matrix))

        def unfinished(state):
            return (state["step"] < new) & state["alive"]

        state = lax.while_loop(unfinished, body, state)
        return state["tokens"], state.get("logits")

    keys, tokens = masks(rt, prompt, attention_mask)
    prompt, row = place_batch(rt, prompt, jnp.arange(rows), fill=(0, 0))
    mapped = shard_map(
        rt,
        f,
        (specs(rt, arrays), batch, batch, batch, batch, one, one, one, one),
        (batch, batch),
    )
    out = mapped(arrays, prompt, keys, tokens, row, stop, pad_id, rng, temperature)
    return jax.tree.map(lambda a: a[:rows], replicate(rt, out))


def _decode_one(rt, arrays, token, position, keys, live, cache):
    """One more token of each row: token [B] at `position` -> hidden [B, H], the longer cache."""
    cfg = rt.config
    h = layers.embed(rt, arrays, token[:, None])
    rope = layers.rope_table(cfg, position[None])
    visible = keys & (jnp.arange(keys.shape[1]) <= position)
    # Indices are all of one type, also under jax_enable_x64.
    zero = jnp.int32(0)

    def body(carry, xs, group):
        h, caches = carry
        p, number = xs

        def attend(q, k, v):
            at = (number, zero, position, zero, zero)
            longer = tuple(
                lax.dynamic_update_slice(a, new[None], at)
                for a, new in zip(caches, (k, v), strict=True)
            )
            k, v = (lax.dynamic_index_in_dim(a, number, keepdims=False) for a in longer)
            out = jax.nn.dot_product_attention(
                q, k, v, mask=visible[:, None, None, :], implementation="xla"
            )
            return out, longer

        h, caches, _ = layers.layer(rt, group, p, h, rope, live[:, None], attend)
        return (h, caches), None

    longer = []
    for i, group in enumerate(layer_groups(cfg)):
        xs = (arrays["layers"][i], jnp.arange(group.count, dtype=jnp.int32))
        (h, caches), _ = lax.scan(functools.partial(body, group=i), (h, cache[i]), xs)
        longer.append(caches)
    return layers.rms_norm(h[:, 0], arrays["norm"], cfg.rms_norm_eps), longer
