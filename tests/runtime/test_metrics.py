"""Records of metrics, their copies for TensorBoard and W&B, and the summary."""

import errno
import json
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import ConfigError
from jaxmllm.runtime.metrics import MetricsWriter, read_metrics


def strict_json(text: str) -> Any:
    """Parse JSON without the NaN and infinities that Python accepts."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_records_are_valid_json_and_flushed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(
            1,
            {
                "loss": jnp.float32(1.5),
                "rows": np.int64(3),
                "kind": "train",
                "grad_norm": float("nan"),
            },
        )
        (line,) = writer.path.read_text().splitlines()
        record = strict_json(line)
        assert record.pop("time") > 0
        assert record == {"step": 1, "loss": 1.5, "rows": 3, "kind": "train", "grad_norm": None}
        with pytest.raises(TypeError, match="not list"):
            writer.write(2, {"loss": [1.0]})


def test_resume_keeps_one_straight_history(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')  # cut short by a kill
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.resume_from(3)
        writer.write(4, {"loss": -4.0})
        with pytest.raises(RuntimeError, match="before the first write"):
            writer.resume_from(3)
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, -4.0),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "tail",
    [
        '{"step": 3, "loss": 3.0}',
        '{"step": 4, "loss": 4.0}\n{"step"',
        '{"step": 3, "loss": 3.0}\n\0',
    ],
)
def test_each_step_is_there_once_whatever_a_kill_left(tmp_path: Path, tail: str, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n' + tail
    )
    (tmp_path / "examples.jsonl").write_text(
        '{"step": 1, "ids": ["a"]}\n{"step": 2, "ids": ["b"]}\n{"step": 3, "i'
    )
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.resume_from(2)
        writer.write(3, {"loss": 3.0})
        writer.write_examples(3, ["c", "ü"])
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    examples = [json.loads(line) for line in (tmp_path / "examples.jsonl").read_text().splitlines()]
    assert examples == [
        {"step": 1, "ids": ["a"]},
        {"step": 2, "ids": ["b"]},
        {"step": 3, "ids": ["c", "ü"]},
    ]
    assert capsys.readouterr().out == ""


def test_a_damaged_file_of_records_is_put_aside_and_said(tmp_path: Path, capsys) -> None:
    content = b'{"step": 1, "loss": 1.0}\n\xff\xfe\n[]\n{"step": 2, "loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.resume_from(2)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    printed = capsys.readouterr().out
    assert (
        "metrics.jsonl: 2 lines are no records and are left out" in printed
        and printed.count("\n") == 1
    )


def test_files_of_records_are_not_held_in_memory(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 65):
            writer.write_examples(step, ["x" * 1000] * 64)
    size = (tmp_path / "examples.jsonl").stat().st_size
    tracemalloc.start()
    MetricsWriter(tmp_path, tensorboard=False).resume_from(32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Reading whole files would take `size` at least
    assert peak < size / 4
    assert (tmp_path / "examples.jsonl").stat().st_size == pytest.approx(size / 2, rel=1e-2)


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run", is_main=False) as writer:
        writer.resume_from(0)
        writer.write(1, {"loss": 1.0})
        writer.write_summary({"steps": 1})
    assert not (tmp_path / "run").exists()


def events(file: Path) -> list[Any]:
    """Events of a TensorBoard file, where lengths and events have checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = file.read_bytes()
    records = []
    while data:
        size = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + size]
        assert masked_crc32c(body) == int.from_bytes(data[12 + size : 16 + size], "little")
        records.append(Event.FromString(body))
        data = data[16 + size :]
    return records


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"loss": 2.5, "kind": "train"})
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [(event.step, value) for event in events(file) for value in event.summary.value]
    assert [(step, value.tag, value.simple_value) for step, value in values] == [(7, "loss", 2.5)]


def test_a_full_disk_under_the_event_file_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: str) -> Any:
        return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")

    monkeypatch.setattr("tensorboardX.record_writer.open_file", full_disk)
    with pytest.raises(ValueError, match="of the run"), MetricsWriter(tmp_path) as failing_writer:
        failing_writer.write(1, {"loss": 1.0})
        raise ValueError("of the run")  # the error of the disk must not hide this one
    errors: list[OSError] = []

    def write() -> None:
        writer = MetricsWriter(tmp_path)
        try:
            for step in range(1, 100):
                writer.write(step, {"loss": 1.0})
            writer.close()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert errors[0].errno == errno.ENOSPC


def test_what_an_event_file_shows_ends_where_a_resumed_run_begins(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog

    with MetricsWriter(tmp_path) as writer:
        writer.resume_from(3)
        writer.write(4, {"loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    first_steps = [
        event.step for event in events(file) if event.session_log.status == SessionLog.START
    ]
    assert first_steps == [4]


def test_wandb_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**arguments: Any) -> Any:
        calls.append(arguments["id"])
        return SimpleNamespace(
            id="r1", log=lambda values, step: calls.append((step, values)), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        with MetricsWriter(tmp_path, tensorboard=False, wandb="project") as writer:
            writer.write(step, {"loss": 1.0})
    assert calls == [None, (1, {"loss": 1.0}), "r1", (2, {"loss": 1.0})]


def test_missing_wandb_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging\.wandb='p' needs the wandb package"):
        MetricsWriter(tmp_path, tensorboard=False, wandb="p").write(1, {})


def test_summary(tmp_path: Path) -> None:
    summary = {
        "steps": 10,
        "eval": {"loss": jnp.float32(0.5), "exact_match": {"picture": float("inf")}},
        "m": (1, 2),
    }
    MetricsWriter(tmp_path).write_summary(summary)
    expected = {"steps": 10, "eval": {"loss": 0.5, "exact_match": {"picture": None}}, "m": [1, 2]}
    assert strict_json((tmp_path / "summary.json").read_text()) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
