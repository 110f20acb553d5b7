"""Progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """Shows step, loss and speed: as a bar on a terminal, elsewhere as a line at most every
    `line_seconds`."""

    def __init__(
        self,
        steps: int,
        first: int = 0,
        stream: TextIO | None = None,
        line_seconds: float = 10.0,
        visible: bool = True,
    ) -> None:
        self._steps = steps
        self._line_seconds = line_seconds
        self._visible = visible
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._last_line = -math.inf
        self._bar: Progress | None = None
        if visible and self._console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(None),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=self._console, transient=False
            )
            self._task = self._bar.add_task("train", total=steps, completed=first, text="")
            self._bar.start()

    def update(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show that `step` steps are done, and a few numbers by name: {"loss": 2.1, ...}."""
        text = "  ".join(
            f"{name} {'none' if value is None else f'{value:.4g}'}"
            for name, value in values.items()
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif self._visible:
            now = time.monotonic()
            if now - self._last_line >= self._line_seconds or step >= self._steps:
                self.print(f"step {step}/{self._steps}  {text}")
                self._last_line = now

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._visible:
            self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is and release the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
