"""What balancing is worth in seconds: whole training steps of one run with and without it, on this
machine.

    python -m benchmarks.balance_step --config X.yaml [--processes 2] [--per-rank 8] [key=value ...]
    python -m benchmarks.balance_step --config X.yaml --compare spans --processes 1 --devices 8 --per-rank 2
                                      [--by-phase 5]

`--compare modes` compares the modes `none` and `phases`; `--compare spans` rows of one rank each
(`alone`) and rows that several ranks may hold (`shared`, with the config's spans); `--compare
layouts` items end to end in their rows, and items placed to touch few blocks of attention (`in
blocks`).

Every process has one CPU device (or `--devices`) and, if the system allows it, one core of its own.
Ranks meet in collectives, as hosts do: those of the config's mesh, or those of fully sharded
parameters if that mesh needs another number of devices. With one process all devices share the
machine, so a step takes as long as the work of all ranks together. Both variants train on the same
batches, each with the row sizes that a run would choose, and take turns step by step, so that a
slow moment of the machine affects both. Rows are on the devices before the clock starts. A step
that runs some program for the first time is run twice, and the second time counts. `predicted` is
the ratio of FLOPs, padding included, counted in three ways: of the slowest rows, for which devices
wait if each has a core of its own; of all rows, which devices compute in turn if they share the
machine; and of all rows as programs compute them (`computed`, with one process only): attention on
whole tiles, the head only where there are targets.

`--by-phase N` adds N steps in which every program ends before the next begins, and prints the
seconds of each phase's programs, with the number of microbatches, slots and tiles of attention.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmllm.arrays import Longs
from jaxmllm.balance.costs.flops import head_flops
from jaxmllm.balance.records import (
    BatchItems,
    Mode,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RowClass,
)
from jaxmllm.balance.statistics import all_flops, slowest_flops
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import HostStep, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.distributed import PROCESS_ID, initialize_distributed, reserve_cpu_threads
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.sizing import plan_spec, resolved_shapes
from jaxmllm.setup.spans import node_spans
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import describe
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.programs.generator_programs import DeviceStep
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.step_functions import TrainState
from launch.local import run_local
from sharding.mesh import MeshError, make_mesh, mesh_shape

MODES: tuple[Mode, ...] = ("none", "phases")
# The two variants of each comparison, the baseline first
VARIANTS: dict[str, tuple[str, ...]] = {
    "modes": MODES,
    "spans": ("alone", "shared"),
    "layouts": ("end to end", "in blocks"),
}
# Ways to count the FLOPs of rows; each of them predicts a ratio of step times
PREDICTED = {"slowest": "slowest rows", "all": "all rows", "computed": "all rows, as computed"}
WARM_UP = 2  # first steps, not counted
# Name of the amounts of all programs that compute no rows: the exchange, zeros, sums over
# replicas, the update
REST = "beside these"
GENERATOR = "the batches of the run after those that its sizes were chosen from"


def variant_spec(config: Config, inputs: RunInputs, variant: str) -> PlanSpec:
    """Plan inputs with the row sizes that a run of this variant would choose."""
    if variant in MODES:
        balance = config.balance.model_copy(update={"mode": variant})
        return plan_spec(config.model_copy(update={"balance": balance}), inputs)
    if variant == "alone":
        return plan_spec(config, replace(inputs, spans=dict.fromkeys(inputs.spans, (1,))))
    spec = plan_spec(config, inputs)
    if variant == "end to end":
        phases = {phase: replace(rows, blocks=None) for phase, rows in spec.phases.items()}
        spec = replace(spec, phases=phases)
    return spec


def mesh_overrides(path: str, overrides: Sequence[str], devices: int) -> list[str]:
    """No overrides if the config's mesh fits this number of devices; otherwise the overrides for a
    mesh that shards weights over all of them."""
    try:
        mesh_shape(load_config(path, overrides).mesh.model_dump(), devices)
    except MeshError:
        return ["mesh.data=1", f"mesh.fsdp={devices}", "mesh.context=1", "mesh.tensor=1"]
    return []


class RowsOf(NamedTuple):
    """The rows of a microbatch, which decide what programs it runs: its number says whether
    residuals of its forward pass are kept."""

    phase: str
    microbatch: int
    row_class: RowClass


class PhaseAmounts(NamedTuple):
    """Seconds that the rows of a phase take in a step, and how much there is of them. For `REST`
    there are only seconds."""

    seconds: float
    microbatches: float | None = None
    slots: float | None = None  # of all rows
    tiles: float | None = None  # of attention in one layer, for this process's rows


@dataclass(frozen=True)
class Variant:
    """One side of the comparison: its programs, and the filler of their rows."""

    programs: PhasedPrograms
    filler: StepFiller

    @classmethod
    def of(cls, config: Config, inputs: RunInputs, name: str) -> Variant:
        """Choose the row sizes of the variant `name`, and compile its programs."""
        corpus = inputs.corpus
        spec = variant_spec(config, inputs, name)
        programs = phased_programs(
            config, inputs.model, corpus.formats, spec, len(corpus.sources)
        ).compile()
        return cls(programs, StepFiller(corpus, spec, programs.local_share, programs.attention))

    def batch(self, step: int, examples: Longs) -> DeviceStep:
        """The rows of a step, on the devices of all processes."""
        batch = self.programs.put(self.filler(step, examples))
        jax.block_until_ready((batch.rows, batch.tables))
        multihost_utils.sync_global_devices(f"step {step}")
        return batch


def measure(config: Config, steps: int, compared: str, by_phase: int) -> dict[str, Any]:
    """Seconds of every step by variant, and the FLOPs by which the plans predict them; then, from
    `by_phase` further steps, the amounts of each phase."""
    inputs = prepare(
        config, make_mesh(config.mesh.model_dump(), spans=node_spans(config, config.mesh_sizes))
    )
    variants = {name: Variant.of(config, inputs, name) for name in VARIANTS[compared]}
    names = list(variants)
    state = variants[names[0]].programs.init(config.run.seed)
    learns_text = config.objective.language.weight > 0
    shares = inputs.model.trainable.shares
    head = head_flops(resolved_shapes(config, inputs.model), shares, learns_text)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    predicted: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in names})
    amounts: dict[str, list[dict[str, PhaseAmounts]]] = {name: [] for name in names}
    programs_run: dict[str, set[RowsOf]] = {name: set() for name in names}
    for step in range(WARM_UP + steps + by_phase):
        examples = batch_examples(inputs.order, config.data.batch_size, len(inputs.samples) + step)
        items = inputs.corpus.gather(examples)
        for name in names if step % 2 else names[::-1]:
            programs = variants[name].programs
            batch = variants[name].batch(step, examples)
            if runs_first(batch.host, programs_run[name]):
                state, _ = programs.train(state, batch)
                jax.block_until_ready(state)
            if step >= WARM_UP + steps:
                state, by_program = train_by_program(programs, state, batch)
                amounts[name].append(phase_amounts(batch.host, by_program))
                continue
            start = time.perf_counter()
            state, metrics = programs.train(state, batch)
            jax.block_until_ready((state, metrics))
            step_seconds = time.perf_counter() - start
            if step >= WARM_UP:
                seconds[name].append(step_seconds)
                for kind, flops in planned_flops(variants[name], items, batch.host, head).items():
                    predicted[kind][name].append(flops)
    return {
        "seconds": seconds,
        "predicted": predicted,
        "by_phase": {
            name: {phase: mean._asdict() for phase, mean in mean_amounts(step_amounts).items()}
            for name, step_amounts in amounts.items()
        },
        "workload": describe(inputs.samples[0]),
    }


def planned_flops(
    variant: Variant, items: BatchItems, host: HostStep, head: int
) -> dict[str, float]:
    """FLOPs of a step by the keys of `PREDICTED`; `computed` only where one process has all rows.

    Args:
      head: FLOPs of the head on one slot; programs run it only on slots with a target.
    """
    programs = variant.programs
    plan = plan_step(items, programs.spec)
    arguments_by_phase = {
        phase: (plan.phases[phase], items.phases[phase], spec)
        for phase, spec in programs.spec.phases.items()
    }
    flops = {
        "slowest": sum(slowest_flops(*arguments) for arguments in arguments_by_phase.values()),
        "all": sum(all_flops(*arguments) for arguments in arguments_by_phase.values()),
    }
    if jax.process_count() == 1:
        without_target = host.statistics[f"{LANGUAGE}/slots"] - host.targets
        flops["computed"] = -head * without_target
        for phase, arguments in arguments_by_phase.items():
            stride = programs.formats[phase].stride if phase in programs.formats else 1
            pairs = pairs_computed(host, phase, variant.filler.attention) * stride**2
            flops["computed"] += computed_flops(*arguments, pairs)
    return flops


def computed_flops(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec, pairs: int) -> float:
    """`all_flops`, with attention counted over all pairs of slots that are computed, seen or not.

    Args:
      pairs: pairs in the tiles that are computed. Tiles of layers with windows are assumed to be as
        full as the others.
    """
    lengths = items.length.astype(float)
    seen_pairs = float(spec.flops.squares(lengths, items.extra)[0].sum())
    if spec.name == LANGUAGE:
        seen_pairs /= 2  # text sees only one side of the diagonal of its square
    # Pairs that are computed in addition to each pair that is seen
    unseen_ratio = pairs / seen_pairs - 1 if seen_pairs else 0.0
    attention = float(spec.flops.attention(lengths, items.extra).sum())
    return all_flops(plan, items, spec) + unseen_ratio * attention


def tiles_of(host: HostStep, phase: str) -> list[int]:
    """Number of attention tiles in one layer, for this process's rows of each microbatch."""
    # Spans are (first, number of partly visible tiles, number of wholly visible tiles)
    return [int(row["tiles"]["query_spans"][..., 1:].sum()) for row in host.rows[phase]]


