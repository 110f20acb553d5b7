"""Long rows: an item that no ordinary row holds gets a row of its own, which all ranks of the phase compute together.

Such a row is a microbatch by itself, before the ordinary ones. Its slots are dealt to all ranks (data/rows/masks.py),
so no rank waits for another; one rank is its home, where the tokens of its media arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Longs
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec


def is_long(spec: PhaseSpec, length: Longs) -> NDArray[np.bool_]:
    """Which items need a long row: [N]. Without long rows none does, whatever its length."""
    return (length > spec.capacities[0]) & (spec.long_capacity > 0)


def select(items: PhaseItems, chosen: NDArray[np.bool_]) -> PhaseItems:
    """Some of the items."""
    return PhaseItems(**{name: column[chosen] for name, column in vars(items).items()})


def with_long_rows(
    spec: PhaseSpec, items: PhaseItems, rank: Longs | None, place: Callable[[PhaseItems, Longs | None], PhasePlan]
) -> PhasePlan:
    """A plan of all items from one of those that ordinary rows hold.

    Args:
      rank: [N] ranks where items shall stay; none: long rows take the ranks in turn as their homes.
      place: makes the plan of ordinary items, given them and their ranks.

    Raises:
      ValueError: an item is longer than a long row.
    """
    long = is_long(spec, items.length)
    if not long.any():
        return place(items, rank)
    if (items.length > spec.long_capacity).any():
        worst = int(items.length.argmax())
        raise ValueError(
            f"an item of phase {spec.name!r} has {items.length[worst]} slots (example {items.example[worst]} of the "
            f"batch), but a long row holds {spec.long_capacity}: raise phases.{spec.name}.long_capacity, or limit the "
            f"size of items"
        )
    rest = place(select(items, ~long), None if rank is None else rank[~long])
    count = int(long.sum())

    def merged(of_long: Longs | int, of_rest: NDArray[np.int32]) -> NDArray[np.int32]:
        column = np.empty(len(long), np.int32)
        column[long], column[~long] = of_long, of_rest
        return column

    capacity = np.concatenate([np.full(count, spec.long_capacity, np.int32), rest.capacity])
    return PhasePlan(
        capacity=capacity,
        pool=np.zeros_like(capacity),
        pool_offset=np.zeros_like(capacity),
        microbatch=merged(np.arange(count), rest.microbatch + count),
        rank=merged(np.arange(count) % spec.ranks if rank is None else rank[long], rest.rank),
        offset=merged(0, rest.offset),
        segment=merged(1, rest.segment),
    )
