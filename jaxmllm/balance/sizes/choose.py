"""Choosing the fixed sizes of a run, once, from sampled batches: row classes, segments, pools, pair slots.

    sampled batches, and more drawn again from their examples
                    --candidates, by a bound--> a few best --really packed--> capacities, max_segments
                    --places of the items--> pools and pair slots: nearly every step needs one pool and one round

Row classes minimise, summed over the batches, the slots of a rank times the wait for the slowest, plus
`MICROBATCH_TOLL` of its load for every microbatch, since each is a dispatch of its own and gathers sharded parameters
anew (a calibration says what that takes). Fewer classes win ties, for each is a program to compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from jaxmllm.arrays import Floats, Ints, Longs, round_up, running_sums, sums_by
from jaxmllm.balance.compiled import compiled
from jaxmllm.balance.costs.flops import PhaseTime
from jaxmllm.balance.exchange.routes import lanes_needed, media_tokens
from jaxmllm.balance.records import (
    Backend,
    BatchItems,
    ExchangeGrid,
    PhaseFlops,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RouteSpec,
    shared_exchange,
)
from jaxmllm.balance.rows.assign import EVEN, assign, assign_in_place, item_costs, row_steps, wanted_slots
from jaxmllm.balance.rows.long import select
from jaxmllm.balance.step_plan import example_ranks, item_ranks, phase_statistics, place_items
from jaxmllm.config.schema import BalanceConfig, ConfigError, PhaseConfig
from jaxmllm.phases import LANGUAGE, Phase

MICROBATCH_TOLL = 0.002
SHARES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.03)  # of a load in rows of the first class
FRACTIONS = 4  # it is cut into 1 to so many rows more than it needs at least
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the median load in a row of another class
STEPS = (16, 24, 32, 48, 64, 96, 128)  # of the median load between classes of about one size
PACKED = (24, 4)  # sets that are really packed: in a quarter of the batches, then in all
PACKED_BATCHES, PACKED_ITEMS = 32, 1_200_000  # in so many batches, and no more than make so many items in all
JUDGED = 128  # batches that judge all sets by a bound: rows that just hold a few batches overflow in the next
JUDGED_EXAMPLES = 1 << 19  # at most, in all of them
EXPECTED_FILL = 0.99  # how full rows get; the bound alone would favour rows that exactly hold the mean
HEAD_ROOM = 8  # one part in so many is added to what the samples needed
USUAL_HOPS, MOST_HOPS = 16, 40  # of a round: more of fewer slots waste less, fewer cost less time

COLUMNS = [column.name for column in fields(PhaseItems)]

Capacities = tuple[int, ...]


@dataclass(frozen=True)
class SizingInputs:
    """What decides the rows of one phase beside the samples."""

    phase: Phase
    ranks: int
    alignment: int  # capacities are multiples of it: whole attention blocks, whole language tokens
    slots_per_token: int  # 1 for language
    longest: int  # slots of the largest item of the whole data; 0 without any
    flops: PhaseFlops
    config: PhaseConfig
    time: PhaseTime | None = None  # balances items instead of their FLOPs

    @property
    def name(self) -> str:
        return self.phase.name


def choose_sizes(
    samples: Sequence[BatchItems],
    phases: Sequence[SizingInputs],
    grids: Mapping[str, ExchangeGrid],
    balance: BalanceConfig,
    nodes: Mapping[str, Ints] | None = None,
    backend: Backend = "padded",
) -> PlanSpec:
    """Fill in every size that the config leaves to `auto`, and check the others.

    Args:
      samples: global batches drawn as training will draw them; 16 do, 64 leave less to chance.
      phases: in the order of `make_phases`.
      grids: by encoder phase.
      balance: mode, pool_slots, pair_slots.
      nodes: by phase, node of each rank; none: not known.
      backend: of the exchange.

    Raises:
      ConfigError: a size of the config is not a multiple of the alignment, or too small for the largest item.
    """
    specs: dict[str, PhaseSpec] = {}
    batches = [*samples, *_redrawn(samples)]
    homes: list[Longs | None] = [None] * len(batches)  # rank of each example, where media stay with it
    others = {needs.name: needs for needs in phases}
    language = others.pop(LANGUAGE)  # first of all: the others may follow where it places examples
    if balance.mode in ("none", "tokens"):
        homes = [example_ranks(batch, language.ranks, balance.mode) for batch in batches]
    for needs in (language, *others.values()):
        specs[needs.name] = _choose_rows(_ordinary(needs), _loads(batches, needs, grids, homes))
        specs[needs.name] = replace(specs[needs.name], long_capacity=_long_capacity(needs))
        if needs is language and balance.mode == "language":
            plans = [assign(specs[LANGUAGE], batch.phases[LANGUAGE]) for batch in batches]
            homes = [
                example_ranks(batch, needs.ranks, "language", plan) for batch, plan in zip(batches, plans, strict=True)
            ]
    specs = {needs.name: specs[needs.name] for needs in phases}
    longest = {needs.name: needs.longest for needs in phases}
    routes = _choose_routes(samples, specs, longest, grids, balance, nodes)
    routes = {phase: replace(route, backend=backend) for phase, route in routes.items()}
    return PlanSpec(specs, routes, balance.mode, dict(nodes or {}))


# ---------------------------------------------------------------------------- rows


def _redrawn(samples: Sequence[BatchItems]) -> list[BatchItems]:
    """Batches of examples drawn again from all samples, to make `JUDGED` of them: a few batches tell the lengths of
    items well, but not how far the load of a batch strays from the mean."""
    size = max((len(batch.examples) for batch in samples), default=0)
    more = min(JUDGED, JUDGED_EXAMPLES // max(size, 1)) - len(samples)
    if more <= 0 or not size:
        return []
    random = np.random.default_rng(0)
    first = np.cumsum([0, *(len(batch.examples) for batch in samples)])
    pooled = {}
    for phase in samples[0].phases:
        parts = [batch.phases[phase] for batch in samples]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
        columns["example"] = np.concatenate([part.example + start for part, start in zip(parts, first, strict=False)])
        pooled[phase] = PhaseItems(**columns)
    drawn = random.integers(first[-1], size=(more, size))
    return [
        BatchItems(chosen, 0, {phase: _items_of(items, chosen, int(first[-1])) for phase, items in pooled.items()})
        for chosen in drawn
    ]


def _items_of(items: PhaseItems, chosen: Longs, examples: int) -> PhaseItems:
    """The items of chosen examples, which are numbered anew."""
    count = np.bincount(items.example, minlength=examples)
    example = np.repeat(np.arange(len(chosen)), count[chosen])
    item = (np.cumsum(count) - count)[chosen][example] + running_sums(example, np.ones_like(example))
    columns = {name: getattr(items, name)[item] for name in COLUMNS}
    return PhaseItems(**columns | {"example": example.astype(np.int32)})


@dataclass(frozen=True)
class _Load:
    """The items of one phase in one batch, and the rank of each if they may not move."""

    items: PhaseItems
    home: Longs | None
    ranks: int
    slots: int  # of the fullest rank, when rows could be cut anywhere
    wanted: int  # slots that its rows should have
    toll: float  # of a microbatch, in slots

    def above(self, bound: int) -> tuple[int, int]:
        """Slots and number of the items longer than `bound`, on the rank that has most or, where they move freely, on
        the mean rank."""
        long = self.items.length > bound
        length = self.items.length[long]
        if self.home is None:
            return -(-int(length.sum()) // self.ranks), -(-len(length) // self.ranks)
        return int(sums_by(self.home[long], length, self.ranks).max()), int(
            np.bincount(self.home[long], minlength=1).max()
        )

    def plan(self, spec: PhaseSpec) -> PhasePlan:
        return assign(spec, self.items) if self.home is None else assign_in_place(spec, self.items, self.home)


def _loads(
    samples: Sequence[BatchItems],
    needs: SizingInputs,
    grids: Mapping[str, ExchangeGrid],
    homes: Sequence[Longs | None],
) -> list[_Load]:
    """Loads of the samples that have items of the phase; `homes` has the rank of each example if its items stay."""
    loads = []
    home: Longs | None
    for batch, example_rank in zip(samples, homes, strict=True):
        ordinary = batch.phases[needs.name].length <= _ordinary(needs).longest
        items = select(batch.phases[needs.name], ordinary)
        if not len(items.length):
            continue
        if example_rank is None:
            home, slots = None, -(-int(items.length.sum()) // needs.ranks)
            cost = item_costs(phase_spec(needs, (needs.alignment,)), items.length)
            wanted = -(-wanted_slots(items.length, cost, needs.ranks) // needs.ranks)
        else:
            home = item_ranks(batch, needs.name, example_rank, grids)[ordinary]
            slots = wanted = int(sums_by(home, items.length, needs.ranks).max())
        wanted = max(wanted, math.ceil(slots / EXPECTED_FILL))
        loads.append(_Load(items, home, needs.ranks, slots, wanted, _toll(needs, items, slots)))
    return loads


def _ordinary(needs: SizingInputs) -> SizingInputs:
    """The needs of the items that get no long row."""
    config = needs.config
    if config.long_capacity is None:
        return needs
    largest = config.max_capacity // needs.alignment * needs.alignment
    ordinary = largest if config.capacities == "auto" else max(config.capacities)
    return replace(needs, longest=min(needs.longest, ordinary))


def _long_capacity(needs: SizingInputs) -> int:
    """Slots of a long row; 0 without any. Raises `ConfigError` when the ranks cannot share it evenly, or when it does
    not hold the longest item."""
    if (capacity := needs.config.long_capacity) is None:
        return 0
    unit, key = needs.alignment * needs.ranks, f"phases.{needs.name}.long_capacity"
    if capacity % unit:
        raise ConfigError(
            f"{key}: {capacity} is not a multiple of {unit} (whole attention blocks on each of {needs.ranks} ranks): "
            f"use {round_up(capacity, unit)}"
        )
    if capacity < needs.longest:
        raise ConfigError(
            f"{key}: {capacity} is too small for the longest item of {needs.longest} slots: raise it to "
            f"{round_up(needs.longest, unit)} or limit the size of items"
        )
    return capacity


def _toll(needs: SizingInputs, items: PhaseItems, slots: int) -> float:
    """What a microbatch takes beside its slots, in slots as dear as those of the items on average."""
    if needs.time is None or not needs.time.row:
        return MICROBATCH_TOLL * slots
    length = items.length.astype(float)
    cost = needs.time.linear * length.sum() + needs.time.quadratic * (length * length).sum()
    return float(needs.time.row * length.sum() / cost)


def _choose_rows(needs: SizingInputs, loads: Sequence[_Load]) -> PhaseSpec:
    config = needs.config
    explicit = config.capacities
    capacities = _choose_capacities(needs, loads) if explicit == "auto" else checked_capacities(explicit, needs)
    if config.max_segments != "auto":
        return phase_spec(needs, capacities, config.max_segments)
    free = phase_spec(needs, capacities)
    most = max((int(load.plan(free).segment.max()) for load in loads), default=0)
    return replace(free, max_segments=with_head_room(most, 4))


def _choose_capacities(needs: SizingInputs, loads: Sequence[_Load]) -> Capacities:
    largest = needs.config.max_capacity // needs.alignment * needs.alignment
    least = round_up(max(needs.longest, 1), needs.alignment)
    if largest < least:
        raise ConfigError(
            f"phases.{needs.name}.max_capacity = {needs.config.max_capacity} is too small: the largest item has "
            f"{needs.longest} slots and rows come in multiples of {needs.alignment}; raise it to {least} or limit the "
            f"size of items"
        )
    if not loads:
        return (least,)

    def packed(capacities: Capacities, loads: Sequence[_Load]) -> float:
        spec, cost = phase_spec(needs, capacities), 0.0
        for load in loads:
            plan = load.plan(spec)
            statistics = phase_statistics(plan, load.items, spec)
            waits = max(statistics[f"{needs.name}/synchronised"], 1 + 1 / EVEN)
            cost += int(plan.capacity.sum(dtype=np.int64)) * waits + load.toll * plan.microbatches
        return cost

    above = cache(lambda length: np.array([load.above(length) for load in loads]).T)
    wanted, tolls = (np.array([getattr(load, name) for load in loads]) for name in ("wanted", "toll"))
    bounds = cache(lambda capacities: _least_costs(capacities, wanted, tolls, above))

    def expected(capacities: Capacities, few: slice) -> float:
        """The bound of all loads, times what packing a few of them takes over their own bound."""
        bound = bounds(capacities)
        return bound.sum() * packed(capacities, loads[few]) / bound[few].sum()

    most = PACKED_ITEMS // (PACKED[0] * max(len(load.items.length) for load in loads))
    few = max(1, min(PACKED_BATCHES, most))
    candidates = _candidates(needs, loads, least, largest)
    hopeful = _best(candidates, lambda capacities: bounds(capacities).sum(), PACKED[0])
    better = _best(hopeful, lambda capacities: expected(capacities, slice(0, few, 4)), PACKED[1])
    return _best(better, lambda capacities: expected(capacities, slice(few)), 1)[0]


def _candidates(needs: SizingInputs, loads: Sequence[_Load], least: int, largest: int) -> set[Capacities]:
    """Sets of up to `row_classes` capacities: the first so that some rows hold much or all of a load. The others are
    parts of the median load, to hold what the first leaves over, or a little smaller than the one before, so that
    the same number of rows comes to finely stepped sums."""
    slots = np.array([load.slots for load in loads])
    median = float(np.median(slots))
    first, parts, steps = (
        {round_up(math.ceil(median / part), needs.alignment) for part in among} for among in ((), PARTS, STEPS)
    )
    for load in (float(slots.min()), median, float(slots.max())):
        fewest = math.ceil(load / largest)
        for rows in range(fewest, fewest + FRACTIONS):
            first |= {round_up(math.ceil(load * share / rows), needs.alignment) for share in SHARES}
    first.add(least)
    chosen: set[Capacities] = {(size,) for size in first if least <= size <= largest}
    for number in range(1, needs.config.row_classes):
        for sizes in [sizes for sizes in chosen if len(sizes) == number]:
            even = {sizes[0] - sizes[1]} if number > 1 and sizes[0] < 2 * sizes[1] else steps
            smaller = parts | {sizes[-1] - step for step in even}
            chosen |= {(*sizes, size) for size in smaller if 0 < size < sizes[-1]}
    return chosen


def _best(candidates: Iterable[Capacities], cost: Callable[[Capacities], float], count: int) -> list[Capacities]:
    """The candidates of least cost."""
    return sorted(candidates, key=lambda capacities: (cost(capacities), len(capacities), capacities))[:count]


def _least_costs(capacities: Capacities, wanted: Longs, tolls: Floats, above: Callable[[int], Longs]) -> Floats:
    """Slots and tolls of the fewest rows that may hold each of n loads, filled as far as rows get: [n].

    Args:
      wanted, tolls: of the loads.
      above: `_Load.above` of all loads: [2, n].
    """
    sizes = np.array(capacities, np.int64)
    below = (*capacities[1:], 0)
    half = capacities[0] // 2  # of the items above it, no two share a row
    slots = np.stack([*(above(bound)[0] for bound in below[:-1]), wanted], axis=1)
    rows = np.stack([above(max(bound, half))[1] for bound in below], axis=1)
    rows = np.maximum(rows, slots > 0)
    firsts = np.arange(wanted.min() // sizes[0], max(wanted.max() // sizes[0] + 1, rows.max()) + 1)
    counts = (row_steps(capacities) + firsts[:, None, None] * (np.arange(len(sizes)) == 0)).reshape(-1, len(sizes))
    counts = counts[counts[:, 0] >= 0]
    chosen = counts[_first_enough(counts, sizes, slots, rows, np.searchsorted(counts @ sizes, wanted))]
    return chosen @ sizes + chosen.sum(axis=1) * tolls


@compiled
def _first_enough(counts: Longs, sizes: Longs, slots: Longs, rows: Longs, first: Longs) -> Longs:
    """Place of the first counts [any, K], from `first` [n] on, that meet the needs `slots` and `rows` [n, K]: [n]."""
    chosen = np.zeros(len(first), np.int64)
    for load in range(len(first)):
        for place in range(first[load], len(counts)):
            held, number, enough = 0, 0, True
            for size in range(len(sizes)):
                held += counts[place, size] * sizes[size]
                number += counts[place, size]
                enough &= held >= slots[load, size] and number >= rows[load, size]
            if enough:
                chosen[load] = place
                break
    return chosen


def checked_capacities(capacities: Capacities, needs: SizingInputs) -> Capacities:
    key = f"phases.{needs.name}.capacities"
    for capacity in capacities:
        if capacity % needs.alignment:
            near = round_up(capacity, needs.alignment)
            raise ConfigError(
                f"{key}: {capacity} is not a multiple of {needs.alignment} (whole attention blocks and whole language "
                f"tokens); use {near}, or change phases.{needs.name}.block"
            )
    if len(set(capacities)) < len(capacities) or not capacities:
        raise ConfigError(f"{key} must be one or more different numbers, not {list(capacities)}")
    if max(capacities) < needs.longest:
        raise ConfigError(
            f"{key}: the largest, {max(capacities)}, is too small for the largest item ({needs.longest} slots); raise "
            f"it to {round_up(needs.longest, needs.alignment)} or limit the size of items"
        )
    return tuple(sorted(capacities, reverse=True))


def phase_spec(needs: SizingInputs, capacities: Capacities, max_segments: int | None = None) -> PhaseSpec:
    """The phase with the given rows; without `max_segments` any number of items may share one."""
    cost = needs.time or needs.flops
    return PhaseSpec(
        phase=needs.phase,
        ranks=needs.ranks,
        capacities=capacities,
        max_segments=capacities[0] if max_segments is None else max_segments,
        slots_per_token=needs.slots_per_token,
        linear=cost.linear,
        quadratic=cost.quadratic,
        model_flops=None if needs.time is None else needs.flops,
    )


# ---------------------------------------------------------------------------- routes


def _choose_routes(
    samples: Sequence[BatchItems],
    specs: Mapping[str, PhaseSpec],
    longest: Mapping[str, int],
    grids: Mapping[str, ExchangeGrid],
    balance: BalanceConfig,
    nodes: Mapping[str, Ints] | None,
) -> dict[str, RouteSpec]:
    if not grids:
        return {}
    plans = [place_items(batch, specs, grids, balance.mode, nodes) for batch in samples]
    language = specs[LANGUAGE]
    arriving = [
        media_tokens(batch, plan[LANGUAGE], tuple(grids), language.ranks).sum(axis=0).max(initial=0)
        for batch, plan in zip(samples, plans, strict=True)
    ]
    language_pool = _pool(LANGUAGE, arriving, max(language.capacities[0], language.long_capacity), balance)
    whole = {phase: RouteSpec(grid, 0, language_pool, 0, MOST_HOPS) for phase, grid in grids.items()}
    owner_of = shared_exchange(whole)
    routes = {}
    for phase, grid in grids.items():
        sharing = [other for other in grids if owner_of[other] == owner_of[phase]]
        row = {other: specs[other].capacities[0] // specs[other].slots_per_token for other in sharing}
        leaving = [sum(_pool_tokens(plan[other], specs[other]) for other in sharing) for plan in plans]
        largest = max(sharing, key=lambda other: row[other])
        pool = _pool(largest, leaving, row[largest], balance)
        pair = balance.pair_slots
        if pair == "auto":
            lanes = [
                lanes_needed({other: plan[other] for other in sharing}, plan[LANGUAGE], batch, grid)
                for batch, plan in zip(samples, plans, strict=True)
            ]
            pair = _pair_slots(lanes, max(longest[other] // specs[other].slots_per_token for other in sharing), grid)
        routes[phase] = replace(whole[phase], encoder_pool=pool, pair_slots=pair)
    return routes


def _pool_tokens(plan: PhasePlan, spec: PhaseSpec) -> int:
    return int(plan.capacity.sum(dtype=np.int64)) // spec.slots_per_token


def _pair_slots(lanes: Sequence[int], longest: int, grid: ExchangeGrid) -> int:
    """Slots with which `USUAL_HOPS` move what the samples moved, by the lanes each needed. Where nothing moved, they
    move the longest item."""
    usual = float(np.mean(lanes)) if any(lanes) else 2 * longest / grid.shape[0]
    return max(1, math.ceil(usual / USUAL_HOPS))


def _pool(phase: str, used: Sequence[int], least: int, balance: BalanceConfig) -> int:
    """Tokens of a rank's pool: what the samples used with some head room, and at least one row."""
    if balance.pool_slots == "auto":
        return max(with_head_room(int(max(used, default=0)), 8), least)
    if balance.pool_slots < least:
        raise ConfigError(
            f"balance.pool_slots = {balance.pool_slots} is too small: a row of phase {phase!r} can hold {least} media "
            f"tokens; raise it to {least} or lower phases.{phase}.capacities"
        )
    return balance.pool_slots


def with_head_room(amount: int, multiple: int) -> int:
    return round_up(max(amount, 1) + -(-amount // HEAD_ROOM), multiple)
