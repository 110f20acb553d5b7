"""The programs of a run, compiled for devices that are not there, and what the compiler says of
them.

    config, chip, devices --target_mesh--> mesh --prepare, plan_programs--> jobs
                          --check_job--> CheckedProgram

Nothing runs. The jobs are those of a run, so they send and keep what a run would.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxmllm.attention.kernel_jax import LOOP_SCOPE
from jaxmllm.config.schema import Config
from jaxmllm.runtime.compiler_options import compiler_options
from jaxmllm.setup.chips import Chip, chip_devices
from jaxmllm.setup.hlo import Collective, Module, collectives, mesh_axes, parse
from jaxmllm.setup.spans import node_spans
from jaxmllm.training.programs.base import Job, ProgramName, Programs
from sharding.mesh import make_mesh, whole_axis

RAGGED = "ragged-all-to-all"
HOPS = ("hop", "hop_back")
# Functions that run once per run, or cost next to nothing
OUTSIDE_STEPS = (
    *("zero", "totals", "init", "stage_params", "to_saved", "from_saved", "add"),
    "count_failed",
)
PRODUCTS = "__cublas"  # prefix of the targets that XLA calls for products of matrices


@dataclass(frozen=True)
class Memory:
    """Bytes that a program takes on one device, by what they are."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, those that take the place of arguments
    temporaries: int
    code: int

    @property
    def needed(self) -> int:
        """Bytes that the program needs at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class Transfer:
    """Collectives of one program that differ only in where they are in it."""

    operation: str
    axes: tuple[str, ...]  # of the mesh
    dtype: str
    bytes: int  # of one; see `Collective`
    trips: int
    exact: bool
    count: int  # places in the program
    sent_bytes: float  # by a device, in all places and trips
    scopes: tuple[str, ...]  # places in the traced program that they come from

    @property
    def total_bytes(self) -> int:
        """Bytes of all places and trips."""
        return self.bytes * self.trips * self.count


@dataclass(frozen=True)
class CheckedProgram:
    """What the compiler says of one program."""

    name: ProgramName
    lower_seconds: float
    compile_seconds: float
    memory: Memory
    transfers: tuple[Transfer, ...]
    custom_calls: Mapping[str, int]  # by target, such as kernels of Pallas; without products
    fallbacks: tuple[str, ...]  # lines on what was compiled to something else than was asked for


@dataclass(frozen=True)
class FailedProgram:
    """A program that does not compile."""

    name: ProgramName
    reason: str  # in one line


def target_mesh(config: Config, chip: Chip, devices: int) -> Mesh:
    """The config's mesh over devices of a chip.

    Raises:
      ChipError: there are no such devices to compile for.
      MeshError: the mesh has another number of devices.
    """
    return make_mesh(
        config.mesh_sizes, chip_devices(chip, devices), spans=node_spans(config, config.mesh_sizes)
    )


def check_job(
    config: Config, programs: Programs, name: ProgramName, job: Job, chip: Chip
) -> CheckedProgram:
    """Compile one of `programs.jobs` and read the compiled program."""
    began = time.perf_counter()
    lowered = job.lower()
    traced = time.perf_counter()
    options = compiler_options(chip.platform) | dict(chip.compiler_options)
    compiled = lowered.compile(compiler_options=options)
    ended = time.perf_counter()
    mesh = programs.mesh
    assert isinstance(mesh, Mesh)
    text = compiled.as_text()
    assert text is not None
    module = parse(text)
    memory = memory_of(compiled)
    assert memory is not None, "every platform's compiler tells it"
    return CheckedProgram(
        name=name,
        lower_seconds=traced - began,
        compile_seconds=ended - traced,
        memory=memory,
        transfers=transfers(collectives(module, mesh.size), mesh),
        custom_calls=_custom_call_counts(module),
        fallbacks=(
            *_slow_attention_lines(config, programs, name, module, chip),
            *_other_exchange_lines(programs, name, module),
        ),
    )


def check_jobs(
    config: Config, programs: Programs, names: Iterable[ProgramName], chip: Chip
) -> Iterator[CheckedProgram | FailedProgram]:
    """Compile some of `programs.jobs`, one after another, and yield a `FailedProgram` for one that
    does not compile."""
    for name in names:
        try:
            yield check_job(config, programs, name, programs.jobs[name], chip)
        except jax.errors.JaxRuntimeError as error:  # too large for a TPU, or a kernel for a GPU
            yield FailedProgram(name, str(error).splitlines()[0])


def compiled_memory(
    config: Config, programs: Programs, chip: Chip
) -> dict[ProgramName, Memory | FailedProgram]:
    """What each program of a step takes on a device, as the compiler says.

    Args:
      programs: on `target_mesh(config, chip, devices)`.
      chip: of the mesh.
    """
    names = [name for name in programs.jobs if name.function not in OUTSIDE_STEPS]
    memory: dict[ProgramName, Memory | FailedProgram] = {}
    for checked in check_jobs(config, programs, names, chip):
        if isinstance(checked, FailedProgram):
            memory[checked.name] = checked
        else:
            memory[checked.name] = checked.memory
    return memory


def memory_of(compiled: Compiled) -> Memory | None:
    """What a program takes, as the compiler says; none where it says nothing."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def transfers(sent: list[Collective], mesh: Mesh) -> tuple[Transfer, ...]:
    """Collectives grouped by what they do, those that send most first."""
    alike: dict[tuple[str, tuple[str, ...], str, int, int, bool], list[Collective]] = {}
    for send in sent:
        axes = whole_axes(mesh_axes(send, mesh.shape), mesh)
        # In the order of the fields of `Transfer`
        key = (send.operation, axes, send.dtype, send.bytes, send.trips, send.exact)
        alike.setdefault(key, []).append(send)
    records = []
    for key, group in alike.items():
        sent_bytes = sum(send.sent_bytes for send in group)
        scopes = sorted({send.scope for send in group})
        records.append(
            Transfer(*key, count=len(group), sent_bytes=sent_bytes, scopes=tuple(scopes))
        )
    return tuple(sorted(records, key=lambda record: -record.sent_bytes))


