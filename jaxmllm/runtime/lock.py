"""One run, one folder: `run.lock` says which process writes there, so that a second one is refused.

    run.lock   {"host", "pid", "process", "since", "token", "beat", "folder"}, rewritten every few seconds by a thread

A holder of the same boot of this machine is dead if no process has its number and start time, so a
run that was killed can resume at once. Any other holder, or one whose lock seems to be a copy from
another folder, can only be judged by its beat: the lock is taken over when `beat` has not changed
for `SILENCE_SECONDS`. Clocks of two machines are never compared.
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
# Time without a beat after which a holder elsewhere counts as dead: several missed beats
SILENCE_SECONDS = 60.0
SHARED_SECONDS = 30.0  # time limit for a new file to appear on a network file system
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder."""

    # Host name, pid namespace (containers on one machine may number their processes separately) and
    # boot id (machines may have the same name)
    host: str
    pid: int
    process: str  # start time of the process, because process numbers are reused
    since: str
    token: str
    beat: int = 0
    folder: int = 0  # inode of the run folder, which differs in a copy

    @staticmethod
    def here() -> Holder:
        """This process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return Holder(
            _machine_id(), os.getpid(), _start_time(os.getpid()) or "", since, uuid.uuid4().hex
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]} (since {self.since})"


class RunLock:
    """Context manager that holds a run folder for this process. Raises `CheckpointError`, which
    names the holder, if another process holds it.

    The thread that keeps the lock alive calls `lost` with one line if the folder was removed or
    moved away, or if another process has taken it over because this one was stopped for so long
    that it counted as dead. This process must then not write there any more.
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
        self._on_loss = lost or _end_process
        self._beat_seconds = beat_seconds
        self._silence = silence_seconds
        self._holder = Holder.here()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="run-lock", daemon=True)

    @property
    def token(self) -> str:
        """Identifier of this lock, which is in the lock file as long as the folder is held."""
        return self._holder.token

    def __enter__(self) -> RunLock:
        while not self._create_lock():
            holder = self._read_holder()
            if holder is None:
                continue  # it was released in between
            if not self._is_stale(holder):
                raise CheckpointError(
                    f"{self.path.parent} is held by {holder}: a second run would write into the same files; stop that "
                    "one, or choose another run.directory"
                )
            self._remove_stale(holder)
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
        holder = self._read_holder()
        if holder is not None and holder.token == self._holder.token:
            self.path.unlink(missing_ok=True)

    def _create_lock(self) -> bool:
        """Create the lock file with its whole content in one step, unless it exists."""
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

    def _read_holder(self) -> Holder | None:
        """Holder of the folder; None if there is none. A lock that cannot be parsed has an unknown
        holder elsewhere with its text as token, so that any change counts as a sign of life."""
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

    def _is_stale(self, holder: Holder) -> bool:
        """Whether the lock of `holder` may be taken over; may wait for a sign of life."""
        if holder.host == self._holder.host:
            if _start_time(holder.pid) != holder.process:
                return True
            # The holder lives and has this folder, or does not say which (0). Otherwise this folder
            # is a copy of the holder's, lock included, and only a beat can tell.
            if holder.folder in (0, self._holder.folder):
                return False
        self._say(
            f"{self.path.parent} was held by {holder}: waiting up to {self._silence:.0f} s for a sign of life before "
            "taking it over"
        )
        deadline = time.monotonic() + self._silence
        while time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, self._silence / 10))
            if self._read_holder() != holder:
                # Changed content is a sign of life; without a file, the lock was released.
                return self._read_holder() is None
        return True

    def _remove_stale(self, holder: Holder) -> None:
        """Remove a dead holder's lock, unless another process was faster and has renamed it."""
        aside = self.path.with_name(f"{LOCK_FILE}.{self._holder.token}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        content = aside.read_text(encoding="utf-8", errors="replace")
        if content.find(holder.token) < 0:  # made since by a living process: put it back
            aside.replace(self.path)
        else:
            aside.unlink()
            self._say(f"{self.path.parent}: the lock of {holder} was stale and is taken over")

    def _keep_alive(self) -> None:
        """Write a beat every few seconds, until `__exit__` or the folder is lost."""
        missing = False
        while not self._closed.wait(self._beat_seconds):
            try:
                holder = self._read_holder()
                if holder is None and missing:  # a `_remove_stale` may take it for a moment
                    self._on_loss(
                        f"{self.path} was removed, or its folder, under the run that holds it"
                    )
                    return
                missing = holder is None
                if holder is None:
                    continue  # a beat would create the folder again
                if holder.token != self._holder.token:
                    self._on_loss(
                        f"{self.path.parent} was taken over by {holder} while this process stood still"
                    )
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                write_atomically(self.path, _text(self._holder))
            except (OSError, CheckpointError):
                continue  # the disk may come back; if not, the run's own writes there fail


def shows_lock(folder: Path, token: str) -> bool:
    """Whether the lock file of `folder`, as this process sees it, shows this token within
    `SHARED_SECONDS`."""
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


def _machine_id() -> str:
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {numbers} {boot}".strip()


def _start_time(pid: int) -> str | None:
    """Start time of a process, which tells it from others with the same number; None if there is no
    such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *numbers = status.rpartition(")")[2].split()  # the command name may contain ")"
        return None if state in "ZX" else numbers[18]  # zombies write nothing
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        pass
    try:  # without /proc, only the number can be checked
        os.kill(pid, 0)
        return "unknown"
    except OSError:
        return None


def _end_process(line: str) -> None:
    print(f"error: {line}; this process ends without writing more", flush=True)
    os._exit(1)
