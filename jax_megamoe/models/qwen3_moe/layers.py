"""The decoder layers as functions of one device's shard, for use inside `jax.shard_map`.

Parameters come in as their FSDP shards and are gathered layer by layer where they are used.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jax_megamoe._layer import OUTPUT, ROUTER_LOGITS
from jax_megamoe.config import MoEConfig
from jax_megamoe.models.qwen3_moe.config import Qwen3MoEConfig
from jax_megamoe.models.qwen3_moe.parameters import fsdp, layer_groups, parameters
from jax_megamoe.op import moe_mlp
from jax_megamoe.routing import EXPERT_IDS, route

Remat = Literal["full", "none"] | Callable[..., bool]

# f32 logits of the attention that plain JAX computes at a time take at most this many bytes.
_LOGITS_BYTES = 512 * 2**20

# A recomputation that chose again could choose other experts than the forward pass used.
_save_choice = jax.checkpoint_policies.save_only_these_names(EXPERT_IDS)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Everything that a compiled model depends on but the arrays; hashable.

    Attributes:
      mesh: the batch is split over all of its axes.
      expert_axis: the axis that the experts are split over.
      dtype: format of activations and matrix operands.
      moe: options of the expert path.
      remat: "full" keeps of each layer only the input and the choice of experts for the backward
        pass, "none" keeps everything, and a `jax.checkpoint` policy keeps what it says.
    """

    config: Qwen3MoEConfig
    mesh: Mesh
    expert_axis: str
    dtype: Any
    moe: MoEConfig
    remat: Remat

    @property
    def axes(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    def fetch(self, params: dict[str, Any], name: str, group: int | None = None, dtype=None):
        """The whole of a parameter from its shards (of one layer, if it belongs to a group)."""
        table = parameters(self.config)
        info = table[name] if group is None else table["layers"][group][name]
        where = fsdp(info, self.mesh, self.expert_axis)
        value = params[name]
        if where is None:
            return value if dtype is None else value.astype(dtype)
        dim, axes = where
        return _gather(value, axes, dim - (group is not None), jnp.dtype(dtype or value.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard, axes, dim, dtype):
    return lax.all_gather(shard.astype(dtype), axes, axis=dim, tiled=True)


def _gather_fwd(shard, axes, dim, dtype):
    return _gather(shard, axes, dim, dtype), jnp.zeros((0,), shard.dtype)


def _gather_bwd(axes, dim, dtype, like, cotangent):
    # The sum over devices is taken in the parameter's own format, however it was gathered.
    cotangent = cotangent.astype(like.dtype)
    return (lax.psum_scatter(cotangent, axes, scatter_dimension=dim, tiled=True),)


_gather.defvjp(_gather_fwd, _gather_bwd)


class RouterRecord(NamedTuple):
    """What one layer's router did, on this device.

    load: int32 [E], slots given to each expert; mass: f32 [E], sum of the softmax probabilities;
    logits f32 [B, S, E], expert_ids int32 [B, S, K], expert_weights f32 [B, S, K].
    """

    load: jax.Array
    mass: jax.Array
    logits: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array


# Computes attention from q [B, S, N, D], k and v [B, S, N_kv, D]; returns it, and what the caller
# wants to keep of this layer.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def layer(
    rt: Runtime,
    group: int,
    p: dict[str, jax.Array],
    h: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    token_mask: jax.Array | None,
    attend: Attend,
) -> tuple[jax.Array, Any, RouterRecord | None]:
    """One decoder layer: h [B, S, H] -> (h, what `attend` keeps, the router's record)."""
    cfg = rt.config

    def weight(name):
        return rt.fetch(p, name, group, rt.dtype)

    def project(x, name):
        y = x @ weight(f"{name}_proj")
        return y + weight(f"{name}_bias") if cfg.attention_bias else y

    x = rms_norm(h, p["input_layernorm"], cfg.rms_norm_eps)
    q, k, v = (_heads(project(x, name), cfg.head_dim) for name in "qkv")
    q = rotate(rms_norm(q, p["q_norm"], cfg.rms_norm_eps), rope)
    k = rotate(rms_norm(k, p["k_norm"], cfg.rms_norm_eps), rope)
    attention, kept = attend(q, k, v)
    h = h + project(attention.reshape(*h.shape[:2], -1), "o")

    x = rms_norm(h, p["post_attention_layernorm"], cfg.rms_norm_eps)
    if not layer_groups(cfg)[group].has_experts:
        y = jax.nn.silu(x @ weight("gate_proj")) * (x @ weight("up_proj"))
        return h + y @ weight("down_proj"), kept, None
    y, record = _experts(rt, group, p, x, token_mask)
    return h + y, kept, record


def _experts(rt, group, p, x, token_mask):
    cfg = rt.config
    with jax.named_scope("moe_router"):
        # Logits that differ by less than a bf16 step decide between experts: the router is fp32.
        logits = jnp.matmul(
            x.astype(jnp.float32),
            rt.fetch(p, "router", group, jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        logits = checkpoint_name(logits, ROUTER_LOGITS)
        routing = route(
            logits,
            cfg.num_experts_per_tok,
            norm_topk_prob=cfg.norm_topk_prob,
            expert_bias=p.get("expert_bias"),
            token_mask=token_mask,
        )
        ids, weights = routing.expert_ids, routing.expert_weights
    with jax.named_scope("moe_experts"):
        y = moe_mlp(
            *(a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)),
            *_expert_weights(rt, group, p),
            axis_name=rt.expert_axis,
            config=rt.moe,
        )
        y = checkpoint_name(y, OUTPUT)
    experts = jnp.arange(cfg.num_experts)
    load = (ids[..., None] == experts).sum((0, 1, 2), dtype=jnp.int32)
    record = RouterRecord(load, routing.probs.sum((0, 1)), logits, ids, weights)
    return y.reshape(x.shape), record


def _expert_weights(rt, group, p):
    # Weights that no gather touches go in as they are stored: the operation casts them itself and
    # returns gradients that were never rounded.
    info = parameters(rt.config)["layers"][group]["w_gate"]
    gathered = fsdp(info, rt.mesh, rt.expert_axis) is not None
    dtype = rt.dtype if gathered else None
    return [rt.fetch(p, name, group, dtype) for name in ("w_gate", "w_up", "w_down")]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in fp32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rope_table(config: Qwen3MoEConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, f32 [..., S, 1, head_dim / 2], of the angles at `positions` [..., S]."""
    half = config.head_dim // 2
    # In double precision: an error of one bit is a thousandth of a turn at position 10,000.
    frequency = np.float32(config.rope_theta ** (-np.arange(half) / half))
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs made of the two halves of each head of x [B, S, N, D]."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def causal_attention(rt: Runtime, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of whole sequences; q [B, S, N, D], k and v [B, S, N_kv, D].

    On GPUs in bf16 it is cuDNN's, where that takes the sizes; else plain JAX.
    """
    gpu = rt.mesh.devices.flat[0].platform == "gpu"
    if gpu and q.dtype == jnp.bfloat16 and _cudnn_takes(q.shape, k.shape):
        return _cudnn_attention(q, k, v)
    return _plain_attention(q, k, v)


def _cudnn_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@functools.lru_cache
def _cudnn_takes(q: tuple[int, ...], kv: tuple[int, ...]) -> bool:
    """Whether cuDNN computes this attention and its gradient; warns of the reason if not."""

    def gradient(*operands):
        return jax.grad(lambda *a: _cudnn_attention(*a).sum(), argnums=(0, 1, 2))(*operands)

    try:
        jax.eval_shape(gradient, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (q, kv, kv)))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        warnings.warn(f"attention runs as plain JAX, more slowly: cuDNN says {error}", stacklevel=2)
        return False
    return True


def _plain_attention(q, k, v):
    """As many queries at a time as have logits of `_LOGITS_BYTES`, in both passes."""
    batch, length, heads, width = q.shape
    rows = max(1, _LOGITS_BYTES // (4 * batch * heads * length))
    if rows >= length:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    blocks = -(-length // rows)
    q = jnp.pad(q, ((0, 0), (0, blocks * rows - length), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, rows, heads, width).swapaxes(0, 1)
    # In f32 outside the loop, so that their gradients are added up in it.
    k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint
    def attend(block):
        first, q = block
        mask = first + jnp.arange(rows)[:, None] >= jnp.arange(length)
        k, v = k32.astype(q.dtype), v32.astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None], implementation="xla")

    out = lax.map(attend, (rows * jnp.arange(blocks), q))
    return out.swapaxes(0, 1).reshape(batch, -1, heads, width)[:, :length]


def tokens_first(attention_mask: jax.Array) -> jax.Array:
    """The order, int32 [B, S], that moves each row's padding behind its tokens.

    In this order causal attention never reaches padding, on whichever side it was, so that no
    layer needs a mask of S x S (cuDNN takes one only as a bias, whose gradient it then stores).
    """
    return jnp.argsort(~attention_mask, axis=1, stable=True)


def reorder(a: jax.Array, order: jax.Array | None, axis: int = 1) -> jax.Array:
    """Puts the positions of a [..., B, S, ...], S at `axis`, in the given order."""
    if order is None:
        return a
    order = order.reshape(*(1,) * (axis - 1), *order.shape, *(1,) * (a.ndim - axis - 1))
    return jnp.take_along_axis(a, order, axis=axis)


def _heads(x, head_dim):
    return x.reshape(*x.shape[:-1], -1, head_dim)


class Decoded(NamedTuple):
    """The decoder's result on this device.

    hidden: [B, S, H], after the final norm. kept: what `attend` kept, per layer group with the
    layers in front. records: `RouterRecord` with all layers that have experts in front, or None.
    residuals: [layers, B, S, H], the stream after each layer, or None if not asked for.
    """

    hidden: jax.Array
    kept: list[Any]
    records: RouterRecord | None
    residuals: jax.Array | None


def embed(rt: Runtime, params: dict[str, Any], input_ids: jax.Array) -> jax.Array:
    # Gathered as stored: the gradient adds up the rows of every occurrence of a token.
    table = rt.fetch(params, "embed_tokens")
    return jnp.take(table, input_ids, axis=0, mode="clip").astype(rt.dtype)


def decode(
    rt: Runtime,
    params: dict[str, Any],
    input_ids: jax.Array,
    positions: jax.Array | None,
    token_mask: jax.Array | None,
    *,
    keep_kv: bool = False,
    keep_all: bool = False,
) -> Decoded:
    """Runs all layers on whole sequences: input_ids [B, S] -> hidden [B, S, H].

    Args:
      positions: int32 [B, S], where each token stood before `tokens_first`; None for 0, 1, ...
      token_mask: bool [B, S], False for tokens that are not routed.
      keep_kv: keep each layer's keys and values.
      keep_all: keep the residual stream and, in the records, everything of each token.
    """
    cfg = rt.config
    h = embed(rt, params, input_ids)
    rope = rope_table(cfg, jnp.arange(input_ids.shape[1]) if positions is None else positions)

    def attend(q, k, v):
        return causal_attention(rt, q, k, v), (k, v) if keep_kv else None

    kept, records, residuals = [], [], []
    for i in range(len(layer_groups(cfg))):

        def body(h, p, i=i):
            h, kept, record = layer(rt, i, p, h, rope, token_mask, attend)
            if record is not None and not keep_all:
                record = record._replace(logits=None, expert_ids=None, expert_weights=None)
            return h, (kept, record, h if keep_all else None)

        if rt.remat != "none":
            policy = _save_choice if rt.remat == "full" else rt.remat
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        h, (kv, record, residual) = lax.scan(body, h, params["layers"][i])
        kept.append(kv)
        residuals.append(residual)
        if record is not None:
            records.append(record)

    def join(parts):
        return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)

    return Decoded(
        hidden=rms_norm(h, params["norm"], cfg.rms_norm_eps),
        kept=kept,
        records=join(records) if records else None,
        residuals=join(residuals) if keep_all else None,
    )


def head(rt: Runtime, params: dict[str, Any], dtype=None) -> jax.Array:
    """The output matrix [V, H]; with tied embeddings the embedding."""
    name = "embed_tokens" if rt.config.tie_word_embeddings else "lm_head"
    return rt.fetch(params, name, dtype=dtype)


def to_logits(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """hidden [..., H], matrix [V, H] -> f32 [..., V]."""
    return jnp.einsum("...h,vh->...v", hidden, matrix, preferred_element_type=jnp.float32)
