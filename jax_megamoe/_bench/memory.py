"""The most memory that JAX holds for a layer: `python -m jax_megamoe._bench.memory`.

An allocator's peak is that of all programs of a process, so each program has a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe._bench import layer, report, timing
from jax_megamoe._bench.arguments import counts, list_of
from jax_megamoe.config import MoEConfig

_PROGRAM = "python -m jax_megamoe._bench.memory"


def observe(
    name: str, pass_: str, implementation: str, gpus: int, tokens: int
) -> dict[str, str | int]:
    """Runs a pass in bf16 once, on random routing, in a process that has done nothing else.

    Args:
      name: of the layer, a key of `layer.SHAPES`.
      pass_: one of `layer.PASSES`.
      implementation: "ffi" or "xla".
      gpus: the first ones hold the experts.
      tokens: of each GPU.

    Returns:
      `peak_bytes`, as planned (`layer.peak_bytes`); `observed_bytes`, the most that JAX's allocator
      held on a device, operands and results included, plus the workspace, whose size is known;
      `device` and `note`.

    Raises:
      ValueError: there are fewer GPUs, or the device's allocator does not count.
    """
    shape, config = layer.SHAPES[name], MoEConfig(implementation=implementation)
    mesh = layer.mesh_of(gpus)
    devices = mesh.devices.flat
    if "peak_bytes_in_use" not in (devices[0].memory_stats() or {}):
        raise ValueError(f"the allocator of {devices[0].device_kind!r} devices does not count")
    routing = layer.make_routing(mesh, shape, tokens, "random")
    # Random numbers would need more memory while they are made, and the values do not matter.
    x = (gpus * tokens, shape.hidden)
    up = (shape.experts, shape.hidden, shape.intermediate)
    down = (shape.experts, shape.intermediate, shape.hidden)
    sharding = NamedSharding(mesh, P(layer.AXIS))
    arguments = [jnp.zeros(s, jnp.bfloat16, device=sharding) for s in (x, up, up, down)]
    # The forward pass has no dy, so none may lie beside it.
    arguments.append(arguments[0] if pass_ == "forward" else jnp.zeros_like(arguments[0]))
    program = layer.layer_program(mesh, pass_, config)
    compiled = program.lower(*arguments, *routing).compile()
    jax.block_until_ready(compiled(*arguments, *routing))
    held = max(device.memory_stats()["peak_bytes_in_use"] for device in devices)
    return dict(
        peak_bytes=layer.peak_bytes(compiled, shape, tokens, gpus, config),
        observed_bytes=held + layer.workspace_bytes(shape, tokens, gpus, config),
        device=devices[0].device_kind,
        note=layer.describe(implementation),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Observes each program, prints what it held and appends the records to a file.

    Returns:
      The exit status: 1 where nothing could be observed, else 0.
    """
    options = _parse(arguments)
    try:
        records = report.read([options.out]) if options.out and options.out.exists() else []
        if options.out:
            report.write(options.out, records)
    except ValueError as error:
        sys.exit(f"{_PROGRAM}: {error}")
    earlier, software = len(records), report.software(options.commit)
    for name, gpus, pass_, implementation in itertools.product(
        options.shapes, options.gpus, options.passes, options.implementations
    ):
        record = {
            "shape": name,
            "pass": pass_,
            "precision": "bf16",
            "implementation": implementation,
            "routing": "random",
            "gpus": gpus,
            "tokens_per_gpu": options.tokens,
            **_in_a_process(name, pass_, implementation, gpus, options.tokens),
            **software,
        }
        records.append(record)
        print(_line(record), flush=True)
        if options.out:
            report.write(options.out, records)
    return int(all("error" in record for record in records[earlier:]))


def _in_a_process(*arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_observe_or_say_why_not, *arguments).result()
        except BrokenProcessPool:
            return _failure("its process died")


def _observe_or_say_why_not(*arguments):
    # What JAX took beforehand the workspace could not have. Who sets it otherwise is obeyed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return observe(*arguments)
    except timing.ERRORS as error:
        return _failure(timing.reason(error))


def _failure(reason):
    return dict(peak_bytes=None, observed_bytes=None, device=None, note="", error=reason)


def _line(record):
    head = (
        f"{record['shape']} {record['pass']:8s} {record['gpus']:4d} {record['implementation']:4s}"
    )
    if "error" in record:
        return f"{head} {record['error']}"
    observed, planned = (
        "-" if record[key] is None else f"{record[key] / 2**30:.2f}"
        for key in ("observed_bytes", "peak_bytes")
    )
    return f"{head} {observed:>6s} GiB observed, {planned:>6s} planned  {record['note']}"


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Observes how much memory of a device a layer holds, each program in a process "
        "of its own. Lists are separated by commas.",
    )
    shapes = [name for name in layer.SHAPES if name != "tiny"]

    def a_list(flag, choices, default):
        parser.add_argument(
            flag,
            type=list_of(choices),
            default=default,
            help=f"{', '.join(choices)} (default: {','.join(default)})",
        )

    a_list("--shapes", list(layer.SHAPES), shapes)
    a_list("--passes", layer.PASSES, ["layer"])
    a_list("--implementations", ["ffi", "xla"], ["ffi", "xla"])
    add = parser.add_argument
    add("--gpus", type=counts, default=(1,), help="numbers of GPUs (default: 1)")
    add("--tokens", type=int, default=16384, help="per GPU (default: %(default)s)")
    add("--out", type=pathlib.Path, help="JSON file to which the records are appended")
    add("--commit", help="recorded in place of what git says")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"tokens is {options.tokens}; it must be at least 1")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(f"{_PROGRAM}: stopped")
