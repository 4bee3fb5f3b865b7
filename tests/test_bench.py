"""`python -m jax_megamoe.bench --tiny` in a process of its own: records, table and picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from cases import require_ffi

from jax_megamoe import MoEConfig, _bench, bench
from jax_megamoe._bench import layer, memory, report, timeline, timing
from jax_megamoe._bench.core import PRODUCTS

_KEYS = {
    *("shape", "pass", "precision", "implementation", "routing", "gpus", "tokens_per_gpu"),
    *("ms", "dense_ms", "ratio", "peak_bytes"),
    *("device", "driver", "jax", "commit", "date", "note", "turn_ms"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The files that one run leaves, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["--tiny", "--core", "--rounds=1", "--gpus=2,1000", "--passes=forward,backward"]
    arguments += ["--commit=abc1234", f"--out={folder / 'out' / 'tiny.json'}"]
    if importlib.util.find_spec("matplotlib"):
        arguments.append(f"--plot={folder / 'tiny.png'}")
    run = subprocess.run(
        [sys.executable, "-m", "jax_megamoe.bench", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return folder, run.stdout


def _records(tiny):
    return json.loads((tiny[0] / "out" / "tiny.json").read_text())


def test_every_configuration_has_a_record_with_all_keys(tiny):
    records = _records(tiny)
    assert all(set(r) >= _KEYS for r in records)
    assert {r["commit"] for r in records} == {"abc1234"}
    layers = [r for r in records if r["pass"] != "matrix_core"]
    found = [(r["pass"], r["implementation"], r["routing"], r["gpus"]) for r in layers]
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2


def test_the_ratio_is_that_of_the_times(tiny):
    measured = [r for r in _records(tiny) if r["ms"] is not None]
    expected = {"xla"} if importlib.util.find_spec("jax_megamoe._ffi") is None else {"xla", "ffi"}
    assert {r["implementation"] for r in measured} == expected
    for record in measured:
        assert "error" not in record and record["gpus"] == 2
        assert record["ms"] > 0 and record["dense_ms"] > 0 and record["peak_bytes"] > 0
        assert record["ratio"] == pytest.approx(record["ms"] / record["dense_ms"])


def test_what_cannot_run_is_recorded_with_its_reason(tiny):
    records = _records(tiny)
    missing = [r for r in records if r["gpus"] == 1000]
    assert all(r["error"].startswith("gpus is 1000 and this process has") for r in missing)
    core = [r for r in records if r["pass"] == "matrix_core"]
    assert [r["product"] for r in core] == list(PRODUCTS)
    assert all("JAX runs on 'cpu'" in r["error"] for r in core)
    assert all(r["ms"] is None and r["ratio"] is None for r in [*missing, *core])
    printed = tiny[1].split("tiny, 64 tokens a device")[-1].splitlines()
    assert len(printed) == 2 + len(records)


def test_later_records_are_appended_and_replace_earlier_ones_in_pictures(tiny, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert (tiny[0] / "tiny.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "twice.json"
    records = _records(tiny)
    report.write(out, [dict(records[-1], ms=5.0)])
    again = [str(tiny[0] / "out" / "tiny.json"), str(out)]
    assert bench.main(["--read", *again, "--plot", str(tmp_path / "twice.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(records)
    assert (tmp_path / "twice.png").stat().st_size > 10_000
    # Without a GPU there is no matrix core: nothing could be measured.
    assert bench.main(["--tiny", "--core", "--passes=", f"--out={out}"]) == 1
    appended = report.read([out])
    assert appended[0]["ms"] == 5.0
    assert [r["pass"] for r in appended[1:]] == ["matrix_core"] * 5


def test_the_newest_of_records_that_measure_the_same_is_shown(tiny, tmp_path, capsys):
    first, *rest = [r for r in _records(tiny) if r["ms"] is not None]
    old, new = (
        dict(first, ms=ms, date=date)
        for ms, date in ((111.0, "2026-11-29T23:59:59Z"), (222.0, "2026-11-30T00:00:01Z"))
    )
    undated = dict(first, ms=333.0)
    del undated["date"]
    assert report.newest([new, *rest, old, undated]) == [new, *rest]
    assert report.newest([undated, *rest, old, new]) == [new, *rest]
    assert report.newest([dict(old, date="2026-11-30"), new]) == [new]
    again = dict(new, ms=444.0)
    assert report.newest([new, again]) == [again]

    files = [tmp_path / name for name in ("a.json", "b.json")]
    report.write(files[0], [new])
    report.write(files[1], [old])
    for order in (files, files[::-1]):
        assert bench.main(["--read", *map(str, order)]) == 0
        assert " 222.000 " in (printed := capsys.readouterr().out) and " 111.000 " not in printed


def test_the_layer_in_pytorch_is_measured_or_its_absence_recorded(tmp_path):
    out = tmp_path / "torch.json"
    arguments = ["--tiny", "--gpus=2", "--rounds=1", "--routings=skewed", f"--out={out}"]
    status = bench.main([*arguments, "--implementations=torch"])
    records = report.read([out])
    assert [r["pass"] for r in records] == list(layer.PASSES)
    assert all(set(r) >= _KEYS and r["implementation"] == "torch" for r in records)
    if importlib.util.find_spec("torch"):
        assert status == 0
        assert all(r["ms"] > 0 and r["ratio"] > 0 and "error" not in r for r in records)
    else:
        assert status == 1
        assert {r["error"] for r in records} == {"ModuleNotFoundError: No module named 'torch'"}


def test_a_picture_is_of_one_kind_of_device(tiny, tmp_path):
    plot = pytest.importorskip("jax_megamoe._bench.plot")
    records = _records(tiny)
    with pytest.raises(ValueError, match="cpu with 64 in 50 ms, other with 64 in 50 ms"):
        plot.draw([*records, dict(records[0], device="other")], tmp_path / "no.png")
    with pytest.raises(ValueError, match="are of none"):
        plot.draw([], tmp_path / "no.png")


def test_routings_have_distinct_experts_and_the_documented_skew():
    mesh, shape = layer.mesh_of(1), layer.Shape(8, 8, experts=128, top_k=8)
    loads, experts = {}, {}
    for routing in layer.ROUTINGS:
        ids, weights = layer.make_routing(mesh, shape, 2048, routing)
        assert ids.dtype == np.int32 and ids.shape == weights.shape == (2048, 8)
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
        np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-5)
        loads[routing] = layer.load_of(mesh, shape, ids)[0]
        experts[routing] = np.bincount(ids.ravel(), minlength=128) / (2048 * 8 / 128)
        assert experts[routing].max() == pytest.approx(loads[routing])
    assert loads["random"] < 1.5
    assert 5 < loads["skewed"] < 9
    assert (experts["skewed"] > 3).sum() in (4, 5, 6)  # the fifth has hardly more


@pytest.mark.parametrize(
    "pass_, calls", [("forward", (1, 0)), ("backward", (0, 1)), ("layer", (1, 1))]
)
def test_a_pass_makes_only_the_custom_calls_it_names(pass_, calls):
    require_ffi()
    mesh, shape = layer.mesh_of(1), layer.SHAPES["tiny"]
    arguments = layer.make_arguments(mesh, shape, 8)
    routing = layer.make_routing(mesh, shape, 8, "random")
    program = layer.layer_program(mesh, pass_, MoEConfig(implementation="ffi"))
    text = program.lower(*arguments, *routing).compile().as_text()
    found = [text.count(f'custom_call_target="jax_megamoe_{p}"') for p in ("forward", "backward")]
    assert tuple(found) == calls


def test_a_program_that_fails_is_reported_and_the_others_are_timed():
    def fails_the_second_time(seen=[]):  # noqa: B006
        seen.append(1)
        if len(seen) > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nand much more")
        return np.zeros(1)

    programs = {"good": lambda: jax.numpy.ones(1000), "bad": fails_the_second_time}
    seconds, failures = timing.measure(programs, rounds=1)
    assert failures == {"bad": "RESOURCE_EXHAUSTED: no memory"}
    assert list(seconds) == ["good"] and 0 < seconds["good"] < 1


@pytest.mark.parametrize(("call_s", "rounds"), [(0.03, 7), (0.3, 3)])
def test_a_turn_takes_as_long_as_asked_for(monkeypatch, call_s, rounds):
    """Where a call takes more than 0.2 s, no program has more than three turns."""
    now, calls = [0.0], {"slow": 0, "quick": 0}
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def run(name, seconds):
        calls[name] += 1
        now[0] += seconds
        return np.zeros(1)

    programs = {"slow": lambda: run("slow", call_s), "quick": lambda: run("quick", 0.01)}
    seconds, _ = timing.measure(programs, rounds=7, turn_ms=95)
    assert seconds == pytest.approx({"slow": call_s, "quick": 0.01})
    # Two calls to warm up.
    assert calls == {"slow": 2 + rounds * -(-95 // round(call_s * 1e3)), "quick": 2 + rounds * 10}


def test_records_of_other_turns_are_others(tiny, tmp_path, capsys):
    old = next(r for r in _records(tiny) if r["ms"] is not None)
    del old["turn_ms"]  # as in records that do not say: turns of 50 ms
    long = dict(old, ms=444.0, turn_ms=400, date="2999-01-01")
    assert report.newest([old, long]) == [old, long]
    assert report.newest([old, dict(long, turn_ms=50)]) == [dict(long, turn_ms=50)]
    out = tmp_path / "both.json"
    report.write(out, [old, long])
    assert bench.main(["--read", str(out)]) == 0
    assert capsys.readouterr().out.count("turns of 400 ms") == 1
    if importlib.util.find_spec("matplotlib"):
        with pytest.raises(SystemExit, match="one length of turns; .* in 50 ms, .* in 400 ms"):
            bench.main(["--read", str(out), "--plot", str(tmp_path / "both.png")])


@pytest.mark.parametrize("turn_ms", ["0", "-1", "60001", "1" + 400 * "0"])
def test_turns_out_of_bounds_are_refused(turn_ms, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--tiny", f"--turn-ms={turn_ms}"])
    assert "; it must be at " in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named_before_anything_is_measured(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for arguments in (["--read", str(broken)], ["--tiny", "--out", str(broken)]):
        with pytest.raises(SystemExit, match="broken.json cannot be read: Expecting property"):
            bench.main(arguments)
    with pytest.raises(SystemExit, match="missing.json cannot be read: .* No such file"):
        bench.main(["--read", str(tmp_path / "missing.json")])
    broken.write_text("[1]")
    with pytest.raises(SystemExit, match="broken.json holds no list of records"):
        bench.main(["--read", str(broken)])


@pytest.mark.parametrize(
    "key, value, accepted",
    [
        ("implementation", "jax", "one of 'ffi'"),
        ("implementation", ["ffi"], "one of 'ffi'"),
        ("precision", "fp4", "one of 'bf16'"),
        ("pass", None, "one of 'forward'"),
        ("routing", "even", "one of 'random'"),
        ("product", "gate", "one of 'gate_up'"),
        ("ms", "x", "a number or null"),
        ("gpus", None, "a whole number"),
        ("device", 3, "text"),
        ("date", 5, "text or null"),
    ],
)
def test_a_record_of_something_unknown_is_named(tiny, tmp_path, monkeypatch, key, value, accepted):
    pass_ = "matrix_core" if key == "product" else "forward"
    record = next(r for r in _records(tiny) if r["pass"] == pass_)
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps([record | {key: value}]))
    message = re.escape(f"the {key} of a record is {value!r}; it must be {accepted}")
    with pytest.raises(SystemExit, match=message):
        bench.main(["--read", str(strange)])
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured all the same"))
    with pytest.raises(SystemExit, match=message):
        bench.main(["--tiny", "--out", str(strange), "--plot", str(tmp_path / "strange.png")])


def test_records_of_training_steps_are_no_part_of_the_table(tiny, tmp_path, capsys):
    training = tmp_path / "training.json"
    report.write(training, [{"shape": "tiny", "pass": "training_step", "gpus": 2}])
    layers = str(tiny[0] / "out" / "tiny.json")
    bench.main(["--read", layers])
    table = capsys.readouterr().out
    bench.main(["--read", str(training), layers])
    assert capsys.readouterr().out == table
    with pytest.raises(SystemExit, match="training.json: no record there is of a layer"):
        bench.main(["--read", str(training)])


def test_a_picture_that_cannot_be_drawn_is_named(tiny, tmp_path, monkeypatch):
    layers, picture = str(tiny[0] / "out" / "tiny.json"), str(tmp_path / "picture.foo")
    with pytest.raises(SystemExit, match="plot is .*picture.foo: Format 'foo' is not supported"):
        bench.main(["--read", layers, "--plot", picture])
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured all the same"))
    with pytest.raises(SystemExit, match="plot is .*picture.foo: Format 'foo' is not supported"):
        bench.main(["--tiny", "--plot", picture])
    with pytest.raises(SystemExit, match="plot is .*nowhere/a.png: there is no folder .*nowhere"):
        bench.main(["--tiny", "--plot", str(tmp_path / "nowhere" / "a.png")])
    monkeypatch.delitem(sys.modules, "jax_megamoe._bench.plot")
    monkeypatch.delattr(_bench, "plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="plot is .*picture.foo and needs matplotlib"):
        bench.main(["--tiny", "--plot", picture])


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured all the same"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="out is .*file/results.json: "):
        bench.main(["--tiny", "--out", str(tmp_path / "file" / "results.json")])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes=qwen"], "'qwen' is none of 'qwen3-30b-a3b'"),
        (["--passes=forward,inference"], "'inference' is none of"),
        (["--gpus=0"], "number below 1"),
        (["--gpus=1,,2"], "must be whole numbers separated by commas"),
        (["--tokens=0"], "tokens is 0"),
        (["--tiny", "--passes="], "passes is empty, so that without --core there is nothing to"),
        (["--shapes=qwen3-30b-a3b"], "shapes is qwen3-30b-a3b and JAX runs on 'cpu'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_timeline_plans_each_token_of_the_others_once():
    # Ranks 0 and 1 have experts 0 to 3 and 4 to 7; rank 1's tokens are the last three.
    ids = np.array([[5, 6], [4, 5], [3, 0], [4, 5], [7, 2], [-1, 9]])
    assert timeline.pulled_tokens(ids, 2, 8).tolist() == [1, 2]
    assert timeline.pulled_tokens(ids[:, ::-1], 2, 8).tolist() == [1, 2]
    assert timeline.pulled_tokens(np.array([[0], [0], [1], [-1]]), 2, 8).tolist() == [1, 0]
    assert timeline.pulled_tokens(ids, 1, 8).tolist() == [0]


def test_timeline_gives_the_phases_between_marks():
    marks = np.zeros((4, 8), np.uint64)  # the last CTA was not launched
    marks[:3, :3] = [[1000, 5000, 9000], [1100, 6000, 9000], [1200, 7000, 12000]]
    took, spread = timeline.durations(marks, 2)
    np.testing.assert_allclose(took, [4.9, 3.0])
    np.testing.assert_allclose(spread, [2.0, 3.0])


def test_memory_that_cannot_be_observed_is_recorded_with_its_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = tmp_path / "memory.json"
    arguments = ["--shapes=tiny", "--tokens=64", "--implementations=xla,xla", "--gpus=1,1,1000"]
    assert memory.main([*arguments, f"--out={out}"]) == 1
    one, many = json.loads(out.read_text())
    assert one["error"] == "the allocator of 'cpu' devices does not count"
    assert many["error"].startswith("gpus is 1000 and this process has")
    assert capsys.readouterr().out.splitlines()[0].endswith(one["error"])
    assert report.of_layers([one, many]) == []  # no part of the table and the picture


def test_memory_that_was_observed_is_printed_and_appended(tmp_path, capsys, monkeypatch):
    seen = dict(peak_bytes=None, observed_bytes=3 << 30, device="a GPU", note="CUDA")
    monkeypatch.setattr(memory, "_in_a_process", lambda *arguments: seen | {"asked": arguments})
    out = tmp_path / "memory.json"
    arguments = ["--shapes=tiny", "--tokens=64", "--gpus=2", f"--out={out}", "--commit=abc1234"]
    assert memory.main([*arguments, "--implementations=ffi"]) == 0
    assert memory.main([*arguments, "--implementations=xla"]) == 0
    first, second = json.loads(out.read_text())
    assert first["asked"] == ["tiny", "layer", "ffi", 2, 64]
    assert second["asked"] == ["tiny", "layer", "xla", 2, 64]
    assert first["observed_bytes"] == 3 << 30 and first["commit"] == "abc1234"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == "tiny layer 2 ffi 3.00 GiB observed, - planned CUDA".split()


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--tokens=-1", "tokens is -1; it must be at least 1"),
        ("--shapes=", "'' is none of 'qwen3-30b-a3b'"),
        ("--passes=both", "'both' is none of 'forward'"),
        ("--gpus=0", "'0' has a number below 1"),
        ("--out=/proc/x.json", "out is /proc/x.json: "),
    ],
)
def test_wrong_arguments_of_memory_are_named(argument, message, capsys, monkeypatch):
    monkeypatch.setattr(memory, "_in_a_process", lambda *_: pytest.fail("observed all the same"))
    with pytest.raises(SystemExit) as stop:
        memory.main(["--shapes=tiny", argument])
    assert message in capsys.readouterr().err + str(stop.value)


def test_a_process_that_observes_takes_no_memory_beforehand(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(memory, "observe", lambda: dict(os.environ))
    assert memory._observe_or_say_why_not() == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_a_process_that_dies_is_recorded(monkeypatch):
    monkeypatch.setattr(memory, "_observe_or_say_why_not", os._exit)
    assert memory._in_a_process(3)["error"] == "its process died"


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_observed_memory_is_that_of_operands_results_and_workspace_at_least(
    implementation, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # of the process that it starts
    monkeypatch.setattr(layer._mesh, "platform", lambda: "gpu")
    seen = memory._in_a_process("tiny", "layer", implementation, 1, 4096)
    assert "error" not in seen, seen
    shape = layer.SHAPES["tiny"]
    weights = 2 * 3 * shape.experts * shape.hidden * shape.intermediate
    tokens = 2 * 4096 * shape.hidden
    config = MoEConfig(implementation=implementation)
    workspace = layer.workspace_bytes(shape, 4096, 1, config)
    assert workspace > 0 or implementation == "xla"
    # x, dy, y, dx; the weights and their gradients.
    assert 4 * tokens + 2 * weights + workspace <= seen["observed_bytes"]
    # XLA's libraries and its choice of algorithms take memory, too: up to 111 MiB has been seen.
    assert seen["observed_bytes"] <= seen["peak_bytes"] + 2**28
