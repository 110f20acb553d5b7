"""Runs whose data workers are killed, fail or hang continue, or end with a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxmllm.config.read import parse_config
from jaxmllm.data.sources.source import DataError
from jaxmllm.runtime.signals import StopSignals
from jaxmllm.setup.build import build_run
from jaxmllm.training.loop import train
from tests.data.workers.elements import alive, children
from tests.support import tiny_config, train_command

pytestmark = pytest.mark.slow

LONG = 600  # seconds; the bound catches a hang and nothing else


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return build_run(parse_config(tiny_config(data, run={"directory": str(folder), "steps": 200})))


def changed(run: Any, folder: Path, at: int, happens: Any) -> Any:
    """The run in another folder; `happens` is called when it loads step `at`."""
    batches = replace(run.batches, filler=At(run.batches.filler, at, happens))
    config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"directory": str(folder)})}
    )
    return replace(run, batches=batches, config=config)


@dataclass(frozen=True)
class At:
    """A filler that first calls `happens` for one step."""

    filler: Any
    step: int
    happens: Any

    def __call__(self, step, examples, cancelled):
        if step == self.step:
            self.happens(cancelled)
        return self.filler(step, examples, cancelled)


def checkpoints(folder: Path) -> list[str]:
    return [path.name for path in (folder / "checkpoints").iterdir()]


def test_data_that_fails_ends_the_run_with_a_checkpoint(run, tmp_path):
    def fail(cancelled):
        raise DataError("data.jsonl:7 is not what was indexed")

    with pytest.raises(DataError, match=r"data\.jsonl:7"):
        train(changed(run, tmp_path, 3, fail))
    assert checkpoints(tmp_path) == ["3"] and list(losses(tmp_path)) == [1, 2, 3]
    with pytest.raises(DataError, match=r"data\.jsonl:7"):  # there is nothing new to save
        train(changed(run, tmp_path, 3, fail))
    assert checkpoints(tmp_path) == ["3"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_request_to_stop_does_not_wait_for_data(run, tmp_path):
    stop = StopSignals()
    before = set(threading.enumerate())

    def hang(cancelled):
        while 1 not in losses(tmp_path):  # it is written once the second step has started
            time.sleep(0.01)
        time.sleep(0.5)
        stop.requested = True
        while not cancelled():
            time.sleep(0.01)
        raise CancelledError

    summary = train(changed(run, tmp_path, 2, hang), stop)
    assert summary["steps"] == 2 and checkpoints(tmp_path) == ["2"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2
    assert not [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("data-")
    ]


def test_a_run_goes_on_when_workers_are_killed_and_stops_when_its_group_is_told_to(
    data, run, tmp_path
):
    """Three workers are killed, then the process group is interrupted.

    The run saves and ends, and its losses are those of an uninterrupted run.
    """
    tree = tiny_config(
        data, run={"directory": str(tmp_path / "run"), "steps": 200}, data__workers=2
    )
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            train_command(config), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    killed: list[int] = []
    step = 2
    try:
        for _ in range(3):
            wait_for_step(process, tmp_path / "run", step)
            killed.append(max(wait_for_workers(process, killed)))
            os.kill(killed[-1], signal.SIGKILL)
            # By then the killed worker's data is trained on: a third death over the same data ends
            # a run
            step = max(losses(tmp_path / "run")) + 10
        wait_for_step(process, tmp_path / "run", step)
        workers = wait_for_workers(process, killed)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    printed = (tmp_path / "output").read_text()
    assert printed.count(
        "was killed by SIGKILL (out of memory?); another one loads it again"
    ) == len(killed)
    assert "Traceback" not in printed and "KeyboardInterrupt" not in printed
    assert all(f"(process {pid})" in printed for pid in killed)
    assert len(workers) == 2 and not any(map(alive, workers))
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert checkpoints(tmp_path / "run") == [str(steps)] and step <= steps < 200

    uninterrupted = run.config.run.model_copy(
        update={"directory": str(tmp_path / "whole"), "steps": steps}
    )
    train(replace(run, config=run.config.model_copy(update={"run": uninterrupted})))
    expected = losses(tmp_path / "whole")
    actual = losses(tmp_path / "run")
    assert list(actual) == list(expected) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + LONG
    while max(losses(folder), default=0) < step:
        assert process.poll() is None and time.monotonic() < deadline, (
            f"step {step} was not reached: {(folder.parent / 'output').read_text()[-3000:]}"
        )
        time.sleep(0.01)


def wait_for_workers(process: subprocess.Popen, killed: list[int]) -> set[int]:
    """Two living workers.

    The reader may replace a killed worker only some steps later.
    """
    deadline = time.monotonic() + LONG
    while len(workers := set(filter(alive, children(process.pid))).difference(killed)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, "a worker is missing"
        time.sleep(0.01)
    return workers
