"""Options of the mixture-of-experts operation."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Literal

Precision = Literal["bf16", "fp8", "mxfp8", "fp8_bwd"]
Implementation = Literal["auto", "ffi", "xla"]

PRECISIONS = ("bf16", "fp8", "mxfp8", "fp8_bwd")
_IMPLEMENTATIONS = ("auto", "ffi", "xla")
_WGRAD_PRECISIONS = ("bf16", "fp8")
_MAX_CAPACITY_FACTOR = 1e9  # beyond any number of ranks, which is the most that is of use
_MAX_TIMEOUT_S = 1e9  # the clocks count nanoseconds in 64 bits
_LEAST_SWIGLU_LIMIT, _MAX_SWIGLU_LIMIT = 1e-37, 1e38  # normal float32s
_MAX_RESERVED_SMS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """How the expert path is computed; frozen and hashable, so it can be a static argument.

    Attributes:
      precision: number format of the matrix operands. "bf16"; "fp8" (blockwise E4M3, Hopper);
        "mxfp8" (Blackwell); "fp8_bwd" (bf16 forward, fp8 backward).
      implementation: "ffi" (the fused custom calls), "xla" (plain JAX, any backend), or "auto":
        ffi where a Hopper GPU can run it, else xla.
      capacity_factor: rows of the dispatch buffer as a multiple of the balanced load (tokens x
        top-k), at most 1e9. Not a limit on routing: a rank that receives more rows works in several
        rounds.
      reserved_sms: streaming multiprocessors left free for other kernels, for example collectives
        that run beside the layer.
      timeout_s: seconds that a rank waits for a peer before it stops with an error, at most 1e9.
      swiglu_limit: clamps the gate from above and the up projection on both sides to this value,
        from 1e-37 to 1e38, before SwiGLU; None for no clamp. A value beyond it passes no gradient,
        one that equals it does, as with torch.clamp.
      wgrad_precision: operand format of the weight gradients under an fp8 precision, "bf16" or
        "fp8".

    Raises:
      ValueError: a value that is none of these.

    Example:
      >>> from jax_megamoe import MoEConfig
      >>> config = MoEConfig(implementation="xla", swiglu_limit=7.0)
      >>> config.precision, config.capacity_factor
      ('bf16', 2.0)
    """

    precision: Precision = "bf16"
    implementation: Implementation = "auto"
    capacity_factor: float = 2.0
    reserved_sms: int = 0
    timeout_s: float = 60.0
    swiglu_limit: float | None = None
    wgrad_precision: Literal["bf16", "fp8"] = "bf16"

    def __post_init__(self):
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("implementation", self.implementation, _IMPLEMENTATIONS)
        _one_of("wgrad_precision", self.wgrad_precision, _WGRAD_PRECISIONS)
        _positive("capacity_factor", self.capacity_factor, _MAX_CAPACITY_FACTOR)
        _positive("timeout_s", self.timeout_s, _MAX_TIMEOUT_S)
        if self.swiglu_limit is not None:
            limit = self.swiglu_limit
            _positive("swiglu_limit", limit, _MAX_SWIGLU_LIMIT, _LEAST_SWIGLU_LIMIT)
        sms = self.reserved_sms
        if not is_integer(sms) or not 0 <= sms <= _MAX_RESERVED_SMS:
            raise ValueError(
                f"reserved_sms is {sms!r}; it must be an integer from 0 to {_MAX_RESERVED_SMS}"
            )


def is_integer(value) -> bool:
    """Whether the value is a whole number, of Python or numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _one_of(name, value, accepted):
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, accepted))}")


def _positive(name, value, most, least=0.0):
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if number and not isinstance(value, numbers.Integral):
        value = float(value)  # a float16 could not be compared with a large float
    if not number or not 0 < value <= most or value < least:  # also where it is NaN
        bound = f"of at least {least:g}" if least else "above 0"
        raise ValueError(
            f"{name} is {value!r}; it must be a finite number {bound}, at most {most:g}"
        )
