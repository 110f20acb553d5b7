"""Figures of the balance report, against statistics of the plans that it draws."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.tools import balance_figures as figures


def test_the_table_has_the_statistics_of_the_plans(compared, balance):
    plans = {
        spec.mode: plan_step(compared.items, spec).statistics
        for spec in (compared.before, compared.after)
    }
    phase_plans = {
        spec.mode: plan_step(compared.items, spec).phases
        for spec in (compared.before, compared.after)
    }
    table = figures.table(balance.views)
    assert [row[:2] for row in table[:-2]] == [
        [p, m] for p in ("vision", "audio", "language") for m in plans
    ]
    assert any(" of 4" in row[-2] for row in table), "some rows are shared"
    for (
        phase,
        mode,
        over_ideal,
        gap_to_floor,
        max_over_mean,
        synchronised,
        rows,
        real_share,
        idle_share,
        spans,
        gathered,
    ) in table[:-2]:
        expected = {name.removeprefix(f"{phase}/"): value for name, value in plans[mode].items()}
        # Tolerances are half of the last digit that the table shows, and a little more
        assert float(over_ideal) == pytest.approx(expected["over_ideal"], abs=6e-4)
        assert float(max_over_mean) == pytest.approx(expected["max_over_mean"], abs=6e-4)
        assert float(gap_to_floor) == pytest.approx(expected["gap_to_floor"], abs=6e-4)
        assert float(synchronised) == pytest.approx(expected["synchronised"], abs=6e-4)
        assert int(rows) == expected["microbatches"]
        counts = Counter(phase_plans[mode][phase].span.tolist())
        assert spans == ", ".join(f"{counts[span]} of {span}" for span in (4, 2, 1) if counts[span])
        slot_bytes = compared.key_value_bytes[phase]
        assert float(gathered) == pytest.approx(
            expected["gathered_slots"] * slot_bytes / 1e6, abs=0.06
        )
        assert float(real_share.removesuffix(" %")) == pytest.approx(
            100 * expected["real_token_fraction"], abs=0.06
        )
        assert float(idle_share.removesuffix(" %")) == pytest.approx(
            100 * (1 - 1 / expected["synchronised"]), abs=0.06
        )
    for row, statistics in zip(table[-2:], plans.values(), strict=True):
        assert float(row[2]) == pytest.approx(statistics["step/over_ideal"], abs=6e-4)
        gathered_megabytes = [float(cells[-1]) for cells in table[:-2] if cells[1] == row[1]]
        assert float(row[-1]) == pytest.approx(sum(gathered_megabytes), abs=0.2)


def test_the_exchange_is_told_by_mode(compared, balance):
    """All four ranks are in one node, so no token changes node.

    Without balancing, items stay with their example and change no rank.
    """
    table = figures.route_table(balance.routes)
    tokens = sum(int(compared.items.phases[phase].tokens.sum()) for phase in ("vision", "audio"))
    assert [row[0] for row in table] == ["none", "phases"]
    assert all(
        float(row[1]) == pytest.approx(tokens * compared.token_bytes / 1e6, abs=0.06)
        for row in table
    )
    moved_tokens = plan_step(compared.items, compared.after).statistics["route/vision/moved_tokens"]
    assert table[0][2] == "-" and float(table[1][2].removesuffix(" %")) == pytest.approx(
        100 * moved_tokens / tokens, abs=0.06
    )
    assert [row[3:5] for row in table] == [["-", "-"]] * 2
    assert float(table[1][5]) >= 1


def test_what_is_drawn_adds_up_to_the_batch(compared, balance):
    for views in balance.views.values():
        for phase, view in views.items():
            items = compared.items.phases[phase]
            spec = compared.after.phases[phase]
            assert view.real.sum() == items.real.sum()
            assert (view.real <= view.capacity[:, None]).all()
            length = items.length.astype(float)
            assert view.load.sum() == pytest.approx(spec.cost.of(length, items.extra).sum())
    times = [
        sum(view.load.max(axis=1).sum() for view in views.values())
        for views in balance.views.values()
    ]
    assert balance.ratio == pytest.approx(times[0] / times[1])
    assert balance.ratio > 1
