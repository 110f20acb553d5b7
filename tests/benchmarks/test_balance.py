"""The balance benchmark: the form of its JSON, and its figures against loops over items."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.balance import (
    MODES,
    generate,
    main,
    make_spec,
    phase_figures,
    spans_up_to,
    step_figures,
    step_proxy,
)
from jaxmllm.balance.costs.gather import gathered_bytes
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.tools.workload import MODEL

pytestmark = pytest.mark.slow

PHASES = ("vision", "audio", "language")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The JSON of a small run of the benchmark: 4 ranks with 8 examples each, and 16 with 2."""
    path = tmp_path_factory.mktemp("balance") / "balance.json"
    assert (
        main(
            [
                "--settings",
                "4x8",
                "16x2",
                "--batches",
                "1",
                "--repeats",
                "1",
                "--seed",
                "7",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    return json.loads(path.read_text())


def test_json_has_a_record_for_every_phase_and_step(report):
    assert (report["benchmark"], report["seed"]) == ("balance", 7)
    assert all(row["batches"] == 1 for row in report["rows"])
    assert "workload.generate([seed, 2, i]" in report["generator"]
    keys = [
        (row["ranks"], row["per_rank"], str(row["spans"]), row["phase"]) for row in report["rows"]
    ]
    assert keys == [
        (ranks, per, spans, phase)
        for ranks, per in ((4, 8), (16, 2))
        for spans in ("[1]", "auto")
        for phase in (*PHASES, "step")
    ]
    for row in report["rows"]:
        assert row["plan_ms"] > 0 and row["over_ideal"] > 1
        assert (row["gathered_bytes"] > 0) <= (row["spans"] == "auto")
        if row["phase"] != "step":
            assert {
                "gap_to_floor",
                "max_over_mean",
                "synchronised",
                "real_token_fraction",
            } <= row.keys()
            assert 1 <= row["gap_to_floor"] <= row["max_over_mean"] <= row["synchronised"] + 1e-9
            assert 0 < row["real_token_fraction"] <= 1
        else:
            assert row["plan_ms_padded"] > 0
            assert row["slots_moved_over_moved"] >= 1
            assert row["slots_moved_over_needed"] <= row["slots_moved_over_moved"]
            assert ("node_bytes_ratio" in row) == (row["ranks"] == 16)  # four ranks are one node
            assert row.get("node_bytes_ratio", 0.5) <= 1
            modes = set(MODES) if row["spans"] == [1] else {"phases"}
            assert set(row["step_proxy"]) == set(row["step_proxy_over_phases"]) == modes
            assert row["step_proxy_over_phases"]["phases"] == 1
            assert row["step_proxy_padded"]["phases"] > row["step_proxy"]["phases"]
            assert "correlation/vision,language" in row["workload"]


def test_figures_are_those_of_a_loop_over_rows():
    ranks = 4
    examples = 32
    spec = make_spec(ranks, [generate([0, 1, i], examples) for i in range(2)], "none")
    batch = generate([0, 2, 0], examples)
    plan = plan_step(batch, spec)
    unpadded = padded = 0.0
    for name in PHASES:
        phase = spec.phases[name]
        rows = plan.phases[name]
        items = batch.phases[name]
        costs = phase.cost.of(items.length.astype(float))
        row_costs = np.zeros((rows.microbatches, ranks))
        slots = 0
        for microbatch in range(rows.microbatches):
            times = []
            for rank in range(ranks):
                members = (rows.microbatch == microbatch) & (rows.rank == rank)
                row_costs[microbatch, rank] = costs[members].sum()
                attention = phase.cost.quadratic * (items.length[members].astype(float) ** 2).sum()
                times.append(phase.cost.linear * float(rows.capacity[microbatch]) + attention)
                slots += int(rows.capacity[microbatch])
            unpadded += row_costs[microbatch].max()
            padded += max(times)
        figures = phase_figures(rows, items, phase)
        mean = costs.sum() / ranks
        top = row_costs.sum(axis=0).max()
        assert figures["gap_to_floor"] == pytest.approx(top / max(mean, costs.max()), rel=1e-6)
        assert figures["max_over_mean"] == pytest.approx(top / mean, rel=1e-6)
        assert figures["synchronised"] == pytest.approx(
            row_costs.max(axis=1).sum() / mean, rel=1e-6
        )
        assert figures["real_token_fraction"] == pytest.approx(items.real.sum() / slots)
    assert step_proxy(plan, batch, spec) == pytest.approx(
        {"step_proxy": unpadded, "step_proxy_padded": padded}
    )


def test_figures_of_shared_rows_are_those_of_the_plan():
    """The reference is the plan's own statistics, which are tested against loops elsewhere."""
    ranks = 8
    examples = 16
    spec = make_spec(ranks, [generate([0, 1, i], examples) for i in range(4)], spans=(1, 2, 4, 8))
    batch = generate([0, 2, 1], examples)
    plan = plan_step(batch, spec)
    assert any(plan.statistics[f"{name}/shared_rows"] for name in PHASES)
    for name in PHASES:
        figures = phase_figures(plan.phases[name], batch.phases[name], spec.phases[name])
        names = ("over_ideal", "gap_to_floor", "max_over_mean", "synchronised", "shared_rows")
        for figure in (*names, "real_token_fraction"):
            assert figures[figure] == pytest.approx(plan.statistics[f"{name}/{figure}"], rel=1e-6)
        gathered = plan.statistics[f"{name}/gathered_slots"] * gathered_bytes(MODEL, name)
        assert figures["gathered_bytes"] == pytest.approx(gathered)
    step = step_figures(plan, batch, spec)
    assert step["over_ideal"] == pytest.approx(plan.statistics["step/over_ideal"])


def test_spans_divide_the_ranks():
    assert spans_up_to(8, 64) == (1, 2, 4, 8)
    assert spans_up_to(64, 24) == (1, 2, 4, 8, 24) and spans_up_to(8, 24) == (1, 2, 4, 8)
    assert spans_up_to(8, 6) == (1, 2, 6) and spans_up_to(12, 12) == (1, 2, 4, 12)
    assert spans_up_to(8, 7) == (1, 7) and spans_up_to(12, 10) == (1, 2, 10)
    assert spans_up_to(1, 64) == spans_up_to(8, 11) == (1,)


@pytest.mark.parametrize("setting", ["64", "0x8", "8x", "axb"])
def test_settings_that_are_none_are_refused(setting, capsys):
    with pytest.raises(SystemExit):
        main(["--settings", setting])
    assert "RANKSxEXAMPLES" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--batches", "--repeats", "--row-classes"])
def test_counts_that_cannot_be(name, capsys):
    with pytest.raises(SystemExit):
        main(["--settings", "1x1", name, "0"])
    assert f"argument {name}" in capsys.readouterr().err


def test_json_has_what_was_measured(report):
    assert (report["repeats"], report["data"]) == (1, None)
