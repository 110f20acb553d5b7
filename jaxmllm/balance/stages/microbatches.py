"""Microbatches of a pipeline: even encoder and even language work, though both hang on the same examples.

    examples --deal--> replicas --fill--> microbatches --swap--> even in every phase --defer--> even language work
                        level 0             level 1                                      level 2

    encoder rows     [ a b ] [ c d ] [ e f ]      an example is encoded in microbatch i;
                         \\_______                its language part runs in i or, deferred, in i + 1
    language rows    [ a   ] [ b c d ] [ e f ]

Stages wait for each other, so microbatches should cost alike, in each phase: no grouping of whole examples does that
exactly for two phases. Levels 0 and 1 and deferral follow Entrain (arXiv 2605.27918); the swaps between them, and the
limits that rows of fixed capacity set, are our own. Whole examples are deferred, to the next microbatch and inside the
step only, so encoder outputs of at most two microbatches live at a time. Integers only: every host finds the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from jaxmllm.arrays import INT64_MAX as NEVER
from jaxmllm.arrays import Bools, Ints, Longs, sums_by
from jaxmllm.balance.rows.pack import lay_out
from jaxmllm.phases import LANGUAGE

TOTAL_BITS = 24  # work is counted in units of which a batch has fewer than 2**24, so that squares are far from overflow
SUBSET_BITS = 11  # ... and for the sums of deferred examples in units of which a microbatch has at most 2**11
SWEEPS = 60  # of swaps, at most; each changes many microbatches at once
OFFERED = 256  # examples that take part in one sweep, at most: it compares all pairs


@dataclass(frozen=True)
class PhaseLoad:
    """What the B examples of a batch ask of one phase.

    `work` in any unit that all phases of a call share (FLOPs, say), `slots` of a row; both are 0 where an example has
    no part in the phase. A microbatch of one replica holds at most `capacity` slots; None: any number.
    """

    work: Longs  # [B]
    slots: Longs  # [B]
    capacity: int | None = None


@dataclass(frozen=True)
class MicrobatchPlan:
    """Replica and microbatches of every example. Microbatches are numbered in the order of execution, and those of
    one number run together on all replicas; `language` is `encoder` or, for deferred examples, `encoder` + 1."""

    replica: Ints  # [B]
    encoder: Ints  # [B]; for examples without media equal to `language`
    language: Ints  # [B]
    microbatches: int
    statistics: dict[str, float]  # <phase>/cv, <phase>/max_over_mean, deferred_examples, max_deferred_slots

    @property
    def deferred(self) -> Bools:
        """[B] whether the language part runs one microbatch later."""
        return self.language > self.encoder


def plan_microbatches(
    encoders: Mapping[str, PhaseLoad],
    language: PhaseLoad,
    replicas: int,
    microbatches: int,
    max_deferred: int | None = None,
) -> MicrobatchPlan:
    """Place the examples of a batch.

    Replicas get equal numbers of examples (or, if that is impossible, numbers that differ by one). Of the stratified
    and the plain filling every replica keeps the one whose loads have the least sum of squares after deferral.

    Args:
      encoders: by phase, "vision" for one; may be empty.
      microbatches: M of one replica. Where rows are short of slots, the plan has more.
      max_deferred: most language slots that one microbatch may leave to the next; 0 defers nothing.

    Raises:
      ValueError: no replica or microbatch, arrays of different lengths, negative numbers, or an example that does not
        fit a row of its own.
    """
    phases = {**encoders, LANGUAGE: language}
    _check(phases, replicas, microbatches)
    work = np.stack([load.work for load in phases.values()], axis=1)
    work = work >> max(0, int(work.sum(dtype=object)).bit_length() - TOTAL_BITS)
    slots = np.stack([load.slots for load in phases.values()], axis=1)
    capacity = np.array([NEVER if load.capacity is None else load.capacity for load in phases.values()], np.int64)
    replica = _deal(work, replicas)
    members = [np.flatnonzero(replica == number) for number in range(replicas)]

    needed = max((_fewest(slots[of], capacity) for of in members), default=1)
    count = max(microbatches, needed)
    while True:
        carriers = max(_carriers(work[of], slots[of], capacity, count) for of in members)
        for media in dict.fromkeys((carriers, count)):
            placed = [_place(work[of], slots[of], capacity, count, media, max_deferred) for of in members]
            if all(each is not None for each in placed):
                encoder, run = np.empty(len(work), np.int32), np.empty(len(work), np.int32)
                for of, each in zip(members, placed, strict=True):
                    assert each is not None
                    encoder[of], run[of] = each.encoder, each.language
                statistics = _statistics(phases, replica, encoder, run, replicas, count)
                return MicrobatchPlan(replica.astype(np.int32), encoder, run, count, statistics)
        count += max(1, count // 8)


def pack_rows(microbatch: Ints | Longs, slots: Longs, capacity: int) -> tuple[Ints, Ints]:
    """Sub-microbatches: the items of each microbatch of a replica in as few rows of `capacity` slots as first-fit by
    descending length finds.

    Args:
      microbatch: [N] of each item, an image for one.
      slots: [N].

    Returns:
      (row [N] of the item inside its microbatch, offset [N] in slots inside the row).

    Raises:
      ValueError: an item that no row holds.
    """
    if len(slots) and slots.max() > capacity:
        worst = int(slots.argmax())
        raise ValueError(f"item {worst} has {slots[worst]} slots, but rows have {capacity}: raise the capacity")
    row = np.empty(len(slots), np.int64)
    rooms: dict[int, list[int]] = {}
    for item in np.argsort(-slots, kind="stable").tolist():
        wanted, room = int(slots[item]), rooms.setdefault(int(microbatch[item]), [])
        place = next((number for number, free in enumerate(room) if free >= wanted), len(room))
        if place == len(room):
            room.append(capacity)
        room[place] -= wanted
        row[item] = place
    most = int(row.max(initial=0)) + 1
    return row.astype(np.int32), lay_out(microbatch.astype(np.int64) * most + row, slots)[0]


def _check(phases: Mapping[str, PhaseLoad], replicas: int, microbatches: int) -> None:
    if replicas < 1 or microbatches < 1:
        raise ValueError(f"a plan needs at least one replica and one microbatch, not {replicas} and {microbatches}")
    examples = len(phases[LANGUAGE].work)
    for phase, load in phases.items():
        if not len(load.work) == len(load.slots) == examples:
            raise ValueError(
                f"phase {phase!r} has work of {len(load.work)} and slots of {len(load.slots)} examples, "
                f"but the language phase has {examples}"
            )
        if examples and (load.work.min() < 0 or load.slots.min() < 0):
            raise ValueError(f"phase {phase!r} has negative work or slots")
        if load.capacity is not None and examples and load.slots.max() > load.capacity:
            worst = int(load.slots.argmax())
            raise ValueError(
                f"example {worst} needs {load.slots[worst]} slots of phase {phase!r}, but its rows have "
                f"{load.capacity}: raise phases.{phase}.capacities, or limit the size of examples"
            )


def _fewest(slots: Longs, capacity: Longs) -> int:
    """Microbatches below which the slots of a replica do not fit, whatever the packing."""
    return max(1, int((-(-slots.sum(axis=0) // capacity)).max(initial=1)))


# ---------------------------------------------------------------------------- levels 0 and 1


def _deal(work: Longs, replicas: int) -> Longs:
    """Replica of each example [B]: by encoder work descending, each to the replica with least language work."""
    examples = len(work)
    room = [examples // replicas + (number < examples % replicas) for number in range(replicas)]
    load, replica = [0] * replicas, np.zeros(examples, np.int64)
    language = work[:, -1].tolist()
    for example in np.lexsort((-work[:, -1], -work[:, :-1].sum(axis=1))).tolist():
        chosen = min((number for number in range(replicas) if room[number]), key=load.__getitem__)
        replica[example] = chosen
        load[chosen] += language[example]
        room[chosen] -= 1
    none = np.zeros((examples, 0), np.int64)
    return _swap(replica, work, none, np.zeros(0, np.int64), replicas, np.ones(examples, np.bool_), replicas, False)


def _carriers(work: Longs, slots: Longs, capacity: Longs, microbatches: int) -> int:
    """How many microbatches of a replica hold media.

    So few that the costliest example is no more than an average one of them, for a row with little in it costs what a
    full one costs; but not so few that their examples bring more language work than an average microbatch has.
    """
    media = work[:, :-1].sum(axis=1)
    language = int(work[:, -1].sum())
    even = int(media.sum()) // max(int(media.max(initial=0)), 1)
    theirs = -(-microbatches * int(work[media > 0, -1].sum()) // max(language, 1))
    return min(microbatches, max(even, theirs, _fewest(slots[media > 0], capacity)))


def _place(
    work: Longs, slots: Longs, capacity: Longs, microbatches: int, carriers: int, max_deferred: int | None
) -> _Placed | None:
    """The better of two fillings of one replica or, where slots are too short for both, the tightest. None when that
    does not fit either."""
    media: Bools = (work[:, :-1] + slots[:, :-1]).sum(axis=1) > 0
    fillings = [_fill(work, slots, capacity, microbatches, carriers, media, halves) for halves in (True, False)]
    if all(filled is None for filled in fillings):
        fillings = [_fill_tightly(slots, capacity, microbatches, carriers, media)]
    best: _Placed | None = None
    for filled in fillings:
        if filled is None:
            continue
        group = _swap(filled, work, slots, capacity, microbatches, media, carriers, True)
        placed = _run(group, work, slots, capacity, microbatches, media, max_deferred)
        if best is None or placed.squares < best.squares:
            best = placed
    return best


def _fill(
    work: Longs,
    slots: Longs,
    capacity: Longs,
    microbatches: int,
    carriers: int,
    media: Bools,
    stratified: bool,
) -> Longs | None:
    """Microbatch of each example, or None: by encoder work descending to the lightest that has room, of the stratified
    first those with more than the median of language work. Those without media last, by language work."""
    encoder = work[:, :-1].sum(axis=1)
    heavy = np.zeros(len(work), np.bool_)
    if stratified and media.any():
        by_language = np.flatnonzero(media)[np.argsort(-work[media, -1], kind="stable")]
        heavy[by_language[: -(-len(by_language) // 2)]] = True
    order = np.lexsort((-work[:, -1], -encoder, ~heavy, ~media))
    group = np.empty(len(work), np.int64)
    loads = [[0] * microbatches, [0] * microbatches]  # without and with media: language, encoder work
    room = np.tile(capacity, (microbatches, 1))
    limited = bool((capacity < NEVER).any())
    amounts = [work[:, -1].tolist(), encoder.tolist()]
    for example in order.tolist():
        carried = bool(media[example])
        places: Sequence[int] = range(carriers if carried else microbatches)
        if limited:
            fits = (room[: len(places)] >= slots[example]).all(axis=1)
            places = np.flatnonzero(fits).tolist()
            if not places:
                return None
        chosen = min(places, key=loads[carried].__getitem__)
        group[example] = chosen
        room[chosen] -= slots[example] if limited else 0
        loads[0][chosen] += amounts[0][example]
        loads[1][chosen] += amounts[1][example]
    return group


def _fill_tightly(slots: Longs, capacity: Longs, microbatches: int, carriers: int, media: Bools) -> Longs | None:
    """Microbatch of each example, or None: by the share of a row that it takes, descending, the fullest with room."""
    limits = np.where(capacity < NEVER, capacity, max(1, int(slots.sum())))
    share = (slots << 20) // limits
    room, full = np.tile(capacity, (microbatches, 1)), np.zeros(microbatches, np.int64)
    group = np.empty(len(slots), np.int64)
    for example in np.lexsort((-share.max(axis=1), ~media)).tolist():
        fits = (room >= slots[example]).all(axis=1)
        if media[example]:
            fits[carriers:] = False
        if not fits.any():
            return None
        chosen = int(np.where(fits, full, -1).argmax())
        group[example] = chosen
        room[chosen] -= slots[example]
        full[chosen] += share[example].max()
    return group


def _swap(
    group: Longs,
    work: Longs,
    slots: Longs,
    capacity: Longs,
    groups: int,
    media: Bools,
    carriers: int,
    moves: bool,
) -> Longs:
    """Exchange examples between groups, or move them, as long as the sum of their squared work, over phases, falls.

    For examples a in group g and b in group h, half the change is the sum over phases of (a - b) (a - b - (g - h)),
    for all pairs at once. Of the pairs that gain, best first, those in untouched groups are exchanged.

    Args:
      group: [N].
      work: [N, P], in all below 2**`TOTAL_BITS`.
      slots: [N, P], within `capacity` [P] in every group; may have no phases.
      media: [N]; of those, none goes to groups `carriers` and above.
      moves: whether an example may be exchanged for nothing.
    """
    examples, phases = work.shape
    extra = groups if moves else 0  # nothing, in each group
    amount = np.vstack([work, np.zeros((extra, phases), np.int64)])
    own = np.append(group, np.arange(extra))
    size = np.vstack([slots, np.zeros((extra, slots.shape[1]), np.int64)])
    limited = np.flatnonzero(capacity < NEVER)
    tied = np.append(media, np.zeros(extra, np.bool_)) if carriers < groups else None
    squares = (amount**2).sum(axis=1)
    load = np.zeros((groups, phases), np.int64)
    np.add.at(load, own, amount)
    full = np.zeros((groups, slots.shape[1]), np.int64)
    np.add.at(full, own, size)
    rounds = -(-len(own) // OFFERED)
    idle = 0
    for sweep in range(SWEEPS * rounds):
        at = np.arange(sweep % rounds, len(own), rounds)
        here, mine = own[at], amount[at]
        theirs = load[here]
        half = np.repeat((squares[at] - (mine * theirs).sum(axis=1))[:, None], len(at), axis=1)
        for phase in range(phases):
            half += mine[:, phase, None] * (theirs - mine)[:, phase]
        change = half + half.T
        change[here[:, None] == here] = 0
        for phase in limited.tolist():
            free = (capacity[phase] - full[:, phase])[here]
            more = size[at, phase][:, None] - size[at, phase]  # that b's group gets
            change[(more > free) | (-more > free[:, None])] = 0
        if tied is not None:
            astray = tied[at][:, None] & (here >= carriers)
            change[astray | astray.T] = 0
        partner = change.argmin(axis=1)
        gain = change[np.arange(len(at)), partner]
        order = np.argsort(gain, kind="stable")[: int((gain < 0).sum())]
        one, other = _apart(order, partner[order], here)
        idle = 0 if len(one) else idle + 1
        if idle == rounds:
            break
        a, b, g, h = at[one], at[other], here[one], here[other]
        load[g] -= amount[a] - amount[b]
        load[h] += amount[a] - amount[b]
        full[g] -= size[a] - size[b]
        full[h] += size[a] - size[b]
        own[a], own[b] = np.where(a < examples, h, g), np.where(b < examples, g, h)
    return own[:examples]


def _apart(ones: Longs, others: Longs, group: Longs) -> tuple[Longs, Longs]:
    """The pairs that share no group with one before them."""
    taken: set[int] = set()
    chosen = []
    groups = zip(group[ones].tolist(), group[others].tolist(), strict=True)
    for number, (g, h) in enumerate(groups):
        if g not in taken and h not in taken:
            taken |= {g, h}
            chosen.append(number)
    return ones[chosen], others[chosen]


# ---------------------------------------------------------------------------- level 2


@dataclass(frozen=True)
class _Placed:
    """One replica: microbatches of its examples in the order of execution, and the sum of squared loads."""

    encoder: Longs
    language: Longs
    squares: int


def _run(
    group: Longs,
    work: Longs,
    slots: Longs,
    capacity: Longs,
    microbatches: int,
    media: Bools,
    max_deferred: int | None,
) -> _Placed:
    """Defer, and number the microbatches as they run. Pairs whose microbatches hold media come first, on all replicas
    alike, because microbatches of one number run together."""
    deferral = defer(group, work[:, -1], slots[:, -1], microbatches, int(capacity[-1]), max_deferred)
    carries = np.bincount(group[media], minlength=microbatches) > 0
    pairs = sorted(deferral.pairs, key=lambda pair: [not carries[number] for number in pair])
    place = np.empty(microbatches, np.int64)
    place[[number for pair in pairs for number in pair]] = np.arange(microbatches)
    encoder = place[group]
    language = encoder + deferral.deferred
    encoder = np.where(media, encoder, language)
    squares = 0
    for phase in range(work.shape[1]):
        run = language if phase == work.shape[1] - 1 else encoder
        squares += int((sums_by(run, work[:, phase], microbatches) ** 2).sum())
    return _Placed(encoder, language, squares)


@dataclass(frozen=True)
class Deferral:
    """Which examples run their language part one microbatch later."""

    threshold: int  # least possible maximum of pairwise deferral, in units of 2**shift of the work
    shift: int
    pairs: tuple[tuple[int, ...], ...]  # heavy microbatch and the light one right after it; the last may be alone
    after: Longs  # [heavy, light] V, in those units: the greater load of the two after the best transfer between them
    heavy: Longs  # microbatch of every row ...
    light: Longs  # ... and column of V
    deferred: Bools  # [N]

    @property
    def order(self) -> tuple[int, ...]:
        """Microbatches as they run."""
        return tuple(number for pair in self.pairs for number in pair)


def defer(
    group: Longs, work: Longs, slots: Longs, microbatches: int, capacity: int = NEVER, max_deferred: int | None = None
) -> Deferral:
    """Level language work: the heavier half of the microbatches leave examples to partners in the lighter half.

    What i best leaves to j is the subset of its examples whose work is nearest to half of the difference. The least
    threshold T such that all heavier than T find partners of their own with whom neither exceeds T is found by
    bisection over bipartite matchings (arXiv 2605.27918); of the matchings within it, the one with the least sum of
    squares is taken.

    Args:
      group: [N] microbatch of each example.
      work: [N] of the language phase; `slots` [N] of its rows, of `capacity`.
      max_deferred: most slots that a pair may transfer.
    """
    loads = sums_by(group, work, microbatches)
    shift = max(0, int(loads.max(initial=0)).bit_length() - SUBSET_BITS)
    work, full = work >> shift, sums_by(group, slots, microbatches)
    loads = sums_by(group, work, microbatches)
    by_load = np.argsort(-loads, kind="stable")
    heavy, light = np.sort(by_load[: microbatches // 2]), np.sort(by_load[microbatches // 2 :])
    room = np.minimum(capacity - full[light], NEVER if max_deferred is None else max_deferred)
    gap = loads[heavy][:, None] - loads[light]
    members = [np.flatnonzero(group == number) for number in heavy]
    tables = [_subsets(work[of], slots[of]) for of in members]
    sums = np.zeros(gap.shape, np.int64)  # D
    for number, table in enumerate(tables):
        possible = np.flatnonzero(table[-1] < NEVER)
        miss = np.abs(2 * possible[:, None] - gap[number])
        miss[table[-1][possible][:, None] > room] = NEVER
        miss[0] = np.minimum(miss[0], gap[number])  # nothing is always possible
        sums[number] = possible[miss.argmin(axis=0)]
    after = np.maximum(loads[heavy][:, None] - sums, loads[light] + sums)
    threshold = _threshold(after, loads[heavy], int(loads[light].max(initial=0)))
    squares = (loads[heavy][:, None] - sums) ** 2 + (loads[light] + sums) ** 2
    squares[after > threshold] = 2 * int(squares.max(initial=0)) * (microbatches + 1)
    rows, columns = linear_sum_assignment(squares)
    deferred = np.zeros(len(group), np.bool_)
    for row, column in zip(rows, columns, strict=True):
        deferred[members[row][_subset(tables[row], work[members[row]], int(sums[row, column]))]] = True
    moved = sums[rows, columns] > 0
    ranked = np.argsort(~moved, kind="stable")
    pairs = [(int(heavy[row]), int(light[column])) for row, column in zip(rows[ranked], columns[ranked], strict=True)]
    alone = np.setdiff1d(light, light[columns])
    pairs_and_last = (*pairs, *((int(number),) for number in alone))
    return Deferral(threshold, shift, pairs_and_last, after, heavy, light, deferred)


def _subsets(work: Longs, slots: Longs) -> Longs:
    """Fewest slots of a subset of the first n examples with a given sum of work: [n, sum]; NEVER if there is none."""
    table = np.full((len(work) + 1, int(work.sum()) + 1), NEVER, np.int64)
    table[0, 0] = 0
    for number, (amount, size) in enumerate(zip(work.tolist(), slots.tolist(), strict=True)):
        before, row = table[number], table[number + 1]
        row[:] = before
        source = before[: len(before) - amount]
        with_it = np.where(source < NEVER, source, NEVER - size) + size
        np.minimum(row[amount:], with_it, out=row[amount:])
    return table


def _subset(table: Longs, work: Longs, total: int) -> list[int]:
    """The examples of the subset that the table found for a sum."""
    chosen = []
    for number in range(len(work) - 1, -1, -1):
        if table[number + 1, total] != table[number, total]:
            chosen.append(number)
            total -= int(work[number])
    return chosen


def _threshold(after: Longs, loads: Longs, least: int) -> int:
    """Least T, not below `least`, such that every load above it has a column of its own where `after` is within T."""
    candidates = np.unique(np.concatenate([after.ravel(), loads, [least]]))
    candidates = candidates[candidates >= least]
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        bound = candidates[middle]
        over = after[loads > bound] <= bound
        matched = maximum_bipartite_matching(csr_array(over), perm_type="column") if over.size else np.zeros(0)
        if (matched >= 0).all():
            high = middle
        else:
            low = middle + 1
    return int(candidates[low])


# ---------------------------------------------------------------------------- statistics


def _statistics(
    phases: Mapping[str, PhaseLoad], replica: Longs, encoder: Ints, language: Ints, replicas: int, microbatches: int
) -> dict[str, float]:
    statistics = {}
    microbatch_of = dict.fromkeys(phases, encoder) | {LANGUAGE: language}
    for phase, load in phases.items():
        run = microbatch_of[phase]
        loads = sums_by(replica * microbatches + run, load.work, replicas * microbatches).astype(np.float64)
        if loads.any():
            statistics[f"{phase}/cv"] = float(loads.std() / loads.mean())
            statistics[f"{phase}/max_over_mean"] = float(loads.max() / loads.mean())
    late = language > encoder
    between = sums_by((replica * microbatches + encoder)[late], phases[LANGUAGE].slots[late], replicas * microbatches)
    return statistics | {
        "deferred_examples": float(late.sum()),
        "max_deferred_slots": float(between.max(initial=0)),
    }


def loads_of(plan: MicrobatchPlan, work: Longs, phase: str, replicas: int) -> Longs:
    """Work of a phase by replica and microbatch: [replicas, M]."""
    run: Sequence[int] | Ints = plan.language if phase == LANGUAGE else plan.encoder
    place = plan.replica.astype(np.int64) * plan.microbatches + run
    return sums_by(place, work, replicas * plan.microbatches).reshape(replicas, plan.microbatches)
