"""The waste in a plan: padding, and waiting for the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec, RowClass
from jaxmllm.balance.rows.assign import item_costs, largest_share, part_costs

ROWS_OF: Final = "rows_of_"  # followed by the name of a row class


def phase_statistics(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> dict[str, float]:
    """Rows, fill and balance of one phase.

    A row that several ranks hold costs each of them an equal part, rounded up.

    Returns:
      Always: `<phase>/rows`, `<phase>/rows_of_<class>` (for each class, by `class_name`),
        `<phase>/shared_rows` (rows that several ranks hold),
        `<phase>/microbatches`, `<phase>/slots` (of all rows), `<phase>/gathered_slots` (slots whose
        keys and values ranks receive from other ranks in one layer), `<phase>/tokens` (slots that
        hold data), `<phase>/flops` (of real lengths). With rows:
        `<phase>/real_token_fraction` (tokens / slots). Where items cost something:
        `<phase>/max_over_mean` (cost of the costliest rank / mean cost of a rank),
        `<phase>/gap_to_floor` (cost of the costliest rank / its lower bound, the mean or a rank's
        part of the costliest item), `<phase>/synchronised` (sum over microbatches of the slowest
        rank's cost / mean cost of a rank), `<phase>/idle_share` (of the ranks' time, by the same
        sums: 1 - 1 / synchronised), `<phase>/over_ideal` (`slowest_flops` / an equal share of
        `<phase>/flops`).
    """
    span = plan.span.astype(np.int64)
    capacity = plan.capacity.astype(np.int64)
    # A microbatch has one row in each of its ranks // span groups.
    rows = int((spec.ranks // span).sum())
    slots = int(capacity.sum()) * spec.ranks
    tokens = int(items.real.sum())
    flops = spec.flops.total(items.real, items.extra)
    shared_rows = int((spec.ranks // span[span > 1]).sum())
    # Each rank of a group receives what the others of its group hold.
    gathered_slots = int(((span - 1) * capacity).sum()) * spec.ranks
    statistics: dict[str, float] = {
        f"{spec.name}/rows": rows,
        f"{spec.name}/shared_rows": shared_rows,
        f"{spec.name}/microbatches": plan.microbatches,
        f"{spec.name}/slots": slots,
        f"{spec.name}/gathered_slots": gathered_slots,
        f"{spec.name}/tokens": tokens,
        f"{spec.name}/flops": flops,
    }
    for row_class in spec.classes:
        in_class = (capacity == row_class.capacity) & (span == row_class.span)
        rows_of_class = int(in_class.sum()) * (spec.ranks // row_class.span)
        statistics[f"{spec.name}/{ROWS_OF}{class_name(row_class)}"] = rows_of_class
    if not rows:
        return statistics
    statistics[f"{spec.name}/real_token_fraction"] = tokens / slots
    item_cost = item_costs(spec, items)
    part_cost = part_costs(plan, item_cost, spec.ranks)
    total = int(item_cost.sum())
    if total:
        mean = total / spec.ranks
        costliest_rank = int(part_cost.sum(axis=0).max())
        costliest_part = largest_share(plan, item_cost)
        synchronised_cost = int(part_cost.max(axis=1).sum())
        statistics[f"{spec.name}/max_over_mean"] = costliest_rank / mean
        statistics[f"{spec.name}/gap_to_floor"] = costliest_rank / max(mean, costliest_part)
        statistics[f"{spec.name}/synchronised"] = synchronised_cost / mean
        statistics[f"{spec.name}/idle_share"] = 1 - mean / synchronised_cost
    if flops:
        ideal = flops / spec.ranks
        statistics[f"{spec.name}/over_ideal"] = slowest_flops(plan, items, spec) / ideal
    return statistics


def class_name(row_class: RowClass) -> str:
    """Name of a row class: its capacity, and its span where that is above 1: 512 or 512x2."""
    return f"{row_class.capacity}" + (f"x{row_class.span}" if row_class.span > 1 else "")


def step_statistics(
    statistics: Mapping[str, float], specs: Mapping[str, PhaseSpec]
) -> dict[str, float]:
    """`step/over_ideal`: `slowest_flops` summed over phases / an equal share of the FLOPs of the
    data, summed likewise. Empty without FLOPs.

    Args:
      statistics: `phase_statistics` of all phases.
    """
    slowest = 0.0
    ideal = 0.0
    for phase, spec in specs.items():
        phase_ideal = statistics[f"{phase}/flops"] / spec.ranks
        slowest += statistics.get(f"{phase}/over_ideal", 0.0) * phase_ideal
        ideal += phase_ideal
    return {"step/over_ideal": slowest / ideal} if ideal else {}


def slowest_flops(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> float:
    """`slowest_cost` in FLOPs."""
    return slowest_cost(plan, items, spec, spec.flops)


def all_flops(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> float:
    """FLOPs of all ranks together: the linear part on all slots, padding included, and attention of
    all items."""
    slots = spec.ranks * plan.capacity.sum(dtype=float)
    attention = spec.flops.attention(items.length.astype(float), items.extra)
    return float(spec.flops.linear * slots + attention.sum())


def slowest_cost(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec, cost: ItemCost) -> float:
    """Cost of the slowest rank of a microbatch, summed over microbatches.

    A rank's cost is the linear part on all its slots, padding included, and the attention of its
    row's items. The ranks of a shared row have equal parts of that attention.
    """
    linear_cost = cost.linear * plan.capacity.astype(float)
    attention = np.zeros(plan.microbatches * spec.ranks)
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    np.add.at(attention, row, cost.attention(items.length.astype(float), items.extra))
    attention_cost = attention.reshape(-1, spec.ranks).max(axis=1, initial=0) / plan.span
    return float((linear_cost + attention_cost).sum())
