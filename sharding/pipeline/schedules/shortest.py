"""The shortest schedule of those that are found fast: fixed orders that fit the slots, and the greedy
scheduler's.

On few ranks greedy schedules are mostly the shortest. On many, where a batch has few microbatches for
each, every tick in which one rank goes backward while others still go forward costs all of them; there
GPipe's order is, for it has one such change, and its bubble is short where ranks have several chunks.
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
    """The schedule of least lockstep cost among fixed orders that can be kept and fit the slots, and
    greedy schedules; of equal ones a greedy one.

    The fixed orders take milliseconds, and greedy schedules are given up as soon as they cannot be as
    short. Where slots keep residuals, cost is what remains with these kept: an order that goes back
    soon uses a slot again and again. No greedy schedule is given up then.

    Args:
      powers: of the greedy schedules.
      bound: schedules that are longer are given up, too, unless slots keep residuals.

    Raises:
      PipelineError: no schedule is found that fits the slots and the bound.
    """
    if keeps_residuals(slots):
        schedules = fitting_orders(graph, fixed_orders, slots)
        bound = None
    else:
        schedules = []
        # Counting slots takes longest, so no order's are counted that cannot be the shortest.
        for schedule in sorted(_kept_orders(graph, fixed_orders), key=lockstep):
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
    """Whether any slot is for residuals."""
    return any(count for (pool, _), count in (slots or {}).items() if pool == Pool.RESIDUAL)


def cost_within(schedule: Schedule, slots: Slots | None) -> int:
    """The lockstep cost, with residuals kept in the slots that there are for them."""
    return lockstep(keep_residuals(schedule, slots or {}) if keeps_residuals(slots) else schedule)


def fitting_orders(
    graph: Graph, fixed_orders: Iterable[Order], slots: Slots | None = None
) -> list[Schedule]:
    """The schedules of fixed orders that can be kept and fit the slots."""
    return [schedule for schedule in _kept_orders(graph, fixed_orders) if _fits(schedule, slots)]


def _kept_orders(graph: Graph, fixed_orders: Iterable[Order]) -> Iterator[Schedule]:
    for fixed_order in fixed_orders:
        try:
            yield fixed_order(graph)
        except PipelineError:  # the orders of its ranks wait for each other
            continue


def _fits(schedule: Schedule, slots: Slots | None) -> bool:
    return slots is None or all(
        needed <= slots.get(key, 0) for key, needed in slots_needed([schedule]).items()
    )
