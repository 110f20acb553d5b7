"""What a run writes about itself: metric records and a summary.

    write(step, values) --> metrics.jsonl   one JSON object per line: {"step": 7, "time": ..., "loss": 2.3, ...}
                        --> tensorboard/    numbers only
                        --> wandb           if a project is named
    write_message(..)   --> metrics.jsonl   {"step": 7, "time": ..., "process": 1, "message": "masked: a.png: ..."}

Only the main process writes.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import jax
import numpy as np

from jaxmllm.config.schema import ConfigError
from jaxmllm.runtime.files import write_atomically

METRICS_FILE = "metrics.jsonl"
EXAMPLES_FILE = "examples.jsonl"
SUMMARY_FILE = "summary.json"
WANDB_ID_FILE = "wandb_id.txt"
FLUSH_SECONDS = 10  # least time between flushes of an event file

Scalar = float | int | str | bool | None


class MetricsWriter:
    """Writes metric records of a run folder. On processes other than the main one, it does nothing.

    A resumed run calls `resume_from` before its first write. Numbers may be scalars of Python,
    numpy or JAX (reading the latter waits for the device). JSON has no NaN and no infinity: these
    become null in JSON and are kept in TensorBoard.
    """

    def __init__(
        self,
        run_directory: str | Path,
        tensorboard: bool = True,
        wandb: str | None = None,
        is_main: bool = True,
    ) -> None:
        self.directory = Path(run_directory)
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._is_main = is_main
        self._resumed_from: int | None = None
        self._stream: TextIO | None = None
        self._examples: TextIO | None = None
        self._sinks: list[Sink] = []

    @property
    def path(self) -> Path:
        """File of the metric records."""
        return self.directory / METRICS_FILE

    def resume_from(self, step: int) -> None:
        """Drop the records of steps after `step`, and a last line cut short by a kill, so that the
        files stay one continuous history. Each file is replaced atomically. Other lines that are
        not records are dropped too; the old file is then kept next to the new one, and a line on
        stdout says so."""
        if self._stream is not None:
            raise RuntimeError("resume_from must be called before the first write")
        self._resumed_from = step
        if self._is_main:
            for path in (self.path, self.directory / EXAMPLES_FILE):
                if path.exists():
                    _trim_records(path, step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one record; it is on disk when this returns."""
        if not self._is_main:
            return
        numbers = {name: _scalar(value) for name, value in values.items()}
        self._append(step, numbers)
        for sink in self._sinks:
            sink.write(step, numbers)

    def write_message(self, step: int, process: int, message: str) -> None:
        """Add a message of a process as a record of its own, to metrics.jsonl only."""
        if self._is_main:
            self._append(step, {"process": process, "message": message})

    def write_examples(self, step: int, ids: Sequence[str]) -> None:
        """Add a line with the ids of a step's examples, in order, to examples.jsonl."""
        if self._is_main:
            if self._examples is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._examples = (self.directory / EXAMPLES_FILE).open("a", encoding="utf-8")
            self._examples.write(json.dumps({"step": step, "ids": list(ids)}) + "\n")
            self._examples.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically; values may be nested dicts and lists."""
        if self._is_main:
            text = json.dumps(_json_value(summary), indent=2, allow_nan=False) + "\n"
            write_atomically(self.directory / SUMMARY_FILE, text)

    def close(self) -> None:
        """Close all files and sinks."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._examples is not None:
            self._examples.close()
            self._examples = None
        with ExitStack() as stack:  # closes every sink even if one of them raises
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks = []

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # otherwise that error says why the run ends
                raise

    def _append(self, step: int, values: Mapping[str, Scalar]) -> None:
        if self._stream is None:
            self._open_files()
        assert self._stream is not None
        record = {
            "step": step,
            "time": round(time.time(), 3),
            **{k: _finite(v) for k, v in values.items()},
        }
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")
        self._stream.flush()

    def _open_files(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._tensorboard:
            self._sinks.append(TensorBoardSink(self.directory / "tensorboard", self._resumed_from))
        if self._wandb is not None:
            self._sinks.append(WandbSink(self.directory, self._wandb))
        self._stream = self.path.open("a", encoding="utf-8")


class Sink(Protocol):
    """A further destination of metric records."""

    def write(self, step: int, values: Mapping[str, Scalar]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """An event file of TensorBoard, which does not show events of steps after `resumed_from` that
    earlier processes wrote.

    tensorboardX's `SummaryWriter` is not used: it writes from a thread that ends at the first disk
    error, and adding to its full queue then waits for ever. Here such an error is raised, as an
    `OSError`.
    """

    def __init__(self, directory: Path, resumed_from: int | None) -> None:
        # Imported here because it is slow and only one process needs it
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._scalar = scalar
        self._event = Event
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        self._last_flush = time.monotonic()
        if resumed_from is not None:
            self._add_event(resumed_from + 1, file_version="brain.Event:2")
            self._add_event(resumed_from + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._add_event(step, summary=self._scalar(name, float(value)))
        if time.monotonic() - self._last_flush >= FLUSH_SECONDS:  # a flush waits for the disk
            self._writer.flush()
            self._last_flush = time.monotonic()

    def _add_event(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        self._writer.close()


def imported_wandb(project: str) -> Any:
    """The wandb package, for `logging.wandb` = `project`. Raises `ConfigError` if it is not
    installed."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb={project!r} needs the wandb package: install jaxmllm[wandb] or set logging.wandb=null"
        ) from error
    return wandb


class WandbSink:
    """A Weights & Biases run. Its id is kept in the run folder, so a resumed run continues it."""

    def __init__(self, directory: Path, project: str) -> None:
        wandb = imported_wandb(project)
        id_file = directory / WANDB_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        self._run: Any = wandb.init(project=project, dir=str(directory), id=run_id, resume="allow")
        write_atomically(id_file, f"{self._run.id}\n")

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(run_directory: str | Path) -> list[dict[str, Any]]:
    """All complete records of a run, in the order written; empty if nothing was written yet."""
    path = Path(run_directory) / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(_parsed_record, lines) if record is not None]


def read_summary(run_directory: str | Path) -> dict[str, Any] | None:
    """Content of summary.json; None if there is no such file or it cannot be read."""
    try:
        summary = json.loads((Path(run_directory) / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _trim_records(path: Path, step: int) -> None:
    """Keep only records up to `step` in a file of one per line, which may be larger than memory."""

    def kept_lines() -> Iterator[str]:
        damaged = 0
        with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            for line in stream:
                record = _parsed_record(line)
                if record is not None and record["step"] <= step:
                    yield line.removesuffix("\n") + "\n"
                # A last line without a line end is no damage: it was cut when the run was killed.
                damaged += record is None and line.endswith("\n") and bool(line.strip())
        if damaged:
            aside = path.with_name(f"{path.name}.damaged")
            # The file is still as it was: it is replaced after the last line has been yielded.
            shutil.copyfile(path, aside)
            print(
                f"{path}: {damaged} lines are no records and are left out; the file as it was is {aside.name}"
            )

    write_atomically(path, kept_lines())


def _parsed_record(line: str) -> dict[str, Any] | None:
    """The record in a line; None if the line is not one, for instance because it was cut short."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _scalar(value: Any) -> Scalar:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        value = value.item()
    if value is not None and not isinstance(value, int | float | str):
        raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")
    return value


def _finite(value: Scalar) -> Scalar:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_value(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _json_value(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_json_value(value) for value in node]
    return _finite(_scalar(node))
