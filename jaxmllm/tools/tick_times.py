"""Measure the time of a run of pipeline stages beyond its operations, for `jaxmllm calibrate`.

    seconds of a run's gradients = start + tick * ticks + flop * FLOPs

FLOPs are summed over ticks, each counted by its slowest stage, with all devices of the stage
together. A step is timed as planned; with pauses, which are ticks in which every stage waits and as
much travels as in the tick before; and without ticks. The differences give the three terms.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmllm.data.rows.fill import HostStep
from jaxmllm.training.programs.staged import StagedPrograms
from sharding.pipeline.table import with_pauses
from sharding.pipeline.table_spec import TableSpec


@dataclass(frozen=True)
class TickTimes:
    """Seconds of the start and end of a run's program, of a tick without its operations, and of a
    FLOP."""

    start: float
    tick: float
    flop: float

    @property
    def flops_per_tick(self) -> float:
        """FLOPs that take as long as a tick: the value of `pipeline.flops_per_tick`."""
        return self.tick / self.flop if self.flop else math.inf

    def seconds(self, cost: float, ticks: float, runs: float) -> float:
        """Predicted seconds of the gradients of a step, from its statistics `pipeline/...`."""
        return self.start * runs + self.tick * ticks + self.flop * cost


def measure_ticks(
    programs: StagedPrograms,
    params: Any,
    steps: Sequence[HostStep],
    repeats: int,
    ready: Callable[[], object] = lambda: None,
) -> TickTimes:
    """Time the gradients of some steps, planned with `pipeline.flops_per_tick: 0`.

    The ways to run a step take turns, so that a slow moment of the machine affects all of them; the
    first round does not count.

    Args:
      repeats: rounds.
      ready: called before the clock starts, to let processes begin together.
    """
    measured = []
    for host in steps:
        ways = {name: programs.put(step) for name, step in _step_variants(programs, host).items()}
        rounds = [
            {name: _seconds(programs, params, batch, ready) for name, batch in ways.items()}
            for _ in range(repeats + 1)
        ]
        counted_rounds = rounds[1:]
        medians = {
            name: statistics.median(seconds[name] for seconds in counted_rounds) for name in ways
        }
        measured.append((host, medians))
    tables = programs.sizes.training.tables
    timed = [(medians, _tick_count(host), _pause_count(tables, host)) for host, medians in measured]
    costs = [host.statistics["pipeline/cost"] for host in steps]
    runs = [len(host.runs) for host in steps]
    return fit_ticks(timed, costs, runs)


def call_seconds(call: Callable[[], Any], ready: Callable[[], object]) -> float:
    """Seconds of a call until its results are there.

    Args:
      ready: called before the clock starts, to let processes begin together.
    """
    import jax

    ready()
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def fit_ticks(
    timed: Sequence[tuple[Mapping[str, float], int, int]],
    costs: Sequence[float],
    runs: Sequence[int],
) -> TickTimes:
    """Fit the three terms to the sums over steps; none is negative.

    Args:
      timed: for each step, the seconds as `planned`, `paused` and `empty`, its ticks and its
        pauses.
      costs: FLOPs of each step: the sum over ticks of the slowest stage's.
      runs: runs of the executor in each step.
    """
    planned = sum(seconds["planned"] for seconds, _, _ in timed)
    paused = sum(seconds["paused"] for seconds, _, _ in timed)
    empty = sum(seconds["empty"] for seconds, _, _ in timed)
    ticks = sum(of_step for _, of_step, _ in timed)
    pauses = sum(of_step for _, _, of_step in timed)
    tick = max(0.0, paused - planned) / max(pauses, 1)
    flop = max(0.0, planned - empty - tick * ticks) / sum(costs)
    return TickTimes(empty / sum(runs), tick, flop)


def _step_variants(programs: StagedPrograms, host: HostStep) -> dict[str, HostStep]:
    """A step as planned, with pauses, and without ticks."""
    tables = programs.sizes.training.tables
    paused = []
    empty = []
    for run in host.runs:
        pauses = min(len(run.table), tables.ticks - len(run.table))
        rows, wires = with_pauses(tables, run.table, run.wire_active, pauses)
        paused.append(replace(run, table=rows, wire_active=wires))
        empty.append(replace(run, table=run.table[:0], wire_active=run.wire_active[:0]))
    return {
        "planned": host,
        "paused": replace(host, runs=tuple(paused)),
        "empty": replace(host, runs=tuple(empty)),
    }


def _tick_count(host: HostStep) -> int:
    return sum(len(run.table) for run in host.runs)


def _pause_count(tables: TableSpec, host: HostStep) -> int:
    """Pauses of a step: one for each tick, as far as its tables have room."""
    return sum(min(len(run.table), tables.ticks - len(run.table)) for run in host.runs)


def _seconds(
    programs: StagedPrograms, params: Any, batch: Any, ready: Callable[[], object]
) -> float:
    import jax

    jax.block_until_ready((params, batch.runs))
    return call_seconds(partial(programs.gradients, params, batch), ready)
