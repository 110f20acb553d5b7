"""What `jaxmllm check` prints and refuses, and collectives that follow from the parameters."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
import yaml

from jaxmllm.setup import ahead
from jaxmllm.setup.chips import CHIPS
from jaxmllm.tools import check as tools_check
from jaxmllm.tools.check import amount, main
from jaxmllm.tools.sample_data import make_sample
from tests.support import tiny_config


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    data = tmp_path_factory.mktemp("sample")
    make_sample(data, seed=1, train=64, test=8)
    path = data / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(data, mesh={"data": 2, "fsdp": 4})))
    return path


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Undo what `main` sets for its process: hidden GPUs and no compilation cache."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    cached = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", cached)


def check(config_file, *arguments, chip="cpu", devices=8):
    """Run the command on the config, and return its exit code."""
    device_options = [] if devices is None else ["--devices", str(devices)]
    return main(["--config", str(config_file), "--chip", chip, *device_options, *arguments])


def test_tables_and_records_of_two_programs(config_file, capsys):
    path = config_file.with_name("check.json")
    arguments = ("--only", "totals,hop", "--json", str(path))
    assert check(config_file, *arguments, devices=None) == 0
    printed = " ".join(capsys.readouterr().out.split())  # titles wrap
    assert "memory of one device" in printed and "collectives of one device" in printed
    record = json.loads(path.read_text())
    assert record["chip"] == "cpu" and record["devices"] == 8
    memory_rows = {row["program"]: row for row in record["rows"] if "memory" in row}
    assert memory_rows.keys() == {"totals", "hop vision"}
    for row in memory_rows.values():
        memory = row["memory"]
        keys = ("arguments", "outputs", "temporaries", "code")
        assert memory["needed"] == sum(memory[key] for key in keys) - memory["aliased"]
        assert row["fallbacks"] == []
    (summed,) = (row for row in record["rows"] if row.get("operation") == "all-reduce")
    # Four float32 sums for each of the four sources of the sample; a ring of 8 devices sends 2 * 7
    # / 8 of them
    assert (summed["axes"], summed["dtype"], summed["trips"]) == (["data", "fsdp"], "f32", 1)
    assert summed["bytes"] * summed["count"] == summed["total_bytes"] == 4 * 4 * 4
    assert summed["sent_bytes"] == pytest.approx(2 * 7 / 8 * 64)
    exchanges = [row for row in record["rows"] if row.get("operation") == "all-to-all"]
    assert exchanges and all(row["program"] == "hop vision" for row in exchanges)


def test_generated_lengths_take_the_place_of_data(config_file, capsys):
    absent_source = "data.sources=[{name: sample, path: /nowhere.jsonl}]"
    overrides = ("phases.language.max_capacity=16384", "data.batch_size=64")
    assert check(config_file, "--generated", "--only", "totals", absent_source, *overrides) == 0
    assert "totals" in capsys.readouterr().out
    assert check(config_file, "--only", "totals", absent_source) == 1
    assert "/nowhere.jsonl" in capsys.readouterr().err
    staged = ("pipeline.stages=2", "pipeline.layout=chain", "mesh.data=1", *overrides)
    assert check(config_file, "--generated", "--only", "totals", absent_source, *staged) == 0


@pytest.mark.parametrize(
    "arguments, chip, devices, code, words",
    [
        ((), "h1000", 8, 2, f"there is no chip 'h1000'; chips: {', '.join(CHIPS)}"),
        (("--only", "sing"), "cpu", 8, 2, "no program sing; programs: zero, totals, update"),
        ((), "cpu", 4096, 2, "8 CPU devices, not 4096"),
        ((), "cpu", 4, 1, "mesh {'data': 2, 'fsdp': 4"),
        (("mesh.data=-1",), "cpu", None, 1, "mesh.data is -1: say how many --devices"),
        (("mesh.colour=2",), "cpu", 8, 1, "mesh.colour"),
    ],
)
def test_mistakes_are_one_line(config_file, capsys, arguments, chip, devices, code, words):
    assert check(config_file, *arguments, chip=chip, devices=devices) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


def test_programs_that_do_not_compile_and_fallbacks_are_named(config_file, capsys, monkeypatch):
    """The compiler is a stand-in that fails for one program and falls back in the other."""
    path = config_file.with_name("failed.json")
    check_job = ahead.check_job

    def half(config, programs, name, job, chip):
        if name.function == "totals":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 TB\nand more")
        program = check_job(config, programs, name, job, chip)
        return dataclasses.replace(program, fallbacks=("attention of nobody",))

    monkeypatch.setattr(ahead, "check_job", half)
    assert check(config_file, "--only", "totals,hop", "--json", str(path)) == 1
    err = capsys.readouterr().err
    assert "error: totals: RESOURCE_EXHAUSTED: 3 TB\n" in err
    assert "warning: hop vision: attention of nobody\n" in err
    assert {row["program"] for row in json.loads(path.read_text())["rows"]} == {"hop vision"}
    assert check(config_file, "--only", "hop") == tools_check.FELL_BACK


@pytest.mark.parametrize(
    "size, words",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (16.8e6, "16.8 MB"), (6.98e11, "698 GB")],
)
def test_amounts_have_units(size, words):
    assert amount(size) == words
