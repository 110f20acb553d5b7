"""One run, one folder: `run.lock` says which process writes there, and refuses the second one.

    run.lock   {"host", "pid", "process", "since", "token", "beat", "folder"}, rewritten every few seconds by a thread

A holder on this machine, since it was booted, is dead when no process has its number and its start,
so that a run that was killed resumes at once. Of any other holder, and where the lock seems to be a
copy from another folder, only its heart can be heard: when
`beat` has not changed for `SILENCE_SECONDS`, the lock is taken over. Clocks of two machines are never
compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.files import write_atomically

LOCK_FILE = "run.lock"
BEAT_SECONDS = 10.0
# Without a beat, after which a holder elsewhere counts as dead: several missed beats
SILENCE_SECONDS = 60.0
SHARED_SECONDS = 30.0  # network file systems may show a new file late
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder."""

    # Machine, its set of process numbers (containers of one machine may count for themselves), and its boot (machines
    # may have one name)
    host: str
    pid: int
    process: str  # start of that process: numbers are used again
    since: str
    token: str
    beat: int = 0
    folder: int = 0  # its number in the file system: a copy has another

    @staticmethod
    def here() -> Holder:
        """This process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return Holder(
            _machine(), os.getpid(), _start_of(os.getpid()) or "", since, uuid.uuid4().hex
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]} (since {self.since})"


class RunLock:
    """Context manager that holds a run folder for this process, or raises `CheckpointError` naming who does.

    `lost` is called, by the thread that keeps the lock alive, with one line when the folder was
    removed or moved away, or another process has taken it over: this process was stopped for so
    long that it counted as dead. It must not write there any more.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None] = print,
        lost: Callable[[str], None] | None = None,
        beat_seconds: float = BEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.path = folder / LOCK_FILE
        self._say = say
        self._lost = lost or _end_process
        self._beat = beat_seconds
        self._silence = silence_seconds
        self._holder = Holder.here()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)

    @property
    def token(self) -> str:
        """What tells this lock from all others, in the lock file as long as the folder is held."""
        return self._holder.token

    def __enter__(self) -> RunLock:
        while not self._take():
            holder = self._read()
            if holder is None:
                continue  # it was released in between
            if not self._dead(holder):
                raise CheckpointError(
                    f"{self.path.parent} is held by {holder}: a second run would write into the same files; stop that "
                    "one, or choose another run.directory"
                )
            self._remove(holder)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        holder = self._read()
        if holder is not None and holder.token == self._holder.token:
            self.path.unlink(missing_ok=True)

    def _take(self) -> bool:
        """Make the lock file unless it exists, whole from its first moment on."""
        draft = self.path.with_name(f"{LOCK_FILE}.{self._holder.token}")
        try:
            self._holder = replace(self._holder, folder=self.path.parent.stat().st_ino)
            draft.write_text(_text(self._holder), encoding="utf-8")
            try:
                os.link(draft, self.path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                try:
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                except FileExistsError:
                    return False
                draft.replace(self.path)
            return True
        except OSError as error:
            raise CheckpointError(
                f"run.directory: {self.path} cannot be written ({error.strerror})"
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def _read(self) -> Holder | None:
        """Who holds the folder; a lock that cannot be read has an unknown holder elsewhere, whose beat is its text."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"run.directory: {self.path} cannot be read ({error.strerror})"
            ) from error
        try:
            return Holder(**json.loads(text))
        except (ValueError, TypeError):
            return Holder("unknown", 0, "", "an unknown time", text)

    def _dead(self, holder: Holder) -> bool:
        if holder.host == self._holder.host:
            if _start_of(holder.pid) != holder.process:
                return True
            if holder.folder in (0, self._holder.folder):
                return False
        self._say(
            f"{self.path.parent} was held by {holder}: waiting up to {self._silence:.0f} s for a sign of life before "
            "taking it over"
        )
        deadline = time.monotonic() + self._silence
        while time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, self._silence / 10))
            if self._read() != holder:
                return self._read() is None
        return True

    def _remove(self, holder: Holder) -> None:
        """Take a dead holder's lock away, unless another process was faster: the one that moves it has it."""
        aside = self.path.with_name(f"{LOCK_FILE}.{self._holder.token}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        content = aside.read_text(encoding="utf-8", errors="replace")
        if content.find(holder.token) < 0:  # a living one's, made since: give it back
            aside.replace(self.path)
        else:
            aside.unlink()
            self._say(f"{self.path.parent}: the lock of {holder} was stale and is taken over")

    def _keep(self) -> None:
        missing = False
        while not self._closed.wait(self._beat):
            try:
                holder = self._read()
                if holder is None and missing:  # twice: another process moves it to see whose it is
                    self._lost(
                        f"{self.path} was removed, or its folder, under the run that holds it"
                    )
                    return
                missing = holder is None
                if holder is None:
                    continue  # no beat, which would make the folder anew
                if holder.token != self._holder.token:
                    self._lost(
                        f"{self.path.parent} was taken over by {holder} while this process stood still"
                    )
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                write_atomically(self.path, _text(self._holder))
            except (OSError, CheckpointError):
                continue  # the disk of the folder may come back; what the run itself writes there says so


def shows_lock(folder: Path, token: str) -> bool:
    """Whether the lock file of `folder`, as this process sees it, has this token within `SHARED_SECONDS`."""
    deadline = time.monotonic() + SHARED_SECONDS
    while True:
        with suppress(OSError):
            if token in (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace"):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)


def _text(holder: Holder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _machine() -> str:
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {numbers} {boot}".strip()


def _start_of(pid: int) -> str | None:
    """What tells a process from others that have had its number; none: there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *numbers = status.rpartition(")")[2].split()  # the name before it may hold anything
        return None if state in "ZX" else numbers[18]  # a zombie writes nothing
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        pass
    try:  # no /proc: the number is all there is
        os.kill(pid, 0)
        return "unknown"
    except OSError:
        return None


def _end_process(line: str) -> None:
    print(f"error: {line}; this process ends without writing more", flush=True)
    os._exit(1)
