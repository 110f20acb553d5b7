"""Stopping cleanly: SIGTERM or SIGINT once asks for a last checkpoint, twice does what it always did.

The processes of a run must stop at the same place, yet the signal may reach only one of them, and the hosts may be
some steps apart. All of them ask `should_stop` in the same sequence, once per training step and once per evaluation
batch, so the number of the call is the place. A process that has the signal leaves a notice with the coordinator; a
thread in every process looks for it and answers with the last call its host has made; all stop at the largest answer
plus one. No device and no collective takes part, and the answer needs no help from a host that waits for its devices.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

import jax
from orbax.checkpoint import multihost

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_serial = itertools.count()  # every process opens its contexts in the same order, so this names one everywhere


class Board(Protocol):
    """The part of the coordinator's key-value store that an agreement needs."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class StopSignals:
    """Context manager around the training loop; enter it in the main thread.

        with StopSignals() as stop:
            for step in range(first, last):
                ...
                if stop.should_stop(): save and leave

    `requested` tells whether this process has had the signal. All processes call `should_stop` in the same sequence:
    its n-th call returns the same in each of them, and once it was True it stays True.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}
        self._agreement: Agreement | None = None

    def __enter__(self) -> StopSignals:
        if jax.process_count() > 1:
            self._agreement = Agreement(
                multihost.get_jax_distributed_client(),
                f"jaxmllm/stop/{next(_serial)}",
                jax.process_index(),
                jax.process_count(),
                lambda: self.requested,
            )
            self._agreement.start()
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self._agreement is not None:
            self._agreement.close()

    def should_stop(self) -> bool:
        """Whether to stop here. With several processes, raises `RuntimeError` if one does not answer."""
        return self.requested if self._agreement is None else self._agreement.should_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            # None: a handler not installed from Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}


class Agreement:
    """One process's part in choosing the last call of `should_stop`, under the keys below `prefix` of the board."""

    def __init__(
        self,
        board: Board,
        prefix: str,
        process: int,
        processes: int,
        requested: Callable[[], bool],
        poll_seconds: float = 0.5,
        patience_seconds: float = 120.0,
    ) -> None:
        self._board, self._prefix, self._process, self._processes = board, prefix, process, processes
        self._requested, self._poll, self._patience = requested, poll_seconds, patience_seconds
        self._lock = threading.Lock()
        self._calls = 0
        self._answered = False
        self._last_call: int | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)

    def start(self) -> None:
        """Begin to look for notices."""
        self._thread.start()

    def should_stop(self) -> bool:
        """Whether this call is the agreed last one, or a later one."""
        with self._lock:
            self._calls += 1
            # A call made before the answer is covered by it; the agreed call is a later one.
            if not self._answered:
                return False
        if self._last_call is None:
            self._last_call = max(self._answers()) + 1
        return self._calls >= self._last_call

    def close(self) -> None:
        """Stop looking. A process that leaves early still answers, so that no other waits for it."""
        self._closed.set()
        self._thread.join()
        self._answer()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            if self._requested():
                self._board.key_value_set(f"{self._prefix}/notice/{self._process}", "")
            if self._board.key_value_dir_get(f"{self._prefix}/notice/"):
                self._answer()
                return

    def _answer(self) -> None:
        with self._lock:
            if not self._answered:
                self._board.key_value_set(f"{self._prefix}/calls/{self._process}", str(self._calls))
                self._answered = True

    def _answers(self) -> list[int]:
        deadline = time.monotonic() + self._patience
        while True:
            answers = self._board.key_value_dir_get(f"{self._prefix}/calls/")
            if len(answers) == self._processes:
                return [int(calls) for _, calls in answers]
            if time.monotonic() > deadline:
                here = sorted(int(key.rpartition("/")[2]) for key, _ in answers)
                raise RuntimeError(
                    f"asked to stop, but only processes {here} of {self._processes} answered within "
                    f"{self._patience:.0f} s; the last complete checkpoint is the one to resume from"
                )
            time.sleep(min(self._poll, 0.1))
