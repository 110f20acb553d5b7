"""Measure what a run wastes on padding and on waiting for the slowest rank, on the very batches
that it would draw.

    jaxmllm waste --config configs/quickstart.yaml [--ranks R] [--steps N] [--json PATH] [key=value ...]

Six ways to make rows of the same batches:

    balanced            the run's plan: every phase placed freely over all ranks (balance.mode:
                        phases)
    balanced, alone     the same with every row on one rank (phases.<phase>.spans: [1])
    packed              examples stay on the rank where sampling put them, packed there
                        (balance.mode: none)
    padded              nothing is packed: each rank pads its items to its own longest item
    padded, balanced    the same, with the items of every phase placed so that the costliest rank
                        costs least
    padded, one shape   as padded, with the one shape that fits all ranks, which fixed shapes need
                        (XLA)

    real tokens     share of row slots that hold data
    max/mean        cost of the costliest rank / mean rank
    floor           the least max/mean of any placement on these rows: only the ranks that hold a
                    row together divide an item
    synchronised    max/mean when ranks wait for each other at every microbatch: sum of slowest rows
                    / sum of means
    over ideal      FLOPs of the slowest rows, their padding included / an equal share of the FLOPs
                    of the data alone
    rows            rows of a step, the mean over steps
    rows by span    the same by how many ranks hold a row together
    gathered MB     keys and values that all ranks receive for shared rows in a forward pass, the
                    mean over steps
    plan ms         milliseconds to plan a step, the median over steps

A dash means that a method has no such figure, or that rows of one rank cannot hold the largest
items. Nothing is decoded, compiled or run.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.records import (
    BatchItems,
    Mode,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    StepPlan,
)
from jaxmllm.balance.rows import ranks
from jaxmllm.balance.rows.assign import item_costs
from jaxmllm.balance.step_plan import example_ranks, item_ranks, plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import batch_examples
from jaxmllm.families.resolved import load_run_config
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.planning_mesh import planning_mesh
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.balance_comparison import key_value_bytes, with_mode
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.run import USER_ERRORS

# By method: the balance mode, and whether several ranks may hold a row together
PLANNED: dict[str, tuple[Mode, bool]] = {
    "balanced": ("phases", True),
    "balanced, alone": ("phases", False),
    "packed": ("none", False),
}
PADDED = ("padded", "padded, balanced", "padded, one shape")
FIGURES = (
    "real_token_fraction",
    "max_over_mean",
    "floor",
    "synchronised",
    "over_ideal",
    "rows",
    "rows_by_span",
    "gathered_bytes",
    "plan_ms",
)
COLUMNS = [
    "phase",
    "method",
    "real tokens",
    "max/mean",
    "floor",
    "synchronised",
    "over ideal",
    "rows",
    "rows by span",
    "gathered MB",
    "plan ms",
]
GENERATOR = "the first `steps` batches of the run: its sources, shuffled and mixed by run.seed"


@dataclass(frozen=True)
class PhaseWaste:
    """What one phase of one step wastes."""

    rows: int
    slots: int
    tokens: int
    max_over_mean: float
    floor: float | None  # None where items are padded: their cost then depends on others
    synchronised: float
    slowest: float  # FLOPs of the slowest rows, padding included, summed over microbatches
    ideal: float  # FLOPs of the data, an equal share for each rank
    rows_by_span: Mapping[int, int]
    gathered_slots: float = 0.0  # slots whose keys and values ranks receive from others


def planned(plan: StepPlan, items: BatchItems, spec: PlanSpec) -> dict[str, PhaseWaste]:
    """Waste of a plan, for each phase that has items."""
    wastes = {}
    figures = plan.statistics
    for name, phase in spec.phases.items():
        if not len(items.phases[name].length):
            continue
        ideal = figures[f"{name}/flops"] / phase.ranks
        wastes[name] = PhaseWaste(
            rows=int(figures[f"{name}/rows"]),
            slots=int(figures[f"{name}/slots"]),
            tokens=int(figures[f"{name}/tokens"]),
            max_over_mean=figures[f"{name}/max_over_mean"],
            floor=_least_ratio(items.phases[name], phase),
            synchronised=figures[f"{name}/synchronised"],
            slowest=figures[f"{name}/over_ideal"] * ideal,
            ideal=ideal,
            rows_by_span=_rows_by_span(plan.phases[name], phase),
            gathered_slots=figures[f"{name}/gathered_slots"],
        )
    return wastes


def _rows_by_span(plan: PhasePlan, phase: PhaseSpec) -> dict[int, int]:
    spans, microbatches = np.unique(plan.span, return_counts=True)
    by_span = zip(spans.tolist(), microbatches.tolist(), strict=True)
    return {span: count * (phase.ranks // span) for span, count in by_span}


def _least_ratio(items: PhaseItems, phase: PhaseSpec) -> float:
    """Least max/mean of any placement: 1, or that of the costliest item alone on the ranks of the
    widest row."""
    cost = item_costs(phase, items)
    widest = max(row_class.span for row_class in phase.classes)
    return max(1.0, float(cost.max() * phase.ranks / (cost.sum() * widest)))


def padded(items: PhaseItems, phase: PhaseSpec, rank: Longs, one_shape: bool = False) -> PhaseWaste:
    """Waste of padding each rank's items to its longest, or (`one_shape`) to the most items and the
    longest item of all ranks.

    Args:
      rank: [N] rank of each item.
    """
    items_of_rank = np.bincount(rank, minlength=phase.ranks)
    longest = np.zeros(phase.ranks, np.int64)
    np.maximum.at(longest, rank, items.length)
    if one_shape:
        items_of_rank = np.full_like(items_of_rank, items_of_rank.max())
        longest = np.full_like(longest, longest.max())
    flops = phase.flops
    # Padding lengthens items; the extra pairs that media see do not grow
    extra = [
        np.bincount(rank, np.broadcast_to(of_kind, rank.shape), phase.ranks)
        for of_kind in items.extra
    ]
    cost = items_of_rank * flops.of(longest.astype(float)) + flops.attention(0, extra)
    ratio = float(cost.max() / cost.mean())  # without rows a step is one microbatch
    return PhaseWaste(
        rows=int(items_of_rank.sum()),
        slots=int(items_of_rank @ longest),
        tokens=int(items.real.sum()),
        max_over_mean=ratio,
        floor=None,
        synchronised=ratio,
        slowest=float(cost.max()),
        ideal=flops.total(items.real, items.extra) / phase.ranks,
        rows_by_span={1: int(items_of_rank.sum())},
    )


def measure(config: Config, inputs: RunInputs, steps: int) -> list[dict[str, Any]]:
    """One record for every phase and method, and one for each method over all phases.

    Records of methods whose rows cannot hold the largest items have no figures.
    """
    specs = _specs(config, inputs)
    wastes: dict[tuple[str, str], list[PhaseWaste]] = defaultdict(list)  # by phase and method
    plan_ms: dict[str, list[float]] = defaultdict(list)
    for step in range(steps):
        items = inputs.corpus.gather(batch_examples(inputs.order, config.data.batch_size, step))
        for method, spec in specs.items():
            plan = plan_step(items, spec)
            plan_ms[method].append(plan.statistics["plan_ms"])
            for name, waste in planned(plan, items, spec).items():
                wastes[name, method].append(waste)
        for key, waste in _padding_wastes(items, specs["balanced"]).items():
            wastes[key].append(waste)

    phases = list(specs["balanced"].phases)
    slot_bytes = key_value_bytes(config)
    records = [
        _phase_record(name, method, group, steps, slot_bytes[name])
        for (name, method), group in wastes.items()
    ]
    impossible = [method for method in PLANNED if method not in specs]
    records += [_record(name, method) for name in phases for method in impossible]
    methods = (*PLANNED, *PADDED)
    records.sort(
        key=lambda record: (phases.index(record["phase"]), methods.index(record["method"]))
    )
    for method in methods:
        group = [waste for name in phases for waste in wastes.get((name, method), ())]
        milliseconds = statistics.median(plan_ms[method]) if method in plan_ms else None
        records.append(_record("all", method, over_ideal=_over_ideal(group), plan_ms=milliseconds))
    return records


def _specs(config: Config, inputs: RunInputs) -> dict[str, PlanSpec]:
    """What steps are planned by, for every method of `PLANNED` whose rows hold the largest
    items."""
    alone = replace(inputs, spans=dict.fromkeys(inputs.spans, (1,)))
    specs = {}
    for method, (mode, shares) in PLANNED.items():
        try:
            specs[method] = plan_spec(with_mode(config, mode), inputs if shares else alone)
        except ConfigError:  # only rows of several ranks hold the largest items
            if shares:
                raise
    return specs


def _padding_wastes(items: BatchItems, spec: PlanSpec) -> dict[tuple[str, str], PhaseWaste]:
    """Waste of every way to pad, by phase and method, for phases that have items."""
    grids = {name: route.grid for name, route in spec.routes.items()}
    example_rank = example_ranks(items, spec.phases[LANGUAGE].ranks, "none")
    wastes = {}
    for name, phase in spec.phases.items():
        of_phase = items.phases[name]
        if len(of_phase.length):
            sampled = item_ranks(items, name, example_rank, grids)
            balanced = ranks.padded(
                item_costs(phase, replace(of_phase, extra_squares=None)), phase.ranks
            )
            wastes[name, "padded"] = padded(of_phase, phase, sampled)
            wastes[name, "padded, balanced"] = padded(of_phase, phase, balanced)
            wastes[name, "padded, one shape"] = padded(of_phase, phase, sampled, one_shape=True)
    return wastes


def _phase_record(
    phase: str, method: str, wastes: Sequence[PhaseWaste], steps: int, slot_bytes: float
) -> dict[str, Any]:
    """The record of one phase and method over all steps. Ratios are weighted by the cost of a
    step's data, as in the summary of a run.

    Args:
      slot_bytes: bytes of the keys and values of a row slot.
    """
    tokens = sum(waste.tokens for waste in wastes)
    slots = sum(waste.slots for waste in wastes)
    rows = sum(waste.rows for waste in wastes)
    gathered_slots = sum(waste.gathered_slots for waste in wastes)
    spans = sorted({span for waste in wastes for span in waste.rows_by_span})
    rows_by_span = {
        span: sum(waste.rows_by_span.get(span, 0) for waste in wastes) / steps for span in spans
    }
    ideal = sum(waste.ideal for waste in wastes)
    max_over_mean = sum(waste.max_over_mean * waste.ideal for waste in wastes) / ideal
    synchronised = sum(waste.synchronised * waste.ideal for waste in wastes) / ideal
    # With padding there is no floor: the sum is 0, which becomes None again.
    floor = sum(waste.floor * waste.ideal for waste in wastes if waste.floor is not None) or None
    return _record(
        phase,
        method,
        real_token_fraction=tokens / slots,
        max_over_mean=max_over_mean,
        floor=None if floor is None else floor / ideal,
        synchronised=synchronised,
        over_ideal=_over_ideal(wastes),
        rows=rows / steps,
        rows_by_span=rows_by_span,
        gathered_bytes=slot_bytes * gathered_slots / steps,
    )


def _record(phase: str, method: str, **figures: Any) -> dict[str, Any]:
    return {"phase": phase, "method": method} | {name: figures.get(name) for name in FIGURES}


def _over_ideal(wastes: Sequence[PhaseWaste]) -> float | None:
    if not wastes:
        return None
    return sum(waste.slowest for waste in wastes) / sum(waste.ideal for waste in wastes)


def _record_cells(record: dict[str, Any]) -> list[Any]:
    """A record as cells of `COLUMNS`."""
    rows = record["rows_by_span"]
    gathered = record["gathered_bytes"]
    in_words = {
        "rows_by_span": rows and ", ".join(f"{count:g} of {span}" for span, count in rows.items()),
        "gathered_bytes": None if gathered is None else gathered / 1e6,
    }
    return list((record | in_words).values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "jaxmllm waste")
    # None, unlike 0, leaves run.seed as the config has it.
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument(
        "--ranks",
        type=positive_int,
        help="number of data ranks to plan for (default: as in the config)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=50, help="batches to plan (default: %(default)s)"
    )
    options = parse(parser, arguments)
    seed = [] if options.seed is None else [f"run.seed={options.seed}"]
    try:
        config = load_run_config(options.config, [*options.overrides, *seed])
        inputs = prepare(config, planning_mesh(config, options.ranks))
        records = measure(config, inputs, options.steps)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    phase_ranks = {phase: inputs.model.layout(phase).ranks for phase in inputs.model.phases}
    ranks_in_words = ", ".join(f"{phase_ranks[phase]} {phase}" for phase in phase_ranks)
    title = f"{options.config}: {options.steps} steps of {config.data.batch_size} examples; ranks: {ranks_in_words}"
    print_table(title, COLUMNS, [_record_cells(record) for record in records], left_aligned=2)
    totals = [record for record in records if record["phase"] == "all"]
    for record in totals:
        if record["over_ideal"] is None:
            print(
                f"{record['method']}: impossible, for rows of one rank do not hold the largest items"
            )
    write_json(
        options.json,
        "waste",
        config.run.seed,
        GENERATOR,
        config=options.config,
        overrides=options.overrides,
        steps=options.steps,
        batch_size=config.data.batch_size,
        ranks=phase_ranks,
        results=records,
    )
    return 0
