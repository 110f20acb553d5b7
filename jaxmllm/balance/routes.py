"""The routes of a step: where encoder outputs wait, where the language phase finds them, and the exchange between.

    encoder rows --pool_offset--> encoder pools --rounds of an all-to-all--> language pools --arrival--> language rows

A pool is a buffer of fixed size on every rank; what does not fit one goes to the next. Normally a step needs one
pool a phase and one round.

Letters: N items, R ranks, M microbatches, and A, E, L, X of `ExchangeGrid`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxmllm.balance.pack import running_sums
from jaxmllm.balance.plan import (
    BatchItems,
    ExchangeGrid,
    Ints,
    Longs,
    PhaseItems,
    PhasePlan,
    PlanSpec,
    RoutePlan,
    RouteRound,
    RouteSpec,
)


def plan_routes(
    plans: dict[str, PhasePlan], items: BatchItems, spec: PlanSpec
) -> tuple[dict[str, PhasePlan], dict[str, RoutePlan]]:
    """Give every microbatch its pool and every encoder item its way.

    Args:
      plans: by phase, placed by assign.py.

    Returns:
      (the plans with `pool` and `pool_offset` set, routes by encoder phase).

    Raises:
      ValueError: a pool of the spec cannot hold one row.
    """
    encoders = tuple(spec.routes)
    placed = dict(plans)
    for phase in encoders:
        tokens = plans[phase].capacity.astype(np.int64)[:, None] // spec.phases[phase].slots_per_token
        pool, start = _fill_pools(tokens, spec.routes[phase].encoder_pool, f"encoder pool of phase {phase!r}")
        placed[phase] = replace(plans[phase], pool=pool, pool_offset=start[:, 0])
    if not encoders:
        return placed, {}

    language = plans["language"]
    sequence = sequence_of_example(items)
    media = {phase: _media(items.phases[phase], language, sequence) for phase in encoders}
    ranks = spec.phases["language"].ranks
    size = min(route.language_pool for route in spec.routes.values())
    pool, start = _fill_pools(media_tokens(items, language, encoders, ranks), size, "language pool")
    placed["language"] = replace(language, pool=pool)

    arrivals = _arrivals(media, {phase: items.phases[phase].tokens for phase in encoders}, start.reshape(-1), ranks)
    routes = {}
    for phase in encoders:
        traffic = _traffic(placed[phase], placed["language"], media[phase], arrivals[phase], items, spec, phase)
        routes[phase] = RoutePlan(arrivals[phase].astype(np.int32), _rounds(traffic, spec.routes[phase]))
    return placed, routes


def media_tokens(items: BatchItems, language: PhasePlan, encoders: tuple[str, ...], ranks: int) -> Longs:
    """Tokens of all encoder phases that each language row takes in: [M, R]."""
    sequence = sequence_of_example(items)
    taken = np.zeros((language.microbatches, ranks), np.int64)
    for phase in encoders:
        home = sequence[items.phases[phase].example]
        np.add.at(taken, (language.microbatch[home], language.rank[home]), items.phases[phase].tokens)
    return taken


def pair_volume(encoder: PhasePlan, language: PhasePlan, items: BatchItems, phase: str, grid: ExchangeGrid) -> int:
    """The most tokens of a phase that one exchange rank would send another in a step."""
    sequence = sequence_of_example(items)[items.phases[phase].example]
    source, _, receiver = _exchange_ranks(grid, encoder.rank, language.rank[sequence])
    volume = np.bincount(source * grid.shape[0] + receiver, weights=items.phases[phase].tokens)
    return int(volume.max(initial=0))


def sequence_of_example(items: BatchItems) -> Longs:
    """Number of the language item of each example of the batch: [B]."""
    sequence = np.full(len(items.examples), -1, np.int64)
    sequence[items.phases["language"].example] = np.arange(len(items.phases["language"].example))
    return sequence


@dataclass(frozen=True)
class _Media:
    """Where the tokens of an encoder phase's items belong in the language phase: all [N]."""

    microbatch: Ints
    rank: Ints
    place: Longs  # first slot in the language row

    def row(self, ranks: int) -> Longs:
        return self.microbatch.astype(np.int64) * ranks + self.rank


def _media(items: PhaseItems, language: PhasePlan, sequence: Longs) -> _Media:
    home = sequence[items.example]
    place = language.offset[home].astype(np.int64) + items.slot
    return _Media(language.microbatch[home], language.rank[home], place)


def _fill_pools(tokens: Longs, size: int, name: str) -> tuple[Ints, Ints]:
    """Put microbatches into pools in order, a new one whenever some rank's would overflow.

    Args:
      tokens: [M, R] of each microbatch on each rank.

    Returns:
      (pool [M], offset in the pool [M, R]).
    """
    if tokens.max(initial=0) > size:
        raise ValueError(
            f"the {name} holds {size} tokens a rank, but one row has {tokens.max()}: raise balance.pool_slots"
        )
    pool, start = np.zeros(len(tokens), np.int32), np.zeros(tokens.shape, np.int32)
    used = np.zeros(tokens.shape[1], np.int64)
    for number, more in enumerate(tokens):
        opens = bool((used + more > size).any())
        used = np.where(opens, 0, used)
        pool[number] = (pool[number - 1] if number else 0) + opens
        start[number] = used
        used = used + more
    return pool, start