def pairs_computed(host: HostStep, phase: str, attention: AttentionSpec) -> int:
    """Pairs of tokens in the attention tiles of one layer, for all of this process's rows of a
    phase."""
    blocks = (attention.block(phase, row_class) for row_class in classes_of(host, phase))
    tiles = tiles_of(host, phase)
    return sum(count * block**2 for count, block in zip(tiles, blocks, strict=True))


def classes_of(host: HostStep, phase: str) -> list[RowClass]:
    """Row class of each microbatch of a phase."""
    microbatch_classes = zip(host.capacities[phase], host.spans[phase], strict=True)
    return [RowClass(*row_class) for row_class in microbatch_classes]


def rows_of(host: HostStep) -> set[RowsOf]:
    """The rows of all microbatches of a step, which decide what programs it runs."""
    return {
        RowsOf(phase, microbatch, row_class)
        for phase in host.rows
        for microbatch, row_class in enumerate(classes_of(host, phase))
    }


def runs_first(host: HostStep, programs_run: set[RowsOf]) -> bool:
    """Whether a step runs some program for the first time, which takes some tenths of a second more
    than any later run. Adds the step's rows to `programs_run`."""
    new_rows = rows_of(host) - programs_run
    programs_run |= new_rows
    return bool(new_rows)


def train_by_program(
    programs: PhasedPrograms, state: TrainState, batch: DeviceStep
) -> tuple[TrainState, dict[ProgramName, float]]:
    """Run a step in which every program ends before the next begins; return the new state and the
    seconds of each program."""
    compiled: Mapping[ProgramName, Callable[..., Any]] = programs.compiled
    seconds = dict.fromkeys(compiled, 0.0)

    def timed(name: ProgramName) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            results = jax.block_until_ready(compiled[name](*arguments))
            seconds[name] += time.perf_counter() - start
            return results

        return run

    timed_programs: Any = {name: timed(name) for name in compiled}
    programs.compiled, untimed_programs = timed_programs, programs.compiled
    state, _ = programs.train(state, batch)
    programs.compiled = untimed_programs
    return state, seconds