def whole_axes(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Axes of a mesh that spans have cut: where `axes` has all parts of one, the whole axis's name
    replaces them."""
    cut_axes: dict[str, list[str]] = {}
    for axis, size in mesh.shape.items():
        if size > 1:
            cut_axes.setdefault(whole_axis(axis), []).append(axis)
    names = []
    for axis in axes:
        whole = whole_axis(axis)
        parts = cut_axes.get(whole, [axis])
        names.append(whole if set(parts) <= set(axes) else axis)
    return tuple(dict.fromkeys(names))


# ---------------------------------------------------------------------------- kernels, exchanges


def _custom_call_counts(module: Module) -> dict[str, int]:
    targets = (execution.instruction.target for execution in module.executed())
    return dict(Counter(target for target in targets if target and not target.startswith(PRODUCTS)))


def _slow_attention_lines(
    config: Config, programs: Programs, name: ProgramName, module: Module, chip: Chip
) -> list[str]:
    """A line for each phase whose program for GPUs has attention as the loop for every platform,
    although nobody asked for that."""
    loop = any(LOOP_SCOPE in execution.instruction.scope for execution in module.executed())
    if chip.platform != "cuda" or not loop:
        return []
    phases = [name.subject] if name.subject in programs.spec.phases else list(programs.spec.phases)
    lines = []
    for phase in phases:
        component = getattr(config.components, phase)
        if component.attention in ("jax", "cpu"):  # asked for by name
            continue
        block = programs.attention.blocks[phase]
        needs = programs.functions.model.attention_choice(phase, block).needs
        if needs or len(phases) == 1:
            reason = f"its kernel for GPUs needs {needs}" if needs else "for no reason known here"
            lines.append(f"attention of {phase} is the loop for every platform: {reason}")
    return lines


def _other_exchange_lines(programs: Programs, name: ProgramName, module: Module) -> list[str]:
    """A line for a ragged exchange that was compiled to something else; otherwise none."""
    if name.function not in HOPS or programs.spec.routes[name.subject].backend != "ragged":
        return []
    operations = {execution.instruction.collective for execution in module.executed()} - {None}
    if RAGGED in operations:
        return []
    return [f"the ragged exchange of {name.subject} became {', '.join(map(str, operations))}"]
