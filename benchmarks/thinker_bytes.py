"""Bytes of a device that trains the thinkers of Qwen2.5-Omni-7B and Qwen3-Omni-30B-A3B on eight
devices, from shapes and shardings: nothing is allocated, and no program compiled.

    python -m benchmarks.thinker_bytes [--frozen-towers] [--json PATH]

Shapes are those of configs/. Everything is trained unless towers are frozen; parameters and moments
are float32, computations bfloat16. Rows, pools and kept residuals are those that `auto` chooses for
64 generated examples and 80 GiB.

    gradients   the sums of gradients over microbatches, in float32
    optimizer   two moments, and counts of updates, and of tokens by expert
    kept        what `encode` leaves for the backward pass of as many microbatches as `auto` keeps:
                residuals, or features of a frozen tower
    pools       tokens of encoders, and their gradients
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jaxmllm.cluster.held import device_bytes, resident
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.setup.planning_mesh import planning_mesh
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.generated_lengths import GeneratedLengths, generated_lengths
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.programs.phased import PhasedPrograms

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("qwen2.5-omni-7b", "qwen3-omni-30b-a3b")
MESHES = {
    "fsdp 8": {"data": 1, "fsdp": 8, "tensor": 1},
    "fsdp 4 x tensor 2": {"data": 1, "fsdp": 4, "tensor": 2},
}
TOWERS = ("vision", "audio")
PARTS = ("parameters", "gradients", "optimizer", "kept", "pools")
COLUMNS = ["model", "mesh", "parameters, 10^9", *(f"{part} GiB" for part in PARTS), "sum GiB"]
GENERATOR = "lengths of jaxmllm.tools.workload"


def thinker(name: str, mesh: str, frozen: bool = False) -> Config:
    """The config of a thinker on a mesh.

    Args:
      frozen: whether its towers are frozen.
    """
    sizes = [f"mesh.{axis}={size}" for axis, size in MESHES[mesh].items()]
    freeze = [f"components.{tower}.freeze={str(frozen).lower()}" for tower in TOWERS]
    return load_config(CONFIGS / f"{name}.yaml", [*sizes, *freeze])


def programs_of(lengths: GeneratedLengths) -> PhasedPrograms:
    programs = lengths.programs()
    assert isinstance(programs, PhasedPrograms)
    return programs


def kept_bytes(programs: PhasedPrograms) -> int:
    """Bytes that `encode` leaves for the backward pass: the residuals of all microbatches that keep
    them; for a frozen tower, the features of one microbatch."""
    total = 0
    for phase in programs.functions.model.config.encoders:
        capacity, span = max(programs.spec.phases[phase].classes)
        _, residuals, _ = programs.jobs[ProgramName("encode", phase, capacity, span)].result
        total += max(programs.kept_residuals.get(phase, 0), 1) * device_bytes(residuals)
    return total


def bytes_of(programs: PhasedPrograms) -> dict[str, int]:
    """Bytes of one device by what they hold, with the keys `PARTS`."""
    sizes = resident(programs)
    return {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "optimizer": sizes.optimizer,
        "kept": kept_bytes(programs),
        "pools": sizes.pools + sizes.pool_gradients,
    }


def measured(name: str, mesh: str, seed: int, frozen: bool = False) -> dict[str, Any]:
    """One row of the table."""
    config = thinker(name, mesh, frozen)
    programs = programs_of(generated_lengths(config, planning_mesh(config), seed))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(programs.params))
    sizes = bytes_of(programs)
    return {"model": name, "mesh": mesh, "numbers": numbers, **sizes, "sum": sum(sizes.values())}


def main() -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--frozen-towers",
        action="store_true",
        help="freeze the towers: train decoder and projectors",
    )
    options = parser.parse_args()
    rows = [
        measured(name, mesh, options.seed, options.frozen_towers)
        for name in MODELS
        for mesh in MESHES
    ]
    title = (
        f"bytes of one of 8 devices, {'towers frozen' if options.frozen_towers else 'all trained'}"
    )
    table = [
        [row["model"], row["mesh"], f"{row['numbers'] / 1e9:.2f}"]
        + [f"{row[key] / 2**30:.2f}" for key in (*PARTS, "sum")]
        for row in rows
    ]
    print_table(title, COLUMNS, table, left_aligned=2)
    write_json(options.json, "thinker_bytes", options.seed, GENERATOR, rows=rows)


if __name__ == "__main__":
    main()
