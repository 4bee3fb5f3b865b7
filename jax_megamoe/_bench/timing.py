"""Times programs against each other, interleaved, so that all see the same clocks and heat.

Two at a time: a GPU at its power limit runs faster for a while after a program that needs less
power, so of three the one whose turn follows that program's would seem faster than it is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

# Back-to-back calls fill this much time in a turn, so that the launch of the first, which nothing
# hides, is a small part.
TURN_MS = 50
# The longest turn that may be asked for.
MAX_TURN_MS = 60_000
# Programs of which a call takes longer are timed in a few rounds only, all of them.
_SLOW_S = 0.2
_SLOW_ROUNDS = 3

# What tracing, compiling and running raise: a wrong argument, memory that is not there, a timeout.
ERRORS = (ValueError, TypeError, RuntimeError)


def measure(
    programs: dict[str, Callable[[], Any]], rounds: int, turn_ms: int = TURN_MS
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the median seconds of a call of each program, and why the others failed.

    A round calls each program in turn, many times back to back, and waits for all results on all
    devices; the slowest device counts.

    Args:
      programs: what to call; each returns its results without waiting for them.
      rounds: how many times each program gets its turn.
      turn_ms: about how many milliseconds a turn takes.
    """
    running, calls, seconds, failures = dict(programs), {}, {}, {}

    def attempt(name, action):
        try:
            return action(programs[name])
        except ERRORS as error:
            failures[name] = reason(error)
            del running[name]

    for name in programs:
        once = attempt(name, _warm_up)
        if once is not None:
            calls[name] = max(1, math.ceil(turn_ms / 1e3 / once))
            seconds[name] = []
    for turn in range(rounds):
        if turn >= _SLOW_ROUNDS and any(seconds[name][0] > _SLOW_S for name in running):
            break
        for name in list(running):
            took = attempt(name, lambda run, n=calls[name]: _seconds_of_a_call(run, n))
            if took is not None:
                seconds[name].append(took)
    return {name: statistics.median(seconds[name]) for name in running}, failures


def reason(error: Exception) -> str:
    """Returns the first line of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:400]


def _warm_up(run):
    jax.block_until_ready(run())
    return _seconds_of_a_call(run, 1)


def _seconds_of_a_call(run, calls):
    start = time.perf_counter()
    for _ in range(calls):
        results = run()
        if jax.default_backend() == "cpu":
            # Calls in flight share a few threads; all of them may come to wait for other devices.
            jax.block_until_ready(results)
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls
