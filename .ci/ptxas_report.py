"""Reads nvcc's -Xptxas -v report out of a build log and fails on what costs speed.

Usage: python .ci/ptxas_report.py LOG
Prints one line a kernel. Exit status 1 for a spill, a stack frame in a kernel, a warning that
wgmma instructions were serialised, or a log without any kernel.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys

# ptxas serialised the wgmma instructions; the number (C7508 to C7514) tells the cause.
_SERIALISED = re.compile(r"\(C75\d\d\).*|Potential Performance Loss.*")
_ENTRY = re.compile(r"Compiling entry function '(.+)' for")
_FUNCTION = re.compile(r"Function properties for (.+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclasses.dataclass
class Function:
    """What ptxas says about one device function."""

    name: str
    is_kernel: bool = False
    stack: int = 0
    spilled: int = 0
    registers: int = 0


def read(log: str) -> tuple[list[Function], list[str]]:
    """Returns the functions of a build log and its warnings about serialised wgmma."""
    functions: list[Function] = []
    warnings: list[str] = []
    kernels: set[str] = set()
    for line in log.splitlines():
        if match := _SERIALISED.search(line):
            warnings.append(match.group(0))
        elif match := _ENTRY.search(line):
            kernels.add(match.group(1))
        elif match := _FUNCTION.search(line):
            functions.append(Function(match.group(1), is_kernel=match.group(1) in kernels))
        elif (match := _MEMORY.search(line)) and functions:
            functions[-1].stack = int(match.group(1))
            functions[-1].spilled = int(match.group(2)) + int(match.group(3))
        elif (match := _REGISTERS.search(line)) and functions:
            functions[-1].registers = int(match.group(1))
    return functions, warnings


def faults(functions: list[Function], warnings: list[str]) -> list[str]:
    """Returns one sentence for each thing that must not be in a report."""
    found = list(warnings)
    if not any(f.is_kernel for f in functions):
        found.append("the log has no ptxas report of any kernel")
    for f in functions:
        if f.spilled:
            found.append(f"{f.name} spills {f.spilled} bytes of registers")
        if f.is_kernel and f.stack:
            found.append(f"{f.name} has a stack frame of {f.stack} bytes")
    return found


def demangle(text: str) -> str:
    """Writes C++ names as in the source, where binutils is installed."""
    if shutil.which("c++filt") is None:
        return text
    return subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True).stdout


def main() -> int:
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        functions, warnings = read(demangle(log.read()))
    for f in functions:
        if f.is_kernel:
            print(f"{f.registers:4d} registers {f.stack:5d} stack {f.spilled:5d} spilled  {f.name}")
    found = faults(functions, warnings)
    for sentence in found:
        print("FAULT:", sentence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
