"""The meeting place of a run's processes: a separate process that process 0 starts, and that
outlives it by seconds.

    process p --one TCP connection, a line of JSON each way--> board: keys and values that all processes share
    process p --jax.distributed--> JAX's coordination service, on a port that is posted on the board

It is a separate process because JAX ends every process, with pages of text, at the moment the
service is gone: here the service survives for the seconds in which the others read who has died.
The board notices by its connection that a process was killed. There is no authentication:
launch/README.md says what must be firewalled.

This file is run as a script, and imports only the standard library and jaxlib.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

ENDED = "ended"  # folder of keys, one for each process that has ended: the line that says why
RECONNECT_SECONDS = 3.0  # time without a connection after which a process counts as dead
# Time that the board stays after the death of process 0, so that the others can read about it
LINGER_SECONDS = 15.0
LINE_BYTES = 16 << 20  # most bytes of one request, such as the facts of a process


class BoardServer:
    """The board: keys and values, and which processes are connected."""

    def __init__(self) -> None:
        # Keys and values, by the part of a key before its last "/": thousands of processes look for
        # a few keys every second, so a look must be quick
        self.folders: dict[str, dict[str, str]] = {}
        self.hosts: dict[int, str] = {}  # of processes that have said hello and not yet bye
        self.connections: dict[int, int] = {}  # number of open connections by process

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it closes."""
        process: int | None = None
        try:
            while line := await reader.readline():
                verb, *arguments = json.loads(line)
                if verb == "hello" and process is None:
                    process = int(arguments[0])
                    reply = self.enter(process, arguments[1])
                elif verb == "bye" and process is not None:
                    self.hosts.pop(process, None)
                    reply = None
                else:
                    reply = self.answer(verb, *arguments)
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass  # connections that break or do not speak this protocol are closed below
        finally:
            if process is not None:
                self.connections[process] -= 1
                asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self.miss, process)
            writer.close()

    def enter(self, process: int, name: str) -> str | None:
        """Note a connection; return the name of another process with this number, or None."""
        holder = self.hosts.get(process)
        self.connections[process] = self.connections.get(process, 0) + 1
        if holder not in (None, name):
            return holder
        self.hosts[process] = name
        return None

    def miss(self, process: int) -> None:
        """Note that a process is dead, unless it has said bye or is connected again."""
        if process in self.hosts and not self.connections[process]:
            line = (
                f"process {process} ({self.hosts[process].partition(' ')[0]}) was killed or crashed"
            )
            self.answer("set", f"{ENDED}/{process}", line)

    def answer(self, verb: str, key: str, value: str = "", overwrite: bool = False) -> Any:
        """Carry out a request, and return the reply."""
        folder = key.rpartition("/")[0]
        if verb == "set":
            values = self.folders.setdefault(folder, {})
            # The same value is no error: a client whose connection broke sends its request again.
            if not overwrite and values.get(key, value) != value:
                return f"{key} is set"
            values[key] = value
            return None
        if verb == "list":
            return [
                (name, text)
                for subfolder, values in self.folders.items()
                # Folders that are neither that of the key nor below it are skipped as a whole.
                if not folder or f"{subfolder}/".startswith(f"{folder}/")
                for name, text in values.items()
                if name.startswith(key)
            ]
        if verb == "delete":
            values = self.folders.get(folder, {})
            values.pop(key, None)
            # Every "list" looks at the names of all folders, so empty ones are not kept.
            if not values:
                self.folders.pop(folder, None)
            return None
        raise ValueError(f"no such request: {verb}")


def free_port(host: str | None) -> int:
    """A port on which nothing listens."""
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host or "", 0))
        return int(probe.getsockname()[1])


def start_jax_service(host: str | None, processes: int, heartbeat_seconds: int) -> tuple[Any, int]:
    """Start JAX's coordination service; return it and its port."""
    from jaxlib import _jax

    port = free_port(host)
    shown = f"[{host}]" if host and ":" in host else host
    service = _jax.get_distributed_runtime_service(
        f"{shown or '[::]'}:{port}",
        processes,
        heartbeat_timeout=heartbeat_seconds,
        shutdown_timeout=heartbeat_seconds,
    )
    return service, port


async def keep(host: str | None, port: int, processes: int, heartbeat_seconds: int) -> None:
    """Serve until process 0, which holds the other end of this process's stdin, is gone, and then
    until the others have left too, but at most for `LINGER_SECONDS`."""
    board = BoardServer()
    try:
        server = await asyncio.start_server(board.serve, host, port, limit=LINE_BYTES)
    except OSError as error:
        code = error.errno or 0  # negative if a host cannot be looked up
        reason = os.strerror(code) if code > 0 else error.strerror or str(error)
        print(json.dumps({"error": reason}), flush=True)
        return
    _service, jax_port = start_jax_service(host, processes, heartbeat_seconds)
    board.answer("set", "jax/port", str(jax_port))
    print(json.dumps({"jax_port": jax_port}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    for _ in range(int(LINGER_SECONDS / 0.1)):
        if not board.hosts or not any(board.connections.values()):
            break
        await asyncio.sleep(0.1)
    server.close()
    # An orderly shutdown of the service would wait for processes that may be dead.
    os._exit(0)


def main() -> None:
    host, port, processes, heartbeat_seconds = sys.argv[1], *map(int, sys.argv[2:])
    try:
        asyncio.run(keep(host or None, port, processes, heartbeat_seconds))
    except Exception as error:
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(json.dumps({"crash": line}), flush=True)


if __name__ == "__main__":
    main()
