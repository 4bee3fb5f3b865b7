"""The arithmetic that a model needs."""

from __future__ import annotations

from jax_megamoe.models.qwen3_moe import Qwen3MoEConfig


def training_flops_per_token(config: Qwen3MoEConfig, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token, without recomputation.

    Two for each weight that the token meets, and four times the width of the heads for each of
    the (seq_len + 1) / 2 keys that it attends to on average; three times, for the forward pass and
    the two products of the backward pass.

    The count of Chowdhery et al. 2022 (PaLM, https://arxiv.org/abs/2204.02311, appendix B: 6 N + 12
    L H Q T for a token), with the parameters that a token meets as N, of its experts the top k, and
    half of the attention, which is causal.
    """
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    moe = len(config.moe_layers)
    weights = (
        config.num_hidden_layers * hidden * (2 * query + 2 * key)
        + (config.num_hidden_layers - moe) * 3 * hidden * config.intermediate_size
        + moe * hidden * config.num_experts
        + moe * 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
        + hidden * config.vocab_size
    )
    attention = config.num_hidden_layers * 4 * query * (seq_len + 1) / 2
    return 3 * (2 * weights + attention)
