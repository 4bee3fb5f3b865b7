"""Records of measurements: what they hold, where they are kept, how they are printed.

A record is a flat JSON object; docs/benchmarks.md describes its keys.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

from jax_megamoe._bench import core, layer, timing
from jax_megamoe.config import PRECISIONS

Record = dict[str, Any]

# What there is of each key, and the types of others.
_NAMES = {
    "implementation": ("ffi", "xla", "torch"),
    "precision": PRECISIONS,
    "pass": (*layer.PASSES, "matrix_core"),
}
_KINDS = (
    (("ms", "dense_ms", "ratio", "peak_bytes"), (int, float, type(None)), "a number or null"),
    (("gpus", "tokens_per_gpu"), int, "a whole number"),
    (("shape", "device"), str, "text"),
    (("date",), (str, type(None)), "text or null"),
)

# What a measurement is of, besides how long the turns were. A newer record with the same values
# replaces an older one in pictures.
IDENTITY = (
    "shape",
    "pass",
    "precision",
    "implementation",
    "routing",
    "gpus",
    "tokens_per_gpu",
    "product",
    "device",
)

# What the table and the pictures need of a record.
_LAYER_KEYS = {*IDENTITY, "ms", "dense_ms", "ratio", "peak_bytes"} - {"product"}


def environment(commit: str | None) -> Record:
    """Returns the keys that all records of a run share; `commit` None asks git."""
    return dict(device=jax.devices()[0].device_kind, **software(commit))


def software(commit: str | None) -> Record:
    """Returns the part of `environment` for which JAX need not start its backend."""
    return dict(
        driver=_driver(),
        jax=jax.__version__,
        commit=commit or _commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def timed(seconds: float | None, dense_seconds: float | None) -> Record:
    """Returns the keys ms, dense_ms and ratio, None where something was not measured."""
    ms, dense_ms = _milliseconds(seconds), _milliseconds(dense_seconds)
    return dict(ms=ms, dense_ms=dense_ms, ratio=ms / dense_ms if ms and dense_ms else None)


def read(paths: Sequence[pathlib.Path]) -> list[Record]:
    """Returns the records of all files, in their order.

    Raises:
      ValueError: a file cannot be read or does not hold a list of records.
    """
    records = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not (isinstance(found, list) and all(isinstance(record, dict) for record in found)):
            raise ValueError(f"{path} holds no list of records")
        records += found
    return records


def of_layers(records: Sequence[Record]) -> list[Record]:
    """Returns those of a layer or of the matrix core: what the table and the picture show."""
    return [record for record in records if record.keys() >= _LAYER_KEYS]


def check(records: Sequence[Record]) -> None:
    """Checks that the table and the picture know what the records are of.

    Raises:
      ValueError: a key has another value.
    """
    for record in records:
        core_alone = record["pass"] == "matrix_core"
        names = _NAMES | ({"product": core.PRODUCTS} if core_alone else {"routing": layer.ROUTINGS})
        for key, known in names.items():
            if record.get(key) not in list(known):
                raise ValueError(
                    f"the {key} of a record is {record.get(key)!r}; it must be one of "
                    + ", ".join(map(repr, known))
                )
        for keys, kinds, text in _KINDS:
            for key in keys:
                value = record.get(key)
                if not isinstance(value, kinds) or isinstance(value, bool):
                    raise ValueError(f"the {key} of a record is {value!r}; it must be {text}")


def write(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Replaces the file by these records, one a line.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    except OSError as error:
        raise ValueError(f"out is {path}: {error}") from error


def turn_ms(record: Record) -> int:
    """Returns how long the turns were; older records do not say so."""
    return record.get("turn_ms", timing.TURN_MS)


def newest(records: Sequence[Record]) -> list[Record]:
    """Returns the record of each identity that has the newest date, of equal ones the last."""
    found: dict[tuple, Record] = {}
    for record in records:
        identity = (*(record.get(key) for key in IDENTITY), turn_ms(record))
        if _date(record) >= _date(found.get(identity, {})):
            found[identity] = record
    return list(found.values())


def line(record: Record) -> str:
    """Returns a record in one line, without its shape."""
    what = record["implementation"] + " " + record["precision"]
    if record["pass"] == "matrix_core":
        what = record["product"]
    head = f"{record['pass']:11s} {record['routing']:11s} {record['gpus']:4d} {what:23s}"
    if record.get("error"):
        return f"{head} {record['error']}"
    memory = record["peak_bytes"]
    turns = "" if turn_ms(record) == timing.TURN_MS else f" turns of {turn_ms(record)} ms"
    return (
        f"{head} {_fixed(record['ms']):>9s} {_fixed(record['dense_ms']):>9s} "
        f"{_fixed(record['ratio']):>7s} {_fixed(memory and memory / 2**30, 2):>6s}  "
        f"{record.get('note', '')}{turns}"
    ).rstrip()


def table(records: Sequence[Record]) -> str:
    """Returns all records as a table, one section for each shape."""
    heading = (
        f"{'pass':11s} {'routing':11s} {'gpus':>4s} {'':23s} {'ms':>9s} {'dense':>9s} "
        f"{'ratio':>7s} {'GiB':>6s}"
    )
    lines = []
    for shape in dict.fromkeys(record["shape"] for record in records):
        mine = [record for record in records if record["shape"] == shape]
        tokens = ", ".join(str(n) for n in dict.fromkeys(r["tokens_per_gpu"] for r in mine))
        lines += ["", f"{shape}, {tokens} tokens a device", heading, *map(line, mine)]
    return "\n".join(lines)


def _date(record):
    """In a format whose order as text is that of time; one without a date is the oldest."""
    return record.get("date") or ""


def _milliseconds(seconds):
    return None if seconds is None else float(f"{seconds * 1e3:.5g}")


def _fixed(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def _driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = _output(query)
    return found.splitlines()[0] if found else None


def _commit():
    """The commit of the source tree that this file is tracked in; None if it is in none."""
    here = pathlib.Path(__file__)
    if _output(["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent) is None:
        return None
    head = _output(["git", "rev-parse", "--short", "HEAD"], cwd=here.parent)
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=here.parent)
    return head and head + ("-dirty" if changed else "")


def _output(command, cwd=None):
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
