"""Messages of several processes on their way to the main process."""

import logging
import threading

import pytest

from jaxmllm.runtime.board import HostsError
from jaxmllm.training.process_messages import (
    SHOWN_CHARACTERS,
    SHOWN_LINES,
    Message,
    Messages,
    WarningLog,
)
from tests.runtime.test_signals import MemoryBoard


class Store(MemoryBoard):
    """The part of the coordinator's store that messages need."""

    def key_value_delete(self, key: str) -> None:
        del self.values[key]


def drained(messages: Messages) -> list[Message]:
    published: list[Message] = []
    messages.drain(published.append)
    return published


@pytest.fixture
def board_and_processes(monkeypatch: pytest.MonkeyPatch) -> tuple[Store, list[Messages]]:
    """The store and the message ends of three processes of one run."""
    monkeypatch.setattr("jaxmllm.training.process_messages._serial", iter([0] * 3))
    board = Store()
    return board, [Messages(board, process) for process in range(3)]


def test_main_process_hears_all_and_leaves_nothing(
    board_and_processes: tuple[Store, list[Messages]],
) -> None:
    """Messages come in the order of steps, then of processes, and leave the store empty."""
    board, (main, process_1, process_2) = board_and_processes
    process_2.tell(4, ["masked: c.wav"])
    process_1.tell(3, ["masked: a.png", "masked: b.png"])
    process_1.tell(4, ["warning: slow"])
    process_1.tell(5, [])
    main.tell(4, ["masked: d.png"])
    assert len(board.values) == 3
    assert drained(main) == [
        Message(3, 1, "masked: a.png"),
        Message(3, 1, "masked: b.png"),
        Message(4, 0, "masked: d.png"),
        Message(4, 1, "warning: slow"),
        Message(4, 2, "masked: c.wav"),
    ]
    assert board.values == {} and drained(main) == []
    process_2.tell(6, ["again"])
    assert drained(main) == [Message(6, 2, "again")]


def test_many_and_long_lines_are_counted_and_cut(
    board_and_processes: tuple[Store, list[Messages]],
) -> None:
    board, (main, process_1, _) = board_and_processes
    process_1.tell(1, [f"{n}: {'x' * 9000}\n{n}" for n in range(1000)])
    (value,) = board.values.values()
    assert len(value) < SHOWN_LINES * (SHOWN_CHARACTERS + 30)
    texts = [message.text for message in drained(main)]
    assert (
        len(texts) == SHOWN_LINES + 1 and texts[-1] == f"and {1000 - SHOWN_LINES} more like these"
    )
    assert texts[3].startswith("3: xxx") and texts[3].endswith(r"xx\n3")


def test_a_run_of_one_process_needs_no_store() -> None:
    messages = Messages()
    messages.tell(2, ["a"])
    assert drained(messages) == [Message(2, 0, "a")]


def test_what_cannot_be_sent_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(Store):
        def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
            raise HostsError("the coordinator is gone")

    with pytest.raises(HostsError):
        Messages(Gone(), 1).tell(7, ["masked: a.png"])
    assert capsys.readouterr().err == "step 7: masked: a.png\n"


def test_a_process_waits_until_its_messages_are_published(
    board_and_processes: tuple[Store, list[Messages]],
) -> None:
    _, (main, process_1, process_2) = board_and_processes
    process_1.tell(1, ["masked: a.png"])
    process_2.tell(1, ["masked: b.png"])
    published: list[tuple[str, bool]] = []
    waiting = threading.Thread(target=process_1.await_publication, args=(60.0,))
    waiting.start()
    main.drain(lambda message: published.append((message.text, waiting.is_alive())))
    waiting.join(60)
    assert (
        published == [("masked: a.png", True), ("masked: b.png", True)] and not waiting.is_alive()
    )
    process_1.tell(2, ["masked: c.png"])
    process_1.await_publication(0.0)  # the main process is gone


def test_warnings_are_kept_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    replaced = WarningLog()
    log = WarningLog()
    logger = logging.getLogger("jaxmllm.data.index.builder")
    logger.warning("the index %s\nis damaged", "x")
    logger.info("nothing to keep")
    assert (
        log.take() == [r"warning: the index x\nis damaged"] and log.take() == replaced.take() == []
    )
    assert capsys.readouterr().err == "the index x\nis damaged\n", "once, as without a handler"
    log.close()
    logger.warning("later")
    assert log.take() == []
