"""Routes, executed token by token in plain loops: every token arrives, and the transposed direction is the inverse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.step_plan import place_items, plan_step

GRIDS = st.sampled_from([(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (1, 1, 3), (3, 2, 1)])
PER_TOKEN = {"vision": 4, "audio": 8}


def all_to_all(chunks: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """chunks[x, b] goes to the exchange rank with b in the place of a, and lands at [.., a]."""
    received = np.zeros_like(chunks)
    for a in range(shape[0]):
        for e in range(shape[1]):
            for n in range(shape[2]):
                for b in range(shape[0]):
                    received[(b * shape[1] + e) * shape[2] + n, a] = chunks[(a * shape[1] + e) * shape[2] + n, b]
    return received


def run(table, gather, pools, held_by, into, kept_by, shape):
    """One round: pools [ranks, W] of labels are read by the exchange ranks that hold them (0: nothing)."""
    chunks = np.zeros(table.shape, np.int64)
    for x, b, c in zip(*np.nonzero(table >= 0), strict=True):
        chunks[x, b, c] = pools[held_by[x], table[x, b, c]]
    received = all_to_all(chunks, shape).reshape(len(table), -1)
    for x, w in zip(*np.nonzero(gather >= 0), strict=True):
        assert into[kept_by[x], w] == 0, "a slot is filled twice"
        into[kept_by[x], w] = received[x, gather[x, w]]


@settings(max_examples=60, deadline=None)
@given(
    grid=GRIDS,
    seed=st.integers(0, 10_000),
    examples=st.integers(1, 10),
    pool=st.sampled_from([0, 16, 4096]),
    pair=st.sampled_from([3, 32, 4096]),
    mode=st.sampled_from(["phases", "none"]),
)
def test_every_token_arrives_and_every_gradient_returns(make, grid, seed, examples, pool, pair, mode):
    batch = make.batch(seed, examples, longest=128, text=5)
    spec = make.spec(batch, {"vision": grid, "audio": grid}, classes=2, mode=mode, pool=pool, pair=pair)
    plan = plan_step(batch, spec)
    language = plan.phases["language"]
    taken: set[tuple[int, int, int]] = set()
    for phase, per_token in PER_TOKEN.items():
        encoder, items, route = plan.phases[phase], batch.phases[phase], spec.routes[phase]
        shape = route.grid.shape
        on = [np.unravel_index(x, shape) for x in range(int(np.prod(shape)))]
        encoder_rank = [route.grid.encoder[a, e] for a, e, _ in on]
        language_rank = [route.grid.language[a, n] for a, _, n in on]

        made = np.zeros((encoder.pool.max(initial=-1) + 1, grid[0] * grid[1], route.encoder_pool), np.int64)
        wanted = np.zeros((language.pool.max() + 1, grid[0] * grid[2], route.language_pool), np.int64)
        label = 0
        for item in range(len(items.length)):
            m, home = encoder.microbatch[item], items.example[item]
            for token in range(items.tokens[item]):
                label += 1
                written = encoder.pool_offset[m] + encoder.offset[item] // per_token + token
                made[encoder.pool[m], encoder.rank[item], written] = label
                goal = int(language.pool[language.microbatch[home]]), int(language.rank[home])
                slot = int(plan.routes[phase].arrival[item]) + token
                assert (*goal, slot) not in taken
                taken.add((*goal, slot))
                wanted[(*goal, slot)] = label

        arrived, returned = np.zeros_like(wanted), np.zeros_like(made)
        for turn in plan.routes[phase].rounds:
            source, target = turn.source, turn.target
            run(turn.send, turn.pick, made[source], encoder_rank, arrived[target], language_rank, shape)
            run(turn.place, turn.back, wanted[target], language_rank, returned[source], encoder_rank, shape)
        assert np.array_equal(arrived, wanted)
        assert np.array_equal(returned, made)


def test_roomy_sizes_need_one_round_and_tiny_ones_many(make):
    batch = make.batch(3, 40, text=5)
    grids = {"vision": (4, 1, 1), "audio": (4, 1, 1)}
    roomy = plan_step(batch, make.spec(batch, grids, pool=1 << 14, pair=1 << 12))
    assert [len(route.rounds) for route in roomy.routes.values()] == [1, 1]
    assert not any(plan.pool.any() for plan in roomy.phases.values())
    tiny = plan_step(batch, make.spec(batch, grids, pool=0, pair=7))
    assert all(len(route.rounds) > 3 for route in tiny.routes.values())
    assert tiny.phases["vision"].pool.max() == tiny.phases["vision"].microbatches - 1
    assert tiny.phases["language"].pool.max() >= 1


def test_no_media_no_rounds(make):
    batch = make.batch(0, 6, media=0)
    plan = plan_step(batch, make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)}))
    assert all(route.rounds == () and len(route.arrival) == 0 for route in plan.routes.values())
    assert plan.phases["vision"].microbatches == 0


def test_pool_below_one_row_is_an_error(make):
    batch = make.batch(1, 12)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)})
    small = dataclasses.replace(spec.routes["vision"], encoder_pool=3)
    with pytest.raises(ValueError, match=r"encoder pool of phase 'vision' holds 3 tokens.*balance\.pool_slots"):
        plan_step(batch, dataclasses.replace(spec, routes=spec.routes | {"vision": small}))


def test_media_stay_at_home_without_balancing(make):
    """Encoder ranks beyond the language ranks take turns; fewer of them cover several language ranks."""
    batch = make.batch(5, 24)
    for shape in ((4, 2, 1), (4, 1, 2), (2, 2, 2), (8, 1, 1)):
        spec = make.spec(batch, {"vision": shape, "audio": shape}, mode="none")
        grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items(batch, spec.phases, grids, "none")
        ranks = shape[0] * shape[2]
        assert plans["language"].rank.tolist() == [p * ranks // 24 for p in range(24)]
        grid = grids["vision"]
        dealt: dict[int, list[int]] = {}
        for item, example in enumerate(batch.phases["vision"].example):
            block = int(np.argwhere(grid.language == plans["language"].rank[example])[0, 0])
            assert plans["vision"].rank[item] in grid.encoder[block]
            dealt.setdefault(block, []).append(int(plans["vision"].rank[item]))
        for block, order in dealt.items():
            assert order == [int(grid.encoder[block, turn % shape[1]]) for turn in range(len(order))]
