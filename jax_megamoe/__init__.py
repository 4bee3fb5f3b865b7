"""Fused, trainable mixture-of-experts layer for JAX."""

from jax_megamoe.config import MoEConfig
from jax_megamoe.op import MoEStats, moe, moe_mlp
from jax_megamoe.routing import (
    Routing,
    load_balancing_loss,
    route,
    router_z_loss,
    update_expert_bias,
)

__all__ = [
    "MoEConfig",
    "MoEStats",
    "Routing",
    "load_balancing_loss",
    "moe",
    "moe_mlp",
    "route",
    "router_z_loss",
    "update_expert_bias",
]