def _arrivals(media: dict[str, _Media], tokens: dict[str, Ints], start: Ints, ranks: int) -> dict[str, Longs]:
    """First language pool slot of every item: in the order of the language row, all phases together."""
    row = np.concatenate([where.row(ranks) for where in media.values()])
    place = np.concatenate([where.place for where in media.values()])
    amount = np.concatenate([tokens[phase] for phase in media]).astype(np.int64)
    order = np.lexsort((place, row))
    arrival = np.empty(len(row), np.int64)
    arrival[order] = start[row[order]] + running_sums(row[order], amount[order])
    splits = np.cumsum([len(where.place) for where in media.values()])[:-1]
    return dict(zip(media, np.split(arrival, splits), strict=True))


@dataclass(frozen=True)
class _Traffic:
    """One record an item, all [N]: `tokens` from slot `start` of encoder pool `pool` on exchange rank `source` (its
    place along A is `sender`) to slot `arrival` of language pool `goal` on exchange rank `target` (`receiver`)."""

    tokens: Longs
    pool: Longs
    start: Longs
    source: Longs
    sender: Longs
    goal: Longs
    arrival: Longs
    target: Longs
    receiver: Longs


def _traffic(
    encoder: PhasePlan,
    language: PhasePlan,
    media: _Media,
    arrival: Longs,
    items: BatchItems,
    spec: PlanSpec,
    phase: str,
) -> _Traffic:
    source, target, receiver = _exchange_ranks(spec.routes[phase].grid, encoder.rank, media.rank)
    _, encoder_only, language_only = spec.routes[phase].grid.shape
    start = encoder.pool_offset[encoder.microbatch] + encoder.offset // spec.phases[phase].slots_per_token
    return _Traffic(
        tokens=items.phases[phase].tokens.astype(np.int64),
        pool=encoder.pool[encoder.microbatch].astype(np.int64),
        start=start.astype(np.int64),
        source=source,
        sender=source // (encoder_only * language_only),
        goal=language.pool[media.microbatch].astype(np.int64),
        arrival=arrival,
        target=target,
        receiver=receiver,
    )


def _exchange_ranks(grid: ExchangeGrid, encoder_rank: Ints, language_rank: Ints) -> tuple[Longs, Longs, Longs]:
    """Exchange rank that sends, exchange rank that receives, and the receiver's place along A."""
    _, encoder_only, language_only = grid.shape
    sender, e = _coordinates(grid.encoder, encoder_rank)
    receiver, at = _coordinates(grid.language, language_rank)
    source = (sender * encoder_only + e) * language_only + at
    target = (receiver * encoder_only + e) * language_only + at
    return source, target, receiver


def _coordinates(ranks: Ints, wanted: Ints) -> tuple[Longs, Longs]:
    """Row and column of each wanted rank number in a table that holds every number once."""
    place = np.empty(ranks.size, np.int64)
    place[ranks.reshape(-1)] = np.arange(ranks.size)
    return np.divmod(place[wanted], ranks.shape[1])


def _rounds(traffic: _Traffic, route: RouteSpec) -> tuple[RouteRound, ...]:
    """Tables of all rounds, ordered by (source pool, target pool). The k-th token of a pair of ranks travels in
    round k // pair_slots of its pools, in slot k % pair_slots."""
    if not traffic.tokens.sum():
        return ()
    senders, encoder_only, language_only = route.grid.shape
    exchange_ranks = senders * encoder_only * language_only
    goals = int(traffic.goal.max()) + 1
    pools = traffic.pool * goals + traffic.goal
    pair = (pools * exchange_ranks + traffic.source) * senders + traffic.receiver
    order = np.argsort(pair, kind="stable")
    first = np.empty_like(pair)
    first[order] = running_sums(pair[order], traffic.tokens[order])

    item = np.repeat(np.arange(len(pair)), traffic.tokens)  # from here on one entry a token
    step = running_sums(item, np.ones_like(item))
    turn, slot = np.divmod(first[item] + step, route.pair_slots)
    used, pools = np.unique(pools[item], return_inverse=True)
    turns = np.zeros(len(used), np.int64)
    np.maximum.at(turns, pools, turn + 1)
    number = (np.cumsum(turns) - turns)[pools] + turn

    start, arrival = traffic.start[item] + step, traffic.arrival[item] + step
    source, target = traffic.source[item], traffic.target[item]
    sender, receiver = traffic.sender[item], traffic.receiver[item]
    rounds = int(turns.sum())
    send = np.full((rounds, exchange_ranks, senders, route.pair_slots), -1, np.int32)
    place = np.full_like(send, -1)
    pick = np.full((rounds, exchange_ranks, route.language_pool), -1, np.int32)
    back = np.full((rounds, exchange_ranks, route.encoder_pool), -1, np.int32)
    send[number, source, receiver, slot] = start
    pick[number, target, arrival] = sender * route.pair_slots + slot
    place[number, target, sender, slot] = arrival
    back[number, source, start] = receiver * route.pair_slots + slot
    return tuple(
        RouteRound(*divmod(int(key), goals), send[n], pick[n], place[n], back[n])
        for n, key in enumerate(np.repeat(used, turns))
    )
