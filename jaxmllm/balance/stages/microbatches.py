"""Microbatches of a pipeline: balance encoder and language work at once, although both depend on
the same examples.

    examples --> replicas            level 0: equal numbers of examples
             --> microbatches        level 1: filled, heaviest example first
             --> all phases even     level 2: examples swapped (example_swaps.py)
             --> language work even  level 3: some examples deferred (deferral.py)

Stages wait for each other, so microbatches should cost the same in each phase, but no grouping of
whole examples does that exactly for two phases. Levels 0, 1 and 3 follow Entrain (arXiv 2605.27918);
the swaps, and the limits that rows of fixed capacity set, are our own.
Integers only: every host finds the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace

import numpy as np

from jaxmllm.arrays import INT64_MAX, Bools, Ints, Longs, ceil_divide, sums_by
from jaxmllm.balance.stages.deferral import defer
from jaxmllm.balance.stages.example_swaps import SEARCH, Demands, swap_examples
from jaxmllm.phases import LANGUAGE

SHARE_BITS = 20  # shares of a row are counted in 2**20ths


@dataclass(frozen=True)
class PhaseLoad:
    """The load that the B examples of a batch put on one phase.

    `work` is in any unit that all phases of a call share, such as FLOPs, and `slots` are those of
    rows; both are 0 for an example without items of the phase. A microbatch of one replica holds at
    most `capacity` slots; None: any number.
    """

    work: Longs  # [B]
    slots: Longs  # [B]
    capacity: int | None = None


@dataclass(frozen=True)
class MicrobatchPlan:
    """Replica and microbatches of every example. Microbatches are numbered in the order of
    execution, and microbatches of one number run together on all replicas; `language` is `encoder`
    or, for deferred examples, `encoder` + 1."""

    replica: Ints  # [B]
    encoder: Ints  # [B]; for examples without media equal to `language`
    language: Ints  # [B]
    microbatches: int

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
    reader: str = LANGUAGE,
) -> MicrobatchPlan:
    """Assign replicas and microbatches to the examples of a batch.

    Replicas get equal numbers of examples (or, if that is impossible, numbers that differ by one).
    Each replica is filled twice, stratified and not (`_fill`), and keeps the filling whose loads
    have the least sum of squares after deferral.

    Args:
      encoders: by phase, such as "vision"; may be empty.
      microbatches: M of one replica. Where rows are short of slots, the plan has more.
      reader: name of the phase `language`; another reader, such as a generator, may take its place.
      max_deferred: most language slots that one microbatch may leave to the next; 0 defers nothing.

    Raises:
      ValueError: no replica or microbatch, arrays of different lengths, negative numbers, or an
        example that does not fit a row of its own.
    """
    # The reader comes last, where `Demands` has the language phase.
    phases = {**encoders, reader: language}
    _check_loads(phases, reader, replicas, microbatches)
    demands = _demands(list(phases.values()))
    replica_of = _example_replicas(demands, replicas)
    members = [np.flatnonzero(replica_of == replica) for replica in range(replicas)]
    shares = [demands.subset(examples) for examples in members]
    # Replicas run the same microbatches together, so the one that needs most decides.
    microbatch_count = max(
        microbatches, max((share.fewest_microbatches for share in shares), default=1)
    )
    # The fewest may be too few, because they ignore how examples pack. The loop ends, because every
    # example fits a microbatch of its own.
    while True:
        plans = _replica_plans(shares, microbatch_count, max_deferred)
        if plans is not None:
            break
        microbatch_count += max(1, microbatch_count // 8)
    encoder_microbatch = np.empty(len(replica_of), np.int32)
    language_microbatch = np.empty(len(replica_of), np.int32)
    for examples, plan in zip(members, plans, strict=True):
        encoder_microbatch[examples] = plan.encoder
        language_microbatch[examples] = plan.language
    return MicrobatchPlan(
        replica_of.astype(np.int32), encoder_microbatch, language_microbatch, microbatch_count
    )


def _check_loads(
    phases: Mapping[str, PhaseLoad], reader: str, replicas: int, microbatches: int
) -> None:
    if replicas < 1 or microbatches < 1:
        raise ValueError(
            f"a plan needs at least one replica and one microbatch, not {replicas} and {microbatches}",
        )
    examples = len(phases[reader].work)
    for phase, load in phases.items():
        if not len(load.work) == len(load.slots) == examples:
            raise ValueError(
                f"phase {phase!r} has work of {len(load.work)} and slots of {len(load.slots)} examples, "
                f"but the {reader} phase has {examples}",
            )
        if examples and (load.work.min() < 0 or load.slots.min() < 0):
            raise ValueError(f"phase {phase!r} has negative work or slots")
        if load.capacity is not None and examples and load.slots.max() > load.capacity:
            worst = int(load.slots.argmax())
            raise ValueError(
                f"example {worst} needs {load.slots[worst]} slots of phase {phase!r}, but its rows have "
                f"{load.capacity}: raise phases.{phase}.capacities, or limit the size of examples",
            )


def _demands(loads: Sequence[PhaseLoad]) -> Demands:
    """The loads with work in units of which the batch has fewer than 2**`SEARCH.total_bits`."""
    work = np.stack([load.work for load in loads], axis=1)
    work = work >> max(0, int(work.sum(dtype=object)).bit_length() - SEARCH.total_bits)
    slots = np.stack([load.slots for load in loads], axis=1)
    capacity = np.array(
        [INT64_MAX if load.capacity is None else load.capacity for load in loads],
        np.int64,
    )
    return Demands(work, slots, capacity, media=(work[:, :-1] + slots[:, :-1]).sum(axis=1) > 0)


# ---------------------------------------------------------------------------- level 0


def _example_replicas(demands: Demands, replicas: int) -> Longs:
    """Replica of each example [B]: by encoder work descending, each to the replica with room that
    has the least language work; then swapped until even."""
    examples = len(demands.work)
    room = [examples // replicas + (replica < examples % replicas) for replica in range(replicas)]
    loads = [(0, replica) for replica in range(replicas) if room[replica]]  # a heap
    replica_of = np.zeros(examples, np.int64)
    language_work = demands.language_work.tolist()
    for example in np.lexsort((-demands.language_work, -demands.encoder_work)).tolist():
        load, chosen = loads[0]
        replica_of[example] = chosen
        room[chosen] -= 1
        if room[chosen]:
            heapreplace(loads, (load + language_work[example], chosen))
        else:
            heappop(loads)
    # Any number of slots fits a replica, and swaps without moves keep the numbers of examples.
    unlimited = Demands(
        demands.work,
        np.zeros((examples, 0), np.int64),
        np.zeros(0, np.int64),
        demands.media,
    )
    return swap_examples(replica_of, unlimited, replicas)


# ---------------------------------------------------------------------------- levels 1 to 3


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan of one replica: microbatches of its examples, numbered in the order of execution,
    and the sum of squared loads."""

    encoder: Longs
    language: Longs
    squares: int


