"""What a run wastes: padding, and waiting for the slowest rank, on the very batches that it would draw.

    jaxmllm waste --config configs/quickstart.yaml [--ranks R] [--steps N] [--json PATH] [key=value ...]

Five ways to make rows of the same batches:

    balanced            the run's plan: every phase placed freely over all ranks (balance.mode: phases)
    packed              examples stay on the rank where sampling put them, packed there (balance.mode: none)
    padded              nothing is packed: each rank pads its items to its own longest
    padded, balanced    the same, with the items of every phase placed so that the costliest rank costs least
    padded alike        the same, with the shape that all ranks need when shapes are fixed, as under XLA

`real tokens` is the share of row slots that hold data; `max/mean` the cost of the costliest rank over the mean, and
`floor` the least that it could be, since an item is never cut; `synchronised` is that ratio when ranks wait for each
other at every microbatch: sum of the slowest rows / sum of means; `over ideal` the FLOPs of the slowest rows, their
padding included, over an equal share of the FLOPs of the data alone.
`rows` and `plan ms` are a step's mean and median. Nothing is decoded, compiled or run.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.costs.flops import real_flops
from jaxmllm.balance.records import BatchItems, Mode, PhaseItems, PhaseSpec, PlanSpec, StepPlan
from jaxmllm.balance.rows import ranks
from jaxmllm.balance.rows.assign import item_costs
from jaxmllm.balance.step_plan import example_ranks, item_ranks, plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.prepare import Groundwork, lay_groundwork, planning_mesh
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.tools.output import measuring_parser, print_table, write_json
from jaxmllm.training.run import USER_ERRORS

PLANNED: dict[str, Mode] = {"balanced": "phases", "packed": "none"}
PADDED = ("padded", "padded, balanced", "padded alike")
FIGURES = ("real_token_fraction", "max_over_mean", "floor", "synchronised", "over_ideal", "rows", "plan_ms")
COLUMNS = ["phase", "method", "real tokens", "max/mean", "floor", "synchronised", "over ideal", "rows", "plan ms"]
GENERATOR = "the first `steps` batches of the run: its sources, shuffled and mixed by run.seed"


@dataclass(frozen=True)
class PhaseWaste:
    """One phase of one step. `slowest` and `ideal` are FLOPs of a rank: of the slowest rows, padding included, summed
    over microbatches; and an equal share of the data."""

    rows: int
    slots: int
    tokens: int
    max_over_mean: float
    floor: float | None  # none where items are padded: their cost is then not their own
    synchronised: float
    slowest: float
    ideal: float


def planned(plan: StepPlan, items: BatchItems, spec: PlanSpec) -> dict[str, PhaseWaste]:
    """Waste of a plan, by phase that has items."""
    return {
        name: PhaseWaste(
            rows=int(plan.statistics[f"{name}/rows"]),
            slots=int(plan.statistics[f"{name}/slots"]),
            tokens=int(plan.statistics[f"{name}/tokens"]),
            max_over_mean=plan.statistics[f"{name}/max_over_mean"],
            floor=_floor(items.phases[name], phase),
            synchronised=plan.statistics[f"{name}/synchronised"],
            slowest=_slowest(plan, items, phase),
            ideal=plan.statistics[f"{name}/flops"] / phase.ranks,
        )
        for name, phase in spec.phases.items()
        if len(items.phases[name].length)
    }


def _slowest(plan: StepPlan, items: BatchItems, phase: PhaseSpec) -> float:
    """FLOPs of the slowest rows: the linear part on every slot, attention on every item."""
    rows, length = plan.phases[phase.name], items.phases[phase.name].length.astype(float)
    squares = np.zeros((rows.microbatches, phase.ranks))
    np.add.at(squares, (rows.microbatch, rows.rank), length**2)
    flops = phase.flops
    return float(flops.linear * rows.capacity.sum(dtype=float) + flops.quadratic * squares.max(axis=1).sum())


def _floor(items: PhaseItems, phase: PhaseSpec) -> float:
    """Least max/mean of any placement: 1, or the costliest item alone on its rank."""
    cost = item_costs(phase, items.length)
    return max(1.0, float(cost.max() * phase.ranks / cost.sum()))


def padded(items: PhaseItems, phase: PhaseSpec, rank: Longs, one_shape: bool = False) -> PhaseWaste:
    """Waste of padding each rank's items to its longest, or to [most items, longest item] of all ranks.

    Args:
      rank: [N] rank of each item.
    """
    count = np.bincount(rank, minlength=phase.ranks)
    longest = np.zeros(phase.ranks, np.int64)
    np.maximum.at(longest, rank, items.length)
    if one_shape:
        count, longest = np.full_like(count, count.max()), np.full_like(longest, longest.max())
    flops = phase.flops
    cost = count * (flops.linear * longest.astype(float) + flops.quadratic * longest.astype(float) ** 2)
    ratio = float(cost.max() / cost.mean())  # all is one microbatch
    return PhaseWaste(
        rows=int(count.sum()),
        slots=int(count @ longest),
        tokens=int(items.real.sum()),
        max_over_mean=ratio,
        floor=None,
        synchronised=ratio,
        slowest=float(cost.max()),
        ideal=real_flops(items, flops) / phase.ranks,
    )


def measure(config: Config, ground: Groundwork, steps: int) -> list[dict[str, Any]]:
    """One record for every phase and method, and one a method for all phases together."""
    specs = {method: _spec(config, ground, mode) for method, mode in PLANNED.items()}
    phases = specs["balanced"].phases
    grids = {name: route.grid for name, route in specs["balanced"].routes.items()}
    wastes: dict[tuple[str, str], list[PhaseWaste]] = defaultdict(list)
    plan_ms: dict[str, list[float]] = defaultdict(list)
    for step in range(steps):
        items = ground.corpus.gather(batch_examples(ground.order, config.data.batch_size, step))
        for method, spec in specs.items():
            plan = plan_step(items, spec)
            plan_ms[method].append(plan.statistics["plan_ms"])
            for name, waste in planned(plan, items, spec).items():
                wastes[name, method].append(waste)
        home = example_ranks(items, phases[LANGUAGE].ranks, "none")
        for name, phase in phases.items():
            if len(items.phases[name].length):
                sampled = item_ranks(items, name, home, grids)
                balanced = ranks.padded(item_costs(phase, items.phases[name].length), phase.ranks)
                wastes[name, "padded"].append(padded(items.phases[name], phase, sampled))
                wastes[name, "padded, balanced"].append(padded(items.phases[name], phase, balanced))
                wastes[name, "padded alike"].append(padded(items.phases[name], phase, sampled, one_shape=True))

    records = [_phase_record(name, method, group, steps) for (name, method), group in wastes.items()]
    records.sort(key=lambda record: list(phases).index(record["phase"]))
    for method in (*PLANNED, *PADDED):
        group = [waste for name in phases for waste in wastes.get((name, method), ())]
        milliseconds = statistics.median(plan_ms[method]) if method in plan_ms else None
        records.append(_record("all", method, over_ideal=_over_ideal(group), plan_ms=milliseconds))
    return records


def _spec(config: Config, ground: Groundwork, mode: Mode) -> PlanSpec:
    balance = config.balance.model_copy(update={"mode": mode})
    chosen = config.model_copy(update={"balance": balance})
    return plan_spec(chosen, ground.model, ground.samples, [ground.corpus, *ground.held_out])


def _phase_record(phase: str, method: str, wastes: Sequence[PhaseWaste], steps: int) -> dict[str, Any]:
    """Ratios over all steps, each step weighing as much as its data costs: as in the summary of a run."""
    ideal = sum(waste.ideal for waste in wastes)
    floor = sum(waste.floor * waste.ideal for waste in wastes if waste.floor is not None) or None
    return _record(
        phase,
        method,
        real_token_fraction=sum(waste.tokens for waste in wastes) / sum(waste.slots for waste in wastes),
        max_over_mean=sum(waste.max_over_mean * waste.ideal for waste in wastes) / ideal,
        floor=None if floor is None else floor / ideal,
        synchronised=sum(waste.synchronised * waste.ideal for waste in wastes) / ideal,
        over_ideal=_over_ideal(wastes),
        rows=sum(waste.rows for waste in wastes) / steps,
    )


def _record(phase: str, method: str, **figures: float | None) -> dict[str, Any]:
    return {"phase": phase, "method": method} | {name: figures.get(name) for name in FIGURES}


def _over_ideal(wastes: Sequence[PhaseWaste]) -> float:
    return sum(waste.slowest for waste in wastes) / sum(waste.ideal for waste in wastes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "jaxmllm waste")
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument("--ranks", type=int, help="data ranks to plan for, instead of the config's data and fsdp axes")
    parser.add_argument("--steps", type=int, default=50)
    options = parse(parser, arguments)
    if options.steps < 1:
        parser.error("--steps must be positive")
    seed = [] if options.seed is None else [f"run.seed={options.seed}"]
    try:
        config = load_config(options.config, [*options.overrides, *seed])
        ground = lay_groundwork(config, planning_mesh(config, options.ranks))
        records = measure(config, ground, options.steps)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    phase_ranks = {phase: ground.model.layout(phase).ranks for phase in ground.model.phases}
    shown = ", ".join(f"{count} {phase}" for phase, count in phase_ranks.items())
    title = f"{options.config}: {options.steps} steps of {config.data.batch_size} examples; ranks: {shown}"
    print_table(title, COLUMNS, [list(record.values()) for record in records])
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
