"""What a report makes of steps: times, rates, messages, limits and what the run leaves.

The clock is set by the test, so times and rates are exact.
"""

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.runtime.metrics import MetricsWriter, read_metrics
from jaxmllm.runtime.progress import ProgressBar
from jaxmllm.training.process_messages import Messages
from jaxmllm.training.report import DENOMINATORS, RunReport, StartedStep, TrainingError
from tests.training.test_process_messages import Store

PHASE = {
    "language/tokens": 300.0,
    "language/slots": 400.0,
    "language/flops": 6e9,
    "language/max_over_mean": 1.5,
}
PEAK = 1e9


class Written:
    """A stand-in for the metrics writer and the progress bar that keeps what is written."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.lines: list[str] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.records.append((step, values))

    def write_message(self, step: int, process: int, message: str) -> None:
        self.records.append((step, {"process": process, "message": message}))

    def update(self, step: int, values: dict[str, float]) -> None:
        assert values

    def print(self, line: str) -> None:
        self.lines.append(line)


def make_run(**config: Any) -> Any:
    """The parts of a run that a report reads; `config` replaces sections."""
    sections = {
        "logging": SimpleNamespace(every=1, examples=False),
        "run": SimpleNamespace(steps=8),
        "optimizer": SimpleNamespace(max_skipped=3),
        "data": SimpleNamespace(max_failed_media=2),
        "model": SimpleNamespace(generators=()),
    }
    return SimpleNamespace(
        config=SimpleNamespace(**sections | config),
        programs=SimpleNamespace(
            spec=SimpleNamespace(phases=["language"]), route_metrics=lambda statistics: {}
        ),
        sources=("a", "b"),
        head_flops=0,
        peak_flops=PEAK,
        compilations=SimpleNamespace(count=7),
        corpus=SimpleNamespace(rejected_counts=dict, id=str),
        warnings=SimpleNamespace(take=list),
        is_main=True,
        directory="runs/x",
        evaluation=None,
    )


def step_metrics(**changes: Any) -> dict[str, Any]:
    """The metrics that a device returns for a step."""
    metrics = {
        "loss": np.float32(2.0),
        "learning_rate": np.float32(0.1),
        "gradient_norm": np.float32(1.0),
        "skipped": np.int32(0),
        "skipped_in_row": np.int32(0),
        "failed_media": np.int32(0),
        "masked_targets": np.float32(0.0),
        "loss_by_source": np.array([2.0, 0.0], np.float32),
        "targets_by_source": np.array([30.0, 0.0], np.float32),
    }
    return metrics | changes


def started(
    step: int, began: float, completed: float, waited: float = 0.0, **changes: Any
) -> StartedStep:
    """A step that began and completed at these times, after waiting for data."""
    batch: Any = SimpleNamespace(examples=np.arange(12), statistics=PHASE)
    future: Future[float] = Future()
    future.set_result(completed)
    return StartedStep(step, batch, step_metrics(**changes), waited, began, future)


def test_times_and_rates_are_those_of_the_steps_alone() -> None:
    """Pauses between steps do not count: steps take 2 s, except for one that waits for data.

    Initialisation takes 1000 s, an evaluation 50 s, a checkpoint 30 s, both 80 s at the end. Before
    step 6 the devices wait 3 s for data.
    """
    run = make_run()
    out = Written()
    report: Any = RunReport(run, out, out, None)  # type: ignore[arg-type]
    report.follow(started(1, began=1000.0, completed=1002.0))
    report.follow(started(2, began=1000.1, completed=1004.0))
    report.settle()  # an evaluation until 1054
    report.follow(started(3, began=1054.0, completed=1056.0))
    report.follow(started(4, began=1054.1, completed=1058.0))
    report.settle()  # a checkpoint until 1088
    report.follow(started(5, began=1088.0, completed=1090.0))
    report.follow(started(6, began=1093.0, completed=1095.0, waited=4.9))
    report.follow(started(7, began=1093.1, completed=1097.0))
    report.follow(started(8, began=1093.2, completed=1099.0))
    report.settle()  # the last checkpoint and evaluation
    assert [step for step, _ in out.records] == list(range(1, 9))
    # Step 6 takes 5 s: it waits 3 s for data
    seconds = [2.0] * 5 + [5.0] + [2.0] * 2
    assert [record["step_seconds"] for _, record in out.records] == seconds
    # A step has 6e9 FLOPs by its plan, and no head
    flops_per_second = PEAK * jax.device_count()
    expected = [6e9 / (s * flops_per_second) for s in seconds]
    assert [record["mfu"] for _, record in out.records] == pytest.approx(expected)
    assert [record["teraflops/s"] for _, record in out.records] == pytest.approx(
        [share * PEAK / 1e12 for share in expected]
    )
    rates = [12 * n / sum(seconds[:n]) for n in range(1, 9)]
    assert [record["examples/s"] for _, record in out.records] == pytest.approx(rates)
    assert [record["language/tokens/s"] for _, record in out.records] == pytest.approx(
        [25 * rate for rate in rates]
    )
    assert out.records[5][1]["data_wait_seconds"] == 4.9


# ---------------------------------------------------------------------------- messages and limits


def test_a_limits_error_comes_after_the_lines_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is raised when the report settles, after the lines of every process."""
    monkeypatch.setattr("jaxmllm.training.process_messages._serial", iter([0, 0]))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    run = make_run()
    out = Written()
    board = Store()
    run.warnings.take = iter([["warning: the index is damaged"], [], [], []]).__next__
    second_process = Messages(board, 1)
    report: Any = RunReport(run, out, out, None, Messages(board, 0))  # type: ignore[arg-type]
    report.tell(1, ("a.png: broken",))
    report.follow(started(1, began=0.0, completed=1.0, failed_media=np.int32(1)))
    second_process.tell(2, ["masked: b.png: broken", "masked: c.wav: broken"])
    report.follow(started(2, began=0.0, completed=2.0, failed_media=np.int32(3)))
    assert out.lines == ["step 1: process 0: masked: a.png: broken", *OTHERS]
    with pytest.raises(
        TrainingError, match=r"step 2: 3 media items .* data\.max_failed_media = 2 .*metrics\.jsonl"
    ):
        report.settle()
    messages = [
        (step, record["process"], record["message"])
        for step, record in out.records
        if "message" in record
    ]
    assert messages == [
        (0, 0, "warning: the index is damaged"),
        (1, 0, "masked: a.png: broken"),
        (2, 1, "masked: b.png: broken"),
        (2, 1, "masked: c.wav: broken"),
    ]


