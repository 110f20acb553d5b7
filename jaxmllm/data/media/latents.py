"""Latents that an autoencoder has made, from .npy and .safetensors files -> patches.

    file --header--> type, [channels, (frames,) height, width]          measured once, for the index
    file --> float32 --(x - mean) / std--> [frames, height, width, channels] --> [slots, F]

A file is read, not mapped into memory: all of it is needed, and a file that is cut while it is
mapped would end the process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from tokenize import TokenError
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from jaxmllm.data.media.generated import Generated, patches_of
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.mpeg import read
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference, Stream, size_of
from jaxmllm.row_format import RowFormat

TENSOR_TYPES = {  # of safetensors
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
}
MAX_TENSORS_HEADER = 1 << 20  # bytes; the header of one tensor has about a hundred
# numpy parses an .npy header as Python, so a damaged one can raise any of these; one that is nested
# too deep raises a MemoryError
NPY_FAILURES = (
    *(ValueError, TypeError, IndexError, OverflowError),
    *(SyntaxError, TokenError, RecursionError, MemoryError),
)
_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class GeneratedLatents(Generated):
    """The diffusion modality of models that draw latents.

    A slot holds one patch as float32 [patch_frames, patch_size, patch_size, channels] flattened.
    `mean` and `std` have one value for all channels, or one for each.
    """

    channels: int
    patch_frames: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_frames: int
    shorten: bool  # cut clips with more than `max_frames`, instead of refusing them
    centred: bool = False
    diagonal: bool = field(default=False, repr=False)  # lengths do not depend on it
    crossed: bool = False

    formats = ("NPY", "SAFETENSORS")

    @cached_property
    def format(self) -> RowFormat:
        return RowFormat(
            features=self.channels * self.patch_frames * self.patch_size**2,
            dtype=np.dtype(np.float32),
            slots_per_token=1,
            stride=1,
            alignment=1,
            axes=(0, 1, 2),
        )

    def measure(self, media: MediaReference) -> Shape:
        """Patch grid from the header. Raises `MediaError`: missing_file, broken_latents_header,
        truncated_latents, wrong_latents_length, unsupported_latents, other_channels,
        too_many_frames, divided_patches."""
        with media.open() as file:
            return self._shape(_locate_array(file, media), media)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Patches: float32 [length, features]. Raises `MediaError`: those of `measure`,
        shape_changed."""
        with media.open() as file:
            stored = _locate_array(file, media)
            if (shape_now := self._shape(stored, media)) != shape:
                raise MediaError(
                    "shape_changed",
                    f"{media} was indexed as {shape} patches but is {shape_now} now",
                )
            values = stored.array(file, media)
        frames = values.reshape(len(values), -1, *values.shape[-2:])
        latents = np.moveaxis(frames[:, : shape[0] * self.patch_frames], 0, -1).astype(np.float32)
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # filling rows checks the result
            return patches_of((latents - mean) / std, self.patch_frames, self.patch_size)

    def _shape(self, stored: _ArrayLocation, media: MediaReference) -> Shape:
        """Patch grid of a stored array. Raises `MediaError` if the model has no such latents."""
        sizes = stored.shape
        if len(sizes) not in (3, 4) or min(sizes) < 1:
            raise MediaError(
                "unsupported_latents",
                f"{media} holds numbers of shape {[*sizes]}; latents have [channels, height, width] or "
                "[channels, frames, height, width]",
            )
        if sizes[0] != self.channels:
            raise MediaError(
                "other_channels",
                f"{media} has {sizes[0]} channels, but model.diffusion.channels is {self.channels}",
            )
        frames = self._used_frames(sizes[1] if len(sizes) == 4 else 1, media)
        patches = []
        for what, size, key in (
            ("frames", frames, "patch_frames"),
            ("rows", sizes[-2], "patch_size"),
            ("columns", sizes[-1], "patch_size"),
        ):
            patch_count, remainder = divmod(size, getattr(self, key))
            if remainder:
                raise MediaError(
                    "divided_patches",
                    f"{media} has {size} {what}, no multiple of model.diffusion.{key} = {getattr(self, key)}",
                )
            patches.append(patch_count)
        time, height, width = patches
        return time, height, width

    def _used_frames(self, frames: int, media: MediaReference) -> int:
        """Number of frames that are used of `frames`."""
        if frames > 1 and not isinstance(media, Clip):
            raise MediaError(
                "too_many_frames",
                f"{media} has {frames} frames, but is called an image; a part with more than one is a video",
            )
        if frames > self.max_frames and not self.shorten:
            raise MediaError(
                "too_many_frames",
                f"{media} has {frames} frames, more than data.latents.max_frames = {self.max_frames}; raise it, split "
                "the clip, or let data.latents.shorten cut it",
            )
        return min(frames, self.max_frames)


