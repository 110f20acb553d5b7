"""What programs of omni models send and keep, compiled for H100s that are not there, next to what
they must send.

    python -m benchmarks.ahead --json ahead.json                       all of it, a good half hour on two cores
    python -m benchmarks.ahead --model 84B --mesh "data x fsdp" [--only language_loss_and_grad]
        [--reduce-dtype float32 compute] [--reduce microbatch step] [--remat full "[attention, mlp]"]

Models are those of benchmarks/omni.py in bfloat16, on 64 and on 2,560 devices, with rows of 8,192
tokens, 16,384 patches and 8,192 frames. Needs no GPU, but `pip install 'jaxmllm[ahead]'`; without
it says so in a line and exits with 2. A setting or program that does not compile becomes a line of
the JSON's `failed`, and the command exits with 1.

The JSON's `rows` have one record for every program, and every operation and axes of the mesh along
which the program sends something or must:

    bytes             bytes that a device sends in a ring, summed over all places and trips of loops
    needed_bytes      bytes that a device must send in a ring, as `needed_bytes` counts them; null
                      where the data decide
    by_type           `bytes` by element type
    exact             whether all loops have a known number of trips; a loop with an unknown number
                      counts once
    temporary_gb      temporary memory of the program on one device
    resident_gb       what a device holds between programs: state, gradients, pools
    fallbacks         lines on what programs use in place of what was asked: slower attention,
                      another exchange
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.omni import omni_config
from jaxmllm.cluster.collectives import devices_along
from jaxmllm.cluster.sends import leaves
from jaxmllm.config import strict_yaml
from jaxmllm.config.schema import Config
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.ahead import (
    HOPS,
    OUTSIDE_STEPS,
    CheckedProgram,
    check_job,
    target_mesh,
    whole_axes,
)
from jaxmllm.setup.chips import Chip, ChipError, chip_of
from jaxmllm.setup.hlo import SENT
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.check import in_words, only_compile
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import DEFAULT_MIX
from jaxmllm.training.programs.base import ProgramName, Programs
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import USER_ERRORS
from sharding.rules import Layout

Kind = tuple[str, tuple[str, ...]]  # operation, axes

CHIP: Final = "h100"
DEVICES: Final = {"7B": 64, "84B": 2560}
# By model and name of a mesh: sections of the config. The factor 5 of the 2,560 devices of 84B is
# always in `data`, because no width is a multiple of 5.
MESHES: Final[Mapping[str, Mapping[str, dict[str, Any]]]] = {
    "7B": {
        "fsdp": {"mesh": {"data": 1, "fsdp": 64}},
        "data x fsdp": {"mesh": {"data": 8, "fsdp": 8}},
        "fsdp x tensor": {"mesh": {"data": 1, "fsdp": 16, "tensor": 4}},
        "context": {"mesh": {"data": 1, "fsdp": 16, "context": 4}},
        "spans": {"mesh": {"data": 1, "fsdp": 64}, "spans": [1, 4]},
        "2 stages": {"mesh": {"data": 1, "fsdp": 32}, "pipeline": {"stages": 2}},
        "4 stages": {"mesh": {"data": 1, "fsdp": 16}, "pipeline": {"stages": 4}},
    },
    "84B": {
        "fsdp": {"mesh": {"data": 5, "fsdp": 512}},
        "data x fsdp": {"mesh": {"data": 10, "fsdp": 256}},
        "fsdp x tensor": {"mesh": {"data": 10, "fsdp": 64, "tensor": 4}},
        "context": {"mesh": {"data": 10, "fsdp": 64, "context": 4}},
        "spans": {"mesh": {"data": 10, "fsdp": 256}, "spans": [1, 4]},
        "2 stages": {"mesh": {"data": 10, "fsdp": 128}, "pipeline": {"stages": 2}},
        "4 stages": {"mesh": {"data": 10, "fsdp": 64}, "pipeline": {"stages": 4}},
    },
}
CAPACITIES: Final = {"vision": 16_384, "audio": 8_192, LANGUAGE: 8_192}
# Examples of several images are left out, because they are longer than a row
MIX: Final = {task: weight for task, weight in DEFAULT_MIX.items() if task != "multi_image"}
PER_DEVICE: Final = 2  # examples
FORWARD: Final = ("encode", "evaluate")
BOTH_PASSES: Final = ("encode_grad", "language_loss_and_grad")
BACKWARD: Final = (*BOTH_PASSES, "encode_grad_kept")
# Functions whose programs a step of these models runs
FUNCTIONS: Final = (
    *(*FORWARD, *BACKWARD, *HOPS),
    *("deliver", "deliver_back", "add_replicas", "update", "gradients"),
)
COLUMNS: Final = ["program", "operation", "axes", "types", "GB", "needed GB", "temporary GB"]
GENERATOR: Final = "jaxmllm.tools.workload.generate([seed, i], 2 examples a device), no multi_image"


class Setting(NamedTuple):
    """A combination whose programs are compiled."""

    model: str
    mesh: str
    remat: str = "full"  # as in YAML
    reduce_dtype: str = "float32"  # type in which gradients are sent
    reduce: str = "microbatch"  # when gradients are sent

    def config(self) -> Config:
        """The config of the setting, with the rows of `CAPACITIES`."""
        sections = dict(MESHES[self.model][self.mesh])
        spans = sections.pop("spans", [1])
        # Rows of towers hold whole images on one rank; only language rows are shared
        spans_by_phase = {phase: [1] for phase in CAPACITIES} | {LANGUAGE: spans}
        phases = {
            phase: {"capacities": [slots], "spans": spans_by_phase[phase]}
            for phase, slots in CAPACITIES.items()
        }
        data = {"batch_size": PER_DEVICE * DEVICES[self.model]}
        remat = strict_yaml.read_text(self.remat)
        components = {"remat": remat, "reduce_dtype": self.reduce_dtype, "reduce": self.reduce}
        return omni_config(self.model, phases=phases, data=data, **components, **sections)

    def __str__(self) -> str:
        words = f"{self.model}, {self.mesh}, remat {self.remat}"
        words += "" if self.reduce_dtype == "float32" else ", sums as computed"
        return words if self.reduce == "microbatch" else f"{words}, reduced once a step"


# ---------------------------------------------------------------------------- what must be sent


def needed_bytes(programs: Programs, name: ProgramName) -> dict[Kind, float] | None:
    """Bytes that one device must send at least for a program, in a ring, by operation and axes of
    the mesh. None where the data decide: exchanges of media, and pipelines.

    * Weights are gathered over the axes that shard them between uses, in the type of the
      computation: weights of layers once in the forward pass and once in the backward pass, all
      other weights (embedding, head, projector) once.
    * Gradients leave a backward pass by a reduce-scatter over the same axes, in the type of the
      computation, because each rank's own gradient has that type; adding microbatches in float32
      sends nothing. Over replicas they are added once per step, in float32, as shards, by
      `add_replicas`. With `reduce: step` that program also scatters the sums, in float32, to the
      shards, and no program does so before.
    * Rows of several parts gather keys and values of all their layers once in each pass, and
      reduce-scatter the gradients of these once.
    * Axes that split layers inside (`tensor`) add up activations twice per layer in each pass, once
      after the lookup of tokens and once before the backward pass of the head.
    """
    if not isinstance(programs, PhasedPrograms) or name.function in HOPS:
        return None
    mesh = programs.mesh
    assert isinstance(mesh, Mesh)
    bytes_by_kind: dict[Kind, float] = defaultdict(float)

    def send(operation: str, layout: Layout, axes: Sequence[str], size: float) -> None:
        """Count an operation on `size` bytes, unless it has one device along the axes."""
        device_count = math.prod(layout.mesh.shape[axis] for axis in axes)
        if size and device_count > 1:
            split_axes = tuple(axis for axis in axes if layout.mesh.shape[axis] > 1)
            bytes_by_kind[operation, whole_axes(split_axes, mesh)] += (
                SENT[operation](device_count) * size
            )

    if name.function == "add_replicas":
        for component, trained_params in programs.trained.items():
            settings = programs.functions.model.components[component]
            layout = settings.layout
            reduces_per_step = settings.settings.reduce == "step"
            for leaf in leaves(trained_params, settings):
                send(
                    "reduce-scatter",
                    layout,
                    leaf.gathered,
                    reduces_per_step * 4 * leaf.size / leaf.split,
                )
                shard = leaf.size / leaf.split / devices_along(layout, leaf.gathered)
                send("all-reduce", layout, leaf.replicas, 4 * shard)
        return dict(bytes_by_kind)
    if name.function not in (*FORWARD, *BACKWARD):
        return {}
    functions = programs.functions.spanned(name.subject, name.span)
    model = functions.model
    backward = name.function in BACKWARD
    passes = 2 if name.function in BOTH_PASSES else 1
    for component in model.phases[name.subject].components:
        settings = model.components[component]
        itemsize = jnp.dtype(settings.dtype).itemsize
        scatters = backward and settings.settings.reduce == "microbatch"
        for leaf in leaves(programs.params[component], settings):
            gathers = passes if leaf.layer else 1
            full_bytes = itemsize * leaf.size / leaf.split
            send("all-gather", settings.layout, leaf.gathered, gathers * full_bytes)
        for leaf in leaves(programs.trained.get(component, {}), settings):
            full_bytes = itemsize * leaf.size / leaf.split
            send("reduce-scatter", settings.layout, leaf.gathered, scatters * full_bytes)

    settings = model.components[name.subject]
    layout = settings.layout
    shapes = getattr(model.config, name.subject)
    stride = getattr(shapes, "stem_stride", 1)
    tokens = name.capacity * name.span / stride  # of the whole row, on all ranks that hold it
    keys_and_values = tokens * model.key_value_bytes(name.subject) / layout.size("kv_heads")
    sequence_axes = layout.mesh_axes("sequence")
    send("all-gather", layout, sequence_axes, passes * keys_and_values)
    send("reduce-scatter", layout, sequence_axes, backward * keys_and_values)
    activations = tokens / layout.parts * shapes.width * jnp.dtype(settings.dtype).itemsize
    # Per pass: two sums for each layer, and in the decoder one for the lookup (forward) or for the
    # head (backward)
    sums = 2 * shapes.layers + (name.subject == LANGUAGE)
    send("all-reduce", layout, layout.mesh_axes("mlp"), passes * sums * activations)
    return dict(bytes_by_kind)


# ---------------------------------------------------------------------------- what is sent


def resident_bytes(programs: Programs) -> int:
    """Bytes that a device holds between programs: parameters and moments, gradients, and one pool
    of each kind."""
    pools = getattr(programs, "pools", {})
    gradients = getattr(programs, "accumulators", programs.trained)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((programs.state, gradients, pools))
    )


def rows_of(
    facts: Mapping[str, Any], checked: CheckedProgram, needed: dict[Kind, float] | None
) -> list[dict[str, Any]]:
    """The records of a program, one for every operation and axes, in falling order of bytes
    sent."""
    sent_by_kind: dict[Kind, dict[str, float]] = {}
    exact_by_kind: dict[Kind, bool] = {}
    for transfer in checked.transfers:
        kind = (transfer.operation, transfer.axes)
        by_type = sent_by_kind.setdefault(kind, {})
        by_type[transfer.dtype] = by_type.get(transfer.dtype, 0) + transfer.sent_bytes
        exact_by_kind[kind] = exact_by_kind.get(kind, True) and transfer.exact
    kinds = sorted(
        {*sent_by_kind, *(needed or {})}, key=lambda kind: -sum(sent_by_kind.get(kind, {}).values())
    )
    return [
        {
            **facts,
            "program": in_words(checked.name),
            "operation": operation,
            "axes": list(axes),
            "bytes": sum(sent_by_kind.get((operation, axes), {}).values()),
            "needed_bytes": None if needed is None else needed.get((operation, axes), 0.0),
            "by_type": sent_by_kind.get((operation, axes), {}),
            "exact": exact_by_kind.get((operation, axes), True),
            "temporary_gb": checked.memory.temporaries / 1e9,
            "compile_seconds": checked.compile_seconds,
            "fallbacks": list(checked.fallbacks),
        }
        for operation, axes in kinds
    ]


def measure(
    setting: Setting, chip: Chip, only: Sequence[str] | None, seed: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of one setting, printed as each program is compiled; and a line for each program
    that does not compile."""
    config = setting.config()
    devices = target_mesh(config, chip, DEVICES[setting.model])
    programs = generated_lengths(config, devices, seed, MIX).programs()
    facts = {
        "model": setting.model,
        "devices": DEVICES[setting.model],
        "mesh": setting.mesh,
        "remat": setting.remat,
        "reduce_dtype": setting.reduce_dtype,
        "reduce": setting.reduce,
        "resident_gb": resident_bytes(programs) / 1e9,
    }
    rows = []
    failures = []
    for name, job in programs.jobs.items():
        if name.function in OUTSIDE_STEPS or (only and name.function not in only):
            continue
        start = time.perf_counter()
        try:
            checked = check_job(config, programs, name, job, chip)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            failures.append(f"{setting}: {in_words(name)} does not compile: {reason}")
            print(f"error: {failures[-1]}", file=sys.stderr, flush=True)
            continue
        program_rows = rows_of(facts, checked, needed_bytes(programs, name))
        rows += program_rows
        sent_bytes = sum(row["bytes"] for row in program_rows)
        needed = [row["needed_bytes"] for row in program_rows]
        print(
            f"{setting}: {in_words(name)}: sends {sent_bytes / 1e9:.1f} GB, needed "
            f"{'-' if None in needed else f'{sum(needed) / 1e9:.1f}'}; temporary "
            f"{checked.memory.temporaries / 1e9:.1f} GB; {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        for line in checked.fallbacks:
            print(f"  {line}", flush=True)
    return rows, failures


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--model", choices=MESHES, help="model to compile (default: all)")
    meshes = list(dict.fromkeys(mesh for model_meshes in MESHES.values() for mesh in model_meshes))
    parser.add_argument("--mesh", choices=meshes, help="mesh to compile for (default: all)")
    parser.add_argument(
        "--remat",
        nargs="+",
        default=["full"],
        help="values of remat, of towers and decoder (default: full)",
    )
    parser.add_argument(
        "--reduce-dtype",
        nargs="+",
        default=["float32"],
        help="values of reduce_dtype (default: float32)",
    )
    parser.add_argument(
        "--reduce", nargs="+", default=["microbatch"], help="values of reduce (default: microbatch)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=FUNCTIONS, help="functions to compile (default: all)"
    )
    options = parser.parse_args(command)
    only_compile()
    models = MESHES if options.model is None else [options.model]
    settings = [
        Setting(model, mesh, remat, reduce_dtype, reduce)
        for model in models
        for mesh in (MESHES[model] if options.mesh is None else [options.mesh])
        for remat in options.remat
        for reduce_dtype in options.reduce_dtype
        for reduce in options.reduce
    ]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for setting in settings:
        try:
            setting_rows, setting_failures = measure(
                setting, chip_of(CHIP), options.only, options.seed
            )
            rows += setting_rows
            failures += setting_failures
        except ChipError as error:
            print(f"benchmarks.ahead compiles nothing: {error}", file=sys.stderr)
            return 2
        except USER_ERRORS as error:
            failures.append(f"{setting}: {error}")
            print(f"error: {failures[-1]}", file=sys.stderr, flush=True)
    show(rows)
    write_json(
        options.json, "ahead", options.seed, GENERATOR, chip=CHIP, rows=rows, failed=failures
    )
    return 1 if failures else 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for every setting."""
    tables: dict[str, list[list[Any]]] = {}
    for row in rows:
        title = (
            f"{row['model']} on {row['devices']} of {CHIP}, {row['mesh']}, remat {row['remat']}, "
            f"sums in {row['reduce_dtype']} once a {row['reduce']}: "
            f"{row['resident_gb']:.1f} GB between programs"
        )
        needed = row["needed_bytes"]
        tables.setdefault(title, []).append(
            [
                row["program"],
                row["operation"],
                ", ".join(row["axes"]),
                ", ".join(row["by_type"]),
                row["bytes"] / 1e9,
                None if needed is None else needed / 1e9,
                row["temporary_gb"],
            ]
        )
    for title, lines in tables.items():
        print_table(title, COLUMNS, lines, left_aligned=4)


if __name__ == "__main__":
    sys.exit(main())
