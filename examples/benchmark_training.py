"""Trains the same model with several implementations: step time, memory, and how the losses differ.

    python examples/benchmark_training.py --model tiny --layers 2 --steps 200 --lr 3e-4 \\
        --balance aux --sample-tokens 0
    python examples/benchmark_training.py --model qwen3-30b-a3b --layers 20,16,12 --steps 12 \\
        --embedding-std 1 --time-limit 90 --out results.json

Every run is a process of its own, `train_qwen3_moe.py --no-checkpoint` with the same seed and data;
arguments that are not listed below are handed on to it. A run that does not fit into memory is made
again with the next number of layers, with which the later implementations begin. One that fails or
is stopped at the time limit is recorded as what it is, with the steps that it made.
docs/benchmarks.md describes the records.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from training.report import final, plot_losses, summary

from jax_megamoe._bench import report as records
from jax_megamoe._bench.arguments import plot_module

TRAIN = Path(__file__).with_name("train_qwen3_moe.py")
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


class Outcome(NamedTuple):
    """What a training process left: its settings, the lines of its metrics, and why it failed."""

    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    error: str | None

    @property
    def too_large(self) -> bool:
        return self.error is not None and any(word in self.error for word in OUT_OF_MEMORY)


def arguments(argv=None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left over is for the training script
    )
    add = parser.add_argument
    add("--implementations", default="ffi,xla", help="separated by commas (ffi,xla)")
    add("--model", default="tiny", help="as in train_qwen3_moe.py")
    add("--layers", default="", help="numbers of layers, the first that fits is taken (all)")
    add("--time-limit", type=float, default=3600, help="seconds for each process")
    add("--runs", type=Path, help="folder for the folders of the runs (a temporary one)")
    add("--out", type=Path, help="JSON file to which the records are appended")
    add("--plot", type=Path, help="PNG of the losses of all runs")
    add("--commit", help="recorded in place of what git says")
    return parser.parse_known_args(argv)


def run(folder: Path, options: list[str], time_limit: float) -> Outcome:
    """Trains in a process of its own, which writes into `folder`."""
    command = [sys.executable, str(TRAIN), "--no-checkpoint", "--out", str(folder), *options]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    error = None
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=time_limit)
        except subprocess.TimeoutExpired:
            error = f"stopped after {time_limit:g} s"
        else:
            if done.returncode:
                error = reason(log.read_text(errors="replace"))
    settings, metrics = folder / "settings.json", folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return Outcome(
        json.loads(settings.read_text()) if settings.exists() else {},
        # A process that was stopped may have left half a line.
        [json.loads(line) for line in lines if line.endswith("\n")],
        error,
    )


def reason(log: str) -> str:
    """The line of a failed process's output that says why."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if any(word in line for word in OUT_OF_MEMORY):
            return line[:400]
    return (lines or ["no output"])[-1][:400]


def record(outcome: Outcome, software: records.Record, **fixed) -> records.Record:
    """The record of a run; numbers that are not known are None."""
    settings, metrics = outcome.settings, outcome.metrics
    made = {
        "shape": fixed["model"],
        "pass": "training_step",
        "precision": settings.get("precision"),
        **fixed,
        "layers": settings.get("layers", fixed["layers"]),
        "parameters": settings.get("parameters"),
        "gpus": settings.get("devices"),
        "tokens_per_gpu": None,
        **records.timed(None, None),
        "peak_bytes": None,
        "device": settings.get("device"),
        **software,
        "steps": len(metrics),
    }
    if metrics:
        devices = settings["devices"]
        rates = summary(metrics, flops_per_token=settings["flops_per_token"], devices=devices)
        made |= {
            "tokens_per_gpu": settings["batch"] * settings["seq_len"] // devices,
            **records.timed(rates["step_s"], None),
            "steps_timed": rates["steps_timed"],
            "tokens_per_s_per_gpu": rates["tokens_per_s_per_device"],
            "model_tflops_per_gpu": rates["tflops_per_device"],
            "imbalance": rates["imbalance"],
            "loss": final([line["lm_loss"] for line in metrics]),
            "losses": [round(line["lm_loss"], 4) for line in metrics],
            "peak_bytes": metrics[-1]["peak_bytes"],
        }
    return made | ({"error": outcome.error} if outcome.error else {})


def show(r: records.Record) -> str:
    parts = [f"{r['shape']}, {r['layers'] or 'all'} layers, {r['implementation']}:"]
    if r["steps"]:
        parts.append(
            f"{r['ms']:.1f} ms a step ({r['steps_timed']} timed), "
            f"{r['tokens_per_s_per_gpu']:,.0f} tokens/s and {r['model_tflops_per_gpu']:.4g} model "
            f"TFLOP/s a device, imbalance {r['imbalance']:.2f}, loss {r['loss']:.4f}"
        )
    if r["peak_bytes"]:
        parts.append(f", peak {r['peak_bytes'] / 2**30:.1f} GiB")
    if "error" in r:
        parts.append(f" FAILED: {r['error']}")
    return " ".join(parts)


def main(argv=None) -> list[records.Record]:
    """Makes the runs; returns and appends their records."""
    args, options = arguments(argv)
    if args.plot:
        plot_module("benchmark_training.py", args.plot)
    software = records.software(args.commit)
    layers = [int(n) for n in args.layers.split(",")] if args.layers else [None]
    found = records.read([args.out]) if args.out and args.out.exists() else []
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        for implementation in args.implementations.split(","):
            while True:
                depth = [] if layers[0] is None else [f"--layers={layers[0]}"]
                outcome = run(
                    folder / f"{implementation}-{layers[0] or 'all'}",
                    [f"--model={args.model}", f"--implementation={implementation}"]
                    + [*depth, *options],
                    args.time_limit,
                )
                fixed = {"model": args.model, "implementation": implementation}
                fixed |= {"layers": layers[0], "options": " ".join(options)}
                made.append(record(outcome, software, **fixed))
                print(show(made[-1]), flush=True)
                if args.out:
                    records.write(args.out, found + made)
                if not outcome.too_large or len(layers) == 1:
                    break
                del layers[0]
    whole = [r for r in made if "error" not in r]
    for other in whole[1:]:
        first = whole[0]
        print(
            f"loss of {other['implementation']} - loss of {first['implementation']} = "
            f"{other['loss'] - first['loss']:+.5f}; step time {other['ms'] / first['ms']:.2f} times"
        )
    if args.plot and whole:
        plot_losses(args.plot, {r["implementation"]: r["losses"] for r in whole})
    return made


if __name__ == "__main__":
    sys.exit(all("error" in made for made in main()))
