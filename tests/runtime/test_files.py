"""Files that are replaced as a whole, on a disk that becomes full."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmllm.runtime.files import write_atomically


def test_a_draft_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "half"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "inner" / "a.txt"
    write_atomically(path, "whole\n")
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(path, pieces())
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text() == "whole\n"
