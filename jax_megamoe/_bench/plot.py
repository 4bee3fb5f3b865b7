"""The picture of the records: bars of the time over that of the dense product in the same turns."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase

from jax_megamoe._bench import core, layer
from jax_megamoe._bench.report import Record, turn_ms

_INK = "#222222"
_DENSE = "#b8bcc2"
_COLOURS = {"ffi": "#1b6ca8", "xla": "#e08a2c", "torch": "#7d5ba6"}
_CORE = "#2f8f6b"
_HATCHES = {"bf16": "", "fp8": "//", "mxfp8": "xx", "fp8_bwd": ".."}
# A bar beyond this many times the dense one is cut, so that the others can be read.
_CUT = 3.0
_CORE_BAR = 0.92
_LIMIT = dict(color="#b3261e", lw=1, ls="--", zorder=3)
_LIMIT_TEXT = dict(
    xytext=(2, 0), textcoords="offset points", va="center", fontsize=7.5, color=_LIMIT["color"]
)
_UPRIGHT = dict(rotation=90, ha="center", va="bottom", fontsize=7.5)
_CENTRED = dict(ha="center", va="center", fontsize=7.5)


def check_path(path: pathlib.Path) -> None:
    """Checks that the folder is there and that the suffix, if any, is one that matplotlib writes.

    Raises:
      ValueError: it is not.
    """
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError("it is a folder")
    formats = FigureCanvasBase.filetypes
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"Format {path.suffix[1:]!r} is not supported; it must be {', '.join(sorted(formats))}"
        )


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws a column for each shape, a panel for each pass, and one for the matrix core.

    Args:
      records: at most one of each configuration.
      path: of the picture; its suffix is the format.

    Raises:
      ValueError: there are no records, or they are of several devices, token counts or lengths of
        turns.
    """
    kinds = {(r["device"], r["tokens_per_gpu"], turn_ms(r)) for r in records}
    if len(kinds) != 1:
        found = (f"{device} with {tokens} in {ms} ms" for device, tokens, ms in sorted(kinds))
        raise ValueError(
            "a picture is of one kind of device, one number of tokens and one length of turns; the "
            "records are of " + (", ".join(found) or "none")
        )
    shapes = list(dict.fromkeys(record["shape"] for record in records))
    passes = [p for p in (*layer.PASSES, "matrix_core") if any(r["pass"] == p for r in records)]
    figure, axes = plt.subplots(
        len(passes),
        len(shapes),
        figsize=(0.6 + 5.4 * len(shapes), 1.2 + 2.6 * len(passes)),
        squeeze=False,
        layout="constrained",
    )
    for row, pass_ in zip(axes, passes, strict=True):
        for panel, shape in zip(row, shapes, strict=True):
            mine = [r for r in records if r["shape"] == shape and r["pass"] == pass_]
            if not mine:
                panel.axis("off")
                continue
            _style(panel)
            title = f"{shape}, {pass_.replace('_', ' ')}"
            panel.set_title(title, loc="left", fontsize=10, color=_INK)
            if pass_ == "matrix_core":
                _draw_core(panel, mine)
            else:
                _draw_pass(panel, mine, layer.LIMITS.get((shape, pass_)))
    _caption(figure, records)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _groups(records):
    """(gpus, routing) of every group of bars, in the order of the axis."""
    found = {(r["routing"], r["gpus"]) for r in records}
    order = sorted(found, key=lambda g: (layer.ROUTINGS.index(g[0]), g[1]))
    return [(gpus, routing) for routing, gpus in order]


def _series(records):
    """(implementation, precision) of every bar beside the dense one."""
    found = {(r["implementation"], r["precision"]) for r in records}
    return sorted(found, key=lambda s: (list(_COLOURS).index(s[0]), list(_HATCHES).index(s[1])))


def _draw_pass(panel, records, most):
    """A group of bars for each routing and number of devices; `most` is the ratio to stay below.

    Each is relative to the dense product beside it: times of different runs do not compare.
    """
    series, groups = _series(records), _groups(records)
    width = 0.86 / (1 + len(series))
    limit = min(_CUT, max([r["ratio"] or 1 for r in records] + [most or 1]))
    panel.set_ylim(0, 1.05 * limit)
    for place, (gpus, routing) in enumerate(groups):
        left = place - 0.43 + width / 2
        here = [r for r in records if (r["gpus"], r["routing"]) == (gpus, routing)]
        if any(r["ratio"] for r in here):
            panel.bar(left, 1, width, color=_DENSE)
        for record in here:
            n = 1 + series.index((record["implementation"], record["precision"]))
            _draw_bar(panel, left + n * width, width, record, limit)
    if most:
        panel.axhline(most, **_LIMIT)
        panel.annotate(f"{most:.2f}×", (len(groups) - 0.45, most), **_LIMIT_TEXT)
    panel.set_xlim(-0.55, len(groups) - 0.45)
    panel.set_xticks(range(len(groups)), [f"EP={g}\n{routing}" for g, routing in groups])
    panel.set_ylabel("time / dense", fontsize=9, color=_INK)


