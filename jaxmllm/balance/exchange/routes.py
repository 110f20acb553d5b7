"""The routes of a step: where encoder outputs wait, where the language phase finds them, and the exchange between.

    encoder rows --pool_offset--> encoder pools --rounds of hops--> language pools --arrival--> language rows

A pool is a buffer of fixed size on every rank; what does not fit one goes to the next. Normally a step needs one
pool a phase and one round. Phases of equal grids share the encoder pools and the exchange of the first of them.

The plan describes rounds by runs of tokens, the same on every host; each host makes the index tables of its own
exchange ranks from them.

Letters: N items, R ranks, M microbatches, K runs, and A, E, L, X of `ExchangeGrid`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import INT64_MAX as NEVER
from jaxmllm.arrays import Ints, Longs, running_sums, sums_by
from jaxmllm.balance.exchange.relay import deal, ways, whole_items, whole_runs
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    Hop,
    PhaseItems,
    PhasePlan,
    PlanSpec,
    RoutePlan,
    RouteRound,
    RouteSpec,
    RouteTables,
    shared_exchange,
)
from jaxmllm.phases import LANGUAGE


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
    if not encoders:
        return dict(plans), {}
    placed = dict(plans)
    owner_of = shared_exchange(spec.routes)
    for owner in dict.fromkeys(owner_of.values()):
        placed |= _encoder_pools([phase for phase in encoders if owner_of[phase] == owner], plans, spec)

    language = plans[LANGUAGE]
    sequence = sequence_of_example(items)
    media = {phase: _media(items.phases[phase], language, sequence) for phase in encoders}
    ranks = spec.phases[LANGUAGE].ranks
    size = min(route.language_pool for route in spec.routes.values())
    pool, start = _fill_pools(media_tokens(items, language, encoders, ranks), size, "language pool")
    placed[LANGUAGE] = replace(language, pool=pool)

    arrivals = _arrivals(media, {phase: items.phases[phase].tokens for phase in encoders}, start.reshape(-1), ranks)
    traffic: dict[str, list[_Traffic]] = {phase: [] for phase in encoders}
    for phase in encoders:
        part = _traffic(placed[phase], placed[LANGUAGE], media[phase], arrivals[phase], items, spec, phase)
        traffic[owner_of[phase]].append(part)
    return placed, {
        phase: RoutePlan(arrivals[phase].astype(np.int32), _rounds(traffic[phase], spec.routes[phase]))
        for phase in encoders
    }


def _encoder_pools(phases: Sequence[str], plans: Mapping[str, PhasePlan], spec: PlanSpec) -> dict[str, PhasePlan]:
    """The plans of phases that share pools, with `pool` and `pool_offset`."""
    tokens = [plans[phase].capacity.astype(np.int64) // spec.phases[phase].slots_per_token for phase in phases]
    name = f"encoder pool of phase {phases[0]!r}"
    pool, start = _fill_pools(np.concatenate(tokens)[:, None], spec.routes[phases[0]].encoder_pool, name)
    ends = np.cumsum([len(each) for each in tokens])[:-1]
    parts = zip(phases, np.split(pool, ends), np.split(start[:, 0], ends), strict=True)
    return {phase: replace(plans[phase], pool=numbers, pool_offset=offsets) for phase, numbers, offsets in parts}


def media_tokens(items: BatchItems, language: PhasePlan, encoders: tuple[str, ...], ranks: int) -> Longs:
    """Tokens of all encoder phases that each language row takes in: [M, R]."""
    sequence = sequence_of_example(items)
    taken = np.zeros((language.microbatches, ranks), np.int64)
    for phase in encoders:
        home = sequence[items.phases[phase].example]
        np.add.at(taken, (language.microbatch[home], language.rank[home]), items.phases[phase].tokens)
    return taken


def lanes_needed(encoders: Mapping[str, PhasePlan], language: PhasePlan, items: BatchItems, grid: ExchangeGrid) -> int:
    """Slots from each exchange rank to each other that a padded exchange of some phases takes in a step, all hops
    together."""
    sequence = sequence_of_example(items)
    columns = []
    for phase, plan in encoders.items():
        source, target = _exchange_ranks(grid, plan.rank, language.rank[sequence[items.phases[phase].example]])
        columns.append((source, target, items.phases[phase].tokens.astype(np.int64)))
    sender, receiver, tokens = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    moves = np.flatnonzero((sender != receiver) & (tokens > 0))
    moves = moves[np.lexsort((receiver[moves], sender[moves]))]
    places, planes = grid.shape[0], math.prod(grid.shape[1:])
    return sum(deal(sender[moves], receiver[moves], tokens[moves], places, planes, 1, NEVER).hops[0])


def media_of_examples(items: BatchItems) -> Longs:
    """Tokens that the media of each example of the batch become, all encoder phases together: [B]."""
    tokens = np.zeros(len(items.examples), np.int64)
    for media in items.phases.values():
        np.add.at(tokens, media.example, media.tokens)
    return tokens


def sequence_of_example(items: BatchItems) -> Longs:
    """Number of the language item of each example of the batch: [B]."""
    sequence = np.full(len(items.examples), -1, np.int64)
    sequence[items.phases[LANGUAGE].example] = np.arange(len(items.phases[LANGUAGE].example))
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
    """One record an item, all [N]: `tokens` from slot `start` of encoder pool `pool` on exchange rank `sender` to slot
    `arrival` of language pool `goal` on exchange rank `receiver`."""

    tokens: Longs
    pool: Longs
    start: Longs
    sender: Longs
    goal: Longs
    arrival: Longs
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
    sender, receiver = _exchange_ranks(spec.routes[phase].grid, encoder.rank, media.rank)
    start = encoder.pool_offset[encoder.microbatch] + encoder.offset // spec.phases[phase].slots_per_token
    return _Traffic(
        tokens=items.phases[phase].tokens.astype(np.int64),
        pool=encoder.pool[encoder.microbatch].astype(np.int64),
        start=start.astype(np.int64),
        sender=sender,
        goal=language.pool[media.microbatch].astype(np.int64),
        arrival=arrival,
        receiver=receiver,
    )


def _exchange_ranks(grid: ExchangeGrid, encoder_rank: Ints, language_rank: Ints) -> tuple[Longs, Longs]:
    """Exchange ranks that send and that receive: they differ in their place along A alone."""
    _, encoder_only, language_only = grid.shape
    sender, e = _coordinates(grid.encoder, encoder_rank)
    receiver, at = _coordinates(grid.language, language_rank)
    return (sender * encoder_only + e) * language_only + at, (receiver * encoder_only + e) * language_only + at


def _coordinates(ranks: Ints, wanted: Ints) -> tuple[Longs, Longs]:
    """Row and column of each wanted rank number in a table that holds every number once."""
    place = np.empty(ranks.size, np.int64)
    place[ranks.reshape(-1)] = np.arange(ranks.size)
    return np.divmod(place[wanted], ranks.shape[1])


# ---------------------------------------------------------------------------- rounds


def _rounds(traffic: Sequence[_Traffic], route: RouteSpec) -> tuple[RouteRound, ...]:
    """Rounds ordered by (source pool, target pool)."""
    if not traffic:
        return ()
    fields = zip(*(vars(part).values() for part in traffic), strict=True)
    whole = _Traffic(*(np.concatenate(parts) for parts in fields))
    goals = int(whole.goal.max(initial=0)) + 1
    pools = whole.pool * goals + whole.goal
    rounds: list[RouteRound] = []
    for key in np.unique(pools[whole.tokens > 0]).tolist():
        own = (pools == key) & (whole.tokens > 0)
        part = _Traffic(*(column[own] for column in vars(whole).values()))
        rounds += _rounds_between(key // goals, key % goals, part, route)
    return tuple(rounds)


def _rounds_between(source: int, target: int, traffic: _Traffic, route: RouteSpec) -> list[RouteRound]:
    """The rounds between two pools; what stays on its exchange rank belongs to the first."""
    planes = math.prod(route.grid.shape[1:])
    changes = traffic.sender != traffic.receiver
    stays, moves = np.flatnonzero(~changes), np.flatnonzero(changes)
    moves = moves[np.lexsort((traffic.receiver[moves], traffic.sender[moves]))]
    columns = traffic.sender[moves], traffic.receiver[moves], traffic.tokens[moves]
    if route.backend == "ragged":
        dealt = whole_items(*columns, math.prod(route.grid.shape))
    else:
        dealt = deal(*columns, route.grid.shape[0], planes, route.pair_slots, route.hops)
    moves = moves[dealt.item]
    nothing = np.zeros_like(stays)
    tokens, start, arrival, sender, receiver, ordinal, round_ = (
        np.concatenate(halves).astype(np.int32)
        for halves in (
            (traffic.tokens[stays], dealt.tokens),
            (traffic.start[stays], traffic.start[moves] + dealt.first),
            (traffic.arrival[stays], traffic.arrival[moves] + dealt.first),
            (traffic.sender[stays], traffic.sender[moves]),
            (traffic.receiver[stays], traffic.receiver[moves]),
            (nothing, dealt.ordinal),
            (nothing, dealt.round),
        )
    )
    direct = np.concatenate([nothing > 0, dealt.direct])
    return [
        RouteRound(
            source=source,
            target=target,
            first_leg=first_leg,
            second_leg=second_leg,
            direct_tokens=dealt.direct_tokens,
            tokens=tokens[own],
            start=start[own],
            arrival=arrival[own],
            sender=sender[own],
            receiver=receiver[own],
            ordinal=ordinal[own],
            direct=direct[own],
        )
        for n, (first_leg, second_leg) in enumerate(dealt.hops)
        if len(own := np.flatnonzero(round_ == n))
    ]


def route_statistics(
    rounds: Sequence[RouteRound], route: RouteSpec, encoder_node: Ints | None, language_node: Ints | None
) -> dict[str, float]:
    """What an exchange moves in a step; `plan_step` says what the names mean. Nodes are of each rank, or None."""
    places, encoder_only, language_only = route.grid.shape
    tokens = np.concatenate([round_.tokens for round_ in rounds] or [np.zeros(0, np.int32)]).astype(np.int64)
    sender = np.concatenate([round_.sender for round_ in rounds] or [np.zeros(0, np.int32)])
    receiver = np.concatenate([round_.receiver for round_ in rounds] or [np.zeros(0, np.int32)])
    moved = int(tokens[sender != receiver].sum())
    hops = sum(round_.hops for round_ in rounds)
    padded = hops * places * (places - 1) * encoder_only * language_only * route.pair_slots
    slots = padded if route.backend == "padded" else moved
    statistics: dict[str, float] = {
        "ragged": float(route.backend == "ragged"),
        "rounds": len(rounds),
        "hops": hops,
        "tokens": int(tokens.sum()),
        "moved_tokens": moved,
        "slots_moved": slots,
    }
    if moved:
        statistics["slots_over_moved"] = slots / moved
        statistics["slots_over_tokens"] = slots / int(tokens.sum())
    if encoder_node is not None and language_node is not None:
        a, e, _ = np.unravel_index(sender, route.grid.shape)
        b, _, at = np.unravel_index(receiver, route.grid.shape)
        between = encoder_node[route.grid.encoder[a, e]] != language_node[route.grid.language[b, at]]
        statistics["node_tokens"] = int(tokens[between].sum())
        apart = float((encoder_node[:, None] != language_node).mean())  # share of pairs of ranks
        if arbitrary := apart * int(tokens.sum()):
            statistics["node_tokens_over_arbitrary"] = statistics["node_tokens"] / arbitrary
    return statistics


# ---------------------------------------------------------------------------- tables


def route_tables(round_: RouteRound, route: RouteSpec, ranks: Sequence[int]) -> RouteTables:
    """The index tables of a round for some exchange ranks, in the order given."""
    local = np.full(math.prod(route.grid.shape), -1, np.int64)
    local[list(ranks)] = np.arange(len(ranks))
    make = _padded_tables if route.backend == "padded" else _ragged_tables
    return make(round_, route, local, ranks)


def _padded_tables(round_: RouteRound, route: RouteSpec, local: Longs, ranks: Sequence[int]) -> RouteTables:
    """Each token leaves the sender in one hop and reaches the receiver in the same or a later one; the transposed
    direction takes the same way back, so its hops are those of the forward one in reverse order."""
    places, encoder_only, language_only = route.grid.shape
    planes, slots, count = encoder_only * language_only, route.pair_slots, len(ranks)
    tokens = ways(round_, places, planes, slots, local)
    forward_buffer, transposed_buffer = route.buffers
    hop, slot = np.divmod(tokens.lane, slots)
    relayed = tokens.relay != tokens.receiver
    last_hop, last_slot = np.where(relayed, np.divmod(tokens.onward, slots), (hop, slot))
    last_sender = np.where(relayed, tokens.relay, tokens.sender)
    hop_back, last_back = round_.hops - 1 - hop, round_.hops - 1 - last_hop
    leaves = tokens.sender != tokens.receiver

    def received(hop: Longs, other: Longs, slot: Longs) -> Longs:
        """Buffer slot of what came from `other`."""
        return (hop * places + other // planes) * slots + slot

    def table(parts: Sequence[tuple[Longs, NDArray[np.bool_], Longs, Longs, Longs, Longs]]) -> tuple[Hop, ...]:
        filled = np.full((count, round_.hops * places * slots), -1, np.int32)
        for rank, where, at_hop, other, at_slot, values in parts:
            _fill(filled, local[rank], where, received(at_hop, other, at_slot), values)
        by_hop = filled.reshape(count, round_.hops, places, slots).swapaxes(0, 1)
        return tuple(Hop(np.ascontiguousarray(index)) for index in by_hop)

    first, second = received(hop, tokens.sender, slot), received(last_hop, last_sender, last_slot)
    send = table(
        (
            (tokens.sender, leaves, hop, tokens.relay, slot, tokens.start),
            (tokens.relay, relayed, last_hop, tokens.receiver, last_slot, route.encoder_pool + first),
        )
    )
    pick = np.full((count, route.language_pool), -1, np.int32)
    arrives = np.where(leaves, second, forward_buffer + tokens.start)
    _fill(pick, local[tokens.receiver], True, tokens.arrival, arrives)

    first, second = received(last_back, tokens.receiver, last_slot), received(hop_back, tokens.relay, slot)
    place = table(
        (
            (tokens.receiver, leaves, last_back, last_sender, last_slot, tokens.arrival),
            (tokens.relay, relayed, hop_back, tokens.sender, slot, route.language_pool + first),
        )
    )
    back = np.full((count, route.encoder_pool), -1, np.int32)
    returns = np.where(leaves, second, transposed_buffer + tokens.arrival)
    _fill(back, local[tokens.sender], True, tokens.start, returns)
    return RouteTables(round_.source, round_.target, send, pick, place, back)


def _ragged_tables(round_: RouteRound, route: RouteSpec, local: Longs, ranks: Sequence[int]) -> RouteTables:
    """What leaves stands in the order of the receivers, what arrives in the order of the senders; the transposed
    direction is the same with the two exchanged."""
    places, encoder_only, language_only = route.grid.shape
    planes, count = encoder_only * language_only, len(ranks)
    tokens = whole_runs(round_, (local[round_.sender] >= 0) | (local[round_.receiver] >= 0))

    out, out_land = _volumes(round_.sender, round_.receiver, round_.tokens, ranks, places, planes)
    into, into_land = _volumes(round_.receiver, round_.sender, round_.tokens, ranks, places, planes)
    leave, land = np.cumsum(out, axis=1) - out, np.cumsum(into, axis=1) - into

    leaves = tokens.sender != tokens.receiver
    sent = leave[local[tokens.sender], tokens.receiver // planes] + tokens.lane  # of local senders
    landed = land[local[tokens.receiver], tokens.sender // planes] + tokens.lane  # of local receivers
    send = np.full((count, route.encoder_pool), -1, np.int32)
    place = np.full((count, route.language_pool), -1, np.int32)
    back, pick = np.full_like(send, -1), np.full_like(place, -1)
    _fill(send, local[tokens.sender], leaves, sent, tokens.start)
    _fill(place, local[tokens.receiver], leaves, landed, tokens.arrival)
    forward_buffer, transposed_buffer = route.buffers
    arrives = np.where(leaves, landed, forward_buffer + tokens.start)
    returns = np.where(leaves, sent, transposed_buffer + tokens.arrival)
    _fill(pick, local[tokens.receiver], True, tokens.arrival, arrives)
    _fill(back, local[tokens.sender], True, tokens.start, returns)
    sizes = np.stack([leave, out, out_land, into], axis=1).astype(np.int32)
    sizes_back = np.stack([land, into, into_land, out], axis=1).astype(np.int32)
    forward, transposed = Hop(send, sizes), Hop(place, sizes_back)
    return RouteTables(round_.source, round_.target, (forward,) * round_.hops, pick, (transposed,) * round_.hops, back)


def _volumes(
    ours: Ints, others: Ints, tokens: Ints, ranks: Sequence[int], places: int, planes: int
) -> tuple[Longs, Longs]:
    """What some exchange ranks have for each place along A, and how much ranks of lower places have for the same
    receiver: [x, A] each."""
    own, before = np.zeros((len(ranks), places), np.int64), np.zeros((len(ranks), places), np.int64)
    moves = ours != others
    for row, rank in enumerate(ranks):
        near = moves & (ours == rank)
        own[row] = sums_by(others[near] // planes, tokens[near].astype(np.int64), places)
        lower = moves & (ours % planes == rank % planes) & (ours // planes < rank // planes)
        before[row] = sums_by(others[lower] // planes, tokens[lower].astype(np.int64), places)
    return own, before


def _fill(table: Ints, at: Longs, where: NDArray[np.bool_] | bool, slot: Longs, values: Longs) -> None:
    """table[at, slot] = values, for the tokens whose rank is local (at >= 0)."""
    chosen = np.flatnonzero((at >= 0) & where)
    table[at[chosen], slot[chosen]] = values[chosen]


def run_hops(source: Longs, hops: Sequence[Hop], gather: Ints, route: RouteSpec, direction: int) -> Longs:
    """What the devices do with the tables of all exchange ranks: [X, W of the source] -> [X, W of the target].

    `direction` is 0 forward, 1 transposed. For checking plans; tokens are numbers, 0 means nothing.
    """
    places = route.grid.shape[0]
    buffer = np.zeros((len(source), route.buffers[direction]), source.dtype)
    for number, hop in enumerate(hops):
        chunks = _take(np.concatenate([source, buffer], axis=1), hop.index.reshape(len(source), -1))
        if hop.sizes is None:
            sent = chunks.reshape(places, -1, places, chunks.shape[1] // places)
            received = np.swapaxes(sent, 0, 2).reshape(chunks.shape)
            buffer[:, number * chunks.shape[1] :][:, : chunks.shape[1]] = received
            continue
        planes = len(source) // places
        for x, y in np.ndindex(len(source), places):
            begin, amount, land, _ = hop.sizes[x, :, y]
            buffer[y * planes + x % planes, land : land + amount] = chunks[x, begin : begin + amount]
    return _take(np.concatenate([buffer, source], axis=1), gather)


def _take(values: Longs, index: Ints) -> Longs:
    return np.where(index >= 0, np.take_along_axis(values, np.maximum(index, 0).astype(np.int64), axis=1), 0)
