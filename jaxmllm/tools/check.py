"""Compile the programs of a config for devices that need not be present, and print what each
program keeps and sends.

    jaxmllm check --config configs/quickstart.yaml --devices 8 --chip h100 [--generated] [--only NAMES] [key=value ...]

Needs no device of that kind. GPUs: `pip install 'jaxmllm[ahead]'`; TPUs:
`pip install 'jaxmllm[tpu]'`; `--chip cpu` compiles for this machine, and needs nothing. Rows and
pools are chosen from the config's data, as a run would, or (`--generated`) from lengths of the
generator in jaxmllm/tools/workload.py.

    memory, by program, on one device (XLA is given no limit)
    needed          arguments + outputs - aliased + temporaries + code
    aliased         outputs that take the memory of arguments
    custom calls    kernels of our own, and calls of the compiler's libraries
    seconds         time to compile

    collectives, by program and kind
    axes            mesh axes along which devices exchange data
    bytes           size of the whole array on one device: gathered, or before it is reduced,
                    scattered or sent
    places          number of places in the program that send the same amount in the same way
    trips           iterations of the loops around them; "data" where data decide how often a loop
                    runs (counted once) or which branch is taken (all are counted)
    total           bytes * places * trips
    sent            bytes that a device sends in all of them, in a ring

A warning names everything that was not compiled as asked: attention without its kernel, another
exchange. Exit code 1 if the config cannot be run or a program does not compile; 2 if the chip, the
number of its devices or a program does not exist, or the chip's compiler is missing; 3 if there are
warnings.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.families.resolved import load_run_config
from jaxmllm.setup.ahead import CheckedProgram, FailedProgram, check_jobs, target_mesh
from jaxmllm.setup.build import plan_programs
from jaxmllm.setup.chips import CHIPS, ChipError, chip_of
from jaxmllm.setup.prepare import prepare
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.programs.base import ProgramName, Programs
from jaxmllm.training.run import USER_ERRORS
from sharding.mesh import axis_sizes

FELL_BACK = 3  # the exit code
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MEMORY = [
    "program",
    "needed",
    "arguments",
    "outputs",
    "aliased",
    "temporaries",
    "code",
    "custom calls",
    "seconds",
]
SENT = ["program", "operation", "axes", "type", "bytes", "places", "trips", "total", "sent"]
GENERATOR = "sizes from batches of the config's data, as a run of it chooses them"
GENERATED = "sizes from lengths of jaxmllm/tools/workload.py, data.batch_size examples a step"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(_parser(), arguments)
    only_compile()
    try:
        chip = chip_of(options.chip)
        config = load_run_config(options.config, options.overrides)
        mesh = target_mesh(config, chip, _device_count(config, options.devices))
        programs = _programs(config, mesh, options.seed if options.generated else None)
        names = _selected_programs(programs.jobs, options.only)
    except ChipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    checked = []
    failed = False
    for program in check_jobs(config, programs, names, chip):
        if isinstance(program, FailedProgram):
            print(f"error: {in_words(program.name)}: {program.reason}", file=sys.stderr)
            failed = True
            continue
        checked.append(program)
        print(f"{in_words(program.name)}: {program.compile_seconds:.1f} s", file=sys.stderr)
    title = f"{options.config} on {mesh.size} of {chip.name}"
    print_table(f"{title}: memory of one device", MEMORY, map(_memory_row, checked), left_aligned=1)
    rows = [row for program in checked for row in _sent_rows(program)]
    print_table(f"{title}: collectives of one device", SENT, rows, left_aligned=4)
    fallbacks = [
        f"{in_words(program.name)}: {line}" for program in checked for line in program.fallbacks
    ]
    for line in fallbacks:
        print(f"warning: {line}", file=sys.stderr)
    # --seed is for generated lengths alone; batches of the data depend on run.seed.
    if options.generated:
        seed, generator = options.seed, GENERATED
    else:
        seed, generator = config.run.seed, GENERATOR
    write_json(
        options.json,
        "check",
        seed,
        generator,
        config=options.config,
        overrides=options.overrides,
        chip=chip.name,
        devices=mesh.size,
        mesh=axis_sizes(mesh),
        rows=[row for program in checked for row in records(program)],
    )
    if failed:
        return 1
    return FELL_BACK if fallbacks else 0


def _parser() -> ArgumentParser:
    parser = measuring_parser(__doc__, "jaxmllm check")
    add_config(parser)
    parser.add_argument(
        "--devices",
        type=positive_int,
        help="devices to compile for (default: as many as the mesh names)",
    )
    parser.add_argument(
        "--chip",
        default="h100",
        help=f"chip to compile for: {', '.join(CHIPS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="compile only these functions, separated by commas: encode,update",
    )
    parser.add_argument(
        "--generated",
        action="store_true",
        help="use generated lengths instead of the config's data",
    )
    return parser


def only_compile() -> None:
    """Restrict JAX to this machine's CPU, even where there are devices of the chip that is compiled
    for, and have it compile everything again."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    jax.config.update("jax_platforms", "cpu")
    # Cached programs cannot be read for other devices, and lack the names that this process gives
    jax.config.update("jax_enable_compilation_cache", False)


