"""The Qwen3-MoE language model and its loss."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_megamoe import _check
from jax_megamoe.config import MoEConfig
from jax_megamoe.models.qwen3_moe import layers
from jax_megamoe.models.qwen3_moe.config import Qwen3MoEConfig
from jax_megamoe.models.qwen3_moe.cross_entropy import IGNORED, cross_entropy_sum
from jax_megamoe.models.qwen3_moe.layers import Remat, Runtime
from jax_megamoe.models.qwen3_moe.parameters import (
    Parameter,
    initialize,
    layer_groups,
    parameters,
    partition_spec,
)
from jax_megamoe.nnx import ExpertBias


class Layers(nnx.Module):
    """The parameters of consecutive layers of one kind, stacked along their first axis."""


class Qwen3MoE(nnx.Module):
    """A Qwen3-MoE, spread over a mesh.

    The whole model runs inside one `jax.shard_map` over all axes of the mesh. The batch is split
    over all of them; the experts lie on the expert axis; every parameter is spread over the
    remaining axes (those without experts over all axes) and gathered, in the compute dtype, layer
    by layer where it is used. Explicit and Auto axes are both fine (with Explicit ones JAX wants
    gradients to be taken under `jax.jit`, `nnx.jit` or `jax.set_mesh`). A batch that the number of
    devices does not divide is filled up with rows that are not routed.

    Layers of one kind that follow each other are stacked and scanned over, so compile time does
    not grow with their number.

    Args:
      config: sizes.
      rngs: source of the initial values; normal with `config.initializer_range`.
      arrays: instead of `rngs`, values that lie on the mesh already, as `Qwen3MoE.arrays` returns.
      mesh: where it lies; None takes the mesh of `jax.set_mesh`, or else one device.
      expert_axis: the axis of the mesh that the experts are split over.
      dtype: format of activations and matrix operands.
      param_dtype: format of the stored parameters, and of their gradients.
      moe: options of the expert path.
      remat: "full" recomputes each layer in the backward pass from its input and its tokens' choice
        of experts, "none" keeps everything, a `jax.checkpoint` policy keeps what it says, for
        example `jax_megamoe.nnx.save_routing`.
      expert_bias: adds a selection bias to every layer with experts (`jax_megamoe.nnx.ExpertBias`,
        f32 [layers, E], zeros), for balancing without an auxiliary loss.

    Raises:
      ValueError: the mesh has no such axis, the experts do not divide over it, or a format is
        neither bfloat16 nor float32.
      TypeError: `mesh`, `moe` or `expert_axis` is something else.

    >>> from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
    >>> config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=2)
    >>> model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    >>> model(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 256)
    """

    def __init__(
        self,
        config: Qwen3MoEConfig,
        *,
        rngs: nnx.Rngs | None = None,
        arrays: dict[str, Any] | None = None,
        mesh: Mesh | None = None,
        expert_axis: str = "expert",
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        moe: MoEConfig = MoEConfig(),
        remat: Remat = "full",
        expert_bias: bool = False,
    ):
        if (rngs is None) == (arrays is None):
            raise ValueError("exactly one of rngs and arrays must be given")
        self.runtime = runtime = make_runtime(config, mesh, expert_axis, dtype, moe, remat)
        mesh, table = runtime.mesh, parameters(config)
        param_dtype = _check.float_dtype("param_dtype", param_dtype)
        if arrays is None:
            arrays = _initial_values(runtime, param_dtype)(rngs.params())

        def param(info, value):
            spec = partition_spec(info, mesh, expert_axis)
            return nnx.Param(value, out_sharding=tuple(spec), eager_sharding=False, axes=info.axes)

        self.embed_tokens = param(table["embed_tokens"], arrays["embed_tokens"])
        stacks = []
        for i, group in enumerate(layer_groups(config)):
            stack = Layers()
            for name, info in table["layers"][i].items():
                setattr(stack, name, param(info, arrays["layers"][i][name]))
            if expert_bias and group.has_experts:
                zeros = jnp.zeros((group.count, config.num_experts), jnp.float32)
                everywhere = NamedSharding(mesh, PartitionSpec())
                stack.expert_bias = ExpertBias(jax.device_put(zeros, everywhere))
            stacks.append(stack)
        self.layers = nnx.List(stacks)
        self.norm = param(table["norm"], arrays["norm"])
        if "lm_head" in table:
            self.lm_head = param(table["lm_head"], arrays["lm_head"])

    @property
    def config(self) -> Qwen3MoEConfig:
        return self.runtime.config

    @property
    def mesh(self) -> Mesh:
        return self.runtime.mesh

    def arrays(self) -> dict[str, Any]:
        """The parameters, and expert biases where there are any, as the tree of `parameters`."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Any(nnx.Param, ExpertBias)))

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        *,
        return_intermediates: bool = False,
    ):
        """Logits of every position.

        Args:
          input_ids: integer [B, S], tokens of the model also where there is padding. Under
            `jax.jit`, where values cannot be checked, an id outside [0, V) is taken for the nearest
            one inside.
          attention_mask: [B, S], 1 = token, 0 = padding on either side, which is neither attended
            to nor routed. None: no padding.
          return_intermediates: also return a dict of `hidden_embed` [B, S, H], `hidden_layers`
            [layers, B, S, H] (the residual stream after each layer), `hidden_final` [B, S, H], and
            for the layers with experts `router_logits` [L, B, S, E], `expert_ids` and
            `expert_weights` [L, B, S, K].

        Returns:
          f32 [B, S, V]. At padding the values mean nothing.

        Raises:
          ValueError: a shape or dtype that does not fit, an empty batch, or, outside of `jax.jit`,
            an id that is no token of the model.
          TypeError: an argument that is no array.
        """
        check_batch("input_ids", input_ids, attention_mask=attention_mask)
        check_tokens("input_ids", input_ids, self.config.vocab_size)
        logits, extra = _logits(
            self.runtime, self.arrays(), input_ids, attention_mask, return_intermediates
        )
        return (logits, extra) if return_intermediates else logits


