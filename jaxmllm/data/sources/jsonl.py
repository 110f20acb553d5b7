"""JSONL files: one record per line, media in files below a root folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.media.reference import File
from jaxmllm.data.printable import shown
from jaxmllm.data.sources.source import MISSING, DataError, RawRecord
from jaxmllm.data.text.conversation import ConversationError

MAX_LINE = 8 << 20  # bytes of a record; a longer one is refused without being held in memory


def resolved(path: str | Path, strict: bool = False) -> Path:
    """An absolute path without symlinks.

    A symlink that leads to itself, on which `Path.resolve` fails, stays in the path, and opening
    the path raises `OSError`. With `strict`, this function raises `OSError` for such a link and for
    a path that does not exist.
    """
    return Path(os.path.realpath(path, strict=strict))


@dataclass(frozen=True)
class JsonLines:
    """A JSONL file, whose media paths are relative to `root`. `path` and `root` are absolute and
    without symlinks."""

    path: Path
    root: Path

    @classmethod
    def of(cls, config: SourceConfig) -> JsonLines:
        """The source of an entry of data.sources."""
        path = resolved(config.path)
        return cls(path, path.parent if config.root is None else resolved(config.root))

    def size(self) -> int:
        return self.path.stat().st_size

    def stamp(self) -> str:
        """Digest of the whole file."""
        if not stat.S_ISREG(self.path.stat().st_mode):  # a pipe or a device could be read forever
            raise DataError(f"{shown(self.path)} is no regular file")
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def records(self) -> Iterator[RawRecord]:
        """One record for each line that is not blank."""
        offset = 0
        with self.path.open("rb") as file:
            for line in count(1):
                # One byte more than a record may have, which shows whether the line is too long.
                text = file.readline(MAX_LINE + 1)
                if not text:
                    return
                size = len(text)
                if size > MAX_LINE:
                    # The rest of the line is read in pieces and dropped, so memory stays bounded.
                    piece = text
                    while piece and not piece.endswith(b"\n"):
                        piece = file.readline(MAX_LINE)
                        size += len(piece)
                    message = f"a line of {size} bytes; a record has at most {MAX_LINE}: split it"
                    yield RawRecord(line, offset, size, b"", ("line_too_long", message))
                elif text.strip():
                    yield RawRecord(line, offset, size, text)
                offset += size

    def record(self, offset: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline(MAX_LINE)

    def place(self, line: int) -> tuple[str, int]:
        return str(self.path), line

    def resolve(self, name: str) -> File:
        """The file of a path in a record. Its symlinks are followed again whenever it is opened.

        Raises `ConversationError`: wrong_type, and path_escapes_root for a path that is absolute or
        leads out of the root.
        """
        if "\0" in name or not name:
            raise ConversationError("wrong_type", f"{name!r} is no file path")
        inner = None if os.path.isabs(name) else self._path_below_root(name)
        if inner is None:
            raise ConversationError(
                "path_escapes_root",
                f"media path {name!r} leaves the root {self.root}; paths must be relative and stay below it "
                "(the source's 'root' sets it)",
            )
        # The path keeps its links, because they may lead elsewhere at the next start. A path with
        # `..` is stored resolved: `..` after a link means the parent of the link's target, which
        # `normpath` would not respect.
        return self.media(inner if ".." in name.split(os.sep) else os.path.normpath(name))

    def _path_below_root(self, name: str) -> str | None:
        """The path from the root to a file, None if it is not below the root. Symlinks are resolved
        if there are any, or if the path has `..`."""
        top = os.fspath(self.root)
        path = os.path.join(top, name)
        steps = name.split(os.sep)
        # Most paths have no links, and `realpath` takes five times as long as looking for links.
        if ".." in steps or any(map(os.path.islink, accumulate(steps, os.path.join, initial=top))):
            top, path = os.path.realpath(top), os.path.realpath(path)
        below = top.rstrip(os.sep) + os.sep
        path = os.path.normpath(path)
        return path.removeprefix(below) if path.startswith(below) else None

    def media(self, address: str) -> File:
        return File(self.root / address, address)

    def media_stamp(self, address: str) -> tuple[int, int]:
        path = os.path.join(self.root, address)
        if self._path_below_root(address) is None:  # a link may lead elsewhere by now
            return MISSING
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(path) as entries:
                    files = [status, *map(_entry_status, entries)]
                return sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)
        except OSError:
            return MISSING
        return status.st_size, status.st_mtime_ns


def _entry_status(entry: os.DirEntry[str]) -> os.stat_result:
    """Status of a file in a folder, or of the link itself if its target does not exist (an editor's
    lock)."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return entry.stat(follow_symlinks=False)
