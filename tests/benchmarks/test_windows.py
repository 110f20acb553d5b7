"""The benchmark of the order of patches in towers with windows."""

import pytest

from benchmarks.windows import main, measure


@pytest.mark.slow
def test_both_orders_are_measured_and_one_computes_less():
    image, windows = measure((20, 12), images=2, merge=2, seed=0, repeats=1)
    assert (image["order"], windows["order"]) == ("image", "windows")
    assert 1 <= windows["pairs"] < image["pairs"]
    assert image["ratio"] == 1 and windows["seconds"] > 0


def test_no_repeats_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["windows", "--repeats", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "argument --repeats" in capsys.readouterr().err
