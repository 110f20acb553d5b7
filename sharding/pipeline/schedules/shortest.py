"""The shortest schedule of those that are found fast: fixed orders that fit the slots, and the greedy
scheduler's.

On few ranks greedy schedules are mostly the shortest. On many, where a batch has few microbatches for
each, every tick in which one rank goes backward while others still go forward costs all of them; there
GPipe's order is, for it has one such change, and its bubble is short where ranks have several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sharding.pipeline.graph import Graph, Pool, Slots
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.greedy import POWERS, greedy
from sharding.pipeline.schedules.schedule import Schedule, lockstep
from sharding.pipeline.slots import keep_residuals, slots_needed

Order = Callable[[Graph], Schedule]


def shortest(
    graph: Graph,
    fixed_orders: Iterable[Order],
    slots: Slots | None = None,
    *,
    powers: Sequence[int] = POWERS,
    bound: int | None = None,
) -> Schedule:
    """The schedule of least lockstep cost among fixed orders that can be kept and fit the slots, and
    greedy schedules; of equal ones a greedy one.

    The fixed orders take milliseconds, and greedy schedules are given up as soon as they cannot be as
    short. Where slots keep residuals, cost is what remains with these kept: an order that goes back
    soon uses a slot again and again. No greedy schedule is given up then.

    Args:
      powers: of the greedy schedules.
      bound: greedy schedules that are longer are given up, too.

    Raises:
      PipelineError: no schedule is found that fits the slots, or a greedy one within the bound.
    """
    found = fitting_orders(graph, fixed_orders, slots)
    keeps = keeps_residuals(slots)
    bounds = [] if keeps else [lockstep(schedule) for schedule in found]
    if bound is not None and not keeps:
        bounds.append(bound)
    try:
        found.insert(0, greedy(graph, slots, powers=powers, bound=min(bounds, default=None)))
    except PipelineError:
        if not found:
            raise
    return min(found, key=lambda schedule: cost_within(schedule, slots))


def keeps_residuals(slots: Slots | None) -> bool:
    """Whether any slot is for residuals."""
    return any(count for (pool, _), count in (slots or {}).items() if pool == Pool.RESIDUAL)


def cost_within(schedule: Schedule, slots: Slots | None) -> int:
    """The lockstep cost, with residuals kept in the slots that there are for them."""
    return lockstep(keep_residuals(schedule, slots or {}) if keeps_residuals(slots) else schedule)


def fitting_orders(
    graph: Graph, fixed_orders: Iterable[Order], slots: Slots | None = None
) -> list[Schedule]:
    """The schedules of fixed orders that can be kept and fit the slots."""
    schedules = []
    for fixed_order in fixed_orders:
        try:
            schedule = fixed_order(graph)
        except PipelineError:  # the orders of its ranks wait for each other
            continue
        if slots is None or all(
            count <= slots.get(key, 0) for key, count in slots_needed([schedule]).items()
        ):
            schedules.append(schedule)
    return schedules
