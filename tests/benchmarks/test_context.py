"""The context benchmark: its JSON, its rows, and its figures against plain loops."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.context import METHODS, ROWS, balance, isolated_work, main
from jaxmllm.attention.mask import TokenIds
from jaxmllm.attention.parts import block_work


@pytest.fixture(scope="module", params=[False, True], ids=["rule", "isolated"])
def report(request, tmp_path_factory):
    """The JSON of a small run of the benchmark, with and without isolated images."""
    path = tmp_path_factory.mktemp("context") / "context.json"
    command = [
        "--tokens",
        "2048",
        "4096",
        "--ranks",
        "2",
        "4",
        "--seeds",
        "2",
        "--seed",
        "3",
        "--json",
        str(path),
    ]
    assert main([*command, *(["--isolated"] if request.param else [])]) == 0
    return json.loads(path.read_text())


def test_json_has_a_row_for_every_cell_and_method(report):
    assert (report["benchmark"], report["seed"], report["seeds"]) == ("context", 3, 2)
    keys = [
        (row["tokens"], row["ranks"], row["generator"], row["method"]) for row in report["rows"]
    ]
    assert keys == [
        (t, r, g, m) for t in (2048, 4096) for r in (2, 4) for g in ROWS for m in METHODS
    ]
    for row in report["rows"]:
        assert row.keys() == {
            "tokens",
            "ranks",
            "block",
            "generator",
            "method",
            "tiles",
            "layer",
            "plan_ms",
        }
        assert min(row["layer"], row["tiles"]) >= 1 and row["plan_ms"] > 0
        if row["method"] != "longest_first":  # ranks have unequal numbers of tokens
            assert row["layer"] <= row["tiles"] + 1e-12


def test_equal_is_never_worse_than_what_holds_as_many_tokens(report):
    rows = {
        (row["tokens"], row["ranks"], row["generator"], row["method"]): row
        for row in report["rows"]
    }
    for (tokens, ranks, generator, method), row in rows.items():
        equal = rows[tokens, ranks, generator, "equal"]
        if method in ("contiguous", "zigzag"):
            assert equal["tiles"] <= row["tiles"] and equal["layer"] <= row["layer"]
    for method in ("contiguous", "zigzag"):
        assert report["summary"]["better"][method] == {"tiles": 0, "layer": 0}


@pytest.mark.parametrize("generator", ROWS)
def test_rows_are_what_they_are_called(generator):
    ids = ROWS[generator](np.random.default_rng(5), 4096)
    assert all(
        len(column) == 4096 and column.dtype == np.int32
        for column in (ids.document, ids.group, ids.position)
    )
    assert (ids.group > 0).any() and (ids.group[ids.document > 0] == 0).any()
    is_real = ids.document > 0
    assert is_real.mean() > 0.8
    if generator == "packed":
        assert len(np.unique(ids.document[is_real])) > 3
    else:
        assert (ids.document == 1).all()
    if generator == "prepend":
        images = np.flatnonzero(ids.group)
        assert images[-1] == len(images) - 1
    repeated = ROWS[generator](np.random.default_rng(5), 4096)
    np.testing.assert_array_equal(ids.group, repeated.group)


@pytest.mark.parametrize("generator", ROWS)
def test_isolated_images_see_themselves_alone(generator):
    ids = ROWS[generator](np.random.default_rng(6), 1024 if generator != "packed" else 2048)
    block = 64
    tokens = len(ids.document)
    # The reference: the dense mask, in which an image sees itself alone and text what is before it
    visible = (ids.document[:, None] == ids.document) & (ids.document > 0)
    text_pairs = (ids.group == 0)[:, None] & (np.arange(tokens)[:, None] >= np.arange(tokens))
    visible &= text_pairs | (ids.group > 0)[:, None] & (ids.group[:, None] == ids.group)
    tiles = (tokens // block, block)
    visible_tiles = visible.reshape(tiles + tiles).any(axis=(1, 3))
    tiles_ahead = np.triu(visible, 1).reshape(tiles + tiles).any(axis=(1, 3))
    # Work is counted in half tiles: a causal tile on the diagonal is one,
    # any other visible tile two
    expected = 2 * visible_tiles.sum(axis=1) - (visible_tiles & ~tiles_ahead).diagonal()
    np.testing.assert_array_equal(isolated_work(ids, block), expected)


def test_layer_cost_is_that_of_its_matrices():
    """By hand, for a causal document of 16 blocks of 128 on two ranks."""
    tokens = np.arange(2048, dtype=np.int32)
    ids = TokenIds(np.ones_like(tokens), np.zeros_like(tokens), tokens)
    imbalance = balance("contiguous", ids, 2, block_work)
    tiles = [sum(i + 0.5 for i in range(8)), sum(i + 0.5 for i in range(8, 16))]
    matrices = 2 * (4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14336)
    costs = [1024 * matrices + tiles_of_rank * 128**2 * 4 * 32 * 128 for tiles_of_rank in tiles]
    assert imbalance.tiles == pytest.approx(max(tiles) * 2 / sum(tiles))
    assert imbalance.layer == pytest.approx(max(costs) * 2 / sum(costs))


def test_a_length_that_ranks_cannot_share_is_one_line(capsys):
    assert main(["--tokens", "1000", "--ranks", "8", "--seeds", "1"]) == 1
    assert "1000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--ranks", "--tokens", "--seeds"])
def test_counts_that_cannot_be(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "0"])
    assert f"argument {name}" in capsys.readouterr().err
