"""Checking a plan by running it: every item has slots, and every token arrives where it belongs.

Tests validate plans, runs trust them. Each check follows what the records promise (records.py),
not how the planner works.
"""

from __future__ import annotations

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums
from jaxmllm.balance.exchange.tables import backend_of, route_tables, run_hops
from jaxmllm.balance.exchange.traffic import sequence_of_example
from jaxmllm.balance.records import (
    BatchItems,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RouteRound,
    RouteSpec,
    RowClass,
    StepPlan,
    shared_exchange,
)
from jaxmllm.phases import LANGUAGE


def validate(plan: StepPlan, items: BatchItems, spec: PlanSpec) -> None:
    """Check that a plan does what it promises: every item in one row, nothing overlaps or
    overflows, and running the rounds brings every token to its arrival slot and its gradient back.

    Raises:
      ValueError: what is wrong, and in which phase.
    """
    for phase, phase_spec in spec.phases.items():
        _validate_phase(plan.phases[phase], items.phases[phase], phase_spec)
    # Arrival slots of tokens, by language pool and rank. Exchanges share the language pools, so no
    # two phases may fill the same slot.
    arrivals: dict[tuple[int, int], list[Longs]] = {}
    by_owner: dict[str, list[tuple[Longs, Longs]]] = {}
    for phase, owner in shared_exchange(spec.routes).items():
        departure, arrival = _token_slots(phase, plan, items, spec)
        _validate_pools(phase, plan.phases[phase], spec, departure, arrival)
        by_owner.setdefault(owner, []).append((departure, arrival))
        for pool, rank in np.unique(arrival[:, :2], axis=0).tolist():
            slots = arrival[(arrival[:, 0] == pool) & (arrival[:, 1] == rank), 2]
            arrivals.setdefault((pool, rank), []).append(slots)
    for (pool, rank), slots_of_phases in arrivals.items():
        slots = np.concatenate(slots_of_phases)
        problem = f"two tokens arrive at one slot of pool {pool} on rank {rank}"
        _require(len(np.unique(slots)) == len(slots), LANGUAGE, problem)
    for owner, slot_pairs in by_owner.items():
        departure, arrival = (np.concatenate(columns) for columns in zip(*slot_pairs, strict=True))
        _validate_rounds(owner, plan, spec.routes[owner], departure, arrival)


