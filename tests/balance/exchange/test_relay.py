"""A relayed exchange: every token reaches its receiver, and no slot carries two tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange.relay import _most_of_one_color, split_over_relays, token_paths
from jaxmllm.balance.records import RouteRound


def random_traffic(seed: int, peers: int, groups: int, items: int, largest: int):
    """Items that leave their exchange rank, ordered by sender: (sender, receiver, tokens)."""
    random = np.random.default_rng(seed)
    sender = random.integers(0, peers * groups, items)
    receiver = (
        sender // groups + random.integers(1, peers, items)
    ) % peers * groups + sender % groups
    order = np.lexsort((receiver, sender))
    sender = sender[order]
    receiver = receiver[order]
    return sender, receiver, random.integers(1, largest + 1, items)


def rounds_of(sender, receiver, tokens, stretches):
    """The rounds as a plan would hold them: a token starts and arrives at its
    number among all tokens."""
    first_token = np.cumsum(tokens) - tokens
    for index, (first_leg, second_leg) in enumerate(stretches.hops):
        in_round = stretches.round == index
        item = stretches.item[in_round]
        start = first_token[item] + stretches.start[in_round]
        endpoints = sender[item], receiver[item]
        columns = (
            stretches.tokens[in_round],
            start,
            start,
            *endpoints,
            stretches.ordinal[in_round],
            stretches.direct[in_round],
        )
        yield RouteRound(0, 0, first_leg, second_leg, stretches.direct_tokens, *columns)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    peers=st.integers(2, 6),
    groups=st.integers(1, 3),
    items=st.integers(0, 30),
    largest=st.sampled_from([1, 5, 60]),
    slots=st.sampled_from([1, 5, 64]),
    most=st.sampled_from([2, 3, 16]),
)
def test_every_token_gets_there_and_no_slot_carries_two(
    seed, peers, groups, items, largest, slots, most
):
    """Each token goes to its receiver directly or by one relay of the same group, which receives it
    in an earlier hop than it sends it on."""
    sender, receiver, tokens = random_traffic(seed, peers, groups, items, largest)
    sizes = {"peers": peers, "groups": groups, "pair_slots": slots}
    stretches = split_over_relays(sender, receiver, tokens, **sizes, max_hops=most)
    owner = np.repeat(np.arange(items), tokens)
    delivered = []
    for round_ in rounds_of(sender, receiver, tokens, stretches):
        assert round_.hops <= most
        used_slots = set()
        paths = token_paths(round_, **sizes, local=np.arange(peers * groups))
        for n, token in enumerate(paths.start.tolist()):
            delivered.append(token)
            source = int(paths.sender[n])
            relay = int(paths.relay[n])
            target = int(paths.receiver[n])
            assert (source, target) == (sender[owner[token]], receiver[owner[token]])
            assert source % groups == relay % groups == target % groups and relay != source
            legs = [(source, relay, int(paths.send_slot[n]))]
            if relay != target:
                legs.append((relay, target, int(paths.relay_slot[n])))
                assert legs[0][2] // slots < legs[1][2] // slots
            for leg in legs:
                assert leg not in used_slots and 0 <= leg[2] < round_.hops * slots
                used_slots.add(leg)
    assert sorted(delivered) == list(range(int(tokens.sum())))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    colors=st.integers(1, 9),
    items=st.integers(1, 12),
    largest=st.integers(1, 30),
)
def test_the_most_tokens_of_one_color_are_counted_exactly(seed, colors, items, largest):
    """The tokens of an item take consecutive colors in turn, here one by one in a loop."""
    random = np.random.default_rng(seed)
    group = random.integers(0, 3, items)
    color = random.integers(0, colors, items)
    tokens = random.integers(1, largest + 1, items)
    counts = np.zeros((3, colors), np.int64)
    for item in range(items):
        for token in range(tokens[item]):
            counts[group[item], (color[item] + token) % colors] += 1
    groups, largest_counts = _most_of_one_color(group, color, tokens, colors=colors)
    assert groups.tolist() == np.unique(group).tolist()
    assert largest_counts.tolist() == counts[groups].max(axis=1).tolist()


def test_paths_of_some_ranks_are_those_of_all():
    """A host computes the paths of its own ranks alone and must agree with a
    host that computes all."""
    sender, receiver, tokens = random_traffic(3, 5, 2, 25, 40)
    sizes = {"peers": 5, "groups": 2, "pair_slots": 4}
    stretches = split_over_relays(sender, receiver, tokens, **sizes, max_hops=99)
    (round_,) = rounds_of(sender, receiver, tokens, stretches)

    def through(rank, local):
        """The paths that pass `rank`, sorted, as a host with these local ranks computes them."""
        paths = token_paths(round_, **sizes, local=local)
        on_rank = (paths.relay == rank) | (paths.receiver == rank)
        # A direct token has no second leg, so its relay slot is meaningless.
        relay_slot = np.where(paths.relay == paths.receiver, -1, paths.relay_slot)
        columns = (
            paths.start,
            paths.sender,
            paths.relay,
            paths.receiver,
            paths.send_slot,
            relay_slot,
        )
        return sorted(zip(*(column[on_rank].tolist() for column in columns), strict=True))

    for rank in range(10):
        local = np.where(np.arange(10) == rank, 0, -1)
        assert through(rank, local) == through(rank, np.arange(10))


def test_what_stays_on_its_rank_passes_no_other():
    """Four ranks each keep nine tokens; the paths of rank 2 are its own nine."""
    ranks = np.array([0, 1, 2, 3])
    columns = (np.full(4, 9), ranks * 9, ranks * 9, ranks, ranks, 0 * ranks, ranks < 0)
    round_ = RouteRound(0, 0, 1, 1, 0, *columns)
    local = np.array([-1, -1, 0, -1])
    paths = token_paths(round_, peers=4, groups=1, pair_slots=9, local=local)
    assert paths.start.tolist() == list(range(18, 27))


def test_hops_are_what_the_busiest_ranks_need():
    """With random receivers most pairs have no traffic, yet relays keep the slots of the
    busiest ranks nearly full."""
    sender, receiver, tokens = random_traffic(0, 32, 1, 200, 1)
    stretches = split_over_relays(
        sender, receiver, tokens * 64, peers=32, groups=1, pair_slots=1, max_hops=1000
    )
    (hops,) = stretches.hops
    sent = np.bincount(sender) * 64
    received = np.bincount(receiver) * 64
    assert stretches.direct_tokens == 0 and not stretches.direct.any()
    assert hops[0] == -(-sent.max() // 32)
    assert -(-received.max() // 32) <= hops[1] <= 1.15 * received.max() / 32


def test_even_traffic_is_direct():
    """12 tokens for every pair fill 3 hops of 4 slots exactly, so a relay could only cost more."""
    sender, receiver = np.nonzero(~np.eye(6, dtype=bool))
    stretches = split_over_relays(
        sender, receiver, np.full(30, 12), peers=6, groups=1, pair_slots=4, max_hops=99
    )
    assert stretches.direct.all() and stretches.hops == [(3, 0)]


def test_one_item_of_a_great_many_tokens_is_cut_into_rounds():
    stretches = split_over_relays(
        np.array([0]), np.array([2]), np.array([1000]), peers=4, groups=1, pair_slots=5, max_hops=4
    )
    assert len(stretches.hops) == 32 and stretches.tokens.sum() == 1000
    assert max(sum(legs) for legs in stretches.hops) <= 4
