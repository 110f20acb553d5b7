"""Swaps of examples between groups of a batch (replicas or microbatches), until their work is even
in every phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import INT64_MAX, Bools, Longs, ceil_divide


@dataclass(frozen=True)
class Search:
    """Constants of the search for swaps."""

    # The work of a batch is below 2**24 units, so that sums of squares are far from overflow
    total_bits: int = 24
    sweeps: int = 60  # at most; each changes many groups at once
    # Most examples that take part in one sweep: it compares all pairs of them
    compared: int = 256


SEARCH: Final = Search()


@dataclass(frozen=True)
class Demands:
    """Work and slots of N examples in P phases, the last of which is language."""

    work: Longs  # [N, P], with a total below 2**`SEARCH.total_bits`
    slots: Longs  # [N, P]
    capacity: Longs  # [P] slots of a microbatch of one replica, INT64_MAX where there is no limit
    media: Bools  # [N] whether an example has something to encode

    def subset(self, examples: Longs) -> Demands:
        """The demands of some examples."""
        return Demands(
            self.work[examples],
            self.slots[examples],
            self.capacity,
            self.media[examples],
        )

    @property
    def encoder_work(self) -> Longs:
        """[N] work of all encoders together."""
        return self.work[:, :-1].sum(axis=1)

    @property
    def language_work(self) -> Longs:
        """[N]"""
        return self.work[:, -1]

    @property
    def limited(self) -> Longs:
        """Numbers of the phases whose rows have a capacity."""
        return np.flatnonzero(self.capacity < INT64_MAX)

    @property
    def fewest_microbatches(self) -> int:
        """Lower bound on the microbatches that hold a replica's slots, whatever the packing."""
        return max(1, int((-(-self.slots.sum(axis=0) // self.capacity)).max(initial=1)))


def swap_examples(
    group: Longs,
    demands: Demands,
    groups: int,
    media_groups: int | None = None,
    moves: bool = False,
) -> Longs:
    """Swap examples between groups, or move them, as long as that lowers the sum of squared work
    over groups and phases.

    If examples of work a and b in groups of work g and h are swapped, half the change is the sum
    over phases of (a - b) (a - b - (g - h)). A sweep computes it for all pairs at once. Then pairs
    that gain are swapped, best first, if neither of their groups had a swap in this sweep.

    Args:
      group: [N] of each example, within the capacities.
      media_groups: examples with media stay in groups below this number; None: in any group.
      moves: whether an example may also move without another in exchange.

    Returns:
      [N] the groups afterwards.
    """
    examples, phases = demands.work.shape
    # For moves, every group has one more entry: a blank one, without work and slots.
    blanks = groups if moves else 0
    work = np.vstack([demands.work, np.zeros((blanks, phases), np.int64)])
    slots = np.vstack([demands.slots, np.zeros((blanks, demands.slots.shape[1]), np.int64)])
    group = np.append(group, np.arange(blanks))
    bound = None
    if media_groups is not None and media_groups < groups:
        bound = np.append(demands.media, np.zeros(blanks, np.bool_))
    squares = (work**2).sum(axis=1)
    load = np.zeros((groups, phases), np.int64)
    np.add.at(load, group, work)
    filled = np.zeros((groups, slots.shape[1]), np.int64)
    np.add.at(filled, group, slots)
    limited = demands.limited.tolist()
    rounds = ceil_divide(len(group), SEARCH.compared)
    idle = 0
    for sweep in range(SEARCH.sweeps * rounds):
        # Every `rounds`-th entry, so that `rounds` sweeps in a row see all entries.
        entries = np.arange(sweep % rounds, len(group), rounds)
        entry_group = group[entries]
        change = _swap_changes(work[entries], load[entry_group], squares[entries])
        # From here on 0, which gains nothing, marks pairs that must not be swapped.
        change[entry_group[:, None] == entry_group] = 0
        for phase in limited:
            free = (demands.capacity[phase] - filled[:, phase])[entry_group]
            # [i, j]: slots that the group of j gains and the group of i loses
            received = slots[entries, phase][:, None] - slots[entries, phase]
            # `free` is that of j's group as a row, and that of i's as a column.
            change[(received > free) | (-received > free[:, None])] = 0
        if bound is not None:
            assert media_groups is not None
            astray = bound[entries][:, None] & (entry_group >= media_groups)
            change[astray | astray.T] = 0
        partner = change.argmin(axis=1)
        gain = change[np.arange(len(entries)), partner]
        best_first = np.argsort(gain, kind="stable")[: int((gain < 0).sum())]
        index_a, index_b = _disjoint_pairs(best_first, partner[best_first], entry_group)
        idle = 0 if len(index_a) else idle + 1
        if idle == rounds:
            break
        a = entries[index_a]
        b = entries[index_b]
        g = entry_group[index_a]
        h = entry_group[index_b]
        # No group occurs twice in g and h together, so these additions by index lose nothing.
        load[g] -= work[a] - work[b]
        load[h] += work[a] - work[b]
        filled[g] -= slots[a] - slots[b]
        filled[h] += slots[a] - slots[b]
        # Blank entries stay in their group.
        group[a] = np.where(a < examples, h, g)
        group[b] = np.where(b < examples, g, h)
    return group[:examples]


def _swap_changes(work: Longs, load: Longs, squares: Longs) -> Longs:
    """Half the change of the sum of squared loads when any two of n entries are swapped: [n, n].

    Args:
      work: [n, P] of the entries.
      load: [n, P] of their groups.
      squares: [n] sum over phases of the squared work.
    """
    # one_way[i, j] is a (a - g + h - b), where a and g are the work of i and of its group, b and h
    # those of j. Added to its transpose, that is (a - b) (a - b - (g - h)).
    one_way = np.repeat((squares - (work * load).sum(axis=1))[:, None], len(work), axis=1)
    for phase in range(work.shape[1]):
        one_way += work[:, phase, None] * (load - work)[:, phase]
    return one_way + one_way.T


def _disjoint_pairs(ones: Longs, others: Longs, group: Longs) -> tuple[Longs, Longs]:
    """The pairs that share no group with a pair that was chosen before them."""
    touched: set[int] = set()
    chosen = []
    pairs = zip(group[ones].tolist(), group[others].tolist(), strict=True)
    for index, (g, h) in enumerate(pairs):
        if g not in touched and h not in touched:
            touched |= {g, h}
            chosen.append(index)
    return ones[chosen], others[chosen]
