"""The pipeline benchmark: its JSON, its batches, and its figures against loops over operations."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import pipeline
from benchmarks.pipeline import MODELS, VARIANTS, best_chunks, main, make_graph
from benchmarks.pipeline_batches import MEDIA, UNLIKE
from benchmarks.pipeline_video import MOST_CLIPS, MOST_FRAMES, ROW_SLOTS, ROW_TEXT
from jaxmllm.arrays import sums_by

VISION_LANGUAGE = MODELS["vision_language"]
TEXT_TO_VIDEO = MODELS["text_to_video"]
MODES = tuple(VISION_LANGUAGE.modes)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The JSON of a small run of the benchmark."""
    path = tmp_path_factory.mktemp("pipeline") / "pipeline.json"
    sizes = {"--seeds": 1, "--microbatches": 6, "--rollouts": 20, "--long": 60}
    families = ["--families", "layouts", "microbatches"]
    pairs = [str(word) for pair in [*sizes.items(), ("--json", path)] for word in pair]
    assert main([*families, *pairs]) == 0
    return json.loads(path.read_text())


def test_json_has_a_record_for_every_mode_and_variant(report):
    assert (report["benchmark"], report["stages"], report["microbatches"], report["seeds"]) == (
        "pipeline",
        4,
        6,
        1,
    )
    keys = [(row["mode"], row["variant"]) for row in report["rows"]]
    assert keys == [
        (mode, variant.name) for mode in ("train_all", "alignment") for variant in VARIANTS
    ]
    for row in report["rows"]:
        assert (row["family"], row["model"]) == ("layouts", "vision_language")
        assert 0 < row["asynchronous"] <= row["lockstep"]
        assert 0 < row["efficiency_worst"] <= row["efficiency"] <= 1
        assert 0.1 < row["waiting_gb"] < 80
    assert (
        report["even"]["vision_std_ratio_worst"] > 10.6
        and report["even"]["language_std_ratio_worst"] > 4.1
    )


def test_everything_we_do_together_is_worth_it(report):
    """On six microbatches, of which filling and draining take more than of sixteen."""
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
    chunks = best_chunks(VISION_LANGUAGE, variant, "train_all", 6, 4)
    graph = make_graph(VISION_LANGUAGE, variant, "train_all", 0, 6, 4, chunks)
    schedule = pipeline.make_schedule(VISION_LANGUAGE, variant, graph)
    lockstep_total = 0
    work = [0] * 4
    for row in schedule.ticks.tolist():
        lockstep_total += max(graph.duration[n] for n in row if n >= 0)
        for rank, n in enumerate(row):
            work[rank] += graph.duration[n] if n >= 0 else 0
    (record,) = (
        row
        for row in report["rows"]
        if (row["mode"], row["variant"]) == ("train_all", variant.name)
    )
    assert record["lockstep"] == pytest.approx(lockstep_total / 1e6)
    assert record["efficiency"] == pytest.approx(max(work) / lockstep_total)


