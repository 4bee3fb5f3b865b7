"""How processes find each other and agree on shared blocks: threads in their place, and real."""

from __future__ import annotations

import functools
import pathlib
import socket
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_mesh, run_processes
from jax.sharding import PartitionSpec as P

from jax_megamoe import MoEConfig, _exchange, _implementation, _mesh, _runtime, _workspace
from jax_megamoe._exchange import Process

PROGRAM = pathlib.Path(__file__).parent / "exchange_process.py"


class Store:
    """The key-value store of `jax.distributed`, as far as the package uses it."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key):
        with self.changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: key {key} not found.")
            return self.values[key]

    def blocking_key_value_get(self, key, timeout_in_ms):
        assert 0 < timeout_in_ms < 2**31  # an int32
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} timed out")
            return self.values[key]


class Blocks:
    """Blocks whose handles are their names; can be made to fail, or to wait, at a step."""

    def __init__(self, *handles, fail=None, wait=None):
        self.handles, self.fail, self.wait = list(handles), fail, wait
        self.opened = self.state = None

    def _step(self, name):
        if self.wait is not None and name == self.wait[0]:
            assert self.wait[1].wait(30)
        if name == self.fail:
            raise ValueError(f"no memory to be {name}")

    def allocate(self):
        self._step("allocated")
        return self.handles

    def open(self, handles, names, first):
        self._step("opened")
        assert handles[first : first + len(self.handles)] == self.handles
        self.opened = dict(zip(names, handles, strict=True))

    def keep(self):
        self.state = "kept"

    def drop(self):
        self.state = "dropped"


TWO = (Process("a 1", ("x",)), Process("a 1", ("y",)))


def share(store, blocks, processes=TWO, timeout_s=30.0, name="key"):
    """Every process's outcome: None, or what it raised."""

    def run(i):
        try:
            _exchange.share(blocks[i], store, processes, i, name, timeout_s)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(blocks)) as pool:
        return list(pool.map(run, range(len(blocks))))


def test_processes_hear_of_each_other():
    store = Store()
    told = [Process("a 1", ("0000:01:00.0", "0000:02:00.0")), Process("b 2", ("0000:01:00.0",))]
    for _ in range(2):  # again after a failure
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(
                lambda i: _exchange.find_processes(store, i, told[i], 2, 30.0), range(2)
            )
        assert list(found) == [tuple(told)] * 2


def test_a_process_that_names_no_gpus_is_named():
    message = r"process 0 waited 0.1 s \(MoEConfig.timeout_s\) for process 2 to name the GPUs"
    store = Store()
    store.key_value_set("jax_megamoe/process/1", '["b", ["x"]]')
    with pytest.raises(TimeoutError, match=message):
        _exchange.find_processes(store, 0, TWO[0], 3, 0.1)


def test_processes_of_a_host_open_each_others_blocks_in_one_order():
    processes = (
        Process("a 1", ("x", "y")),
        Process("b 2", ("x",)),
        Process("a 1", ("z",)),
        Process("b 2", ("y",)),
    )
    blocks = [Blocks("0x", "0y"), Blocks("1x"), Blocks("2z"), Blocks("3y")]
    assert share(Store(), blocks, processes, timeout_s=1e9) == [None] * 4
    assert [b.state for b in blocks] == ["kept"] * 4
    a = [("GPU x of process 0", "0x"), ("GPU y of process 0", "0y"), ("GPU z of process 2", "2z")]
    b = [("GPU x of process 1", "1x"), ("GPU y of process 3", "3y")]
    assert [list(part.opened.items()) for part in blocks] == [a, b, a, b]


@pytest.mark.parametrize("step", ["allocated", "opened"])
def test_a_failure_of_one_is_told_to_all_and_another_attempt_may_succeed(step):
    store = Store()
    blocks = [Blocks("x"), Blocks("y", fail=step)]
    other, own = share(store, blocks)
    assert type(own) is ValueError and str(own) == f"no memory to be {step}"
    assert type(other) is ValueError and str(other) == f"process 1 gave up: no memory to be {step}"
    assert [b.state for b in blocks] == ["dropped"] * 2
    again = [Blocks("x2"), Blocks("y2")]
    assert share(store, again) == [None] * 2
    assert list(again[0].opened.values()) == ["x2", "y2"]


def test_a_process_that_never_comes_is_named_and_may_come_later():
    store = Store()
    early = Blocks("x")
    (error,) = share(store, [early], timeout_s=0.1)
    assert type(error) is TimeoutError
    assert "waited 0.1 s (MoEConfig.timeout_s) for process 1 to make the workspace" in str(error)
    assert str(error).endswith("every process must trace the same operations in the same order")
    assert early.state == "dropped"
    # The late one does not open what the early one has freed.
    blocks = [Blocks("x2"), Blocks("y")]
    assert share(store, blocks) == [None] * 2
    assert list(blocks[1].opened.values()) == ["x2", "y"]


