"""An expert axis over two processes that share their GPUs' memory."""

from __future__ import annotations

import os
import pathlib

import pytest
from cases import run_processes

pytestmark = pytest.mark.gpu

PROGRAM = pathlib.Path(__file__).parent / "gpu_process.py"
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")


def run(scenario, gpus=lambda i: _VISIBLE[i]):
    """Runs both processes; process i sees the GPUs `gpus(i)`."""
    return run_processes(
        lambda address, i: [str(PROGRAM), address, str(i), scenario],
        timeout=220,
        env=lambda i: {
            "JAX_PLATFORMS": "cuda",
            "CUDA_VISIBLE_DEVICES": gpus(i),
            # The GPUs are also those of the process that runs the tests.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )


@pytest.mark.multigpu
@pytest.mark.timeout(240)
def test_bits_are_those_of_one_gpu():
    for output in run("bits"):
        assert "passed" in output


@pytest.mark.multigpu
@pytest.mark.timeout(240)
def test_a_peer_that_makes_no_workspace_or_no_call_is_named():
    """Each process sees both GPUs here, and drives one."""
    waiting, silent = run("late", lambda i: ",".join(_VISIBLE[:2]))
    assert "passed" in silent
    assert "process 0 waited 5 s (MoEConfig.timeout_s) for process 1 to make the" in waiting
    assert "rank 0 of 2 waited too long in phase 'dispatch' for rank 1" in waiting
    assert "all must be on one host; the 'xla' implementation does not need it" in waiting


@pytest.mark.timeout(240)
def test_two_processes_may_share_a_gpu():
    for output in run("bits", lambda i: _VISIBLE[0]):
        assert "passed" in output
