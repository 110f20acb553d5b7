"""Lengths of examples in a folder, as benchmarks draw them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import balance, pipeline
from benchmarks.file_lengths import FileLengths
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.tools.workload import PHASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    make_sample(path, train=64, test=4)
    (path / "test.jsonl").unlink()
    return path


def test_examples_come_in_the_order_drawn(folder):
    """The folder needs no held-out examples."""
    files = FileLengths.of(folder, tuple(PHASES))
    batch = files.draw([0, 1], 16)
    expected = np.random.default_rng([0, 1]).integers(0, 64, 16)
    assert batch.examples.tolist() == expected.tolist() != sorted(expected.tolist())
    for position, example in enumerate(expected.tolist()):
        single = files.corpus.gather(np.array([example]))
        for phase, items in batch.phases.items():
            lengths = items.length[items.example == position]
            assert lengths.tolist() == single.phases[phase].length.tolist()


@pytest.mark.parametrize(
    "command",
    [
        (balance.main, ["--settings", "1x1"]),
        (pipeline.main, ["--families", "layouts", "real"]),
    ],
)
def test_a_folder_without_examples_is_one_line(command, tmp_path, monkeypatch, capsys):
    """The error comes before anything is measured."""
    main, arguments = command
    monkeypatch.setattr(pipeline, "measure", None)
    assert main([*arguments, "--data", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "train.jsonl" in error and error.count("\n") == 1
