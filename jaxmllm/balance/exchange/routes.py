"""The routes of a step: how encoder outputs reach the language rows that read them.

    encoder rows --pool_offset--> encoder pools
        --rounds of hops--> language pools --arrival--> language rows

A pool is a buffer of fixed size on every rank; microbatches that do not fit one use the next.
Normally a step needs one pool per phase and one round. Phases of equal grids share the encoder
pools and the exchange of the first of them.

The plan describes rounds by stretches of tokens, the same on every host; each host makes the index
tables of its own exchange ranks from them (tables.py).

Letters: R ranks, M microbatches, K stretches, and A, E, L, X of `ExchangeGrid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums
from jaxmllm.balance.exchange.pieces import Pieces, Runs
from jaxmllm.balance.exchange.tables import backend_of
from jaxmllm.balance.exchange.traffic import (
    Traffic,
    arriving_tokens,
    exchange_ranks,
    sequence_of_example,
)
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhasePlan,
    PlanSpec,
    RoutePlan,
    RouteRound,
    RouteSpec,
    shared_exchange,
)
from jaxmllm.phases import LANGUAGE


def plan_routes(
    plans: dict[str, PhasePlan], items: BatchItems, spec: PlanSpec
) -> tuple[dict[str, PhasePlan], dict[str, RoutePlan]]:
    """Give every microbatch its pool and every encoder item its route.

    Args:
      plans: by phase, with rows and ranks assigned.

    Returns:
      (the plans with `pool` and `pool_offset` set, routes by encoder or generator phase).

    Raises:
      ValueError: a pool of the spec cannot hold one row.
    """
    encoders = tuple(spec.routes)
    if not encoders:
        return dict(plans), {}
    placed = dict(plans)
    owner_of = shared_exchange(spec.routes)
    # Phases of one exchange share its pools, so pools are filled for all of them together.
    for owner in dict.fromkeys(owner_of.values()):
        sharing = [phase for phase in encoders if owner_of[phase] == owner]
        placed |= _encoder_pools(sharing, plans, spec)

    language = plans[LANGUAGE]
    ranks = spec.phases[LANGUAGE].ranks
    sequence = sequence_of_example(items)
    pieces = {phase: Pieces.of(items.phases[phase], language, sequence) for phase in encoders}
    arriving = arriving_tokens(pieces.values(), language.microbatches, ranks)
    # One language pool takes the tokens of all phases, so the smallest size of any route counts.
    size = min(route.language_pool for route in spec.routes.values())
    pool, start = _fill_pools(arriving, size, "language pool")
    placed[LANGUAGE] = replace(language, pool=pool)
    arrivals = _arrivals(pieces, start.reshape(-1), ranks)

    # Listed under the owner of the exchange; other phases keep an empty list and have no rounds.
    traffic: dict[str, list[Traffic]] = {phase: [] for phase in encoders}
    for phase in encoders:
        slots_per_token = spec.phases[phase].slots_per_token
        traffic[owner_of[phase]].append(
            _traffic(
                placed[phase],
                pieces[phase],
                spec.routes[phase].grid,
                slots_per_token=slots_per_token,
                language_pool=pool,
                arrival=arrivals[phase],
            )
        )
    routes = {
        phase: RoutePlan(
            item=phase_pieces.item.astype(np.int32),
            skipped=phase_pieces.skipped.astype(np.int32),
            tokens=phase_pieces.tokens.astype(np.int32),
            arrival=arrivals[phase].astype(np.int32),
            rounds=_exchange_rounds(traffic[phase], spec.routes[phase]),
        )
        for phase, phase_pieces in pieces.items()
    }
    return placed, routes


def _traffic(
    encoder: PhasePlan,
    pieces: Pieces,
    grid: ExchangeGrid,
    *,
    slots_per_token: int,
    language_pool: Ints,
    arrival: Longs,
) -> Traffic:
    """The runs of tokens that an encoder phase sends to the language pools.

    Args:
      language_pool: [M] pool of each language microbatch.
      arrival: first language pool slot of each piece.
    """
    runs = Runs.of(pieces, encoder, slots_per_token)
    microbatch = encoder.microbatch[pieces.item[runs.piece]]
    sender, receiver = exchange_ranks(grid, runs.rank, pieces.rank[runs.piece])
    return Traffic(
        tokens=runs.tokens,
        pool=encoder.pool[microbatch].astype(np.int64),
        start=encoder.pool_offset[microbatch] + runs.start,
        sender=sender,
        goal=language_pool[pieces.microbatch[runs.piece]].astype(np.int64),
        arrival=arrival[runs.piece] + runs.skipped,
        receiver=receiver,
    )


# ---------------------------------------------------------------------------- pools


def _encoder_pools(
    phases: Sequence[str], plans: Mapping[str, PhasePlan], spec: PlanSpec
) -> dict[str, PhasePlan]:
    """The plans of phases that share pools, with `pool` and `pool_offset`."""
    tokens = [
        plans[phase].capacity.astype(np.int64) // spec.phases[phase].slots_per_token
        for phase in phases
    ]
    owner = phases[0]
    pool, start = _fill_pools(
        # A microbatch takes its capacity on every rank, so one column stands for all.
        np.concatenate(tokens)[:, None],
        spec.routes[owner].encoder_pool,
        name=f"encoder pool of phase {owner!r}",
    )
    ends = np.cumsum([len(rows) for rows in tokens])[:-1]
    columns = zip(phases, np.split(pool, ends), np.split(start[:, 0], ends), strict=True)
    return {
        phase: replace(plans[phase], pool=pools, pool_offset=offsets)
        for phase, pools, offsets in columns
    }


def _fill_pools(tokens: Longs, size: int, name: str) -> tuple[Ints, Ints]:
    """Put microbatches into pools in order; begin a new pool when one would overflow on some rank.

    Args:
      tokens: [M, R] of each microbatch on each rank.
      size: tokens that a pool holds on a rank.

    Returns:
      (pool [M], offset in the pool [M, R]).
    """
    if tokens.max(initial=0) > size:
        raise ValueError(
            f"the {name} holds {size} tokens per rank, but one row has {tokens.max()}: raise balance.pool_slots"
        )
    pool = np.zeros(len(tokens), np.int32)
    start = np.zeros(tokens.shape, np.int32)
    used = np.zeros(tokens.shape[1], np.int64)
    for microbatch, added in enumerate(tokens):
        # A pool ends on all ranks at once, because a microbatch is in one pool everywhere. Only the
        # offsets differ between ranks.
        opens_pool = bool((used + added > size).any())
        used = np.where(opens_pool, 0, used)
        pool[microbatch] = (pool[microbatch - 1] if microbatch else 0) + opens_pool
        start[microbatch] = used
        used = used + added
    return pool, start


def _arrivals(pieces: Mapping[str, Pieces], start: Ints, ranks: int) -> dict[str, Longs]:
    """First language pool slot of every piece; a rank's pieces are in the order of language rows.

    Args:
      start: [M * R] first pool slot of each microbatch on each rank.
    """
    # All phases together, because the tokens of several may alternate in a row.
    row = np.concatenate([phase_pieces.row(ranks) for phase_pieces in pieces.values()])
    slot = np.concatenate([phase_pieces.slot for phase_pieces in pieces.values()])
    tokens = np.concatenate([phase_pieces.tokens for phase_pieces in pieces.values()])
    order = np.lexsort((slot, row))
    arrival = np.empty(len(row), np.int64)
    arrival[order] = start[row[order]] + running_sums(row[order], tokens[order])
    ends = np.cumsum([len(phase_pieces.slot) for phase_pieces in pieces.values()])[:-1]
    return dict(zip(pieces, np.split(arrival, ends), strict=True))


# ---------------------------------------------------------------------------- rounds


def _exchange_rounds(traffic: list[Traffic], route: RouteSpec) -> tuple[RouteRound, ...]:
    """The rounds of all traffic of one exchange, ordered by (source pool, target pool)."""
    if not traffic:
        return ()
    joined = Traffic.joined(traffic)
    goals = int(joined.goal.max(initial=0)) + 1
    pools = joined.pool * goals + joined.goal
    rounds: list[RouteRound] = []
    for key in np.unique(pools[joined.tokens > 0]).tolist():
        between = np.flatnonzero((pools == key) & (joined.tokens > 0))
        rounds += _rounds_between_pools(key // goals, key % goals, joined.chosen(between), route)
    return tuple(rounds)


def _rounds_between_pools(
    source: int, target: int, traffic: Traffic, route: RouteSpec
) -> list[RouteRound]:
    """The rounds between two pools; tokens that stay on their exchange rank belong to the first."""
    changes = traffic.sender != traffic.receiver
    stays = np.flatnonzero(~changes)
    moves = np.flatnonzero(changes)
    moves = moves[np.lexsort((traffic.receiver[moves], traffic.sender[moves]))]
    leaving = traffic.chosen(moves)
    stretches = backend_of(route).spread(leaving.sender, leaving.receiver, leaving.tokens, route)
    # A run may be cut into several stretches: from here on, there is one entry per stretch.
    moves = moves[stretches.item]

    def column(staying: Longs, moving: Longs) -> Ints:
        return np.concatenate([staying, moving]).astype(np.int32)

    nothing = np.zeros_like(stays)
    round_of = column(nothing, stretches.round)
    columns = {
        "tokens": column(traffic.tokens[stays], stretches.tokens),
        "start": column(traffic.start[stays], traffic.start[moves] + stretches.start),
        "arrival": column(traffic.arrival[stays], traffic.arrival[moves] + stretches.start),
        "sender": column(traffic.sender[stays], traffic.sender[moves]),
        "receiver": column(traffic.receiver[stays], traffic.receiver[moves]),
        "ordinal": column(nothing, stretches.ordinal),
    }
    direct = np.concatenate([nothing > 0, stretches.direct])
    rounds = []
    for round_index, (first_leg, second_leg) in enumerate(stretches.hops):
        members = np.flatnonzero(round_of == round_index)
        if len(members):
            columns_of_round = {name: values[members] for name, values in columns.items()}
            rounds.append(
                RouteRound(
                    source=source,
                    target=target,
                    first_leg=first_leg,
                    second_leg=second_leg,
                    direct_tokens=stretches.direct_tokens,
                    direct=direct[members],
                    **columns_of_round,
                )
            )
    return rounds


def route_statistics(
    rounds: Sequence[RouteRound],
    route: RouteSpec,
    encoder_node: Ints | None,
    language_node: Ints | None,
) -> dict[str, float]:
    """Statistics of what an exchange moves in a step; `plan_step` explains the names.

    Args:
      encoder_node, language_node: [R] node of each rank; None if not known.
    """
    nothing = [np.zeros(0, np.int32)]  # joins to int32 even without rounds
    tokens = np.concatenate([round_.tokens for round_ in rounds] or nothing).astype(np.int64)
    sender = np.concatenate([round_.sender for round_ in rounds] or nothing)
    receiver = np.concatenate([round_.receiver for round_ in rounds] or nothing)
    routed = int(tokens.sum())
    moved = int(tokens[sender != receiver].sum())
    backend = backend_of(route)
    slots = backend.slots_moved(rounds, route)
    statistics: dict[str, float] = {
        "ragged": float(backend.ragged),
        "rounds": len(rounds),
        "hops": sum(round_.hops for round_ in rounds),
        "tokens": routed,
        "moved_tokens": moved,
        "slots_moved": slots,
    }
    if moved:
        statistics["slots_over_moved"] = slots / moved
        statistics["slots_over_tokens"] = slots / routed
    if encoder_node is not None and language_node is not None:
        sending_peer, encoder_column, _ = np.unravel_index(sender, route.grid.shape)
        receiving_peer, _, language_column = np.unravel_index(receiver, route.grid.shape)
        sending_node = encoder_node[route.grid.encoder[sending_peer, encoder_column]]
        receiving_node = language_node[route.grid.language[receiving_peer, language_column]]
        statistics["node_tokens"] = int(tokens[sending_node != receiving_node].sum())
        numbers = int(max(encoder_node.max(), language_node.max())) + 1
        in_node = [np.bincount(node, minlength=numbers) for node in (encoder_node, language_node)]
        pairs = len(encoder_node) * len(language_node)
        # Share of all pairs of an encoder and a language rank that are on different nodes.
        far_share = (pairs - int(in_node[0] @ in_node[1])) / pairs
        if arbitrary := far_share * routed:
            statistics["node_tokens_over_arbitrary"] = statistics["node_tokens"] / arbitrary
    return statistics
