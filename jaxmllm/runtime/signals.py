"""Stop a run cleanly: the first SIGTERM or SIGINT saves a checkpoint and ends the run, a second one
ends it at once.

    signal --C handler--> pipe --thread--> before training: one line, exit 128 + n
                                           in training:     `requested`, and `should_stop` returns True soon
                                           the second:      one line, exit 128 + n

A thread reads the signals from a pipe that the C handler writes to, because the main thread sees
none while it compiles or waits for devices. Before training there is nothing to save; a resumed run
has lost nothing then either.

The processes of a run must stop at the same place, yet the signal may reach only one of them, and
the hosts may be some steps apart. All of them call `should_stop` in the same sequence, once per
training step and once per evaluation batch, so the number of a call identifies the place. A process
that gets the signal posts a notice on the board. A thread in every process looks for notices and
answers with the number of the last call that its process has made; all stop at the largest answer
plus one. No device and no collective takes part, and a process answers even while its main thread
waits for devices.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from jaxmllm.runtime.board import Board, HostsError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers may deliver one request twice, as Slurm does through srun: signals this close together
# count as one.
SAME_REQUEST_SECONDS = 0.5
# Time limit for telling the other processes, after which this one ends all the same
TELL_SECONDS = 2.0
END_OF_SIGNALS = b"\0"  # written to the pipe by `__exit__`; no signal has this number

# All processes begin their runs in the same order, so a number identifies a run on all of them
_serial = itertools.count()


class StopSignals:
    """Context manager around a run; enter it in the main thread, before anything interruptible.

        with StopSignals() as stop:
            build                     # here a signal ends the process
            stop.begin_training()     # from here on it asks to stop
            for step in range(first, last):
                ...
                if stop.should_stop(): save and leave

    `requested` is whether this process has received a signal. All processes must call `should_stop`
    in the same sequence: its n-th call returns the same in each of them, and all calls after a True
    return True. `tell`, if set, is called with a line before a signal ends the process, to inform
    the other processes.
    """

    def __init__(self) -> None:
        self.requested = False
        self.tell: Callable[[str], None] | None = None
        self._training = False
        self._first_signal: float | None = None
        self._agreement: Agreement | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for signal_number in SIGNALS:
            self._previous[signal_number] = signal.signal(signal_number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signal_number, previous in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be restored.
            signal.signal(signal_number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._write_end, END_OF_SIGNALS)
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)
        if self._agreement is not None:
            self._agreement.close()

    def begin_training(
        self, board: Board | None = None, process: int = 0, processes: int = 1
    ) -> None:
        """Make signals ask to stop from now on; several processes agree on a place on `board`."""
        if board is not None and processes > 1:
            prefix = f"jaxmllm/stop/{next(_serial)}"
            self._agreement = Agreement(board, prefix, process, processes, lambda: self.requested)
            self._agreement.start()
        self._training = True

    def should_stop(self) -> bool:
        """Whether to stop here. Raises `HostsError` if another process does not answer."""
        return self.requested if self._agreement is None else self._agreement.should_stop()

    def ends_waiting(self) -> bool:
        """Whether to give up a wait that only this process is in. With several processes never:
        each must reach the place that they agree on."""
        return self.requested and self._agreement is None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _watch(self) -> None:
        while (received := os.read(self._read_end, 1)) != END_OF_SIGNALS:
            if received[0] in SIGNALS:
                self._receive(signal.Signals(received[0]))

    def _receive(self, received: signal.Signals) -> None:
        self.requested = True
        now = time.monotonic()
        first_seconds, self._first_signal = self._first_signal, self._first_signal or now
        if first_seconds is not None and now - first_seconds < SAME_REQUEST_SECONDS:
            return
        if first_seconds is not None:
            self._end_process(
                received, f"stopped by a second signal, {received.name}: nothing more is saved"
            )
        elif not self._training:
            self._end_process(
                received,
                f"stopped by {received.name} before the first step: there is nothing to save",
            )

    def _end_process(self, received: signal.Signals, line: str) -> None:
        """End the process from this thread, because the main thread may be busy anywhere."""
        os.write(2, f"{line}\n".encode())
        if self.tell is not None:
            teller = threading.Thread(target=self.tell, args=(line,), daemon=True)
            teller.start()
            teller.join(TELL_SECONDS)
        os._exit(128 + received)


class Agreement:
    """One process's part in agreeing on the last call of `should_stop`, with keys below `prefix` on
    the board."""

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
        self._board = board
        self._prefix = prefix
        self._process = process
        self._processes = processes
        self._requested = requested
        self._poll_seconds = poll_seconds
        self._patience_seconds = patience_seconds
        # Guards `_calls` and `_answered`, which the thread reads while the main thread counts.
        self._lock = threading.Lock()
        self._calls = 0
        self._answered = False
        self._last_call: int | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)

    def start(self) -> None:
        """Start the thread that looks for notices."""
        self._thread.start()

    def should_stop(self) -> bool:
        """Whether this call is the agreed last one, or a later one."""
        with self._lock:
            self._calls += 1
            # The answer will count a call made before it, so the agreed call is a later one.
            if not self._answered:
                return False
        if self._last_call is None:
            self._last_call = max(self._gather_answers()) + 1
        return self._calls >= self._last_call

    def close(self) -> None:
        """Stop the thread, and answer, so that no other process waits for one that leaves early."""
        self._closed.set()
        self._thread.join()
        self._answer()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
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

    def _gather_answers(self) -> list[int]:
        deadline = time.monotonic() + self._patience_seconds
        while True:
            answers = self._board.key_value_dir_get(f"{self._prefix}/calls/")
            if len(answers) == self._processes:
                return [int(calls) for _, calls in answers]
            if time.monotonic() > deadline:
                answered = sorted(int(key.rpartition("/")[2]) for key, _ in answers)
                raise HostsError(
                    f"asked to stop, but only processes {answered} of {self._processes} answered within "
                    f"{self._patience_seconds:.0f} s; the last complete checkpoint is the one to resume from"
                )
            time.sleep(min(self._poll_seconds, 0.1))
