"""Times the layer against a dense product of the same FLOPs: `python -m jax_megamoe.bench`.

  python -m jax_megamoe.bench --gpus 1,2 --core --out results.json --plot results.png
  python -m jax_megamoe.bench --tiny

docs/benchmarks.md says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from jax_megamoe._bench import core, layer, report, timing
from jax_megamoe._bench.arguments import counts, list_of, plot_module
from jax_megamoe.config import PRECISIONS, MoEConfig

_PROGRAM = "python -m jax_megamoe.bench"
_IMPLEMENTATIONS = ("ffi", "xla")
_PEER = "torch"
_PEER_TIMEOUT_S = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or reads earlier results; prints the table, and writes and draws the records.

    Returns:
      The exit status: 1 where something was to be measured and nothing could be, else 0.
    """
    options = _parse(arguments)
    appended = [options.out] if options.out and options.out.exists() else []
    plot = plot_module(_PROGRAM, options.plot) if options.plot else None
    failed = False
    try:
        records = report.read(options.read or appended)
        if options.read or options.plot:
            report.check(report.of_layers(records))
        if options.out and not options.read:
            report.write(options.out, records)
    except ValueError as error:
        sys.exit(f"{_PROGRAM}: {error}")
    if options.read:
        records = report.newest(report.of_layers(records))
        if not records:
            files = ", ".join(map(str, options.read))
            sys.exit(f"{_PROGRAM}: read is {files}: no record there is of a layer")
        print(report.table(records))
    else:
        earlier = len(records)
        started = time.perf_counter()
        environment = report.environment(options.commit) | dict(turn_ms=options.turn_ms)
        for record in _measure(options, environment):
            elapsed = time.perf_counter() - started
            print(f"[{elapsed:5.0f} s] {record['shape']} {report.line(record)}", flush=True)
            records.append(record)
            if options.out:
                report.write(options.out, records)
        made = records[earlier:]
        failed = bool(made) and all("error" in record for record in made)
        print(report.table(made))
    if plot:
        try:
            plot.draw(report.newest(report.of_layers(records)), options.plot)
        except (ValueError, OSError) as error:
            sys.exit(f"{_PROGRAM}: plot is {options.plot}: {error}")
    return int(failed)


def _measure(options, environment) -> Iterator[report.Record]:
    for name in options.shapes:
        if options.core:
            yield from _core_records(options, environment, name)
        for gpus in options.gpus if options.passes else ():
            if set(options.implementations) - {_PEER}:
                yield from _layer_records(options, environment, name, gpus)
            if _PEER in options.implementations:
                yield from _peer_records(options, environment, name, gpus)


def _core_records(options, environment, name):
    shape = layer.SHAPES[name]
    rows = options.tokens * shape.top_k
    groups = min(64, shape.experts)
    for timed in core.run(
        shape, rows=rows, groups=groups, rounds=options.rounds, turn_ms=options.turn_ms
    ):
        yield {
            "shape": name,
            "pass": "matrix_core",
            "product": timed.product,
            "precision": "bf16",
            "implementation": "ffi",
            "routing": "multinomial",
            "gpus": 1,
            "tokens_per_gpu": options.tokens,
            **report.timed(timed.seconds, timed.dense_seconds),
            "peak_bytes": None,
            **environment,
            "note": f"{rows} rows in {groups} groups",
            **({"error": timed.error} if timed.error else {}),
        }


def _layer_records(options, environment, name, gpus):
    shape, tokens = layer.SHAPES[name], options.tokens
    configs = {
        (i, p): MoEConfig(implementation=i, precision=p)
        for p in options.precisions
        for i in options.implementations
        if i != _PEER
    }
    why_not = None
    try:
        mesh = layer.mesh_of(gpus)
        arguments = jax.block_until_ready(layer.make_arguments(mesh, shape, tokens))
        routings = {r: _make_routing(mesh, name, tokens, r) for r in options.routings}
    except timing.ERRORS as error:
        why_not = timing.reason(error)

    for pass_ in options.passes:
        compiled, notes, memory, failures = {}, {}, {}, dict.fromkeys(configs, why_not)
        for key, config in {} if why_not else configs.items():
            try:
                program = layer.layer_program(mesh, pass_, config)
                compiled[key] = program.lower(*arguments, *routings[options.routings[0]]).compile()
            except timing.ERRORS as error:
                failures[key] = timing.reason(error)
                continue
            notes[key] = layer.describe(key[0])
            memory[key] = layer.peak_bytes(compiled[key], shape, tokens, gpus, config)
        dense = _dense_program(mesh, shape, tokens, pass_) if compiled else {}
        for routing, key in itertools.product(options.routings, configs):
            seconds, error = {}, failures[key]
            if key in compiled:
                run = functools.partial(compiled[key], *arguments, *routings[routing])
                seconds, failed = timing.measure(
                    {"layer": run} | dense, options.rounds, options.turn_ms
                )
                error = failed.get("layer")
            yield {
                "shape": name,
                "pass": pass_,
                "precision": key[1],
                "implementation": key[0],
                "routing": routing,
                "gpus": gpus,
                "tokens_per_gpu": tokens,
                **report.timed(seconds.get("layer"), seconds.get("dense")),
                "peak_bytes": memory.get(key),
                **environment,
                "note": notes.get(key, ""),
                **({"error": error} if error else {}),
            }


