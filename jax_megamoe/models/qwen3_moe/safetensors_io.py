"""Safetensors files read slice by slice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16, by which safetensors asks for it)
import numpy as np
from safetensors import SafetensorError, safe_open

CODES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open file; `code` is the format's name of its dtype."""

    file: Path
    key: str
    code: str
    shape: tuple[int, ...]
    handle: Any

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of a slice; no more than that is read."""
        return self.handle.get_slice(self.key)[index or (slice(None),) * len(self.shape)]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the header cannot be read, or the file ends before its tensors do.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        handle = safe_open(file, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    tensors = {}
    for key in handle.keys():
        view = handle.get_slice(key)
        shape = tuple(view.get_shape())
        tensors[key] = StoredTensor(file, key, view.get_dtype(), shape, handle)
    return tensors
