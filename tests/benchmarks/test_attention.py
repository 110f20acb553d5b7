import pytest

from benchmarks.attention import measure, measure_slope


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
