"""From the lengths of a global batch to the plan of its step: pure, integers only, the same on every host.

place_items   every phase on its own: rows, microbatches, ranks        assign.py
              ranks and rows so that tokens stay near                  placement.py, trade.py
plan_routes   pools and exchange between them                          routes.py
statistics    what the plan wastes
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums, sums_by
from jaxmllm.balance.costs.flops import real_flops
from jaxmllm.balance.exchange.placement import place_items_near
from jaxmllm.balance.exchange.relay import ways
from jaxmllm.balance.exchange.routes import (
    media_of_examples,
    plan_routes,
    route_statistics,
    route_tables,
    run_hops,
    sequence_of_example,
)
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    Mode,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RouteSpec,
    StepPlan,
    shared_exchange,
)
from jaxmllm.balance.rows.assign import assign, assign_in_place, item_costs
from jaxmllm.balance.rows.long import is_long
from jaxmllm.balance.rows.ranks import packed
from jaxmllm.phases import LANGUAGE


def plan_step(items: BatchItems, spec: PlanSpec) -> StepPlan:
    """Place every item of a global batch and route encoder outputs to the language phase.

    Statistics, for every phase: `<phase>/rows`, `<phase>/microbatches`, `<phase>/slots` (of all rows) and
    `<phase>/tokens` (slots that hold data), `<phase>/flops` (of real lengths). Per phase that has rows:
    `<phase>/real_token_fraction` (tokens / slots), `<phase>/max_over_mean` (cost of the costliest rank / mean),
    `<phase>/gap_to_floor` (the same / what no placement goes below: the mean or the costliest item),
    `<phase>/synchronised` (sum over microbatches of the slowest rank's row / sum of means), `<phase>/idle_share` (of
    the ranks' time, by the same sums: 1 - 1 / synchronised). `plan_ms`.

    For every encoder phase that owns an exchange (see `shared_exchange`), `route/<phase>/...`: `ragged`, 1 with that
    backend and 0 with the padded one; `rounds`; `hops` (all-to-alls, and as many back); `tokens` routed; `moved_tokens`
    of them that change rank; `slots_moved` from one rank to another, padding and second legs included; per token that
    changes rank `slots_over_moved`, and per routed token `slots_over_tokens`; with known nodes `node_tokens`, those
    that change node, and `node_tokens_over_arbitrary`, the same against what change node when ranks are dealt at
    random.

    Raises:
      ValueError: an item is longer than the largest row of its phase, or a pool cannot hold one row.
    """
    began = time.perf_counter()
    grids = {phase: route.grid for phase, route in spec.routes.items()}
    phases, routes = plan_routes(place_items(items, spec.phases, grids, spec.mode, spec.nodes), items, spec)
    statistics: dict[str, float] = {}
    for name, phase in spec.phases.items():
        statistics |= phase_statistics(phases[name], items.phases[name], phase)
    for name in dict.fromkeys(shared_exchange(spec.routes).values()):
        node = spec.nodes.get(name), spec.nodes.get(LANGUAGE)
        for key, value in route_statistics(routes[name].rounds, spec.routes[name], *node).items():
            statistics[f"route/{name}/{key}"] = value
    statistics["plan_ms"] = 1e3 * (time.perf_counter() - began)
    return StepPlan(phases, routes, statistics)


def place_items(
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    mode: Mode,
    nodes: Mapping[str, Ints] | None = None,
) -> dict[str, PhasePlan]:
    """Rows, microbatches and ranks of every phase; pools are not set yet.

    Args:
      phases: encoder phases and "language".
      grids: by encoder phase.
      mode: "phases" balances each phase; otherwise media stay with their example, and the examples are placed as
        `example_ranks` says.
      nodes: by phase, node of each rank; none: not known, so ranks are left as balancing dealt them.
    """
    if mode == "phases":
        plans = {name: assign(spec, items.phases[name]) for name, spec in phases.items()}
        return place_items_near(plans, items, phases, grids, nodes) if nodes else plans
    balanced = {LANGUAGE: assign(phases[LANGUAGE], items.phases[LANGUAGE])} if mode == "language" else {}
    home = example_ranks(items, phases[LANGUAGE].ranks, mode, balanced.get(LANGUAGE))
    return {
        name: balanced[name]
        if name in balanced
        else assign_in_place(spec, items.phases[name], item_ranks(items, name, home, grids))
        for name, spec in phases.items()
    }


def example_ranks(items: BatchItems, ranks: int, mode: Mode, language: PhasePlan | None = None) -> Longs:
    """Language rank of each example when its media stay with it: [B].

    Args:
      ranks: of the language phase.
      mode: "none" deals the batch in contiguous blocks, as sampling does: position p belongs to rank p * ranks // B.
        "tokens" deals by the tokens of an example in all phases: those of its language sequence and, once more, those
        that its media become, longest first. "language" follows the plan of the language phase.
      language: that plan.
    """
    examples = len(items.examples)
    sequences = items.phases[LANGUAGE]
    if mode == "tokens":
        return packed(sums_by(sequences.example, sequences.length, examples) + media_of_examples(items), ranks)
    if mode == "none":
        return np.arange(examples) * ranks // max(examples, 1)
    assert language is not None, f"mode {mode!r} follows the plan of the language phase"
    home = np.zeros(examples, np.int64)
    home[sequences.example] = language.rank
    return home


def item_ranks(items: BatchItems, phase: str, example_rank: Longs, grids: Mapping[str, ExchangeGrid]) -> Longs:
    """Rank of each item of a phase when it stays with its example: [N].

    Media go to the encoder ranks on the same devices, in turn when there are several.

    Args:
      example_rank: [B] language rank of each example.
      grids: by encoder phase.
    """
    home = example_rank[items.phases[phase].example]
    if phase not in grids:  # its rows read tokens: it runs where they are read
        return home
    grid = grids[phase]
    block_of = np.empty(grid.language.size, np.int64)
    block_of[grid.language] = np.arange(len(grid.language))[:, None]
    block = block_of[home]
    order = np.argsort(block, kind="stable")
    turn = np.empty_like(block)
    turn[order] = running_sums(block[order], np.ones_like(block))
    return grid.encoder[block, turn % grid.encoder.shape[1]].astype(np.int64)


def phase_statistics(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> dict[str, float]:
    """Rows, fill and balance of one phase; see `plan_step`."""
    rows = plan.microbatches * spec.ranks
    shared = plan.capacity > spec.capacities[0]  # long rows: one a microbatch, computed by all ranks
    slots = int(plan.capacity[~shared].sum(dtype=np.int64)) * spec.ranks + int(plan.capacity[shared].sum())
    tokens = int(items.real.sum())
    statistics: dict[str, float] = {
        f"{spec.name}/rows": rows,
        f"{spec.name}/microbatches": plan.microbatches,
        f"{spec.name}/slots": slots,
        f"{spec.name}/tokens": tokens,
        f"{spec.name}/flops": real_flops(items, spec.flops),
    }
    if not rows:
        return statistics
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    each = item_costs(spec, items.length)
    cost = sums_by(row, each, rows).reshape(-1, spec.ranks)
    cost[shared] = -(-cost[shared].sum(axis=1, keepdims=True) // spec.ranks)
    statistics[f"{spec.name}/real_token_fraction"] = tokens / slots
    if total := int(cost.sum()):
        mean = total / spec.ranks
        statistics[f"{spec.name}/max_over_mean"] = int(cost.sum(axis=0).max()) / mean
        floor = max(mean, int(each[~is_long(spec, items.length)].max(initial=0)))
        statistics[f"{spec.name}/gap_to_floor"] = int(cost.sum(axis=0).max()) / floor
        waits = int(cost.max(axis=1).sum())
        statistics[f"{spec.name}/synchronised"] = waits / mean
        statistics[f"{spec.name}/idle_share"] = 1 - mean / waits
    return statistics


# ---------------------------------------------------------------------------- validation


def validate(plan: StepPlan, items: BatchItems, spec: PlanSpec) -> None:
    """Check that a plan does what it promises: every item in one row, nothing overlaps or overflows, and running the
    rounds brings every token to its arrival slot and its gradient back.

    Raises:
      ValueError: what is wrong, and in which phase.
    """
    for name, phase in spec.phases.items():
        _validate_phase(plan.phases[name], items.phases[name], phase)
    taken: dict[tuple[int, int], list[Longs]] = {}
    ways: dict[str, list[tuple[Longs, Longs]]] = {}
    for name, owner in shared_exchange(spec.routes).items():
        ways.setdefault(owner, []).append(_validate_route(name, spec.routes[owner], plan, items, spec, taken))
    for (pool, rank), slots in taken.items():
        clash = f"two tokens arrive at one slot of pool {pool} on rank {rank}"
        _require(_distinct(np.concatenate(slots)), LANGUAGE, clash)
    for owner, parts in ways.items():
        leaves, arrives = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        _validate_rounds(owner, plan, spec.routes[owner], leaves, arrives)


def _validate_phase(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> None:
    count = len(items.length)
    for field in ("microbatch", "rank", "offset", "segment"):
        _require(getattr(plan, field).shape == (count,), spec.name, f"{field} does not have one entry an item")
    classes = (spec.long_capacity, *spec.capacities) if spec.long_capacity else spec.capacities
    _require(np.isin(plan.capacity, classes).all(), spec.name, "a row is of no class")
    _require((np.diff(plan.capacity) <= 0).all(), spec.name, "microbatches are not ordered by class")
    if not count:
        _require(plan.microbatches == 0, spec.name, "rows without items")
        return
    _require(_within(plan.microbatch, plan.microbatches), spec.name, "a microbatch number is out of range")
    _require(_within(plan.rank, spec.ranks), spec.name, "a rank number is out of range")
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    order = np.lexsort((plan.offset, row))
    end = plan.offset + items.length
    _require((plan.offset >= 0).all(), spec.name, "an item begins before its row")
    _require((end <= plan.capacity[plan.microbatch]).all(), spec.name, "an item reaches beyond its row")
    same = row[order][1:] == row[order][:-1]
    _require((plan.offset[order][1:] >= end[order][:-1])[same].all(), spec.name, "two items overlap")
    counted = running_sums(row[order], np.ones(count, np.int64)) + 1
    _require(np.array_equal(plan.segment[order], counted), spec.name, "segments are not 1, 2, .. along the row")
    _require(int(plan.segment.max()) <= spec.max_segments, spec.name, "a row has too many segments")


def _validate_route(
    name: str,
    route: RouteSpec,
    plan: StepPlan,
    items: BatchItems,
    spec: PlanSpec,
    taken: dict[tuple[int, int], list[Longs]],
) -> tuple[Longs, Longs]:
    """(pool, rank, slot) that each token of a phase leaves and that it shall reach: [n, 3] each."""
    encoder, language, wanted = plan.phases[name], plan.phases[LANGUAGE], items.phases[name]
    per_token = spec.phases[name].slots_per_token
    home = sequence_of_example(items)[wanted.example]

    item = np.repeat(np.arange(len(wanted.tokens)), wanted.tokens)
    step = running_sums(item, np.ones_like(item))
    start = encoder.pool_offset[encoder.microbatch] + encoder.offset // per_token
    leaves = np.stack([encoder.pool[encoder.microbatch][item], encoder.rank[item], start[item] + step], axis=1)
    pool, arrival = language.pool[language.microbatch[home]], plan.routes[name].arrival
    arrives = np.stack([pool[item], language.rank[home][item], arrival[item] + step], axis=1)
    ends = encoder.pool_offset + encoder.capacity // per_token
    _require((ends <= route.encoder_pool).all(), name, "a row reaches beyond its encoder pool")
    _require(_within(arrives[:, 2], route.language_pool), name, "a token arrives beyond its language pool")
    for pool, rank in np.unique(arrives[:, :2], axis=0):
        here = (arrives[:, 0] == pool) & (arrives[:, 1] == rank)
        taken.setdefault((int(pool), int(rank)), []).append(arrives[here, 2])

    return leaves, arrives


def _validate_rounds(owner: str, plan: StepPlan, route: RouteSpec, leaves: Longs, arrives: Longs) -> None:
    """Run the tables of all ranks on numbered tokens: `leaves` and `arrives` are [n, 3] of (pool, rank, slot)."""
    grid = route.grid
    encoder_rank = np.broadcast_to(grid.encoder[:, :, None], grid.shape).reshape(-1)
    language_rank = np.broadcast_to(grid.language[:, None, :], grid.shape).reshape(-1)
    made: dict[int, Longs] = {}
    wanted: dict[int, Longs] = {}
    for pools, ranks, slots, where in (
        (made, grid.encoder.size, route.encoder_pool, leaves),
        (wanted, grid.language.size, route.language_pool, arrives),
    ):
        for pool in np.unique(where[:, 0]).tolist():
            pools[pool] = np.zeros((ranks, slots), np.int64)
        for number, (pool, rank, slot) in enumerate(where.tolist()):
            pools[pool][rank, slot] = number + 1
    arrived = {pool: np.zeros_like(tokens) for pool, tokens in wanted.items()}
    returned = {pool: np.zeros_like(tokens) for pool, tokens in made.items()}
    for round_ in plan.routes[owner].rounds:
        for first, end in ((round_.start, route.encoder_pool), (round_.arrival, route.language_pool)):
            _require((first + round_.tokens <= end).all(), owner, "a run of tokens reaches beyond its pool")
        _require(round_.hops <= route.hops, owner, "a round has too many hops")
        if route.backend == "padded":
            planes = len(encoder_rank) // len(grid.encoder)
            way = ways(round_, len(grid.encoder), planes, route.pair_slots, np.zeros(len(encoder_rank), np.int64))
            leaves, relayed = way.sender != way.receiver, way.relay != way.receiver
            ends = (
                (way.lane[leaves], round_.hops),
                (way.lane[leaves & relayed], round_.first_leg),
                (way.onward[relayed], round_.hops),
            )
            within = all((lane < end * route.pair_slots).all() for lane, end in ends)
            _require(within, owner, "a token is dealt so late that the round has no hop for it")
        tables = route_tables(round_, route, range(len(encoder_rank)))
        sent = made[round_.source][encoder_rank]
        wished = wanted[round_.target][language_rank]
        arriving = run_hops(sent, tables.send_forward, tables.gather_forward, route, 0)
        returning = run_hops(wished, tables.send_backward, tables.gather_backward, route, 1)
        np.add.at(arrived[round_.target], language_rank, arriving)
        np.add.at(returned[round_.source], encoder_rank, returning)
    same = all(np.array_equal(arrived[pool], wanted[pool]) for pool in wanted)
    _require(same, owner, "the rounds do not bring every token to its arrival")
    same = all(np.array_equal(returned[pool], made[pool]) for pool in made)
    _require(same, owner, "the rounds do not bring every gradient back")


def _distinct(numbers: Longs) -> bool:
    return len(np.unique(numbers)) == len(numbers)


def _within(numbers: Ints | Longs, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _require(holds: bool | np.bool_, phase: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"the plan of phase {phase!r} is wrong: {problem}")
