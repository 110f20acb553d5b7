"""How large batches must be for phases to have the same best split of devices in every batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.cluster.profile import (
    CHEAP,
    DRAWS,
    best_split,
    enough,
    profile,
    smallest_batch,
    split_time,
)


def lognormal(ratio, seed=0):
    """Draw independent loads of two phases; the mean of the first is `ratio` times the second's."""
    random = np.random.default_rng(seed)
    sigmas = np.array([1.0, 0.7])
    means = np.log([ratio, 1.0]) - sigmas**2 / 2

    def draw(samples):
        return np.array(
            [random.lognormal(m, s, samples).sum() for m, s in zip(means, sigmas, strict=True)]
        )

    return draw


def test_draws():
    """The fewest of which a case of 5 % is missed by less than 5 %: 0.95 ** 59 < 0.05."""
    assert DRAWS == 59


@given(
    loads=st.lists(st.floats(0.01, 100), min_size=1, max_size=3),
    more=st.integers(0, 6),
)
def test_a_split_is_the_best_there_is(loads, more):
    """Against a search over every split."""
    devices = len(loads) + more
    splits = (
        split
        for split in itertools.product(range(1, devices + 1), repeat=len(loads))
        if sum(split) == devices
    )
    best = min(split_time(loads, split) for split in splits)
    split = best_split(loads, devices)
    assert sum(split) == devices and split_time(loads, split) == pytest.approx(best)


def test_too_few_devices():
    with pytest.raises(ValueError, match="1 devices for 2 components"):
        best_split([1.0, 2.0], 1)


def test_loads_apart_from_a_tie_settle():
    # 1.29 is far from the ratios at which another split of 16 devices becomes the best
    *smaller, settled = smallest_batch(lognormal(1.29), 16)
    assert settled.settled and settled.splits == ((9, 7),) and settled.worst_regret == 0
    assert 512 <= settled.samples <= 4096 and not any(profiled.settled for profiled in smaller)
    assert settled.line == f"batches of {settled.samples} examples agree on 9 : 7 devices"


def test_near_a_tie_nothing_settles_and_it_does_not_matter():
    # At 1.135, 8 : 8 and 9 : 7 are nearly equally good
    profiles = smallest_batch(lognormal(1.135), 16)
    assert [profiled.samples for profiled in profiles] == [512 << power for power in range(8)]
    assert not any(profiled.settled for profiled in profiles)
    assert all(profiled.worst_regret <= CHEAP for profiled in profiles[1:])
    chosen = enough(profiles)
    assert chosen is not None and chosen.samples <= 1024 and "or" in chosen.line


def test_a_bad_split_has_its_price():
    loads = iter([np.array([1.0, 7.0])] * (DRAWS - 1) + [np.array([7.0, 1.0])])
    profiled = profile(lambda _: next(loads), 8, 1)
    assert profiled.splits == ((1, 7), (7, 1)) and profiled.worst_regret > 5
    assert enough([profiled]) is None
