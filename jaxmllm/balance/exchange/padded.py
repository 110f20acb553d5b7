"""The padded exchange: all-to-alls of equal chunks, which every platform has.

A hop sends `pair_slots` slots from each exchange rank to each of its peers, used or not, and fills
the buffer from slot hop * A * pair_slots on. relay.py decides which token takes which slot, and
through which relay it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxmllm.arrays import INT64_MAX, Bools, Longs
from jaxmllm.balance.exchange.backend import Backend, Stretches, fill, take
from jaxmllm.balance.exchange.relay import split_over_relays, token_paths
from jaxmllm.balance.records import ExchangeGrid, Hop, RouteRound, RouteSpec, RouteTables

if TYPE_CHECKING:
    import jax

# More hops of fewer slots waste less, fewer hops of more slots take less time.
USUAL_HOPS = 16  # hops in which `auto` pair slots carry the mean traffic of the sampled steps
MAX_HOPS = 40  # per round; traffic that needs more takes further rounds


class Padded(Backend):
    """The padded backend: it spreads tokens over relays, so that chunks are about equally full."""

    ragged = False

    def available(self, platform: str) -> bool:
        return True

    def spread(self, sender: Longs, receiver: Longs, tokens: Longs, route: RouteSpec) -> Stretches:
        return split_over_relays(
            sender,
            receiver,
            tokens,
            peers=route.grid.peers,
            groups=route.grid.groups,
            pair_slots=route.pair_slots,
            max_hops=route.hops,
        )

    def tables(
        self, round_: RouteRound, route: RouteSpec, *, local: Longs, ranks: Sequence[int]
    ) -> RouteTables:
        peers = route.grid.peers
        groups = route.grid.groups
        slots = route.pair_slots
        paths = token_paths(round_, peers=peers, groups=groups, pair_slots=slots, local=local)
        moves = paths.sender != paths.receiver
        relayed = paths.relay != paths.receiver
        first_hop, first_slot = np.divmod(paths.send_slot, slots)
        second_hop, second_slot = np.divmod(paths.relay_slot, slots)
        # A token without a relay arrives in the hop in which its sender sends it.
        last_hop = np.where(relayed, second_hop, first_hop)
        last_slot = np.where(relayed, second_slot, first_slot)
        last_sender = np.where(relayed, paths.relay, paths.sender)

        # The slots that a rank sends and those of its buffer have the same layout, by hop, peer and
        # slot (Q = pair_slots):
        #
        #     hop 0: | peer 0, Q slots | peer 1, Q slots | ..    hop 1: | peer 0, Q slots | ..
        def chunk_slot(hop: Longs, rank: Longs, slot: Longs) -> Longs:
            """Index of a slot: of the chunk sent to `rank`, or of that from it in the buffer."""
            return (hop * peers + rank // groups) * slots + slot

        def send_tables(*legs: _Leg) -> tuple[Hop, ...]:
            sent = np.full((len(ranks), round_.hops * peers * slots), -1, np.int32)
            for leg in legs:
                slot = chunk_slot(leg.hop, leg.to_rank, leg.slot)
                fill(sent, local[leg.rank], leg.taken, slot, leg.source)
            by_hop = sent.reshape(len(ranks), round_.hops, peers, slots).swapaxes(0, 1)
            return tuple(Hop(np.ascontiguousarray(index)) for index in by_hop)

        forward_slots, backward_slots = self.buffer_slots(route)

        # A relay sends from its buffer, which follows the encoder pool in the source of a hop.
        at_relay = route.encoder_pool + chunk_slot(first_hop, paths.sender, first_slot)
        send_forward = send_tables(
            _Leg(paths.sender, moves, first_hop, paths.relay, first_slot, paths.start),
            _Leg(paths.relay, relayed, last_hop, paths.receiver, last_slot, at_relay),
        )
        arrived_at = chunk_slot(last_hop, last_sender, last_slot)
        gather_forward = np.full((len(ranks), route.language_pool), -1, np.int32)
        # Gathers read buffer ++ pool, whereas hops read pool ++ buffer: to a gather, tokens that
        # stay on their rank follow the buffer.
        arrives = np.where(moves, arrived_at, forward_slots + paths.start)
        fill(gather_forward, local[paths.receiver], True, paths.arrival, arrives)

        # Gradients return along the same paths, so the backward hops are the forward ones in
        # reverse order.
        first_hop_back = round_.hops - 1 - last_hop
        last_hop_back = round_.hops - 1 - first_hop
        back_at_relay = route.language_pool + chunk_slot(first_hop_back, paths.receiver, last_slot)
        send_backward = send_tables(
            _Leg(paths.receiver, moves, first_hop_back, last_sender, last_slot, paths.arrival),
            _Leg(paths.relay, relayed, last_hop_back, paths.sender, first_slot, back_at_relay),
        )
        returned_at = chunk_slot(last_hop_back, paths.relay, first_slot)
        gather_backward = np.full((len(ranks), route.encoder_pool), -1, np.int32)
        returns = np.where(moves, returned_at, backward_slots + paths.arrival)
        fill(gather_backward, local[paths.sender], True, paths.start, returns)

        return RouteTables(
            source=round_.source,
            target=round_.target,
            send_forward=send_forward,
            gather_forward=gather_forward,
            send_backward=send_backward,
            gather_backward=gather_backward,
        )

    def buffer_slots(self, route: RouteSpec) -> tuple[int, int]:
        slots = route.grid.peers * route.pair_slots * route.hops
        return slots, slots

    def hop_shapes(self, route: RouteSpec, pool_slots: int) -> tuple[tuple[int, ...], ...]:
        return ((route.grid.peers, route.pair_slots),)

    def slots_moved(self, rounds: Sequence[RouteRound], route: RouteSpec) -> int:
        pairs = route.grid.ranks * (route.grid.peers - 1)
        return sum(round_.hops for round_ in rounds) * pairs * route.pair_slots

    def problem(self, round_: RouteRound, route: RouteSpec) -> str | None:
        every_rank = np.zeros(route.grid.ranks, np.int64)
        paths = token_paths(
            round_,
            peers=route.grid.peers,
            groups=route.grid.groups,
            pair_slots=route.pair_slots,
            local=every_rank,
        )
        moves = paths.sender != paths.receiver
        relayed = paths.relay != paths.receiver
        # Tokens to forward have to reach their relay in the first leg, and none may be sent after
        # the last hop.
        limits = (
            (paths.send_slot[moves], round_.hops),
            (paths.send_slot[moves & relayed], round_.first_leg),
            (paths.relay_slot[relayed], round_.hops),
        )
        if all((slot < hops * route.pair_slots).all() for slot, hops in limits):
            return None
        return "a token is sent so late that the round has no hop for it"

    def hop_on_host(
        self, source: Longs, buffer: Longs, hop_index: int, *, hop: Hop, route: RouteSpec
    ) -> None:
        peers = route.grid.peers
        chunks = take(np.concatenate([source, buffer], axis=1), hop.index.reshape(len(source), -1))
        slots = chunks.shape[1]
        by_peers = chunks.reshape(peers, -1, peers, slots // peers)  # sender, group, receiver, slot
        received = np.swapaxes(by_peers, 0, 2).reshape(chunks.shape)
        buffer[:, hop_index * slots : (hop_index + 1) * slots] = received

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

        (index,) = tables
        chunks = gather_either(pool, buffer, index)  # [A, Q, ...]
        if axes:
            chunks = jax.lax.all_to_all(chunks, axes, 0, 0, tiled=True)
        received = chunks.reshape(-1, *chunks.shape[2:])
        return jax.lax.dynamic_update_slice_in_dim(buffer, received, hop_index * len(received), 0)


class _Leg(NamedTuple):
    """One leg of the paths of T tokens: all [T]."""

    rank: Longs  # exchange rank that sends
    taken: Bools  # whether the token takes this leg
    hop: Longs
    to_rank: Longs
    slot: Longs  # in the chunk
    source: Longs  # slot of pool ++ buffer that is sent


def choose_pair_slots(
    moves: Sequence[tuple[Longs, Longs, Longs]], grid: ExchangeGrid, longest: int
) -> int:
    """Pair slots with which `USUAL_HOPS` hops carry the mean traffic of the sampled steps.

    Args:
      moves: (sender, receiver, tokens) of each step, as for `split_over_relays`.
      longest: tokens of the longest item, for which there must be slots even if no sampled step
        moves tokens.
    """
    if grid.peers == 1:
        return 1  # nothing can move
    needed = [_slots_per_pair(*step, grid) for step in moves]
    # If no step moves a token: slots for both legs of the longest item, spread over A relays.
    usual = float(np.mean(needed)) if any(needed) else 2 * longest / grid.peers
    return max(1, math.ceil(usual / USUAL_HOPS))


def _slots_per_pair(sender: Longs, receiver: Longs, tokens: Longs, grid: ExchangeGrid) -> int:
    """Slots that a step needs from each exchange rank to each peer, all hops together."""
    stretches = split_over_relays(
        sender,
        receiver,
        tokens,
        peers=grid.peers,
        groups=grid.groups,
        pair_slots=1,  # so that the number of hops is that of slots
        max_hops=INT64_MAX,
    )
    return sum(stretches.hops[0])


PADDED = Padded()
