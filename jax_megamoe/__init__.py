"""Fused, trainable mixture-of-experts layer for JAX."""

from jax_megamoe.config import MoEConfig
from jax_megamoe.op import MoEStats, moe, moe_mlp

__all__ = ["MoEConfig", "MoEStats", "moe", "moe_mlp"]
