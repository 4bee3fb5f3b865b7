"""An expert axis over two processes: "xla" runs, and the host handlers refuse with the way out."""

import pathlib

import pytest
from cases import run_processes

PROGRAM = pathlib.Path(__file__).parent / "op_process.py"


@pytest.mark.timeout(240)
def test_two_processes():
    outputs = run_processes(lambda address, i: [str(PROGRAM), address, str(i)], timeout=220)
    for output in outputs:
        assert "passed" in output
        assert "refused: config.implementation is 'ffi'" in output
        assert "'xla' runs on any backend" in output