def phase_amounts(host: HostStep, seconds: Mapping[ProgramName, float]) -> dict[str, PhaseAmounts]:
    """Amounts of one step by phase; `REST` has the seconds of all programs that compute no rows."""
    amounts = {
        phase: PhaseAmounts(
            seconds=sum(
                program_seconds
                for name, program_seconds in seconds.items()
                if name.capacity and name.subject == phase
            ),
            microbatches=len(rows),
            slots=host.statistics[f"{phase}/slots"],
            tiles=sum(tiles_of(host, phase)),
        )
        for phase, rows in host.rows.items()
    }
    rest_seconds = sum(
        program_seconds for name, program_seconds in seconds.items() if not name.capacity
    )
    return amounts | {REST: PhaseAmounts(rest_seconds)}


def mean_amounts(of_steps: Sequence[Mapping[str, PhaseAmounts]]) -> dict[str, PhaseAmounts]:
    """Mean amounts over steps; empty without steps."""
    if not of_steps:
        return {}

    def mean(phase: str) -> PhaseAmounts:
        amounts: Any = zip(*(step[phase] for step in of_steps), strict=True)
        # `REST` has only seconds: all its other fields are None
        means: Any = (
            None if None in field_values else statistics.mean(field_values)
            for field_values in amounts
        )
        return PhaseAmounts(*means)

    return {phase: mean(phase) for phase in of_steps[0]}