def _draw_bar(panel, at, width, record, limit):
    colour, ms, ratio = _COLOURS[record["implementation"]], record["ms"], record["ratio"]
    if ratio is None:
        text = _short(record.get("error", "not measured")) if ms is None else f"{_number(ms)} ms"
        panel.text(at, 0.02 * limit, text, color=colour, **_UPRIGHT)
        return
    height = min(ratio, limit)
    panel.bar(
        at,
        height,
        width,
        color=colour,
        hatch=_HATCHES[record["precision"]],
        edgecolor="white",
        lw=0,
    )
    if ratio > limit:
        for lower in (0.90, 0.93):
            panel.plot(
                [at - width / 2, at + width / 2],
                [lower * limit, (lower + 0.02) * limit],
                color="white",
                lw=1.6,
            )
    panel.text(
        at,
        min(height, 1) / 2,  # below the limit
        f"{ratio:.2f}×\n{_number(ms)} ms",
        color="white",
        weight="bold" if record["implementation"] == "ffi" else "normal",
        bbox=dict(facecolor=colour, edgecolor="none", pad=0.3),
        **_CENTRED,
    )


def _draw_core(panel, records):
    """The share of the dense rate that each product reaches."""
    names = list(core.PRODUCTS)
    for record in records:
        place = names.index(record["product"])
        if record["ratio"] is None:
            text = _short(record.get("error", "not measured"))
            panel.text(place, 0.02, text, color=_INK, **_UPRIGHT)
            continue
        share = 1 / record["ratio"]
        panel.bar(place, share, 0.6, color=_CORE)
        panel.text(place, share / 2, f"{share:.2f}", color="white", **_CENTRED)
    panel.axhline(_CORE_BAR, color=_INK, lw=0.8, ls="--")
    panel.text(len(names) - 0.45, _CORE_BAR, f" {_CORE_BAR}", va="center", fontsize=8, color=_INK)
    panel.set_ylim(0, 1.1 * max([1, *(1 / r["ratio"] for r in records if r["ratio"])]))
    panel.set_xlim(-0.55, len(names) - 0.45)
    panel.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    panel.set_ylabel("share of the dense rate", fontsize=9, color=_INK)


def _caption(figure, records):
    passes = [r for r in records if r["pass"] != "matrix_core"]
    handles, patch = [], matplotlib.patches.Patch
    if passes:
        handles.append(patch(color=_DENSE, label="dense bf16 matmul of the same FLOPs"))
    for implementation, precision in _series(passes):
        notes = {
            r["note"]: None
            for r in passes
            if (r["implementation"], r["precision"]) == (implementation, precision)
            and r.get("note")
        }
        label = f"{implementation}, {precision}" + (f" ({'; '.join(notes)})" if notes else "")
        colour, hatch = _COLOURS[implementation], _HATCHES[precision]
        handles.append(patch(facecolor=colour, hatch=hatch, edgecolor="white", lw=0, label=label))
    limits = {layer.LIMITS.get((r["shape"], r["pass"])) for r in passes} - {None}
    if limits:
        handles.append(matplotlib.lines.Line2D([], [], **_LIMIT, label="required of bf16"))
    if len(passes) < len(records):
        handles.append(patch(color=_CORE, label="matrix core"))
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    first = records[0]
    figure.supxlabel(
        f"{first['device']}, {first['tokens_per_gpu']} tokens per device, EP = number of devices.\n"
        "Numbers: the ratio to the dense matmul in turn with it, and the time. "
        f"Turns of {turn_ms(first)} ms.",
        fontsize=8.5,
        color=_INK,
    )


def _style(panel):
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8.5, colors=_INK)
    panel.tick_params(axis="x", length=0)


def _number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _short(error):
    no_memory = any(words in error for words in ("RESOURCE_EXHAUSTED", "out of memory"))
    return "out of memory" if no_memory else error[:28]
