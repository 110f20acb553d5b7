"""Predictions beside compiled programs, and what is said where nothing can be compiled."""

from __future__ import annotations

import json

import jax
import pytest

from benchmarks import planner, planner_ahead
from benchmarks.planner_ahead import Point, ahead_rows, key_of, main, rows_of, stored
from jaxmllm.setup.ahead import OUTSIDE_STEPS
from jaxmllm.setup.chips import ChipError
from jaxmllm.tools.generated_lengths import generated_lengths
from sharding.mesh import make_mesh

POINT = Point("tiny", {"data": 2, "fsdp": 4}, "full", 4096, vision=16_384, audio=16_384)


def test_points_cover_what_is_asked_of_them():
    points = planner_ahead.POINTS
    assert sum(len(point.programs) for point in points) >= 30
    assert {point.model for point in points} == {"2B", "7B", "30B-A3B", "84B"}
    assert {point.remat for point in points} == {"none", "dots", "full"}
    assert {point.language for point in points} >= {4096, 8192, 16_384, 24_576}
    assert any(point.frozen for point in points) and any(point.stages == 2 for point in points)
    axes = {axis for point in points for axis, size in point.mesh.items() if size > 1}
    assert axes == {"data", "fsdp", "tensor", "context"}


def test_rows_set_predictions_beside_what_was_compiled():
    config = POINT.config()
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:8])
    programs = generated_lengths(config, mesh, 0, planner_ahead.MIX).programs()
    names = POINT.chosen(programs)
    assert {name.subject for name in names} == {"language", "vision"}
    assert not {name.function for name in names} & {*OUTSIDE_STEPS}
    facts = {
        "temporaries": 10**9,
        "arguments": 5,
        "sent": {"all-gather fsdp": 2e6, "all-to-all fsdp": 3.0},
    }
    arguments, memory, *sends = rows_of(POINT, programs, names[0], facts)
    assert (arguments["what"], memory["what"]) == ("arguments", "temporaries")
    assert memory["kind"] == "memory" and memory["compiled"] == 10**9 and memory["moment"]
    assert memory["error"] == memory["estimated"] / 10**9 - 1
    assert [(row["operation"], row["axes"]) for row in sends] == [("all-gather", ["fsdp"])]
    assert sends[0]["compiled_bytes"] == 2e6 and sends[0]["predicted_bytes"] > 0


def test_what_was_compiled_before_is_read(tmp_path):
    path = tmp_path / "earlier.json"
    facts = {key_of(POINT, "update"): {"temporaries": 1, "arguments": 2, "sent": {}}}
    path.write_text(json.dumps({"compiled": facts}))
    assert stored(path) == facts and stored(None) == {}
    # The key of a point does not depend on which of its programs are compiled
    assert key_of(POINT._replace(programs=()), "update") in facts


@pytest.fixture
def no_compiler(monkeypatch):
    def absent(chip, count):
        raise ChipError("compiling for h100 needs its packages")

    monkeypatch.setattr(planner_ahead, "only_compile", lambda: None)
    monkeypatch.setattr("jaxmllm.setup.ahead.chip_devices", absent)


def test_without_a_compiler_a_line_says_so(no_compiler, capsys):
    assert ahead_rows(0) == [] and main(["--models", "2B"]) == 2
    error = capsys.readouterr().err
    assert error.count("memory and collectives are not compared: compiling for h100 needs") == 2


@pytest.mark.parametrize("command", [main, planner.main])
def test_what_is_no_earlier_run_is_refused_before_anything_is_compiled(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(planner_ahead, "ahead_rows", None)
    unrelated = tmp_path / "other.json"
    unrelated.write_text("{}")
    for path, message in (
        (tmp_path / "none.json", "No such file"),
        (unrelated, "is no JSON of `python -m benchmarks.planner_ahead`"),
    ):
        with pytest.raises(SystemExit):
            command(["--compiled", str(path)])
        assert message in capsys.readouterr().err


def test_unknown_models_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(planner_ahead, "ahead_rows", None)
    with pytest.raises(SystemExit):
        main(["--models", "3B"])
    assert "invalid choice: '3B'" in capsys.readouterr().err
