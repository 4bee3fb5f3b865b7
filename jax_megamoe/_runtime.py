"""The compiled module: loaded and registered with XLA once, or the reason why not."""

from __future__ import annotations

import importlib
import pathlib
import re
import threading
from types import ModuleType

import jax
import jaxlib

_lock = threading.Lock()
_module: ModuleType | None = None
_reason: str | None = None


def load() -> ModuleType:
    """Returns the compiled module with its custom calls registered.

    Raises:
      RuntimeError: the module cannot be used here; the message says why.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    return _module


def unavailable() -> str | None:
    """Returns why the compiled module cannot be used in this process, or None if it can.

    The first call loads the module and registers its custom calls; the answer never changes.
    """
    global _module, _reason
    with _lock:
        if _module is None and _reason is None:
            try:
                _module = _load_and_register()
            except RuntimeError as error:
                _reason = str(error)
        return _reason


def with_cuda() -> bool:
    """Returns whether the compiled module can be used and has the CUDA handlers."""
    return unavailable() is None and _module.with_cuda


def _load_and_register() -> ModuleType:
    try:
        module = importlib.import_module("jax_megamoe._ffi")
    except ImportError as error:
        raise RuntimeError(
            f"the compiled module jax_megamoe._ffi cannot be imported ({error}); install the "
            "package with pip so that it is built"
        ) from error
    # A handler newer than the runtime would not fail alone: the whole backend fails to start.
    built, runs = module.ffi_api_version, _runtime_ffi_api_version()
    if runs is not None and built > runs:
        raise RuntimeError(
            f"jax_megamoe._ffi was compiled against XLA FFI {_dotted(built)} and jaxlib "
            f"{jaxlib.__version__} offers {_dotted(runs)}; build the package against the headers "
            "of the oldest jaxlib in use"
        )
    # Before a backend exists, jax keeps registrations and hands it the targets before their types,
    # which it refuses; then it does not start at all.
    jax.devices()
    for platform, types, targets in (
        ("cpu", module.host_types(), module.host_targets()),
        ("CUDA", module.cuda_types(), module.cuda_targets()),
    ):
        for name, registration in types.items():
            jax.ffi.register_ffi_type(name, registration, platform=platform)
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform)
    return module


def _runtime_ffi_api_version() -> tuple[int, int] | None:
    """Reads the version from the headers that jaxlib ships; no function returns it."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return tuple(int(n[1]) for n in numbers) if all(numbers) else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
