"""Cheap elements for tests of the reader. Data workers import this file, so it imports little
itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Numbers:
    """A source whose element k holds arrays that tell k and the process that made them.

    The method named `act` is called while the elements `at` are filled."""

    act: str = ""
    at: tuple[int, ...] = ()
    folder: str = ""  # if set, a file is created in it for each element that was begun
    length: int = 1000
    name: str = "element"
    filler: Any = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "filler", Filler(self.act, self.at, self.folder))

    def __len__(self):
        return self.length

    def examples(self, k):
        return np.arange(3) + k


@dataclass(frozen=True)
class Filler:
    """Fills the elements of Numbers. The other methods are what `act` may name."""

    act: str
    at: tuple[int, ...]
    folder: str

    def __call__(self, k, examples, cancelled=None):
        """Element k of Numbers, and the process that filled it."""
        if self.folder:
            Path(self.folder, str(k)).touch()
        if k in self.at:
            getattr(self, self.act)()
        values = {
            "sum": np.full((k % 3, 4), examples.sum()),
            "odd": examples % 2 == 1,
            "none": np.zeros(0, np.int32),
        }
        return k, values, os.getpid()

    def sleep(self):
        time.sleep(600)

    def pause(self):
        time.sleep(0.5)

    def exit(self):
        os._exit(7)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self):
        marker = Path(self.folder, "died")
        if not marker.exists():
            marker.touch()
            self.die()

    def data_error(self):
        from jaxmllm.data.sources.source import DataError

        raise DataError("data.jsonl:7: not the record 'a' that was indexed")

    def unpicklable(self):
        class Local(ValueError):
            pass

        raise Local("cannot travel")

    def memory(self):
        raise MemoryError

    def file(self):
        Path("/nowhere/a.png").read_bytes()


@dataclass(frozen=True)
class Imported:
    """A filler that returns the names of the packages that its process has imported after filling."""

    filler: Any

    def __call__(self, k, examples, cancelled=None):
        self.filler(k, examples)
        return {name.partition(".")[0] for name in sys.modules}


def children(pid: int | str = "self") -> set[int]:
    """The processes that a process started and has not collected.

    A thread that was joined may end while threads are listed, and leaves its processes to another
    one: then all are listed again.
    """
    while True:
        paths = list(Path(f"/proc/{pid}/task").glob("*/children"))
        try:
            return {int(child) for path in paths for child in path.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            pass


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
