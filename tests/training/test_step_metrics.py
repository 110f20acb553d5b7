"""Metrics of a step: each is a function in a table, whose docstring explains its names."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxmllm.training import step_metrics
from jaxmllm.training.step_metrics import METRICS, StepFacts, Values, step_record

PLAN = {
    "language/tokens": 300.0,
    "language/slots": 400.0,
    "language/flops": 6e12,
    "language/rows": 4,
}


def facts(seconds: float = 2.0, **changes: Any) -> StepFacts:
    """A step of 12 examples, 300 tokens and 30 targets, by default in 2 seconds."""
    device = {
        "loss": np.float32(2.0),
        "learning_rate": np.float32(0.1),
        "gradient_norm": np.float32(1.0),
        "skipped": np.int32(0),
        "failed_media": np.int32(0),
        "masked_targets": np.float32(0.0),
        "loss_by_source": np.array([2.0, 0.0], np.float32),
        "targets_by_source": np.array([30.0, 0.0], np.float32),
    }
    return StepFacts(
        device=device,
        statistics=PLAN,
        examples=12,
        seconds=seconds,
        waited=0.5,
        compilations=7,
        sources=("a", "b"),
        phases=("language",),
        head_flops=changes.get("head_flops", 0),
        peak_flops=changes.get("peak_flops"),
    )


def test_speed_is_told_without_a_known_peak() -> None:
    record = step_record([facts()])
    assert "mfu" not in record
    record_with_peak = step_record([facts(peak_flops=1e12)])
    assert record_with_peak["mfu"] == pytest.approx(record["teraflops/s"])


def test_what_a_router_does_is_told_where_there_is_one() -> None:
    assert not {name for name in step_record([facts()]) if "expert" in name or "router" in name}
    routed = facts()
    loads = {"expert_max_over_mean": np.float32(1.5), "expert_device_max_over_mean": 1.25}
    losses = {"balance_loss": np.float32(1.1), "router_z_loss": np.float32(4)}
    record = step_record([dataclasses.replace(routed, device={**routed.device, **loads, **losses})])
    assert record["expert_max_over_mean"] == 1.5 and record["expert_device_max_over_mean"] == 1.25
    assert record["balance_loss"] == pytest.approx(1.1) and record["router_z_loss"] == 4


def test_what_is_drawn_is_told_by_source_and_by_time() -> None:
    drawing = facts()
    device = {
        "text_loss": np.float32(1.5),
        "drawn_loss": np.float32(0.5),
        "drawn_loss_by_source": np.array([0, 0.5], np.float32),
        "patches_by_source": np.array([0, 4], np.float32),
        "drawn_loss_by_time": np.array([0, 0.25, 0, 0.75], np.float32),
        "patches_by_time": np.array([0, 2, 0, 2], np.float32),
    }
    record = step_record([dataclasses.replace(drawing, device={**drawing.device, **device})])
    drawn_values = {name: value for name, value in record.items() if name.startswith("drawn_loss")}
    time_values = {"drawn_loss_by_time/0.25": 0.25, "drawn_loss_by_time/0.75": 0.75}
    assert drawn_values == {"drawn_loss": 0.5, "drawn_loss/b": 0.5} | time_values


def test_the_head_counts_on_target_tokens_alone() -> None:
    """The head runs on 30 of 300 tokens, so its FLOPs for the other 270 are subtracted."""
    headless, with_head = (
        step_record([facts(head_flops=flops)])["teraflops/s"] for flops in (0, 10**10)
    )
    assert with_head == pytest.approx(headless * (6e12 - 270 * 1e10) / 6e12)


def test_rates_are_over_the_seconds_of_the_last_steps() -> None:
    steps = [facts(seconds) for seconds in (100.0, *[2.0] * step_metrics.RATE_STEPS)]
    record = step_record(steps)
    assert record["examples/s"] == 6.0 and record["language/tokens/s"] == 150.0
    assert record["language/rows"] == 4 and "language/tokens" not in record
    assert record["loss/a"] == 2.0 and "loss/b" not in record


def test_a_metric_is_a_function_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens_per_example(steps: Sequence[StepFacts]) -> Values:
        return {"tokens/example": steps[-1].statistics["language/tokens"] / steps[-1].examples}

    monkeypatch.setattr(step_metrics, "METRICS", [*METRICS, tokens_per_example])
    assert step_record([facts()])["tokens/example"] == 25.0


def test_every_name_of_a_record_is_explained() -> None:
    names = set(step_record([facts(peak_flops=1e12)])) - PLAN.keys()
    texts = " ".join(metric.__doc__ or "" for metric in METRICS)
    for name in names:
        documented_name = name.replace("loss/a", "loss/<source>").replace("language/", "<phase>/")
        assert f"`{documented_name}`" in texts, name
