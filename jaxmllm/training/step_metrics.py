"""The meaning of each number in a step's record; a metric is a function here, listed in `METRICS`.

    StepFacts of the last steps --every function of METRICS--> the record of the newest, a line of metrics.jsonl

In addition, a record has the statistics of the step's plan, <phase>/..., route/..., pipeline/...,
plan_ms, as balance/statistics.py and balance/step_plan.py define them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxmllm.phases import LANGUAGE
from jaxmllm.training.objectives.flow import time_bands

RATE_STEPS = 20  # steps that rates are averaged over
AMOUNTS = (
    "tokens",
    "slots",
    "flops",
)  # plan statistics that records hold only as rates and ratios

ZERO = np.zeros(1)
Values = dict[str, Any]  # by name; None where there is nothing to measure


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step once it has run.

    Attributes:
      device: the metrics that `StepFunctions.update` returned, on the host.
      statistics: of the step's plan.
      examples: of the batch.
      seconds: from the completion of the step before to its own, waiting for data included. The
        first step, and one after an evaluation, checkpoint or edge of the profile, counts from the
        start of its programs.
      waited: seconds that this process waited for its batch.
      compilations: programs compiled so far.
      sources: names of the sources that losses are reported for.
      phases: names of the run's phases.
      head_flops: of one slot; the plan's FLOPs include them for every token.
      peak_flops: of one device, per second; None if not known.
    """

    device: Mapping[str, Any]
    statistics: Mapping[str, float]
    examples: int
    seconds: float
    waited: float
    compilations: int
    sources: Sequence[str]
    phases: Sequence[str]
    head_flops: float
    peak_flops: float | None

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second and device, of the real lengths: with encoders, without padding, and the
        head for target tokens only."""
        targets = self.device["targets_by_source"].sum()
        flops = flops_by_phase(self.statistics, self.phases, targets, self.head_flops)
        return sum(flops.values()) / (self.seconds * jax.device_count())


def flops_by_phase(
    statistics: Mapping[str, float], phases: Iterable[str], targets: float, head_flops: float
) -> dict[str, float]:
    """FLOPs by phase as `mfu` counts them: the plan's, which has the head on every token, with the
    head on targets only.

    Args:
      statistics: of the plan.
      head_flops: of one slot.
    """
    flops = {phase: statistics[f"{phase}/flops"] for phase in phases}
    flops[LANGUAGE] -= head_flops * float(statistics[f"{LANGUAGE}/tokens"] - targets)
    return flops


Metric = Callable[[Sequence[StepFacts]], Values]  # of the last steps, the newest last


def step_record(steps: Sequence[StepFacts]) -> Values:
    """The record of the newest of these steps, as plain Python numbers."""
    record: Values = {}
    for metric in METRICS:
        record |= metric(steps)
    return {
        name: value.item() if hasattr(value, "item") else value for name, value in record.items()
    }


# ---------------------------------------------------------------------------- training


def loss(steps: Sequence[StepFacts]) -> Values:
    """`loss`: mean over the target tokens of the whole batch (see `drawn` for models that draw).
    null: not finite, or the batch had no target left (then `masked_targets` are all of them); the
    update was skipped."""
    device = steps[-1].device
    targets = device["targets_by_source"].any() or device.get("patches_by_source", ZERO).any()
    return {"loss": device["loss"] if targets else None}


def drawn(steps: Sequence[StepFacts]) -> Values:
    """For a model that draws, `loss` is the weighted sum of `text_loss`, the mean over target
    tokens (null without any, or if text has no weight), and `drawn_loss`, the mean over patches.
    `drawn_loss/<source>`: that of one source's patches. `drawn_loss_by_time/<from>`: that of the
    patches whose noise has a time in the quarter that begins there. The last two only where there
    are such patches."""
    device = steps[-1].device
    if "drawn_loss" not in device:
        return {}
    of_source, of_time = (f"drawn_loss_by_{group}" for group in ("source", "time"))
    patches = device["patches_by_source"]
    patches_by_time = device["patches_by_time"]
    means = _means("drawn_loss", steps[-1].sources, device[of_source], patches)
    means |= _means(of_time, time_bands(), device[of_time], patches_by_time)
    return {
        "text_loss": device["text_loss"] if device["targets_by_source"].any() else None,
        "drawn_loss": device["drawn_loss"] if patches.any() else None,
    } | means


def optimization(steps: Sequence[StepFacts]) -> Values:
    """`learning_rate`: before it is scaled by component. `gradient_norm`: before clipping."""
    return {name: steps[-1].device[name] for name in ("learning_rate", "gradient_norm")}


def failures(steps: Sequence[StepFacts]) -> Values:
    """`skipped`: updates skipped so far because loss or gradients were not finite, or no target was
    left. `failed_media`: media items so far that did not decode, on all processes.
    `masked_targets`: target tokens of this step that carry no loss, because a media item of their
    example failed."""
    return {name: steps[-1].device[name] for name in ("skipped", "failed_media", "masked_targets")}


def experts(steps: Sequence[StepFacts]) -> Values:
    """With experts: `expert_max_over_mean`, tokens that chose the most popular expert over the mean
    of all experts, in the layer where that is highest; `expert_device_max_over_mean`, the same for
    all experts of a device together. `balance_loss` and `router_z_loss`: before they are weighted;
    `loss` does not include them."""
    device = steps[-1].device
    names = (
        "expert_max_over_mean",
        "expert_device_max_over_mean",
        "balance_loss",
        "router_z_loss",
    )
    return {name: device[name] for name in names if name in device}


def loss_by_source(steps: Sequence[StepFacts]) -> Values:
    """`loss/<source>`: the same mean over the target tokens of one source, where it has any."""
    device = steps[-1].device
    return _means("loss", steps[-1].sources, device["loss_by_source"], device["targets_by_source"])


def _means(key: str, names: Sequence[str], means: NDArray[Any], counts: NDArray[Any]) -> Values:
    """The means whose count is not zero, by name."""
    told = zip(names, means, counts, strict=True)
    return {f"{key}/{name}": mean for name, mean, count in told if count}


# ---------------------------------------------------------------------------- plan


def plan_statistics(steps: Sequence[StepFacts]) -> Values:
    """Statistics of the plan, except amounts, which are recorded as rates."""
    return {
        name: value
        for name, value in steps[-1].statistics.items()
        if name.split("/")[-1] not in AMOUNTS
    }


# ---------------------------------------------------------------------------- speed


def rates(steps: Sequence[StepFacts]) -> Values:
    """`examples/s`, `<phase>/tokens/s`: real amounts per second of the last `RATE_STEPS` steps."""
    recent = steps[-RATE_STEPS:]
    seconds = sum(step.seconds for step in recent)
    values: Values = {"examples/s": sum(float(step.examples) for step in recent) / seconds}
    for phase in steps[-1].phases:
        tokens = sum(step.statistics[f"{phase}/tokens"] for step in recent)
        values[f"{phase}/tokens/s"] = tokens / seconds
    return values


def mfu(steps: Sequence[StepFacts]) -> Values:
    """`mfu`: FLOPs of the real lengths, with encoders, without padding and with the head on target
    tokens only, over those of `step_seconds` at the peak of all devices, where that is known."""
    step = steps[-1]
    return {} if step.peak_flops is None else {"mfu": step.flops_per_second / step.peak_flops}


def speed(steps: Sequence[StepFacts]) -> Values:
    """`teraflops/s`: of one device, from the FLOPs that `mfu` counts; recorded even if the devices'
    peak is not known."""
    return {"teraflops/s": steps[-1].flops_per_second / 1e12}


def times(steps: Sequence[StepFacts]) -> Values:
    """`step_seconds`: see `StepFacts.seconds`. `data_wait_seconds`: how long this process waited
    for its batch; during some of that the devices had work. `compilations`: programs compiled so
    far, constant from the first step on."""
    step = steps[-1]
    return {
        "step_seconds": step.seconds,
        "data_wait_seconds": step.waited,
        "compilations": step.compilations,
    }


METRICS: list[Metric] = [
    loss,
    optimization,
    failures,
    loss_by_source,
    drawn,
    experts,
    rates,
    plan_statistics,
    mfu,
    speed,
    times,
]
