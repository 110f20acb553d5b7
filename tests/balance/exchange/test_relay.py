"""A relayed exchange: every token gets there, and no slot carries two."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange.relay import _most_of_one_color, split_over_relays, token_paths
from jaxmllm.balance.records import RouteRound


def random_traffic(seed: int, peers: int, groups: int, items: int, largest: int):
    """Items that leave their exchange rank, ordered by sender."""
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
    """The rounds as the plan holds them; a token starts and arrives at its number in the line of all tokens."""
    line = np.cumsum(tokens) - tokens
    for number, (first_leg, second_leg) in enumerate(stretches.hops):
        own = stretches.round == number
        item = stretches.item[own]
        start = line[item] + stretches.start[own]
        ends = sender[item], receiver[item]
        columns = (
            stretches.tokens[own],
            start,
            start,
            *ends,
            stretches.ordinal[own],
            stretches.direct[own],
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
    sender, receiver, tokens = random_traffic(seed, peers, groups, items, largest)
    sizes = {"peers": peers, "groups": groups, "pair_slots": slots}
    stretches = split_over_relays(sender, receiver, tokens, **sizes, max_hops=most)
    owner = np.repeat(np.arange(items), tokens)
    got = []
    for round_ in rounds_of(sender, receiver, tokens, stretches):
        assert round_.hops <= most
        taken = set()
        way = token_paths(round_, **sizes, local=np.arange(peers * groups))
        for n, token in enumerate(way.start.tolist()):
            got.append(token)
            s = int(way.sender[n])
            relay = int(way.relay[n])
            r = int(way.receiver[n])
            assert (s, r) == (sender[owner[token]], receiver[owner[token]])
            assert s % groups == relay % groups == r % groups and relay != s
            legs = [(s, relay, int(way.send_slot[n]))]
            if relay != r:
                legs.append((relay, r, int(way.relay_slot[n])))
                assert legs[0][2] // slots < legs[1][2] // slots
            for leg in legs:
                assert leg not in taken and 0 <= leg[2] < round_.hops * slots
                taken.add(leg)
    assert sorted(got) == list(range(int(tokens.sum())))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    colors=st.integers(1, 9),
    items=st.integers(1, 12),
    largest=st.integers(1, 30),
)
def test_the_most_tokens_of_one_color_are_counted_exactly(seed, colors, items, largest):
    random = np.random.default_rng(seed)
    group = random.integers(0, 3, items)
    color = random.integers(0, colors, items)
    tokens = random.integers(1, largest + 1, items)
    counts = np.zeros((3, colors), np.int64)
    for item in range(items):
        for token in range(tokens[item]):
            counts[group[item], (color[item] + token) % colors] += 1
    found, most = _most_of_one_color(group, color, tokens, colors=colors)
    assert found.tolist() == np.unique(group).tolist()
    assert most.tolist() == counts[found].max(axis=1).tolist()


def test_paths_of_some_ranks_are_those_of_all():
    sender, receiver, tokens = random_traffic(3, 5, 2, 25, 40)
    sizes = {"peers": 5, "groups": 2, "pair_slots": 4}
    stretches = split_over_relays(sender, receiver, tokens, **sizes, max_hops=99)
    (round_,) = rounds_of(sender, receiver, tokens, stretches)

    def through(rank, local):
        way = token_paths(round_, **sizes, local=local)
        ours = (way.relay == rank) | (way.receiver == rank)
        relay_slot = np.where(way.relay == way.receiver, -1, way.relay_slot)
        columns = (way.start, way.sender, way.relay, way.receiver, way.send_slot, relay_slot)
        return sorted(zip(*(column[ours].tolist() for column in columns), strict=True))

    for rank in range(10):
        local = np.where(np.arange(10) == rank, 0, -1)
        assert through(rank, local) == through(rank, np.arange(10))


def test_what_stays_on_its_rank_passes_no_other():
    stays = np.array([0, 1, 2, 3])
    columns = (np.full(4, 9), stays * 9, stays * 9, stays, stays, 0 * stays, stays < 0)
    round_ = RouteRound(0, 0, 1, 1, 0, *columns)
    local = np.array([-1, -1, 0, -1])
    way = token_paths(round_, peers=4, groups=1, pair_slots=9, local=local)
    assert way.start.tolist() == list(range(18, 27))


def test_hops_are_what_the_busiest_ranks_need():
    """Items of one size to random receivers, so few pairs have traffic: relays fill nearly all of the busiest."""
    sender, receiver, tokens = random_traffic(0, 32, 1, 200, 1)
    stretches = split_over_relays(
        sender, receiver, tokens * 64, peers=32, groups=1, pair_slots=1, max_hops=1000
    )
    (hops,) = stretches.hops
    out = np.bincount(sender) * 64
    into = np.bincount(receiver) * 64
    assert stretches.direct_tokens == 0 and not stretches.direct.any()
    assert hops[0] == -(-out.max() // 32)
    assert -(-into.max() // 32) <= hops[1] <= 1.15 * into.max() / 32


def test_even_traffic_is_direct():
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
