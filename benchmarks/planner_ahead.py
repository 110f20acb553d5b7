"""Predicted memory and traffic of programs, next to those of a compiler for H100s that are not
there.

    python -m benchmarks.planner_ahead --json ahead.json [--models 2B 7B] [--compiled earlier.json]

Part of `python -m benchmarks.planner`, and an hour on two cores: `--compiled` reads what an earlier
run compiled, and compiles only what is missing there. Models are those of benchmarks/omni.py in
bfloat16. Needs no GPU, but `pip install 'jaxmllm[ahead]'`; without it a line says so. The JSON's
`rows`:

    kind memory            a program: `model`, `devices`, `mesh`, `remat`, `capacity`, `frozen`;
                           bytes of its `arguments` or `temporaries` (`what`), `estimated` and
                           `compiled`, `error` (estimated over compiled, less 1), and the `moment`
                           of most memory. Programs of no phase, such as `update`, have no row of
                           temporaries: these take next to nothing
    kind collectives       an operation of a program along `axes`: `predicted_bytes` and
                           `compiled_bytes`, which a device sends in a ring, in loops with a known
                           number of trips, without index arrays; no row where a plan decides
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.ahead import MIX, PER_DEVICE
from benchmarks.omni import omni_config
from jaxmllm.cluster.held import program_bytes
from jaxmllm.cluster.sends import program_sends, ring_bytes
from jaxmllm.cluster.temporaries import job_temporaries
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.config.schema import Config
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.ahead import CheckedProgram, FailedProgram, check_jobs, target_mesh
from jaxmllm.setup.chips import Chip, ChipError, chip_of
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.check import in_words, only_compile
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.programs.base import ProgramName, Programs
from jaxmllm.training.programs.phased import PhasedPrograms

MEMORY = "memory"
COLLECTIVES = "collectives"
CHIP: Final = "h100"
LOSS = "language_loss_and_grad"
VISION = "encode_grad vision"
AUDIO = "encode_grad audio"
KEPT: Final = "encode_grad_kept vision"
SMALL: Final = 1e6  # bytes; operations that send less, sums of scalars for example, have no row
COLUMNS: Final = [
    "model",
    "mesh",
    "remat",
    "program",
    "compiled GB",
    "estimated GB",
    "error",
    "moment",
]
SENT_COLUMNS: Final = [
    "model",
    "mesh",
    "remat",
    "program",
    "operation",
    "axes",
    "compiled GB",
    "predicted GB",
    "error",
]


class Point(NamedTuple):
    """A model on a mesh, and which of its programs are compiled."""

    model: str
    mesh: Mapping[str, int]
    remat: str
    language: int  # capacity; `vision` and `audio` are capacities, too
    programs: tuple[str, ...] = (LOSS, VISION)
    vision: int = 16_384
    audio: int = 8_192
    frozen: tuple[str, ...] = ()
    stages: int = 1

    @property
    def devices(self) -> int:
        count = self.stages
        for size in self.mesh.values():
            count *= size
        return count

    def config(self) -> Config:
        """The config of the point, with rows of one rank."""
        capacities = {"vision": self.vision, "audio": self.audio, LANGUAGE: self.language}
        phases = {
            phase: {"capacities": [slots], "spans": [1]} for phase, slots in capacities.items()
        }
        sections: dict[str, Any] = {"mesh": dict(self.mesh), "remat": self.remat, "phases": phases}
        if self.stages > 1:
            sections["pipeline"] = {"stages": self.stages}
        data = {"batch_size": PER_DEVICE * self.devices}
        tree = config_tree(omni_config(self.model, data=data, **sections))
        for component in self.frozen:
            tree["components"][component]["freeze"] = True
        return parse_config(tree)

    def chosen(self, programs: Programs) -> list[ProgramName]:
        """The programs that are compiled."""
        return [
            name
            for name in programs.jobs
            if {name.function, f"{name.function} {name.subject}"} & {*self.programs}
        ]


FSDP: Final = {"data": 1, "fsdp": 64}
HYBRID: Final = {"data": 8, "fsdp": 8}
TENSOR: Final = {"data": 1, "fsdp": 16, "tensor": 4}
CONTEXT: Final = {"data": 1, "fsdp": 16, "context": 4}
EVERY: Final = ("update", LOSS, "evaluate", "encode vision", VISION, KEPT, AUDIO)
POINTS: Final = (
    Point("7B", FSDP, "full", 8_192, EVERY),
    Point("7B", FSDP, "dots", 8_192),
    Point("7B", FSDP, "none", 4_096, vision=12_288, audio=6_144),
    Point("7B", FSDP, "full", 8_192, (LOSS, VISION, "encode vision"), frozen=("vision", "audio")),
    Point("7B", HYBRID, "full", 8_192, (LOSS,), frozen=(LANGUAGE,)),
    Point("7B", TENSOR, "full", 16_384),
    Point("7B", TENSOR, "dots", 8_192),
    Point("7B", TENSOR, "none", 8_192, (LOSS,), vision=12_288),
    Point("7B", CONTEXT, "full", 24_576),
    Point("7B", CONTEXT, "dots", 16_384, (LOSS,)),
    Point("7B", {"data": 1, "fsdp": 32}, "full", 8_192, ("gradients",), stages=2),
    Point("7B", {"data": 4, "fsdp": 8}, "dots", 4_096, ("gradients",), vision=12_288, stages=2),
    Point("2B", {"data": 8, "fsdp": 1}, "full", 8_192, (LOSS, VISION, "add_replicas", "update")),
    Point("2B", HYBRID, "full", 24_576, vision=24_576),
    Point("2B", {"data": 2, "fsdp": 4}, "dots", 8_192, (LOSS, AUDIO)),
    Point("2B", {"data": 1, "fsdp": 8}, "none", 4_096, (LOSS,), vision=12_288, audio=6_144),
    Point("30B-A3B", FSDP, "full", 8_192, (LOSS,)),
    Point("30B-A3B", {"data": 1, "fsdp": 128}, "none", 4_096, (LOSS,)),
    Point("30B-A3B", FSDP, "dots", 8_192, (LOSS, "evaluate")),
    Point("30B-A3B", HYBRID, "full", 16_384, (LOSS,)),
    Point("30B-A3B", HYBRID, "full", 8_192, (LOSS,), frozen=(LANGUAGE,)),
    Point("30B-A3B", TENSOR, "full", 16_384, (LOSS,)),
    Point("30B-A3B", CONTEXT, "dots", 16_384, (LOSS,)),
    Point("84B", {"data": 5, "fsdp": 512}, "full", 8_192),
    Point("84B", {"data": 10, "fsdp": 256}, "dots", 4_096, (LOSS,), vision=12_288),
    Point("84B", {"data": 10, "fsdp": 256}, "none", 4_096, (LOSS,), vision=12_288, audio=6_144),
    Point("84B", {"data": 10, "fsdp": 64, "tensor": 4}, "full", 8_192),
    Point("84B", {"data": 10, "fsdp": 64, "context": 4}, "full", 16_384, (LOSS,)),
)

# By `key_of` setting and program: its `temporaries`, `arguments`, `sent`
Compiled = dict[str, dict[str, Any]]


def key_of(point: Point, program: str) -> str:
    """The key of a compiled program, different for all settings and programs."""
    return json.dumps([point._replace(programs=()), program], sort_keys=True)


def stored(path: Path | None) -> Compiled:
    """Facts of the programs that an earlier run compiled, from its JSON; empty without a file."""
    if path is None:
        return {}
    compiled: Compiled = json.loads(path.read_text(encoding="utf-8"))["compiled"]
    return compiled


def compiled_file(text: str) -> Compiled:
    """The value of `--compiled`, read from the JSON of an earlier run before anything is
    compiled."""
    try:
        return stored(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text} is no JSON of `python -m benchmarks.planner_ahead`"
        ) from error


def measure(point: Point, chip: Chip, seed: int, compiled: Compiled) -> Iterator[dict[str, Any]]:
    """The rows of a point. Compiles the programs that `compiled` lacks, and adds their facts to
    it."""
    config = point.config()
    programs = generated_lengths(
        config, target_mesh(config, chip, point.devices), seed, MIX
    ).programs()
    names = point.chosen(programs)
    uncompiled = [name for name in names if key_of(point, in_words(name)) not in compiled]
    for checked in check_jobs(config, programs, uncompiled, chip):
        if isinstance(checked, FailedProgram):
            print(f"{in_words(checked.name)} does not compile: {checked.reason}", file=sys.stderr)
            continue
        compiled[key_of(point, in_words(checked.name))] = facts_of(checked)
    for name in names:
        if facts := compiled.get(key_of(point, in_words(name))):
            yield from rows_of(point, programs, name, facts)


def facts_of(checked: CheckedProgram) -> dict[str, Any]:
    """The facts of one compiled program that its rows need."""
    sent_by_kind: dict[str, float] = {}
    for transfer in checked.transfers:
        if transfer.exact and transfer.dtype != "s32":  # index arrays are s32
            kind = " ".join((transfer.operation, *transfer.axes))
            sent_by_kind[kind] = sent_by_kind.get(kind, 0.0) + transfer.sent_bytes
    memory = checked.memory
    return {"temporaries": memory.temporaries, "arguments": memory.arguments, "sent": sent_by_kind}


def rows_of(
    point: Point, programs: Programs, name: ProgramName, facts: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of a program: its memory, and one row for each operation and axes along which it
    sends something, or is predicted to."""
    setting = {
        "model": point.model,
        "devices": point.devices,
        "mesh": dict(point.mesh) | ({"stages": point.stages} if point.stages > 1 else {}),
        "remat": point.remat,
        "frozen": list(point.frozen),
        "program": in_words(name),
        "capacity": name.capacity or point.language,
    }
    estimate = job_temporaries(programs, name)
    sizes = {"arguments": (program_bytes(programs.jobs[name]).arguments, facts["arguments"])}
    if estimate.moments:
        sizes["temporaries"] = (estimate.total, facts["temporaries"])
    for quantity, (estimated, compiled) in sizes.items():
        yield {
            "kind": MEMORY,
            **setting,
            "what": quantity,
            "estimated": estimated,
            "compiled": compiled,
            "error": estimated / max(compiled, 1) - 1,
            "moment": estimate.moment,
        }
    sends = program_sends(programs, name) if isinstance(programs, PhasedPrograms) else None
    if sends is None:
        return
    predicted = {
        " ".join((operation, *axes)): size
        for (operation, axes), size in ring_bytes(
            send for send in sends if not send.by_data
        ).items()
    }
    for kind in sorted({*predicted, *facts["sent"]}):
        predicted_bytes = predicted.get(kind, 0.0)
        compiled_bytes = facts["sent"].get(kind, 0.0)
        if max(predicted_bytes, compiled_bytes) > SMALL:
            operation, *axes = kind.split()
            row = {"predicted_bytes": predicted_bytes, "compiled_bytes": compiled_bytes}
            yield {"kind": COLLECTIVES, **setting, "operation": operation, "axes": axes, **row}


