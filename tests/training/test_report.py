"""What a report makes of steps: times and rates from a clock that the test turns by hand."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.training.report import Pending, Report

PHASE = {"language/tokens": 300.0, "language/slots": 400.0, "language/flops": 6e9, "language/max_over_mean": 1.5}
PEAK = 1e9


class Written:
    """Stands for the writer and the progress bar; keeps the records."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.lines: list[str] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.records.append((step, values))

    def update(self, step: int, values: dict[str, float]) -> None:
        self.lines.append("  ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def print(self, line: str) -> None:
        self.lines.append(line)


def make_run(**config: Any) -> Any:
    sections = {
        "logging": SimpleNamespace(every=1),
        "run": SimpleNamespace(steps=8),
        "optimizer": SimpleNamespace(max_skipped=3),
        "data": SimpleNamespace(max_failed_media=2),
    }
    return SimpleNamespace(
        config=SimpleNamespace(**sections | config),
        programs=SimpleNamespace(spec=SimpleNamespace(phases=["language"]), route_metrics=lambda statistics: {}),
        sources=("a", "b"),
        peak_flops=PEAK,
        compilations=SimpleNamespace(count=7),
        corpus=SimpleNamespace(rejected_counts=dict),
    )


def step_metrics(**changes: Any) -> dict[str, Any]:
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


def started(step: int, began: float, completed: float, waited: float = 0.0, **changes: Any) -> Pending:
    batch: Any = SimpleNamespace(examples=np.arange(12), statistics=PHASE)
    future: Future[float] = Future()
    future.set_result(completed)
    return Pending(step, batch, step_metrics(**changes), waited, began, future)


def test_times_and_rates_are_those_of_the_steps_alone() -> None:
    """Steps of 2 s. Initialisation takes 1000 s, an evaluation 50 s, a checkpoint 30 s, both 80 s at the end; before
    step 6 the devices wait 3 s for data."""
    run, out = make_run(), Written()
    report: Any = Report(run, out, out, None)  # type: ignore[arg-type]
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
    seconds = [2.0] * 5 + [5.0] + [2.0] * 2
    assert [record["step_seconds"] for _, record in out.records] == seconds
    flops_per_second = PEAK * jax.device_count()
    expected = [6e9 / (s * flops_per_second) for s in seconds]
    assert [record["mfu"] for _, record in out.records] == pytest.approx(expected)
    rates = [12 * n / sum(seconds[:n]) for n in range(1, 9)]
    assert [record["examples/s"] for _, record in out.records] == pytest.approx(rates)
    assert [record["language/tokens/s"] for _, record in out.records] == pytest.approx([25 * rate for rate in rates])
    assert out.records[5][1]["data_wait_seconds"] == 4.9
