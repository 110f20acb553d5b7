"""Sections of the GPU benchmark at tiny sizes; failures are named, and other sections run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.attention_gpu import Shape, random_inputs
from jaxmllm.attention.attention import attention
from jaxmllm.attention.mask import visible
from jaxmllm.training.programs.base import ProgramName

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(tmp_path):
    return gpu.Bench(gpu.SMALL, tmp_path, time.perf_counter() + 600, 0)


def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_fails_is_named_and_the_next_section_runs(bench, capsys, monkeypatch):
    def broken(_):
        raise ValueError("no such thing\nand more")

    def late(_):
        raise AssertionError("there is no time for it")

    sections = {"a": (broken, 0), "b": (late, 10_000), "c": (lambda _: [{"ms": 1.0}], 0)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    failed, skipped, measured = gpu.measure(bench, list(sections))
    assert failed == {"section": "a", "failed": "ValueError: no such thing"}
    assert skipped["section"] == "b" and skipped["failed"].endswith("it needs 10000")
    assert measured == {"section": "c", "ms": 1.0}
    assert "could not run a: ValueError: no such thing\n" in capsys.readouterr().out


@pytest.mark.parametrize("span", [1, 2, 4])
def test_the_part_of_a_row_sees_what_the_row_says(span):
    slots = 32
    block = 8
    mask, tiles = gpu.part_of_row(slots, span, block)
    assert mask.queries.document.shape == (1, slots)
    assert mask.keys.document.shape == (1, span * slots)
    # Ranks take blocks in turn, so block n of the last rank sees `span` * (n + 1) blocks of keys
    assert tiles == sum(span * (position + 1) for position in range(slots // block))
    shape = Shape(heads=2, key_heads=1, size=16, block=block)
    q, k, v, _ = random_inputs((0,), slots, shape, keys=span * slots)
    actual = attention(q, k, v, mask, kernel="jax")
    queries = mask.queries.at((0, slice(None), None))
    keys = mask.keys.at((0, None))
    visible_pairs = visible(queries, keys)
    assert visible_pairs.sum() > slots * (slots + 1) // 2 or span == 1
    expected = jax.nn.dot_product_attention(q, k, v, mask=visible_pairs[None, None])
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=0.03)


@pytest.mark.slow
def test_kernels_agree_on_ragged_rows(bench):
    rows = gpu.mask_rows(bench)
    # cuDNN has no mask for images within text
    assert [row["kernel"] for row in rows] == 2 * (3 * ["gpu", "packed"] + ["gpu"])
    for row in rows:
        assert row["forward error"] < 0.02 and row["backward error"] < 0.02, row
        assert row["forward same bits"] and row["backward same bits"]


@pytest.mark.slow
def test_attention_is_measured_and_cudnn_is_missing(bench):
    rows = gpu.attention_rows(bench)
    assert [row["kernel"] for row in rows] == 2 * ["gpu", "packed", "cudnn", "jax"]
    assert all(("failed" in row) == (row["kernel"] == "cudnn") for row in rows)
    assert all(row["backward ms"] > 0 for row in rows if "failed" not in row)
    assert all(row["backward error"] < 0.02 for row in rows if "failed" not in row)
    assert [row["span"] for row in gpu.span_rows(bench)] == list(gpu.SPANS)


def test_the_exchange_leaves_the_sample_as_it_is(bench, monkeypatch):
    """The section `prediction` comes after it, and chooses sizes from the sample again."""

    def refuse(*_):
        raise ValueError("no programs here")

    monkeypatch.setattr(gpu, "prepare", refuse)
    file = bench.data / "train.jsonl"
    sample = file.read_text()
    assert [row["failed"] for row in gpu.exchange_rows(bench)] == 2 * [
        "ValueError: no programs here"
    ]
    assert file.read_text() == sample


def test_programs_that_are_not_predicted_are_named(bench, monkeypatch):
    needed = {"needed": 2e9, "temporaries": 1e9}

    def check(command, **_):
        row = {"program": "evaluate language 512", "memory": needed}
        Path(command[-1]).write_text(json.dumps({"rows": [row]}))

    names = [ProgramName("evaluate", "language", slots) for slots in (512, 1024)]
    bench.run = SimpleNamespace(config=bench.config())
    bench.programs = SimpleNamespace(compiled=dict.fromkeys([*names, ProgramName("zero", "")]))
    monkeypatch.setattr(gpu.subprocess, "run", check)
    monkeypatch.setattr(gpu, "memory_of", lambda _: SimpleNamespace(**needed))
    predicted, missing = gpu.prediction_rows(bench)
    assert predicted["predicted_gb"] == 2.0
    assert missing["program"] == "evaluate language 1024" and "no such program" in missing["failed"]


def test_of_several_devices_one_must_be_chosen(capsys):
    assert gpu.main(["--small"]) == 2
    assert "CUDA_VISIBLE_DEVICES=0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_runs_every_section(tmp_path):
    path = tmp_path / "gpu.json"
    sections = ["programs", "step", "profile", "calibration", "exchange", "prediction"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--seconds", "3000"]
    command += ["--json", str(path), "--folder", str(tmp_path), "--only", *sections]
    one_device = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    subprocess.run(command, cwd=ROOT, env=os.environ | one_device, check=True)
    rows = json.loads(path.read_text())["rows"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == sections
    # The ragged exchange may fail: not every XLA for CPUs has it. Where it runs, losses agree.
    assert not [row for row in rows if "failed" in row and row["section"] != "exchange"]
    timed = {row["phase"]: row for row in rows if row["section"] == "step"}
    assert timed.keys() == {"step", "vision", "audio", "language"}
    assert all(row["seconds"] > 0 and row["mfu"] > 0 for row in timed.values())
    passes = {(row["phase"], row["pass"]) for row in rows if "teraflops" in row}
    assert len(passes) == 6
    for row in rows:
        if row["section"] == "prediction":
            assert row["predicted_temporary_gb"] == pytest.approx(row["temporary_gb"], rel=0.3)