def test_a_model_that_draws_says_once_what_its_losses_are_divided_by() -> None:
    run = make_run(model=SimpleNamespace(generators=("diffusion",)))
    out = Written()
    report: Any = RunReport(run, out, out, None)  # type: ignore[arg-type]
    for step in (1, 2):
        report.tell(step, ("a.png: broken",))
    report.tell(3, ())
    broken = [f"step {step}: masked: a.png: broken" for step in (1, 2)]
    assert out.lines == [f"step 1: {DENOMINATORS}", *broken]


OTHERS = ["step 2: process 1: masked: b.png: broken", "step 2: process 1: masked: c.wav: broken"]


def test_a_step_whose_targets_are_all_masked_has_no_loss() -> None:
    run = make_run()
    out = Written()
    report: Any = RunReport(run, out, out, None)  # type: ignore[arg-type]
    all_masked = {
        "loss": np.float32(0),
        "targets_by_source": np.zeros(2),
        "masked_targets": np.float32(30),
    }
    report.follow(started(1, began=0.0, completed=1.0, **all_masked))
    report.follow(started(2, began=0.0, completed=2.0, **all_masked, skipped_in_row=np.int32(3)))
    with pytest.raises(
        TrainingError,
        match="step 2: loss or gradients were not finite, or of no target token, for 3",
    ):
        report.settle()
    for _, record in out.records:
        assert record["loss"] is None and record["masked_targets"] == 30
        assert not any(name.startswith("loss/") for name in record)


@pytest.mark.parametrize("patches, why", [(9, "not finite"), (0, "not finite, .* token or patch,")])
def test_a_model_that_draws_is_told_of_patches(patches, why) -> None:
    run = make_run()
    out = Written()
    report: Any = RunReport(run, out, out, None)  # type: ignore[arg-type]
    values = step_metrics(
        targets_by_source=np.zeros(2),
        patches_by_source=np.array([0, patches]),
        skipped_in_row=np.int32(3),
    )
    with pytest.raises(TrainingError, match=f"step 2: loss or gradients were {why} for 3"):
        report._enforce(2, values)


# ---------------------------------------------------------------------------- what a run leaves


