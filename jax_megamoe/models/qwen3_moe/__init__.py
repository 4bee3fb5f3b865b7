"""Qwen3-MoE in JAX, with the experts of `jax_megamoe`: from and to Hugging Face checkpoints."""

from jax_megamoe.models.qwen3_moe.checkpoint import load_hf, save_hf
from jax_megamoe.models.qwen3_moe.config import Qwen3MoEConfig
from jax_megamoe.models.qwen3_moe.generation import generate
from jax_megamoe.models.qwen3_moe.model import Qwen3MoE, loss

__all__ = ["Qwen3MoE", "Qwen3MoEConfig", "generate", "load_hf", "loss", "save_hf"]
