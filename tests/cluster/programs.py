"""A tiny omni model on CPU devices, for what is predicted of its programs."""

from __future__ import annotations

import jax

from benchmarks.ahead import MIX
from benchmarks.omni import omni_config
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.tools.generated_lengths import generated_lengths
from sharding.mesh import make_mesh


def tiny(**sections):
    """The config and programs of `tiny_lengths`."""
    lengths = tiny_lengths(**sections)
    return lengths.config, lengths.programs()


CAPACITIES = {"vision": [16384], "audio": [16384], "language": [4096]}


def tiny_lengths(
    devices=8, frozen=(), capacities=CAPACITIES, kept=None, adapters=None, experts=None, **sections
):
    """A tiny omni model that computes in float32, for XLA sends nothing else on CPU, and batches for it.

    `kept`: what else is said of phases, by phase. `experts`: of the decoder.
    """
    phases = {
        phase: {"capacities": of_phase, "spans": [1]} | (kept or {}).get(phase, {})
        for phase, of_phase in capacities.items()
    }
    tree = config_tree(omni_config("tiny", phases=phases, data={"batch_size": 16}, **sections))
    of_projectors = tree["components"]["projector"]
    for component in (*tree["components"].values(), *of_projectors.values()):
        if "compute_dtype" in component:
            component["compute_dtype"] = "float32"
    tree["model"]["adapters"] = adapters or {}
    tree["model"]["language"]["experts"] = experts
    for component in frozen:
        tree["components"][component]["freeze"] = True
    config = parse_config(tree)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices])
    return generated_lengths(config, mesh, 0, MIX)
