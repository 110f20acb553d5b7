"""The pipeline benchmark: shape of its JSON, its batches, and its figures against loops over operations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import pipeline
from benchmarks.pipeline import (
    MODES,
    VARIANTS,
    drawn_rows,
    generate,
    main,
    make_graph,
    planned_rows,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "pipeline.json"
    small = {"--seeds": 1, "--microbatches": 6, "--rollouts": 20, "--long": 60}
    families = ["--families", "layouts", "microbatches"]
    pairs = [str(part) for pair in [*small.items(), ("--json", path)] for part in pair]
    assert main([*families, *pairs]) == 0
    return json.loads(path.read_text())


def test_json_has_a_record_for_every_mode_and_variant(report):
    assert (report["benchmark"], report["stages"], report["microbatches"], report["seeds"]) == (
        "pipeline",
        4,
        6,
        1,
    )
    found = [(row["mode"], row["variant"]) for row in report["rows"]]
    assert found == [
        (mode, variant.name) for mode in ("train_all", "alignment") for variant in VARIANTS
    ]
    for row in report["rows"]:
        assert row["family"] == "layouts" and 0 < row["asynchronous"] <= row["lockstep"]
        assert 0 < row["efficiency_worst"] <= row["efficiency"] <= 1
        assert 0.1 < row["waiting_gb"] < 80
    assert (
        report["even"]["vision_std_ratio_worst"] > 10.6
        and report["even"]["language_std_ratio_worst"] > 4.1
    )


def test_everything_we_do_together_is_worth_it(report):
    """On six microbatches; the pipeline's ends weigh more on them than on sixteen."""
    for mode in MODES:
        rows = {row["variant"]: row["lockstep"] for row in report["rows"] if row["mode"] == mode}
        assert rows["+ search"] <= rows["segments"]
        assert rows["chain by parameters"] > 1.5 * rows["+ deferral"]


def test_search_is_compared_with_the_best_known(report):
    assert [row["mode"] for row in report["search"]] == list(MODES)
    for row in report["search"]:
        assert row["instances"] == 1 and row["near"] <= 1
        assert 0 <= row["search_gap"] == row["search_gap_worst"] <= row["greedy_gap"] < 0.2
        assert 0 < row["best_over_bound"] < 0.3
        if row["near"]:
            assert row["search_gap"] <= 0.02 and 0 < row["near_cpu_s"] <= row["search_cpu_s"]


def test_figures_are_those_of_a_loop_over_ticks(report):
    variant = VARIANTS[3]
    graph = make_graph(variant, "train_all", generate(0, 6), 4)
    schedule = pipeline.make_schedule(variant, graph)
    total, work = 0, [0] * 4
    for row in schedule.ticks.tolist():
        total += max(graph.duration[n] for n in row if n >= 0)
        for rank, n in enumerate(row):
            work[rank] += graph.duration[n] if n >= 0 else 0
    (found,) = (
        row
        for row in report["rows"]
        if (row["mode"], row["variant"]) == ("train_all", variant.name)
    )
    assert found["lockstep"] == pytest.approx(total / 1e6)
    assert found["efficiency"] == pytest.approx(max(work) / total)


@pytest.mark.parametrize("seed", [0, 1])
def test_both_ways_to_make_rows_compute_every_image_where_it_is_read(seed):
    batch = generate(seed, 8)
    per_microbatch = np.bincount(batch.microbatch, batch.images, 8)
    assert (
        per_microbatch.max() <= 48 and np.bincount(batch.microbatch, batch.tokens, 8).max() <= 8192
    )
    for rows in (drawn_rows(batch), planned_rows(batch)):
        assert sum(rows.images) == batch.images.sum() and max(rows.images) <= 8
        assert set().union(*rows.inputs) == set(range(len(rows.images)))
    assert [len(each) for each in drawn_rows(batch).inputs] == [
        -(-int(n) // 8) for n in per_microbatch
    ]
    assert len(planned_rows(batch).images) == -(-int(batch.images.sum()) // 8), (
        "no row is half empty but the last"
    )


def test_frozen_towers_have_no_backward():
    graph = make_graph(VARIANTS[3], "alignment", generate(0, 4), 4)
    kinds = {
        (graph.ring.chains[c].name, d)
        for c, d, k in zip(graph.chain, graph.depth, graph.kind, strict=True)
        if k
    }
    assert {depth for name, depth in kinds if name == "vision"} == {3}, (
        "the projector stands on the last rank"
    )
    assert {depth for name, depth in kinds if name == "language"} == set(range(8))
