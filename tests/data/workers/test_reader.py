"""The reader hands out the same elements whatever happens to its workers, and always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.data.sources.source import DataError
from jaxmllm.data.workers import reader
from jaxmllm.data.workers.reader import CLOSE_SECONDS, Interrupted, Loader, LoadError
from tests.data.workers.elements import Numbers, alive, children

SOON = 20  # seconds; a bound that catches a hang and measures nothing


def load(source, start, stop, workers, prefetch=2, said=None):
    with Loader([source], workers, prefetch, print if said is None else said.append) as loader:
        return list(loader.read(source, start, stop))


def assert_elements(found, start, stop):
    """Checks elements start .. stop of Numbers against their formula, in order."""
    assert [k for k, _, _ in found] == list(range(start, stop))
    for k, values, _ in found:
        np.testing.assert_array_equal(values["sum"], np.full((k % 3, 4), 3 * k + 3))
        np.testing.assert_array_equal(values["odd"], (np.arange(3) + k) % 2 == 1, strict=True)
        np.testing.assert_array_equal(values["none"], np.zeros(0, np.int32), strict=True)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_children_are_listed_while_threads_end(monkeypatch):
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    read_text = Path.read_text
    gone = iter([FileNotFoundError, ProcessLookupError])

    def read_while_a_thread_ends(path):
        if (error := next(gone, None)) is not None:
            raise error
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read_while_a_thread_ends)
    assert child.pid in children()
    child.communicate()
    assert child.pid not in children()


@pytest.mark.parametrize("workers, prefetch", [(0, 1), (0, 5), (1, 1), (3, 4)])
def test_elements_do_not_depend_on_workers(workers, prefetch):
    children_before = children()
    elements = load(Numbers(), 5, 25, workers, prefetch)
    assert_elements(elements, 5, 25)
    maker_pids = {pid for _, _, pid in elements}
    assert (os.getpid() in maker_pids) == (workers == 0) and len(maker_pids) <= max(1, workers)
    assert children() == children_before


def test_a_killed_worker_is_replaced_and_named():
    messages: list[str] = []
    source = Numbers(act="pause", at=(9,))
    with Loader([source], 2, 2, messages.append) as loader:
        elements = loader.read(source, 0, 20)
        received = [next(elements)]
        for pid in (received[0][2], *children()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        received += list(elements)
    assert_elements(received, 0, 20)
    # A worker killed while it starts to wait for an element is not missed until that element is
    # due.
    assert 1 <= len(messages) <= 2
    assert all(
        "was killed by SIGKILL (out of memory?); another one loads it again" in line
        for line in messages
    )
    assert all(line.startswith("element ") and "\n" not in line for line in messages)


def test_a_worker_that_dies_of_an_element_once_is_told_with_it(tmp_path):
    messages: list[str] = []
    elements = load(Numbers(act="die_once", at=(4,), folder=str(tmp_path)), 0, 8, 2, said=messages)
    assert_elements(elements, 0, 8)
    (line,) = messages
    assert line.startswith("element 5: data worker (process ") and "SIGKILL" in line


def test_a_worker_that_dies_every_time_is_one_error(monkeypatch):
    monkeypatch.setattr(reader, "PAUSE_SECONDS", 0.01)
    messages: list[str] = []
    source = Numbers(act="exit", at=(3,))
    children_before = children()
    with Loader([source], 2, 4, messages.append) as loader:
        elements = loader.read(source, 0, 8)
        assert_elements([next(elements) for _ in range(3)], 0, 3)
        with pytest.raises(
            LoadError,
            match=r"^element 4: data worker .* ended with exit code 7, and so did 2 before",
        ):
            next(elements)
    assert len(messages) == 2 and children() == children_before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "act, kind, message",
    [
        ("data_error", DataError, r"^data.jsonl:7: not the record 'a' that was indexed"),
        (
            "memory",
            LoadError,
            r"^element 3 cannot be loaded: no memory is left; lower data.workers",
        ),
        (
            "file",
            LoadError,
            r"^element 3 cannot be loaded: .*'/nowhere/a.png'; see that its files can be read",
        ),
    ],
)
def test_errors_arrive_as_themselves_when_their_element_is_due(workers, act, kind, message):
    source = Numbers(act=act, at=(2,))
    with Loader([source], workers, 5) as loader:
        elements = loader.read(source, 0, 8)
        assert_elements([next(elements), next(elements)], 0, 2)
        with pytest.raises(kind, match=message) as caught:
            next(elements)
        assert type(caught.value) is kind and "\n" not in str(caught.value)
        if kind is not LoadError and workers:
            # The traceback of the worker is attached as a note.
            assert "in _reply" in caught.value.__notes__[0]


def test_an_error_that_cannot_travel_still_says_what_it_was():
    with pytest.raises(RuntimeError, match="Local: cannot travel"):
        load(Numbers(act="unpicklable", at=(0,)), 0, 1, 1)


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_closing_does_not_wait_for_elements(workers, tmp_path, monkeypatch):
    # Without workers a thread loads, and it never looks up to see that it is cancelled: closing
    # gives up on it after 0.1 s.
    monkeypatch.setattr(reader, "CLOSE_SECONDS", CLOSE_SECONDS if workers else 0.1)
    source = Numbers(act="sleep", at=tuple(range(1, 20)), folder=str(tmp_path))
    children_before = children()
    loader = Loader([source], workers, 4)
    assert_elements([next(loader.read(source, 0, 20))], 0, 1)
    wait_until(lambda: len(os.listdir(tmp_path)) > workers, "all have begun to load")
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < SOON
    assert children() == children_before
    with pytest.raises(LoadError, match="closed"):
        loader.read(source, 0, 20)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_can_be_interrupted(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CLOSE_SECONDS", CLOSE_SECONDS if workers else 0.1)
    source = Numbers(act="sleep", at=(0,), folder=str(tmp_path))
    with Loader([source], workers, 2, interrupted=lambda: bool(os.listdir(tmp_path))) as loader:
        with pytest.raises(Interrupted, match="1: not waited for"):
            next(loader.read(source, 0, 20))


def test_closing_at_once_leaves_no_process():
    children_before = children()
    Loader([Numbers()], 2, 2).close()
    assert children() == children_before


def test_signals_of_the_group_do_not_end_workers():
    """This holds from the first instant of a worker, not only once it has set itself up."""
    messages: list[str] = []
    children_before = children()
    with Loader([source := Numbers(act="pause", at=(2, 3))], 2, 2, messages.append) as loader:
        wait_until(lambda: len(children() - children_before) == 2, "two workers")
        workers = children() - children_before
        elements = loader.read(source, 0, 12)
        received = []
        for _ in range(12):
            for pid in workers:
                for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    os.kill(pid, signal_number)
            received.append(next(elements))
        assert children() - children_before == workers
    assert_elements(received, 0, 12)
    assert not messages


PARENT = """
import sys
from jaxmllm.data.workers.reader import Loader
from tests.data.workers.elements import Numbers
source = Numbers(act="sleep", at=tuple(range(1, 20)), folder=sys.argv[1])
loader = Loader([source], int(sys.argv[2]), 4)
print(next(loader.read(source, 0, 20))[2], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("workers, killed", [(2, True), (2, False), (0, False)])
def test_workers_end_with_their_parent(workers, killed, tmp_path):
    """Workers end without a close, in the middle of elements that take for ever."""
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(workers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline().strip()
        wait_until(lambda: len(os.listdir(tmp_path)) > workers, "all have begun to load")
        pids = children(parent.pid)
        assert len(pids) == workers
        if killed:
            parent.kill()
        _, errors = parent.communicate(b"\n", timeout=SOON)
        assert errors == b""
        wait_until(lambda: not any(map(alive, pids)), "workers outlive their parent")
    assert parent.returncode == (-signal.SIGKILL if killed else 0)


@pytest.mark.parametrize("workers, prefetch", [(0, 3), (3, 2)])
def test_no_more_is_begun_than_is_asked_for(workers, prefetch, tmp_path):
    source = Numbers(folder=str(tmp_path))
    ahead = max(workers, prefetch)
    with Loader([source], workers, prefetch) as loader:
        elements = loader.read(source, 0, 500)
        for reads in (0, 1, 2, 3):
            if reads:
                next(elements)
            wait_until(lambda: len(os.listdir(tmp_path)) >= reads + ahead, "it is loaded ahead")  # noqa: B023
            time.sleep(0.1)
            assert len(os.listdir(tmp_path)) == reads + ahead
        assert_elements(list(loader.read(source, 490, 500)), 490, 500)
        assert len(os.listdir(tmp_path)) == 3 + ahead + 10


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_of_two_sources_share_the_workers(workers):
    numbers = Numbers()
    held_out = Numbers(name="held-out element")
    children_before = children()
    with Loader([numbers, held_out], workers, 3) as loader:
        elements = loader.read(numbers, 7, 20)
        received = [next(elements)]
        assert_elements(list(loader.read(held_out, 0, 9)), 0, 9)
        received.append(next(elements))
        abandoned = loader.read(held_out, 0, 9)
        assert_elements([next(abandoned)], 0, 1)
        abandoned.close()
        assert list(abandoned) == []
        assert len(children() - children_before) == workers
        # Segments with a name in /dev/shm would outlive a killed process.
        for pid in (
            "self",
            *(children() - children_before),
        ):
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        assert_elements(received + list(elements), 7, 20)


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_told_of_at_growing_intervals(workers, monkeypatch):
    monkeypatch.setattr(reader, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reader, "FIRST_NOTICE_SECONDS", 0.1)
    messages: list[str] = []
    assert_elements(load(Numbers(act="pause", at=(1,)), 1, 2, workers, said=messages), 1, 2)
    loader_name = "data worker (process " if workers else "a thread of this process is loading it"
    # Notices come after 0.1, 0.2 and 0.4 s, and some more while the worker starts.
    assert 2 <= len(messages) <= 6
    assert (
        all(line.startswith("element 2: waiting for its data for ") for line in messages)
        and loader_name in messages[-1]
    )


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(reader, "PAUSE_SECONDS", 0.01)
    messages: list[str] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LoadError, match="ended with exit code 1, and so did 2 before"):
        load(Numbers(), 0, 1, 1, said=messages)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LoadError, match=r"a data worker cannot be started.*lower data.workers"):
        load(Numbers(), 0, 1, 1)
