"""A short drill: whatever is killed, the resumed run is equal to one that was never killed."""

import subprocess

import numpy as np
import pytest

from benchmarks.drill import Drill, Life, main


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_no_promise_is_broken(tmp_path, kills):
    outcome = Drill(tmp_path, steps=12, seed=1).run(kills)
    assert outcome.kills == kills and outcome.runs >= 1
    assert not outcome.violations


def test_a_run_that_went_elsewhere_is_noticed(tmp_path):
    """The comparison tells of other examples, another loss, and a repeated or missing step."""
    drill = Drill(tmp_path, steps=3, seed=0)
    write(tmp_path / "reference", [(1, 2.0), (2, 1.5), (3, 1.0)])
    write(tmp_path / "same", [(1, 2.0), (2, 1.5), (3, 1.0 + 1e-6)])
    drill.compare(tmp_path / "reference", tmp_path / "same")
    assert not drill.outcome.violations
    write(tmp_path / "other", [(1, 2.0), (1, 2.0), (2, 1.6)], ids="b")
    drill.compare(tmp_path / "reference", tmp_path / "other")
    violations = "\n".join(drill.outcome.violations)
    assert "step 1 took other examples" in violations and "steps [1, 1, 2]" in violations
    assert "step 2: loss 1.6 instead of 1.5" in violations and "step 3: loss nan" in violations


def test_no_kill_is_dealt_to_a_run_that_is_done(tmp_path, monkeypatch):
    """The process of a finished run may still be there until it has exited."""
    drill = Drill(tmp_path, steps=3, seed=0)
    write(tmp_path / "run", [(1, 2.0), (2, 1.5), (3, 1.0)])
    process = subprocess.Popen(["sleep", "1"])
    monkeypatch.setattr(drill, "start", lambda directory, life: process)
    monkeypatch.setattr(
        drill, "members", lambda: [(process.pid, "trainer")] if process.poll() is None else []
    )
    assert not drill.live_and_die(tmp_path / "run")
    assert process.returncode == 0
    assert not drill.outcome.kills and not drill.outcome.violations


def test_a_folder_with_runs_of_another_drill_is_refused(tmp_path, capsys):
    (tmp_path / "run-0").mkdir()
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


def write(folder, losses, ids="a"):
    """Write the metrics and the examples of a run, whose last record is cut short by a kill."""
    folder.mkdir()
    metrics = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in losses]
    (folder / "metrics.jsonl").write_text("".join(metrics) + '{"step": 9, "lo')
    examples = {step: f'{{"step": {step}, "ids": ["{ids}{step}"]}}\n' for step, _ in losses}
    (folder / "examples.jsonl").write_text("".join(examples.values()))


def test_lives_follow_from_the_seed():
    lives, repeated = (
        [Life.draw(random) for _ in range(50)] for random in map(np.random.default_rng, (3, 3))
    )
    assert lives == repeated
    assert {life.devices for life in lives} == {1, 2, 4, 8} and {
        life.processes for life in lives
    } == {1, 2}
    assert all(life.devices % life.processes == 0 for life in lives)


@pytest.mark.parametrize("arguments", [["--kills", "0"], ["--steps", "1"]])
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(SystemExit):
        main(arguments)
