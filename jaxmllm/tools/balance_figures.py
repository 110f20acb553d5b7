"""The numbers of the balance report: what each phase of a plan computes, holds and waits for, and
what is exchanged.

StepPlan, BatchItems, PlanSpec --view--> PhaseView of each phase --table--> cells
                               --route_figures--> MB and shares --route_table--> cells
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.balance.records import BatchItems, PhaseItems, PhasePlan, PhaseSpec, PlanSpec, StepPlan
from jaxmllm.balance.statistics import phase_statistics

STATISTICS: Mapping[str, str] = {  # column of the table -> name of the statistic
    "over ideal": "over_ideal",
    "gap to floor": "gap_to_floor",
    "max/mean": "max_over_mean",
    "synchronised": "synchronised",
    "rows": "microbatches",
    "real tokens": "real_token_fraction",
    "idle": "idle_share",
}
GATHERED = "gathered MB"
COLUMNS = ("phase", "mode", *STATISTICS, "rows by span", GATHERED)
ROUTE_FIGURES = ("MB routed", "change rank", "change node", "node, of random", "slots / moved")
ROUTE_COLUMNS = ("mode", *ROUTE_FIGURES)
LENGTH_COLUMNS = ("phase", "items", "mean", "CV", "max/mean", "inner padding")
SHARES = ("idle", "real tokens", "change rank", "change node")  # shown in per cent
CORRELATION = "correlation/"  # prefix of the names of correlations in workload.describe


@dataclass(frozen=True)
class PhaseView:
    """One phase of one plan, as it is drawn."""

    load: NDArray[
        np.float64
    ]  # [M, R] cost of each rank's share of its rows: FLOPs, or femtoseconds
    real: NDArray[np.float64]  # [M, R] slots of each rank that hold data
    capacity: NDArray[np.int64]  # [M]
    span: NDArray[np.int64]  # [M]
    figures: dict[str, float]  # by column; empty where the phase has no items
    ideal: float  # FLOPs of a rank's equal share of the data
    gathered_bytes: float = 0.0  # keys and values that all ranks receive in a forward pass
    calibrated: bool = False  # costs are femtoseconds

    @property
    def time(self) -> float:
        """Cost of the phase when ranks meet at every microbatch."""
        return float(self.load.max(axis=1, initial=0).sum())

    @property
    def rows_by_span(self) -> str:
        """How many rows of each span a rank holds or shares, in words: 2 of 8, 1 of 1."""
        spans, counts = np.unique(self.span, return_counts=True)
        by_span = zip(counts[::-1].tolist(), spans[::-1].tolist(), strict=True)
        return ", ".join(f"{rows} of {span}" for rows, span in by_span)


Views = Mapping[str, Mapping[str, PhaseView]]  # by mode, the one before first; then by phase


def view(
    plan: StepPlan, items: BatchItems, spec: PlanSpec, key_value_bytes: Mapping[str, float]
) -> dict[str, PhaseView]:
    """The views of all phases of a plan.

    Args:
      key_value_bytes: bytes of the keys and values of a row slot, by phase.
    """
    return {
        name: _view(plan.phases[name], items.phases[name], phase, key_value_bytes[name])
        for name, phase in spec.phases.items()
    }


def _view(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec, key_value_bytes: float) -> PhaseView:
    """The view of one phase: loads and fill of its ranks, and the figures of the table."""
    rows = (plan.microbatch, plan.rank)
    load = np.zeros((plan.microbatches, spec.ranks))
    real = np.zeros((plan.microbatches, spec.ranks))
    length = items.length.astype(float)
    np.add.at(load, rows, spec.cost.of(length, items.extra))
    np.add.at(real, rows, items.real)
    # The ranks that hold a row together share its work evenly.
    load = _spread_evenly(load, plan.span)
    real = _spread_evenly(real, plan.span)
    statistics = phase_statistics(plan, items, spec)
    figures = {
        column: statistics[f"{spec.name}/{name}"]
        for column, name in STATISTICS.items()
        if plan.microbatches and f"{spec.name}/{name}" in statistics
    }
    return PhaseView(
        load,
        real,
        plan.capacity.astype(np.int64),
        plan.span.astype(np.int64),
        figures,
        spec.flops.total(items.real, items.extra) / spec.ranks,
        statistics[f"{spec.name}/gathered_slots"] * key_value_bytes,
        spec.model_flops is not None,
    )


def _spread_evenly(amounts: NDArray[np.float64], span: Ints) -> NDArray[np.float64]:
    """Spread amounts [M, R] of rows from their first rank evenly over the ranks of the row's
    group."""
    shared = amounts.copy()
    for microbatch, ranks in enumerate(span.tolist()):
        of_rows = amounts[microbatch].reshape(-1, ranks).sum(axis=1)
        shared[microbatch] = np.repeat(of_rows / ranks, ranks)
    return shared


def idle_share(views: Mapping[str, PhaseView]) -> float:
    """Predicted share of rank time spent waiting, over all phases."""
    needed = sum(view.load.sum() / view.load.shape[1] for view in views.values())
    return 1 - float(needed / step_time(views))


def over_ideal(views: Mapping[str, PhaseView]) -> float:
    """FLOPs of the slowest rows with their padding, over an equal share of the data's, over all
    phases."""
    present = [view for view in views.values() if view.figures]
    slowest = sum(view.figures["over ideal"] * view.ideal for view in present)
    return slowest / sum(view.ideal for view in present)


def step_time(views: Mapping[str, PhaseView]) -> float:
    """Cost of the costliest rows, summed over all phases and microbatches."""
    return sum(view.time for view in views.values())


def route_figures(plan: StepPlan, token_bytes: int) -> dict[str, float]:
    """What the exchanges of a plan move, all encoder phases together, by column.

    Columns that have no meaning for this plan are left out.

    Args:
      token_bytes: bytes of one encoder output.
    """

    phases = sorted({key.split("/")[1] for key in plan.statistics if key.startswith("route/")})

    def statistic(phase: str, name: str) -> float:
        return plan.statistics.get(f"route/{phase}/{name}", 0.0)

    def total(name: str) -> float:
        return sum(statistic(phase, name) for phase in phases)

    tokens = total("tokens")
    moved = total("moved_tokens")
    # Each phase has a ratio of its own: their mean is weighted by tokens.
    over_random = sum(
        statistic(phase, "node_tokens_over_arbitrary") * statistic(phase, "tokens")
        for phase in phases
    )
    figures: dict[str, float] = {"MB routed": tokens * token_bytes / 1e6}
    if moved:
        figures |= {"change rank": moved / tokens, "slots / moved": total("slots_moved") / moved}
    if over_random:
        figures |= {
            "change node": total("node_tokens") / tokens,
            "node, of random": over_random / tokens,
        }
    return figures


# ---------------------------------------------------------------------------- cells of tables


def table(views: Views) -> list[list[str]]:
    """Cells of `COLUMNS`: each phase in each mode, then all phases together."""
    modes = list(views)
    rows = []
    for phase in views[modes[0]]:
        for mode in modes:
            seen = views[mode][phase]
            cells = [_text(column, seen.figures.get(column)) for column in STATISTICS]
            gathered = _text(GATHERED, seen.gathered_bytes / 1e6 if seen.figures else None)
            rows.append([phase, mode, *cells, seen.rows_by_span or "-", gathered])
    for mode in modes:
        figures = {"over ideal": over_ideal(views[mode]), "idle": idle_share(views[mode])}
        cells = [_text(name, figures[name]) if name in figures else "" for name in STATISTICS]
        gathered = _text(GATHERED, sum(seen.gathered_bytes for seen in views[mode].values()) / 1e6)
        rows.append(["all", mode, *cells, "", gathered])
    return rows


def route_table(routes: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Cells of `ROUTE_COLUMNS`: the exchange of each mode."""
    return [
        [mode, *(_text(name, figures.get(name)) for name in ROUTE_FIGURES)]
        for mode, figures in routes.items()
    ]


