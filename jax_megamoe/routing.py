"""Routing of tokens to experts, the losses that keep it balanced, and bias balancing.

Everything is computed in fp32 whatever the dtype of the logits. No function here uses a mesh: on
sharded global arrays XLA adds the collectives, and inside `jax.shard_map` the two losses take the
names of the axes that the tokens are spread over.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_megamoe import _check
from jax_megamoe.config import is_integer

# Names of the results of `route` for policies of `jax.checkpoint`.
EXPERT_IDS = "moe_expert_ids"
EXPERT_WEIGHTS = "moe_expert_weights"

AxisName = str | tuple[str, ...]
Score = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Which experts each token goes to.

    Attributes:
      expert_ids: int32 [..., K], by falling score; -1 = slot not routed.
      expert_weights: f32 [..., K], what each expert's output is multiplied with; 0 where not
        routed.
      probs: f32 [..., E], the scores of all experts (softmax or sigmoid of the logits, without
        the bias); 0 for masked tokens.
    """

    expert_ids: jax.Array
    expert_weights: jax.Array
    probs: jax.Array


def route(
    logits: jax.Array,
    top_k: int,
    *,
    score: Score = "softmax",
    norm_topk_prob: bool = True,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    expert_ids: jax.Array | None = None,
) -> Routing:
    """Chooses `top_k` experts for each token.

    The scores are taken over all experts, then the K largest are chosen, then their scores are
    divided by their sum if `norm_topk_prob` (the order of Qwen3-MoE and DeepSeek-V3). Equal scores
    go to the lower expert number. A token with NaN logits still gets K distinct experts, its
    weights are NaN where its scores are (softmax: all of them), and it touches no other token.

    With `top_k=1` and `norm_topk_prob=True` the weight is the constant 1, so that no gradient of
    the main loss reaches the router: set `norm_topk_prob=False` for top-1 models.

    For policies of `jax.checkpoint` the ids and the weights bear the names `EXPERT_IDS` and
    `EXPERT_WEIGHTS` of this module.

    Args:
      logits: float [..., E], the router's output.
      top_k: K, experts per token, 1 <= K <= E.
      score: "softmax" over the experts, or "sigmoid" of each logit.
      norm_topk_prob: whether the K weights of a token are divided by their sum.
      expert_bias: f32 [E], added to the scores for the choice only; the weights come from the
        unbiased scores. See `update_expert_bias`.
      token_mask: bool [...], False for padding: such a token gets ids -1 and weights 0.
      expert_ids: int [..., K], a choice made earlier, to be replayed. Its ids are returned as they
        are and the weights are those of the present logits, differentiable as usual. Ids outside
        [0, E) get weight 0.

    Returns:
      `Routing(expert_ids, expert_weights, probs)`. Differentiable in `logits` through
      `expert_weights` and `probs`.

    Raises:
      ValueError: a shape that does not fit, `top_k` outside [1, E], or an unknown `score`.
      TypeError: `logits` not floating, `token_mask` not boolean, `expert_ids` not integers,
        `norm_topk_prob` no bool, or what is no array where one is expected.

    References:
      Qwen3-MoE: `Qwen3MoeTopKRouter` of Hugging Face transformers. Sigmoid scores and the bias:
      DeepSeek-V3 technical report, equations 13 to 16 (https://arxiv.org/abs/2412.19437).

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_megamoe
      >>> r = jax_megamoe.route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), 2)
      >>> r.expert_ids.tolist(), [round(w, 4) for w in r.expert_weights[0].tolist()]
      ([[0, 1]], [0.7311, 0.2689])
      >>> r = jax_megamoe.route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), 2, norm_topk_prob=False)
      >>> [round(w, 4) for w in r.expert_weights[0].tolist()]
      [0.6439, 0.2369]
    """
    _check_route(logits, top_k, score, norm_topk_prob, expert_bias, token_mask, expert_ids)
    num_experts = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    if token_mask is not None:
        # Before any arithmetic: the cotangent of a NaN that is masked afterwards is NaN.
        logits = jnp.where(token_mask[..., None], logits, 0.0)
    log_scores, probs = (
        (jax.nn.log_softmax(logits), jax.nn.softmax(logits))
        if score == "softmax"
        else (jax.nn.log_sigmoid(logits), jax.nn.sigmoid(logits))
    )

    if expert_ids is not None:
        ids = jnp.asarray(expert_ids).astype(jnp.int32)
    else:
        # Logits order the experts as softmax does, and still tell apart what it rounds together.
        ranking = logits
        if expert_bias is not None:
            ranking = probs + _last_axis(expert_bias.astype(jnp.float32), probs.ndim)
        ids = _largest(ranking, top_k)
    if token_mask is not None:
        ids = jnp.where(token_mask[..., None], ids, -1)
        probs = jnp.where(token_mask[..., None], probs, 0.0)

    # Before anything reads them: a recomputation that kept the ids then derives all from those.
    ids = checkpoint_name(ids, EXPERT_IDS)
    chosen = is_expert(ids, num_experts)
    routed = (ids >= 0) & (ids < num_experts)
    if norm_topk_prob:
        # s_i / sum(s) as a softmax of log(s): no 0/0 where all chosen scores underflow, and for
        # K=1 a gradient of exactly 0.
        kept = jnp.where(routed, _pick(log_scores, chosen), -jnp.inf)
        kept = jnp.where(routed.any(-1, keepdims=True), kept, 0.0)
        weights = jnp.where(routed, jax.nn.softmax(kept), 0.0)
    else:
        weights = _pick(probs, chosen)
    return Routing(ids, checkpoint_name(weights, EXPERT_WEIGHTS), probs)


