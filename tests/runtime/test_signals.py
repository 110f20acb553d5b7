"""Stopping: one signal asks, two end the process, and several processes stop at the same step."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxmllm.runtime.signals import SAME_REQUEST_SECONDS, Agreement, StopSignals

WAITING = """
import signal, sys, time
from jaxmllm.runtime.signals import StopSignals
with StopSignals() as stop:
    stop.tell = lambda line: print("told:", line, flush=True)
    if sys.argv[1] == "training":
        stop.begin_training()
    print("ready", flush=True)
    # A main thread that sees no signal, as one that is inside a compiler or waits for devices.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while not (stop.requested and sys.argv[2] == "leaves"):
        time.sleep(0.01)
    print("saved", stop.should_stop(), flush=True)
"""


def waiting(*arguments: str) -> subprocess.Popen[str]:
    """A process that is ready for signals, in a group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_asks_and_handlers_are_put_back(number: signal.Signals) -> None:
    received: list[int] = []
    original_handler = signal.signal(number, lambda *_: received.append(number))
    try:
        with StopSignals() as stop:
            stop.begin_training()
            assert not stop.should_stop()
            os.kill(os.getpid(), number)
            assert stop.requested and stop.should_stop() and stop.should_stop()
            os.kill(os.getpid(), number)  # the same request, delivered twice
            time.sleep(0.05)
        with StopSignals() as stop:
            assert not stop.requested
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number], "the handler is put back"
    finally:
        signal.signal(number, original_handler)


def test_a_signal_that_the_main_thread_cannot_see_asks_all_the_same() -> None:
    process = waiting("training", "leaves")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60) == ("saved True\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_the_process_with_one_line(number: signal.Signals) -> None:
    process = waiting("building", "stays")
    os.killpg(process.pid, number)
    line = f"stopped by {number.name} before the first step: there is nothing to save"
    assert process.communicate(timeout=60) == (f"told: {line}\n", f"{line}\n")
    assert process.returncode == 128 + number


def test_a_second_signal_ends_the_process_at_once_with_one_line() -> None:
    process = waiting("training", "stays")
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(2 * SAME_REQUEST_SECONDS)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    line = "stopped by a second signal, SIGINT: nothing more is saved"
    assert process.communicate(timeout=60) == (f"told: {line}\n", f"{line}\n")
    assert process.returncode == 128 + signal.SIGINT


class MemoryBoard:
    """The coordinator's key-value store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self.values and not allow_overwrite:
            raise RuntimeError(f"{key} exists")
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)


@pytest.mark.parametrize("notified", [[1], [0, 2]])
def test_processes_at_different_steps_stop_after_the_same_one(notified: list[int]) -> None:
    board = MemoryBoard()
    notice = threading.Event()
    stop_steps = {}
    # Process 0 is the slowest. Others are at most three steps ahead, as with a
    # queue of dispatched steps.
    progress = threading.Condition()
    steps_done = [0, 0, 0]

    def train(process: int) -> None:
        agreement = Agreement(
            board, "stop", process, 3, lambda: process in notified and notice.is_set(), 0.002
        )
        agreement.start()
        for step in range(1, 2000):
            with progress:
                progress.wait_for(lambda step=step: step - min(steps_done) <= 3, timeout=20)
                steps_done[process] = step
                progress.notify_all()
            time.sleep(0.002 if process == 0 else 0.0)
            if step == 20 and process == 1:
                notice.set()
            if agreement.should_stop():
                stop_steps[process] = step
                break
        with progress:
            steps_done[process] = 10**6
            progress.notify_all()
        agreement.close()

    threads = [threading.Thread(target=train, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(stop_steps) == {0, 1, 2}
    assert len(set(stop_steps.values())) == 1 and 20 <= stop_steps[0] < 1999


def test_a_process_that_ends_first_is_not_waited_for() -> None:
    board = MemoryBoard()
    early_process = Agreement(board, "stop", 0, 2, lambda: False, 0.002)
    early_process.start()
    assert not early_process.should_stop() and not early_process.should_stop()
    early_process.close()
    late_process = Agreement(board, "stop", 1, 2, lambda: True, 0.002)
    late_process.start()
    assert not late_process.should_stop()
    late_process._thread.join(5)
    # The early process made two calls, so this one goes on until its second
    assert not late_process.should_stop()
    assert late_process.should_stop() and late_process.should_stop()
    late_process.close()


def test_a_silent_process_is_named() -> None:
    agreement = Agreement(MemoryBoard(), "stop", 1, 2, lambda: True, 0.002, patience_seconds=0.05)
    agreement.start()
    agreement._thread.join(5)
    with pytest.raises(RuntimeError, match=r"only processes \[1\] of 2 answered"):
        agreement.should_stop()
    agreement.close()
