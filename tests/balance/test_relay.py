"""Legs of a padded exchange: every token gets there, and no lane carries two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.relay import spread


def random_volume(seed: int, places: int, planes: int, density: float, largest: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    wanted = random.integers(1, largest + 1, (places * planes, places))
    return wanted * (random.random(wanted.shape) < density)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    places=st.integers(1, 6),
    planes=st.integers(1, 3),
    density=st.sampled_from([0.0, 0.2, 0.8]),
    slots=st.sampled_from([1, 5, 64]),
    most=st.sampled_from([1, 3, 16]),
)
def test_every_token_gets_there_and_no_lane_carries_two(seed, places, planes, density, slots, most):
    volume = random_volume(seed, places, planes, density, 40)
    legs, hops = spread(volume, slots, most)
    wanted = {(x, b): int(n) for (x, b), n in np.ndenumerate(volume) if n and x // planes != b}
    taken: set[tuple[int, int, int, int]] = set()
    got = dict.fromkeys(wanted, 0)
    assert list(legs.pair) == sorted(legs.pair)
    for pair, relay, tokens, number, lane, onward in zip(*vars(legs).values(), strict=True):
        sender, receiver = divmod(int(pair), places)
        assert tokens > 0 and hops[number] <= most
        got[sender, receiver] += int(tokens)
        for token in range(tokens):
            taken_lanes = [(number, sender, relay, lane + token)]
            if relay != receiver:
                assert relay != sender // planes
                at = relay * planes + sender % planes
                taken_lanes.append((number, at, receiver, onward + token))
                assert (lane + token) // slots < (onward + token) // slots
            for each in map(tuple, taken_lanes):
                assert each not in taken and 0 <= each[3] < hops[number] * slots
                taken.add(each)
    assert got == wanted


def test_uneven_traffic_costs_little_more_than_the_bound():
    """Items of one size to random receivers: at best, tokens beyond the slots of their pair travel twice."""
    random = np.random.default_rng(0)
    volume = np.zeros((32, 32), np.int64)
    for sender in range(32):
        np.add.at(volume[sender], random.integers(0, 32, 16), 64)
    np.fill_diagonal(volume, 0)
    legs, hops = spread(volume, 6, 99)
    lanes = sum(hops) * 6
    busiest = max(volume.sum(axis=0).max(), volume.sum(axis=1).max())
    assert volume.max() > 3 * lanes  # what a direct exchange would need
    assert lanes * 31 < 1.7 * busiest
    assert legs.tokens[legs.relay != legs.pair % 32].sum() < 0.6 * volume.sum()


@pytest.mark.parametrize("places", [2, 3])
def test_too_few_places_for_relays_still_work(places):
    volume = np.zeros((places, places), np.int64)
    volume[0, 1] = 100
    legs, hops = spread(volume, 10, 16)
    assert legs.tokens.sum() == 100
    assert hops == [10] if places == 2 else sum(hops) < 10
