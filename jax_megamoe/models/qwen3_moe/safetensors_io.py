"""Safetensors files read slice by slice and written tensor by tensor, in bounded memory.

The format: 8 bytes with the length of a JSON header, little endian; the header, a dict from tensor
name to dtype, shape and byte range; the tensors, row-major. See
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; `code` is the format's name of its dtype."""

    file: Path
    code: str
    shape: tuple[int, ...]
    offset: int

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A view of a slice of the file; no more than what is copied from it is read."""
        data = np.memmap(self.file, DTYPES[self.code], "r", self.offset, self.shape)
        return data[index]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the header cannot be read, or the file ends before its tensors do.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file: its header has {length} bytes")
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{file} has {size} bytes, but {name} ends at {8 + length + end}")
        tensors[name] = StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin
        )
    return tensors


def write_file(
    file: Path,
    entries: dict[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a file; `tensors` yields the arrays of `entries`, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + nbytes(dtype, shape)
        header[name] = {
            "dtype": _CODES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for (name, (dtype, shape)), (given, array) in zip(entries.items(), tensors, strict=True):
            assert (given, array.dtype, array.shape) == (name, dtype, shape)
            f.write(np.ascontiguousarray(array).view(np.uint8).data)


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)
