"""The family `real` of the pipeline benchmark: its rows, and its figures against plain counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.pipeline import main
from benchmarks.pipeline_real import OTHERS, VARIANTS, Instance, dealt, generated, instances, others
from jaxmllm.balance.costs.flops import phase_flops

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "pipeline.json"
    sizes = ["--real-seeds", "1", "--per-replica", "8", "--rollouts", "4"]
    assert main(["--families", "real", *sizes, "--json", str(path)]) == 0
    return json.loads(path.read_text())["rows"]


def test_a_row_for_every_variant(rows):
    assert [row["variant"] for row in rows] == [OTHERS, *VARIANTS]
    for row in rows:
        assert (row["family"], row["mode"], row["stages"], row["per_replica"]) == (
            "real",
            "train_all",
            4,
            8,
        )
        assert 0 < row["asynchronous"] <= row["lockstep"]
        assert 0 < row["efficiency"] <= 1 and row["live_gb"] > 0
        assert set(row["fill"]) == {"vision", "audio", "language"}
        assert all(0 < share <= 1 for share in row["fill"].values())
        assert row["over_asynchronous"] == pytest.approx(row["lockstep"] / row["asynchronous"])
        assert row["over_ideal"] >= 1
        assert row["bound"] == pytest.approx(row["gain"] * row["over_ideal"])


def test_chosen_sizes_are_fuller_and_faster(rows):
    by_variant = {row["variant"]: row for row in rows}
    assert by_variant["sizes"]["lockstep"] < 0.6 * by_variant["4 per stage"]["lockstep"]
    assert (
        by_variant["sizes"]["fill"]["language"] > 3 * by_variant["4 per stage"]["fill"]["language"]
    )
    # Rows of audio are full as well, although they are a small part of the work
    assert min(by_variant["sizes"]["fill"].values()) > 0.8


def test_efficiency_counts_the_work_of_real_slots():
    """The ranks of the chain do the FLOPs of the formula for the lengths, recomputation included.

    The busiest rank does at least the mean.
    """
    instance = Instance("8B", "all", "train_all", 4, 8)
    lengths = generated(instance, [0])
    figures = others(instance, lengths)
    flops = sum(
        phase_flops(instance.model, name, instance.trained).total(items.length)
        for name, items in lengths.batches[0].phases.items()
    )
    # A forward and a backward pass cost three forward passes, and recomputation a fourth
    mean_rank = 4 / 3 * flops / 8 / 4
    assert 0.9 * mean_rank < figures["ideal"] * 1e15 < 1.1 * mean_rank
    busiest = figures["efficiency"] * figures["asynchronous"] * 1e15
    assert 0.9 * mean_rank < busiest < 3 * mean_rank


def test_dealt_evenly():
    tokens = np.random.default_rng(0).integers(1, 100, 64)
    load = np.bincount(dealt(tokens, 8), tokens)
    assert len(load) == 8 and load.max() - load.min() <= 100


def test_mixes_that_need_an_encoder_are_left_out():
    legal = [*instances(["72B"], ["all", "speech"], ["train_all"], [4], [8])]
    assert [instance.mix for instance in legal] == ["all"]