def lengths_table(lengths: Mapping[str, float], phases: Iterable[str]) -> list[list[str]]:
    """Cells of `LENGTH_COLUMNS`: how ragged the items of each phase are.

    Args:
      lengths: statistics by name, as workload.describe returns them.
    """
    formats = {
        "items": "{:.0f}",
        "mean": "{:.0f}",
        "cv": "{:.2f}",
        "max_over_mean": "{:.2f}",
        "inner_padding": "{:.1%}",
    }
    rows = []
    for phase in phases:
        values = {name: lengths.get(f"{phase}/{name}") for name in formats}
        cells = [
            "-" if value is None else formats[name].format(value) for name, value in values.items()
        ]
        rows.append([phase, *(cell.replace("%", " %") for cell in cells)])
    return rows


def correlations(lengths: Mapping[str, float]) -> str:
    """Correlations of the amounts of an example, in one line."""
    pairs = [
        f"{name.removeprefix(CORRELATION)} {r:+.2f}"
        for name, r in lengths.items()
        if name.startswith(CORRELATION)
    ]
    return "Correlations of the amounts of an example: " + "; ".join(pairs)


def _text(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column in SHARES:
        return f"{100 * value:.1f} %"
    digits = {"rows": 0, "MB routed": 1, GATHERED: 1}.get(column, 3)
    return f"{value:.{digits}f}"
