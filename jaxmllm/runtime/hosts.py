"""The processes of one run: if one differs from the others or dies, all end and name it.

    before a program is compiled   compare(facts) on the board: config, seed, versions, data, plan
    before the first collective    meet(): waits for late processes, up to distributed.start_timeout
    every check_every steps        post_plan(digest): a watchdog compares, and nothing waits
    always                         a sign of life every second; the watchdog ends a process whose
                                   peer is dead or silent

No device and no collective takes part. The watchdog is a thread, because the main thread may hang
in a collective for ever while a peer is missing. A run of one process needs none of this.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from jaxmllm.runtime.board import Board, HostsError, RemoteBoard, by_process, gather
from jaxmllm.runtime.coordinator import ENDED

BEAT_SECONDS = 1.0  # between signs of life, and between looks at those of the others
# A watchdog that has not run for this many beats was stopped itself, so it does not blame its peers
OWN_GAP_BEATS = 5.0
# The watchdog waits this long between reading that a peer has ended and ending the process, since
# the main thread may be about to end it with a message of its own.
MAIN_THREAD_SECONDS = 3.0
FLUSH_SECONDS = 1.0  # time limit for flushing stdout
SHOWN = 5  # most differences or processes listed in one line
EXIT_CODE = 1


@dataclass(frozen=True)
class Hosts:
    """The processes of a run, as seen by one of them."""

    process: int
    names: tuple[str, ...]  # host name of each process
    board: Board
    start_timeout: float  # seconds that processes wait for one another before training
    peer_timeout: float  # seconds without a sign of life after which a process counts as dead
    _meetings: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def processes(self) -> int:
        return len(self.names)

    def title(self, process: int) -> str:
        """Name of a process in messages."""
        return f"process {process} ({self.names[process]})"

    def compare(self, what: str, facts: Mapping[str, str], advice: str) -> None:
        """Raise `HostsError` on all processes unless `facts` are the same on all; it names the
        process, the key and both values."""
        meeting = next(self._meetings)
        self.board.key_value_set(f"facts/{meeting}/{self.process}", json.dumps(dict(facts)))
        late = self._late_line(f"has not told its {what}")
        # Process 0 alone compares, and posts one verdict, so either all processes raise or none.
        if self.process == 0:
            told = gather(self.board, f"facts/{meeting}", self.processes, self.start_timeout, late)
            lines = [
                self._difference(process, json.loads(told[process]), facts)
                for process in range(self.processes)
            ]
            differing = [line for line in lines if line]
            verdict = (
                f"the processes differ: {'; '.join(differing[:SHOWN])}. {advice}"
                if differing
                else ""
            )
            self.board.key_value_set(f"verdict/{meeting}/0", verdict)
        else:
            verdict = gather(self.board, f"verdict/{meeting}", 1, self.start_timeout, late)[0]
        if verdict:
            raise HostsError(verdict)

    def meet(self, what: str) -> None:
        """Wait until all processes have called this; raise `HostsError` that names late ones."""
        self.tell_all("", what)

    def tell_all(self, text: str, what: str = "an agreement") -> list[str]:
        """Return the texts of all processes, by process number; waits and raises as `meet` does."""
        meeting = next(self._meetings)
        self.board.key_value_set(f"meet/{meeting}/{self.process}", text)
        late = self._late_line(f"has not come to {what}")

        def late_by_now(_: list[int]) -> str:
            # If none of the texts is missing, process 0 has not passed them on.
            arrived = by_process(self.board.key_value_dir_get(f"meet/{meeting}/"))
            return late(
                [process for process in range(self.processes) if process not in arrived] or [0]
            )

        # Only process 0 reads the text of each process. If all did, the traffic of the board would
        # grow with the square of their number.
        if self.process == 0:
            texts = gather(self.board, f"meet/{meeting}", self.processes, self.start_timeout, late)
            told = json.dumps([texts[process] for process in range(self.processes)])
            self.board.key_value_set(f"met/{meeting}/0", told)
        else:
            told = gather(self.board, f"met/{meeting}", 1, self.start_timeout, late_by_now)[0]
        return list(json.loads(told))

    def post_plan(self, step: int, digest: str) -> None:
        """Post the digest of a step's plan, which the watchdog of process 0 compares."""
        self.board.key_value_set(f"plan/{step}/{self.process}", digest)

    def leave_for_main(self, topic: str, text: str) -> None:
        """Leave a text for process 0, in place of the last one of this topic; nothing waits."""
        self.board.key_value_set(f"left/{topic}/{self.process}", text, allow_overwrite=True)

    def left_for_main(self, topic: str) -> dict[int, str]:
        """By process, the last texts that were left under a topic."""
        return by_process(self.board.key_value_dir_get(f"left/{topic}/"))

    def end(self, line: str) -> None:
        """Tell the other processes why this one ends, so that they end too. Never raises."""
        with suppress(Exception):
            self.board.key_value_set(f"{ENDED}/{self.process}", line, allow_overwrite=True)

    def _difference(
        self, process: int, facts: Mapping[str, str], expected: Mapping[str, str]
    ) -> str:
        """Text about the keys in which a process differs from process 0, or an empty one."""
        keys = [
            key for key in dict.fromkeys([*expected, *facts]) if facts.get(key) != expected.get(key)
        ]
        if not keys:
            return ""
        told = [
            f"{key} is {facts.get(key, 'absent')} there, {expected.get(key, 'absent')} on process 0"
            for key in keys[:SHOWN]
        ]
        rest = f" and {len(keys) - SHOWN} more keys" if len(keys) > SHOWN else ""
        return f"{self.title(process)}: {', '.join(told)}{rest}"

    def _late_line(self, what: str) -> Callable[[list[int]], str]:
        def line(missing: list[int]) -> str:
            titles = ", ".join(map(self.title, missing[:SHOWN]))
            rest = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            return (
                f"{titles}{rest} {what} within {self.start_timeout:.0f} s: see its log; if it only needs longer, raise "
                f"distributed.start_timeout"
            )

        return line


