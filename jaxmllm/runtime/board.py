"""The board: keys and values that all processes of a run share, kept by its coordinator.

Every wait here has a time limit, after which a `HostsError` names the missing processes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxmllm.runtime.coordinator import ENDED

POLL_SECONDS = 0.1  # between looks at the board while waiting for other processes
RETRY_SECONDS = 0.2  # between attempts to connect
REPLY_SECONDS = 10.0  # time without a reply after which a connection counts as broken


class HostsError(RuntimeError):
    """The processes of a run differ, or one is missing; the message names it and a remedy."""


class Board(Protocol):
    """A key-value store that all processes of a run share. JAX's own client is one too."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def key_value_delete(self, key: str) -> None: ...


class RemoteBoard:
    """The board of a coordinator, over one connection that is made again when it breaks.

    Threads may share it. Every request raises `HostsError` when the coordinator has not answered
    for `patience_seconds`.
    """

    def __init__(self, address: tuple[str, int], process: int, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._address = address
        self._process = process
        # Identifies this process on all its connections, because two processes may have been given
        # the same number by mistake.
        self._name = f"{socket.gethostname()} {os.getpid()}.{time.time_ns()}"
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending = b""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Write a value. Raises `HostsError` if the key has another one, unless `allow_overwrite`."""
        if self._ask("set", key, value, allow_overwrite) is not None:
            raise HostsError(
                f"process {self._process} has set {key} on the coordinator, which holds another value there: runs or "
                f"processes share one coordinator, or one process number; start all processes of the run again"
            )

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """(key, value) of all keys that begin with `key`."""
        return [(name, value) for name, value in self._ask("list", key)]

    def key_value_delete(self, key: str) -> None:
        """Remove a key, if it exists."""
        self._ask("delete", key)

    def leave(self) -> None:
        """Tell the coordinator that this process leaves, so that it does not count as dead."""
        self._ask("bye")

    def _ask(self, *request: Any) -> Any:
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                with self._lock:
                    return self._exchange(*request)
            except (OSError, json.JSONDecodeError) as error:
                if time.monotonic() > deadline:
                    host, port = self._address
                    raise HostsError(
                        f"the coordinator, which process 0 starts at {host}:{port}, has not answered for "
                        f"{self.patience_seconds:.0f} s ({error}): is process 0 running, and may its port be reached?"
                    ) from error
            time.sleep(RETRY_SECONDS)

    def _exchange(self, *request: Any) -> Any:
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=REPLY_SECONDS)
                self._pending = b""
                holder = self._send("hello", self._process, self._name)
                if holder is not None:
                    host = holder.partition(" ")[0]
                    raise HostsError(
                        f"process number {self._process} is taken by another process, on {host}: give every process "
                        f"a number of its own"
                    )
            return self._send(*request)
        except OSError:
            self.close()
            raise

    def _send(self, *request: Any) -> Any:
        assert self._socket is not None
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._pending:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("connection closed")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Drop the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def by_process(entries: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Values by process number, which is the last part of their keys."""
    return {int(key.rpartition("/")[2]): value for key, value in entries}


def gather(
    board: Board, prefix: str, processes: int, seconds: float, say: Callable[[list[int]], str]
) -> dict[int, str]:
    """Wait until all processes have set a value below `prefix`; return the values by process.

    Raises `HostsError` as soon as a process has ended, with the line that it left, and after
    `seconds`, with the line that `say` returns for the missing processes.
    """
    deadline = time.monotonic() + seconds
    while True:
        values = by_process(board.key_value_dir_get(f"{prefix}/"))
        if len(values) >= processes:  # there are more if one has a number that is too large
            return values
        for line in by_process(board.key_value_dir_get(f"{ENDED}/")).values():
            raise HostsError(line)
        if time.monotonic() > deadline:
            raise HostsError(
                say([process for process in range(processes) if process not in values])
            )
        time.sleep(POLL_SECONDS)
