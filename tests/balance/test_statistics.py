"""What a plan says that it wastes: every statistic against plain loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import RowClass
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.statistics import all_flops, phase_statistics
from jaxmllm.balance.step_plan import plan_step


def test_statistics_against_plain_loops(make):
    """Every statistic of a phase with rows of one rank, from the loads [microbatches, ranks]."""
    batch = make.batch(11, 20)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    plan = plan_step(batch, spec)
    for name, phase in spec.phases.items():
        rows = plan.phases[name]
        items = batch.phases[name]
        load = np.zeros((rows.microbatches, phase.ranks))
        for item, length in enumerate(items.length):
            load[rows.microbatch[item], rows.rank[item]] += (
                phase.cost.linear * length + phase.cost.quadratic * length**2
            )
        slots = sum(int(capacity) for capacity in rows.capacity) * phase.ranks
        assert plan.statistics[f"{name}/real_token_fraction"] == pytest.approx(
            items.real.sum() / slots
        )
        assert plan.statistics[f"{name}/slots"] == slots
        assert plan.statistics[f"{name}/tokens"] == sum(int(real) for real in items.real)
        flops = sum(
            phase.cost.linear * int(real) + phase.cost.quadratic * int(real) ** 2
            for real in items.real
        )
        assert plan.statistics[f"{name}/flops"] == pytest.approx(flops)
        assert plan.statistics[f"{name}/max_over_mean"] == pytest.approx(
            load.sum(0).max() / load.sum(0).mean()
        )
        cost = phase.cost.linear * items.length + phase.cost.quadratic * items.length**2
        floor = max(load.sum(0).mean(), cost.max())
        assert plan.statistics[f"{name}/gap_to_floor"] == pytest.approx(load.sum(0).max() / floor)
        assert plan.statistics[f"{name}/idle_share"] == pytest.approx(
            1 - load.mean(1).sum() / load.max(1).sum()
        )
        assert plan.statistics[f"{name}/synchronised"] == pytest.approx(
            load.max(1).sum() / load.mean(1).sum()
        )


def test_statistics_of_shared_rows_against_plain_loops(make):
    """A shared row costs each of its ranks an equal part, and `over_ideal`
    counts padding as well."""
    ranks = 8
    batch = make.batch(5, 24)
    spec = make.spec(batch, {"vision": (ranks, 1, 1), "audio": (ranks, 1, 1)}).phases["vision"]
    longest = int(batch.phases["vision"].length.max())
    shared = RowClass(-(-longest // 4 // 8) * 8, 4)
    spec = dataclasses.replace(spec, classes=(shared, RowClass(48, 2), RowClass(64)))
    items = batch.phases["vision"]
    plan = assign(spec, items)
    assert set(plan.span.tolist()) > {4}
    statistics = phase_statistics(plan, items, spec)
    cost = spec.cost
    slowest = synchronised = shared_rows = gathered = 0
    rank_loads = np.zeros(ranks)
    item_shares = []
    for microbatch in range(plan.microbatches):
        span = int(plan.span[microbatch])
        capacity = int(plan.capacity[microbatch])
        loads = np.zeros(ranks)
        attention = np.zeros(ranks)
        for item in np.flatnonzero(plan.microbatch == microbatch):
            length = int(items.length[item])
            held_by = slice(plan.rank[item], plan.rank[item] + span)
            loads[held_by] += (cost.linear * length + cost.quadratic * length**2) / span
            attention[held_by] += cost.quadratic * length**2 / span
            item_shares.append((cost.linear * length + cost.quadratic * length**2) / span)
        rank_loads += loads
        synchronised += loads.max()
        slowest += cost.linear * capacity + attention.max()
        shared_rows += ranks // span if span > 1 else 0
        gathered += ranks * (span - 1) * capacity
    real = items.real.astype(float)
    ideal = (cost.linear * real + cost.quadratic * real**2).sum() / ranks
    assert statistics["vision/over_ideal"] == pytest.approx(slowest / ideal)
    slots = ranks * sum(plan.capacity.tolist())
    attention = sum(cost.quadratic * int(length) ** 2 for length in items.length)
    assert all_flops(plan, items, spec) == pytest.approx(cost.linear * slots + attention)
    assert statistics["vision/shared_rows"] == shared_rows
    rows_by_class = {name: rows for name, rows in statistics.items() if "/rows_of_" in name}
    classes = {f"{shared.capacity}x4", "48x2", "64"}
    assert rows_by_class.keys() == {f"vision/rows_of_{name}" for name in classes}
    assert rows_by_class["vision/rows_of_64"] == ranks * int((plan.span == 1).sum())
    assert sum(rows_by_class.values()) == statistics["vision/rows"]
    assert statistics["vision/gathered_slots"] == gathered
    assert statistics["vision/synchronised"] == pytest.approx(
        synchronised / rank_loads.mean(), 1e-4
    )
    assert statistics["vision/max_over_mean"] == pytest.approx(
        rank_loads.max() / rank_loads.mean(), 1e-4
    )
    floor = max(rank_loads.mean(), *item_shares)
    assert statistics["vision/gap_to_floor"] == pytest.approx(rank_loads.max() / floor, 1e-4)


def test_the_step_is_the_sum_of_its_phases(make):
    """Each phase counts by its share of the ideal time; FLOPs are spread over 4 ranks."""
    batch = make.batch(4, 20)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    plan = plan_step(batch, spec)
    ideal = {name: plan.statistics[f"{name}/flops"] / 4 for name in spec.phases}
    slowest = sum(plan.statistics[f"{name}/over_ideal"] * share for name, share in ideal.items())
    assert plan.statistics["step/over_ideal"] == pytest.approx(slowest / sum(ideal.values()))


def test_flops_of_a_large_model_are_not_scaled(make):
    """Costs are scaled to fit integers, but the FLOPs from which MFU is computed must not be."""
    batch = make.batch(2, 16)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)})
    large = dataclasses.replace(spec.phases["language"], cost=ItemCost(5 * 10**14, 10**11))
    statistics = plan_step(
        batch, dataclasses.replace(spec, phases=spec.phases | {"language": large})
    ).statistics
    real = [int(n) for n in batch.phases["language"].real]
    assert statistics["language/flops"] == pytest.approx(
        sum(5 * 10**14 * n + 10**11 * n * n for n in real)
    )


def test_gap_and_idle_share_of_a_giant(make):
    """One item dwarfs all others: it is the floor, and three of four ranks wait for it."""
    batch = make.batch(3, 12, media=0)
    length = batch.phases["language"].length.copy()
    length[4] = 100_000
    language = dataclasses.replace(batch.phases["language"], length=length, real=length)
    batch = dataclasses.replace(batch, phases=batch.phases | {"language": language})
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)})
    statistics = plan_step(batch, spec).statistics
    assert statistics["language/gap_to_floor"] == pytest.approx(1)
    assert statistics["language/idle_share"] > 0.7
    assert "vision/gap_to_floor" not in statistics