def summarise(
    seconds: dict[str, list[float]], predicted: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    """Medians and quartiles of the seconds of each variant, and of the ratio of the first variant
    to the second on the same batch."""
    first_variant, second_variant = seconds
    ratios = (np.array(seconds[first_variant]) / np.array(seconds[second_variant])).tolist()
    return {
        **{variant: quartiles(times) for variant, times in seconds.items()},
        "ratio": quartiles(ratios),
        "ratio_of_medians": statistics.median(seconds[first_variant])
        / statistics.median(seconds[second_variant]),
        "predicted_ratio": {
            kind: sum(flops[first_variant]) / sum(flops[second_variant])
            for kind, flops in predicted.items()
        },
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, lower and upper quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "quarter": low, "three_quarters": high}


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--per-rank",
        type=int,
        default=8,
        help="examples per device and step (default: %(default)s)",
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="devices per process (default: %(default)s)"
    )
    parser.add_argument("--compare", choices=list(VARIANTS), default="modes")
    parser.add_argument(
        "--steps", type=int, default=20, help="measured steps per variant (default: %(default)s)"
    )
    parser.add_argument(
        "--by-phase",
        type=int,
        default=0,
        help="further steps per variant, timed program by program (default: %(default)s)",
    )
    options = parse(parser, command)
    if min(options.processes, options.devices, options.per_rank, options.steps) < 1:
        parser.error("--processes, --devices, --per-rank and --steps must be positive")
    if options.by_phase < 0:
        parser.error("--by-phase must not be negative")
    devices = options.processes * options.devices
    if options.processes == 1:
        # The flag must be set before JAX looks for devices. One process needs no coordinator, and
        # its collectives need no sockets.
        flags = os.environ.get("XLA_FLAGS", "")
        device_flag = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {device_flag}".strip()
    elif PROCESS_ID not in os.environ:
        arguments = sys.argv[1:] if command is None else command
        return run_local(
            [sys.executable, "-m", "benchmarks.balance_step", *arguments],
            options.processes,
            options.devices,
        )

    if options.processes > 1:
        pin_to_core(int(os.environ[PROCESS_ID]))
    reserve_cpu_threads()
    if options.processes > 1:
        initialize_distributed()
    seed = [] if options.seed is None else [f"run.seed={options.seed}"]
    size = [f"data.batch_size={devices * options.per_rank}"]
    # All devices of this machine count as the ranks of one node.
    node = [f"balance.ranks_per_node={devices}"] if options.compare != "modes" else []
    try:
        overrides = [*size, *node, *seed, *options.overrides]
        sharded = mesh_overrides(options.config, overrides, devices)
        config = load_config(options.config, [*sharded, *overrides])
        measurements = measure(config, options.steps, options.compare, options.by_phase)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if jax.process_index() == 0:
        summary = summarise(measurements["seconds"], measurements["predicted"])
        axes = config.mesh.model_dump()
        mesh = dict(zip(axes, mesh_shape(axes, devices), strict=True))
        show(
            summary,
            f"{options.config}: {options.processes} processes x {options.devices} devices x "
            f"{config.data.batch_size / devices:g} examples, "
            + ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1),
            VARIANTS[options.compare],
        )
        if options.by_phase:
            show_phases(measurements["by_phase"], options.by_phase)
        settings = {
            "config": options.config,
            "overrides": options.overrides,
            "steps": options.steps,
            "mesh": mesh,
        }
        sizes = {
            "processes": options.processes,
            "devices": options.devices,
            "per_rank": config.data.batch_size / devices,
            "compare": options.compare,
        }
        write_json(
            options.json,
            "balance_step",
            config.run.seed,
            GENERATOR,
            **settings,
            **sizes,
            **summary,
            **measurements,
        )
    return 0


def show(summary: dict[str, Any], title: str, variants: Sequence[str]) -> None:
    """Print the seconds of both variants, and their measured and predicted ratios."""
    rows = [[f"{variant} [s]", *summary[variant].values()] for variant in variants]
    ratio = " / ".join(variants)
    rows.append([f"{ratio}, same batch", *summary["ratio"].values()])
    rows.append([f"{ratio}, of medians", summary["ratio_of_medians"], None, None])
    rows.extend(
        [f"predicted, {PREDICTED[kind]}", predicted, None, None]
        for kind, predicted in summary["predicted_ratio"].items()
    )
    print_table(title, ["step", "median", "quarter below", "quarter above"], rows)


def show_phases(by_phase: Mapping[str, Mapping[str, dict[str, Any]]], steps: int) -> None:
    """Print the amounts of each phase, the two variants in neighbouring lines."""
    rows = [
        [phase, variant, 1e3 * amounts["seconds"], *map(_rounded, list(amounts.values())[1:])]
        for variant, phases in by_phase.items()
        for phase, amounts in phases.items()
    ]
    columns = ["phase", "rows", "ms", *PhaseAmounts._fields[1:]]
    rows.sort(key=lambda row: str(row[0]))  # the sort is stable, so variants keep their order
    print_table(f"a step, program by program, means of {steps}", columns, rows, left_aligned=2)


def _rounded(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:,.1f}"


def pin_to_core(process: int) -> None:
    """Pin this process to one core, if the system allows that; with fewer cores than processes,
    several processes share a core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[process % len(cores)]})


if __name__ == "__main__":
    sys.exit(main())
