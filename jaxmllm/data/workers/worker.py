"""A process that computes elements, and ends when the process that started it ends.

    Worker(functions) --starts--> python -m jaxmllm.data.workers.worker
    call(f, arguments) ----request----> functions[f](*arguments)
    its result, or error  <---reply----

Requests and replies are blocks of shared memory (memory.py) sent through one socket. A worker keeps
no state between requests, so it may be killed at any time. It does not import the main module of
the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jaxmllm.data.workers.memory import attach, receive, send, share

# Terminals and schedulers send these to all processes at once, but they are meant for the run.
# Workers ignore them, and end when the run does.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# There are many workers, which decode with threads of their own: libraries get one thread each.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


class WorkerDied(Exception):
    """A worker process ended before it replied; the message says how."""


class Worker:
    """A process that calls the functions of a block made by `share`. Only one thread at a time may
    use it."""

    def __init__(self, functions: int) -> None:
        self._connection, worker_end = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with worker_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "jaxmllm.data.workers.worker",
                    str(worker_end.fileno()),
                ],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**ONE_THREAD, **os.environ, "PYTHONPATH": paths},
            )
        self.pid = self._process.pid
        # The process may have died already; the first call reports it.
        with contextlib.suppress(ConnectionError):
            send(self._connection, functions)

    def call(self, function: int, *arguments: Any) -> Any:
        """Return functions[function](*arguments). Raises the function's errors and `WorkerDied`."""
        request = share((function, arguments))
        try:
            send(self._connection, request)
            reply = receive(self._connection)
        except (EOFError, ConnectionError):
            raise WorkerDied(self._death_message()) from None
        finally:
            os.close(request)
        succeeded, result = attach(reply)
        if not succeeded:
            raise result
        return result

    def kill(self) -> None:
        """End the process, whatever it is doing; a running call raises `WorkerDied`."""
        self._process.kill()

    def wait(self, seconds: float) -> None:
        """Collect the process after `kill`. A process that waits for a disk outlives `kill`; it is
        left to itself after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._connection.close()

    def _death_message(self) -> str:
        try:
            code = self._process.wait(1)  # the socket closes a moment before the process has ended
        except subprocess.TimeoutExpired:
            self.kill()
            return f"data worker (process {self.pid}) closed its connection"
        if code >= 0:
            return f"data worker (process {self.pid}) ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"data worker (process {self.pid}) was killed by {signal.Signals(-code).name}{hint}"


def block_signals() -> None:
    """Block `SIGNALS` in this thread, so that processes it starts have them blocked from their
    first instant."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def serve(descriptor: int) -> None:
    """Serve requests, as a worker, until the socket closes. It closes when the other process ends,
    for whatever reason."""
    for signal_number in SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    blocks: queue.SimpleQueue[int] = queue.SimpleQueue()
    # A separate thread receives, so that the end of the other process is noticed even while an
    # element is computed.
    threading.Thread(target=_receive_blocks, args=(connection, blocks), daemon=True).start()
    functions: Sequence[Callable[..., Any]] = attach(blocks.get())
    while True:
        _reply(connection, functions, *attach(blocks.get()))


def _receive_blocks(connection: socket.socket, blocks: queue.SimpleQueue[int]) -> None:
    try:
        while True:
            blocks.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def _reply(
    connection: socket.socket,
    functions: Sequence[Callable[..., Any]],
    function: int,
    arguments: tuple[Any, ...],
) -> None:
    try:
        reply = share((True, functions[function](*arguments)))
    except Exception as error:
        reply = share((False, _picklable_error(error)))
    with contextlib.suppress(ConnectionError):  # `_receive_blocks` ends this process
        send(connection, reply)
    os.close(reply)


def _picklable_error(error: Exception) -> Exception:
    """The error with a note of where it was raised; if it cannot be pickled, a `RuntimeError` with
    its text."""
    error.add_note(f"in data worker (process {os.getpid()}):\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)))
    return error


if __name__ == "__main__":
    serve(int(sys.argv[1]))
