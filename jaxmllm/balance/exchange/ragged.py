"""The ragged exchange: one all-to-all with chunks of any size, where the platform has it.

Tokens are ordered by receiver when they leave and by sender when they arrive. The way back is the
same with the two exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums, sums_by
from jaxmllm.balance.exchange.backend import Backend, Stretches, fill, take, tokens_of
from jaxmllm.balance.records import ExchangeGrid, Hop, RouteRound, RouteSpec, RouteTables

if TYPE_CHECKING:
    import jax


class Ragged(Backend):
    """The ragged backend: it sends every token straight to its receiver, in one hop per round."""

    ragged = True

    def available(self, platform: str) -> bool:
        return platform != "cpu"

    def spread(self, sender: Longs, receiver: Longs, tokens: Longs, route: RouteSpec) -> Stretches:
        nothing = np.zeros_like(tokens)
        return Stretches(
            round=nothing,
            item=np.arange(len(tokens)),
            start=nothing,
            tokens=tokens,
            direct=tokens > 0,
            ordinal=running_sums(sender * route.grid.ranks + receiver, tokens),
            hops=[(int(len(tokens) > 0), 0)],
            direct_tokens=0,
        )

    def tables(
        self, round_: RouteRound, route: RouteSpec, *, local: Longs, ranks: Sequence[int]
    ) -> RouteTables:
        groups = route.grid.groups
        sent, landing_there = _volumes_by_peer(
            round_.sender, round_.receiver, round_.tokens, ranks=ranks, grid=route.grid
        )
        expected, landing_back = _volumes_by_peer(
            round_.receiver, round_.sender, round_.tokens, ranks=ranks, grid=route.grid
        )
        # Start of the tokens for each peer among those sent, and of the tokens from each peer in
        # the buffer: [x, A].
        leaving = np.cumsum(sent, axis=1) - sent
        landing = np.cumsum(expected, axis=1) - expected

        has_local_end = (local[round_.sender] >= 0) | (local[round_.receiver] >= 0)
        stretch, step = tokens_of(np.flatnonzero(has_local_end), round_.tokens)
        sender = round_.sender[stretch].astype(np.int64)
        receiver = round_.receiver[stretch].astype(np.int64)
        start = round_.start[stretch] + step
        arrival = round_.arrival[stretch] + step
        ordinal = round_.ordinal[stretch] + step
        moves = sender != receiver
        # Meaningless where the sender, or the receiver, is not local (-1): `fill` skips those.
        sent_at = leaving[local[sender], receiver // groups] + ordinal
        lands_at = landing[local[receiver], sender // groups] + ordinal

        send_forward = np.full((len(ranks), route.encoder_pool), -1, np.int32)
        send_backward = np.full((len(ranks), route.language_pool), -1, np.int32)
        gather_forward = np.full_like(send_backward, -1)
        gather_backward = np.full_like(send_forward, -1)
        forward_slots, backward_slots = self.buffer_slots(route)
        fill(send_forward, local[sender], moves, sent_at, start)
        fill(send_backward, local[receiver], moves, lands_at, arrival)
        arrives = np.where(moves, lands_at, forward_slots + start)
        returns = np.where(moves, sent_at, backward_slots + arrival)
        fill(gather_forward, local[receiver], True, arrival, arrives)
        fill(gather_backward, local[sender], True, start, returns)

        # jax.lax.ragged_all_to_all wants to know where tokens land in the receiver's buffer, so a
        # rank also counts what lower peers send there.
        sizes_forward = np.stack([leaving, sent, landing_there, expected], axis=1).astype(np.int32)
        sizes_backward = np.stack([landing, expected, landing_back, sent], axis=1).astype(np.int32)
        return RouteTables(
            source=round_.source,
            target=round_.target,
            send_forward=(Hop(send_forward, sizes_forward),) * round_.hops,
            gather_forward=gather_forward,
            send_backward=(Hop(send_backward, sizes_backward),) * round_.hops,
            gather_backward=gather_backward,
        )

    def buffer_slots(self, route: RouteSpec) -> tuple[int, int]:
        if route.grid.peers == 1:
            return 1, 1  # nothing can move
        return route.language_pool, route.encoder_pool

    def hop_shapes(self, route: RouteSpec, pool_slots: int) -> tuple[tuple[int, ...], ...]:
        return (pool_slots,), (4, route.grid.peers)

    def slots_moved(self, rounds: Sequence[RouteRound], route: RouteSpec) -> int:
        moving = (round_.tokens[round_.sender != round_.receiver] for round_ in rounds)
        return sum(int(tokens.sum(dtype=np.int64)) for tokens in moving)

    def hop_on_host(
        self, source: Longs, buffer: Longs, hop_index: int, *, hop: Hop, route: RouteSpec
    ) -> None:
        assert hop.sizes is not None
        groups = route.grid.groups
        chunks = take(np.concatenate([source, buffer], axis=1), hop.index)
        for rank, peer in np.ndindex(len(source), route.grid.peers):
            begin, tokens, land, _ = hop.sizes[rank, :, peer]
            receiver = peer * groups + rank % groups
            buffer[receiver, land : land + tokens] = chunks[rank, begin : begin + tokens]

    def hop_on_device(
        self,
        pool: jax.Array,
        buffer: jax.Array,
        hop_index: jax.Array,
        tables: tuple[jax.Array, ...],
        axes: tuple[str, ...],
    ) -> jax.Array:
        import jax  # here, because worker processes plan without it

        from sharding.pools import gather_either

        if not axes:
            return buffer
        index, sizes = tables
        begin, sent, land, expected = sizes
        chunks = gather_either(pool, buffer, index)
        return jax.lax.ragged_all_to_all(
            chunks, buffer, begin, sent, land, expected, axis_name=axes
        )


def _volumes_by_peer(
    rank_of: Ints, peer_of: Ints, tokens: Ints, *, ranks: Sequence[int], grid: ExchangeGrid
) -> tuple[Longs, Longs]:
    """Tokens that each of some exchange ranks sends to each peer, and tokens that its lower peers
    send to the same receiver: [x, A] each.

    Args:
      rank_of: [K] exchange rank that sends each stretch (or receives, for the way back).
      peer_of: [K] exchange rank at its other end.
    """
    groups = grid.groups
    volume = np.zeros((len(ranks), grid.peers), np.int64)
    lower_volume = np.zeros_like(volume)
    moves = rank_of != peer_of
    for row, rank in enumerate(ranks):
        of_rank = moves & (rank_of == rank)
        volume[row] = _sums_by_peer(peer_of[of_rank], tokens[of_rank], grid)
        # Peer numbers repeat in every group, so other groups' stretches are left out.
        same_group = rank_of % groups == rank % groups
        lower = moves & same_group & (rank_of // groups < rank // groups)
        lower_volume[row] = _sums_by_peer(peer_of[lower], tokens[lower], grid)
    return volume, lower_volume


def _sums_by_peer(exchange_rank: Ints, tokens: Ints, grid: ExchangeGrid) -> Longs:
    return sums_by(exchange_rank // grid.groups, tokens.astype(np.int64), grid.peers)


RAGGED = Ragged()
