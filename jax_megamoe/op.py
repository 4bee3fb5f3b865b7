"""The mixture-of-experts operation: `moe_mlp` per shard, `moe` for the global view."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jax_megamoe.config import MoEConfig


class MoEStats(NamedTuple):
    """What the routing did on this shard.

    Attributes:
      expert_load: int32 [E_l], rows that each expert of this rank received from all ranks.
      invalid_ids: int32 [], ids outside [-1, E) among this shard's tokens; they contribute nothing.
      rounds: int32 [], passes over the dispatch buffer that this rank's rows needed.
    """

    expert_load: jax.Array
    invalid_ids: jax.Array
    rounds: jax.Array


def moe_mlp(
    x,
    expert_ids,
    expert_weights,
    w_gate,
    w_up,
    w_down,
    *,
    axis_name=None,
    config=MoEConfig(),
    return_stats=False,
):
    """Placeholder of the first commit: the oracle stands in."""
    from jax_megamoe import reference

    return reference.moe_mlp(
        x,
        expert_ids,
        expert_weights,
        w_gate,
        w_up,
        w_down,
        axis_name=axis_name,
        config=config,
        return_stats=return_stats,
    )