def _replica_plans(
    shares: list[Demands],
    microbatches: int,
    max_deferred: int | None,
) -> list[ReplicaPlan] | None:
    """Plans of all replicas, or None where some rows are short of slots."""
    media_microbatches = max(_media_microbatches(share, microbatches) for share in shares)
    # Where rows are short of slots, media in all microbatches may still fit.
    for with_media in dict.fromkeys((media_microbatches, microbatches)):
        plans = [_plan_replica(share, microbatches, with_media, max_deferred) for share in shares]
        if all(plan is not None for plan in plans):
            return [plan for plan in plans if plan is not None]
    return None


def _media_microbatches(demands: Demands, microbatches: int) -> int:
    """Number of microbatches of a replica that hold media.

    They are so few that their average encoder work is at least that of the costliest example,
    because a row with little in it costs as much as a full one; but not so few that their examples
    bring more language work than an average microbatch has.
    """
    media_work = demands.encoder_work
    has_media = media_work > 0
    language_work = int(demands.language_work.sum())
    even = int(media_work.sum()) // max(int(media_work.max(initial=0)), 1)
    language_share = ceil_divide(
        microbatches * int(demands.language_work[has_media].sum()),
        max(language_work, 1),
    )
    fewest = demands.subset(np.flatnonzero(has_media)).fewest_microbatches
    return min(microbatches, max(even, language_share, fewest))


def _plan_replica(
    demands: Demands,
    microbatches: int,
    media_microbatches: int,
    max_deferred: int | None,
) -> ReplicaPlan | None:
    """The plan from the better of two fillings of one replica or, if neither fits the slots, from
    the tightest filling. None if that does not fit either."""
    fillings = [
        _fill(demands, microbatches, media_microbatches, stratified) for stratified in (True, False)
    ]
    # A tight filling looks at slots and not at work, so it is only made where slots are short.
    if all(group is None for group in fillings):
        fillings = [_fill_tightly(demands, microbatches, media_microbatches)]
    best: ReplicaPlan | None = None
    for group in fillings:
        if group is None:
            continue
        group = swap_examples(group, demands, microbatches, media_microbatches, moves=True)
        plan = _ordered_plan(group, demands, microbatches, max_deferred)
        if best is None or plan.squares < best.squares:
            best = plan
    return best