@dataclass(frozen=True)
class _ArrayLocation:
    """Location of an array inside a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # byte of the file at which the array begins
    by_columns: bool = False  # the first axis varies fastest (Fortran order)

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, file: Stream, media: MediaReference) -> NDArray[Any]:
        """Read the array."""
        data = read(file, self.offset, self.size)
        if len(data) < self.size:
            raise _truncated_error(media, len(data), self.size)
        order = "F" if self.by_columns else "C"
        return np.frombuffer(data, self.dtype).reshape(self.shape, order=order)  # type: ignore[call-overload]


def _locate_array(file: Stream, media: MediaReference) -> _ArrayLocation:
    """Location of the array of a file, from its header, checked against the size of the file."""
    is_npy = read(file, 0, len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
    file.seek(0)
    stored = _read_npy_header(file, media) if is_npy else _read_safetensors_header(file, media)
    present = size_of(file) - stored.offset
    if present < stored.size:
        raise _truncated_error(media, present, stored.size)
    if present > stored.size:
        raise MediaError(
            "wrong_latents_length",
            f"{media} continues for {present - stored.size} bytes after the numbers that its header tells of; write "
            "it again",
        )
    return stored


def _read_npy_header(file: Stream, media: MediaReference) -> _ArrayLocation:
    try:
        version = npy.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"version {version}")
        shape, by_columns, dtype = _NPY_HEADERS[version](file)
    except NPY_FAILURES as error:
        raise _broken_header_error(media, f"{type(error).__name__}: {error}") from error
    if dtype.kind != "f" or dtype.itemsize not in (2, 4):
        raise MediaError(
            "unsupported_latents",
            f"{media} holds {dtype}, and .npy files of latents hold float16 or float32; bfloat16 has a name in "
            ".safetensors files alone",
        )
    return _ArrayLocation(dtype, shape, file.tell(), by_columns)


def _read_safetensors_header(file: Stream, media: MediaReference) -> _ArrayLocation:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= MAX_TENSORS_HEADER:
        raise _broken_header_error(media, f"a header of {length} bytes")
    try:
        header = json.loads(file.read(length))
        tensors = [entry for key, entry in header.items() if key != "__metadata__"]
        described = []
        for tensor in tensors:
            type_name = str(tensor["dtype"])
            shape = [int(size) for size in tensor["shape"]]
            described.append((type_name, shape, tensor["data_offsets"]))
    except (
        ValueError,
        OverflowError,
        RecursionError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        raise _broken_header_error(media, f"{type(error).__name__}: {error}") from error
    if len(described) != 1:
        raise MediaError(
            "unsupported_latents",
            f"{media} holds {len(described)} tensors; a file of latents holds one",
        )
    type_name, shape, offsets = described[0]
    if type_name not in TENSOR_TYPES:
        raise MediaError(
            "unsupported_latents",
            f"{media} holds {type_name}, and latents are one of {', '.join(TENSOR_TYPES)}",
        )
    # Offsets begin after the header, and the one tensor takes all bytes from 0 on. Signs are
    # checked, too: two negative sizes have a positive product.
    stored = _ArrayLocation(TENSOR_TYPES[type_name], tuple(shape), 8 + length)
    if min(shape, default=0) < 0 or offsets != [0, stored.size]:
        raise _broken_header_error(media, f"{type_name}{shape} at {offsets}")
    return stored


def _broken_header_error(media: MediaReference, what: str) -> MediaError:
    return MediaError(
        "broken_latents_header", f"{media} is no .npy or .safetensors file of latents: {what}"
    )


def _truncated_error(media: MediaReference, present: int, expected: int) -> MediaError:
    return MediaError(
        "truncated_latents",
        f"{media} holds {present} of the {expected} bytes that its header says: the file is cut; copy it again",
    )
