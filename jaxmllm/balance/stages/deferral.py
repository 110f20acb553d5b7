"""Deferral: microbatches of the heavier half leave the language parts of some examples to partners
in the lighter half.

    encoder rows     [ a b ] [ c d ] [ e f ]      an example is encoded in microbatch i;
                         \\_______                its language part runs in i or, deferred, in i + 1
    language rows    [ a   ] [ b c d ] [ e f ]

After Entrain (arXiv 2605.27918). Whole examples are deferred, only to the next microbatch and only
inside the step, so encoder outputs of at most two microbatches wait at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from jaxmllm.arrays import INT64_MAX, Bools, Longs, sums_by

# Subset sums count work in units so large that a microbatch has less than 2**11, to bound their
# tables
SUBSET_BITS = 11


@dataclass(frozen=True)
class Deferral:
    """Which examples run their language part one microbatch later."""

    threshold: int  # least maximum that deferral in pairs can reach, in units of 2**shift of work
    shift: int
    pairs: tuple[
        tuple[int, ...],
        ...,
    ]  # heavy microbatch and the light one right after it; the last may be alone
    # [heavy, light], in those units: the greater load of the two after their best transfer
    after: Longs
    heavy: Longs  # microbatch of every row of `after`
    light: Longs  # microbatch of every column of `after`
    deferred: Bools  # [N]


def defer(
    group: Longs,
    work: Longs,
    slots: Longs,
    microbatches: int,
    capacity: int = INT64_MAX,
    max_deferred: int | None = None,
) -> Deferral:
    """Even out language work by deferring examples from heavy microbatches to light ones.

    The best transfer from i to j is the subset of i's examples whose work is nearest to half of the
    difference between i and j. Bisection over bipartite matchings (arXiv 2605.27918) finds the
    least threshold T such that all microbatches heavier than T get partners of their own, and
    neither of such a pair exceeds T afterwards. Of the matchings within T, the one with the least
    sum of squares is taken.

    Args:
      group: [N] microbatch of each example.
      work, slots: [N] of each example in the language phase, whose rows have `capacity` slots.
      max_deferred: most slots that a pair may transfer; None: any number.
    """
    loads = sums_by(group, work, microbatches)
    shift = max(0, int(loads.max(initial=0)).bit_length() - SUBSET_BITS)
    work = work >> shift
    filled = sums_by(group, slots, microbatches)
    loads = sums_by(group, work, microbatches)
    by_load = np.argsort(-loads, kind="stable")
    heavy = np.sort(by_load[: microbatches // 2])
    light = np.sort(by_load[microbatches // 2 :])
    room = np.minimum(capacity - filled[light], INT64_MAX if max_deferred is None else max_deferred)
    members = [np.flatnonzero(group == microbatch) for microbatch in heavy]
    tables = [_subset_sums(work[examples], slots[examples]) for examples in members]
    transfer = _best_transfers(tables, loads[heavy][:, None] - loads[light], room)
    after = np.maximum(loads[heavy][:, None] - transfer, loads[light] + transfer)
    # A heavy load within T may have any partner, because no best transfer raises the greater load
    # of the two. So only loads above T have to be matched.
    threshold = _least_threshold(after, loads[heavy], int(loads[light].max(initial=0)))
    squares = (loads[heavy][:, None] - transfer) ** 2 + (loads[light] + transfer) ** 2
    # One such pair costs more than any assignment without one, so pairs over the threshold are
    # taken only where no others are left.
    squares[after > threshold] = 2 * int(squares.max(initial=0)) * (microbatches + 1)
    rows, columns = linear_sum_assignment(squares)
    deferred = np.zeros(len(group), np.bool_)
    for row, column in zip(rows, columns, strict=True):
        chosen = _subset_of_sum(tables[row], work[members[row]], int(transfer[row, column]))
        deferred[members[row][chosen]] = True
    # Pairs that transfer something come first.
    order = np.argsort(transfer[rows, columns] <= 0, kind="stable")
    pairs = [
        (int(heavy[row]), int(light[column]))
        for row, column in zip(rows[order], columns[order], strict=True)
    ]
    unpaired = np.setdiff1d(light, light[columns])
    return Deferral(
        threshold=threshold,
        shift=shift,
        pairs=(*pairs, *((int(microbatch),) for microbatch in unpaired)),
        after=after,
        heavy=heavy,
        light=light,
        deferred=deferred,
    )


def _best_transfers(tables: list[Longs], gap: Longs, room: Longs) -> Longs:
    """Work of the best transfer from each heavy microbatch to each light one: [heavy, light].

    Args:
      tables: subset sums of every heavy microbatch.
      gap: [heavy, light] difference of their loads.
      room: [light] slots that each can take.
    """
    transfer = np.zeros(gap.shape, np.int64)
    for row, table in enumerate(tables):
        possible = np.flatnonzero(table[-1] < INT64_MAX)
        # [sums, light]: how far apart the two loads are after a transfer of each possible sum
        miss = np.abs(2 * possible[:, None] - gap[row])
        miss[table[-1][possible][:, None] > room] = INT64_MAX
        miss[0] = np.minimum(miss[0], gap[row])  # the empty subset is always possible
        transfer[row] = possible[miss.argmin(axis=0)]
    return transfer


def _subset_sums(work: Longs, slots: Longs) -> Longs:
    """Fewest slots of a subset of the first n examples with a given sum of work: [n, sum].
    INT64_MAX where there is no such subset."""
    table = np.full((len(work) + 1, int(work.sum()) + 1), INT64_MAX, np.int64)
    table[0, 0] = 0
    for index, (example_work, size) in enumerate(zip(work.tolist(), slots.tolist(), strict=True)):
        without = table[index]
        row = table[index + 1]
        row[:] = without
        # A sum s without the example is s + example_work with it. INT64_MAX must not overflow.
        source = without[: len(without) - example_work]
        with_example = np.where(source < INT64_MAX, source, INT64_MAX - size) + size
        np.minimum(row[example_work:], with_example, out=row[example_work:])
    return table


def _subset_of_sum(table: Longs, work: Longs, total: int) -> list[int]:
    """Indices of the examples in the subset that the table has for a sum."""
    chosen = []
    for index in range(len(work) - 1, -1, -1):
        # The example is in it if it made the sum possible, or possible with fewer slots.
        if table[index + 1, total] != table[index, total]:
            chosen.append(index)
            total -= int(work[index])
    return chosen


def _least_threshold(after: Longs, loads: Longs, least: int) -> int:
    """Least T, not below `least`, such that all loads above T can be matched to columns of their
    own in which `after` is within T."""
    candidates = np.unique(np.concatenate([after.ravel(), loads, [least]]))
    candidates = candidates[candidates >= least]
    low = 0
    high = len(candidates) - 1
    # The least T is among low .. high: no load is above the last candidate, which is always enough.
    while low < high:
        middle = (low + high) // 2
        bound = candidates[middle]
        within = after[loads > bound] <= bound
        # scipy refuses a matrix without entries.
        matched = (
            maximum_bipartite_matching(csr_array(within), perm_type="column")
            if within.size
            else np.zeros(0)
        )
        if (matched >= 0).all():
            high = middle
        else:
            low = middle + 1
    return int(candidates[low])
