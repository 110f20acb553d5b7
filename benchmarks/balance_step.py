"""What balancing is worth in seconds: whole training steps of one run with and without it, on this
machine.

    python -m benchmarks.balance_step --config X.yaml [--processes 2] [--per-rank 8] [key=value ...]
    python -m benchmarks.balance_step --config X.yaml --compare spans --processes 1 --devices 8 --per-rank 2

`--compare modes` sets the modes `none` and `phases` beside each other, `--compare spans` rows of one
rank each (`alone`) and rows that several ranks may hold (`shared`, by the config's spans).

Every process has one CPU device and, where the system lets it, one core of its own; ranks meet in
the collectives of fully sharded parameters, as hosts do. With one process all devices share the
machine, and a step takes what all ranks compute together. Both variants train on the same batches,
each with the row sizes that a run would choose, and take turns step by step, so that a slow moment
of the machine touches both. Rows are on the devices before the clock starts. `predicted` is the
ratio of FLOPs, padding included: of the slowest rows, which devices of their own wait for, and of all
rows, which devices that share the machine compute in turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmllm.balance.records import Mode, PhaseItems, PhasePlan, PhaseSpec, PlanSpec
from jaxmllm.balance.statistics import all_flops, slowest_flops
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.distributed import PROCESS_ID, initialize_distributed, reserve_cpu_threads
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools.output import measuring_parser, print_table, write_json
from jaxmllm.tools.workload import describe
from jaxmllm.training.run import USER_ERRORS
from launch.local import run_local
from sharding.mesh import make_mesh

MODES: tuple[Mode, ...] = ("none", "phases")
# What is compared, the baseline first.
VARIANTS: dict[str, tuple[str, ...]] = {"modes": MODES, "spans": ("alone", "shared")}
# FLOPs of a phase's rows, by which of them a step waits for.
PREDICTED: dict[str, Callable[[PhasePlan, PhaseItems, PhaseSpec], float]] = {
    "slowest": slowest_flops,
    "all": all_flops,
}
WARM_UP = 2  # steps, not counted
GENERATOR = "the batches of the run after those that its sizes were chosen from"


def variant_spec(config: Config, inputs: RunInputs, variant: str) -> PlanSpec:
    """The rows that a run of this variant would choose."""
    if variant in MODES:
        balance = config.balance.model_copy(update={"mode": variant})
        return plan_spec(config.model_copy(update={"balance": balance}), inputs)
    spans = inputs.spans if variant == "shared" else dict.fromkeys(inputs.spans, (1,))
    return plan_spec(config, replace(inputs, spans=spans))


def measure(config: Config, steps: int, compared: str) -> dict[str, Any]:
    """Seconds of every step by variant, and what the plans predict."""
    variants = VARIANTS[compared]
    inputs = prepare(config, make_mesh(config.mesh.model_dump(), spans=mesh_spans(config)))
    programs = {}
    fillers = {}
    for variant in variants:
        spec = variant_spec(config, inputs, variant)
        programs[variant] = phased_programs(
            config, inputs.model, inputs.corpus.formats, spec, len(inputs.corpus.sources)
        ).compile()
        share = programs[variant].local_share
        fillers[variant] = StepFiller(inputs.corpus, spec, share, programs[variant].attention)

    state = programs[variants[0]].init(config.run.seed)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    predicted: dict[str, dict[str, list[float]]] = {
        kind: {variant: [] for variant in variants} for kind in PREDICTED
    }
    for step in range(WARM_UP + steps):
        examples = batch_examples(inputs.order, config.data.batch_size, len(inputs.samples) + step)
        items = inputs.corpus.gather(examples)
        for variant in variants if step % 2 else variants[::-1]:
            batch = programs[variant].put(fillers[variant](step, examples))
            jax.block_until_ready((batch.rows, batch.tables))
            multihost_utils.sync_global_devices(f"{step} {variant}")
            began = time.perf_counter()
            state, metrics = programs[variant].train(state, batch)
            jax.block_until_ready((state, metrics))
            took = time.perf_counter() - began
            if step >= WARM_UP:
                seconds[variant].append(took)
                spec = programs[variant].spec
                plan = plan_step(items, spec)
                for kind, flops in PREDICTED.items():
                    predicted[kind][variant].append(
                        sum(
                            flops(plan.phases[name], items.phases[name], phase)
                            for name, phase in spec.phases.items()
                        )
                    )
    workload = describe(inputs.samples[0])
    return {"seconds": seconds, "predicted": predicted, "workload": workload}


def summarise(
    seconds: dict[str, list[float]], predicted: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    """Medians and quartiles of each variant, and of the ratio of the first to the second, of the same
    batch."""
    first, second = seconds
    ratios = (np.array(seconds[first]) / np.array(seconds[second])).tolist()
    return {
        **{variant: quartiles(times) for variant, times in seconds.items()},
        "ratio": quartiles(ratios),
        "ratio_of_medians": statistics.median(seconds[first]) / statistics.median(seconds[second]),
        "predicted_ratio": {
            kind: sum(flops[first]) / sum(flops[second]) for kind, flops in predicted.items()
        },
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "quarter": low, "three_quarters": high}


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--per-rank", type=int, default=8, help="examples per device and step")
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--compare", choices=list(VARIANTS), default="modes")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each variant")
    options = parse(parser, command)
    if min(options.processes, options.devices, options.per_rank, options.steps) < 1:
        parser.error("--processes, --devices, --per-rank and --steps must be positive")
    devices = options.processes * options.devices
    if options.processes == 1:
        # Before JAX looks for devices. One process needs no coordinator, and its collectives no sockets.
        flags = os.environ.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
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
    mesh = ["mesh.data=1", f"mesh.fsdp={devices}", "mesh.tensor=1"]
    size = [f"data.batch_size={devices * options.per_rank}"]
    # The processes of this machine stand for the ranks of a node.
    node = [f"balance.ranks_per_node={devices}"] if options.compare == "spans" else []
    try:
        config = load_config(options.config, [*mesh, *size, *node, *seed, *options.overrides])
        measured = measure(config, options.steps, options.compare)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if jax.process_index() == 0:
        summary = summarise(measured["seconds"], measured["predicted"])
        show(
            summary,
            f"{options.config}: {options.processes} processes x {options.devices} devices x "
            f"{config.data.batch_size / devices:g} examples",
            VARIANTS[options.compare],
        )
        settings = {
            "config": options.config,
            "overrides": options.overrides,
            "steps": options.steps,
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
            **measured,
        )
    return 0


def show(summary: dict[str, Any], title: str, variants: Sequence[str]) -> None:
    rows = [[f"{variant} [s]", *summary[variant].values()] for variant in variants]
    ratio = " / ".join(variants)
    rows.append([f"{ratio}, same batch", *summary["ratio"].values()])
    rows.append([f"{ratio}, of medians", summary["ratio_of_medians"], None, None])
    rows.extend(
        [f"predicted, {kind} rows", predicted, None, None]
        for kind, predicted in summary["predicted_ratio"].items()
    )
    print_table(title, ["step", "median", "quarter below", "quarter above"], rows)


def pin_to_core(process: int) -> None:
    """Give this process one core, where there are enough and the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[process % len(cores)]})


if __name__ == "__main__":
    sys.exit(main())
