"""The router and the experts as one function, which the Flax modules wrap."""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jax_megamoe import _check, _mesh
from jax_megamoe.config import MoEConfig, is_integer
from jax_megamoe.op import moe, moe_mlp
from jax_megamoe.routing import (
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    Routing,
    Score,
    check_token_mask,
    is_expert,
    load_balancing_loss,
    route,
    router_z_loss,
)

ROUTER_LOGITS = "moe_router_logits"
OUTPUT = "moe_output"
CHECKPOINT_NAMES = (ROUTER_LOGITS, EXPERT_IDS, EXPERT_WEIGHTS, OUTPUT)

# The output is left out: no gradient of the layer reads it, so recomputation does not make it.
save_routing = jax.checkpoint_policies.save_only_these_names(
    ROUTER_LOGITS, EXPERT_IDS, EXPERT_WEIGHTS
)


class MoEAux(NamedTuple):
    """What a layer did besides its output, over all tokens of the call; padding is left out.

    Plain results and no state: recomputation and scan neither lose nor double them.

    Attributes:
      load_balancing_loss: f32 [], Hugging Face's value for this layer alone, K if balanced (see
        `jax_megamoe.load_balancing_loss`, also for one value over the layers of a model).
      router_z_loss: f32 [], see `jax_megamoe.router_z_loss`.
      expert_load: int32 [E], rows that each expert received.
      invalid_ids: int32 [], replayed ids outside [-1, E); they contribute nothing.
      router_logits: f32 [..., E].
      routing: `jax_megamoe.Routing`, with the ids to replay.
    """

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    expert_load: jax.Array
    invalid_ids: jax.Array
    router_logits: jax.Array
    routing: Routing


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static options of a layer; `__call__` applies it to parameters."""

    num_experts: int
    top_k: int
    score: Score
    norm_topk_prob: bool
    dtype: jnp.dtype | None
    mesh: Mesh | None
    expert_axis: str | None
    token_axes: tuple[str, ...] | None
    fsdp_axis: str | None
    config: MoEConfig

    def check(self, hidden: int, intermediate: int, param_dtype: jnp.dtype) -> None:
        """Refuses at construction what cannot run, and warns of what does not train."""
        _check.config(self.config)
        sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": self.num_experts}
        for name, size in sizes.items():
            if not is_integer(size) or size < 1:
                raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1")
        for name, dtype in (("dtype", self.dtype), ("param_dtype", param_dtype)):
            if dtype is not None:
                _check.float_dtype(name, dtype)
        _check.score(self.score)
        _check.flag("norm_topk_prob", self.norm_topk_prob)
        if not is_integer(self.top_k) or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k is {self.top_k!r}; it must be an integer from 1 to num_experts, "
                f"{self.num_experts}"
            )
        if self.expert_axis is not None:
            mesh = _mesh.resolve(self.mesh, self.expert_axis)
            experts = self.num_experts
            _mesh.check_divides("num_experts", experts, "expert_axis", self.expert_axis, mesh)
            _mesh.check_axes("token_axes", self.token_axes or (), mesh)
            _mesh.check_axes("fsdp_axis", [self.fsdp_axis] if self.fsdp_axis else [], mesh)
            if self.fsdp_axis == self.expert_axis:
                raise ValueError(
                    f"fsdp_axis is {self.fsdp_axis!r}, which is expert_axis; it must be another"
                )
            if self.fsdp_axis:
                _mesh.check_divides("hidden", hidden, "fsdp_axis", self.fsdp_axis, mesh)
        elif self.mesh is not None or self.token_axes is not None or self.fsdp_axis is not None:
            raise ValueError(
                "expert_axis is None, which is for one device; with mesh, token_axes or fsdp_axis "
                "it must name the mesh axis of the experts (its size may be 1)"
            )
        if self.top_k == 1 and self.norm_topk_prob:
            warnings.warn(
                "top_k=1 with norm_topk_prob=True makes every routing weight the constant 1, so "
                "that the router learns from auxiliary losses only; norm_topk_prob=False trains it",
                stacklevel=4,
            )

    def __call__(
        self,
        x: jax.Array,
        router: jax.Array,
        expert_bias: jax.Array | None,
        w_gate: jax.Array,
        w_up: jax.Array,
        w_down: jax.Array,
        token_mask: jax.Array | None,
        expert_ids: jax.Array | None,
    ) -> tuple[jax.Array, MoEAux]:
        _check.array_like("x", x)
        x, w_gate, w_up, w_down = map(jnp.asarray, (x, w_gate, w_up, w_down))
        if x.ndim < 2 or x.shape[-1] != router.shape[0]:
            raise ValueError(
                f"x has shape {x.shape}; it must be [..., {router.shape[0]}] with at least one "
                "leading dimension"
            )
        check_token_mask(token_mask, x.shape[:-1])
        if token_mask is not None:
            # Padding may hold NaN, and the router's gradient sums x over all tokens.
            x = jnp.where(token_mask[..., None], x, 0)

        with jax.named_scope("moe_router"):
            logits = _router_logits(x, router)
            logits = checkpoint_name(logits, ROUTER_LOGITS)
            ids, weights, probs = route(
                logits,
                self.top_k,
                score=self.score,
                norm_topk_prob=self.norm_topk_prob,
                expert_bias=expert_bias,
                token_mask=token_mask,
                expert_ids=expert_ids,
            )

        with jax.named_scope("moe_experts"):
            x = x if self.dtype is None else x.astype(self.dtype)
            y = checkpoint_name(self._experts(x, ids, weights, w_gate, w_up, w_down), OUTPUT)

        with jax.named_scope("moe_aux"):
            aux = MoEAux(
                load_balancing_loss=load_balancing_loss(probs, ids, token_mask=token_mask),
                router_z_loss=router_z_loss(logits, token_mask=token_mask),
                expert_load=is_expert(ids, self.num_experts).sum(range(ids.ndim), dtype=jnp.int32),
                invalid_ids=((ids < -1) | (ids >= self.num_experts)).sum(dtype=jnp.int32),
                router_logits=logits,
                routing=Routing(ids, weights, probs),
            )
        return y, aux

    def _experts(self, x, ids, weights, w_gate, w_up, w_down):
        if self.expert_axis is not None:
            return moe(
                x,
                ids,
                weights,
                w_gate,
                w_up,
                w_down,
                mesh=self.mesh,
                expert_axis=self.expert_axis,
                token_axes=self.token_axes,
                config=self.config,
            )
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        return moe_mlp(*flat, w_gate, w_up, w_down, config=self.config).reshape(x.shape)


# Recomputed for the gradient, so that x is kept as it is and not as a copy in fp32.
@jax.checkpoint
def _router_logits(x, router):
    """From x as it came, in fp32 without reduced-precision passes.

    A logit rounded to bf16 decides between experts that differ by less than its step.
    """
    x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    return jnp.matmul(x, router, precision=jax.lax.Precision.HIGHEST)
