"""Files of a run folder, replaced atomically: a kill leaves either the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Replace the file at `path` by `content` (bytes, or text or pieces of text as UTF-8), and
    create its folder if necessary.

    The draft of a killed process stays behind, ignored because its name begins with a dot. One that
    cannot be written is removed: a full disk has no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as stream:
            for piece in [content] if isinstance(content, str | bytes) else content:
                stream.write(piece.encode() if isinstance(piece, str) else piece)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
