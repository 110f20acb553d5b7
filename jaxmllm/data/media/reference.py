"""References to the bytes of one media item: a file, or a range of a file. A source may define
references of its own.

source.media(address) --> reference --open()--> stream of bytes --> header, body
                              |
                              +--str()--> the printable place that messages name
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from jaxmllm.data.printable import shown


class MediaError(ValueError):
    """A media item that cannot be used. `reason` is a short stable word for counting. The message
    names the item and is always one line, whatever its path or the message of a library contains
    (see `shown`)."""

    def __init__(self, reason: str, message: str):
        super().__init__(shown(message))
        self.reason = reason


class Stream(Protocol):
    """Bytes that can be read from any position, like an open file."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class MediaReference(Protocol):
    """One media item of a source. `str` is the place that messages name. References can be sent to
    worker processes."""

    @property
    def address(self) -> str:
        """Key of the item in its source: `source.media(address)` is this reference."""
        ...

    def open(self) -> Stream:
        """Open its bytes. Raises `MediaError("missing_file")`."""
        ...

    def files(self) -> Sequence[MediaReference]:
        """The files of a folder, ordered by the words and numbers of their names; empty if the item
        is no folder. Raises `MediaError("missing_file")` for a folder that cannot be read."""
        ...


@dataclass(frozen=True)
class File:
    """A whole file, or a folder of files. `address` is empty if no source has to find it again."""

    path: Path
    address: str = ""

    def open(self) -> io.FileIO:
        return open_file(self.path)

    def files(self) -> Sequence[MediaReference]:
        try:
            names = [name for name in os.listdir(self.path) if not name.startswith(".")]
        except (NotADirectoryError, FileNotFoundError):
            return ()
        except OSError as error:
            raise MediaError(
                "missing_file", f"{self.path} cannot be read: {error.strerror}"
            ) from error
        return [File(self.path / name) for name in sorted(names, key=_natural_sort_key)]

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class FileRange:
    """`size` bytes of a file from byte `start` on, such as a member of an archive. `name` is its
    name in messages."""

    path: Path
    start: int
    size: int
    name: str
    address: str = ""

    def open(self) -> _RangeStream:
        return _RangeStream(open_file(self.path), self.start, self.size)

    def files(self) -> Sequence[MediaReference]:
        return ()

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


@dataclass(frozen=True)
class Clip:
    """A media item that a conversation calls a video: all frames of an animation are used, and a
    folder has one file per frame."""

    media: MediaReference

    @property
    def address(self) -> str:
        return self.media.address

    def open(self) -> Stream:
        return self.media.open()

    def files(self) -> Sequence[MediaReference]:
        return self.media.files()

    def __str__(self) -> str:
        return str(self.media)


@dataclass(frozen=True)
class FrameGroup:
    """The consecutive frames of a clip that are one item: group number `number`."""

    clip: Clip
    number: int

    @property
    def address(self) -> str:
        return self.clip.address

    def open(self) -> Stream:
        return self.clip.open()

    def files(self) -> Sequence[MediaReference]:
        return self.clip.files()

    def __str__(self) -> str:
        return f"{self.clip} (frames {self.number})"


def taken_as(part: str, media: MediaReference) -> MediaReference:
    """The media item, as a `Clip` if the part of the conversation is a video."""
    return Clip(media) if part == "video" else media


class _RangeStream(io.RawIOBase):
    """A range of an open file. Closing the stream closes the file; the stream ends early if the
    file does."""

    def __init__(self, file: io.FileIO, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = max(0, min(len(buffer), self._size - self._position))
        # At an absolute position, so that other readers of the descriptor do not move this stream.
        data = os.pread(self._file.fileno(), size, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"position {origin + offset} lies before the stream")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._file.close()
        super().close()


def open_file(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered: C libraries may share its descriptor and move
    its position.

    Raises `MediaError("missing_file")` for anything else: a folder, or a file that could make a
    reader wait forever or fill its memory (a pipe, a socket, a device such as /dev/zero).
    """
    try:
        # Checked before opening, because opening may wake a device, and again on the open file,
        # because the path may have changed in between.
        if stat.S_ISREG(path.stat().st_mode):
            file = io.FileIO(path, "rb", opener=_open_without_waiting)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
        raise MediaError(
            "missing_file", f"{path} is no regular file (but a folder, a pipe or a device)"
        )
    except FileNotFoundError as error:
        raise MediaError("missing_file", f"{path} does not exist") from error
    except OSError as error:
        raise MediaError("missing_file", f"{path} cannot be read: {error.strerror}") from error


def _natural_sort_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key of a name, by its words and numbers: frame 10 comes after frame 9."""
    key = []
    for i, piece in enumerate(re.split("([0-9]+)", name)):
        is_number = i % 2 == 1  # words and numbers take turns, and a word, maybe empty, is first
        key.append((int(piece) if is_number else 0, piece))
    return tuple(key)


def size_of(stream: Stream) -> int:
    """Number of bytes of a stream; its position stays."""
    position = stream.tell()
    size = stream.seek(0, io.SEEK_END)
    stream.seek(position)
    return size


def _open_without_waiting(path: str, flags: int) -> int:
    """Open without blocking: opening a pipe would otherwise wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
