"""The metrics file, the line of progress and the picture of a run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def imbalance(expert_load: np.ndarray) -> float:
    """Load of the fullest expert over the mean load, averaged over layers: 1 is balanced.

    Args:
      expert_load: [layers, experts], tokens that each expert received.
    """
    load = np.asarray(expert_load, np.float64)
    return float((load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)).mean())


class MetricsFile:
    """One JSON object a line and step. Lines of steps from `first_step` on are written anew.

    The file is opened at the first write, and must not exist then if `first_step` is 0.
    """

    def __init__(self, path: Path, first_step: int):
        self.records = []
        self._path, self._first_step, self._file = path, first_step, None
        if first_step > 0 and path.exists():
            # A process that was killed may have left half a line.
            whole = (line for line in path.open() if line.endswith("\n"))
            self.records = [r for r in map(json.loads, whole) if r["step"] < first_step]

    def write(self, record: dict) -> None:
        if self._file is None:
            self._file = self._path.open("w" if self._first_step > 0 else "x")
            self._file.writelines(json.dumps(r) + "\n" for r in self.records)
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def summary(records: list[dict], *, flops_per_token: float, devices: int, skip: int = 5) -> dict:
    """Medians of step time and imbalance, and the rates that follow from the time.

    The first `skip` steps are left out, or all but the last where there are no more.
    "tflops_per_device" counts the model's arithmetic once: no recomputation, no optimiser.
    """
    timed = records[min(skip, len(records) - 1) :]
    seconds = statistics.median(r["step_s"] for r in timed)
    tokens = statistics.median(r["tokens_per_s"] for r in timed)
    return {
        "devices": devices,
        "steps_timed": len(timed),
        "step_s": seconds,
        "tokens_per_s": tokens,
        "tokens_per_s_per_device": tokens / devices,
        "tflops_per_device": tokens * flops_per_token / devices / 1e12,
        "imbalance": statistics.median(r["imbalance"] for r in timed),
    }


def final(values: np.ndarray) -> float:
    """Mean over the last twentieth."""
    return float(np.mean(values[-max(1, len(values) // 20) :]))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over the twentieth around each value, less at the ends."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    at, half = np.arange(values.size), max(1, values.size // 40)
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, values.size)
    return (total[end] - total[start]) / (end - start)


def plot(
    path: Path,
    records: list[dict],
    loads: np.ndarray,
    *,
    first_step: int,
    unigram: float,
    title: str,
) -> None:
    """Draws the loss against the unigram entropy, and where the tokens went.

    Args:
      path: the PNG to write.
      records: lines of the metrics file.
      loads: [steps, layers, experts], tokens per expert, of the steps from `first_step` on.
      unigram: loss in nats of a model that knows only the token frequencies.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    step = np.array([r["step"] for r in records])
    loss = np.array([r["lm_loss"] for r in records])
    uneven = np.array([r["imbalance"] for r in records])
    relative = loads / np.maximum(loads.mean(axis=2, keepdims=True), 1e-9)
    last = relative[-max(1, len(relative) // 5) :].mean(axis=0)
    layers, experts = last.shape
    per_step = relative.reshape(len(relative), layers * experts).T

    figure, ((top, layer_map), (bottom, step_map)) = plt.subplots(
        2, 2, figsize=(13, 7.5), width_ratios=(1.15, 1), layout="constrained"
    )
    figure.suptitle(title, fontsize=12)

    top.plot(step, loss, color="tab:blue", alpha=0.25, linewidth=1)
    top.plot(step, _smooth(loss), color="tab:blue", linewidth=2)
    top.axhline(unigram, color="tab:red", linestyle="--", linewidth=1.5)
    top.annotate(
        f"token frequencies alone: {unigram:.2f}",
        (1, unigram),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color="tab:red",
    )
    top.annotate(
        f"{final(loss):.2f}",
        (step[-1], final(loss)),
        xytext=(0, 16),
        textcoords="offset points",
        ha="right",
        color="tab:blue",
        fontweight="bold",
    )
    top.set(ylabel="loss (nats per token)", title="Loss")
    top.set_ylim(bottom=0, top=max(unigram, loss.max()) * 1.08)

    bottom.plot(step, uneven, color="tab:green", alpha=0.25, linewidth=1)
    bottom.plot(step, _smooth(uneven), color="tab:green", linewidth=2)
    bottom.axhline(1, color="gray", linestyle=":", linewidth=1)
    bottom.set(
        xlabel="step", ylabel="fullest expert / mean", title="Expert imbalance (1 = balanced)"
    )
    bottom.set_ylim(bottom=0.9)

    # One colour scale for both maps, white at the balanced load.
    top_of_scale = max(2.0, float(np.ceil(last.max() * 2) / 2))
    norm = matplotlib.colors.TwoSlopeNorm(1.0, 0.0, top_of_scale)
    style = {"cmap": "RdBu_r", "norm": norm, "aspect": "auto", "interpolation": "nearest"}
    shown = layer_map.imshow(last, extent=(-0.5, experts - 0.5, layers - 0.5, -0.5), **style)
    layer_map.set(xlabel="expert", ylabel="layer", title="Expert load, last fifth of the run")
    if layers * experts <= 256:
        for (y, x), value in np.ndenumerate(last):
            dark = value > 1 + 0.6 * (top_of_scale - 1) or value < 0.3
            layer_map.text(
                x, y, f"{value:.1f}", ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
    extent = (first_step - 0.5, first_step + len(loads) - 0.5, layers - 0.5, -0.5)
    step_map.imshow(per_step, extent=extent, **style)
    step_map.hlines(np.arange(layers - 1) + 0.5, *extent[:2], color="black", linewidth=0.8)
    step_map.set(xlabel="step", ylabel="layer, its experts", title="Expert load by step")
    figure.colorbar(shown, ax=(layer_map, step_map), label="tokens / balanced load", shrink=0.8)
    for axes in (layer_map, step_map):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def plot_losses(path: Path, losses: dict[str, Sequence[float]]) -> None:
    """Draws the losses of several runs, and how far they are from the first one's.

    Args:
      path: the PNG to write.
      losses: of each step, in nats per token, by the name of the run.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), height_ratios=(2, 1), sharex=True, layout="constrained"
    )
    first = np.array(next(iter(losses.values())))
    for i, (name, values) in enumerate(losses.items()):
        colour, style = f"C{i}", ("-", "--", ":")[i % 3]
        top.plot(values, color=colour, linestyle=style, label=f"{name}: {final(values):.4f}")
        if i:
            steps = min(len(first), len(values))
            apart = np.array(values)[:steps] - first[:steps]
            bottom.plot(apart, color=colour, linestyle=style)
    top.set(ylabel="loss (nats per token)", title="Loss, and its mean over the last twentieth")
    bottom.set(xlabel="step", ylabel=f"minus that of {next(iter(losses))}")
    top.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
