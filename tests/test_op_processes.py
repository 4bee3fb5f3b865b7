"""An expert axis over two processes: "xla" runs, and the host handlers refuse with the way out."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.timeout(240)
def test_two_processes():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, str(TESTS / "op_process.py"), address]
    processes = [
        subprocess.Popen(
            [*command, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=220)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, output in zip(processes, outputs, strict=True):
        assert p.returncode == 0, output
        assert "passed" in output
        assert "refused: config.implementation is 'ffi'" in output
        assert "'xla' runs on any backend" in output
