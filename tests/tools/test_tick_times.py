"""What ticks take besides operations: terms against known ones, and the command that measures them."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
import yaml

from jaxmllm.setup import build
from jaxmllm.tools import calibrate
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.tools.tick_times import TickTimes, fit_ticks
from tests.support import tiny_config


def tiny_vision(folder):
    """The config of a tiny model without audio, which compiles sooner, and its data."""
    make_sample(folder, train=48, test=4)
    tree = tiny_config(folder, data__max_rejected=1.0, mesh={"data": -1})
    del tree["model"]["audio"], tree["phases"]["audio"]
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def test_terms_are_those_that_made_the_times():
    known = TickTimes(start=0.1, tick=2e-3, flop=1e-12)
    timed = []
    costs = []
    runs = []
    for cost, ticks, pauses, count in ((3e11, 40, 40, 1), (5e11, 30, 20, 2)):
        planned = known.seconds(cost, ticks, count)
        paused = known.seconds(cost, ticks + pauses, count)
        timed.append(({"planned": planned, "paused": paused, "empty": 0.1 * count}, ticks, pauses))
        costs.append(cost)
        runs.append(count)
    found = fit_ticks(timed, costs, runs)
    assert found.start == pytest.approx(0.1)
    assert found.tick == pytest.approx(2e-3) and found.flop == pytest.approx(1e-12)
    assert found.flops_per_tick == pytest.approx(2e9)


def test_pauses_that_take_nothing_leave_all_to_the_operations():
    found = fit_ticks([({"planned": 1.0, "paused": 0.9, "empty": 0.2}, 10, 10)], [8e11], [1])
    assert found.tick == 0 and found.flop == pytest.approx(1e-12)


@pytest.mark.slow
def test_stages_are_calibrated_by_their_ticks(tmp_path, capsys, monkeypatch):
    """Two stages of a tiny model, through the command; what the file would hold is not measured."""
    made = []
    original = build.build_run

    def remembered(config):
        made.append(original(config))
        return made[-1]

    monkeypatch.setattr(build, "build_run", remembered)
    config = tiny_vision(tmp_path)
    stages = ["pipeline.stages=2", "pipeline.layout=chain", "pipeline.flops_per_tick=1e9"]
    written = tmp_path / "calibration.json"
    command = ["--config", str(config), "--out", str(written), "--repeats", "1"]
    assert calibrate.main([*command, *stages]) == 0
    (run,) = made
    assert run.config.pipeline.flops_per_tick == 0  # what is to be measured decides nothing
    assert len(jax.devices()) == run.programs.mesh.devices.size
    told = capsys.readouterr().out
    assert float(told.rsplit("pipeline.flops_per_tick=", 1)[1]) >= 0
    assert not written.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_two_processes_calibrate_together(tmp_path, stages):
    """A stage each, or half of the ranks: both time the same programs, and one of them says what they take."""
    config = tiny_vision(tmp_path)
    written = tmp_path / "calibration.json"
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "1", "--"]
    command = [sys.executable, "-m", "jaxmllm", "calibrate", "--config", str(config)]
    layout = [f"pipeline.stages={stages}", "pipeline.layout=chain"] if stages > 1 else []
    options = ["--out", str(written), "--repeats", "1", *layout]
    done = subprocess.run(
        [*launcher, *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    told = "plan with it: " if stages > 1 else "balance by it with "
    assert done.stdout.count(told) == 1
    assert written.exists() == (stages == 1)
