"""`python -m jax_megamoe.info`: what it says here, and on machines that this one is not."""

from __future__ import annotations

import math
import subprocess
import sys

import jax
import pytest

from jax_megamoe import _grouped, _mesh, _runtime, _workspace, info

_SIZES = dict(tokens=1000, hidden=256, intermediate=128, experts=16, top_k=3, ranks=4)
_ARGUMENTS = [f"--{name.replace('_', '-')}={value}" for name, value in _SIZES.items()]


@pytest.fixture
def compiled():
    if _runtime.unavailable() is not None:
        pytest.skip(_runtime.unavailable())


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that makes the package see another machine."""

    def pretend(backend, *, reason=None, with_cuda=True, capability="9.0", tokamax=False):
        devices = [type("Device", (), {"compute_capability": capability})]
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "local_devices", lambda *_, **__: devices)
        monkeypatch.setattr(_mesh, "platform", lambda: backend)
        monkeypatch.setattr(_runtime, "unavailable", lambda: reason)
        monkeypatch.setattr(_runtime, "with_cuda", lambda: reason is None and with_cuda)
        monkeypatch.setattr(_grouped, "_has_tokamax", lambda: tokamax)
        return {choice.name: choice.why_not for choice in info.choices()}

    return pretend


def _run(*arguments, program="from jax_megamoe.info import main; raise SystemExit(main())"):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )


def test_every_way_that_does_not_run_has_a_reason_of_one_line(capsys):
    assert info.main(_ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    for choice in info.choices():
        (line,) = [line for line in lines if line.startswith(f"  {choice.name} ")]
        verdict = line.removeprefix(f"  {choice.name}").strip()
        assert verdict.startswith("yes, with" if choice.why_not is None else "no: ")
    assert sum('"auto" (the default)' in line for line in lines) == 1


def test_runs_as_a_module_and_names_versions_and_devices():
    report = subprocess.run(
        [sys.executable, "-m", "jax_megamoe.info", *_ARGUMENTS],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert report.returncode == 0, report.stderr
    assert f"jax {jax.__version__}" in report.stdout
    assert f"{jax.device_count()} x {jax.devices()[0].device_kind}" in report.stdout
    assert "bf16     ffi, xla" in report.stdout or _runtime.unavailable() is not None


def test_works_without_the_compiled_module():
    program = (
        "import sys; sys.modules['jax_megamoe._ffi'] = None\n"
        "import jax, jax.numpy as jnp\n"
        "from jax_megamoe import info, moe_mlp\n"
        "w = jnp.ones((2, 4, 4))\n"
        "y = moe_mlp(jnp.ones((3, 4)), jnp.zeros((3, 1), int), jnp.ones((3, 1)), w, w, w)\n"
        "assert y.shape == (3, 4)\n"
        "raise SystemExit(info.main())"
    )
    report = _run(program=program)
    assert report.returncode == 0, report.stderr
    assert "none: the compiled module jax_megamoe._ffi cannot be imported" in report.stdout
    assert "ffi on the host             no: the compiled module" in report.stdout
    assert "the numbers need the compiled module" in report.stdout


def test_says_when_jax_has_no_backend():
    program = (
        "import os; os.environ['JAX_PLATFORMS'] = 'nonsense'\n"
        "from jax_megamoe.info import main; raise SystemExit(main())"
    )
    report = _run(program=program)
    assert report.returncode == 1, report.stderr
    assert "JAX cannot start its backend" in report.stdout and "nonsense" in report.stdout


def test_module_may_be_loaded_before_a_backend_exists(compiled):
    """Handlers registered too early would keep the backend from starting."""
    program = "import jax; from jax_megamoe import _runtime; _runtime.load(); print(jax.devices())"
    report = _run(program=program)
    assert report.returncode == 0, report.stderr
    assert "Device" in report.stdout


@pytest.mark.parametrize(
    "name, facts, reason",
    [
        ("ffi on CUDA", dict(backend="gpu"), None),
        ("ffi on CUDA", dict(backend="gpu", capability="8.0"), "compute capability 8.0"),
        ("ffi on CUDA", dict(backend="gpu", with_cuda=False), "built without CUDA"),
        ("ffi on CUDA", dict(backend="gpu", reason="no module"), "no module"),
        ("ffi on CUDA", dict(backend="cpu"), "JAX runs on 'cpu'"),
        ("ffi on CUDA", dict(backend="cpu", with_cuda=False), "built without CUDA"),
        ("ffi on the host", dict(backend="cpu"), None),
        ("ffi on the host", dict(backend="gpu"), "JAX runs on 'gpu'"),
        ("ffi on the host", dict(backend="cpu", reason="no module"), "no module"),
        ("xla with tokamax", dict(backend="gpu", tokamax=True), None),
        ("xla with tokamax", dict(backend="cpu"), "JAX runs on 'cpu'"),
        ("xla with tokamax", dict(backend="gpu"), "tokamax is not installed"),
        ("xla with lax.ragged_dot", dict(backend="tpu"), None),
        ("xla with lax.ragged_dot", dict(backend="gpu"), "on a GPU it multiplies every row"),
        ("xla with lax.ragged_dot", dict(backend="cpu"), "on a CPU it multiplies every row"),
        ("xla with a loop over tiles", dict(backend="cpu"), None),
        ("xla with a loop over tiles", dict(backend="gpu"), None),
        ("xla with a loop over tiles", dict(backend="gpu", tokamax=True), "tokamax is there"),
        ("xla with a loop over tiles", dict(backend="tpu"), "JAX runs on 'tpu'"),
    ],
)
def test_reasons_on_other_machines(machine, name, facts, reason):
    why_not = machine(**facts)[name]
    if reason is None:
        assert why_not is None
    else:
        assert reason in why_not and "\n" not in why_not


def test_precisions_are_those_that_the_operation_accepts(machine):
    machine("cpu", reason="no module")
    assert info.precisions()["bf16"] == ("xla",)
    machine("cpu")
    assert info.precisions() == {
        "bf16": ("ffi", "xla"),
        "fp8": (),
        "mxfp8": (),
        "fp8_bwd": (),
    }


@pytest.mark.parametrize(
    "kernels, row_bytes, several_processes",
    [("gpu", 2, False), ("gpu", 2, True), ("cpu", 4, False)],
)
@pytest.mark.parametrize(
    "hidden, intermediate, experts, ranks, top_k, tokens",
    [
        (2048, 768, 128, 8, 8, 16384),
        (4096, 1536, 128, 1, 8, 16384),
        (256, 192, 8, 8, 2, 16384),
        (64, 64, 64, 8, 1, 16384),
        (64, 64, 64, 8, 2, 128),
    ],
)
def test_formula_gives_the_bytes_of_the_layout(
    compiled,
    kernels,
    row_bytes,
    several_processes,
    hidden,
    intermediate,
    experts,
    ranks,
    top_k,
    tokens,
):
    plan = dict(ranks=ranks, tokens=tokens, top_k=top_k)
    sizes = dict(plan, hidden=hidden, intermediate=intermediate, experts=experts)
    rows = _workspace.capacity_rows(**plan, local_experts=experts // ranks, capacity_factor=2.0)
    terms = dict(T=tokens, K=top_k, H=hidden, I=intermediate, E=experts, R=ranks, C=rows)
    terms |= dict(row_bytes=row_bytes, G=int(kernels == "gpu"), ceil=math.ceil)
    terms["S"] = int(several_processes or kernels == "cpu")
    formula = eval(info.WORKSPACE_FORMULA, terms)
    bytes_of_rank = info.workspace_bytes(
        kernels, **sizes, capacity_factor=2.0, several_processes=several_processes
    )
    assert bytes_of_rank == pytest.approx(formula, rel=6e-3)


@pytest.mark.parametrize("kernels, row_bytes", [("gpu", 2), ("cpu", 4)])
def test_workspace_grows_with_the_capacity_factor_alone(compiled, kernels, row_bytes):
    small, large = (info.workspace_bytes(kernels, **_SIZES, capacity_factor=f) for f in (1.0, 3.0))
    rows = 2 * _SIZES["tokens"] * _SIZES["top_k"]
    bytes_of_row = row_bytes * (2 * _SIZES["hidden"] + 3 * _SIZES["intermediate"])
    assert abs(large - small - rows * bytes_of_row) <= 128 * bytes_of_row


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--experts=6", "--ranks=4"], "experts is 6 and ranks is 4"),
        (["--tokens=0"], "tokens is 0"),
        (["--top-k=129"], "top_k is 129; it must be at most the number of experts, 128"),
        (["--capacity-factor=-1"], "capacity_factor is -1.0; it must be a finite number above 0"),
        (["--tokens=999999999"], "ranks * tokens * top_k is 63999999936; it must not exceed"),
    ],
)
def test_refuses_a_shape_that_cannot_be(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        info.main(arguments)
    assert complaint in capsys.readouterr().err
