"""examples/benchmark_training.py: records of runs that end, fail, stop or do not fit."""

import json
import runpy
import subprocess
import sys

import benchmark_training as bench
import pytest
from benchmark_training import Outcome

SETTINGS = dict(
    precision="bf16",
    layers=2,
    parameters=1000,
    devices=2,
    batch=4,
    seq_len=32,
    device="cpu",
    flops_per_token=1e9,
)
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."


def metrics(step_s, loss, steps=8):
    return [
        dict(
            **dict(lm_loss=loss, step_s=step_s, tokens_per_s=128 / step_s, peak_bytes=2**30),
            imbalance=1.0 + step,
        )
        for step in range(steps)
    ]


def runs(monkeypatch, outcomes):
    """Replaces the training processes by their outcomes; returns the options they were given."""
    given = []

    def run(folder, options, time_limit):
        given.append(options)
        return outcomes[len(given) - 1]

    monkeypatch.setattr(bench, "run", run)
    return given


def test_runs_are_compared_and_appended(monkeypatch, tmp_path, capsys):
    outcomes = [
        Outcome(SETTINGS, metrics(0.5, 2.0), None),
        Outcome(SETTINGS, metrics(1, 2.5), None),
    ]
    given = runs(monkeypatch, outcomes)
    out = tmp_path / "records.json"
    out.write_text('[{"pass": "earlier"}]')
    drawn = {}
    monkeypatch.setattr(bench, "plot_losses", lambda path, losses: drawn.update({path: losses}))
    arguments = ["--commit=abc", f"--out={out}", "--steps", "8", "--lr=1e-3"]
    ffi, xla = bench.main([*arguments, f"--plot={tmp_path / 'losses.png'}"])
    assert drawn == {tmp_path / "losses.png": {"ffi": [2.0] * 8, "xla": [2.5] * 8}}
    assert given == [
        ["--model=tiny", f"--implementation={name}", "--steps", "8", "--lr=1e-3"]
        for name in ("ffi", "xla")
    ]
    assert json.loads(out.read_text()) == [{"pass": "earlier"}, ffi, xla]
    expected = dict(
        **{"shape": "tiny", "pass": "training_step", "implementation": "ffi", "layers": 2},
        **dict(gpus=2, tokens_per_gpu=64, ms=500.0, steps=8, steps_timed=3, loss=2.0, commit="abc"),
        **dict(tokens_per_s_per_gpu=128.0, model_tflops_per_gpu=0.128, peak_bytes=2**30),
        imbalance=7.0,  # of 6, 7 and 8, the steps timed
        losses=[2.0] * 8,
        **dict(device="cpu", options="--steps 8 --lr=1e-3", parameters=1000, precision="bf16"),
    )
    assert {name: ffi[name] for name in expected} == expected
    printed = capsys.readouterr().out.splitlines()
    assert "TFLOP/s a device, imbalance 7.00, loss 2.0000" in printed[0]
    assert printed[-1] == "loss of xla - loss of ffi = +0.50000; step time 2.00 times"


def test_a_folder_for_the_picture_is_asked_for_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("ran all the same"))
    with pytest.raises(SystemExit, match="there is no folder .*nowhere"):
        bench.main([f"--plot={tmp_path / 'nowhere' / 'a.png'}"])


def test_losses_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    bench.plot_losses(tmp_path / "losses.png", {"ffi": [3.0, 2.0, 1.0], "xla": [3.0, 2.1]})
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"


def test_what_does_not_fit_is_tried_with_fewer_layers(monkeypatch):
    outcomes = [
        Outcome({}, [], NO_MEMORY),
        Outcome(SETTINGS, metrics(0.5, 2.0), None),
        Outcome(SETTINGS, metrics(9, 3.0, steps=1), "stopped after 60 s"),
    ]
    given = runs(monkeypatch, outcomes)
    large, ffi, xla = bench.main(["--model=qwen3-30b-a3b", "--layers=20,16,12"])
    assert [options[2] for options in given] == ["--layers=20", "--layers=16", "--layers=16"]
    assert (large["layers"], large["error"], large["ms"]) == (20, NO_MEMORY, None)
    assert "error" not in ffi
    assert (xla["error"], xla["steps"], xla["ms"]) == ("stopped after 60 s", 1, 9000.0)


def test_the_last_number_of_layers_is_not_tried_twice(monkeypatch):
    given = runs(monkeypatch, [Outcome({}, [], NO_MEMORY)])
    (record,) = bench.main(["--implementations=xla", "--layers=4"])
    assert len(given) == 1 and record["error"] == NO_MEMORY


@pytest.mark.parametrize(
    "log, reason",
    [
        (f"step 1\nTraceback ...\n  {NO_MEMORY}\nand more\n", NO_MEMORY),
        ("Traceback ...\nValueError: no\n\n", "ValueError: no"),
        ("", "no output"),
    ],
)
def test_the_reason_is_the_line_that_says_it(log, reason):
    assert bench.reason(log) == reason


def test_a_process_that_trains_and_one_that_cannot(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the text of a benchmark " * 200)
    options = ["--data", str(text), "--layers=1", "--seq-len=32", "--steps=2", "--sample-tokens=0"]
    whole = bench.run(tmp_path / "whole", options, 200)
    assert whole.error is None, whole.error
    record = bench.record(whole, {}, model="tiny", implementation="auto", layers=1)
    assert record["steps"] == 2 and record["ms"] > 0 and record["gpus"] == 8
    assert record["tokens_per_gpu"] == 32
    assert 1 <= record["imbalance"] <= 4  # 2 of 8 experts have everything
    failed = bench.run(tmp_path / "failed", [*options, "--lr=-1"], 200)
    assert failed.settings == {} and failed.metrics == []
    assert failed.error == "train_qwen3_moe.py: --lr is -1.0; it must be a finite number above 0"


def test_the_exit_status_tells_that_no_run_ended_well(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "ValueError: no\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    monkeypatch.setattr(sys, "argv", [bench.__file__, "--commit=abc", "--implementations=xla"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(bench.__file__, run_name="__main__")
    assert stop.value.code == 1
