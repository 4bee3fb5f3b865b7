"""The mixture-of-experts layer as a Flax Linen module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_megamoe import _mesh
from jax_megamoe._layer import (
    CHECKPOINT_NAMES,
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    OUTPUT,
    ROUTER_LOGITS,
    Layer,
    MoEAux,
    save_routing,
)
from jax_megamoe.config import MoEConfig
from jax_megamoe.routing import Score

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPERT_IDS",
    "EXPERT_WEIGHTS",
    "OUTPUT",
    "ROUTER_LOGITS",
    "MoE",
    "MoEAux",
    "save_routing",
]


class MoE(nn.Module):
    """`jax_megamoe.nnx.MoE` for Linen: the same options, parameters, arguments and results.

    Parameters: `router`, `w_gate`, `w_up`, `w_down` in the collection `params`; with
    `use_expert_bias` the bias is `expert_bias` in the collection `expert_bias`, which the layer
    only reads. Losses and load are returned, not sown: a sown value is counted again where a
    module is applied twice. With `expert_axis` the parameters are `nn.Partitioned`;
    `nn.get_partition_spec` gives their shardings.

    Example:
      >>> import jax, jax.numpy as jnp, jax_megamoe.linen
      >>> layer = jax_megamoe.linen.MoE(8, 16, num_experts=4, top_k=2)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3, 8)))
      >>> y, aux = layer.apply(variables, jnp.ones((2, 3, 8)))
      >>> y.shape, int(aux.expert_load.sum())
      ((2, 3, 8), 12)
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    score: Score = "softmax"
    norm_topk_prob: bool = True
    use_expert_bias: bool = False
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32
    mesh: Mesh | None = None
    expert_axis: str | None = None
    token_axes: str | Sequence[str] | None = None
    fsdp_axis: str | None = None
    config: MoEConfig = MoEConfig()
    router_init: Callable[..., jax.Array] = nn.initializers.lecun_normal()
    kernel_init: Callable[..., jax.Array] = nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", batch_axis=(0,)
    )

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        expert_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEAux]:
        """Applies the layer; see `jax_megamoe.nnx.MoE.__call__`."""
        layer = Layer(
            num_experts=self.num_experts,
            top_k=self.top_k,
            score=self.score,
            norm_topk_prob=self.norm_topk_prob,
            dtype=self.dtype,
            mesh=self.mesh,
            expert_axis=self.expert_axis,
            token_axes=None if self.token_axes is None else _mesh.axis_tuple(self.token_axes),
            fsdp_axis=self.fsdp_axis,
            config=self.config,
        )
        layer.check(self.hidden, self.intermediate, self.param_dtype)

        def param(name, init, shape, dtype, *spec):
            if self.expert_axis is None:
                return self.param(name, init, shape, dtype)
            mesh = _mesh.resolve(self.mesh, self.expert_axis)

            # nn.Partitioned only asserts the sharding where axes are Explicit, and refuses to be
            # given such a mesh.
            def placed(*args):
                return _mesh.reshard(init(*args), mesh, PartitionSpec(*spec))

            given = None if AxisType.Explicit in mesh.axis_types else self.mesh
            return self.param(name, nn.with_partitioning(placed, spec, mesh=given), shape, dtype)

        experts, hidden, inner = self.num_experts, self.hidden, self.intermediate
        up = (experts, hidden, inner), self.param_dtype, self.expert_axis, self.fsdp_axis, None
        down = (experts, inner, hidden), self.param_dtype, self.expert_axis, None, self.fsdp_axis
        router = param("router", self.router_init, (hidden, experts), jnp.float32, None, None)
        w_gate = param("w_gate", self.kernel_init, *up)
        w_up = param("w_up", self.kernel_init, *up)
        w_down = param("w_down", self.kernel_init, *down)
        bias = None
        if self.use_expert_bias:
            zeros = jnp.zeros(experts, jnp.float32)
            bias = self.variable("expert_bias", "expert_bias", lambda: zeros).value
        return layer(x, router, bias, w_gate, w_up, w_down, token_mask, expert_ids)
