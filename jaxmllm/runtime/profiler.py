"""A profile of a few steps, written for TensorBoard and Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class ProfilerWindow:
    """Traces the steps start .. start + steps - 1 into `directory`; none when `steps` is 0."""

    def __init__(self, directory: str | Path, start: int, steps: int) -> None:
        # Without a folder of their own, processes of one host would write files of the same name.
        process_folder = f"process_{jax.process_index()}" if jax.process_count() > 1 else ""
        self.directory = Path(directory) / process_folder
        self._window = range(start, start + steps)
        self._is_open = False

    def before_step(self, step: int, pending: Any = None) -> bool:
        """Open or close the trace if `step` is the first one in or after the window, once the
        arrays of `pending` are ready. Return whether it did."""
        in_window = step in self._window
        if in_window == self._is_open:
            return False
        jax.block_until_ready(pending)
        if in_window:
            jax.profiler.start_trace(self.directory)
        else:
            jax.profiler.stop_trace()
        self._is_open = in_window
        return True

    @property
    def recording(self) -> bool:
        """Whether a trace is open."""
        return self._is_open

    def close(self, pending: Any = None) -> None:
        """Close the trace if the run ends before its window does."""
        if self._is_open:
            jax.block_until_ready(pending)
            jax.profiler.stop_trace()
            self._is_open = False