def loss(
    model: Qwen3MoE,
    input_ids: jax.Array,
    labels: jax.Array,
    attention_mask: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss, with the values that Hugging Face transformers gives.

    total = lm_loss + router_aux_loss_coef * aux_loss. lm_loss is the mean cross entropy over the
    labels that are not -100; aux_loss is E * sum_e f_e P_e over the tokens of all layers with
    experts together, padding left out (`jax_megamoe.load_balancing_loss`, layers="pool").

    Args:
      model: a `Qwen3MoE`.
      input_ids: integer [B, S], as in `Qwen3MoE.__call__`.
      labels: integer [B, S], not shifted: the logits at t predict labels[t + 1]. -100 is ignored.
        Under `jax.jit`, where values cannot be checked, any other label outside [0, V) makes the
        loss and its gradients NaN.
      attention_mask: [B, S], 1 = token, 0 = padding.

    Returns:
      total, an f32 scalar, and a dict of f32 `lm_loss` and `aux_loss`, int32 `expert_load` [layers
      with experts, E] (slots given to each expert) and int32 `num_labels` (those that counted).
      Without a label lm_loss is 0, without a token aux_loss is 0.

    Raises:
      ValueError: a shape or dtype that does not fit, an empty batch, or, outside of `jax.jit`, an
        id or a label that is no token of the model.
      TypeError: an argument that is no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, loss
      >>> config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1)
      >>> model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
      >>> ids = jnp.zeros((1, 4), jnp.int32)
      >>> total, metrics = loss(model, ids, ids)
      >>> total.shape, int(metrics["num_labels"]), metrics["expert_load"].shape
      ((), 3, (1, 8))
    """
    check_batch("input_ids", input_ids, labels=labels, attention_mask=attention_mask)
    check_batch("labels", labels)
    check_tokens("input_ids", input_ids, model.config.vocab_size)
    check_tokens("labels", labels, model.config.vocab_size, ignored=IGNORED)
    return _loss(model.runtime, model.arrays(), input_ids, labels, attention_mask)


def make_runtime(
    config: Qwen3MoEConfig,
    mesh: Mesh | None,
    expert_axis: str,
    dtype: Any,
    moe: MoEConfig,
    remat: Remat,
) -> Runtime:
    """Checks the arguments against each other and settles the mesh."""
    _check.config(moe)
    if not isinstance(expert_axis, str):
        raise TypeError(f"expert_axis is {expert_axis!r}; it must be the name of a mesh axis")
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            (device,) = jnp.zeros(()).devices()
            mesh = Mesh(np.array([[device]]), ("data", expert_axis))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh")
    if expert_axis not in mesh.axis_names:
        raise ValueError(
            f"expert_axis is {expert_axis!r}; the axes of the mesh are "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    ranks = mesh.shape[expert_axis]
    if config.num_experts % ranks:
        raise ValueError(
            f"num_experts is {config.num_experts}; it must be a multiple of the size of mesh axis "
            f"{expert_axis!r}, {ranks}"
        )
    if not (callable(remat) or remat in ("full", "none")):
        raise ValueError(
            f"remat is {remat!r}; it must be 'full', 'none' or a jax.checkpoint policy"
        )
    return Runtime(config, mesh, expert_axis, _check.float_dtype("dtype", dtype), moe, remat)


def specs(runtime: Runtime, arrays: dict[str, Any]) -> dict[str, Any]:
    """The PartitionSpec of each array of `Qwen3MoE.arrays`."""
    tree = jax.tree.map(
        lambda info: partition_spec(info, runtime.mesh, runtime.expert_axis),
        parameters(runtime.config),
        is_leaf=lambda leaf: isinstance(leaf, Parameter),
    )
    layers_ = {
        i: {name: group.get(name, PartitionSpec()) for name in arrays["layers"][i]}
        for i, group in tree["layers"].items()
    }
    return {**tree, "layers": layers_}


@functools.lru_cache
def _initial_values(runtime, dtype):
    config = runtime.config
    leaves, tree = jax.tree.flatten(
        parameters(config), is_leaf=lambda leaf: isinstance(leaf, Parameter)
    )
    placement = [
        NamedSharding(runtime.mesh, partition_spec(info, runtime.mesh, runtime.expert_axis))
        for info in leaves
    ]

    def values(key):
        keys = jax.random.split(key, len(leaves))
        std = config.initializer_range
        return [initialize(info, k, std, dtype) for info, k in zip(leaves, keys, strict=True)]

    # It runs once, and on CPU LLVM's optimisation of 15 random generators took longer than
    # everything else together: 8.8 s of 10.
    cpu = runtime.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if cpu else None
    compiled = jax.jit(values, out_shardings=placement, compiler_options=options)
    return lambda key: tree.unflatten(compiled(key))


def place_batch(runtime: Runtime, *arrays: jax.Array | None, fill: tuple[int, ...]):
    """Fills [B, ...] arrays up to a multiple of the devices and splits them over all axes."""
    ranks = math.prod(runtime.mesh.shape.values())
    sharding = NamedSharding(runtime.mesh, PartitionSpec(runtime.axes))

    def place(a, value):
        if a is None:
            return None
        a = jnp.asarray(a)
        rows = -a.shape[0] % ranks
        if rows:
            filler = jnp.full((rows, *a.shape[1:]), value, a.dtype)
            a = jnp.concatenate(replicate(runtime, [a, filler]))
        return jax.device_put(a, sharding)

    return [place(a, value) for a, value in zip(arrays, fill, strict=True)]


def masks(runtime: Runtime, input_ids: jax.Array, attention_mask: jax.Array | None):
    """The keys to attend to and the tokens to route, bool [B, S], filled up; None for all."""
    keys = None if attention_mask is None else jnp.asarray(attention_mask) != 0
    tokens = keys
    if tokens is None and input_ids.shape[0] % math.prod(runtime.mesh.shape.values()):
        tokens = jnp.ones(input_ids.shape, bool)
    return place_batch(runtime, keys, tokens, fill=(False, False))


def shard_map(runtime: Runtime, f, in_specs, out_specs):
    # Not check_vma=True: the sums over devices are all in the code below, gradients of replicated
    # parameters are summed once at the edge, for all layers together, and not layer by layer.
    return jax.shard_map(
        f, mesh=runtime.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logits(rt, arrays, input_ids, attention_mask, keep_all):
    batch = PartitionSpec(rt.axes)
    by_layer = PartitionSpec(None, rt.axes)
    rows = input_ids.shape[0]

    def f(arrays, ids, keys, tokens):
        order = back = None
        if keys is not None:
            order = layers.tokens_first(keys)
            back = jnp.argsort(order, axis=1)
        ids, tokens = layers.reorder(ids, order), layers.reorder(tokens, order)
        out = layers.decode(rt, arrays, ids, order, tokens, keep_all=keep_all)
        hidden = layers.reorder(out.hidden, back)
        logits = layers.to_logits(hidden, layers.head(rt, arrays, rt.dtype))
        if not keep_all:
            return logits, {}, {}
        embedded = layers.reorder(layers.embed(rt, arrays, ids), back)
        per_layer = {"hidden_layers": out.residuals}
        if out.records is not None:
            per_layer |= {
                "router_logits": out.records.logits,
                "expert_ids": out.records.expert_ids,
                "expert_weights": out.records.expert_weights,
            }
        per_layer = {name: layers.reorder(a, back, axis=2) for name, a in per_layer.items()}
        return logits, {"hidden_embed": embedded, "hidden_final": hidden}, per_layer

    mapped = shard_map(rt, f, (specs(rt, arrays), batch, batch, batch), (batch, batch, by_layer))
    keys, tokens = masks(rt, input_ids, attention_mask)
    (ids,) = place_batch(rt, input_ids, fill=(0,))
    logits, extra, per_layer = mapped(arrays, ids, keys, tokens)
    if rows != logits.shape[0]:
        logits, extra, per_layer = replicate(rt, (logits, extra, per_layer))
    extra = {k: v[:rows] for k, v in extra.items()} | {k: v[:, :rows] for k, v in per_layer.items()}
    return logits[:rows], extra


def replicate(rt: Runtime, tree: Any) -> Any:
    """Puts the whole of every array on every device."""
    return jax.device_put(tree, NamedSharding(rt.mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnums=0)
def _loss(rt, arrays, input_ids, labels, attention_mask):
    batch, one = PartitionSpec(rt.axes), PartitionSpec()

    def f(arrays, ids, targets, keys, tokens):
        order = None if keys is None else layers.tokens_first(keys)
        ids, targets, tokens = (layers.reorder(a, order) for a in (ids, targets, tokens))
        out = layers.decode(rt, arrays, ids, order, tokens)
        hidden = out.hidden.reshape(-1, out.hidden.shape[-1])
        targets = targets.reshape(-1)
        lm_sum = cross_entropy_sum(hidden, layers.head(rt, arrays), targets)
        lm_sum, num_labels = jax.lax.psum(
            (lm_sum, (targets != IGNORED).sum(dtype=jnp.int32)), rt.axes
        )
        lm_loss = lm_sum / jnp.maximum(num_labels, 1)
        metrics = {"lm_loss": lm_loss, "num_labels": num_labels}
        metrics |= _balance(
            rt, out.records, jnp.int32(ids.size) if tokens is None else tokens.sum()
        )
        return lm_loss + rt.config.router_aux_loss_coef * metrics["aux_loss"], metrics

    mapped = shard_map(rt, f, (specs(rt, arrays), batch, batch, batch, batch), (one, one))
    if labels.dtype.itemsize < 4:  # may hold neither -100 nor the size of the vocabulary
        labels = labels.astype(jnp.int32)
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
    keys, tokens = masks(rt, input_ids, attention_mask)
    ids, targets = place_batch(rt, input_ids, targets, fill=(0, IGNORED))
    return mapped(arrays, ids, targets, keys, tokens)


def _balance(rt, records, tokens):
    """aux_loss and expert_load from each layer's sums, which is all that has to be kept of it."""
    if records is None:
        load = jnp.zeros((0, rt.config.num_experts), jnp.int32)
        return {"aux_loss": jnp.float32(0), "expert_load": load}
    load, mass, tokens = jax.lax.psum((records.load, records.mass, tokens), rt.axes)
    pairs = jnp.maximum(tokens * load.shape[0], 1).astype(jnp.float32)
    f = load.sum(0, dtype=jnp.int32) / pairs
    aux = rt.config.num_experts * jnp.sum(f * (mass.sum(0) / pairs))
    return {"aux_loss": aux, "expert_load": load}


