"""Messages of all processes, sent to the main one, which writes them to log and metrics.jsonl.

    process n   tell(step, lines)  --> key-value store of the coordinator -->  drain(..) main process
    any code    logging, warnings and above  --> WarningLog --> the same way

No step waits for another process here, and what a step can send is bounded: the text of the first
`SHOWN_LINES` messages of a process, and the number of the others.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmllm.data.printable import shown
from jaxmllm.runtime.board import POLL_SECONDS, Board, HostsError

SHOWN_LINES = 8  # of one process and step; a folder of broken media must not flood the coordinator
SHOWN_CHARACTERS = 500  # of one line
# How long a process that ends the run waits until the main one has published its messages
PUBLICATION_SECONDS = 10.0

# Every process begins its runs in the same order, so this number means the same run everywhere
_serial = itertools.count()


@dataclass(frozen=True)
class Message:
    """A line from a process about a step; steps count from 1, and 0 is before the first."""

    step: int
    process: int
    text: str


class Messages:
    """Sends messages from all processes to process 0, the main one. A single process needs no
    board."""

    def __init__(self, board: Board | None = None, process: int = 0) -> None:
        self._board = board
        self._process = process
        self._prefix = f"jaxmllm/messages/{next(_serial)}"
        self._sent_count = 0
        self._own_messages: list[Message] = []

    def tell(self, step: int, lines: Sequence[str]) -> None:
        """Send lines to the main process. If the coordinator is gone, print them to stderr and
        raise its `HostsError`."""
        if not lines:
            return
        lines = bounded(lines)
        if self._board is None or self._process == 0:
            self._own_messages += [Message(step, self._process, line) for line in lines]
            return
        # Padded with zeros, so that keys sort by process and then in the order of sending.
        key = f"{self._prefix}/{self._process:08d}/{self._sent_count:08d}"
        self._sent_count += 1
        try:
            self._board.key_value_set(key, json.dumps([step, lines]))
        except HostsError:
            print(*(f"step {step}: {line}" for line in lines), sep="\n", file=sys.stderr)
            raise

    def drain(self, publish: Callable[[Message], None]) -> None:
        """Publish the messages told since the last call, ordered by step; there are none except in
        the main process.

        A message that was told before a step's programs were started arrives before the step ends.
        """
        messages = self._own_messages
        self._own_messages = []
        entries: list[tuple[str, str]] = []
        if self._board is not None and self._process == 0:
            entries = sorted(self._board.key_value_dir_get(f"{self._prefix}/"))
        for key, value in entries:
            step, lines = json.loads(value)
            messages += [Message(step, int(key.split("/")[-2]), line) for line in lines]
        for message in sorted(messages, key=lambda message: (message.step, message.process)):
            publish(message)
        # Only after publication: `await_publication` takes the absence of keys as a sign of it.
        for key, _ in entries:
            assert self._board is not None
            self._board.key_value_delete(key)

    def await_publication(self, seconds: float = PUBLICATION_SECONDS) -> None:
        """Wait until the main process has published this one's messages, at most `seconds`: after
        that this process may end the run."""
        if self._board is None or self._process == 0:
            return
        deadline = time.monotonic() + seconds
        while (
            self._board.key_value_dir_get(f"{self._prefix}/{self._process:08d}/")
            and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)


def bounded(lines: Sequence[str]) -> list[str]:
    """The first few lines, each short and printable, and how many more there were."""
    sent_lines = [shown(line, SHOWN_CHARACTERS) for line in lines[:SHOWN_LINES]]
    left_out = len(lines) - len(sent_lines)
    return [*sent_lines, f"and {left_out} more like these"] if left_out else sent_lines


class WarningLog(logging.Handler):
    """Keeps, for the run's records, what jaxmllm's modules log from warnings up; still shows it.

    There is only one at a time: a new one replaces the one before.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logger = logging.getLogger("jaxmllm")
        for handler in [handler for handler in logger.handlers if isinstance(handler, WarningLog)]:
            logger.removeHandler(handler)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. Python shows warnings of loggers without a handler; this one must not
        silence them."""
        self._lines.append(shown(record.getMessage(), SHOWN_CHARACTERS))
        if not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def take(self) -> list[str]:
        """The lines since the last call."""
        self.acquire()  # other threads may log
        lines = self._lines
        self._lines = []
        self.release()
        return [f"warning: {line}" for line in lines]

    def close(self) -> None:
        """Stop keeping records."""
        logging.getLogger("jaxmllm").removeHandler(self)
        super().close()