def _peer_records(options, environment, name, gpus):
    """Of the layer in PyTorch, which runs in processes of its own."""
    shape = layer.SHAPES[name]
    turns = 2 * options.rounds * len(options.passes)
    timeout = _PEER_TIMEOUT_S + turns * options.turn_ms / 1e3
    for routing in options.routings:
        command = [sys.executable, "-m", "jax_megamoe._bench.torch_layer", f"--gpus={gpus}"]
        command += [f"--shape={','.join(map(str, shape))}", f"--tokens={options.tokens}"]
        command += [f"--passes={','.join(options.passes)}", f"--routing={routing}"]
        command += [f"--rounds={options.rounds}", f"--turn-ms={options.turn_ms}"]
        results, error = {}, None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            if done.returncode:
                error = (done.stderr.strip().splitlines() or ["no output"])[-1][:400]
            else:
                results = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as expired:
            error = str(expired)[-400:]
        for pass_ in options.passes:
            measured = results.get(pass_, {})
            yield {
                "shape": name,
                "pass": pass_,
                "precision": "bf16",
                "implementation": _PEER,
                "routing": routing,
                "gpus": gpus,
                "tokens_per_gpu": options.tokens,
                **report.timed(measured.get("seconds"), measured.get("dense_seconds")),
                "peak_bytes": measured.get("peak_bytes"),
                **environment,
                "note": "all-to-all, grouped_mm",
                **({"error": error} if error else {}),
            }


def _dense_program(mesh, shape, tokens, pass_):
    """The dense product by its name; without it if there is no memory for its operands."""
    try:
        operands = jax.block_until_ready(layer.make_dense(mesh, shape, tokens, pass_))
    except timing.ERRORS:
        return {}
    return {"dense": functools.partial(layer.dense_program(mesh), *operands)}


def _make_routing(mesh, name, tokens, routing):
    made = layer.make_routing(mesh, layer.SHAPES[name], tokens, routing)
    expert, rank = layer.load_of(mesh, layer.SHAPES[name], made[0])
    print(
        f"{name}, {mesh.size} device(s), {routing} routing: the fullest expert has {expert:.2f}x "
        f"the mean load, the fullest rank {rank:.2f}x",
        flush=True,
    )
    return made


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Times the layer, forward and backward, in every implementation against a "
        "dense bf16 product of the same FLOPs. Lists are separated by commas.",
    )
    shapes = tuple(name for name in layer.SHAPES if name != "tiny")

    def a_list(flag, choices, default, text, empty=False):
        parser.add_argument(
            flag, type=list_of(choices, empty), default=default, help=f"{text} (default: all)"
        )

    a_list("--shapes", tuple(layer.SHAPES), shapes, ", ".join(shapes) + ", or tiny")
    a_list(
        "--passes", layer.PASSES, layer.PASSES, ", ".join(layer.PASSES) + "; empty for none", True
    )
    add = parser.add_argument
    add(
        "--implementations",
        type=list_of((*_IMPLEMENTATIONS, _PEER)),
        default=_IMPLEMENTATIONS,
        help=f"ffi, xla, or {_PEER}, the layer in PyTorch (default: ffi,xla)",
    )
    a_list("--routings", layer.ROUTINGS, layer.ROUTINGS, ", ".join(layer.ROUTINGS))
    add(
        "--precisions",
        type=list_of(PRECISIONS),
        default=("bf16",),
        help=", ".join(PRECISIONS) + " (default: bf16)",
    )
    add(
        "--gpus",
        type=counts,
        help="numbers of devices, the first N of this process; also the size of the expert axis "
        "(default: 1 and all)",
    )
    add("--tokens", type=int, help="per device (default: 16384)")
    add("--rounds", type=int, default=7, help="of which the median counts (default: %(default)s)")
    add(
        "--turn-ms",
        type=int,
        default=timing.TURN_MS,
        help="milliseconds that a program's turn in a round takes (default: %(default)s)",
    )
    add("--core", action="store_true", help="also the products of the CUDA matrix core alone")
    add("--tiny", action="store_true", help="a smoke test: the shape tiny with 64 tokens")
    add("--out", type=pathlib.Path, help="JSON file to which the records are appended")
    add("--plot", type=pathlib.Path, help="picture of the records of --out, or of this run")
    add("--read", type=pathlib.Path, nargs="+", help="measure nothing, take these JSON files")
    add("--commit", help="recorded in place of what git says")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.shapes = ("tiny",)
    if options.tokens is None:
        options.tokens = 64 if options.tiny else 16384
    for name in ("tokens", "rounds", "turn_ms"):
        if getattr(options, name) < 1:
            parser.error(f"{name} is {getattr(options, name)}; it must be at least 1")
    if options.turn_ms > timing.MAX_TURN_MS:
        parser.error(f"turn_ms is {options.turn_ms}; it must be at most {timing.MAX_TURN_MS}")
    if options.read:
        return options
    if not options.passes and not options.core:
        parser.error("passes is empty, so that without --core there is nothing to measure")
    if options.gpus is None:
        options.gpus = tuple(dict.fromkeys((1, jax.device_count())))
    if jax.default_backend() == "cpu" and options.passes and options.shapes != ("tiny",):
        parser.error(
            f"shapes is {', '.join(options.shapes)} and JAX runs on 'cpu', where their tens of GiB "
            "take hours; --tiny runs there"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
