"""Safetensors files: their headers, checked, and their tensors as memory maps, so that only what is
needed is read.

    8 bytes: length n of the header | n bytes of JSON: dtype, shape, place of every tensor | tensors

The `safetensors` package gives numpy no bfloat16, and cannot write one tensor of a file at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxmllm.config.schema import ConfigError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
LENGTH_BYTES = 8
COPIED_BYTES = 16 << 20  # copied at a time
LONGEST_HEADER = 100_000_000  # bytes, as in the format's own library


class FolderError(ConfigError):
    """A model folder that cannot be used; the message names file and key, and what to do."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor inside a file."""

    file: Path
    dtype: str  # as the format names it, not necessarily in DTYPES
    shape: tuple[int, ...]
    offset: int  # in the file
    size: int  # bytes

    def array(self, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
        """The tensor, memory-mapped."""
        return np.memmap(self.file, DTYPES[self.dtype], mode, self.offset, self.shape or (1,))

    def copy_from(self, other: StoredTensor) -> None:
        """Copy the bytes of a tensor of the same size and type, which need not be in `DTYPES`."""
        with other.file.open("rb") as source, self.file.open("r+b") as target:
            source.seek(other.offset)
            target.seek(self.offset)
            remaining = other.size
            while remaining:
                block = source.read(min(remaining, COPIED_BYTES))
                target.write(block)
                remaining -= len(block)


@dataclass(frozen=True)
class WeightFile:
    """The header of one file."""

    path: Path
    head: bytes  # all bytes before the first tensor
    size: int  # bytes of the whole file
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> WeightFile:
        """Read and check a header. Raises `FolderError`."""
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
                # Other files may begin with a huge number, and as many bytes would be read.
                if size < LENGTH_BYTES or not 0 < length <= min(
                    LONGEST_HEADER, size - LENGTH_BYTES
                ):
                    raise FolderError(_damage(path, f"a header of {length} bytes in {size}"))
                text = stream.read(length)
            header = json.loads(text)
        except OSError as error:
            raise FolderError(f"{path} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            # A `FolderError` is a ValueError, too; the one from above is complete.
            if isinstance(error, FolderError):
                raise
            raise FolderError(_damage(path, f"its header is no JSON ({error})")) from error
        begin = LENGTH_BYTES + length
        if not isinstance(header, dict):
            raise FolderError(_damage(path, "its header is no JSON object"))
        tensors = {
            key: _stored_tensor(path, key, entry, begin, size)
            for key, entry in header.items()
            if key != "__metadata__"
        }
        return cls(path, length.to_bytes(LENGTH_BYTES, "little") + text, size, tensors)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a file of tensors, all with types in `DTYPES`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # other readers ask for it
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[key] = {
            "dtype": names[tensor.dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # tensors begin at whole words
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor).tobytes())


def _stored_tensor(path: Path, key: str, entry: Any, begin: int, size: int) -> StoredTensor:
    """The tensor of a header's entry. Raises `FolderError` if the entry does not fit the file.

    Args:
      begin: byte of the file at which tensors begin.
      size: bytes of the file.
    """
    try:
        dtype = str(entry["dtype"])
        shape = tuple(map(int, entry["shape"]))
        start, end = map(int, entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise FolderError(_damage(path, f"{key} has no dtype, shape and data_offsets")) from error
    if begin + end > size:
        raise FolderError(
            f"{path} is truncated: {key} ends at byte {begin + end}, the file has {size}; copy it again"
        )
    bad = start < 0 or min(shape, default=0) < 0
    # Tensors of other types are at most copied, and the size of their numbers is not known.
    if dtype in DTYPES:
        bad = bad or end - start != math.prod(shape) * DTYPES[dtype].itemsize
    if bad:
        raise FolderError(_damage(path, f"{key} of {dtype}{list(shape)} at {start} to {end}"))
    return StoredTensor(path, dtype, shape, begin + start, end - start)


def _damage(path: Path, what: str) -> str:
    return f"{path} is no safetensors file ({what}); copy it again"