def load_balancing_loss(
    probs: jax.Array,
    expert_ids: jax.Array,
    *,
    token_mask: jax.Array | None = None,
    divide_by_top_k: bool = False,
    layers: Literal["pool", "mean"] = "pool",
    axis_name: AxisName | None = None,
) -> jax.Array:
    """E * sum_e f_e P_e, which is least when every expert is used equally.

    f_e is the number of slots given to expert e divided by the number of tokens, so that f sums to
    K, and P_e is the mean of its score over the tokens. This is the value that Hugging Face
    transformers adds to the loss of Qwen3-MoE and Mixtral, which is K for uniform routing;
    `divide_by_top_k` makes that 1 whatever K is, as in the Switch Transformer. The gradient flows
    through P only. Scores are divided by their sum over the experts, which leaves a softmax as it
    is and gives DeepSeek-V3's definition for sigmoid scores.

    Tokens with no routed slot (all ids -1) are left out of f and P; no tokens at all give 0.

    Args:
      probs: f32 [..., E], `Routing.probs`.
      expert_ids: int32 [..., K], `Routing.expert_ids`.
      token_mask: bool [...], False leaves out further tokens.
      divide_by_top_k: divide by K.
      layers: "pool" takes all leading axes as tokens: on scores stacked over layers this is
        Hugging Face's value, in which opposite imbalances of two layers cancel. "mean" takes
        axis 0 as layers and returns the mean of their losses.
      axis_name: mesh axis or axes that the tokens are spread over, inside `jax.shard_map`. The
        result is then that of all tokens of these axes, the same on each device, and so is the
        gradient: take it outside the shard_map, or inside with the reduction that the rest of
        the loss needs (none for replicated parameters under check_vma=True, else a mean).

    Returns:
      f32 scalar.

    Raises:
      ValueError: shapes that do not fit or an unknown `layers`.
      TypeError: `expert_ids` not integers or `token_mask` not boolean.

    References:
      Switch Transformer, equations 4 to 6 (https://arxiv.org/abs/2101.03961);
      `load_balancing_loss_func` of Hugging Face transformers; DeepSeek-V3, equations 17 to 20.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_megamoe
      >>> r = jax_megamoe.route(jnp.array([[2.0, 1.0, 0.0, 0.0]] * 8), 2)
      >>> loss = jax_megamoe.load_balancing_loss(r.probs, r.expert_ids)
      >>> round(float(loss), 3)  # two of four experts get everything; uniform use gives 2
      3.339
    """
    _check.array_like("probs", probs)
    _check.array_like("expert_ids", expert_ids)
    if probs.ndim < 2 or probs.shape[:-1] != expert_ids.shape[:-1]:
        raise ValueError(
            f"probs has shape {probs.shape} and expert_ids {expert_ids.shape}; they must be "
            "[..., E] and [..., K] with the same leading sizes, at least one"
        )
    num_experts, top_k = probs.shape[-1], expert_ids.shape[-1]
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids has dtype {expert_ids.dtype}; it must be integers")
    check_token_mask(token_mask, probs.shape[:-1])
    if layers not in ("pool", "mean"):
        raise ValueError(f"layers is {layers!r}; it must be 'pool' or 'mean'")
    if layers == "mean" and probs.ndim < 3:
        raise ValueError(f"probs has shape {probs.shape}; layers='mean' needs [layers, ..., E]")

    counted = (expert_ids >= 0).any(-1)
    if token_mask is not None:
        counted &= token_mask
    probs = jnp.where(counted[..., None], probs.astype(jnp.float32), 0.0)
    total = probs.sum(-1, keepdims=True)
    probs = probs / jnp.where(total == 0.0, 1.0, total)
    slots = is_expert(expert_ids, num_experts) & counted[..., None, None]

    tokens_axes = tuple(range(1 if layers == "mean" else 0, probs.ndim - 1))
    load = slots.sum((*tokens_axes, probs.ndim - 1), dtype=jnp.int32)
    mass = probs.sum(tokens_axes)
    tokens = counted.sum(tokens_axes, dtype=jnp.int32)
    if axis_name is not None:
        load, mass, tokens = jax.lax.psum((load, mass, tokens), axis_name)
    tokens = jnp.maximum(tokens, 1).astype(jnp.float32)[..., None]
    loss = num_experts * ((load.astype(jnp.float32) / tokens) * (mass / tokens)).sum(-1).mean()
    return loss / top_k if divide_by_top_k else loss


