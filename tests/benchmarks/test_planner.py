"""The planner's predictions of published runs stay within their bars, and what is stored is what is fitted."""

from __future__ import annotations

import json

import pytest

from benchmarks import planner
from benchmarks.published_fit import difference, fit
from jaxmllm.cluster.clusters import cluster_of
from jaxmllm.cluster.device_seconds import RATES


@pytest.fixture(scope="module")
def published():
    runs = planner.read_runs(planner.RUNS)
    return runs, fit([run for run in runs if run.system not in planner.TREND])


def test_published_runs_are_predicted(published):
    runs, known = published
    errors = planner.summary(planner.published_rows(runs, known))["published"]
    assert errors["median"] <= 0.05 and errors["p90"] <= 0.16 and errors["worst"] <= 0.22


def test_stored_constants_are_those_of_the_fit(published):
    _, known = published
    assert difference(known.rates, RATES) <= planner.SAME
    for chip in ("h100", "a100", "a100-40", "h100-500w"):
        assert cluster_of(chip).efficiency.share == pytest.approx(known.expected(chip), abs=0.01)


def test_sharding_over_more_devices_takes_more_device_seconds(published):
    runs, known = published
    rows = [row for row in planner.published_rows(runs, known) if row["trend"]]
    small, large = (row for row in rows if row["model"] == "gpt-175")
    assert large["devices"] * large["predicted_s"] > small["devices"] * small["predicted_s"]


def test_batches_settle_where_loads_are_no_tie():
    rows = planner.batch_rows(0)
    far, near = ([row for row in rows if row["ratio"] == ratio] for ratio in planner.RATIOS)
    assert far[-1]["settled"] and 512 <= far[-1]["samples"] <= 4096
    assert near[-1]["samples"] == 65_536 and not any(row["settled"] for row in near)
    assert all(row["worst_regret"] <= 0.05 for row in near if row["samples"] >= 1024)


@pytest.mark.slow
def test_unknown_systems_lie_in_the_printed_interval(published):
    runs, _ = published
    fitted = [run for run in runs if run.system not in planner.TREND]
    errors = planner.summary(planner.unknown_rows(fitted, fitted))["unknown_system"]
    assert errors["median"] <= 0.12 and errors["p90"] <= 0.25
    assert errors["in_interval"] >= 0.8


def test_other_runs_are_predicted_and_not_fitted_to(tmp_path, capsys, published):
    record = json.loads(planner.RUNS.read_text().splitlines()[0])
    file = tmp_path / "runs.jsonl"
    record |= {"system": "new", "seconds": 1.0}
    file.write_text(json.dumps(record) + "\n")
    assert planner.main(["--rows", str(file), "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["published", "unknown_system"]
    assert rows[0]["predicted_s"] == pytest.approx(
        planner.published_rows(planner.read_runs(file), published[1])[0]["predicted_s"]
    )
    assert 5 < rows[0]["predicted_s"] < 9  # whatever the record says it took


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "h1000"}, "line 1: there is no cluster 'h1000'"),
        ({"remat": "odd"}, "line 1: remat 'odd'"),
        ({"devices": 3}, "line 1: axes of 64 devices on 3"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path, capsys, change, message):
    record = json.loads(planner.RUNS.read_text().splitlines()[0])
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(record | change) + "\n")
    assert planner.main(["--rows", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_row_without_a_key(tmp_path, capsys):
    file = tmp_path / "runs.jsonl"
    file.write_text('{"system": "new"}\n')
    assert planner.main(["--rows", str(file)]) == 2
    assert "line 1: no key 'chip'" in capsys.readouterr().err
