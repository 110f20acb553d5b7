"""The planner's predictions of published runs, within their bounds, and its stored constants."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest

from benchmarks import (
    planner,
    planner_batches,
    planner_configuration,
    planner_measured,
    planner_optimum,
    planner_search,
    planner_simulated,
)
from benchmarks.omni import omni_config
from benchmarks.published_fit import difference, fit
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.cluster.clusters import cluster_of
from jaxmllm.cluster.device_seconds import RATES, Device
from jaxmllm.config.read import dump_config
from tests.cluster.programs import tiny_lengths


@pytest.fixture(scope="module")
def published():
    runs = planner.read_runs(planner.RUNS)
    return runs, fit([run for run in runs if run.system not in planner.TREND])


def test_published_runs_are_predicted(published):
    runs, fitted = published
    errors = planner.summary(planner.published_rows(runs, fitted))["published"]
    assert errors["median"] <= 0.05 and errors["p90"] <= 0.16 and errors["worst"] <= 0.22


def test_stored_constants_are_those_of_the_fit(published):
    _, fitted = published
    assert difference(fitted.rates, RATES) <= planner.SAME
    for chip in ("h100", "a100", "a100-40", "h100-500w"):
        assert cluster_of(chip).efficiency.share == pytest.approx(fitted.expected(chip), abs=0.01)


def test_sharding_over_more_devices_takes_more_device_seconds(published):
    runs, fitted = published
    rows = [row for row in planner.published_rows(runs, fitted) if row["trend"]]
    small, large = (row for row in rows if row["model"] == "gpt-175")
    assert large["devices"] * large["predicted_s"] > small["devices"] * small["predicted_s"]


def test_batches_settle_where_loads_are_no_tie(monkeypatch):
    monkeypatch.setattr(planner_batches, "MIXES", {})
    rows = planner_batches.batch_rows(0)
    settling, tied = (
        [row for row in rows if row.get("ratio") == ratio] for ratio in planner_batches.RATIOS
    )
    assert settling[-1]["settled"] and 512 <= settling[-1]["samples"] <= 4096
    assert tied[-1]["samples"] == 65_536 and not any(row["settled"] for row in tied)
    assert all(row["worst_regret"] <= 0.05 for row in tied if row["samples"] >= 1024)


def test_other_loads_are_asked_alike(monkeypatch):
    monkeypatch.setattr(planner_batches, "RATIOS", ())
    monkeypatch.setattr(planner_batches, "PRICED_ON", 2048)
    rows = planner_batches.batch_rows(0)
    assert {row["mix"] for row in rows} == {"all", "images", "speech"}
    largest = {row["mix"]: row for row in rows}
    assert all(row["settled"] or row["samples"] == 65_536 for row in largest.values())
    # One device of eight is enough for the speech tower, but too few for pictures
    assert largest["speech"]["bad_splits"]["1 : 7"] == 1 < largest["images"]["bad_splits"]["1 : 7"]
    assert all(price >= 1 for row in rows for price in row["bad_splits"].values())


def test_files_that_are_not_there_are_refused_before_other_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner_batches, "_rows", None)
    with pytest.raises(SystemExit):
        planner.main(["--data", str(tmp_path / "none")])
    assert "none is no folder" in capsys.readouterr().err
    assert planner.main(["--kinds", "bmin", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "train.jsonl cannot be read" in error and error.count("\n") == 1


def measured(seconds, predicted, spread=0.0, calibrates=False):
    """A row of a measured step."""
    return {
        "kind": "measured",
        "measured_s": seconds,
        "predicted_s": predicted,
        "error": predicted / seconds - 1,
        "spread": spread,
        "calibrates": calibrates,
    }


def test_agreement_of_predictions():
    rows = [
        measured(9.0, 1.0, calibrates=True),  # calibrating rows do not count
        measured(1.0, 1.1),
        measured(2.0, 1.0, spread=0.1),
        measured(2.1, 3.0, spread=0.1),  # too close to the row before to order them
        measured(4.0, 4.0),
    ]
    figures = planner_measured.agreement(rows)
    assert figures["pairs"] == 5 and figures["tau"] == pytest.approx((4 - 1) / 5)
    assert figures["first"] == 1.0 and figures["range"] == 4.0
    assert figures["median"] == pytest.approx((0.1 + 3 / 2.1 - 1) / 2)


def test_measured_steps_are_predicted_by_three_of_them():
    """A fit to three settings recovers the cluster that made the times, and predicts the fourth."""

    class Known:
        """A setting whose steps take what a cluster predicts for its work."""

        def __init__(self, name, flops, moved, hops, ticks=0):
            self.name, self.work, self.ticks = name, (flops, moved, hops, ticks), ticks

        def predicted(self, cluster):
            link = cluster.in_node
            rates = (
                1 / (cluster.peak() * cluster.efficiency.share),
                1 / link.bytes_per_second,
                link.hop_seconds,
                cluster.tick_seconds,
            )
            return sum(quantity * rate for quantity, rate in zip(self.work, rates, strict=True))

    cpu = cluster_of("cpu")
    slow_efficiency = cpu.efficiency.model_copy(update={"share": 0.1})
    true_cluster = cpu.model_copy(update={"efficiency": slow_efficiency, "tick_seconds": 0.2})
    works = [(2e11, 0, 0), (2e11, 4e9, 10), (2e11, 0, 0, 11), (4e11, 1e9, 10, 8)]
    names = [*planner_measured.CALIBRATING, "data 4, fsdp 2"]
    settings = [Known(name, *work) for name, work in zip(names, works, strict=True)]
    cores = len(os.sched_getaffinity(0))
    times = {
        setting.name: [
            (1.0, cores * setting.predicted(true_cluster) * noise) for noise in (0.99, 1.0, 1.01)
        ]
        for setting in settings
    }
    rows = planner_measured.rows_of(settings, times)
    assert [row["calibrates"] for row in rows] == [True, True, True, False]
    assert all(abs(row["error"]) < 0.03 for row in rows)
    assert rows[-1]["measured_s"] == pytest.approx(settings[-1].predicted(true_cluster))
    assert rows[-1]["spread"] == pytest.approx(0.02)


def test_steps_are_measured_on_data_of_the_seed(monkeypatch):
    seeds = []

    def stop(folder, seed, *_):
        seeds.append(seed)
        raise OSError("enough")

    monkeypatch.setattr(planner_measured, "force_devices", lambda: None)
    monkeypatch.setattr(planner_measured, "make_sample", stop)
    assert planner.main(["--kinds", "measured", "--seed", "3"]) == 2
    assert seeds == [3]


def test_settings_are_configs(tmp_path):
    """There are at least 16, they cover every axis, and no config refuses them."""
    configs = {
        name: planner_measured._config(str(tmp_path), name) for name in planner_measured.SETTINGS
    }
    assert len(configs) >= 16 and set(planner_measured.CALIBRATING) <= configs.keys()
    for config in configs.values():
        sizes = config.mesh_sizes
        assert math.prod(sizes.values()) == planner_measured.DEVICES
    axes = {
        axis for config in configs.values() for axis, size in config.mesh_sizes.items() if size > 1
    }
    assert axes == {"data", "fsdp", "context", "tensor", "stage"}


def test_a_chain_of_stages_computes_all_of_a_batch(monkeypatch):
    """Against the FLOPs of its layers: rates have no loss, and links take no time."""
    lengths = tiny_lengths(mesh={"data": 8})
    monkeypatch.setattr(planner_simulated, "STAGES", 2)
    monkeypatch.setattr(planner_simulated, "TENSOR", 2)
    link = cluster_of("h100").in_node.model_copy(
        update={"bytes_per_second": 1e30, "reduced_per_second": 1e30, "hop_seconds": 0}
    )
    cluster = cluster_of("h100").model_copy(
        update={"in_node": link, "peak_flops": 1e9, "device_kind": ""}
    )
    device = Device(cluster, 1.0, replace(RATES, half_side=1e-9, attention=1.0))
    chain = planner_simulated._Chain(lengths, device)
    assert sum(sum(part.layers) for part in chain.ring.chains) == 6
    makespan, mean = chain.seconds(0, 1)
    flops = 0.0
    for phase, items in lengths.items.phases.items():
        for layer in phase_layers(lengths.config.model, phase):
            # Forward, again for remat, and backward: twice for products, two and
            # a half times for attention
            flops += 4 * layer.linear(int(items.length.sum()))
            flops += 4.5 * layer.attention((int((items.length**2).sum()), 0))
    assert mean * 2 * 2 * 1e9 == pytest.approx(flops, rel=0.1)
    assert makespan >= mean


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
    assert 5 < rows[0]["predicted_s"] < 9  # the record says 1.0, which is not fitted to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "h1000"}, "line 1: there is no cluster 'h1000'"),
        ({"remat": "odd"}, "line 1: remat 'odd'"),
        ({"devices": 3}, "line 1: axes of 64 devices on 3"),
        ({"heads": 0}, "line 1: heads 0 is no whole number above 0"),
        ({"layers": 80.5}, "line 1: layers 80.5 is no whole number above 0"),
        ({"gated": "yes"}, "line 1: gated 'yes' is neither true nor false"),
        ({"interleave": 99}, "line 1: stages 1 x interleave 99 are more than layers 80"),
        ({"seconds": 0}, "line 1: seconds 0 is no number above 0"),
        ({"seconds": None}, "line 1: seconds None is no number above 0"),
        ({"chip": "cpu"}, "line 1: devices of cpu share cores"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path, capsys, change, message):
    record = json.loads(planner.RUNS.read_text().splitlines()[0])
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(record | change) + "\n")
    assert planner.main(["--rows", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_rows_of_other_systems_chips_and_shapes_are_predicted(tmp_path, capsys):
    """Rows without grouped heads, with plain MLPs, context and uneven
    stages, and on a chip without runs."""
    record = json.loads(planner.RUNS.read_text().splitlines()[0])
    del record["kv_heads"], record["interleave"]
    changes = [
        {},
        {"system": "new", "chip": "b200"},
        {"system": "new", "gated": False, "attention": "unfused", "remat": "sel"},
        {"context": 8, "fsdp": 8, "sequence": 65_536, "microbatch": 1},
        {"fsdp": 1, "tensor": 8, "stages": 8, "layers": 83, "interleave": 2, "batch": 100},
        {"data": 64, "fsdp": 1, "remat": "none", "chip": "h200", "sequence_parallel": True},
    ]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record | change) + "\n" for change in changes))
    assert planner.main(["--rows", str(file), "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    published = [row for row in rows if row["kind"] == "published"]
    assert len(published) == len(changes)
    for row in rows:
        assert 0 < row["overlapped_s"] <= row["predicted_s"] <= row["serial_s"] * 1.001
        assert sum(row["parts"].values()) == pytest.approx(row["predicted_s"])
    assert "published: 6 runs" in capsys.readouterr().out


def test_a_row_without_a_key(tmp_path, capsys):
    file = tmp_path / "runs.jsonl"
    file.write_text('{"system": "new"}\n')
    assert planner.main(["--rows", str(file)]) == 2
    assert "line 1: no key 'chip'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_at_scale_is_told_with_what_it_took(tmp_path, monkeypatch):
    rows = {
        phase: {"capacities": [slots], "spans": [1]}
        for phase, slots in {"vision": 16384, "audio": 16384, "language": 12288}.items()
    }
    config = tmp_path / "tiny.yaml"
    config.write_text(
        dump_config(omni_config("tiny", data={"batch_size": 16}, phases=rows, mesh={"context": 1}))
    )
    monkeypatch.setattr(planner_search, "MODEL", str(config))
    (row,) = planner_search.scale_rows(0, devices=[2])
    assert row["same"] and row["cpu_seconds"] > 0 and row["peak_rss"] > 1 << 20
    assert row["considered"] >= row["planned"] + sum(row["rejected"].values()) > 0


@pytest.mark.slow
def test_the_chosen_layout_is_compared_with_all_others():
    phases = {
        phase: {"capacities": [slots], "spans": [1]}
        for phase, slots in {"vision": 16384, "audio": 16384, "language": 12288}.items()
    }
    (row,) = planner_optimum.optimum_rows(0, "tiny", [2], ["images"], phases=phases)
    assert row["layouts"] > 2 and row["layouts"] > row["over_memory"] + row["failed"]
    assert 1 <= row["fastest_over_best"] <= 1.01 and row["fastest_over_best"] <= row["over_best"]
    assert row["chosen"] and row["best_s"] > 0


def test_what_stages_cost_is_told_by_model(capsys):
    setting = {"profile": "8B", "mix": "all", "mode": "full", "split": {"language": 4}}
    times = {"cost": (1.0, 1.0, 1.0), "parameters": (1.5, 1.25, 1.0), "rounding": (1.0, 1.0, 1.1)}
    planner_configuration._show(
        [
            setting | {"stages": 4 + index, "method": method, "time": times[method][index]}
            for index in range(3)
            for method in times
        ]
    )
    printed_row = [line for line in capsys.readouterr().out.splitlines() if "8B" in line][-1]
    assert all(cell in printed_row for cell in ("1.000 (1.00)", "1.250 (1.50)", "1.000 (1.10)"))


def test_stages_by_cost_are_never_slower(monkeypatch):
    monkeypatch.setattr(planner_configuration, "BATCHED", 256)
    monkeypatch.setattr(planner_configuration, "STAGES", (4, 16))
    monkeypatch.setattr(
        planner_configuration, "PROFILES", {"8B": planner_configuration.PROFILES["8B"]}
    )
    rows = planner_configuration.configuration_rows(0)
    assert len(rows) == 2 * 3 * 3 * len(planner_configuration.METHODS)
    times = {
        method: [row["time"] for row in rows if row["method"] == method]
        for method in planner_configuration.METHODS
    }
    # The slowest stage decides; among equally slow splits, another may take slightly less in all
    assert max(times["cost"]) < 1.001
    assert max(times["parameters"]) > 1.2 and max(times["rounding"]) > 1.2
    assert all(sum(row["split"].values()) == row["stages"] for row in rows)
