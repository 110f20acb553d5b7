"""From the lengths of a global batch to the plan of its step: pure, integers only, the same on every host.

place_items   every phase on its own: rows, microbatches, ranks        assign.py
plan_routes   pools and exchange between them                          routes.py
statistics    what the plan wastes
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from jaxmllm.balance.assign import assign, assign_in_place, item_costs
from jaxmllm.balance.cost import real_flops
from jaxmllm.balance.pack import running_sums, sums_by
from jaxmllm.balance.partition import packed
from jaxmllm.balance.plan import (
    BatchItems,
    ExchangeGrid,
    Ints,
    Longs,
    Mode,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    StepPlan,
)
from jaxmllm.balance.routes import plan_routes, sequence_of_example


def plan_step(items: BatchItems, spec: PlanSpec) -> StepPlan:
    """Place every item of a global batch and route encoder outputs to the language phase.

    Statistics, for every phase: `<phase>/rows`, `<phase>/microbatches`, `<phase>/slots` (of all rows) and
    `<phase>/tokens` (slots that hold data), `<phase>/flops` (of real lengths). Per phase that has rows:
    `<phase>/real_token_fraction` (tokens / slots), `<phase>/max_over_mean` (cost of the costliest rank / mean),
    `<phase>/gap_to_floor` (the same / what no placement goes below: the mean or the costliest item),
    `<phase>/synchronised` (sum over microbatches of the slowest rank's row / sum of means), `<phase>/idle_share` (of
    the ranks' time, by the same sums: 1 - 1 / synchronised). For every encoder phase
    `route/<phase>/rounds`; and `plan_ms`.

    Raises:
      ValueError: an item is longer than the largest row of its phase, or a pool cannot hold one row.
    """
    began = time.perf_counter()
    grids = {phase: route.grid for phase, route in spec.routes.items()}
    phases, routes = plan_routes(place_items(items, spec.phases, grids, spec.mode), items, spec)
    statistics: dict[str, float] = {}
    for name, phase in spec.phases.items():
        statistics |= phase_statistics(phases[name], items.phases[name], phase)
    for name, route in routes.items():
        statistics[f"route/{name}/rounds"] = len(route.rounds)
    statistics["plan_ms"] = 1e3 * (time.perf_counter() - began)
    return StepPlan(phases, routes, statistics)


def place_items(
    items: BatchItems, phases: Mapping[str, PhaseSpec], grids: Mapping[str, ExchangeGrid], mode: Mode
) -> dict[str, PhasePlan]:
    """Rows, microbatches and ranks of every phase; pools are not set yet.

    Args:
      phases: encoder phases and "language".
      grids: by encoder phase.
      mode: "phases" balances each phase; otherwise media stay with their example, and the examples are placed as
        `example_ranks` says.
    """
    if mode == "phases":
        return {name: assign(spec, items.phases[name]) for name, spec in phases.items()}
    balanced = {"language": assign(phases["language"], items.phases["language"])} if mode == "language" else {}
    home = example_ranks(items, phases["language"].ranks, mode, balanced.get("language"))
    return {
        name: balanced[name]
        if name in balanced
        else assign_in_place(spec, items.phases[name], home_ranks(items, name, home, grids))
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
    sequences = items.phases["language"]
    if mode == "tokens":
        tokens = sums_by(sequences.example, sequences.length, examples)
        for name, media in items.phases.items():
            if name != "language":
                tokens += sums_by(media.example, media.tokens.astype(np.int64), examples)
        return packed(tokens, ranks)
    if mode == "none":
        return np.arange(examples) * ranks // max(examples, 1)
    assert language is not None, f"mode {mode!r} follows the plan of the language phase"
    home = np.zeros(examples, np.int64)
    home[sequences.example] = language.rank
    return home


def home_ranks(items: BatchItems, phase: str, example_rank: Longs, grids: Mapping[str, ExchangeGrid]) -> Longs:
    """Rank of each item of a phase when it stays with its example: [N].

    Media go to the encoder ranks on the same devices, in turn when there are several.

    Args:
      example_rank: [B] language rank of each example.
      grids: by encoder phase.
    """
    home = example_rank[items.phases[phase].example]
    if phase == "language":
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
    slots = int(plan.capacity.sum(dtype=np.int64)) * spec.ranks
    tokens = int(items.real.sum())
    statistics: dict[str, float] = {
        f"{spec.name}/rows": rows,
        f"{spec.name}/microbatches": plan.microbatches,
        f"{spec.name}/slots": slots,
        f"{spec.name}/tokens": tokens,
        f"{spec.name}/flops": real_flops(items, spec),
    }
    if not rows:
        return statistics
    row = plan.microbatch.astype(np.int64) * spec.ranks + plan.rank
    each = item_costs(spec, items.length)
    cost = sums_by(row, each, rows).reshape(-1, spec.ranks)
    statistics[f"{spec.name}/real_token_fraction"] = tokens / slots
    if total := int(cost.sum()):
        mean = total / spec.ranks
        statistics[f"{spec.name}/max_over_mean"] = int(cost.sum(axis=0).max()) / mean
        floor = max(mean, int(each.max()))
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
    for name in spec.routes:
        _validate_route(name, plan, items, spec, taken)
    for (pool, rank), slots in taken.items():
        clash = f"two tokens arrive at one slot of pool {pool} on rank {rank}"
        _require(_distinct(np.concatenate(slots)), "language", clash)


def _validate_phase(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> None:
    count = len(items.length)
    for field in ("microbatch", "rank", "offset", "segment"):
        _require(getattr(plan, field).shape == (count,), spec.name, f"{field} does not have one entry an item")
    _require(np.isin(plan.capacity, spec.capacities).all(), spec.name, "a row is of no class")
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
    name: str, plan: StepPlan, items: BatchItems, spec: PlanSpec, taken: dict[tuple[int, int], list[Longs]]
) -> None:
    route, grid = spec.routes[name], spec.routes[name].grid
    encoder, language, wanted = plan.phases[name], plan.phases["language"], items.phases[name]
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

    encoder_rank = np.broadcast_to(grid.encoder[:, :, None], grid.shape)
    language_rank = np.broadcast_to(grid.language[:, None, :], grid.shape)
    none = np.zeros((0, 6), np.int64)
    forward, backward = [none], [none]
    for turn in plan.routes[name].rounds:
        source, target = (turn.source, encoder_rank), (turn.target, language_rank)
        forward.append(_delivered(turn.send, turn.pick, source, target))
        backward.append(_delivered(turn.place, turn.back, target, source))
    there, back = np.concatenate([leaves, arrives], axis=1), np.concatenate([arrives, leaves], axis=1)
    _require(_same_rows(np.concatenate(forward), there), name, "the rounds do not bring every token to its arrival")
    _require(_same_rows(np.concatenate(backward), back), name, "the rounds do not bring every gradient back")


def _delivered(table: Ints, gather: Ints, source: tuple[int, Ints], target: tuple[int, Ints]) -> Longs:
    """What one round delivers: [n, 6] of (pool, rank, slot) it leaves and (pool, rank, slot) it reaches.

    Args:
      table: [X, A, E] slots that are sent.
      gather: [X, W] which of the received fill the slots of the target pool.
      source, target: pool number, and data rank of every exchange rank [A, E, L].
    """
    blocks, encoder_only, language_only = source[1].shape
    chunks = table.reshape(blocks, encoder_only, language_only, blocks, -1)
    received = np.swapaxes(chunks, 0, 3).reshape(len(table), -1)
    at, slot = np.nonzero(gather >= 0)
    chosen = gather[at, slot]
    _, e, along = np.unravel_index(at, source[1].shape)
    sender = source[1][chosen // table.shape[2], e, along]
    pools = np.full_like(at, source[0]), np.full_like(at, target[0])
    return np.stack([pools[0], sender, received[at, chosen], pools[1], target[1].reshape(-1)[at], slot], axis=1)


def _same_rows(left: Longs, right: Longs) -> bool:
    return left.shape == right.shape and np.array_equal(left[np.lexsort(left.T)], right[np.lexsort(right.T)])


def _distinct(numbers: Longs) -> bool:
    return len(np.unique(numbers)) == len(numbers)


def _within(numbers: Ints | Longs, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _require(holds: bool | np.bool_, phase: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"the plan of phase {phase!r} is wrong: {problem}")
