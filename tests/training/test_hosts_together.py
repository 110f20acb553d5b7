"""Processes of a run that are signalled, differ, die, stop, start late or never start.

All of them end soon, or wait, with one line that says why.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxmllm.runtime.signals import SAME_REQUEST_SECONDS
from tests.support import EXHAUSTIVE, tiny_config, train_command

pytestmark = pytest.mark.slow

SOON = 120  # seconds; the bound catches a hang, on a machine that does other things as well


class Group:
    """The processes of one run; each has a process group of its own, with its workers."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        processes: int,
        *arguments: str,
        without: int | None = None,
        of_process: dict[int, list[str]] | None = None,
    ) -> None:
        self.folder = folder / "run"
        numbers = [process for process in range(processes) if process != without]
        self.logs = [folder / f"log-{process}" for process in numbers]
        self.processes = []
        port = free_port()
        for process, log in zip(numbers, self.logs, strict=True):
            environment = os.environ | {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
                "NPROC": "8",
            }
            if processes > 1:
                environment |= {
                    "JAXMLLM_COORDINATOR": f"127.0.0.1:{port}",
                    "JAXMLLM_PROCESSES": str(processes),
                    "JAXMLLM_PROCESS_ID": str(process),
                }
            command = train_command(
                config,
                f"run.directory={self.folder}",
                *arguments,
                *(of_process or {}).get(process, []),
            )
            with log.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 2 * SOON
        while not condition():
            assert all(process.poll() is None for process in self.processes), (
                f"ended before {what}: {self.output()}"
            )
            assert time.monotonic() < deadline, f"never {what}: {self.output()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        self.wait_until(
            lambda: path.exists() and f'{{"step": {step},' in path.read_text(), f"step {step}"
        )

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.killpg(process.pid, number)

    def codes(self) -> list[int]:
        """Wait for all processes, and return their exit codes."""
        deadline = time.monotonic() + SOON
        for process in self.processes:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running: {self.output()}") from None
        return [process.returncode for process in self.processes]

    def output(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self.logs)

    def assert_saved(self) -> int:
        """The run has ended well; its last step, which is returned, has summary and checkpoint."""
        assert self.codes() == [0] * len(self.processes), self.output()
        assert "Traceback" not in self.output()
        step = json.loads((self.folder / "summary.json").read_text())["steps"]
        assert (self.folder / "checkpoints" / str(step)).is_dir()
        return step

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(data, tmp_path):
    """Begin a run on some processes; by default it is longer than any test."""
    groups: list[Group] = []

    def begin(
        processes: int = 1,
        *arguments: str,
        without: int | None = None,
        of_process: dict[int, list[str]] | None = None,
        **changes: Any,
    ) -> Group:
        tree = tiny_config(data, run={"directory": "unset", "steps": 5000}, **changes)
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(tree))
        groups.append(
            Group(tmp_path, config, processes, *arguments, without=without, of_process=of_process)
        )
        return groups[-1]

    yield begin
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    ("processes", "workers", "number"),
    [
        pytest.param(1, 1, signal.SIGINT, marks=EXHAUSTIVE),
        (2, 1, signal.SIGTERM),
        pytest.param(2, 0, signal.SIGINT, marks=EXHAUSTIVE),
    ],
)
def test_a_signal_in_a_step_saves_and_a_resumed_run_stops_again(start, processes, workers, number):
    group = start(processes, f"data.workers={workers}")
    group.wait_for_step(2)
    group.send(number)
    assert group.assert_saved() >= 2
    if processes == 1:
        resumed = start(processes, f"data.workers={workers}", "--resume")
        resumed.wait_for_step(json.loads((group.folder / "summary.json").read_text())["steps"] + 1)
        resumed.send(number)
        assert resumed.assert_saved() > 2


@pytest.mark.parametrize("processes", [pytest.param(1, marks=EXHAUSTIVE), 2])
def test_a_signal_before_the_first_step_is_one_line(start, processes):
    group = start(processes)
    # With devices, JAX has more than 8 threads; indexing and compiling come next and take seconds
    group.wait_until(
        lambda: all(threads(process.pid) > 8 for process in group.processes), "devices"
    )
    group.send(signal.SIGTERM)
    assert group.codes() == [128 + signal.SIGTERM] * processes, group.output()
    for log in group.logs:
        lines = [line for line in log.read_text().splitlines() if not re.match(r"\[Gloo\]", line)]
        assert lines[-1] == "stopped by SIGTERM before the first step: there is nothing to save"
        assert "Traceback" not in log.read_text()
    assert not (group.folder / "summary.json").exists()


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.parametrize("processes", [pytest.param(1, marks=EXHAUSTIVE), 2])
def test_signals_while_checkpoints_are_written_and_evaluations_run(start, processes):
    group = start(processes, checkpoint={"every": 1}, evaluation={"every": 1})
    group.wait_for_step(2)
    group.wait_until(lambda: drafts(group.folder / "checkpoints"), "writing a checkpoint")
    group.send(signal.SIGINT)
    assert group.assert_saved() >= 2