def _fill(
    demands: Demands,
    microbatches: int,
    media_microbatches: int,
    stratified: bool,
) -> Longs | None:
    """Microbatch of each example, or None if one finds no room.

    Examples with media come first, by descending encoder work, each to the microbatch with room
    that has the least encoder work; `stratified` puts the half with most language work before the
    other. Those without media follow, by descending language work, to the one with least of that.
    """
    media = demands.media
    encoder_work = demands.encoder_work
    language_work = demands.language_work
    heavy = np.zeros(len(media), np.bool_)
    if stratified and media.any():
        by_language = np.flatnonzero(media)[np.argsort(-language_work[media], kind="stable")]
        heavy[by_language[: ceil_divide(len(by_language), 2)]] = True
    # The last key counts most: media first, of these the heavy half, then by work.
    order = np.lexsort((-language_work, -encoder_work, ~heavy, ~media))
    group = np.empty(len(media), np.int64)
    language_load = [0] * microbatches
    encoder_load = [0] * microbatches
    room = np.tile(demands.capacity, (microbatches, 1))
    limited = len(demands.limited) > 0
    language_amount = language_work.tolist()
    encoder_amount = encoder_work.tolist()
    for example in order.tolist():
        candidates: Sequence[int] = range(media_microbatches if media[example] else microbatches)
        if limited:
            fits = (room[: len(candidates)] >= demands.slots[example]).all(axis=1)
            candidates = np.flatnonzero(fits).tolist()
            if not candidates:
                return None
        chosen = min(
            candidates,
            key=(encoder_load if media[example] else language_load).__getitem__,
        )
        group[example] = chosen
        room[chosen] -= demands.slots[example] if limited else 0
        language_load[chosen] += language_amount[example]
        encoder_load[chosen] += encoder_amount[example]
    return group


def _fill_tightly(demands: Demands, microbatches: int, media_microbatches: int) -> Longs | None:
    """Microbatch of each example, or None if one finds no room: those with media first, by
    descending share of a row, each to the fullest microbatch with room."""
    capacity = demands.capacity
    # Where a phase has no limit, all slots of all phases stand in for its row.
    limits = np.where(capacity < INT64_MAX, capacity, max(1, int(demands.slots.sum())))
    share = (demands.slots << SHARE_BITS) // limits
    room = np.tile(capacity, (microbatches, 1))
    filled = np.zeros(microbatches, np.int64)
    group = np.empty(len(demands.slots), np.int64)
    # The last key counts most: examples with media come first.
    for example in np.lexsort((-share.max(axis=1), ~demands.media)).tolist():
        fits = (room >= demands.slots[example]).all(axis=1)
        if demands.media[example]:
            fits[media_microbatches:] = False
        if not fits.any():
            return None
        # `filled` is at least 0, so -1 rules out microbatches without room.
        chosen = int(np.where(fits, filled, -1).argmax())
        group[example] = chosen
        room[chosen] -= demands.slots[example]
        filled[chosen] += share[example].max()
    return group


def _ordered_plan(
    group: Longs,
    demands: Demands,
    microbatches: int,
    max_deferred: int | None,
) -> ReplicaPlan:
    """Defer language parts, and number the microbatches in the order of execution.

    Pairs whose microbatches hold media come first, on every replica, because microbatches of one
    number run together.
    """
    deferral = defer(
        group,
        demands.language_work,
        demands.slots[:, -1],
        microbatches,
        capacity=int(demands.capacity[-1]),
        max_deferred=max_deferred,
    )
    has_media = np.bincount(group[demands.media], minlength=microbatches) > 0
    pairs = sorted(
        deferral.pairs,
        key=lambda pair: [not has_media[microbatch] for microbatch in pair],
    )
    position = np.empty(microbatches, np.int64)
    position[[microbatch for pair in pairs for microbatch in pair]] = np.arange(microbatches)
    encoder = position[group]
    # The two of a pair are neighbours, so the microbatch after a heavy one is its partner.
    language = encoder + deferral.deferred
    # An example without media waits for no encoder: it is not deferred, but belongs to the later
    # microbatch altogether.
    encoder = np.where(demands.media, encoder, language)
    squares = 0
    for phase in range(demands.work.shape[1]):
        microbatch = language if phase == demands.work.shape[1] - 1 else encoder
        squares += int((sums_by(microbatch, demands.work[:, phase], microbatches) ** 2).sum())
    return ReplicaPlan(encoder, language, squares)
