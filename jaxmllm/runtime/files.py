"""Files of a run folder that are either the old ones or the new ones, whenever the process dies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Replace the file at `path` by `content` (text as UTF-8, or pieces of it); its folder is made if need be.

    The name of the draft that a kill leaves behind begins with a dot, so that it counts for nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as stream:
        for piece in [content] if isinstance(content, str | bytes) else content:
            stream.write(piece.encode() if isinstance(piece, str) else piece)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
