"""The progress of a run: a bar on a terminal, and a few plain lines elsewhere."""

import io

import pytest

from jaxmllm.runtime.progress import ProgressBar


def test_progress_without_a_terminal_is_few_plain_lines() -> None:
    stream = io.StringIO()
    progress = ProgressBar(100, stream=stream, line_seconds=3600)
    for step in range(1, 101):
        progress.update(step, {"loss": 1 / step, "examples/s": 12.0})
    progress.print("saved [step 100]")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 1/100  loss 1  examples/s 12",
        "step 100/100  loss 0.01  examples/s 12",
        "saved [step 100]",
    ]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    progress = ProgressBar(100, stream=stream)
    progress.update(42, {"loss": 1.25})
    progress.close()
    assert "42/100" in stream.getvalue() and "loss 1.25" in stream.getvalue()
