"""Batch size and weights that change during a run: what is written down, and what is reported."""

import json
from pathlib import Path

import pytest

from jaxmllm.data.batches import Segment
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.resume import begun_config, changes, check_compatible
from jaxmllm.training.history import continued_history, read_history, segment_of, write_history
from tests.training.test_resume_rules import make_config

FIRST = Segment(0, 4, (1.0,))


def test_history_survives_the_run_folder(tmp_path: Path) -> None:
    assert read_history(tmp_path) == ()
    history = (FIRST, Segment(7, 8, (2.0,)))
    write_history(tmp_path, history)
    assert read_history(tmp_path) == history


def test_an_unchanged_config_adds_nothing() -> None:
    assert continued_history((), FIRST, Path()) == ((FIRST,), [])
    assert continued_history((FIRST,), Segment(9, 4, (1.0,)), Path()) == ((FIRST,), [])


def test_a_change_counts_from_its_step_on() -> None:
    changed = Segment(9, 8, (1.0,))
    assert continued_history((FIRST,), changed, Path()) == ((FIRST, changed), [])
    changed_twice = Segment(9, 16, (3.0,))
    assert continued_history((FIRST, changed), changed_twice, Path()) == (
        (FIRST, changed_twice),
        [],
    ), "no step was done with it"
    unchanged = Segment(9, 4, (1.0,))
    assert continued_history((FIRST, changed), unchanged, Path()) == ((FIRST,), [])


def test_a_change_after_the_checkpoint_is_dropped_and_said() -> None:
    late = Segment(9, 8, (2.0,))
    history, (line,) = continued_history((FIRST, late), Segment(6, 4, (1.0,)), Path("run"))
    assert history == (FIRST,)
    assert line.startswith(
        "run/history.json: the batch size 8 and weights [2.0] from step 9 on are dropped"
    )
    history, lines = continued_history((FIRST, late), Segment(6, 8, (2.0,)), Path("run"))
    assert history == (FIRST, Segment(6, 8, (2.0,))) and len(lines) == 1


@pytest.mark.parametrize(
    "content",
    ["", "[", "{}", "[]", '[{"step": 3, "batch_size": 4, "weights": [1]}]', '[{"step": 0}]', "[1]"],
)
def test_a_damaged_history_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "history.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"history\.json is damaged .*model\.from=") as caught:
        read_history(tmp_path)
    assert "\n" not in str(caught.value)


def test_batch_size_and_weights_may_change_and_sources_may_not() -> None:
    saved = begun_config(make_config())
    heavier = make_config(
        data__batch_size=8, data__sources=[{"name": "s", "path": "s.jsonl", "weight": 3.0}]
    )
    check_compatible(saved, heavier)
    assert changes(saved, begun_config(heavier), 5) == [
        "from step 5: data.sources.0.weight 1.0 -> 3.0",
        "from step 5: data.batch_size 4 -> 8",
    ]
    assert segment_of(heavier, 5) == Segment(5, 8, (3.0,))
    with pytest.raises(CheckpointError, match=r"data\.sources\.0\.name: 's' in the run, 't' now"):
        check_compatible(saved, make_config(data__sources=[{"name": "t", "path": "s.jsonl"}]))


def test_the_file_is_readable(tmp_path: Path) -> None:
    write_history(tmp_path, (FIRST,))
    assert json.loads((tmp_path / "history.json").read_text()) == [
        {"step": 0, "batch_size": 4, "weights": [1.0]}
    ]
