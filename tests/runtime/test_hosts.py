"""Processes that differ or die: all others end with a line that names them."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxmllm.config.schema import DistributedConfig
from jaxmllm.runtime.board import HostsError, RemoteBoard, gather
from jaxmllm.runtime.coordinator import RECONNECT_SECONDS, BoardServer
from jaxmllm.runtime.distributed import _meet, start_coordinator
from jaxmllm.runtime.hosts import BEAT_SECONDS, Hosts, Watchdog
from tests.runtime.test_signals import MemoryBoard

NAMES = ("host-a", "host-b", "host-c")


def hosts_on(
    board: MemoryBoard, process: int, processes: int = 3, start: float = 5.0, peer: float = 10.0
) -> Hosts:
    return Hosts(process, NAMES[:processes], board, start, peer)


def on_threads(*calls: Callable[[], None]) -> list[str]:
    """Errors of calls that run at the same time, with "" for none."""
    errors = [""] * len(calls)

    def call(number: int) -> None:
        try:
            calls[number]()
        except HostsError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_equal_facts_pass_and_different_ones_name_process_key_and_both_values() -> None:
    board = MemoryBoard()
    facts = {"run.seed": "0", "data.batch_size": "16"}
    processes = [hosts_on(board, process) for process in range(3)]
    assert (
        on_threads(*(lambda h=h: h.compare("config", facts, "Advice") for h in processes))
        == [""] * 3
    )

    different_facts = facts | {"run.seed": "7", "jax's version": "1"}
    facts_of_processes = [facts, facts, different_facts]
    errors = on_threads(
        *(
            lambda h=h, f=f: h.compare("config", f, "Advice")
            for h, f in zip(processes, facts_of_processes, strict=True)
        )
    )
    assert (
        errors
        == [
            "the processes differ: process 2 (host-c): run.seed is 7 there, 0 on process 0, jax's version is 1 there, "
            "absent on process 0. Advice"
        ]
        * 3
    )


def test_a_process_that_does_not_answer_is_named() -> None:
    board = MemoryBoard()
    present = [hosts_on(board, process, start=0.3) for process in (0, 2)]
    text = "process 1 (host-b) has not told its config within 0 s: see its log; if it only needs longer, raise "
    errors = on_threads(*(lambda h=h: h.compare("config", {}, "") for h in present))
    assert errors[0] == f"{text}distributed.start_timeout"
    assert "process 0 (host-a) has not told" in errors[1]
    errors = on_threads(*(lambda h=h: h.meet("training") for h in present))
    assert ["process 1 (host-b) has not come to training" in error for error in errors] == [
        True,
        True,
    ]


def test_all_learn_what_each_one_tells_and_one_alone_reads_it_from_each() -> None:
    """Process 0 collects the texts, so reads of the others grow with
    processes, not with their square."""

    class Counted(MemoryBoard):
        read = 0

        def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
            values = super().key_value_dir_get(key)
            if threading.current_thread().name != "0":
                self.read += len(values)
            return values

    processes = 40
    board = Counted()
    names = tuple(f"host-{process}" for process in range(processes))
    answers: dict[int, list[str]] = {}

    def tell(process: int) -> None:
        hosts = Hosts(process, names, board, 20.0, 20.0)
        answers[process] = hosts.tell_all(f"{process}")

    threads = [
        threading.Thread(target=tell, args=(process,), name=f"{process}")
        for process in reversed(range(processes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    texts = [f"{process}" for process in range(processes)]
    assert answers == {process: texts for process in range(processes)}
    assert board.read == processes - 1


def test_whoever_is_early_waits_and_learns_of_a_peer_that_has_ended() -> None:
    board = MemoryBoard()
    early_host = hosts_on(board, 0, 2)
    late_host = hosts_on(board, 1, 2)
    assert on_threads(
        lambda: early_host.meet("training"), lambda: (time.sleep(0.3), late_host.meet("training"))
    ) == ["", ""]
    late_host.end("process 1 (host-b) failed: no space left")
    assert on_threads(lambda: early_host.meet("the end")) == [
        "process 1 (host-b) failed: no space left"
    ]


def test_a_process_that_was_told_of_more_is_named_however_late_one_looks() -> None:
    board = MemoryBoard()
    for process, process_count in enumerate((2, 2, 3)):
        board.key_value_set(f"here/{process}", json.dumps([NAMES[process], process_count]))
    limits = DistributedConfig(start_timeout=0.3)
    with pytest.raises(HostsError, match=r"process 2 \(host-c\) was told JAXMLLM_PROCESSES=3"):
        _meet(board, 0, 2, "host-a", "host-a:1", limits)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def beat_together(watchdogs: list[Watchdog], clock: Clock, seconds: float) -> list[str | None]:
    """Let some seconds pass, in which all of these watchdogs beat; return their last lines."""
    lines: list[str | None] = []
    for _ in range(int(seconds / BEAT_SECONDS)):
        clock.now += BEAT_SECONDS
        lines = [watchdog.beat() for watchdog in watchdogs]
        if any(lines):
            break
    return lines


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_process_ends_the_others(silent: int) -> None:
    board = MemoryBoard()
    clock = Clock()
    watchdogs = [
        Watchdog(hosts_on(board, process), exit=print, clock=clock) for process in range(3)
    ]
    assert beat_together(watchdogs, clock, 30) == [None] * 3
    living = [watchdog for process, watchdog in enumerate(watchdogs) if process != silent]
    assert beat_together(living, clock, 8) == [None] * 2
    lines = beat_together(living, clock, 5)
    assert lines[0] is not None
    assert f"process {silent} ({NAMES[silent]}) has given no sign of life for 10 s" in lines[0]
    assert beat_together(living, clock, 1) == [lines[0]] * 2, "the others are told"


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    board = MemoryBoard()
    clock = Clock()
    watchdogs = [
        Watchdog(hosts_on(board, process), exit=print, clock=clock) for process in range(3)
    ]
    assert beat_together(watchdogs, clock, 5) == [None] * 3
    clock.now += 60  # the machine slept
    assert watchdogs[0].beat() is None
    assert beat_together(watchdogs, clock, 20) == [None] * 3


def test_plans_are_compared_however_far_apart_the_processes_are() -> None:
    board = MemoryBoard()
    clock = Clock()
    processes = [hosts_on(board, process) for process in range(3)]
    watchdog = Watchdog(processes[0], exit=print, clock=clock)
    for hosts in processes:
        hosts.post_plan(100, "aa")
    assert watchdog.beat() is None
    assert board.key_value_dir_get("plan/") == [], "what was compared is forgotten"
    processes[2].post_plan(200, "bb")
    assert watchdog.beat() is None, "process 0 is behind"
    processes[0].post_plan(200, "aa")
    line = watchdog.beat()
    assert line is not None and "step 200: process 2 (host-c) planned bb, process 0 aa" in line
    assert Watchdog(processes[1], exit=print, clock=clock).beat() == line


# ---------------------------------------------------------------------------- the coordinator's board


@pytest.fixture
def coordinator() -> Iterator[tuple[str, int]]:
    """The address of a coordinator for two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child: subprocess.Popen[bytes] = start_coordinator("127.0.0.1", port, 2, 60)
    yield "127.0.0.1", port
    child.kill()
    child.wait()


