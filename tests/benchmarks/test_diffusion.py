"""The benchmark of buckets against plans: its JSON, and its baselines against loops over items."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.diffusion import METHODS, MIXES, MODEL, TRAINED, draw, longest, main
from benchmarks.diffusion_buckets import (
    MOST_TEXT,
    Media,
    batches_of_buckets,
    batches_of_like_sizes,
    bucket_media,
    bucket_sizes,
    figures,
)
from jaxmllm.balance.costs.flops import phase_flops

COST = phase_flops(MODEL, "diffusion", TRAINED)


@pytest.mark.slow
def test_json_has_a_row_for_every_mix_and_method(tmp_path, capsys):
    path = tmp_path / "diffusion.json"
    arguments = (
        "--ranks 4 --items 32 --seeds 1 --mixes mixed --methods balanced_long packed buckets"
    )
    assert main([*arguments.split(), "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["method"] for row in report["rows"]] == ["balanced_long", "packed", "buckets"]
    assert "buckets" in capsys.readouterr().out
    balanced, packed, buckets = report["rows"]
    for row in report["rows"]:
        assert row["mix"] == "mixed"
        assert 0 < row["real_slots"] <= 1 <= row["synchronised"] <= row["over_ideal"]
        assert row["shapes"] >= 1
    for row in (balanced, packed):
        assert (row["kept_pixels"], row["kept_frames"], row["dropped_items"]) == (1, 1, 0)
        assert row["plan_ms"] > 0
    assert balanced["over_ideal"] < packed["over_ideal"]
    assert buckets["kept_pixels"] < 1 and buckets["kept_frames"] < 1 and buckets["dropped_items"]


def test_buckets_may_have_too_few_items_for_a_step(tmp_path):
    path = tmp_path / "diffusion.json"
    arguments = "--ranks 64 --items 64 --seeds 1 --mixes clips --methods buckets padded_alike"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    buckets, like_sizes = json.loads(path.read_text())["rows"]
    assert buckets["over_ideal"] is buckets["real_slots"] is None and like_sizes["over_ideal"] > 1


@pytest.mark.parametrize("mix", MIXES)
def test_drawn_media_are_whole_slots_within_the_bounds(mix):
    media = draw([0, 0], 2000, MIXES[mix])
    assert (media.frames > 1).mean() == MIXES[mix]
    assert not (media.height % 16).any() and not (media.width % 16).any()
    assert media.slots.max() <= longest(MIXES[mix])
    assert 50 < np.median(media.text) < 75


def test_bucket_sizes_are_the_published_ones():
    """At 256 pixels, Open-Sora 2.0 has these sizes for 16:9, 1:1 and 9:16."""
    sizes = bucket_sizes(256)
    assert {(256, 256), (336, 192), (192, 336)} <= set(sizes)
    assert all(abs(height * width / 256**2 - 1) < 0.07 for height, width in sizes)


def test_buckets_cut_frames_crop_ratios_and_scale_down():
    ones = np.ones(1, np.int64)
    clip = bucket_media(Media(131 * ones, 480 * ones, 480 * ones, 60 * ones))
    assert (clip.kept.frames[0], clip.kept.height[0], clip.kept.width[0]) == (129, 256, 256)
    assert clip.frames == 129 / 131 and clip.pixels == (256 / 480) ** 2
    wide_picture = bucket_media(Media(ones, 256 * ones, 264 * ones, 60 * ones))
    assert wide_picture.kept.width[0] == 256 and wide_picture.pixels == pytest.approx(256 / 264)
    for too_small in (
        Media(ones, 128 * ones, 128 * ones, ones),
        Media(4 * ones, 256 * ones, 256 * ones, ones),
    ):
        assert not len(bucket_media(too_small).kept)


def test_batches_hold_every_item_once_within_the_bounds():
    media = draw([0, 1], 300, 0.5)
    bound = longest(0.5)
    most_cost = float(COST.of(float(bound)))
    like_sizes = batches_of_like_sizes(media, bound, most_cost, COST)
    assert sum(batch.items for batch in like_sizes) == len(media)
    assert sum(batch.real for batch in like_sizes) == media.slots.sum()
    bucketed = bucket_media(media).kept
    buckets, dropped = batches_of_buckets(bucketed, bound, most_cost, COST)
    assert sum(batch.items for batch in buckets) + dropped == len(bucketed)
    assert {batch.text for batch in buckets} == {MOST_TEXT}
    for batch in like_sizes + buckets:
        assert batch.slots <= bound or batch.items == 1
        assert batch.cost(COST) <= 1.001 * most_cost or batch.items == 1
        assert batch.real <= batch.slots and batch.real_cost <= batch.cost(COST)


def test_figures_are_those_of_the_slowest_rank_of_each_step():
    media = draw([0, 2], 64, 0.5)
    batches = batches_of_like_sizes(media, 80_000, 1e19, COST)[:4]
    costs = [batch.cost(COST) for batch in batches]
    measured = figures(batches, ranks=2, cost=COST)
    slowest = max(costs[:2]) + max(costs[2:])
    assert measured["synchronised"] == pytest.approx(slowest / (sum(costs) / 2))
    assert measured["over_ideal"] == pytest.approx(
        slowest / (sum(b.real_cost for b in batches) / 2)
    )
    assert measured["real_slots"] == sum(b.real for b in batches) / sum(b.slots for b in batches)
    planned = {"balanced", "balanced_long", "balanced_across", "packed"}
    assert set(METHODS) == planned | {"buckets", "padded_alike"}


@pytest.mark.parametrize("name", ["--ranks", "--items", "--seeds"])
def test_counts_that_cannot_be(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "0"])
    assert f"argument {name}" in capsys.readouterr().err
