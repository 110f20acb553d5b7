"""What the data side must know of an encoder phase, in one record: adding a modality means adding one.

A modality measures a file from its header, loads it into slots, and says where its tokens stand in a
conversation. Slots are what rows are packed with: patches of an image, log-mel frames of a clip.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.messages import shown
from jaxmllm.row_format import RowFormat

Shape = tuple[int, int]


class MediaError(ValueError):
    """A media file that cannot be used. `reason` is a short stable word for counting; the message names the file and
    is one line, whatever stands in its path or in the words of a library (see `shown`)."""

    def __init__(self, reason: str, message: str):
        super().__init__(shown(message))
        self.reason = reason


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered: C libraries may share its descriptor and move its position.

    Raises `MediaError("missing_file")` for anything else: a folder, and what could keep a reader waiting for ever or
    fill its memory (a pipe, a socket, a device such as /dev/zero).
    """
    try:
        # Asked before opening, which may wake a device, and once more of what was opened: paths can change in between.
        if stat.S_ISREG(path.stat().st_mode):
            file = FileIO(path, "rb", opener=_open_without_waiting)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
        raise MediaError("missing_file", f"{path} is no regular file (but a folder, a pipe or a device)")
    except FileNotFoundError as error:
        raise MediaError("missing_file", f"{path} does not exist") from error
    except OSError as error:
        raise MediaError("missing_file", f"{path} cannot be read: {error.strerror}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class Modality(Protocol):
    """One encoder phase as the data side sees it. Implementations are frozen records whose `repr` shows every
    setting: length indexes are cached by it."""

    @property
    def name(self) -> str:
        """Phase and component name: "vision"."""
        ...

    @property
    def part(self) -> str:
        """The word in conversations: "image"."""
        ...

    @property
    def format(self) -> RowFormat:
        """What the slots of its rows hold and how they group."""
        ...

    def measure(self, path: Path) -> Shape:
        """Shape of the item from the file's header alone. Raises `MediaError`."""
        ...

    def length(self, shape: Shape) -> int:
        """Slots the item occupies."""
        ...

    def real(self, shape: Shape) -> int:
        """Slots of it that hold data."""
        ...

    def tokens(self, shape: Shape) -> int:
        """Language tokens the item becomes."""
        ...

    def load(self, path: Path, shape: Shape) -> NDArray[Any]:
        """Decode: [length, F]. Raises `MediaError` when the body is broken or does not have `shape`."""
        ...

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """Rotary positions of the slots inside the item: [length, 2]."""
        ...

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        """Which slots hold data rather than padding inside the item: [length]."""
        ...

    def token_positions(self, shape: Shape, start: int) -> NDArray[np.int32]:
        """Three-axis positions (time, height, width) of its language tokens when the item begins at position
        `start` (M-RoPE, arXiv 2409.12191): [tokens, 3]. The text after it continues at the maximum + 1."""
        ...
