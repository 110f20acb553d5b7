"""A run compared with its prediction: the efficiency that fits its steps, and planned next to
logged figures.

config and records of a run --plans of the same batches--> predicted seconds --fit--> efficiency
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxmllm.balance.records import BatchItems
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.search.layouts import PlannedLayout
from jaxmllm.cluster.simulate import StepTime, simulate
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import Segment
from jaxmllm.runtime.metrics import read_metrics
from jaxmllm.tools.plan_figures import planned_statistics
from jaxmllm.training.history import read_history
from jaxmllm.training.run_folder import named_config

WARM_UP: Final = 3  # first steps, left out because their seconds include what happens once
COMPARED: Final = 8  # steps that are planned again
LEAST, MOST = 1e-5, 1.0  # bounds of the efficiency
HALVINGS: Final = 40  # of the interval of efficiencies
WIDEST: Final = 0.95  # largest uncertainty
CLOSE: Final = 1e-3  # relative error of the median at which the fit stops


@dataclass(frozen=True)
class LoggedRun:
    """The config, records and history of a run folder."""

    config: Config
    # Of steps since batch size or weights last changed, without the first few
    records: Sequence[Mapping[str, Any]]
    history: Sequence[Segment] = ()  # of batch size and weights; empty: always the config's

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(record["step_seconds"] for record in self.records)

    @property
    def compared(self) -> list[Mapping[str, Any]]:
        """Records of the steps that are planned again, which are spread over the run."""
        positions = np.linspace(0, len(self.records) - 1, min(COMPARED, len(self.records)))
        return [self.records[index] for index in dict.fromkeys(positions.astype(int).tolist())]

    @property
    def batches(self) -> list[int]:
        """Numbers of the batches of `compared`. A record is written after its step, so its number
        is one higher."""
        return [record["step"] - 1 for record in self.compared]


def logged_run(folder: Path) -> LoggedRun:
    """The run in a folder.

    Raises:
      ConfigError: there is no run, or it logged too few steps since its batch size or weights last
        changed.
      CheckpointError: history.json is damaged.
    """
    config = named_config("--from-run", folder)
    history = read_history(folder)
    # Rows were chosen again where batch size or weights changed
    last_change = history[-1].step if history else 0
    records = [
        record
        for record in read_metrics(folder)
        if "step_seconds" in record and record["step"] > last_change
    ]
    if len(records) <= WARM_UP:
        raise ConfigError(
            f"--from-run {folder}: {len(records)} steps are logged from step {last_change + 1} on, of which the first "
            f"{WARM_UP} are left out; let it run longer"
        )
    return LoggedRun(config, records[WARM_UP:], history)


def fitted(
    layout: PlannedLayout, batches: Sequence[BatchItems], device: Device, seconds: float
) -> tuple[Device, list[StepTime]]:
    """Fit the efficiency such that the median of the predicted steps takes `seconds`; return the
    device with it, and the times of the steps.

    If no efficiency does, for example because memory and links alone take longer, it is the nearer
    bound.
    """

    def times(efficiency: float) -> list[StepTime]:
        tried = replace(device, efficiency=efficiency)
        return [
            simulate(layout.programs, plan, items, tried)
            for plan, items in zip(layout.plans, batches, strict=True)
        ]

    low = np.log(LEAST)
    high = np.log(MOST)
    for _ in range(HALVINGS):  # bisection of the logarithm
        middle = (low + high) / 2
        error = _median_step(times(float(np.exp(middle)))) / seconds - 1
        if abs(error) < CLOSE:
            break
        low, high = (middle, high) if error > 0 else (low, middle)
    efficiency = float(np.exp((low + high) / 2))
    return replace(device, efficiency=efficiency), times(efficiency)


def _median_step(times: Sequence[StepTime]) -> float:
    return statistics.median(time.seconds for time in times)


def spread(run: LoggedRun, times: Sequence[StepTime]) -> float:
    """Relative error of predicted seconds that nine of ten steps stay within, `WIDEST` at most."""
    measured = [record["step_seconds"] for record in run.compared]
    errors = [
        abs(time.seconds / seconds - 1) for time, seconds in zip(times, measured, strict=True)
    ]
    return min(float(np.percentile(errors, 90)), WIDEST)


def comparison(
    layout: PlannedLayout, run: LoggedRun, times: Sequence[StepTime]
) -> list[dict[str, Any]]:
    """A line for each phase: predicted seconds of a step, and rows and shares of real tokens as
    planned and as logged; then lines for the parts that belong to no phase, and for the step."""
    lines = []
    for phase in layout.spec.phases:
        line: dict[str, Any] = {"part": phase, "predicted_s": _mean_seconds(times, f"{phase}/")}
        for name in ("rows", "real_token_fraction"):
            key = f"{phase}/{name}"
            line[f"planned_{name}"] = layout.statistic(key)
            logged = [record[key] for record in run.compared if key in record]
            line[f"logged_{name}"] = float(np.mean(logged)) if logged else None
        lines.append(line)
    other_parts = [name for name in times[0].parts if "/" not in name]
    lines += [{"part": name, "predicted_s": _mean_seconds(times, name)} for name in other_parts]
    step = {"part": "step, median", "predicted_s": _median_step(times), "measured_s": run.seconds}
    return [*lines, step]


def plan_conclusion(layout: PlannedLayout, run: LoggedRun) -> str:
    """One line: whether rows, their classes and real tokens of each step are exactly those that
    were planned."""
    different: dict[str, int] = {}
    for plan, record in zip(layout.plans, run.compared, strict=True):
        for name, planned in planned_statistics(plan).items():
            if record.get(name) != planned:
                different[name] = different.get(name, 0) + 1
    if not different:
        return f"rows, their classes and real tokens of all {len(layout.plans)} steps are exactly those planned"
    names = ", ".join(f"{name} in {steps}" for name, steps in different.items())
    return f"of {len(layout.plans)} steps, other than planned: {names}"


def _mean_seconds(times: Sequence[StepTime], prefix: str) -> float:
    """Mean over steps of the seconds of all parts whose names have a prefix."""
    seconds_of_steps = [
        sum(seconds for name, seconds in time.parts.items() if name.startswith(prefix))
        for time in times
    ]
    return float(np.mean(seconds_of_steps))
