"""How processes find those of their host and agree on GPU memory to share.

They talk through the key-value store of `jax.distributed`, of which a `client` here has
`key_value_set`, `key_value_try_get` and `blocking_key_value_get`. What was written there stays, so
every attempt has names of its own. Both functions are collective.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

_ROOT = "jax_megamoe"


class Process(NamedTuple):
    """What a process tells the others of itself.

    Attributes:
      host: the same text in processes that can share memory, and in no other.
      gpus: a name of each GPU that it drives, in the order of its blocks.
    """

    host: str
    gpus: tuple[str, ...]


class Blocks(Protocol):
    """One process's part of the memory that the processes of a host share."""

    def allocate(self) -> list[str]:
        """Allocates a block for each GPU; returns the handles by which others open them."""

    def open(self, handles: list[str], names: list[str], first: int) -> None:
        """Opens all blocks of the host; this process's own begin at `first`."""

    def keep(self) -> None:
        """Every process has opened every block."""

    def drop(self) -> None:
        """Some process could not; frees what there is."""


def find_processes(
    client, own: int, me: Process, count: int, timeout_s: float
) -> tuple[Process, ...]:
    """Returns what each of `count` processes, of which this one is number `own`, tells of itself.

    Raises:
      TimeoutError: a process told nothing in `timeout_s` seconds.
    """
    key = f"{_ROOT}/process/{{}}".format
    client.key_value_set(key(own), json.dumps(me), allow_overwrite=True)
    deadline = time.monotonic() + timeout_s
    found = []
    for i in range(count):
        told = _wait_for(client, key(i), deadline)
        if told is None:
            raise TimeoutError(_waited(own, timeout_s, i, "to name the GPUs that it drives"))
        host, gpus = json.loads(told)
        found.append(Process(host, tuple(gpus)))
    return tuple(found)


def share(
    blocks: Blocks, client, processes: Sequence[Process], own: int, name: str, timeout_s: float
) -> None:
    """Makes the processes of this host share their blocks: all of them succeed, or none.

    An attempt ends with a verdict that only one process can write: that it is made, by one that
    knows that all have opened all blocks, or why another gave up. A process that comes later, or
    tries again, sees the verdict and begins the next attempt, so all number their attempts alike.

    Args:
      name: of what is made; the same in all processes, and made by each at most once.

    Raises:
      TimeoutError: a process did not come in `timeout_s` seconds, or gave up waiting for another.
      ValueError: some process could not allocate or open the memory; the message says why.
    """
    members = [i for i, process in enumerate(processes) if process.host == processes[own].host]
    attempts = (f"{_ROOT}/shared/{name}/{members[0]}/{n}" for n in itertools.count())
    root = next(a for a in attempts if _look_up(client, f"{a}/verdict") is None)

    def together(step: str, do: Callable[[], object]) -> list:
        """Does a step, and returns the results of all processes when all have done it."""
        client.key_value_set(f"{root}/{step}/{own}", _done(do()))
        deadline = time.monotonic() + timeout_s
        results = []
        for i in members:
            told = _wait_for(client, f"{root}/{step}/{i}", deadline)
            if told is None:
                raise TimeoutError(_waited(own, timeout_s, i, "to make the workspace of this call"))
            results.append(_result(told))
        return results

    def open_blocks():
        given_up = _look_up(client, f"{root}/verdict")
        if given_up is not None:  # the blocks may be freed
            _result(given_up)
        names = [f"GPU {gpu} of process {i}" for i in members for gpu in processes[i].gpus]
        first = sum(len(processes[i].gpus) for i in members if i < own)
        blocks.open(list(itertools.chain(*handles)), names, first)

    def end(verdict: str) -> str:
        """Ends the attempt with the verdict of the first process that ends it; returns that."""
        made = False
        try:
            if verdict != _done():  # tell those that wait for a step
                for step in ("allocated", "opened"):
                    _write_once(client, f"{root}/{step}/{own}", verdict)
            verdict = _write_once(client, f"{root}/verdict", verdict)
            made = verdict == _done()
        finally:
            if made:
                blocks.keep()
            else:
                blocks.drop()
        return verdict

    try:
        handles = together("allocated", blocks.allocate)
        together("opened", open_blocks)
    except BaseException as error:  # interrupted processes tell the others too
        made = end(_given_up(own, error)) == _done()
        if made and isinstance(error, TimeoutError):
            return  # the last process came after the wait and before the verdict
        raise
    _result(end(_done()))


def why_not_ranks(
    axis: str,
    ranks: int,
    most: int,
    processes: Sequence[Process],
    groups: Sequence[Sequence[int]],
) -> str | None:
    """Returns why the ranks of an axis cannot share memory, or None if nothing is known against it.

    The answer is the same in every process.

    Args:
      most: GPUs of a host that can share a workspace.
      groups: the process of each rank, for each group, as far as they are known.
    """
    gpus: dict[str, int] = {}
    for process in processes:
        gpus[process.host] = gpus.get(process.host, 0) + len(process.gpus)
    host, fewest = min(gpus.items(), key=lambda item: item[1])
    if fewest < ranks:
        return (
            f"axis {axis!r} has {ranks} ranks, which must be on one host, and the processes of "
            f"host {host.split()[0]} drive {fewest} GPU(s)"
        )
    host, largest = max(gpus.items(), key=lambda item: item[1])
    if largest > most:
        return (
            f"the processes of host {host.split()[0]} drive {largest} GPUs and at most {most} can "
            "share a workspace"
        )
    for group in groups:
        hosts = sorted({processes[i].host.split()[0] for i in group})
        if len({processes[i].host for i in group}) > 1:
            return (
                f"axis {axis!r} has ranks on the hosts {', '.join(hosts)} and they must be on one; "
                "order the devices of the mesh so that the axis stays inside a host"
            )
    return None


def _waited(own, seconds, process, what):
    return (
        f"process {own} waited {seconds:g} s (MoEConfig.timeout_s) for process {process} {what}; "
        "every process must trace the same operations in the same order"
    )


def _done(result=None):
    return json.dumps({"result": result})


def _given_up(process, error):
    kind = "timeout" if isinstance(error, TimeoutError) else "error"
    return json.dumps({kind: f"process {process} gave up: {error}"})


def _result(told):
    """Returns the result that a process told, or raises its error."""
    told = json.loads(told)
    if "timeout" in told:
        raise TimeoutError(told["timeout"])
    if "error" in told:
        raise ValueError(told["error"])
    return told["result"]


def _wait_for(client, key, deadline):
    """Returns the value of a key, or None if it does not come before the deadline."""
    left_ms = int(1000 * (deadline - time.monotonic()))
    try:
        return client.blocking_key_value_get(key, min(max(left_ms, 1), 2**31 - 1))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _look_up(client, key):
    """Returns the value of a key, or None if it has none."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _write_once(client, key, value):
    """Gives a key its value unless it has one; returns the one that it has then."""
    try:
        client.key_value_set(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    return client.key_value_try_get(key)
