"""The mixture-of-experts layer as a Flax NNX module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

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
    "ExpertBias",
    "MoE",
    "MoEAux",
    "save_routing",
]

Initializer = Callable[..., jax.Array]

default_router_init = nnx.initializers.lecun_normal()
default_kernel_init = nnx.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)


class ExpertBias(nnx.Variable):
    """Selection bias of the experts, f32 [E]: no `nnx.Param`, so that no optimizer or cast of the
    parameters sees it. `jax_megamoe.update_expert_bias` moves it."""


class MoE(nnx.Module):
    """Router and SwiGLU experts: y = sum_k weight_k * expert_k(x) over the top-k experts.

    Parameters (`nnx.Param`): `router` f32 [H, E]; `w_gate`, `w_up` [E, H, I] and `w_down` [E, I, H]
    in `param_dtype`. With `use_expert_bias` also `expert_bias`, an `ExpertBias` f32 [E].

    The router is fp32 whatever `dtype` and `param_dtype` are, from its parameter to its weights.

    With `expert_axis` the expert dimension of `w_*` carries that mesh axis as partitioning
    metadata: under `jax.set_mesh`, or with `mesh`, the parameters are created in that sharding.
    Without it the layer is for one device.

    Recomputation: the intermediates named in `CHECKPOINT_NAMES` can be kept by any policy of
    `jax.checkpoint`. `save_routing` is one that keeps the router's results, T * (E + 2 K) * 4
    bytes, so that nothing is routed twice: `nnx.remat(block, policy=jax_megamoe.nnx.save_routing)`.

    Args:
      hidden: H, the last dimension of x.
      intermediate: I, hidden size of one expert.
      num_experts: E.
      top_k: K, experts per token. With K=1 set `norm_topk_prob=False`, else the router has no
        gradient (a warning says so).
      score, norm_topk_prob: see `jax_megamoe.route`.
      use_expert_bias: select with a bias that balances the load without a loss.
      dtype: dtype in which the experts run and of y, bfloat16 or float32; None for that of x.
      param_dtype: dtype of `w_gate`, `w_up`, `w_down`, bfloat16 or float32.
      mesh: the mesh; None for that of `jax.set_mesh`.
      expert_axis: the mesh axis that the experts are split over; None for one device.
      token_axes: the mesh axes that the tokens are split over; None for all (`jax_megamoe.moe`).
      fsdp_axis: a mesh axis that the hidden dimension of `w_*` is stored split over.
      config: implementation and precision of the expert path.
      router_init, kernel_init: initializers; lecun normal over the input dimension.
      rngs: the stream `params` is used.

    Raises:
      ValueError: a size below 1, `top_k` outside [1, E], another dtype, an axis that the mesh
        lacks, E not a multiple of the size of `expert_axis`, or `expert_axis` without a mesh.

    Example:
      >>> import jax, jax.numpy as jnp, jax_megamoe.nnx
      >>> from flax import nnx
      >>> layer = jax_megamoe.nnx.MoE(8, 16, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
      {'router': (8, 4), 'w_down': (4, 16, 8), 'w_gate': (4, 8, 16), 'w_up': (4, 8, 16)}
      >>> y, aux = layer(jnp.ones((2, 3, 8)))
      >>> y.shape, int(aux.expert_load.sum())
      ((2, 3, 8), 12)

      Bias balancing, after the optimizer's step, with the load summed over microbatches:

      >>> from jax_megamoe import update_expert_bias
      >>> layer = jax_megamoe.nnx.MoE(
      ...     8, 16, 4, 2, score="sigmoid", use_expert_bias=True, rngs=nnx.Rngs(0)
      ... )
      >>> y, aux = layer(jnp.ones((2, 3, 8)))
      >>> layer.expert_bias[...] = update_expert_bias(layer.expert_bias[...], aux.expert_load, 1e-3)
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        norm_topk_prob: bool = True,
        use_expert_bias: bool = False,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        mesh: Mesh | None = None,
        expert_axis: str | None = None,
        token_axes: str | Sequence[str] | None = None,
        fsdp_axis: str | None = None,
        config: MoEConfig = MoEConfig(),
        router_init: Initializer = default_router_init,
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.layer = Layer(
            num_experts=num_experts,
            top_k=top_k,
            score=score,
            norm_topk_prob=norm_topk_prob,
            dtype=dtype,
            mesh=mesh,
            expert_axis=expert_axis,
            token_axes=None if token_axes is None else _mesh.axis_tuple(token_axes),
            fsdp_axis=fsdp_axis,
            config=config,
        )
        self.layer.check(hidden, intermediate, param_dtype)

        def param(init, shape, dtype, *spec):
            if expert_axis is not None:
                init = nnx.with_partitioning(init, spec, mesh=mesh)
            return nnx.Param(init(rngs.params(), shape, dtype))

        up, down = (num_experts, hidden, intermediate), (num_experts, intermediate, hidden)
        self.router = param(router_init, (hidden, num_experts), jnp.float32, None, None)
        self.w_gate = param(kernel_init, up, param_dtype, expert_axis, fsdp_axis, None)
        self.w_up = param(kernel_init, up, param_dtype, expert_axis, fsdp_axis, None)
        self.w_down = param(kernel_init, down, param_dtype, expert_axis, None, fsdp_axis)
        zeros = jnp.zeros(num_experts, jnp.float32)
        self.expert_bias = ExpertBias(zeros) if use_expert_bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        expert_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEAux]:
        """Applies the layer.

        Args:
          x: [..., H] bfloat16 or float32, at least one leading dimension.
          token_mask: bool [...], False for padding: not routed, y = 0, left out of the losses and
            the load, no gradient.
          expert_ids: int [..., K], a routing to replay (`aux.routing.expert_ids` of an earlier
            call); its weights are computed from the present router.

        Returns:
          y [..., H] in `dtype`, and `MoEAux`.

        Raises:
          TypeError, ValueError: as `jax_megamoe.route` and `jax_megamoe.moe`.
        """
        bias = None if self.expert_bias is None else self.expert_bias[...]
        return self.layer(
            x,
            self.router[...],
            bias,
            self.w_gate[...],
            self.w_up[...],
            self.w_down[...],
            token_mask,
            expert_ids,
        )
