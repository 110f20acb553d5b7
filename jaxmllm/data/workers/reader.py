"""Elements of several sources in order, loaded ahead by worker processes, or by a thread if there
are no workers.

    Reader: step k, k + 1, .. k + window --tasks--> queue --> thread --request--> its worker process
                      elements in order  <--futures--            <--element in shared memory--

An element is a pure function of its number, so any worker may load it. A worker that died is
replaced, and the element that it was loading is loaded again. Waiting has no limit, but is
reported. Every other problem is raised where the element is due, after all elements before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from jaxmllm.data.workers.memory import share
from jaxmllm.data.workers.worker import Worker, WorkerDied, block_signals

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ATTEMPTS = 3  # give an element up when its third worker dies: that is no accident
PAUSE_SECONDS = 1.0  # pause before a second retry, in case memory was short
POLL_SECONDS = 0.5
# Report waiting for one element after this time, and again whenever the time has doubled
FIRST_NOTICE_SECONDS = 60.0
# Wait this long for threads, and for processes that wait for a disk: neither can be ended
CLOSE_SECONDS = 2.0

_log = logging.getLogger(__name__)


class LoadError(RuntimeError):
    """An element cannot be loaded although its data may be sound: its workers died, memory ran out,
    or a file could not be read."""


class Interrupted(Exception):
    """The element that is being waited for is no longer wanted."""


class Elements(Protocol[T_co]):
    """Elements by number: element k is `filler(k, examples(k))`. The filler is sent to the workers.

    If there are no workers, the filler gets a third argument: a function that returns True once the
    element is no longer wanted. The filler should then raise `CancelledError`, because a thread
    cannot be ended from outside.
    """

    @property
    def name(self) -> str: ...  # of one element, for messages
    @property
    def filler(self) -> Callable[..., T_co]: ...
    def examples(self, k: int) -> Any: ...
    def __len__(self) -> int: ...


@dataclass
class _Task(Generic[T]):
    source: int
    number: int
    what: str
    future: Future[T] = field(default_factory=Future)
    state: str = "no worker is free"  # for messages about waiting


class Loader(Generic[T]):
    """Worker processes (`workers` of them; 0: a thread) that load elements of several sources.

    Each `Reader` has `prefetch` elements loaded ahead, at least one per worker. When a worker died
    or an element takes long, `say` is called with one line, always in the thread that reads. While
    that thread waits for an element, it raises `Interrupted` as soon as `interrupted` returns True.
    A context manager; `close` takes a few seconds at most, whatever the workers do.
    """

    def __init__(
        self,
        sources: Sequence[Elements[T]],
        workers: int,
        prefetch: int,
        say: Callable[[str], None] = _log.warning,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.window = max(prefetch, workers)
        self._sources = sources
        self._say = say
        self._interrupted = interrupted
        self._tasks: queue.SimpleQueue[_Task[T] | None] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # so that no worker starts during or after `close`
        self._workers: dict[int, Worker] = {}  # by the number of their thread
        self._functions = share([source.filler for source in sources]) if workers else None
        self._threads = [
            threading.Thread(
                target=self._run, args=(thread_index,), name=f"data-{thread_index}", daemon=True
            )
            for thread_index in range(max(1, workers))
        ]
        for thread in self._threads:
            thread.start()

    def read(self, source: Elements[T], start: int, stop: int) -> Reader[T]:
        """Elements start .. stop - 1 of one of the sources, in order."""
        (source_index,) = (
            source_index
            for source_index, candidate in enumerate(self._sources)
            if candidate is source
        )
        return Reader(self, source_index, start, stop)

    def submit(self, source: int, element: int) -> _Task[T]:
        """Queue an element to be loaded."""
        task: _Task[T] = _Task(source, element, f"{self._sources[source].name} {element + 1}")
        if self._closed.is_set():
            raise LoadError(f"{task.what}: the loader of its data is closed")
        self._tasks.put(task)
        return task

    def result(self, task: _Task[T]) -> T:
        """Wait for an element. Raises the error of loading it, `LoadError` and `Interrupted`."""
        began = time.monotonic()
        notice = FIRST_NOTICE_SECONDS
        # Waits are short, so that interruptions and lines of the loader's threads are noticed.
        while not wait_for([task.future], POLL_SECONDS).done:
            if self._interrupted():
                raise Interrupted(f"{task.what}: not waited for")
            waited = time.monotonic() - began
            if waited >= notice:
                self._say(f"{task.what}: waiting for its data for {waited:.0f} s; {task.state}")
                notice *= 2
            self._say_lines()
        # Lines since the last wait may explain an error that is raised next.
        self._say_lines()
        return task.future.result()

    def close(self) -> None:
        """End the workers at once, and drop the elements that they were loading."""
        if self._closed.is_set():
            return
        with self._lock:
            self._closed.set()
            workers = list(self._workers.values())
        # When a worker is killed, its call fails, and its thread finds the loader closed before it
        # retries. A thread that waits for a task gets `None`.
        for worker in workers:
            worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._functions is not None:
            os.close(self._functions)
            self._functions = None

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _say_lines(self) -> None:
        while not self._lines.empty():
            self._say(self._lines.get())

    # ------------------------------------------------------------------ in the loader's threads

    def _run(self, thread: int) -> None:
        block_signals()
        load = self._load_in_thread
        if self._functions is not None:
            load = self._load_in_worker
            with contextlib.suppress(LoadError, CancelledError):  # the first task reports it
                self._running_worker(thread)  # started now, so that it is ready for the first task
        while (task := self._tasks.get()) is not None:
            if self._closed.is_set():
                task.future.cancel()
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                examples = self._sources[task.source].examples(task.number)
                task.future.set_result(load(thread, task, examples))
            except BaseException as error:
                task.future.set_exception(_explained_error(task, error))
            del task  # frees the memory of the element while the thread waits for the next task

    def _load_in_thread(self, thread: int, task: _Task[T], examples: Any) -> T:
        task.state = "a thread of this process is loading it"
        return self._sources[task.source].filler(task.number, examples, self._closed.is_set)

    def _load_in_worker(self, thread: int, task: _Task[T], examples: Any) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            worker = self._running_worker(thread)
            task.state = f"data worker (process {worker.pid}) is loading it"
            try:
                return worker.call(task.source, task.number, examples)
            except WorkerDied as death:
                with self._lock:
                    self._workers.pop(thread).wait(CLOSE_SECONDS)
                line = f"{task.what}: {death}"
            # No pause before the first retry, then longer ones, which end when the loader closes.
            if self._closed.wait(PAUSE_SECONDS * (attempt - 1)):
                raise CancelledError
            if attempt < ATTEMPTS:
                self._lines.put(f"{line}; another one loads it again")
        raise LoadError(
            f"{line}, and so did {ATTEMPTS - 1} before it with the same data; if memory is short, lower data.workers, "
            f"data.prefetch or data.batch_size"
        )

    def _running_worker(self, thread: int) -> Worker:
        with self._lock:
            if self._closed.is_set():
                raise CancelledError
            if thread not in self._workers:
                assert self._functions is not None
                try:
                    self._workers[thread] = Worker(self._functions)
                except OSError as error:
                    raise LoadError(
                        f"a data worker cannot be started: {error}; lower data.workers"
                    ) from error
            return self._workers[thread]


class Reader(Iterator[T]):
    """Elements of one source in order. The next ones are loaded while the caller works on one."""

    def __init__(self, loader: Loader[T], source: int, start: int, stop: int) -> None:
        self._loader = loader
        self._source = source
        self._next_element = start  # the element to be loaded next
        self._stop = stop
        self._tasks_ahead: deque[_Task[T]] = deque()
        self._load_ahead()

    def __next__(self) -> T:
        """The next element. Raises the error that loading it raised, such as `DataError`, and
        `LoadError` and `Interrupted`."""
        if not self._tasks_ahead:
            raise StopIteration
        # The task stays first until its result is there: an interrupted wait skips no element.
        element = self._loader.result(self._tasks_ahead[0])
        self._tasks_ahead.popleft()
        self._load_ahead()
        return element

    def close(self) -> None:
        """Drop the elements that were loaded ahead."""
        while self._tasks_ahead:
            self._tasks_ahead.pop().future.cancel()
        self._stop = self._next_element

    def _load_ahead(self) -> None:
        while self._next_element < self._stop and len(self._tasks_ahead) < self._loader.window:
            self._tasks_ahead.append(self._loader.submit(self._source, self._next_element))
            self._next_element += 1


def _explained_error(task: _Task[Any], error: BaseException) -> BaseException:
    """An error to raise: one that came from the machine, not the data, as a `LoadError` in one
    line, and any other unchanged."""
    if isinstance(error, MemoryError):
        cure = "lower data.workers, data.prefetch or data.batch_size"
    elif isinstance(error, OSError):
        cure = "see that its files can be read, then resume the run"
    else:
        return error
    explained = LoadError(
        f"{task.what} cannot be loaded: {str(error) or 'no memory is left'}; {cure}"
    )
    explained.__cause__ = error
    return explained
