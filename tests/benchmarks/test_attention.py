"""The attention benchmark: its records against the dense form, and its refusals."""

import json

import pytest

from benchmarks import attention
from benchmarks.attention import main, measure, measure_slope


@pytest.mark.slow
def test_records_hold_every_form_and_agree_with_the_dense_one():
    tiled, dense = measure(seed=0, slots=2048, blocks=[256], repeats=1)
    assert (tiled["block"], dense["block"]) == (256, 0)
    assert tiled["difference"] < 1e-5 and dense["difference"] == 0
    assert 8 < tiled["tiles"] < 8 * 8 and 0 < tiled["pairs"] <= 1
    for name in ("forward", "training"):
        assert tiled[f"{name}_ratio"] > 0 and tiled[f"{name}_peak"] > 0


def test_the_slope_belongs_to_the_tiles():
    record = measure_slope(seed=0, slots=2048, block=256, repeats=1)
    assert record["documents_of"] == [512, 1024, 2048]
    assert record["tiles"] == [4 * 3, 2 * 10, 36]  # triangles of 2, 4 and 8 blocks
    assert len(record["seconds"]) == 3 and record["r_squared"] <= 1


@pytest.mark.parametrize("slots", [256, 768, 1024])
def test_without_three_lengths_there_is_no_line(slots, tmp_path, monkeypatch):
    """A single length has no R^2, and a line fits any two exactly."""
    monkeypatch.setattr(attention, "measure", lambda *_: [])
    path = tmp_path / "attention.json"
    main(["--slots", str(slots), "--json", str(path)])
    assert json.loads(path.read_text())["slope"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats: '0' is not a whole number"),
        (["--slots", "640"], "--slots 640 must be a multiple of --blocks 256"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(attention, "measure", None)
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