def _device_count(config: Config, devices: int | None) -> int:
    """The number of devices that is asked for, or that the mesh names."""
    if devices is not None:
        return devices
    sizes = config.mesh_sizes
    if open_axes := [axis for axis, size in sizes.items() if size == -1]:
        raise ConfigError(f"mesh.{open_axes[0]} is -1: say how many --devices there are")
    return math.prod(sizes.values())


def _programs(config: Config, mesh: Mesh, seed: int | None) -> Programs:
    """The programs of a run on the config's data, or (with a seed) on generated lengths."""
    if seed is None:
        return plan_programs(config, prepare(config, mesh))[0]
    return generated_lengths(config, mesh, seed).programs()


def _selected_programs(names: Iterable[ProgramName], only: str | None) -> list[ProgramName]:
    """All programs, or those of some functions."""
    if only is None:
        return list(names)
    names = list(names)
    functions = only.split(",")
    known = list(dict.fromkeys(name.function for name in names))
    if unknown := [function for function in functions if function not in known]:
        raise ChipError(f"--only: no program {', '.join(unknown)}; programs: {', '.join(known)}")
    return [name for name in names if name.function in functions]


def in_words(name: ProgramName) -> str:
    """A program in words: its function, its subject and the rows that it runs."""
    rows = f" {name.capacity}" if name.capacity else ""
    span = f" x {name.span}" if name.span > 1 else ""
    return f"{name.function} {name.subject}".strip() + rows + span


def amount(size: float) -> str:
    """Bytes in the largest unit that leaves three digits."""
    for unit, symbol in UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {symbol}"
    return f"{size:.0f} B"


def records(program: CheckedProgram) -> list[dict[str, Any]]:
    """One record of the memory that a program takes, and one for each kind of collective."""
    name = {"program": in_words(program.name)}
    memory = asdict(program.memory) | {"needed": program.memory.needed}
    of_program = name | {
        "memory": memory,
        "custom_calls": dict(program.custom_calls),
        "fallbacks": list(program.fallbacks),
        "lower_seconds": program.lower_seconds,
        "compile_seconds": program.compile_seconds,
    }
    sent = [
        name | asdict(transfer) | {"total_bytes": transfer.total_bytes}
        for transfer in program.transfers
    ]
    return [of_program, *sent]


def _memory_row(program: CheckedProgram) -> list[Any]:
    memory = program.memory
    sizes = (
        memory.needed,
        memory.arguments,
        memory.outputs,
        memory.aliased,
        memory.temporaries,
        memory.code,
    )
    calls = sum(program.custom_calls.values())
    return [in_words(program.name), *map(amount, sizes), calls, program.compile_seconds]


def _sent_rows(program: CheckedProgram) -> list[list[Any]]:
    rows = []
    for transfer in program.transfers:
        trips = transfer.trips if transfer.exact else f"{transfer.trips} x data"
        row = [
            in_words(program.name),
            transfer.operation,
            ", ".join(transfer.axes),
            transfer.dtype,
            amount(transfer.bytes),
            transfer.count,
            trips,
            amount(transfer.total_bytes),
            amount(transfer.sent_bytes),
        ]
        rows.append(row)
    return rows