# ---------------------------------------------------------------------------- output


def ahead_rows(
    seed: int, points: Sequence[Point] = POINTS, compiled: Compiled | None = None
) -> list[dict[str, Any]]:
    """The rows of all points; none, and a printed line that says why, if nothing can be compiled
    for the chip."""
    only_compile()
    rows: list[dict[str, Any]] = []
    compiled = {} if compiled is None else compiled
    for point in points:
        try:
            point_rows = list(measure(point, chip_of(CHIP), seed, compiled))
        except ChipError as error:
            print(f"memory and collectives are not compared: {error}", file=sys.stderr)
            return []
        rows += point_rows
        for row in point_rows:
            if row.get("what") == "temporaries":
                sizes = f"{row['estimated'] / 1e9:.2f} of {row['compiled'] / 1e9:.2f} GB"
                print(
                    f"{row['model']} {row['mesh']} {row['remat']} {row['program']}: {sizes}",
                    flush=True,
                )
    show(rows)
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of each kind, with the errors."""

    def setting(row: Mapping[str, Any]) -> list[Any]:
        mesh = ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        return [row["model"], mesh, row["remat"], row["program"]]

    memory_rows = [row for row in rows if row.get("what") == "temporaries"]
    lines = [
        [
            *setting(row),
            row["compiled"] / 1e9,
            row["estimated"] / 1e9,
            f"{100 * row['error']:+.1f} %",
            row["moment"],
        ]
        for row in memory_rows
    ]
    print_table("temporary memory of one device", COLUMNS, lines, left_aligned=4)
    sent_rows = [row for row in rows if row["kind"] == COLLECTIVES]
    lines = [
        [
            *setting(row),
            row["operation"],
            ", ".join(row["axes"]),
            row["compiled_bytes"] / 1e9,
            row["predicted_bytes"] / 1e9,
            f"{100 * _error(row):+.1f} %",
        ]
        for row in sent_rows
    ]
    print_table("what a device sends", SENT_COLUMNS, lines, left_aligned=6)


def _error(row: Mapping[str, Any]) -> float:
    """Predicted over compiled bytes, less 1; infinite where the compiler sends nothing."""
    compiled: float = row["compiled_bytes"]
    return float(row["predicted_bytes"] / compiled - 1) if compiled else float("inf")


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    models = list(dict.fromkeys(point.model for point in POINTS))
    parser.add_argument(
        "--models", nargs="+", choices=models, help="models to compile (default: all)"
    )
    parser.add_argument(
        "--compiled",
        type=compiled_file,
        metavar="PATH",
        help="JSON file of an earlier run, instead of compiling",
    )
    options = parser.parse_args(command)
    points = [point for point in POINTS if not options.models or point.model in options.models]
    compiled = options.compiled or {}
    rows = ahead_rows(options.seed, points, compiled)
    write_json(
        options.json,
        "planner_ahead",
        options.seed,
        "jaxmllm.tools.workload.generate([seed, i], 2 examples a device), no multi_image",
        chip=CHIP,
        rows=rows,
        compiled=compiled,
    )
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
