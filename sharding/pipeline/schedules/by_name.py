"""Every kind of schedule by its name in `pipeline.schedule`. A new kind is a function and a line in
this table.

The planner, the search, benchmarks, the drawing command and the check of the config know the kinds
only from `SCHEDULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sharding.pipeline.graph import Graph, Slots
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.orders import gpipe, interleaved, one_f_one_b
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.schedules.search import search
from sharding.pipeline.schedules.shortest import Order, shortest


class Make(Protocol):
    """A function that makes a schedule, with a budget of slots (None: any number) and of rollouts
    for a search."""

    def __call__(self, graph: Graph, slots: Slots | None, rollouts: int) -> Schedule: ...


@dataclass(frozen=True)
class Scheduler:
    """How one kind of schedule is made.

    keeps_slots: whether `make` keeps to the slot budget, and raises `PipelineError` where no
    schedule fits. A kind that does not is replaced by the greedy schedule for batches that do not
    fit, and is among the fixed orders that `greedy` and `search` compare with.
    all_in_flight: whether all microbatches of a step are under way at once, so that all need slots.
    """

    make: Make
    keeps_slots: bool
    all_in_flight: bool = False


def fixed_order(order: Order, *, all_in_flight: bool = False) -> Scheduler:
    """The scheduler of an order that does not consider slots."""
    return Scheduler(
        lambda graph, slots, rollouts: order(graph),
        keeps_slots=False,
        all_in_flight=all_in_flight,
    )


def fixed_orders() -> list[Order]:
    """The orders that do not consider slots, with which greedy and searched schedules compete."""
    makers = [scheduler.make for scheduler in SCHEDULES.values() if not scheduler.keeps_slots]
    return [partial(make, slots=None, rollouts=0) for make in makers]


def scheduler_of(name: str) -> Scheduler:
    """The scheduler with this name. Raises `PipelineError`, with a list of all, if none has it."""
    if name not in SCHEDULES:
        raise PipelineError(
            f"pipeline.schedule = {name!r}: there is no such schedule; choose one of {', '.join(SCHEDULES)}, or "
            "auto",
        )
    return SCHEDULES[name]


# A search takes the first of equally good fixed orders, so their order here decides ties.
SCHEDULES: dict[str, Scheduler] = {
    "1f1b": fixed_order(one_f_one_b),
    "interleaved": fixed_order(interleaved),
    "gpipe": fixed_order(gpipe, all_in_flight=True),
    "greedy": Scheduler(
        lambda graph, slots, rollouts: shortest(graph, fixed_orders(), slots),
        keeps_slots=True,
    ),
    "search": Scheduler(
        lambda graph, slots, rollouts: (
            search(graph, fixed_orders(), slots, rollouts=rollouts).schedule
        ),
        keeps_slots=True,
    ),
}
