"""Eight virtual CPU devices for every test; GPU tests skip, with the reason, without a GPU."""

import os

# Both before jax is imported.
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from cases import require_ffi  # noqa: E402


@pytest.fixture(params=["xla", "ffi"])
def implementation(request):
    """Each implementation that runs on this machine."""
    if request.param == "ffi":
        require_ffi()
    return request.param


def pytest_collection_modifyitems(items):
    hopper = [d for d in jax.devices() if getattr(d, "compute_capability", None) == "9.0"]
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and len(hopper) < needed:
                reason = f"needs {needed} Hopper GPU(s), found {len(hopper)}"
                item.add_marker(pytest.mark.skip(reason=reason))
