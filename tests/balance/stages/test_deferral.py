"""Deferral: the published example, and the best of all pairings and subsets by brute force."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.stages.deferral import Deferral, defer


def order_of(found: Deferral) -> list[int]:
    """Microbatches as they run."""
    return [number for pair in found.pairs for number in pair]


def test_the_published_example():
    """Six microbatches of encoder work 3; loads 3 4 8 6 6 9 all become 6, in the order 3 2 6 1 4 5."""
    members = [[3], [2, 2], [2, 6], [3, 3], [6], [3, 6]]
    group = np.repeat(np.arange(6), [len(each) for each in members])
    work = np.concatenate(members)
    found = defer(group, work, work, 6)
    assert (found.heavy + 1).tolist() == [3, 4, 6] and (found.light + 1).tolist() == [1, 2, 5]
    assert found.after.tolist() == [[6, 6, 8], [6, 6, 6], [6, 7, 9]]
    assert found.threshold == 6 and found.shift == 0
    assert [tuple(number + 1 for number in pair) for pair in found.pairs] == [
        (3, 2),
        (6, 1),
        (4, 5),
    ]
    place = np.argsort(order_of(found))
    loads = np.bincount(place[group] + found.deferred, work)
    assert loads.tolist() == [6] * 6
    assert not found.deferred[group == 3].any(), "4 -> 5 runs without a transfer"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=9
    ),
    st.sampled_from([4, 8, 100]),
    st.sampled_from([None, 0, 3]),
)
def test_deferral_is_the_best_of_all_pairings_and_subsets(examples, capacity, limit):
    group, work, slots = np.array(examples, np.int64).T
    full = np.bincount(group, slots, minlength=5)
    capacity = max(capacity, int(full.max()))
    found = defer(group, work, slots, 5, capacity, limit)
    loads = np.bincount(group, work, minlength=5)
    by_load = sorted(range(5), key=lambda number: (-loads[number], number))
    heavy = sorted(by_load[:2])
    light = sorted(by_load[2:])

    def best(i: int, j: int) -> int:
        mine = np.flatnonzero(group == i)
        subsets = [list(s) for n in range(len(mine) + 1) for s in combinations(mine, n)]
        room = min(capacity - full[j], np.inf if limit is None else limit)
        return min(
            max(loads[i] - work[s].sum(), loads[j] + work[s].sum())
            for s in subsets
            if not len(s) or slots[s].sum() <= room
        )

    assert found.after.tolist() == [[best(i, j) for j in light] for i in heavy]
    alone = [
        max(
            [best(i, j) for i, j in zip(heavy, partners, strict=True)]
            + [loads[j] for j in set(light) - set(partners)]
        )
        for partners in permutations(light, 2)
    ]
    assert found.threshold == min(alone)
    place = np.argsort(order_of(found))
    after = np.bincount(place[group] + found.deferred, work, minlength=5)
    assert after.max() == found.threshold and sorted(order_of(found)) == list(range(5))
    passed = np.bincount(place[group[found.deferred]], slots[found.deferred], minlength=5)
    assert limit is None or passed.max() <= limit
    assert np.bincount(place[group] + found.deferred, slots, minlength=5).max() <= capacity
