"""The comparison with transformers: its records and its check of losses.

Where torch is installed, a tiny model runs in both systems.
"""

import json
import sys

import numpy as np
import pytest

from benchmarks import peer_hf
from benchmarks.peers.examples import Example, Item
from tests.support import needs


def told(seconds, loss=2.0):
    """Records of steps that took these seconds."""
    common = {"host": 0.5, "loss": loss, "targets": 10, "slots": 30, "peak_bytes": 7}
    return [
        {"seconds": step_seconds, "cpu_seconds": 2 * step_seconds, **common}
        for step_seconds in seconds
    ]


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(peer_hf, "has_modules", lambda *names: False)
    assert peer_hf.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.undo()
    assert not peer_hf.has_modules("/no/such/python", "json")
    assert not peer_hf.has_modules(sys.executable, "no_such_module")


@pytest.mark.parametrize(
    "arguments",
    ["--smaller 0", "--smaller nan", "--steps 0", "--micro-batch -1", "--threads 4096"],
)
def test_bad_arguments_are_refused_at_once(arguments, monkeypatch, capsys):
    """Before it looks for the other system."""
    monkeypatch.setattr(peer_hf, "has_modules", None)
    with pytest.raises(SystemExit) as exit_info:
        peer_hf.main(arguments.split())
    assert exit_info.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_ratios_are_over_the_same_batch():
    measured = {
        "told": {"padded": told([2.5, 6.5, 3.5]), "jaxmllm": told([1.5, 2.5, 3.5])},
        "batches": [{"language": 20, "vision": 40, "audio": 0}] * 3,
        "compile_seconds": 5.0,
        "parameters": {"padded": 8, "jaxmllm": 8},
    }
    padded_row, own_row = peer_hf.rows_of(measured, examples=6)
    assert padded_row["over_jaxmllm"] == pytest.approx(2.5 / 1.5)
    assert own_row["over_jaxmllm"] == own_row["cpu_over_jaxmllm"] == 1
    assert own_row["compute_seconds"] == 2 and own_row["examples_per_compute_second"] == 3
    assert own_row["tokens_per_second"] == {"language": 8, "vision": 16, "audio": 0}
    assert (
        own_row["padding"] == 1.5
        and own_row["compile_seconds"] == 5
        and not padded_row["compile_seconds"]
    )


def test_other_losses_end_it():
    peer_hf.check_losses({"padded": 2.00005, "jaxmllm": 2.0})
    for loss in (2.001, float("nan")):
        with pytest.raises(ValueError, match=r"padded: the loss is .*, and 2.0 in jaxmllm"):
            peer_hf.check_losses({"padded": loss, "jaxmllm": 2.0})


def test_batches_hold_what_another_process_needs(tmp_path):
    line = np.arange(5, dtype=np.int32)
    shape = (1, 2, 2)
    features = np.ones((4, 3), np.uint8)
    picture = Item("vision", 1, 1, 4, features, np.zeros((4, 2), np.int32), shape)
    frames = np.ones((8, 2), np.float32)
    clip = Item("audio", 2, 1, 5, frames, np.zeros((8, 2), np.int32), (5, 1, 1))
    example = Example(line, line, np.zeros((5, 3), np.int32), (picture, clip))
    peer_hf.write_batch(tmp_path / "batch.npz", [example])
    arrays = np.load(tmp_path / "batch.npz")
    assert arrays["counts"].tolist() == [[1, 1]]
    assert arrays["grid_0_0"].tolist() == [1, 2, 2]
    assert arrays["clip_0_0"].shape == (5, 2), "without what fills up its slots"
    assert peer_hf.tokens_of([example]) == {"language": 5, "vision": 4, "audio": 5}


@pytest.mark.slow
@needs("torch", "transformers")
def test_a_tiny_model_begins_with_the_same_loss(tmp_path):
    path = tmp_path / "found.json"
    arguments = ["--size", "tiny", "--steps", "1", "--examples", "8", "--smaller", "32"]
    assert peer_hf.main([*arguments, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["system"] for row in record["rows"]] == ["padded", "grouped", "jaxmllm"]
