"""Runs that are killed at any time, or asked to stop, continue as if nothing had happened.

The reference is an uninterrupted run of the same config.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support import tiny_config, train_command

pytestmark = pytest.mark.slow

STEPS = 16


def start(config: Path, *arguments: str, devices: int = 8) -> subprocess.Popen:
    """A run that compiles quickly, and stores its programs for the next one."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    settings = {"NPROC": str(4 * devices)}
    return subprocess.Popen(
        train_command(config, *arguments),
        env=os.environ | {"XLA_FLAGS": flags} | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


def records(folder: Path) -> list[dict]:
    """Records of steps; a line that is still being written has no end and is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        record
        for record in map(json.loads, (line for line in lines if line.endswith("\n")))
        if "loss" in record
    ]


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not any(record["step"] >= step for record in records(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"step {step} was not reached: {process.communicate()[0][-3000:]}")
        time.sleep(0.01)


@pytest.fixture(scope="module")
def history(data, tmp_path_factory):
    """An uninterrupted run, and two interrupted ones.

    One run is killed, resumed, stopped by SIGTERM and resumed. The other is killed and resumed on
    half of the devices, with rows in parts. Each begins with `--resume` in a folder that does not
    exist.
    """
    base = tmp_path_factory.mktemp("history")
    config = base / "config.yaml"
    tree = tiny_config(
        data,
        run={"directory": "unset", "steps": STEPS},
        checkpoint={"every": 3},
        logging__examples=True,
        components__language__ema=0.8,
        components__projector__vision__ema=0.99,
    )
    config.write_text(yaml.safe_dump(tree))
    rng = np.random.default_rng()  # no seed: no test may depend on the steps of the interruptions
    killed_after = int(rng.integers(2, 7))
    stopped_after = int(rng.integers(9, 12))

    def begin(name: str, *more: str, devices: int = 8) -> subprocess.Popen:
        return start(config, "--resume", f"run.directory={base / name}", *more, devices=devices)

    process = begin("killed", "data.workers=1")
    wait_for_step(process, base / "killed", killed_after)
    process.kill()
    # The pipe is closed only when the data worker has ended, too, because it holds the other end
    process.communicate(timeout=60)
    # Copies of the killed run, which are resumed in other ways
    for name in ("moved", "shared", "staged"):
        shutil.copytree(base / "killed", base / name)

    process = begin("killed")
    wait_for_step(process, base / "killed", stopped_after)
    process.send_signal(signal.SIGTERM)
    finish(process)
    stopped = json.loads((base / "killed" / "summary.json").read_text())["steps"]
    saved_steps = [int(path.name) for path in (base / "killed" / "checkpoints").iterdir()]

    resumed = [begin("killed"), begin("moved", "mesh.data=2", "mesh.context=2", devices=4)]
    for process in (*resumed, begin("whole")):
        finish(process)
    facts = {"stopped": stopped, "stopped_after": stopped_after, "kept": saved_steps}
    return base, facts | {"killed_after": killed_after, "begin": begin}


# Not equal even on the same devices: on a busy machine norms of one program's gradients were seen
# to differ by 3e-6
@pytest.mark.parametrize("name, tolerance", [("killed", 2e-5), ("moved", 2e-4)])
def test_history_is_that_of_an_uninterrupted_run(history, name, tolerance):
    """Batches and examples are the same; losses and evaluation agree up to rounding."""
    base, _ = history
    expected = records(base / "whole")
    actual = records(base / name)
    assert [record["step"] for record in actual] == list(range(1, STEPS + 1))
    assert [record["step"] for record in expected] == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate", "gradient_norm"):
        np.testing.assert_allclose(
            [r[key] for r in actual], [r[key] for r in expected], rtol=tolerance
        )
    assert [record["batch"] for record in actual] == [record["batch"] for record in expected]
    example_lines = [(base / each / "examples.jsonl").read_text() for each in ("whole", name)]
    assert example_lines[0] == example_lines[1], "the examples of every step, by id"
    assert [json.loads(line)["step"] for line in example_lines[0].splitlines()] == list(
        range(1, STEPS + 1)
    )
    source_keys = [{k for k in record if k.startswith("loss/")} for record in expected]
    assert source_keys == [{k for k in record if k.startswith("loss/")} for record in actual]
    summaries = [json.loads((base / each / "summary.json").read_text()) for each in ("whole", name)]
    assert [summary["steps"] for summary in summaries] == [STEPS, STEPS]
    assert [each["eval"]["averaged"] for each in summaries] == ["language, projector.vision"] * 2
    assert summaries[1]["eval"]["loss"] == pytest.approx(
        summaries[0]["eval"]["loss"], rel=tolerance
    )
    assert summaries[1]["eval"]["exact_match"] == summaries[0]["eval"]["exact_match"]


def kill_again(base: Path, facts: dict, name: str, *changes: str) -> None:
    """Resume a copy of the killed run with changes, and kill it again some steps later."""
    process = facts["begin"](name, *changes)
    wait_for_step(process, base / name, facts["killed_after"] + 4)
    process.kill()
    process.communicate(timeout=60)


def test_rows_of_several_ranks_continue_a_run_on_any_devices(history):
    """The killed run continues with rows of 8 ranks, is killed again, and ends on 4 devices."""
    base, facts = history
    phases = ("vision", "audio", "language")

    def spans(widest: int) -> list[str]:
        return [f"phases.{phase}.spans=[{widest}]" for phase in phases]

    kill_again(base, facts, "shared", *spans(8))
    assert all(record["language/shared_rows"] > 0 for record in records(base / "shared")[-1:])
    finish(facts["begin"]("shared", *spans(4), devices=4))
    assert records(base / "shared")[-1]["language/shared_rows"] > 0
    test_history_is_that_of_an_uninterrupted_run(history, "shared", 2e-4)


def test_stages_continue_a_run_and_leave_it(history):
    """The killed run continues in two stages, is killed at any tick, and continues in four."""
    base, facts = history

    def stages(count: int, data: int) -> list[str]:
        return [f"pipeline.stages={count}", "pipeline.layout=chain", f"mesh.data={data}"]

    kill_again(base, facts, "staged", *stages(2, 4))
    assert all(record["pipeline/ticks"] > 0 for record in records(base / "staged")[-1:])
    finish(facts["begin"]("staged", *stages(4, 1), devices=4))
    assert records(base / "staged")[-1]["pipeline/ticks"] > 0
    test_history_is_that_of_an_uninterrupted_run(history, "staged", 2e-4)


def test_sigterm_saves_and_leaves(history):
    _, facts = history
    assert facts["stopped_after"] <= facts["stopped"] < STEPS
    assert facts["stopped"] in facts["kept"]