def test_when_one_gives_up_during_an_attempt_all_do():
    """Process 1 begins to allocate, process 0 gives up waiting, process 1 goes on."""
    store, given_up = Store(), threading.Event()
    blocks = [Blocks("x"), Blocks("y", wait=("allocated", given_up))]

    def begin_late():
        with pytest.raises(TimeoutError, match="process 0 gave up: process 0 waited 0.2 s"):
            _exchange.share(blocks[1], store, TWO, 1, "key", 30.0)

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(begin_late)
        (error,) = share(store, blocks[:1], timeout_s=0.2)
        given_up.set()
        late.result()
    assert type(error) is TimeoutError
    assert [b.state for b in blocks] == ["dropped"] * 2
    assert blocks[1].opened is None  # process 0 has freed its own


def test_a_failure_on_one_host_is_none_of_the_others():
    began, failed = threading.Event(), threading.Event()

    class Failing(Blocks):
        def drop(self):
            super().drop()
            failed.set()

    class Other(Blocks):
        def allocate(self):
            began.set()
            return super().allocate()

    blocks = [
        Failing("x", fail="allocated", wait=("allocated", began)),
        Other("y", wait=("allocated", failed)),
    ]
    processes = (Process("a 1", ("x",)), Process("b 2", ("x",)))
    own, other = share(Store(), blocks, processes)
    assert type(own) is ValueError and other is None
    assert [b.state for b in blocks] == ["dropped", "kept"]


def test_one_that_waits_already_is_told_of_a_failure():
    """Process 0 has opened its blocks and waits for process 1, which then cannot."""
    opened = threading.Event()

    class First(Blocks):
        def open(self, *args):
            super().open(*args)
            opened.set()

    blocks = [First("x"), Blocks("y", fail="opened", wait=("opened", opened))]
    other, _ = share(Store(), blocks, timeout_s=5.0)
    assert type(other) is ValueError and str(other) == "process 1 gave up: no memory to be opened"
    assert [b.state for b in blocks] == ["dropped"] * 2


class Scripted(Store):
    """Process 1 ends the attempt with `verdict` while process 0 waits for it to have opened."""

    def __init__(self, verdict, came):
        super().__init__()
        self.verdict, self.came = verdict, came

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key.endswith("allocated/1"):
            return _exchange._done(["y"])
        if key.endswith("opened/1"):
            self.key_value_set(key.replace("opened/1", "verdict"), self.verdict)
            if not self.came:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} timed out")
            return _exchange._done()
        return super().blocking_key_value_get(key, timeout_in_ms)


def test_one_that_came_at_the_last_moment_has_succeeded():
    blocks = Blocks("x")
    _exchange.share(blocks, Scripted(_exchange._done(), came=False), TWO, 0, "key", 30.0)
    assert blocks.state == "kept"


def test_one_that_gave_up_at_the_last_moment_has_failed_for_all():
    verdict = _exchange._given_up(1, TimeoutError("it waited"))
    blocks = Blocks("x")
    with pytest.raises(TimeoutError, match="^process 1 gave up: it waited$"):
        _exchange.share(blocks, Scripted(verdict, came=True), TWO, 0, "key", 30.0)
    assert blocks.state == "dropped"


def test_an_interrupted_process_tells_the_others():
    class Interrupted(Blocks):
        def allocate(self):
            raise KeyboardInterrupt

    store, blocks = Store(), Interrupted("x")
    with pytest.raises(KeyboardInterrupt):
        _exchange.share(blocks, store, TWO, 0, "key", 30.0)
    assert blocks.state == "dropped"
    assert share(store, [Blocks("x"), Blocks("y")]) == [None] * 2


def test_a_host_is_told_by_its_name_and_its_boot(monkeypatch):
    # Containers on one machine have one boot, machines in two networks may have one name.
    def host(name, boot):
        files = {"/proc/sys/kernel/random/boot_id": f"{boot}\n"}
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        monkeypatch.setattr(pathlib.Path, "read_text", lambda path: files[str(path)])
        return _workspace._host()

    told = [host(name, boot) for name in "ab" for boot in "12"]
    assert len(set(told)) == 4
    assert [text.split()[0] for text in told] == ["a", "a", "b", "b"]  # as messages name it
    assert host("a", "1") == told[0]


def test_ranks_must_fit_on_a_host():
    processes = (*TWO, Process("b 2", ("x",)), Process("b 2", ("y", "z")))
    assert _exchange.why_not_ranks("expert", 2, 16, processes, []) is None
    assert _exchange.why_not_ranks("expert", 2, 16, processes, [[1, 0], [2, 3]]) is None
    assert _exchange.why_not_ranks("expert", 2, 16, processes, [[0, 1], [3, 1]]) == (
        "axis 'expert' has ranks on the hosts a, b and they must be on one; order the devices of "
        "the mesh so that the axis stays inside a host"
    )
    assert _exchange.why_not_ranks("expert", 3, 16, processes, []) == (
        "axis 'expert' has 3 ranks, which must be on one host, and the processes of host a drive 2 "
        "GPU(s)"
    )
    assert _exchange.why_not_ranks("expert", 2, 2, processes, []) == (
        "the processes of host b drive 3 GPUs and at most 2 can share a workspace"
    )
    assert _exchange.why_not_ranks("expert", 2, 3, processes, []) is None


