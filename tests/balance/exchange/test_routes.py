"""Routes, executed token by token in plain loops: every token arrives, and the transposed
direction is the inverse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange.placement import place_items_near
from jaxmllm.balance.exchange.routes import plan_routes
from jaxmllm.balance.exchange.tables import BACKENDS, backend_of, route_tables
from jaxmllm.balance.records import StepPlan, shared_exchange
from jaxmllm.balance.step_plan import place_items, plan_step
from jaxmllm.balance.validate_plan import validate

GRIDS = st.sampled_from(
    [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (1, 1, 3), (3, 2, 1)]
)
WIDER_GRIDS = st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 8, 2)])
OF_PLAIN_LOOPS = ["padded", "ragged"]  # test_backends.py has what holds for all
PER_TOKEN = {"vision": 4, "audio": 8}


def run(source, hops, gather, held_by, target, kept_by, spec, buffer_slots):
    """Execute one round in one direction, token by token.

    Pools are arrays [ranks, W] of labels, where 0 marks an empty slot. `held_by` and `kept_by` map
    an exchange rank to the rank that holds its pool: several exchange ranks may share one rank, and
    what they deliver there must not meet in one slot.
    """
    shape = spec.grid.shape
    buffer = np.zeros((len(held_by), buffer_slots), np.int64)

    def at(x, slot):
        slots = source.shape[1]
        return source[held_by[x], slot] if slot < slots else buffer[x, slot - slots]

    for hop_index, hop in enumerate(hops):
        deliveries = []
        for x in range(len(held_by)):
            # Ranks exchange only along the first axis of the grid, with the peers that share their
            # encoder and language coordinates.
            a, e, n = np.unravel_index(x, shape)
            for b in range(shape[0]):
                y = int(np.ravel_multi_index((b, e, n), shape))
                # A padded hop sends one chunk of `pair_slots` to each peer; a ragged hop lists the
                # bounds of its chunks.
                if hop.sizes is None:
                    buffer_start = (hop_index * shape[0] + a) * spec.pair_slots
                    chunk = hop.index[x, b]
                else:
                    chunk_start, chunk_size, buffer_start, _ = hop.sizes[x, :, b]
                    assert chunk_size == hop.sizes[y, 3, a]
                    chunk = hop.index[x, chunk_start : chunk_start + chunk_size]
                deliveries += [
                    (y, buffer_start + c, at(x, slot)) for c, slot in enumerate(chunk) if slot >= 0
                ]
        for y, slot, label in deliveries:
            assert buffer[y, slot] == 0, "a slot is received twice"
            buffer[y, slot] = label
    for y, slot in zip(*np.nonzero(gather >= 0), strict=True):
        index = gather[y, slot]
        label = (
            buffer[y, index] if index < buffer_slots else source[held_by[y], index - buffer_slots]
        )
        assert target[kept_by[y], slot] == 0, "a slot is filled twice"
        target[kept_by[y], slot] = label


def arrivals(route):
    """Language pool slot of every (item, token), as the route records it."""
    pieces = zip(route.item, route.skipped, route.tokens, route.arrival, strict=True)
    return {
        (int(item), int(skipped) + token): int(arrival) + token
        for item, skipped, tokens, arrival in pieces
        for token in range(tokens)
    }


@settings(max_examples=60, deadline=None)
@given(
    grid=GRIDS,
    same=st.booleans(),
    seed=st.integers(0, 10_000),
    examples=st.integers(1, 10),
    media=st.integers(0, 3),
    pool=st.sampled_from([0, 16, 4096]),
    pair=st.sampled_from([1, 3, 32]),
    hops=st.sampled_from([2, 3, 7]),
    backend=st.sampled_from(OF_PLAIN_LOOPS),
    node=st.sampled_from([None, 1, 2]),
    mode=st.sampled_from(["phases", "none"]),
)
def test_every_token_arrives_and_every_gradient_returns(
    make, grid, same, seed, examples, media, pool, pair, hops, backend, node, mode
):
    """Both encoders share pools and exchange where their grids are equal."""
    batch = make.batch(seed, examples, media, longest=128, text=5)
    grids = {"vision": grid, "audio": grid if same else (grid[0], 1, grid[2])}
    spec = make.spec(
        batch,
        grids,
        classes=2,
        mode=mode,
        pool=pool,
        pair=pair,
        hops=hops,
        backend=backend,
        node=node,
    )
    owner_of = shared_exchange(spec.routes)
    shared = same or grids["vision"] == grids["audio"]
    assert owner_of == {"vision": "vision", "audio": "vision" if shared else "audio"}
    run_all_rounds(plan_step(batch, spec), batch, spec)


@settings(max_examples=60, deadline=None)
@given(
    grid=WIDER_GRIDS,
    same=st.booleans(),
    spans=st.sampled_from([(1,), (2,), (4,), (8,), (1, 2), (2, 8), (1, 2, 4, 8)]),
    seed=st.integers(0, 10_000),
    examples=st.integers(1, 10),
    pool=st.sampled_from([0, 16, 4096]),
    pair=st.sampled_from([1, 3, 32]),
    hops=st.sampled_from([2, 7]),
    backend=st.sampled_from(OF_PLAIN_LOOPS),
    placed=st.booleans(),
)
def test_tokens_of_shared_rows_leave_and_reach_the_ranks_that_own_them(
    make, grid, same, spans, seed, examples, pool, pair, hops, backend, placed
):
    """Rows of every span, alone and mixed, in any legal plan: some items lie on both sides of a cut
    between ranks, and some groups of ranks hold nothing."""
    batch = make.batch(seed, examples, longest=128, text=5)
    grids = {"vision": grid, "audio": grid if same else (grid[0], 1, grid[2])}
    sizes = {"pool": pool, "pair": pair, "hops": hops, "backend": backend, "node": 2}
    spec = make.with_spans(make.spec(batch, grids, **sizes), spans)
    plans = {
        name: make.scattered(seed, batch.phases[name], phase) for name, phase in spec.phases.items()
    }
    if placed:
        encoder_grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items_near(plans, batch, spec.phases, encoder_grids, spec.nodes)
    phases, routes = plan_routes(plans, batch, spec)
    plan = StepPlan(phases, routes)
    validate(plan, batch, spec)
    run_all_rounds(plan, batch, spec)


def run_all_rounds(plan, batch, spec):
    """Number every token of a batch, run the rounds of its plan in plain loops, and compare both
    directions.

    The expected pools follow from the records of the plan alone: an encoder writes a token where
    the item's offset puts it, and the language phase reads it where its route says that it arrives.
    """
    language = plan.phases["language"]
    owner_of = shared_exchange(spec.routes)
    hops = spec.routes["vision"].hops
    filled_slots: set[tuple[int, int, int]] = set()
    label = 0
    for owner in dict.fromkeys(owner_of.values()):
        route = spec.routes[owner]
        shape = route.grid.shape
        forward_slots, backward_slots = backend_of(route).buffer_slots(route)
        coordinates = [np.unravel_index(x, shape) for x in range(int(np.prod(shape)))]
        encoder_rank = [route.grid.encoder[a, e] for a, e, _ in coordinates]
        language_rank = [route.grid.language[a, n] for a, _, n in coordinates]
        phases = [phase for phase in spec.routes if owner_of[phase] == owner]
        pool_count = max(plan.phases[phase].pool.max(initial=-1) for phase in phases) + 1
        encoder_pools = np.zeros(
            (pool_count, route.grid.encoder.size, route.encoder_pool), np.int64
        )
        language_pools = np.zeros(
            (language.pool.max() + 1, route.grid.language.size, route.language_pool), np.int64
        )
        for phase in phases:
            encoder = plan.phases[phase]
            items = batch.phases[phase]
            slot_of = arrivals(plan.routes[phase])
            for item in range(len(items.length)):
                microbatch = encoder.microbatch[item]
                example = items.example[item]
                n = language.microbatch[example]
                tokens_of_rank = encoder.capacity[microbatch] // PER_TOKEN[phase]
                for token in range(items.tokens[item]):
                    label += 1
                    position = encoder.offset[item] // PER_TOKEN[phase] + token
                    rank = encoder.rank[item] + position // tokens_of_rank
                    pool_slot = encoder.pool_offset[microbatch] + position % tokens_of_rank
                    assert encoder_pools[encoder.pool[microbatch], rank, pool_slot] == 0
                    encoder_pools[encoder.pool[microbatch], rank, pool_slot] = label
                    sequence_slot = language.offset[example] + items.slot[item] + token
                    target = (
                        int(language.pool[n]),
                        int(language.rank[example] + sequence_slot // language.capacity[n]),
                    )
                    # The arrival is free to be any slot of the pool that the token's language
                    # microbatch reads, but no two tokens may share it.
                    slot = slot_of[item, token]
                    assert (*target, slot) not in filled_slots
                    filled_slots.add((*target, slot))
                    language_pools[(*target, slot)] = label

        delivered_tokens = np.zeros_like(language_pools)
        delivered_gradients = np.zeros_like(encoder_pools)
        for round_ in plan.routes[owner].rounds:
            tables = route_tables(round_, route, range(len(coordinates)))
            assert len(tables.send_forward) == len(tables.send_backward) == round_.hops <= hops
            encoder_source = (encoder_pools[round_.source], encoder_rank)
            language_source = (language_pools[round_.target], language_rank)
            language_target = (delivered_tokens[round_.target], language_rank)
            encoder_target = (delivered_gradients[round_.source], encoder_rank)
            run(
                encoder_source[0],
                tables.send_forward,
                tables.gather_forward,
                encoder_source[1],
                *language_target,
                route,
                forward_slots,
            )
            run(
                language_source[0],
                tables.send_backward,
                tables.gather_backward,
                language_source[1],
                *encoder_target,
                route,
                backward_slots,
            )
        assert np.array_equal(delivered_tokens, language_pools)
        assert np.array_equal(delivered_gradients, encoder_pools)
    # Phases that share an exchange have their rounds in the route of its owner.
    assert not any(plan.routes[phase].rounds for phase, owner in owner_of.items() if phase != owner)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_host_makes_the_tables_of_its_own_ranks(make, backend):
    """Its tables are rows of the tables of all ranks, for every backend."""
    batch = make.batch(4, 24, text=5)
    grids = {"vision": (4, 2, 1), "audio": (4, 1, 1)}
    spec = make.spec(batch, grids, pool=4096, pair=5, hops=40, backend=backend)
    plan = plan_step(batch, spec)
    for round_ in plan.routes["vision"].rounds:
        all_tables = route_tables(round_, spec.routes["vision"], range(8))
        # Two ranks, out of order: a host's local ranks need not be sorted.
        local_tables = route_tables(round_, spec.routes["vision"], (6, 1))
        assert len(all_tables.send_forward) == len(local_tables.send_forward) > 0
        for name in ("gather_forward", "gather_backward"):
            np.testing.assert_array_equal(
                getattr(local_tables, name), getattr(all_tables, name)[[6, 1]]
            )
        local_hops = (*local_tables.send_forward, *local_tables.send_backward)
        all_hops = (*all_tables.send_forward, *all_tables.send_backward)
        for local_hop, full_hop in zip(local_hops, all_hops, strict=True):
            for local_array, full_array in zip(local_hop.arrays, full_hop.arrays, strict=True):
                np.testing.assert_array_equal(local_array, full_array[[6, 1]])


@pytest.mark.parametrize("backend", OF_PLAIN_LOOPS)
def test_statistics_of_an_exchange_against_plain_loops(make, backend):
    """Tokens, those that change their rank and those that change their node,
    counted item by item."""
    batch = make.batch(9, 40)
    grids = {"vision": (4, 1, 1), "audio": (4, 1, 1)}
    spec = make.spec(batch, grids, pool=1 << 14, pair=9, backend=backend, node=2)
    plan = plan_step(batch, spec)
    language = plan.phases["language"]
    total_tokens = 0
    moved_tokens = 0
    node_tokens = 0
    for phase in grids:
        grid = spec.routes[phase].grid
        items = batch.phases[phase]
        for item, tokens in enumerate(items.tokens.tolist()):
            source = int(plan.phases[phase].rank[item])
            target = int(language.rank[items.example[item]])
            total_tokens += tokens
            moved_tokens += tokens * bool(
                np.argwhere(grid.encoder == source)[0, 0]
                != np.argwhere(grid.language == target)[0, 0]
            )
            node_tokens += tokens * (source // 2 != target // 2)
    statistics = {
        key.removeprefix("route/vision/"): value
        for key, value in plan.statistics.items()
        if "route/" in key
    }
    assert (statistics["tokens"], statistics["moved_tokens"], statistics["node_tokens"]) == (
        total_tokens,
        moved_tokens,
        node_tokens,
    )
    # With two nodes, half of the tokens would leave their node under an arbitrary placement.
    assert statistics["node_tokens_over_arbitrary"] == pytest.approx(
        node_tokens / (total_tokens / 2)
    )
    hops = sum(round_.hops for round_ in plan.routes["vision"].rounds)
    # A padded hop moves 9 slots between each of the 4 ranks and its 3 peers; a ragged one moves the
    # tokens alone.
    slots_moved = hops * 4 * 3 * 9 if backend == "padded" else moved_tokens
    assert (statistics["hops"], statistics["slots_moved"]) == (hops, slots_moved)
    assert statistics["slots_over_moved"] == pytest.approx(slots_moved / moved_tokens)
    assert statistics["slots_over_tokens"] == pytest.approx(slots_moved / total_tokens)


def test_roomy_sizes_need_one_round_and_tiny_ones_many(make):
    """The rounds of both encoders are in the route of vision, which owns their shared exchange."""
    batch = make.batch(3, 40, text=5)
    grids = {"vision": (4, 1, 1), "audio": (4, 1, 1)}
    roomy_plan = plan_step(batch, make.spec(batch, grids, pool=1 << 14, pair=1 << 7))
    assert [len(route.rounds) for route in roomy_plan.routes.values()] == [1, 0]
    assert not any(plan.pool.any() for plan in roomy_plan.phases.values())
    tiny_plan = plan_step(batch, make.spec(batch, grids, pool=0, pair=7, hops=2))
    assert len(tiny_plan.routes["vision"].rounds) > 6
    assert tiny_plan.phases["audio"].pool.max() > tiny_plan.phases["vision"].pool.max() > 0
    assert tiny_plan.phases["language"].pool.max() >= 1


def test_no_media_no_rounds(make):
    batch = make.batch(0, 6, media=0)
    plan = plan_step(batch, make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)}))
    assert all(route.rounds == () and len(route.arrival) == 0 for route in plan.routes.values())
    assert plan.phases["vision"].microbatches == 0


def test_pool_below_one_row_is_an_error(make):
    batch = make.batch(1, 12)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)})
    small_route = dataclasses.replace(spec.routes["vision"], encoder_pool=3)
    with pytest.raises(
        ValueError, match=r"encoder pool of phase 'vision' holds 3 tokens.*balance\.pool_slots"
    ):
        plan_step(batch, dataclasses.replace(spec, routes=spec.routes | {"vision": small_route}))


def test_media_stay_at_home_without_balancing(make):
    """The encoder ranks of a block take turns where they outnumber its language ranks; where they
    are fewer, each serves several language ranks."""
    batch = make.batch(5, 24)
    for shape in ((4, 2, 1), (4, 1, 2), (2, 2, 2), (8, 1, 1)):
        spec = make.spec(batch, {"vision": shape, "audio": shape}, mode="none")
        grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items(batch, spec.phases, grids, "none")
        ranks = shape[0] * shape[2]
        assert plans["language"].rank.tolist() == [p * ranks // 24 for p in range(24)]
        grid = grids["vision"]
        ranks_of_block: dict[int, list[int]] = {}
        for item, example in enumerate(batch.phases["vision"].example):
            block = int(np.argwhere(grid.language == plans["language"].rank[example])[0, 0])
            assert plans["vision"].rank[item] in grid.encoder[block]
            ranks_of_block.setdefault(block, []).append(int(plans["vision"].rank[item]))
        for block, encoder_ranks in ranks_of_block.items():
            assert encoder_ranks == [
                int(grid.encoder[block, index % shape[1]]) for index in range(len(encoder_ranks))
            ]