def _validate_phase(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> None:
    phase = spec.name
    size = len(items.length)
    for column in ("microbatch", "rank", "offset", "segment"):
        problem = f"{column} does not have one entry per item"
        _require(getattr(plan, column).shape == (size,), phase, problem)
    shapes = list(map(RowClass, plan.capacity.tolist(), plan.span.tolist()))
    _require(set(shapes) <= set(spec.classes), phase, "a row is of no class")
    order = [spec.classes.index(shape) for shape in shapes]
    _require(order == sorted(order), phase, "microbatches are not ordered by class")
    # Without items there must be no rows, and the maxima below would fail.
    if not size:
        _require(plan.microbatches == 0, phase, "rows without items")
        return
    # Checked before they are used as indices: a negative number would count from the end.
    in_range = _all_in_range(plan.microbatch, plan.microbatches)
    _require(in_range, phase, "a microbatch number is out of range")
    _require(_all_in_range(plan.rank, spec.ranks), phase, "a rank number is out of range")
    span = plan.span[plan.microbatch]
    row_slots = plan.capacity[plan.microbatch].astype(np.int64) * span
    end = plan.offset + items.length
    aligned = plan.rank % span == 0
    _require(aligned.all(), phase, "a rank number is not that of the first rank of a group")
    _require((plan.offset >= 0).all(), phase, "an item begins before its row")
    _require((end <= row_slots).all(), phase, "an item reaches beyond its row")
    # In order of row and offset: if any two items of a row overlap, two neighbours do.
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    along_rows = np.lexsort((plan.offset, row))
    row = row[along_rows]
    apart = plan.offset[along_rows][1:] >= end[along_rows][:-1]
    _require(apart[row[1:] == row[:-1]].all(), phase, "two items overlap")
    # Number of earlier items in the row, plus 1 for the item itself.
    ordinal = running_sums(row, np.ones(size, np.int64)) + 1
    in_order = np.array_equal(plan.segment[along_rows], ordinal)
    _require(in_order, phase, "segments are not 1, 2, .. along the row")
    _require(int(plan.segment.max()) <= spec.max_segments, phase, "a row has too many segments")


def _token_slots(
    phase: str, plan: StepPlan, items: BatchItems, spec: PlanSpec
) -> tuple[Longs, Longs]:
    """Departure and arrival of each token of an encoder phase: (pool, rank, slot), [n, 3] each."""
    encoder = plan.phases[phase]
    media = items.phases[phase]
    slots_per_token = spec.phases[phase].slots_per_token
    item = np.repeat(np.arange(len(media.tokens)), media.tokens)
    step = running_sums(item, np.ones_like(item))  # tokens of the same item before this one
    microbatch = encoder.microbatch[item]
    position = encoder.offset[item] // slots_per_token + step
    member, inside = np.divmod(position, encoder.capacity[microbatch] // slots_per_token)
    slot = encoder.pool_offset[microbatch] + inside
    departure = np.stack([encoder.pool[microbatch], encoder.rank[item] + member, slot], axis=1)

    route = plan.routes[phase]
    piece = np.repeat(np.arange(len(route.tokens)), route.tokens)
    in_piece = running_sums(piece, np.ones_like(piece))
    tokens_of_pieces = route.item[piece], route.skipped[piece] + in_piece
    complete = np.array_equal(tokens_of_pieces, (item, step))
    _require(complete, phase, "the pieces of an item are not its tokens in order")
    language = plan.phases[LANGUAGE]
    sequence = sequence_of_example(items)[media.example][item]
    microbatch = language.microbatch[sequence]
    position = language.offset[sequence] + media.slot[item] + step
    rank = language.rank[sequence] + position // language.capacity[microbatch]
    of_one_rank = (np.diff(rank)[np.diff(piece) == 0] == 0).all()
    _require(of_one_rank, phase, "a piece is read by several ranks")
    slot = route.arrival[piece] + in_piece
    return departure, np.stack([language.pool[microbatch], rank, slot], axis=1)


def _validate_pools(
    phase: str, plan: PhasePlan, spec: PlanSpec, departure: Longs, arrival: Longs
) -> None:
    route = spec.routes[shared_exchange(spec.routes)[phase]]
    # End of each microbatch's row in the encoder pool of a rank, in tokens.
    row_end = plan.pool_offset + plan.capacity // spec.phases[phase].slots_per_token
    _require((row_end <= route.encoder_pool).all(), phase, "a row reaches beyond its encoder pool")
    _require(
        _all_in_range(arrival[:, 2], route.language_pool),
        phase,
        "a token arrives beyond its language pool",
    )


def _validate_rounds(
    owner: str, plan: StepPlan, route: RouteSpec, departure: Longs, arrival: Longs
) -> None:
    """Run the tables of all ranks on numbered tokens, forward and backward.

    Args:
      departure, arrival: [n, 3] (pool, rank, slot) of each token.
    """
    grid = route.grid
    # Encoder and language rank of each exchange rank: [X].
    encoder_rank = np.broadcast_to(grid.encoder[:, :, None], grid.shape).reshape(-1)
    language_rank = np.broadcast_to(grid.language[:, None, :], grid.shape).reshape(-1)
    encoder_pools = _numbered_pools(departure, grid.encoder.size, route.encoder_pool)
    language_pools = _numbered_pools(arrival, grid.language.size, route.language_pool)
    arrived = {pool: np.zeros_like(tokens) for pool, tokens in language_pools.items()}
    returned = {pool: np.zeros_like(tokens) for pool, tokens in encoder_pools.items()}
    for round_ in plan.routes[owner].rounds:
        _validate_round(owner, round_, route)
        tables = route_tables(round_, route, range(len(encoder_rank)))
        tokens = encoder_pools[round_.source][encoder_rank]
        received = run_hops(
            tokens, tables.send_forward, tables.gather_forward, route=route, direction=0
        )
        np.add.at(arrived[round_.target], language_rank, received)
        gradients = language_pools[round_.target][language_rank]
        received = run_hops(
            gradients, tables.send_backward, tables.gather_backward, route=route, direction=1
        )
        np.add.at(returned[round_.source], encoder_rank, received)
    complete = all(np.array_equal(arrived[pool], tokens) for pool, tokens in language_pools.items())
    _require(complete, owner, "the rounds do not bring every token to its arrival")
    complete = all(np.array_equal(returned[pool], tokens) for pool, tokens in encoder_pools.items())
    _require(complete, owner, "the rounds do not bring every gradient back")


def _numbered_pools(slots: Longs, ranks: int, pool_slots: int) -> dict[int, Longs]:
    """Content of each pool, [R, W]: number n + 1 at slots[n], 0 in empty slots.

    Args:
      slots: [n, 3] (pool, rank, slot) of each token.
    """
    numbers = np.unique(slots[:, 0]).tolist()
    pools = {pool: np.zeros((ranks, pool_slots), np.int64) for pool in numbers}
    for token, (pool, rank, slot) in enumerate(slots.tolist(), start=1):
        pools[pool][rank, slot] = token
    return pools


def _validate_round(owner: str, round_: RouteRound, route: RouteSpec) -> None:
    past_pool = "a stretch of tokens reaches beyond its pool"
    _require((round_.start + round_.tokens <= route.encoder_pool).all(), owner, past_pool)
    _require((round_.arrival + round_.tokens <= route.language_pool).all(), owner, past_pool)
    _require(round_.hops <= route.hops, owner, "a round has too many hops")
    problem = backend_of(route).problem(round_, route)
    _require(problem is None, owner, str(problem))


def _all_in_range(numbers: Ints | Longs, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _require(holds: bool | np.bool_, phase: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"the plan of phase {phase!r} is wrong: {problem}")
