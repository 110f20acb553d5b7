"""Durations of steps, from which `step_seconds`, MFU and rates are computed.

    step k     |<-- seconds of k -->|<-- seconds of k + 1 -->|  pause  |<-- seconds of k + 2 -->|
               began                completed (k)            completed (k + 1) began   completed (k + 2)

A step lasts from the completion of the step before it, so waiting for data counts, as it does in
the throughput of a run. If something else came in between (an evaluation, a checkpoint, the start
of the run), the step lasts from the moment when its programs were started.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

JOIN_SECONDS = 10.0  # limit of waiting for arrays still being computed when a run ends by an error


class Completions:
    """Records the times at which arrays become ready, in the order given, on a thread of its own.

    The main thread reads a step's metrics late, possibly after waiting for data; this thread sees
    when the step was done.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="step-completions", daemon=True)
        self._thread.start()

    def of(self, arrays: Any) -> Future[float]:
        """Future of the time at which all arrays of a tree are ready or have failed."""
        completed: Future[float] = Future()
        self._requests.put((arrays, completed))
        return completed

    def close(self) -> None:
        """End the thread; arrays that never become ready are given up."""
        self._requests.put(None)
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while (asked := self._requests.get()) is not None:
            arrays, completed = asked
            with contextlib.suppress(
                Exception
            ):  # the main thread gets the same error when it reads the arrays
                jax.block_until_ready(arrays)
            completed.set_result(self._clock())


class StepTimes:
    """Computes the seconds of each step from the times at which steps began and were completed."""

    def __init__(self) -> None:
        self._last_completed: float | None = None

    def seconds(self, began: float, completed: float) -> float:
        """Seconds of the next step, whose programs began at `began` and ended at `completed`."""
        start = began if self._last_completed is None else self._last_completed
        self._last_completed = completed
        return max(completed - start, 1e-9)

    def pause(self) -> None:
        """Note that something other than the next step follows the last completed one."""
        self._last_completed = None