def test_the_ranks_processes_are_those_of_the_mesh_in_use():
    seen = []

    def shard(x):
        seen.append(_mesh.rank_processes("expert"))
        return x

    mesh = make_mesh((2, 4), ("expert", "data"))
    shard = functools.partial(jax.shard_map, shard, in_specs=P("expert"), out_specs=P("expert"))
    with jax.set_mesh(mesh):
        jax.jit(shard())(jnp.ones(2))
    jax.jit(shard(mesh=mesh))(jnp.ones(2))
    assert seen == [[[0, 0]] * 4, []]


def test_the_ranks_of_a_group_are_those_along_the_axis(monkeypatch):
    devices = np.array([types.SimpleNamespace(process_index=i) for i in range(8)]).reshape(2, 4)
    for axes, expected in (
        (("expert", "data"), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (("data", "expert"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ):
        mesh = types.SimpleNamespace(
            axis_names=axes, devices=devices, shape=dict(zip(axes, (2, 4), strict=True))
        )
        monkeypatch.setattr(_mesh.mesh_lib, "get_concrete_mesh", lambda mesh=mesh: mesh)
        assert _mesh.rank_processes("expert") == expected


@pytest.mark.parametrize(
    "ranks, count, processes, shared",
    [
        (2, 2, TWO, True),
        (1, 2, TWO, False),  # a rank alone meets nobody
        (2, 1, TWO[:1], False),
        (2, 2, (TWO[0], Process("b 2", ("x",))), False),  # every process has all ranks of its own
    ],
)
def test_processes_share_a_workspace_once_and_where_they_must(
    monkeypatch, ranks, count, processes, shared
):
    made = []

    class Module:
        def register_cuda_workspace(self, key, **sizes):
            made.append(("alone", key))

        def has_cuda_workspace(self, key):
            return ("shared", key) in made

    monkeypatch.setattr(_runtime, "load", Module)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(_workspace, "processes", lambda timeout_s: processes)
    monkeypatch.setattr(_workspace, "_ordinals", lambda: [0])
    monkeypatch.setattr(_exchange, "share", lambda *a: made.append(("shared", int(a[4], 16))))
    for _ in range(2):
        _workspace._make_on_gpus(5, {"ranks": ranks}, 1.0)
    assert made == ([("shared", 5)] if shared else [("alone", 5)] * 2)


def test_axes_and_sizes_have_workspaces_of_their_own():
    sizes = {"ranks": 2, "tokens": 8}
    keys = [_workspace._key(axis, sizes) for axis in (None, "a", "b")]
    keys.append(_workspace._key("a", sizes | {"tokens": 9}))
    assert len(set(keys)) == 4 and all(0 <= key < 2**63 for key in keys)
    assert keys[1] == _workspace._key("a", dict(reversed(sizes.items())))


def test_more_ranks_than_the_kernels_take(monkeypatch):
    monkeypatch.setattr(_mesh, "axis_size", lambda axis: 17)
    reason = _implementation._why_not_ranks("expert", MoEConfig())
    assert reason == "axis 'expert' has 17 ranks and the kernels take at most 16"
    monkeypatch.setattr(_mesh, "axis_size", lambda axis: 16)
    assert _implementation._why_not_ranks("expert", MoEConfig()) is None


def test_an_axis_over_hosts_runs_on_xla(monkeypatch):
    hosts = (Process("a 1", ("x",)), Process("b 2", ("x",)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(_mesh, "axis_size", lambda axis: 2)
    monkeypatch.setattr(_implementation, "why_not_ffi", lambda platform: None)
    monkeypatch.setattr(_implementation, "_why_not_axis", lambda axis: None)
    monkeypatch.setattr(_workspace, "processes", lambda timeout_s: hosts)
    choose = lambda name: _implementation.choose(  # noqa: E731
        MoEConfig(implementation=name), "expert", hidden=64, intermediate=64
    )
    assert choose("auto") == "xla"
    message = "'expert' has 2 ranks, which must be on one host.* drive 1 GPU.*; 'xla' runs on any"
    with pytest.raises(ValueError, match=message):
        choose("ffi")
    monkeypatch.setattr(_workspace, "processes", lambda timeout_s: TWO)
    assert choose("auto") == choose("ffi") == "ffi"


@pytest.mark.timeout(120)
def test_two_real_processes():
    outputs = run_processes(lambda address, i: [str(PROGRAM), address, str(i)], timeout=100)
    for output in outputs:
        assert "passed" in output
