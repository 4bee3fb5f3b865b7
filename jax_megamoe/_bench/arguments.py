"""Arguments that the measuring programs share."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def list_of(choices: Sequence[str], empty: bool = False) -> Callable[[str], tuple[str, ...]]:
    """Returns the type of an argument that lists some of the choices; or none, if it may be empty.

    What is named twice counts once.
    """

    def parse(text):
        values = tuple(dict.fromkeys(text.split(","))) if text or not empty else ()
        for value in values:
            if value not in choices:
                raise argparse.ArgumentTypeError(
                    f"{value!r} is none of {', '.join(map(repr, choices))}"
                )
        return values

    return parse


def counts(text: str) -> tuple[int, ...]:
    """The type of an argument that lists numbers of devices; one that comes twice counts once."""
    try:
        values = tuple(dict.fromkeys(int(value) for value in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers separated by commas"
        ) from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return values


def plot_module(program: str, path: pathlib.Path) -> ModuleType:
    """Returns what draws pictures; asked for before hours of measuring.

    Ends the program, with the reason, where matplotlib is missing or cannot write to `path`.
    """
    try:
        from jax_megamoe._bench import plot

        plot.check_path(path)
    except ModuleNotFoundError as error:
        sys.exit(f"{program}: plot is {path} and needs {error.name}, which is missing")
    except ValueError as error:
        sys.exit(f"{program}: plot is {path}: {error}")
    return plot
