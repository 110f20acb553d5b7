"""A tiny omni model on CPU devices, whose programs are both predicted and compiled."""

from __future__ import annotations

import jax
import pytest

from benchmarks.ahead import MIX
from benchmarks.omni import omni_config
from jaxmllm.cluster.sends import program_sends, ring_bytes
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.setup.ahead import check_job
from jaxmllm.setup.chips import CHIPS
from jaxmllm.tools.generated_lengths import generated_lengths
from sharding.mesh import make_mesh

CLOSE = 0.02
SMALL = 1000  # bytes: sums of single numbers are smaller


def tiny(**sections):
    """The config and programs of `tiny_lengths`."""
    lengths = tiny_lengths(**sections)
    return lengths.config, lengths.programs()


CAPACITIES = {"vision": [16384], "audio": [16384], "language": [4096]}


def tiny_lengths(
    devices=8,
    frozen=(),
    capacities=CAPACITIES,
    kept=None,
    adapters=None,
    experts=None,
    layout=None,
    **sections,
):
    """Generated batches for a tiny omni model that computes in float32.

    XLA on CPU sends no other dtype, so that bfloat16 would be sent as float32.

    Args:
      kept: further keys of phases, by phase.
      experts: `model.language.experts`.
      layout: the layout of the decoder.
    """
    phases = {
        phase: {"capacities": slots, "spans": [1]} | (kept or {}).get(phase, {})
        for phase, slots in capacities.items()
    }
    tree = config_tree(omni_config("tiny", phases=phases, data={"batch_size": 16}, **sections))
    projectors = tree["components"]["projector"]
    for component in (*tree["components"].values(), *projectors.values()):
        if "compute_dtype" in component:
            component["compute_dtype"] = "float32"
    tree["model"]["adapters"] = adapters or {}
    tree["model"]["language"]["experts"] = experts
    tree["components"]["language"]["layout"] = layout or {}
    for component in frozen:
        *prefix, name = component.split(".")
        (projectors if prefix else tree["components"])[name]["freeze"] = True
    config = parse_config(tree)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices])
    return generated_lengths(config, mesh, 0, MIX)


def compiled_bytes(config, programs, name):
    """Bytes that the compiled program sends, by operation and axes.

    Index arrays, and loops whose number of trips is not known, are left out.
    """
    totals: dict = {}
    for transfer in check_job(config, programs, name, programs.jobs[name], CHIPS["cpu"]).transfers:
        if transfer.exact and transfer.dtype != "s32":
            key = (transfer.operation, transfer.axes)
            totals[key] = totals.get(key, 0) + transfer.sent_bytes
    return {key: total for key, total in totals.items() if total > SMALL}


def assert_agrees(config, programs, name):
    """Assert that a program is predicted to send what its compiled text says."""
    sends = program_sends(programs, name)
    assert sends is not None
    expected = ring_bytes(send for send in sends if not send.by_data)
    compiled = compiled_bytes(config, programs, name)
    assert expected.keys() == compiled.keys()
    for key, sent in compiled.items():
        assert expected[key] == pytest.approx(sent, rel=CLOSE), (name, key)
