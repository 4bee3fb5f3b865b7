"""Eight virtual CPU devices for every test; GPU tests skip, with the reason, without a GPU.

Where there are GPUs the CPU stays the default, for the tests that want eight devices; tests marked
`gpu` or `multigpu` get the first GPU as the default device.
"""

import importlib.util
import os
import pathlib

# All before jax is imported.
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Eight devices share a few cores: one that waits long is no deadlock.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
)
_given = os.environ.get("XLA_FLAGS", "")
_missing = [flag for flag in _FLAGS if flag.split("=")[0] not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_missing]).strip()
_plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_cuda = pathlib.Path("/dev/nvidiactl").exists() and any(map(importlib.util.find_spec, _plugins))
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if _cuda else "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402
from cases import require_ffi  # noqa: E402


@pytest.fixture(params=["xla", "ffi"])
def implementation(request):
    """Each implementation that runs on this machine."""
    if request.param == "ffi":
        require_ffi()
    return request.param


@pytest.fixture(autouse=True)
def default_device(request):
    if any(request.node.get_closest_marker(m) for m in ("gpu", "multigpu")):
        with jax.default_device(jax.devices("gpu")[0]):
            yield
    else:
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_programs():
    """Lets them go after each file.

    Those for CPUs take mappings of memory, of which Linux gives a process 65,530. The programs of
    all tests together come near it, and beyond it LLVM crashes.
    """
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items):
    hopper = [d for d in _gpus() if d.compute_capability == "9.0"]
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and len(hopper) < needed:
                reason = f"needs {needed} Hopper GPU(s), found {len(hopper)}"
                item.add_marker(pytest.mark.skip(reason=reason))


def _gpus():
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []
