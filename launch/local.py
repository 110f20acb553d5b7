"""Run one command as several processes on this machine, as if each were a host.

    python -m launch.local --processes 2 --devices 4 -- python -m jaxmllm train --config configs/quickstart.yaml

Every process gets the variables of launch/README.md and `--devices` forced CPU devices; its output
lines are prefixed with its number. SIGINT and SIGTERM are passed on to all. When a process fails,
the others are ended and its exit code is returned. When this launcher is killed, so are they.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

GRACE = 30.0  # seconds from SIGTERM to SIGKILL: time to notice a failed process, and to end
POLL = 0.05  # seconds
# Script that reads numbers of process groups, each once when the group begins and once when it has
# ended, and kills the remaining groups at the end of its input. The kernel closes the input however
# the launcher dies.
GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def process_environment(
    base: Mapping[str, str], process: int, processes: int, devices: int, coordinator: str
) -> dict[str, str]:
    """The environment of process number `process`; other flags in XLA_FLAGS are kept."""
    flag = "--xla_force_host_platform_device_count"
    flags = [word for word in base.get("XLA_FLAGS", "").split() if not word.startswith(f"{flag}=")]
    return {
        **base,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{flag}={devices}"]),
        "JAXMLLM_COORDINATOR": coordinator,
        "JAXMLLM_PROCESSES": str(processes),
        "JAXMLLM_PROCESS_ID": str(process),
        "JAXMLLM_BIND": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def run_local(command: Sequence[str], processes: int, devices: int) -> int:
    """Run `command` in `processes` processes and wait for them; return the exit code of the first
    one seen to fail, or 0.

    A process ended by signal n counts as 128 + n, as in a shell. Raises `OSError` when the command
    cannot be started.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    children: list[subprocess.Popen[str]] = []
    printers: list[threading.Thread] = []
    lock = threading.Lock()
    with _guard() as tell_guard, _forward_signals(children):
        try:
            for process in range(processes):
                child = subprocess.Popen(
                    command,
                    env=process_environment(os.environ, process, processes, devices, coordinator),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    # A session of its own, so that a terminal's Ctrl-C reaches the child only once,
                    # through the launcher.
                    start_new_session=True,
                )
                children.append(child)
                tell_guard(child.pid)
                assert child.stdout is not None
                printers.append(
                    threading.Thread(
                        target=_print_lines, args=(child.stdout, process, lock), daemon=True
                    )
                )
                printers[-1].start()
            return _wait(children)
        finally:
            _end(children)
            for child in children:
                tell_guard(child.pid)
            for printer in printers:
                # A worker that a killed process has left behind may keep its output open.
                printer.join(timeout=1.0)


@contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Context with a guard process that kills the process groups that this one leaves behind.

    Yields a function to call with every process group when it begins and when it has ended.
    """
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD],
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert guard.stdin is not None
    stream = guard.stdin
    try:
        yield lambda group: print(group, file=stream, flush=True)
    finally:
        stream.close()
        guard.wait()


def _wait(children: Sequence[subprocess.Popen[str]]) -> int:
    """Wait until all children have succeeded or one has failed; return the exit code."""
    while True:
        codes = [child.poll() for child in children]
        failed = [(process, code) for process, code in enumerate(codes) if code]
        if failed:
            return _shell_code(*failed[0])
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL)


def _shell_code(process: int, code: int) -> int:
    """The exit code of a process that failed, as a shell would have it. One that was killed, which
    could not say so, is named."""
    if code > 0:
        return code
    cause = signal.strsignal(-code)
    print(
        f"process {process} was ended by signal {-code} ({cause}); the others end, too",
        file=sys.stderr,
    )
    return 128 - code


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Send SIGTERM to the children still running and, after `GRACE` seconds, SIGKILL to their
    process groups."""
    _signal(children, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _signal(children: Sequence[subprocess.Popen[str]], signum: int) -> None:
    """Send a signal to the processes only: workers must live on while a checkpoint is saved."""
    for child in children:
        child.send_signal(signum)


@contextmanager
def _forward_signals(children: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the children, which save and exit; `_wait` sees how."""
    handlers_before = {
        signum: signal.signal(signum, lambda signum, _: _signal(children, signum))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in handlers_before.items():
            signal.signal(signum, handler)


def _print_lines(stream: IO[str], process: int, lock: threading.Lock) -> None:
    for line in stream:
        with lock:
            try:
                sys.stdout.write(
                    f"[{process}] {line}" if line.endswith("\n") else f"[{process}] {line}\n"
                )
                sys.stdout.flush()
            except BrokenPipeError:
                # The reader is gone, as after `| head`. Keep on reading, into the void: processes
                # whose output nobody reads would wait for ever.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.local", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="number of processes (default: %(default)s)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=4,
        help="forced CPU devices per process (default: %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command; write it after --")
    if options.processes < 1 or options.devices < 1:
        parser.error("--processes and --devices must be at least 1")
    return run_local(command, options.processes, options.devices)


if __name__ == "__main__":
    sys.exit(main())
