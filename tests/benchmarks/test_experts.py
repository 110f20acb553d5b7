"""The benchmark of experts: its routings and its records."""

import json

import numpy as np
import pytest

from benchmarks.experts import ROUTINGS, choose, main, measure


def test_routings_are_what_they_are_called():
    random = np.random.default_rng(0)
    balanced, concentrated = (choose(random, 64, 8, 2, routing) for routing in ROUTINGS)
    assert (np.bincount(balanced.ravel()) == 16).all()
    assert (balanced[:, 0] != balanced[:, 1]).all()
    assert np.bincount(concentrated.ravel()).tolist() == [64, 64]


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


def test_json_has_the_sizes(tmp_path, monkeypatch):
    path = tmp_path / "experts.json"
    sizes = {"tokens": 16, "width": 8, "mlp_width": 4, "repeats": 1}
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    monkeypatch.setattr("sys.argv", ["experts", *options, "--json", str(path)])
    monkeypatch.setattr("benchmarks.experts.measure", lambda *arguments: [{"experts": 8}])
    main()
    assert sizes.items() <= json.loads(path.read_text()).items()