def digest_of(record: object) -> str:
    """Sixteen hexadecimal digits that are equal for records with equal `repr`."""
    with np.printoptions(threshold=sys.maxsize):
        text = repr(record)
    return digest_of_bytes([text.encode()])


def digest_of_bytes(pieces: Iterable[bytes]) -> str:
    """Sixteen hexadecimal digits that are equal for equal bytes, however these are cut."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Watchdog:
    """Thread that gives signs of life of this process, and ends it if a peer has ended, is silent
    or plans differently.

    `exit` is called with the line to print; the default prints it and ends the process with
    `EXIT_CODE`, from this thread.
    """

    def __init__(
        self,
        hosts: Hosts,
        exit: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = hosts
        self._clock = clock
        self._exit = exit or self._end_process
        self._beats = 0
        self._last_beat = clock()
        self._signs: dict[
            int, tuple[str, float]
        ] = {}  # by watched process: its last sign of life, and when it was first seen
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life and to look for those of other processes."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                line = self.beat()
            except HostsError as error:
                line = str(error)
            except RuntimeError as error:  # from JAX's own client, if that is the board
                line = (
                    f"the coordinator on {self._hosts.title(0)} does not answer: {error}".partition(
                        "\n"
                    )[0]
                )
            if line is not None:
                self._exit(line)
                return

    def beat(self) -> str | None:
        """Give a sign of life. Return the line with which this process must end, or None."""
        hosts = self._hosts
        self._beats += 1
        # Process 0 watches all others, which watch only process 0. So traffic grows with the number
        # of processes, not with its square.
        hosts.board.key_value_set(
            f"alive/{'first' if hosts.process == 0 else 'others'}/{hosts.process}",
            str(self._beats),
            True,
        )
        ended = by_process(hosts.board.key_value_dir_get(f"{ENDED}/"))
        for process, line in sorted(ended.items()):
            if process != hosts.process:
                return line
        return self._silence_line() or (self._plan_difference() if hosts.process == 0 else None)

    def _silence_line(self) -> str | None:
        """Line about a watched process that has been silent for too long; None if none has."""
        hosts = self._hosts
        now = self._clock()
        gap = now - self._last_beat
        self._last_beat = now
        watched = range(1, hosts.processes) if hosts.process == 0 else (0,)
        signs = by_process(
            hosts.board.key_value_dir_get(f"alive/{'others' if hosts.process == 0 else 'first'}/")
        )
        for process in watched:
            # "" for a process without a sign differs from None for one not looked at yet, so its
            # time starts with the first look.
            sign = signs.get(process, "")
            # After a gap of its own this process may have missed signs, so all times start anew.
            if sign != self._signs.get(process, (None,))[0] or gap > OWN_GAP_BEATS * BEAT_SECONDS:
                self._signs[process] = (sign, now)
            elif now - self._signs[process][1] > hosts.peer_timeout:
                line = (
                    f"{hosts.title(process)} has given no sign of life for {hosts.peer_timeout:.0f} s "
                    f"(distributed.peer_timeout): it is stopped, or its host or network is down"
                )
                hosts.end(line)
                return line
        return None

    def _plan_difference(self) -> str | None:
        """Line about a process whose plan of a step differs from process 0's; None if none does.

        Plans that all processes have posted are deleted.
        """
        hosts = self._hosts
        by_step: dict[int, dict[int, str]] = {}
        for key, digest in hosts.board.key_value_dir_get("plan/"):
            _, step_text, process = key.rsplit("/", 2)
            by_step.setdefault(int(step_text), {})[int(process)] = digest
        for step, digests in sorted(by_step.items()):
            # Until process 0 has posted, there is nothing to compare with.
            different = [p for p in sorted(digests) if 0 in digests and digests[p] != digests[0]]
            if different:
                line = (
                    f"step {step}: {hosts.title(different[0])} planned {digests[different[0]]}, process 0 "
                    f"{digests[0]}: they drew other examples or placed them differently; give all hosts the "
                    f"same code, config, data and library versions"
                )
                hosts.end(line)
                return line
            if len(digests) == hosts.processes:
                for posted in digests:
                    hosts.board.key_value_delete(f"plan/{step}/{posted}")
        return None

    def _end_process(self, line: str) -> None:
        if not self._closed.wait(MAIN_THREAD_SECONDS):
            leave_at_once(
                f"error: {line}; {self._hosts.title(self._hosts.process)} ends", EXIT_CODE
            )


def leave_at_once(line: str, code: int) -> NoReturn:
    """Print a line and end the process at once, from any thread and whatever other threads do."""
    # Flush on a thread, because it would otherwise wait for another thread that hangs in a write.
    flusher = threading.Thread(target=sys.stdout.flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    if line:
        os.write(2, f"{line}\n".encode())
    os._exit(code)


# ---------------------------------------------------------------------------- this run

_current: Hosts | None = None
_watchdog: Watchdog | None = None


def joined(hosts: Hosts) -> None:
    """Make `hosts` the processes of this run, and start to watch them."""
    global _current, _watchdog
    _current = hosts
    _watchdog = Watchdog(hosts)
    _watchdog.start()
    atexit.register(leave)


def current() -> Hosts | None:
    """The processes of this run; None if there is only one."""
    return _current


def compare(what: str, facts: Callable[[], Mapping[str, str]], advice: str) -> None:
    """`Hosts.compare` with the result of `facts`, which is called only if there are several
    processes."""
    if _current is not None:
        _current.compare(what, facts(), advice)


def meet(what: str) -> None:
    """`Hosts.meet`, if there are several processes."""
    if _current is not None:
        _current.meet(what)


def tell_all(text: str) -> list[str]:
    """`Hosts.tell_all`; a single process gets its own text back."""
    return [text] if _current is None else _current.tell_all(text)


def tell_end(line: str) -> None:
    """`Hosts.end` with a line that names this process, if there are several."""
    if _current is not None:
        _current.end(f"{_current.title(_current.process)}: {line}")


@dataclass
class Outcome:
    """Exit code with which the process of a run is to end."""

    code: int = 0


@contextmanager
def ending_together(user_errors: tuple[type[BaseException], ...]) -> Iterator[Outcome]:
    """Context of a run: an error in `user_errors` becomes one line, and all processes end together.

    A process that fails does not wait for the others, which may hang in a collective that needs it:
    it tells them why and ends at once. Without an error all leave together.
    """
    outcome = Outcome()
    try:
        yield outcome
        leave()
    except user_errors as error:
        print(f"error: {error}", file=sys.stderr)
        _fail(str(error))
        outcome.code = EXIT_CODE
    except Exception as error:
        if _current is None:
            raise
        # A collective mostly fails because a peer is dead, which the watchdog names if it is given
        # time. Lack of memory is this process's own failure.
        if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" not in str(error):
            await_verdict()
        traceback.print_exc()
        _fail(f"{type(error).__name__}: {error}")


def _fail(reason: str) -> None:
    """With several processes: tell the others why, and end without JAX's shutdown, which would wait
    for them."""
    if _current is None:
        return
    line = f"{_current.title(_current.process)} failed: {reason.partition(chr(10))[0]}"
    _current.end(line)
    sys.stderr.flush()
    leave_at_once("", EXIT_CODE)


def await_verdict() -> None:
    """After a failed collective, wait for the watchdog to find the dead peer and end this process.

    Returns when every process has reported such a failure, since then none is dead, or when the
    time is up.
    """
    hosts = _current
    if hosts is None:
        return
    deadline = time.monotonic() + hosts.peer_timeout + MAIN_THREAD_SECONDS + 2 * BEAT_SECONDS
    with suppress(HostsError, RuntimeError):
        hosts.board.key_value_set(f"failed/{hosts.process}", "", True)
        while (
            time.monotonic() < deadline
            and len(hosts.board.key_value_dir_get("failed/")) < hosts.processes
        ):
            time.sleep(BEAT_SECONDS)


def leave() -> None:
    """Take leave of the other processes at the end of a run, so that this one is not missed."""
    global _current, _watchdog
    if _current is None or _watchdog is None:
        return
    import jax

    jax.distributed.shutdown()  # waits for all processes, so the watchdog must run until it returns
    _watchdog.close()
    if isinstance(_current.board, RemoteBoard):
        _current.board.leave()
        _current.board.close()
    _current = _watchdog = None
