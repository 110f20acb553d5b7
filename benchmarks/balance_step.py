"""What balancing is worth in seconds: whole training steps of one run with and without it, on this
machine.

    python -m benchmarks.balance_step --config configs/quickstart.yaml [--processes 2] [--per-rank 8] [key=value ...]

Every process has one CPU device and, where the system lets it, one core of its own; ranks meet in
the collectives of fully sharded parameters, as hosts do. Both modes train on the same batches, each
with the row sizes that a run in its mode would choose, and take turns step by step, so that a slow
moment of the machine touches both. Rows are on the devices before the clock starts. `predicted` is
the ratio of FLOPs of the slowest rows, padding included.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.balance import step_proxy
from jaxmllm.balance.records import Mode
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.distributed import PROCESS_ID, initialize_distributed, reserve_cpu_threads
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.row_shapes import attention_spec
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.tools.output import measuring_parser, print_table, write_json
from jaxmllm.tools.workload import describe
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.step_functions import StepFunctions
from launch.local import run_local
from sharding.mesh import make_mesh

MODES: tuple[Mode, ...] = ("none", "phases")
WARM_UP = 2  # steps, not counted
GENERATOR = "the batches of the run after those that its sizes were chosen from"


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Seconds of every step by mode, and what the plans predict."""
    inputs = prepare(config, make_mesh(config.mesh.model_dump()))
    programs = {}
    fillers = {}
    for mode in MODES:
        balance = config.balance.model_copy(update={"mode": mode})
        spec = plan_spec(config.model_copy(update={"balance": balance}), inputs)
        attention = attention_spec(config, inputs.model, inputs.corpus.formats, spec)
        functions = StepFunctions(
            inputs.model, config.optimizer, config.decay_steps, len(inputs.corpus.sources)
        )
        programs[mode] = PhasedPrograms(
            functions, spec, inputs.corpus.formats, attention, config.run.param_dtype
        )
        fillers[mode] = StepFiller(inputs.corpus, spec, programs[mode].local_share, attention)

    state = programs[MODES[0]].init(config.run.seed)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    predicted: dict[str, list[float]] = {mode: [] for mode in MODES}
    for step in range(WARM_UP + steps):
        examples = batch_examples(inputs.order, config.data.batch_size, len(inputs.samples) + step)
        items = inputs.corpus.gather(examples)
        for mode in MODES if step % 2 else MODES[::-1]:
            batch = programs[mode].put(fillers[mode](step, examples))
            jax.block_until_ready((batch.rows, batch.tables))
            multihost_utils.sync_global_devices(f"{step} {mode}")
            began = time.perf_counter()
            state, metrics = programs[mode].train(state, batch)
            jax.block_until_ready((state, metrics))
            took = time.perf_counter() - began
            if step >= WARM_UP:
                seconds[mode].append(took)
                spec = programs[mode].spec
                predicted[mode].append(
                    step_proxy(plan_step(items, spec), items, spec)["step_proxy_padded"]
                )
    workload = describe(inputs.samples[0])
    return {"seconds": seconds, "predicted": predicted, "workload": workload}


def summarise(seconds: dict[str, list[float]], predicted: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles of each mode, and of the ratio none / phases of the same batch."""
    ratios = (np.array(seconds["none"]) / np.array(seconds["phases"])).tolist()
    return {
        **{mode: quartiles(times) for mode, times in seconds.items()},
        "ratio": quartiles(ratios),
        "ratio_of_medians": statistics.median(seconds["none"])
        / statistics.median(seconds["phases"]),
        "predicted_ratio": sum(predicted["none"]) / sum(predicted["phases"]),
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "quarter": low, "three_quarters": high}


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--per-rank", type=int, default=8, help="examples per process and step")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each mode")
    options = parse(parser, command)
    if min(options.processes, options.per_rank, options.steps) < 1:
        parser.error("--processes, --per-rank and --steps must be positive")
    if PROCESS_ID not in os.environ:
        arguments = sys.argv[1:] if command is None else command
        return run_local(
            [sys.executable, "-m", "benchmarks.balance_step", *arguments], options.processes, 1
        )

    pin_to_core(int(os.environ[PROCESS_ID]))
    reserve_cpu_threads()
    initialize_distributed()
    seed = [] if options.seed is None else [f"run.seed={options.seed}"]
    mesh = ["mesh.data=1", f"mesh.fsdp={options.processes}", "mesh.tensor=1"]
    size = [f"data.batch_size={options.processes * options.per_rank}"]
    try:
        config = load_config(options.config, [*mesh, *size, *seed, *options.overrides])
        measured = measure(config, options.steps)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if jax.process_index() == 0:
        summary = summarise(measured["seconds"], measured["predicted"])
        show(
            summary,
            f"{options.config}: {options.processes} processes x {options.per_rank} examples",
        )
        settings = {
            "config": options.config,
            "overrides": options.overrides,
            "steps": options.steps,
        }
        sizes = {"processes": options.processes, "per_rank": options.per_rank}
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


def show(summary: dict[str, Any], title: str) -> None:
    rows = [[f"{mode} [s]", *summary[mode].values()] for mode in MODES]
    rows.append(["none / phases, same batch", *summary["ratio"].values()])
    rows.append(["none / phases, of medians", summary["ratio_of_medians"], None, None])
    rows.append(["predicted", summary["predicted_ratio"], None, None])
    print_table(title, ["step", "median", "quarter below", "quarter above"], rows)


def pin_to_core(process: int) -> None:
    """Give this process one core, where there are enough and the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[process % len(cores)]})


if __name__ == "__main__":
    sys.exit(main())
