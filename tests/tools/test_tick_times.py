"""What pipeline ticks take besides operations: fitted terms against known ones, and the command."""

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
    """Write data and a config of a tiny model without audio, which compiles sooner."""
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
    for cost, ticks, pauses, repeats in ((3e11, 40, 40, 1), (5e11, 30, 20, 2)):
        planned = known.seconds(cost, ticks, repeats)
        paused = known.seconds(cost, ticks + pauses, repeats)
        timed.append(
            ({"planned": planned, "paused": paused, "empty": 0.1 * repeats}, ticks, pauses)
        )
        costs.append(cost)
        runs.append(repeats)
    fitted = fit_ticks(timed, costs, runs)
    assert fitted.start == pytest.approx(0.1)
    assert fitted.tick == pytest.approx(2e-3) and fitted.flop == pytest.approx(1e-12)
    assert fitted.flops_per_tick == pytest.approx(2e9)


def test_pauses_that_take_nothing_leave_all_to_the_operations():
    fitted = fit_ticks([({"planned": 1.0, "paused": 0.9, "empty": 0.2}, 10, 10)], [8e11], [1])
    assert fitted.tick == 0 and fitted.flop == pytest.approx(1e-12)


@pytest.mark.slow
def test_stages_are_calibrated_by_their_ticks(tmp_path, capsys, monkeypatch):
    """The command prints a setting for two stages of a tiny model, and writes no file."""
    built = []
    original = build.build_run

    def remembered(config):
        built.append(original(config))
        return built[-1]

    monkeypatch.setattr(build, "build_run", remembered)
    config = tiny_vision(tmp_path)
    stages = ["pipeline.stages=2", "pipeline.layout=chain", "pipeline.flops_per_tick=1e9"]
    written = tmp_path / "calibration.json"
    command = ["--config", str(config), "--out", str(written), "--repeats", "1"]
    assert calibrate.main([*command, *stages]) == 0
    (run,) = built
    assert run.config.pipeline.flops_per_tick == 0  # what is to be measured must not shape the plan
    assert len(jax.devices()) == run.programs.mesh.devices.size
    printed = capsys.readouterr().out
    assert float(printed.rsplit("pipeline.flops_per_tick=", 1)[1]) >= 0
    assert not written.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_two_processes_calibrate_together(tmp_path, stages):
    """With a stage each or half of the ranks each; both time the same programs, and one prints."""
    config = tiny_vision(tmp_path)
    written = tmp_path / "calibration.json"
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "1", "--"]
    command = [sys.executable, "-m", "jaxmllm", "calibrate", "--config", str(config)]
    layout = [f"pipeline.stages={stages}", "pipeline.layout=chain"] if stages > 1 else []
    options = ["--out", str(written), "--repeats", "1", *layout]
    process = subprocess.run(
        [*launcher, *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stdout[-3000:]
    line = "plan with it: " if stages > 1 else "balance by it with "
    assert process.stdout.count(line) == 1
    assert written.exists() == (stages == 1)
