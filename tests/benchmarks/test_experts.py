import numpy as np
import pytest

from benchmarks.experts import ROUTINGS, choose, main, measure


def test_routings_are_what_they_are_called():
    random = np.random.default_rng(0)
    balanced, one = (choose(random, 64, 8, 2, routing) for routing in ROUTINGS)
    assert (np.bincount(balanced.ravel()) == 16).all()
    assert (balanced[:, 0] != balanced[:, 1]).all()
    assert np.bincount(one.ravel()).tolist() == [64, 64]


@pytest.mark.slow
def test_records_compare_every_form():
    records = measure(seed=0, tokens=64, width=16, mlp_width=8, count=4, k=2, repeats=1)
    assert [record["routing"] for record in records] == [*ROUTINGS]
    for record in records:
        assert record["forward_of_dense"] > 0 and record["training_of_dense"] > 0
        assert record["ragged_dot_training_ms"] > 0 and record["temporary_mib"] > 0


def test_no_repeats_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experts", "--repeats", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "argument --repeats" in capsys.readouterr().err