def router_z_loss(
    logits: jax.Array,
    *,
    token_mask: jax.Array | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Mean over tokens of logsumexp(logits)^2, which keeps the router's logits small.

    Args:
      logits: float [..., E], the router's output.
      token_mask: bool [...], False leaves a token out.
      axis_name: mesh axis or axes that the tokens are spread over, inside `jax.shard_map`; as in
        `load_balancing_loss`.

    Returns:
      f32 scalar; 0 if no token is left.

    Raises:
      ValueError: a `token_mask` of another shape.

    References:
      ST-MoE, equation 5 (https://arxiv.org/abs/2202.08906).

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_megamoe
      >>> round(float(jax_megamoe.router_z_loss(jnp.zeros((3, 4)))), 3)  # log(4)^2
      1.922
    """
    _check.array_like("logits", logits)
    check_token_mask(token_mask, logits.shape[:-1])
    logits = logits.astype(jnp.float32)
    counted = jnp.ones(logits.shape[:-1], bool) if token_mask is None else token_mask
    logits = jnp.where(counted[..., None], logits, 0.0)
    squares = jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0).sum()
    tokens = counted.sum(dtype=jnp.int32)
    if axis_name is not None:
        squares, tokens = jax.lax.psum((squares, tokens), axis_name)
    return squares / jnp.maximum(tokens, 1).astype(jnp.float32)


def update_expert_bias(
    bias: jax.Array, expert_load: jax.Array, rate: float | jax.Array
) -> jax.Array:
    """Moves the selection bias of each expert towards equal load, without a gradient.

    bias_e + rate * sign(mean(load) - load_e): one step a training step, after the optimizer's, with
    the load of the whole batch (all devices, all microbatches).

    Args:
      bias: f32 [E], the `expert_bias` of `route`. Keep it out of the optimizer and out of
        mixed-precision casts.
      expert_load: integer [E], rows that each expert received; at most 2^31 - 1 in all.
      rate: step size; DeepSeek-V3 used 0.001.

    Returns:
      f32 [E], whatever the dtype of `bias`.

    Raises:
      ValueError: shapes that differ or are not [E].
      TypeError: `expert_load` not integers: a count in bf16 or f32 would be rounded.

    References:
      Auxiliary-loss-free load balancing, algorithm 1 (https://arxiv.org/abs/2408.15664).

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_megamoe
      >>> load = jnp.array([6, 1, 1, 0], jnp.int32)
      >>> print(jax_megamoe.update_expert_bias(jnp.zeros(4), load, 0.5))
      [-0.5  0.5  0.5  0.5]
    """
    for name, value in (("bias", bias), ("expert_load", expert_load)):
        _check.array_like(name, value)
    if bias.ndim != 1 or bias.shape != expert_load.shape:
        raise ValueError(
            f"bias has shape {bias.shape} and expert_load {expert_load.shape}; both must be [E]"
        )
    if not jnp.issubdtype(expert_load.dtype, jnp.integer):
        raise TypeError(f"expert_load has dtype {expert_load.dtype}; it must be integers")
    if not isinstance(rate, (int, float)) and getattr(rate, "shape", None) != ():
        raise TypeError(f"rate is {rate!r}; it must be a number")
    # Integers throughout: a fp32 mean of large counts would miss a load one above it.
    mean, rest = jnp.divmod(expert_load.sum(dtype=jnp.int32), expert_load.size)
    below = jnp.where(expert_load == mean, jnp.sign(rest), jnp.sign(mean - expert_load))
    return bias.astype(jnp.float32) + rate * below.astype(jnp.float32)


def is_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns bool [..., K, E], for each slot whether its id is e."""
    experts = _last_axis(jnp.arange(num_experts, dtype=jnp.int32), ids.ndim + 1)
    return ids[..., None].astype(jnp.int32) == experts


def _last_axis(a, ndim):
    """a[E] as [1, ..., 1, E]: JAX can be told to refuse arrays of unequal rank."""
    return jax.lax.expand_dims(a, range(ndim - 1))


def _largest(ranking, k):
    """Ids of the k largest entries of the last axis: distinct, the lower id first among equals."""
    # NaN compares false with everything, and top_k tells -0.0 from 0.0.
    ranking = jnp.where(jnp.isnan(ranking), -jnp.inf, jnp.where(ranking == 0.0, 0.0, ranking))
    return jax.lax.top_k(jax.lax.stop_gradient(ranking), k)[1].astype(jnp.int32)


def _pick(scores, chosen):
    """scores[..., E] at chosen[..., K, E]; 0 where no expert is chosen.

    A masked sum and not a gather: its gradient is a sum too, where a gather's is a scatter-add,
    and it is the same under Explicit mesh axes.
    """
    return jnp.where(chosen, scores[..., None, :], 0.0).sum(-1)


def _check_route(logits, top_k, score, norm_topk_prob, expert_bias, token_mask, expert_ids):
    _check.array_like("logits", logits)
    if logits.ndim < 1 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"logits has shape {logits.shape} and dtype {logits.dtype}; it must be floating "
            "[..., E]"
        )
    num_experts = logits.shape[-1]
    if not is_integer(top_k) or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k is {top_k!r}; it must be an integer from 1 to the {num_experts} experts of "
            "logits"
        )
    _check.score(score)
    _check.flag("norm_topk_prob", norm_topk_prob)
    if expert_bias is not None:
        _check.array_like("expert_bias", expert_bias)
        if expert_bias.shape != (num_experts,):
            raise ValueError(
                f"expert_bias has shape {expert_bias.shape}; it must be ({num_experts},)"
            )
        if not jnp.issubdtype(expert_bias.dtype, jnp.floating):
            raise TypeError(f"expert_bias has dtype {expert_bias.dtype}; it must be floating")
    check_token_mask(token_mask, logits.shape[:-1])
    if expert_ids is None:
        return
    _check.array_like("expert_ids", expert_ids)
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids has dtype {expert_ids.dtype}; it must be integers")
    if expert_ids.shape != (*logits.shape[:-1], top_k):
        raise ValueError(
            f"expert_ids has shape {expert_ids.shape}; with logits {logits.shape} and top_k "
            f"{top_k} it must be {(*logits.shape[:-1], top_k)}"
        )


def check_token_mask(token_mask: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Checks that the mask is boolean and has the shape of the tokens."""
    if token_mask is None:
        return
    _check.array_like("token_mask", token_mask)
    if token_mask.shape != shape:
        raise ValueError(f"token_mask has shape {token_mask.shape}; it must be {shape}")
    if token_mask.dtype != jnp.bool_:
        raise TypeError(f"token_mask has dtype {token_mask.dtype}; it must be bool")