def test_the_board_keeps_values_and_misses_who_leaves_without_goodbye(
    coordinator: tuple[str, int],
) -> None:
    board, peer_board = (RemoteBoard(coordinator, process, 5.0) for process in range(2))
    board.key_value_set("a/0", "x")
    peer_board.key_value_set("a/1", json.dumps({"text": "ä\n"}))
    assert sorted(board.key_value_dir_get("a/")) == [
        ("a/0", "x"),
        ("a/1", json.dumps({"text": "ä\n"})),
    ]
    board.key_value_delete("a/0")
    assert [key for key, _ in peer_board.key_value_dir_get("a/")] == ["a/1"]
    with pytest.raises(HostsError, match="process number 1 is taken by another process"):
        RemoteBoard(coordinator, 1, 5.0).key_value_set("a/2", "")

    peer_board.close()  # a broken connection, which the next call makes anew
    peer_board.key_value_set("a/1", "again", True)
    time.sleep(RECONNECT_SECONDS + 0.5)
    assert board.key_value_dir_get("ended/") == []
    peer_board.close()
    with pytest.raises(
        HostsError, match=rf"process 1 \({socket.gethostname()}\) was killed or crashed"
    ):
        gather(board, "never", 2, 3 * RECONNECT_SECONDS, lambda missing: f"too late: {missing}")
    peer_board.key_value_set("b", "")
    peer_board.leave()
    peer_board.close()


def test_two_values_of_one_key_are_an_error(coordinator: tuple[str, int]) -> None:
    """The same value again is none, because a request whose reply was lost is sent again."""
    board, peer_board = (RemoteBoard(coordinator, process, 5.0) for process in range(2))
    board.key_value_set("meet/0/0", "x")
    peer_board.key_value_set("meet/0/0", "x")
    with pytest.raises(HostsError, match="process 1 has set meet/0/0 on the coordinator, which ho"):
        peer_board.key_value_set("meet/0/0", "y")
    assert board.key_value_dir_get("meet/") == [("meet/0/0", "x")]
    peer_board.key_value_set("meet/0/0", "y", allow_overwrite=True)
    assert board.key_value_dir_get("meet/") == [("meet/0/0", "y")]


def test_the_boards_answers_are_those_of_a_plain_dictionary() -> None:
    server = BoardServer()
    board = MemoryBoard()
    keys = ["b", "a/0", "a/1", "a/10", "a/1/0", "a/1/1", "a/10/0", "ab/0", "plan/3/0", "plan/3/1"]
    prefixes = [*keys, "", "a", "a/", "a/1/", "a/10/", "plan/", "absent/"]
    for key in keys:
        board.key_value_set(key, key.upper())
        assert server.answer("set", key, key.upper()) is None
        assert server.answer("set", key, "again") == f"{key} is set"
        assert server.answer("set", key, key.upper()) is None
    for deleted in ("absent", "plan/3/1", "a/1", "plan/3/0"):
        for prefix in prefixes:
            entries = server.answer("list", prefix)
            assert sorted(entries) == sorted(board.key_value_dir_get(prefix))
        board.key_value_delete(deleted)
        server.answer("delete", deleted)


def test_looking_for_few_keys_takes_no_longer_where_there_are_many_others() -> None:
    """Only keys of the folder that is asked for are compared, however many others there are."""
    compared: list[str] = []

    class Key(str):
        def startswith(self, *prefix: Any) -> bool:
            compared.append(self)
            return super().startswith(*prefix)

    server = BoardServer()
    for process in range(1000):
        server.answer("set", Key(f"meet/{process % 10}/{process}"), "")
    server.answer("set", Key("ended/3"), "killed")
    assert server.answer("list", "ended/") == [("ended/3", "killed")]
    assert compared == ["ended/3"]


def test_an_absent_coordinator_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # not listening
        board = RemoteBoard(probe.getsockname(), 1, 0.5)
        with pytest.raises(
            HostsError, match=r"which process 0 starts at 127\.0\.0\.1:.* has not answered for 0 s"
        ):
            board.key_value_set("a", "")
