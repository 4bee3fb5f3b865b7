"""Loading the compiled module: once, or a reason that is kept."""

import threading
from types import SimpleNamespace

import jax
import pytest

from jax_megamoe import _runtime


@pytest.fixture
def fresh(monkeypatch):
    """The runtime as in a new process, with a stand-in for the module; counts registrations."""
    registered = []
    module = SimpleNamespace(
        ffi_api_version=(0, 3),
        with_cuda=False,
        host_types=lambda: {"state": {}},
        host_targets=lambda: {"forward": {}, "backward": {}},
        cuda_types=dict,
        cuda_targets=dict,
    )
    monkeypatch.setattr(_runtime, "_module", None)
    monkeypatch.setattr(_runtime, "_reason", None)
    monkeypatch.setattr(_runtime.importlib, "import_module", lambda name: module)
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(jax.ffi, name, lambda name, _, platform: registered.append(name))
    return SimpleNamespace(module=module, registered=registered)


def test_many_threads_register_once(fresh):
    threads = [threading.Thread(target=_runtime.unavailable) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The type first: the targets' stages name it.
    assert fresh.registered == ["state", "forward", "backward"]
    assert _runtime.load() is fresh.module


def test_module_newer_than_the_runtime_is_not_registered(fresh, monkeypatch):
    monkeypatch.setattr(_runtime, "_runtime_ffi_api_version", lambda: (0, 2))
    message = r"compiled against XLA FFI 0\.3 and jaxlib .* offers 0\.2; build the package against"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            _runtime.load()
    assert not fresh.registered
    assert not _runtime.with_cuda()


def test_reason_is_kept(fresh, monkeypatch):
    def fail(name):
        raise ImportError("libfoo.so.1 is missing")

    monkeypatch.setattr(_runtime.importlib, "import_module", fail)
    assert "cannot be imported (libfoo.so.1 is missing); install" in _runtime.unavailable()
    monkeypatch.setattr(_runtime.importlib, "import_module", lambda name: fresh.module)
    assert "libfoo.so.1" in _runtime.unavailable()


def test_version_of_the_runtime_is_read_from_its_headers():
    version = _runtime._runtime_ffi_api_version()
    assert (0, 3) <= version < (1, 0)
