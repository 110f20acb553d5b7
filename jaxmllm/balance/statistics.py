"""What the plan of a phase wastes: padding, and waiting for the slowest rank."""

from __future__ import annotations

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, sums_by
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.assign import item_costs
from jaxmllm.balance.rows.long import is_long


def phase_statistics(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> dict[str, float]:
    """Rows, fill and balance of one phase.

    Returns:
      Always: `<phase>/rows`, `<phase>/microbatches`, `<phase>/slots` (of all rows) and
        `<phase>/tokens` (slots that
      hold data), `<phase>/flops` (of real lengths). With rows: `<phase>/real_token_fraction`
      (tokens / slots), `<phase>/max_over_mean` (cost of the costliest rank / mean),
      `<phase>/gap_to_floor` (the same / its lower bound: the mean or the costliest item),
      `<phase>/synchronised` (sum over microbatches of the slowest rank's row / sum of means),
      `<phase>/idle_share` (of the ranks' time, by the same sums: 1 - 1 / synchronised).
    """
    rows = plan.microbatches * spec.ranks
    shared = plan.capacity > spec.capacities[0]  # long rows: all ranks compute one together
    slots = int(plan.capacity[~shared].sum(dtype=np.int64)) * spec.ranks
    slots += int(plan.capacity[shared].sum())
    tokens = int(items.real.sum())
    statistics: dict[str, float] = {
        f"{spec.name}/rows": rows,
        f"{spec.name}/microbatches": plan.microbatches,
        f"{spec.name}/slots": slots,
        f"{spec.name}/tokens": tokens,
        f"{spec.name}/flops": spec.flops.total(items.real),
    }
    if not rows:
        return statistics
    statistics[f"{spec.name}/real_token_fraction"] = tokens / slots
    item_cost = item_costs(spec, items.length)
    row_cost = _row_costs(plan, item_cost, spec, shared)
    total = int(row_cost.sum())
    if total:
        mean = total / spec.ranks
        costliest_rank = int(row_cost.sum(axis=0).max())
        # A long item does not bound the costliest rank: all ranks share its row.
        costliest_item = int(item_cost[~is_long(spec, items.length)].max(initial=0))
        synchronised_cost = int(row_cost.max(axis=1).sum())
        statistics[f"{spec.name}/max_over_mean"] = costliest_rank / mean
        statistics[f"{spec.name}/gap_to_floor"] = costliest_rank / max(mean, costliest_item)
        statistics[f"{spec.name}/synchronised"] = synchronised_cost / mean
        statistics[f"{spec.name}/idle_share"] = 1 - mean / synchronised_cost
    return statistics


def _row_costs(plan: PhasePlan, item_cost: Longs, spec: PhaseSpec, shared: np.ndarray) -> Longs:
    """Cost of every rank's row [M, R]; that of a shared row is divided evenly, rounded up."""
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    cost = sums_by(row, item_cost, plan.microbatches * spec.ranks).reshape(-1, spec.ranks)
    cost[shared] = ceil_divide(cost[shared].sum(axis=1, keepdims=True), spec.ranks)
    return cost