def test_a_run_with_nothing_left_to_do_keeps_what_it_said(tmp_path: Path) -> None:
    """A report resumed after the last step finds losses and evaluation in the records."""
    run = make_run()
    run.directory, run.evaluation = tmp_path, object()
    run.config.evaluation = SimpleNamespace(at_start=True, every=3)
    evaluation = {
        "loss": 0.5,
        "exact_match": {"a": 1.0, "b/c": 0.5},
        "examples": {"a": 2, "b/c": 4},
    }
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        progress = ProgressBar(8, visible=False)
        report = RunReport(run, writer, progress, None)
        report.resume(0)
        assert report.evaluation_missing(0)
        for step in range(1, 9):
            report.follow(started(step, began=0.0, completed=step, loss=np.float32(step)))
        report.settle()
        flat_values = {
            f"eval/{name}/{source}": n
            for name in ("exact_match", "examples")
            for source, n in evaluation[name].items()
        }
        writer.write(6, {"eval/loss": 0.5} | flat_values)
        assert not report.evaluation_due(7) and report.evaluation_due(8)

        # The process was killed between the last checkpoint and its evaluation
        interrupted = RunReport(run, writer, progress, None)
        interrupted.resume(8)
        assert interrupted.evaluation_missing(8)
        assert (
            interrupted.evaluation
            == {"step": 6, "failed_media": 0, "masked_examples": 0}
            | {"loss_by_source": {}, "masked_by_source": {}}
            | evaluation
        )
        summary = interrupted.summary(8, 1.0)
        assert summary["loss"] == 8.0 and summary["complete"] and summary["error"] is None

        writer.write(8, {"eval/loss": 0.25} | flat_values)
        writer.write_summary(report.summary(8, 100.0))
        finished = RunReport(run, writer, progress, None)
        finished.resume(8)
        assert not finished.evaluation_missing(8)
        assert finished.summary(8, 1.0) == json.loads((tmp_path / "summary.json").read_text())
        stopped_summary = finished.summary(8, 1.0, error="step 8: why")
        assert stopped_summary["error"] == "step 8: why" and not stopped_summary["complete"]
    assert len(read_metrics(tmp_path)) == 10


def test_processes_meet_before_the_programs_of_an_evaluation_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first collective gives up after seconds, in which another process may still read media."""
    run = make_run()
    out = Written()
    events = []
    run.evaluation, run.held_out = [1, 2], SimpleNamespace(source_of=None)
    run.config.evaluation = SimpleNamespace(at_start=True, every=3)
    run.programs.averaged = lambda state: state

    def read(source: Any, start: int, stop: int) -> Any:
        for batch in source:
            events.append(f"loaded {batch}")
            yield batch

    def evaluated(programs: Any, params: Any, batches: Any, *rest: Any) -> None:
        events.extend(f"evaluated {batch}" for batch in batches)

    monkeypatch.setattr("jaxmllm.training.report.evaluate", evaluated)
    monkeypatch.setattr("jaxmllm.runtime.hosts.meet", events.append)
    monkeypatch.setattr(
        "jaxmllm.runtime.hosts.tell_all", lambda text: events.append(text) or [text]
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    loader: Any = SimpleNamespace(read=read)
    report: Any = RunReport(run, out, out, loader)  # type: ignore[arg-type]
    assert report.evaluation_missing(0)
    report.evaluate(0, SimpleNamespace(averages=None), lambda: False)
    rest = ["evaluated 1", "loaded 2", "evaluated 2"]
    assert events == ["[1]", "loaded 1", "its first evaluation", *rest]
    events.clear()
    report.follow(started(1, began=0.0, completed=1.0))
    report.settle()
    report.evaluate(1, SimpleNamespace(averages=None), lambda: False)
    assert events == ["loaded 1", *rest], "devices have met in the step"


@pytest.mark.parametrize("kept", [None, {"steps": 8, "complete": True}])
def test_a_run_that_was_stopped_before_its_last_evaluation_is_not_complete(kept: Any) -> None:
    run = make_run()
    out = Written()
    run.config.evaluation = SimpleNamespace(at_start=True, every=3)
    report: Any = RunReport(run, out, out, None)  # type: ignore[arg-type]
    report._kept_summary = kept
    assert report.summary(8, 1.0, stopped=True)["complete"], "nothing is held out"
    run.evaluation = object()
    assert not report.summary(8, 1.0, stopped=True)["complete"]
    assert report.summary(8, 1.0)["complete"]
    assert not report.summary(7, 1.0)["complete"]
