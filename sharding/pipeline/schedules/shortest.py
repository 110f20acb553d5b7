"""The shortest of the schedules found fast: greedy ones, and fixed orders that fit the slots.

On few ranks greedy schedules are mostly the shortest. On many ranks, where a batch has few
microbatches for each, GPipe's order is: every tick in which one rank goes backward while others
still go forward costs all of them, and GPipe's order changes direction once. Its bubble is short
where ranks have several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """The schedule of least lockstep cost among greedy ones and the fixed orders that are possible
    and fit the slots; at equal cost a greedy one.

    The fixed orders take milliseconds, and greedy schedules are given up as soon as they cannot be
    as short. Where slots keep residuals, the cost is that with residuals kept, because an order
    that goes back soon uses a slot many times; then no greedy schedule is given up.

    Args:
      powers: exponents of the greedy schedules.
      bound: longer schedules are given up, too, unless slots keep residuals.

    Raises:
      PipelineError: no schedule is found that fits the slots and the bound.
    """
    if keeps_residuals(slots):
        schedules = fitting_orders(graph, fixed_orders, slots)
        bound = None
    else:
        schedules = []
        # Counting slots takes longest: orders are tried from the shortest on, up to one that fits.
        for schedule in sorted(_possible_schedules(graph, fixed_orders), key=lockstep):
            if bound is not None and lockstep(schedule) > bound:
                break
            if _fits(schedule, slots):
                schedules = [schedule]
                bound = lockstep(schedule)
                break
    try:
        schedules.insert(0, greedy(graph, slots, powers=powers, bound=bound))
    except PipelineError:
        if not schedules:
            raise
    return min(schedules, key=lambda schedule: cost_within(schedule, slots))


def keeps_residuals(slots: Slots | None) -> bool:
    """Whether there are slots for residuals."""
    return any(count for (pool, _), count in (slots or {}).items() if pool == Pool.RESIDUAL)


def cost_within(schedule: Schedule, slots: Slots | None) -> int:
    """The lockstep cost, with residuals kept in the slots that there are for them."""
    return lockstep(keep_residuals(schedule, slots or {}) if keeps_residuals(slots) else schedule)


def fitting_orders(
    graph: Graph, fixed_orders: Iterable[Order], slots: Slots | None = None
) -> list[Schedule]:
    """The schedules of the fixed orders that are possible and fit the slots."""
    return [
        schedule for schedule in _possible_schedules(graph, fixed_orders) if _fits(schedule, slots)
    ]


def _possible_schedules(graph: Graph, fixed_orders: Iterable[Order]) -> Iterator[Schedule]:
    for fixed_order in fixed_orders:
        try:
            yield fixed_order(graph)
        except PipelineError:  # the orders of its ranks wait for each other
            continue


def _fits(schedule: Schedule, slots: Slots | None) -> bool:
    return slots is None or all(
        needed <= slots.get(key, 0) for key, needed in slots_needed([schedule]).items()
    )
