"""Long rows, which all ranks of a phase compute together, for items that no ordinary row holds.

A long row has one item, and is a microbatch by itself, before the ordinary ones. Its slots are
divided among all ranks (data/rows/masks.py), so no rank waits for another. One rank is its media
rank, where the tokens of its media arrive: that is the `rank` of its item in the plan.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxmllm.arrays import Bools, Ints, Longs
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec

# Plans items that ordinary rows hold: from the items, and their ranks where these are given.
PlanOrdinary = Callable[[PhaseItems, Longs | None], PhasePlan]


def is_long(spec: PhaseSpec, length: Longs) -> Bools:
    """Which items need a long row: [N]. Without long rows none does, whatever its length."""
    return (length > spec.longest_row) & (spec.long_capacity > 0)


def select(items: PhaseItems, chosen: Bools) -> PhaseItems:
    """The chosen items [N]."""
    return PhaseItems(**{name: column[chosen] for name, column in vars(items).items()})


def with_long_rows(
    spec: PhaseSpec, items: PhaseItems, rank: Longs | None, plan_ordinary: PlanOrdinary
) -> PhasePlan:
    """A plan of all items: long rows, then the ordinary rows that `plan_ordinary` makes.

    Args:
      rank: [N] ranks where items shall stay; none: the media ranks of long rows are 0, 1, 2, ..

    Raises:
      ValueError: an item is longer than a long row.
    """
    long = is_long(spec, items.length)
    if not long.any():
        return plan_ordinary(items, rank)
    _check_long_lengths(spec, items)
    ordinary = plan_ordinary(select(items, ~long), None if rank is None else rank[~long])
    long_rows = int(long.sum())
    media_rank = np.arange(long_rows) % spec.ranks if rank is None else rank[long]

    def merged(of_long: Longs | int, of_ordinary: Ints) -> Ints:
        """A column of the plan, in the order of the items."""
        column = np.empty(len(long), np.int32)
        column[long] = of_long
        column[~long] = of_ordinary
        return column

    capacity = np.concatenate([np.full(long_rows, spec.long_capacity, np.int32), ordinary.capacity])
    return PhasePlan(
        capacity=capacity,
        span=np.concatenate([np.ones(long_rows, np.int32), ordinary.span]),
        pool=np.zeros_like(capacity),
        pool_offset=np.zeros_like(capacity),
        microbatch=merged(np.arange(long_rows), ordinary.microbatch + long_rows),
        rank=merged(media_rank, ordinary.rank),
        offset=merged(0, ordinary.offset),
        segment=merged(1, ordinary.segment),
    )


def _check_long_lengths(spec: PhaseSpec, items: PhaseItems) -> None:
    if (items.length > spec.long_capacity).any():
        worst = int(items.length.argmax())
        raise ValueError(
            f"an item of phase {spec.name!r} has {items.length[worst]} slots "
            f"(example {items.example[worst]} of the batch), but a long row holds "
            f"{spec.long_capacity}: raise phases.{spec.name}.long_capacity, or limit the size of items"
        )
