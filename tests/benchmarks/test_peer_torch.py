"""The comparison with torch: its records and its checks of losses and parameters.

Where torch is installed, a tiny model runs in both systems.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import peer_torch
from benchmarks.peers.examples import Item, KeptCorpus
from jaxmllm.setup.prepare import prepare
from sharding.mesh import make_mesh
from tests.support import needs


def told(losses, seconds, targets=10):
    """Records of steps with these losses and seconds."""
    return [
        {
            "loss": loss,
            "seconds": step_seconds,
            "cpu_seconds": step_seconds,
            "targets": targets,
            "parts": {"update": step_seconds / 4},
        }
        for loss, step_seconds in zip(losses, seconds, strict=True)
    ]


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peer_torch.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["--micro-batch 1 -1 1", "--micro-batch 1 1 0", "--steps 0", "--threads 4096"],
)
def test_bad_arguments_are_refused_at_once(arguments, monkeypatch, capsys):
    """Before it looks for the other system."""
    monkeypatch.setattr(importlib.util, "find_spec", None)
    with pytest.raises(SystemExit) as exit_info:
        peer_torch.main(arguments.split())
    assert exit_info.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_default_is_no_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(peer_torch, "cores", lambda: [3])
    parser = argparse.ArgumentParser()
    peer_torch.add_threads(parser, 2)
    assert parser.parse_args([]).threads == 1


def test_ratios_are_over_the_same_batch():
    measured = {
        "told": {
            "packed": told([2.0, 2.0, 2.0], [2.0, 6.0, 3.0]),
            "ours": told([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]),
        },
        "by_program": [{"language forward and backward": 0.5}] * 3,
        "settings": {"packed": {"micro_batch": 4, "parameters": {"language": 7}}},
        "parameters": {"language": 7},
    }
    packed_row, own_row = peer_torch.rows_of(measured)
    assert packed_row["over_ours"]["median"] == 2 and own_row["over_ours"]["median"] == 1
    assert packed_row["seconds"]["median"] == 3 and packed_row["micro_batch"] == 4
    assert own_row["parts"] == {
        "update": 0.5,
        "language forward and backward": 0.5,
        "rest": pytest.approx(1.0),
    }


def test_systems_that_compute_something_else_are_named():
    agreeing = {"packed": told([2.0, 1.5], [1, 1]), "ours": told([2.0, 1.6], [1, 1])}
    peer_torch.check_losses(agreeing)
    for deviating in (
        told([2.1, 1.5], [1, 1]),
        told([2.0, np.nan], [1, 1]),
        told([2.0, 1.5], [1, 1], 9),
    ):
        with pytest.raises(ValueError, match="packed"):
            peer_torch.check_losses(agreeing | {"packed": deviating})
    peer_torch.check_parameters("padded", {"audio": 1005}, {"audio": 1000})
    with pytest.raises(ValueError, match="audio"):
        peer_torch.check_parameters("padded", {"audio": 1020}, {"audio": 1000})


@pytest.mark.slow
def test_generated_examples_are_read_as_they_were_drawn(tmp_path):
    config = peer_torch.config_of("tiny", None, tmp_path, 0, [])
    inputs = prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:1]))
    assert len(inputs.corpus) == peer_torch.EXAMPLES and not inputs.corpus.rejected
    corpus = KeptCorpus(inputs.corpus)
    indices = np.arange(64)
    examples = corpus.read(indices)
    items = corpus.gather(indices)
    assert [len(example.tokens) for example in examples] == items.phases["language"].length.tolist()
    for phase in config.model.encoders:
        phase_items = [i for example in examples for i in example.items if i.phase == phase]
        assert [len(read_item.features) for read_item in phase_items] == items.phases[
            phase
        ].length.tolist()
        assert len(set(map(len, (read_item.features for read_item in phase_items)))) > 3
    reread = corpus.read(indices[:1])[0]
    assert all(
        item.features is reread_item.features
        for item, reread_item in zip(examples[0].items, reread.items, strict=True)
    )


@needs("torch", "transformers")
def test_a_given_micro_batch_is_timed_like_those_that_are_tried(monkeypatch):
    """The slow first step of a process must not count against the form that is timed first."""
    from benchmarks.peers.torch_steps import Stepper

    seconds = iter([9.0, 2.0, 3.0])
    monkeypatch.setattr(Stepper, "__init__", lambda self: None)
    monkeypatch.setattr(Stepper, "__call__", lambda *_, updates: {"seconds": next(seconds)})
    stepper = Stepper()
    assert stepper.tune([0] * 8, 4) == 2.0 and stepper.size == 4


@needs("torch", "transformers")
def test_the_packed_peer_reads_zeros_behind_the_end_of_a_clip():
    """As our model does (models/mllm.py): gradients through norms of padding would explode."""
    import torch

    from benchmarks.peers.torch_steps import STRIDE, PackedModel

    frames = 4 * STRIDE
    clip = Item(
        phase="audio",
        slot=0,
        tokens=2,
        real=2 * STRIDE + 1,
        features=np.ones((frames, 8), np.float32),
        positions=np.arange(frames)[:, None] // STRIDE,
        shape=(frames, 1, 1),
    )
    model = SimpleNamespace(
        config=SimpleNamespace(
            audio=SimpleNamespace(chunk_frames=32, head_size=4, rope_theta=10_000.0)
        ),
        first=torch.nn.Linear(3 * 8, 6),
        second=torch.nn.Linear(3 * 6, 6),
        towers={"audio": lambda x, segments, angles: torch.ones_like(x)},
        gathers=False,
    )
    output = PackedModel._audio(model, [clip])
    assert output[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.slow
def test_packed_peer_has_our_loss(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(peer_torch, "use_cores", lambda threads: None)
    path = tmp_path / "peer.json"
    overrides = ["--micro-batch", "2", "2", "4", "data.batch_size=4"]
    assert peer_torch.main(["--size", "tiny", "--steps", "1", "--json", str(path), *overrides]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["system"] for row in rows] == [*peer_torch.PEERS, "ours"]
    packed_row, own_row = rows[-2:]
    assert packed_row["loss"] == pytest.approx(own_row["loss"], rel=peer_torch.SAME_LOSS)
    assert all(row["seconds"]["median"] > 0 for row in rows)
