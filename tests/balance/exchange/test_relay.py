"""A dealt exchange: every token gets there, and no lane carries two."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange.relay import _most_dealt, deal, ways
from jaxmllm.balance.records import RouteRound


def random_traffic(seed: int, places: int, planes: int, items: int, largest: int):
    """Items that leave their exchange rank, ordered by sender."""
    random = np.random.default_rng(seed)
    sender = random.integers(0, places * planes, items)
    receiver = (sender // planes + random.integers(1, places, items)) % places * planes + sender % planes
    order = np.lexsort((receiver, sender))
    sender, receiver = sender[order], receiver[order]
    return sender, receiver, random.integers(1, largest + 1, items)


def rounds_of(sender, receiver, tokens, dealt):
    """The rounds as the plan holds them; a token starts and arrives at its number in the line of all tokens."""
    line = np.cumsum(tokens) - tokens
    for number, (early, late) in enumerate(dealt.hops):
        own = dealt.round == number
        item = dealt.item[own]
        start = line[item] + dealt.first[own]
        ends = sender[item], receiver[item]
        columns = dealt.tokens[own], start, start, *ends, dealt.ordinal[own], dealt.direct[own]
        yield RouteRound(0, 0, early, late, dealt.direct_tokens, *columns)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    places=st.integers(2, 6),
    planes=st.integers(1, 3),
    items=st.integers(0, 30),
    largest=st.sampled_from([1, 5, 60]),
    slots=st.sampled_from([1, 5, 64]),
    most=st.sampled_from([2, 3, 16]),
)
def test_every_token_gets_there_and_no_lane_carries_two(seed, places, planes, items, largest, slots, most):
    sender, receiver, tokens = random_traffic(seed, places, planes, items, largest)
    dealt = deal(sender, receiver, tokens, places, planes, slots, most)
    owner = np.repeat(np.arange(items), tokens)
    got = []
    for round_ in rounds_of(sender, receiver, tokens, dealt):
        assert round_.hops <= most
        taken = set()
        way = ways(round_, places, planes, slots, np.arange(places * planes))
        for n, token in enumerate(way.start.tolist()):
            got.append(token)
            s, relay, r = int(way.sender[n]), int(way.relay[n]), int(way.receiver[n])
            assert (s, r) == (sender[owner[token]], receiver[owner[token]])
            assert s % planes == relay % planes == r % planes and relay != s
            legs = [(s, relay, int(way.lane[n]))]
            if relay != r:
                legs.append((relay, r, int(way.onward[n])))
                assert legs[0][2] // slots < legs[1][2] // slots
            for leg in legs:
                assert leg not in taken and 0 <= leg[2] < round_.hops * slots
                taken.add(leg)
    assert sorted(got) == list(range(int(tokens.sum())))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), colors=st.integers(1, 9), items=st.integers(1, 12), largest=st.integers(1, 30))
def test_the_most_tokens_of_one_color_are_counted_exactly(seed, colors, items, largest):
    random = np.random.default_rng(seed)
    group, color = random.integers(0, 3, items), random.integers(0, colors, items)
    tokens = random.integers(1, largest + 1, items)
    counts = np.zeros((3, colors), np.int64)
    for item in range(items):
        for token in range(tokens[item]):
            counts[group[item], (color[item] + token) % colors] += 1
    found, most = _most_dealt(group, color, tokens, colors)
    assert found.tolist() == np.unique(group).tolist()
    assert most.tolist() == counts[found].max(axis=1).tolist()


def test_ways_of_some_ranks_are_those_of_all():
    sender, receiver, tokens = random_traffic(3, 5, 2, 25, 40)
    dealt = deal(sender, receiver, tokens, 5, 2, 4, 99)
    (round_,) = rounds_of(sender, receiver, tokens, dealt)

    def through(rank, local):
        way = ways(round_, 5, 2, 4, local)
        ours = (way.relay == rank) | (way.receiver == rank)
        onward = np.where(way.relay == way.receiver, -1, way.onward)
        columns = (way.start, way.sender, way.relay, way.receiver, way.lane, onward)
        return sorted(zip(*(column[ours].tolist() for column in columns), strict=True))

    for rank in range(10):
        local = np.where(np.arange(10) == rank, 0, -1)
        assert through(rank, local) == through(rank, np.arange(10))


def test_hops_are_what_the_busiest_ranks_need():
    """Items of one size to random receivers, so few pairs have traffic: dealing fills nearly all of the busiest."""
    sender, receiver, tokens = random_traffic(0, 32, 1, 200, 1)
    dealt = deal(sender, receiver, tokens * 64, 32, 1, 1, 1000)
    (hops,) = dealt.hops
    out, into = np.bincount(sender) * 64, np.bincount(receiver) * 64
    assert dealt.direct_tokens == 0 and not dealt.direct.any()
    assert hops[0] == -(-out.max() // 32)
    assert -(-into.max() // 32) <= hops[1] <= 1.15 * into.max() / 32


def test_even_traffic_goes_straight():
    sender, receiver = np.nonzero(~np.eye(6, dtype=bool))
    dealt = deal(sender, receiver, np.full(30, 12), 6, 1, 4, 99)
    assert dealt.direct.all() and dealt.hops == [(3, 0)]


def test_one_item_of_a_great_many_tokens_is_cut_into_rounds():
    dealt = deal(np.array([0]), np.array([2]), np.array([1000]), 4, 1, 5, 4)
    assert len(dealt.hops) == 32 and dealt.tokens.sum() == 1000
    assert max(early + late for early, late in dealt.hops) <= 4