def check_batch(name: str, ids: jax.Array, **others: jax.Array | None) -> None:
    """Raises an error unless `ids` is integer [B, S], not empty, and shaped like the others."""
    _check.array_like(name, ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {ids.shape} and dtype {ids.dtype}; it must be integers "
            "[batch, positions]"
        )
    if not ids.size:
        raise ValueError(
            f"{name} has no tokens, its shape is {ids.shape}; it must hold at least one position "
            "of one row"
        )
    for other, value in others.items():
        if value is not None:
            _check.array_like(other, value)
        if value is not None and value.shape != ids.shape:
            raise ValueError(
                f"{other} has shape {value.shape}; it must be that of {name}, {ids.shape}"
            )


def check_tokens(name: str, ids: jax.Array, vocab_size: int, *, ignored: int | None = None) -> None:
    """Raises an error if `ids` holds what is no token of the model, if its values can be seen."""
    if not is_here(ids):
        return
    ids = np.asarray(jax.device_get(ids))
    wrong, also = (ids < 0) | (ids >= vocab_size), ""
    if ignored is not None:
        wrong &= ids != ignored
        also = f", and {ignored} is ignored"
    if wrong.any():
        raise ValueError(
            f"{name} holds {ids[wrong][0]}; the tokens of the model are 0 to {vocab_size - 1}{also}"
        )


def is_here(array: jax.Array) -> bool:
    """Whether this process can look at all values of the array now."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable
