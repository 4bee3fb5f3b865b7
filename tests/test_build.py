"""The package as built and installed: what it links, what importing it does, what its examples and
CI do."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def _module_path() -> str:
    spec = importlib.util.find_spec("jax_megamoe._ffi")
    if spec is None:
        pytest.skip("the compiled module is not built")
    return spec.origin


def _binutil(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} (binutils) is not installed")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


def test_module_needs_only_the_c_and_cpp_runtime():
    """Neither libcuda nor libcudart: the module loads on a machine without driver or toolkit."""
    dynamic = _binutil("readelf", "-dW", _module_path())
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", dynamic))
    assert "libc" in needed
    system = {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "libdl", "librt"}
    assert {n for n in needed if not n.startswith("ld-linux")} <= system


def test_module_leaves_no_cuda_symbol_undefined():
    undefined = _binutil("nm", "-D", "--undefined-only", _module_path()).split()
    assert "malloc" in {symbol.split("@")[0] for symbol in undefined}
    assert [s for s in undefined if re.match(r"_*cu(da)?[A-Z]", s)] == []


def test_module_exports_its_init_function_alone():
    """Two FFI libraries of one process must not bind to each other's handlers."""
    lines = _binutil("nm", "-D", "--defined-only", _module_path()).splitlines()
    strong = {name for _, kind, name in (line.split() for line in lines) if kind in "TDBR"}
    assert strong - {"__bss_start", "_edata", "_end", "_init", "_fini"} == {"PyInit__ffi"}


def test_headers_are_those_of_the_oldest_supported_jaxlib():
    """Newer FFI headers would break the whole backend of the oldest runtime."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built_with = [r for r in project["build-system"]["requires"] if r.startswith("jaxlib")]
    supported = [r for r in project["project"]["dependencies"] if r.startswith("jaxlib")]
    assert [r.replace("==", ">=") for r in built_with] == supported


def test_readme_shows_the_command_that_ci_runs():
    command = re.search(r'^TEST_COMMAND="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.M)[1]
    assert re.search(rf"^{re.escape(command)}$", (ROOT / "README.md").read_text(), re.M)


def test_readme_examples_run():
    """Each Python block of the README runs as it stands, in a process of its own."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, cwd=ROOT, timeout=200)


_MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "jax_megamoe").rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", _MODULES)
def test_docstring_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_import_starts_no_backend():
    """`jax.distributed.initialize` and XLA_FLAGS must still work after the import."""
    program = (
        "import jax_megamoe; from jax._src import xla_bridge; "
        "raise SystemExit(bool(xla_bridge._backends))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_package_carries_its_types():
    assert (
        pathlib.Path(importlib.util.find_spec("jax_megamoe").origin).parent / "py.typed"
    ).exists()


_CLEAN = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 136 bytes smem
ptxas info    : Function properties for helper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


@pytest.mark.parametrize(
    "log, fault",
    [
        (_CLEAN, None),
        (_CLEAN.replace("0 bytes spill st", "16 bytes spill st", 1), "forward spills 16 bytes"),
        (
            "4 bytes spill loads".join(_CLEAN.rsplit("0 bytes spill loads", 1)),
            "helper spills 4 bytes",
        ),
        (_CLEAN.replace("0 bytes stack", "24 bytes stack", 1), "stack frame of 24 bytes"),
        (_CLEAN + "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async", "C7510"),
        (_CLEAN + "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async", "C7511"),
        ("-- Configuring done", "no ptxas report"),
    ],
)
def test_ci_reads_the_compilers_report(tmp_path, log, fault):
    path = tmp_path / "log"
    path.write_text(log)
    report = subprocess.run(
        [sys.executable, ROOT / ".ci" / "ptxas_report.py", path], capture_output=True, text=True
    )
    if fault is None:
        assert report.returncode == 0 and "FAULT" not in report.stdout
        assert "168 registers" in report.stdout and "forward" in report.stdout
    else:
        assert report.returncode == 1
        assert fault in report.stdout