def drafts(folder: Path) -> list[str]:
    """Checkpoints that are being written."""
    return [name for name in os.listdir(folder) if "tmp" in name]


@pytest.mark.parametrize("processes", [2])
def test_a_second_signal_ends_all_at_once(start, processes):
    """After a first signal processes save; a second one ends them without that."""
    group = start(processes, "data.workers=1")
    group.wait_for_step(2)
    for process in group.processes:  # so that neither saves before the second signal comes
        os.kill(process.pid, signal.SIGSTOP)
    group.send(signal.SIGTERM)
    time.sleep(2 * SAME_REQUEST_SECONDS)
    for process in group.processes:
        os.kill(process.pid, signal.SIGCONT)
    time.sleep(SAME_REQUEST_SECONDS)
    group.send(signal.SIGTERM)
    for code, log in zip(group.codes(), group.logs, strict=True):
        text = log.read_text()
        assert "Traceback" not in text
        # A process that was slow to see the first signal takes the second for the same one. By the
        # time the other ends, it has saved, or it ends with the other.
        ended_by_other = code == 1 and re.fullmatch(
            r"error: process \d \(.*\): stopped by a second signal.*", text.splitlines()[-1]
        )
        assert code in (0, 128 + signal.SIGTERM) or ended_by_other, text[-3000:]


# ---------------------------------------------------------------------------- processes that miss one

LIMITS = {"start_timeout": 240, "peer_timeout": 20}


def error_lines(log: Path) -> list[str]:
    text = log.read_text()
    assert "Traceback" not in text and "Check failure" not in text, text[-3000:]
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("victim", "number", "said"),
    [
        pytest.param(1, signal.SIGKILL, "was killed or crashed", marks=EXHAUSTIVE),
        (0, signal.SIGKILL, "was killed or crashed"),
        (1, signal.SIGSTOP, "has given no sign of life for 20 s"),
    ],
)
def test_a_process_that_dies_or_stops_ends_the_other(start, victim, number, said):
    group = start(2, "data.workers=1", distributed=LIMITS)
    group.wait_for_step(2)
    os.kill(group.processes[victim].pid, number)
    survivor = group.processes[1 - victim]
    assert survivor.wait(timeout=150) == 1, group.output()
    lines = error_lines(group.logs[1 - victim])
    assert (
        len(lines) == 1 and lines[0].startswith(f"error: process {victim} (") and said in lines[0]
    )


@pytest.mark.parametrize("absent", [pytest.param(0, marks=EXHAUSTIVE), 1])
def test_a_process_that_never_starts_is_named(start, absent):
    group = start(2, distributed={"start_timeout": 5}, without=absent)
    assert group.codes() == [1], group.output()
    (line,) = error_lines(group.logs[0])
    if absent:
        assert line.startswith("error: process 1 of 2 has not started within 5 s")
    else:
        assert "which process 0 starts at 127.0.0.1:" in line and "has not answered for 5 s" in line


def test_a_different_config_or_data_on_one_process_is_named_on_all_before_compiling(
    start, data, tmp_path
):
    """Every process names the one that differs, and the key or the source that does."""
    group = start(2, distributed=LIMITS, of_process={1: ["run.seed=5"]})
    assert group.codes() == [1, 1], group.output()
    for log in group.logs:
        (line,) = error_lines(log)
        assert "process 1 (" in line and "run.seed is 5 there, 0 on process 0" in line

    # The second process reads the same paths below another root, with one record fewer
    edited_data = shutil.copytree(data, tmp_path / "other")
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (edited_data / "train.jsonl").write_text("".join(lines[:-1]))
    sources = "data.sources=[{name: sample, path: train.jsonl}]"
    arguments = {
        p: [sources, "data.evaluation=[]", f"data.root={root}"]
        for p, root in enumerate((data, edited_data))
    }
    group = start(2, distributed=LIMITS, of_process=arguments)
    assert group.codes() == [1, 1], group.output()
    for log in group.logs:
        (line,) = error_lines(log)
        assert (
            "process 1 (" in line
            and "data of source 'sample' is 95 examples" in line
            and "96 examples" in line
        )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_process_more_than_thirty_seconds_late_is_waited_for(start):
    """Gloo gives up after 30 s, so all processes have to meet before their first collective.

    One process is held up for 40 s between its start and its first program.
    """
    group = start(2, "run.steps=2", distributed={"start_timeout": 240, "peer_timeout": 120})
    group.wait_until(
        lambda: all(threads(process.pid) > 8 for process in group.processes), "devices"
    )
    os.kill(group.processes[1].pid, signal.SIGSTOP)
    time.sleep(40)
    os.kill(group.processes[1].pid, signal.SIGCONT)
    assert group.codes() == [0, 0], group.output()
