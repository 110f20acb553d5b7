"""Deferral of language work to the next microbatch: the published example, and the best of all
pairings and subsets by brute force."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.stages.deferral import Deferral, defer


def order_of(found: Deferral) -> list[int]:
    """Numbers of the microbatches in the order in which they run."""
    return [microbatch for pair in found.pairs for microbatch in pair]


def test_the_published_example():
    """Six microbatches with a mean load of 6: loads 3 4 8 6 6 9 all become 6 when they run in
    the order 3 2 6 1 4 5."""
    members = [[3], [2, 2], [2, 6], [3, 3], [6], [3, 6]]
    group = np.repeat(np.arange(6), [len(member_work) for member_work in members])
    work = np.concatenate(members)
    deferral = defer(group, work, work, 6)
    assert (deferral.heavy + 1).tolist() == [3, 4, 6] and (deferral.light + 1).tolist() == [1, 2, 5]
    assert deferral.after.tolist() == [[6, 6, 8], [6, 6, 6], [6, 7, 9]]
    assert deferral.threshold == 6 and deferral.shift == 0
    assert [tuple(microbatch + 1 for microbatch in pair) for pair in deferral.pairs] == [
        (3, 2),
        (6, 1),
        (4, 5),
    ]
    position = np.argsort(order_of(deferral))
    loads = np.bincount(position[group] + deferral.deferred, work)
    assert loads.tolist() == [6] * 6
    assert not deferral.deferred[group == 3].any(), "4 -> 5 runs without a transfer"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=9
    ),
    st.sampled_from([4, 8, 100]),
    st.sampled_from([None, 0, 3]),
)
def test_deferral_is_the_best_of_all_pairings_and_subsets(examples, capacity, limit):
    """With five microbatches, every subset of a heavy microbatch may go to every light one
    within the room there."""
    group, work, slots = np.array(examples, np.int64).T
    used_slots = np.bincount(group, slots, minlength=5)
    capacity = max(capacity, int(used_slots.max()))
    deferral = defer(group, work, slots, 5, capacity, limit)
    loads = np.bincount(group, work, minlength=5)
    by_load = sorted(range(5), key=lambda number: (-loads[number], number))
    heavy = sorted(by_load[:2])
    light = sorted(by_load[2:])

    def best(i: int, j: int) -> int:
        members = np.flatnonzero(group == i)
        subsets = [list(s) for n in range(len(members) + 1) for s in combinations(members, n)]
        room = min(capacity - used_slots[j], np.inf if limit is None else limit)
        return min(
            max(loads[i] - work[s].sum(), loads[j] + work[s].sum())
            for s in subsets
            if not len(s) or slots[s].sum() <= room
        )

    # The table of the larger load of each pair, then the pairing whose worst load is least.
    assert deferral.after.tolist() == [[best(i, j) for j in light] for i in heavy]
    worst_loads = [
        max(
            [best(i, j) for i, j in zip(heavy, partners, strict=True)]
            + [loads[j] for j in set(light) - set(partners)]
        )
        for partners in permutations(light, 2)
    ]
    assert deferral.threshold == min(worst_loads)
    position = np.argsort(order_of(deferral))
    loads_after = np.bincount(position[group] + deferral.deferred, work, minlength=5)
    assert loads_after.max() == deferral.threshold and sorted(order_of(deferral)) == list(range(5))
    passed_slots = np.bincount(
        position[group[deferral.deferred]], slots[deferral.deferred], minlength=5
    )
    assert limit is None or passed_slots.max() <= limit
    assert np.bincount(position[group] + deferral.deferred, slots, minlength=5).max() <= capacity
