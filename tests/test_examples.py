"""The example scripts run, and the gradient pattern that one of them teaches is right."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec
ROOT = Path(__file__).parent.parent


def run(script, *args, cwd):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_layer_example(tmp_path):
    small = ("--batch", "8", "--seq-len", "4", "--hidden", "64", "--intermediate", "64")
    out = run("layer.py", *small, "--experts", "8", cwd=tmp_path)
    assert re.search(r"^y bfloat16\[8, 4, 64\]", out, re.M)
    norms = re.findall(r"gradient of (\w+) .* norm (\S+)", out)
    assert {name for name, _ in norms} == {"router", "w_gate", "w_up", "w_down", "x"}
    assert all(0 < float(norm) < 100 for _, norm in norms)
    counts = [int(n) for n in re.findall(r"^ +\d+ +(\d+) #*$", out, re.M)]
    assert len(counts) == 8 and sum(counts) == 8 * 4 * 2
    assert (tmp_path / "expert_load.png").read_bytes()[:4] == b"\x89PNG"


def test_shard_map_training_example(tmp_path):
    out = run("shard_map_training.py", "--steps", "60", "--tokens", "512", cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"loss (\S+) nats", out)]
    assert len(losses) == 4
    # ln(256) = 5.55 is no knowledge at all; the bytes' frequencies alone give about 3.1.
    assert losses[0] > 5 and losses[-1] < 3 and losses == sorted(losses, reverse=True)


def load(script):
    flags = os.environ.get("XLA_FLAGS")
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / "examples" / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["XLA_FLAGS"] = flags  # the script sets it for its own run
    return module


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("layer.py", "--nope", "unrecognized arguments: --nope"),
        ("layer.py", "--implementation=none", "unrecognized arguments: --implementation=none"),
        ("layer.py", "--batch=x", "argument --batch: invalid size value: 'x'"),
        ("layer.py", "--batch=0", "argument --batch: 0 is below 1"),
        ("layer.py", "--seq-len=0", "argument --seq-len: 0 is below 1"),
        ("layer.py", "--hidden=-64", "argument --hidden: -64 is below 1"),
        ("layer.py", "--intermediate=0", "argument --intermediate: 0 is below 1"),
        ("layer.py", "--experts=0", "argument --experts: 0 is below 1"),
        ("layer.py", "--top-k=0", "argument --top-k: 0 is below 1"),
        ("layer.py", "--expert-parallel=0", "argument --expert-parallel: 0 is below 1"),
        ("layer.py", "--batch=12", "--batch is 12; it must be a multiple of the 8 devices"),
        ("layer.py", "--expert-parallel=16", "--expert-parallel is 16; it must divide the 8 dev"),
        ("layer.py", "--experts=6", "--experts is 6; it must be a multiple of the 4 devices that"),
        ("layer.py", "--top-k=17", "--top-k is 17; it must be at most --experts, 16"),
        (
            "layer.py",
            "--picture=no/where.png",
            "argument --picture: 'no/where.png' must be a file in a folder that is there",
        ),
        ("layer.py", "--picture=x.foo", "argument --picture: 'x.foo' must end in .pdf, .png"),
        ("shard_map_training.py", "--nope", "unrecognized arguments: --nope"),
        ("shard_map_training.py", "--steps=0", "argument --steps: 0 is below 1"),
        ("shard_map_training.py", "--tokens=-8", "argument --tokens: -8 is below 1"),
        ("shard_map_training.py", "--tokens=12", "--tokens is 12; it must be a multiple of the 8"),
        ("shard_map_training.py", "--lr=nan", "argument --lr: nan is no finite number above 0"),
        ("shard_map_training.py", "--expert-parallel=0", "argument --expert-parallel: 0 is below"),
        ("shard_map_training.py", "--expert-parallel=3", "--expert-parallel is 3; it must divide"),
    ],
)
def test_wrong_arguments_end_in_one_sentence(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        load(script).main()
    assert stop.value.code == 2
    usage, _, error = capsys.readouterr().err.partition(f"{script}: error: ")
    assert usage.startswith("usage: ") and error.count("\n") == 1
    assert error.startswith(message)


@pytest.fixture(scope="module")
def example():
    return load("shard_map_training.py")


def gradients(example, data, expert, check_vma=True):
    """Loss and gradients by the pattern of the script's docstring, for each check_vma."""
    mesh = jax.make_mesh((data, expert), example.AXES)
    params = example.init(jax.random.key(0))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in example.SPECS.items()}
    windows = np.random.default_rng(0).integers(256, size=(64, example.CONTEXT + 1), dtype=np.int32)

    def unchecked(params, windows):
        def share(params):
            total, aux = example.loss_of_shard(params, windows)
            return total / jax.lax.axis_size(example.AXES), (total, aux)

        (_, result), grads = jax.value_and_grad(share, has_aux=True)(params)
        for name, spec in example.SPECS.items():
            grads[name] = jax.lax.psum(grads[name], [a for a in example.AXES if a not in spec])
        return result, grads

    checked = jax.value_and_grad(example.loss_of_shard, has_aux=True)
    f = jax.shard_map(
        checked if check_vma else unchecked,
        mesh=mesh,
        in_specs=(example.SPECS, P(example.AXES)),
        out_specs=((P(), (P(), P("expert"))), example.SPECS),
        check_vma=check_vma,
    )
    windows = jax.device_put(windows, NamedSharding(mesh, P(example.AXES)))
    (total, (lm_loss, load)), grads = jax.jit(f)(jax.device_put(params, shardings), windows)
    assert load.sum() == 64 * example.TOP_K
    return jax.device_get((total, lm_loss, grads))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_the_shard_map_pattern(example, check_vma):
    total, lm_loss, grads = gradients(example, 1, 1)
    got_total, got_lm_loss, got_grads = gradients(example, 2, 2, check_vma)
    assert got_total == pytest.approx(total, rel=1e-5)
    assert got_lm_loss == pytest.approx(lm_loss, rel=1e-5)
    for name, want in grads.items():
        error = np.linalg.norm(got_grads[name] - want) / np.linalg.norm(want)
        assert np.linalg.norm(want) > 1e-4 and error < 1e-5, name