@pytest.mark.parametrize("model", ["vision_language", "6B + 2B + 3B"])
@pytest.mark.parametrize("seed", [0, 1])
def test_both_ways_to_make_rows_compute_every_item_where_it_is_read(model, seed):
    chains = MODELS[model]
    batch = chains.generate(seed, 8)
    assert np.bincount(batch.microbatch, batch.tokens, 8).max() <= 8192
    drawn_rows = chains.drawn_rows(batch)
    planned_rows = chains.planned_rows(batch)
    for chain, (name, counts) in enumerate(batch.items.items()):
        medium = MEDIA[name]
        per_microbatch = np.bincount(batch.microbatch, counts, 8)
        assert per_microbatch.max() <= medium.most
        for rows in (drawn_rows, planned_rows):
            items_of_row = np.array(rows.feeding[chain]) // medium.slots**2
            assert items_of_row.sum() == counts.sum() and items_of_row.max() <= medium.of_row
            rows_read = {row for inputs in rows.inputs for source, row in inputs if source == chain}
            assert rows_read == set(range(len(items_of_row)))
        assert [sum(source == chain for source, _ in inputs) for inputs in drawn_rows.inputs] == [
            -(-int(n) // medium.of_row) for n in per_microbatch
        ]
        assert len(planned_rows.feeding[chain]) == -(-int(counts.sum()) // medium.of_row), (
            "no row is half empty but the last"
        )


@pytest.mark.parametrize(
    ("model", "chunks"),
    [
        ("6B + 2B + 3B", ((2, 1, 1), (1, 1, 1))),
        ("0.3B + 72B", ((1, 1), (1, 3))),
        ("6B + 72B", ((1, 1), (2, 3))),
    ],
)
def test_stages_of_unlike_parts_pay_and_ticks_cost_little(model, chunks):
    """Greedy schedules of segments on eight stages, in the better of the given chunks."""
    chains = replace(UNLIKE[model], chunks=chunks)
    mode = next(iter(chains.modes))
    best = best_chunks(chains, VARIANTS[3], mode, 16, 8)
    schedules = [
        pipeline.make_schedule(
            chains, variant, make_graph(chains, variant, mode, 0, 16, 8, variant_chunks)
        )
        for variant, variant_chunks in ((VARIANTS[0], ()), (VARIANTS[3], best))
    ]
    chain_seconds, segment_seconds = map(pipeline.asynchronous, schedules)
    assert pipeline.lockstep(schedules[1]) <= 1.08 * segment_seconds
    assert pipeline.lockstep(schedules[1]) < chain_seconds


def test_frozen_towers_have_no_backward():
    graph = make_graph(VISION_LANGUAGE, VARIANTS[3], "alignment", 0, 4, 4)
    kinds = {
        (graph.ring.chains[c].name, d)
        for c, d, k in zip(graph.chain, graph.depth, graph.kind, strict=True)
        if k
    }
    assert {depth for name, depth in kinds if name == "vision"} == {3}, (
        "the projector stands on the last rank"
    )
    assert {depth for name, depth in kinds if name == "language"} == set(range(8))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--modes", "frozen_text"], "train_all, alignment"),
        (["--seeds", "0"], "whole number from 1"),
        (["--real-seeds", "0"], "whole number from 1"),
    ],
)
def test_arguments_that_cannot_be(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err


def test_json_says_what_real_rows_are_means_of(tmp_path, monkeypatch):
    files = object()
    monkeypatch.setattr(pipeline.FileLengths, "of", lambda folder, phases: files)
    monkeypatch.setattr(pipeline, "_real", lambda options, given: [{"files": given is files}])
    arguments = ["--families", "real", "--real-seeds", "3", "--data", "some"]
    assert main([*arguments, "--json", str(tmp_path / "pipeline.json")]) == 0
    report = json.loads((tmp_path / "pipeline.json").read_text())
    assert (report["real_seeds"], report["data"]) == (3, "some")
    assert report["rows"] == [{"files": True}]


# ---------------------------------------------------------------------------- text to video


@pytest.mark.parametrize("seed", [0, 1])
def test_clips_are_drawn_within_their_bounds_and_all_are_computed(seed):
    batch = TEXT_TO_VIDEO.generate(seed, 8)
    slots = sums_by(batch.microbatch, batch.slots, 8)
    assert (
        np.bincount(batch.microbatch, minlength=8).max() <= MOST_CLIPS and slots.max() <= ROW_SLOTS
    )
    assert (
        sums_by(batch.microbatch, batch.latents, 8).max()
        <= MOST_FRAMES // 8 * 256 + 256 * MOST_CLIPS
    )
    longest = batch.caption.max() + 2
    for rows in (TEXT_TO_VIDEO.drawn_rows(batch), TEXT_TO_VIDEO.planned_rows(batch)):
        assert (
            sum(rows.feeding[0]) == (batch.text**2).sum()
            and sum(rows.reading) == (batch.slots**2).sum()
        )
        assert set().union(*rows.inputs) == {(0, row) for row in range(len(rows.feeding[0]))}
    planned = len(TEXT_TO_VIDEO.planned_rows(batch).feeding[0])
    fewest_rows = batch.text.sum() / ROW_TEXT
    most_rows = batch.text.sum() / (ROW_TEXT - longest)
    assert fewest_rows <= planned <= most_rows + 1 < len(TEXT_TO_VIDEO.drawn_rows(batch).feeding[0])


def test_a_frozen_text_model_runs_forward_alone_and_before_what_reads_it():
    for mode, goes_back in (("train_all", True), ("frozen_text", False)):
        graph = make_graph(TEXT_TO_VIDEO, VARIANTS[3], mode, 0, 4, 4, (1, 2))
        operations = list(zip(graph.chain, graph.depth, graph.microbatch, graph.kind, strict=True))
        assert [chain.name for chain in graph.ring.chains] == ["language", "diffusion"]
        assert any(chain == 0 and kind > 0 for chain, _, _, kind in operations) == goes_back
        schedule = pipeline.make_schedule(TEXT_TO_VIDEO, VARIANTS[3], graph)
        tick = {int(n): t for t, row in enumerate(schedule.ticks) for n in row if n >= 0}
        for reader, inputs in enumerate(graph.workload.inputs):
            (reading,) = (n for n, key in enumerate(operations) if key == (1, 0, reader, 0))
            for _, row in inputs:
                (producing,) = (n for n, key in enumerate(operations) if key == (0, 3, row, 0))
                assert tick[producing] < tick[reading]


def test_stages_of_text_to_video_pay():
    """On four microbatches, where filling and draining weigh most."""
    chains = replace(TEXT_TO_VIDEO, chunks=((1, 2), (1, 7)))
    chunks = best_chunks(chains, VARIANTS[3], "train_all", 4, 4)
    assert chunks == (1, 7)
    makespans = []
    for variant, variant_chunks in ((VARIANTS[0], ()), (VARIANTS[3], chunks)):
        graph = make_graph(TEXT_TO_VIDEO, variant, "train_all", 0, 4, 4, variant_chunks)
        schedule = pipeline.make_schedule(TEXT_TO_VIDEO, variant, graph)
        makespans.append(pipeline.lockstep(schedule))
    assert makespans[0] > 1.5 * makespans[1]
