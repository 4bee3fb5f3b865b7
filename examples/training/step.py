"""The training step: gradients over microbatches, clipping, AdamW, expert biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe.routing import update_expert_bias
from training.text import IGNORED_LABEL


class TrainState(NamedTuple):
    """Everything that a step changes, and all that a checkpoint holds.

    Attributes:
      step: int32 [], finished steps; the position in the data too.
      params: f32, the trained parameters.
      others: variables without a gradient, such as expert biases.
      opt_state: of the optax transformation.
    """

    step: jax.Array
    params: nnx.State
    others: nnx.State
    opt_state: Any


def make_step(
    graphdef: nnx.GraphDef,
    loss: Callable,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    shardings: TrainState,
    *,
    bias_rate: float = 0.0,
) -> Callable:
    """Compiles to `step(state, batch) -> (state, metrics)`; the state's buffers are reused.

    `batch` holds arrays [M, B, S]: M microbatches, whose gradients are those of one batch of M*B
    rows. Each microbatch's loss, auxiliary loss included, counts with its share of the predicted
    tokens, so that neither depends on M or on where the padding lies. (The auxiliary loss is not
    linear in the tokens: with several microbatches it is the mean of theirs.)

    Args:
      graphdef: the model without its variables.
      loss: `(model, input_ids, labels, attention_mask) -> (total, metrics)`.
      tx: sees the f32 gradients of the whole batch.
      schedule: the learning rate, for the metrics only.
      shardings: where the new state lies; the same as the old one.
      bias_rate: step of the expert biases towards an equal load; 0 leaves them alone.
    """

    def step(state: TrainState, batch):
        predicted = (batch.labels[..., 1:] != IGNORED_LABEL).sum((1, 2))
        weights = predicted / jnp.maximum(predicted.sum(), 1)

        def objective(params, micro, weight):
            model = nnx.merge(graphdef, params, state.others)
            total, metrics = loss(model, micro.input_ids, micro.labels, micro.attention_mask)
            metrics = {n: metrics[n] for n in ("lm_loss", "aux_loss", "expert_load")}
            metrics |= {n: weight * metrics[n] for n in ("lm_loss", "aux_loss")}
            return weight * total, metrics | {"total": weight * total}

        def gradients(microbatch):
            return jax.grad(objective, has_aux=True)(state.params, *microbatch)

        def add(sums, microbatch):
            return jax.tree.map(jnp.add, sums, gradients(microbatch)), None

        microbatches = (batch, weights)
        one = jax.tree.map(lambda x: x[0], microbatches)
        if weights.shape[0] == 1:
            grads, metrics = gradients(one)
        else:
            zeros = jax.tree.map(
                lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(gradients, one)
            )
            zeros = (jax.lax.with_sharding_constraint(zeros[0], shardings.params), zeros[1])
            (grads, metrics), _ = jax.lax.scan(add, zeros, microbatches)
        grads = jax.lax.with_sharding_constraint(grads, shardings.params)

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        others = state.others
        if bias_rate:
            others = update_biases(others, metrics["expert_load"], bias_rate)
        metrics |= {"grad_norm": optax.tree.norm(grads), "lr": schedule(state.step)}
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, others, opt_state), metrics

    everywhere = NamedSharding(shardings.step.mesh, P())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))


def update_biases(biases: nnx.State, load: jax.Array, rate: float) -> nnx.State:
    """Moves each expert's bias towards an equal load.

    Args:
      biases: f32 [layers of a group, experts] each, in the order of the layers.
      load: int32 [layers with experts, experts], of the whole batch.
    """
    leaves, tree = jax.tree.flatten(biases)
    ends = np.cumsum([leaf.shape[0] for leaf in leaves])[:-1]
    update = jax.vmap(update_expert_bias, (0, 0, None))
    parts = zip(leaves, jnp.split(load, ends), strict=True)
    return jax.tree.unflatten(tree, [update(bias, part, rate) for bias, part in parts])


def initial_state(
    model: nnx.Module, tx: optax.GradientTransformation
) -> tuple[nnx.GraphDef, TrainState, TrainState]:
    """The model's structure, the state before the first step, and where each array of it lies.

    The optimiser's moments lie as their parameters do.
    """
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    everywhere = NamedSharding(model.mesh, P())
    params_at, others_at = jax.tree.map(lambda x: x.sharding, (params, others))
    opt_state_at = optax.tree_map_params(
        tx,
        lambda _, place: place,
        jax.eval_shape(tx.init, params),
        params_at,
        transform_non_params=lambda _: everywhere,
    )
    opt_state = jax.jit(tx.init, out_shardings=opt_state_at)(params)
    step = jax.device_put(jnp.int32(0), everywhere)
    return (
        graphdef,
        TrainState(step, params, others, opt_state),
        TrainState(everywhere, params_at, others_at, opt_state_at),
    )
