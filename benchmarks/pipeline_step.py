"""What a planned pipeline is worth in seconds: whole training steps in two stages on two processes, on this machine.

    python -m benchmarks.pipeline_step --config configs/quickstart.yaml [--stages 2] [--steps 20] [key=value ...]

Every process has one CPU device and, where the system lets it, one core of its own: one stage. The plans, the first the
yardstick, train on the same batches and take turns step by step, so that a slow moment of the machine touches all.
Rows and tables are on the devices before the clock starts. `predicted` is the ratio of the FLOPs of the schedules,
tick by tick those of the slowest stage, rows' padding included; `idle` the share of the stages' time that the
schedule leaves them waiting, also predicted.
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

from benchmarks.balance_step import pin_to_core, quartiles
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.distributed import PROCESS_ID, initialize_distributed, reserve_cpu_threads
from jaxmllm.setup.build import make_programs
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools.output import measuring_parser, print_table, write_json
from jaxmllm.training.run import USER_ERRORS
from launch.local import run_local
from sharding.mesh import make_mesh

PLANS: dict[str, dict[str, Any]] = {
    "chain 1F1B": {"layout": "chain", "schedule": "1f1b", "deferral": False},
    "segments": {"layout": "segments", "schedule": "greedy", "deferral": False},
    "+ search, deferral": {"layout": "segments", "schedule": "search", "deferral": True},
    "+ split": {
        "layout": "segments",
        "schedule": "search",
        "deferral": True,
        "split_backward": True,
    },
}
YARDSTICK = "chain 1F1B"
WARM_UP = 2  # steps, not counted
GENERATOR = "the batches of the run after those that its sizes were chosen from"


def measure(config: Config, plans: Sequence[str], steps: int) -> dict[str, dict[str, list[float]]]:
    """By plan: seconds of every step, its predicted cost and idle share, and what planning it took."""
    inputs = prepare(config, make_mesh(config.mesh_sizes, spans=mesh_spans(config)))
    programs, fillers, states = {}, {}, {}
    for name in plans:
        pipeline = config.pipeline.model_copy(update=PLANS[name])
        programs[name], sizes = make_programs(
            config.model_copy(update={"pipeline": pipeline}), inputs
        )
        assert sizes is not None, "a pipeline has at least two stages"
        spec, ranks = programs[name].spec, programs[name].local_share
        fillers[name] = StepFiller(
            inputs.corpus, spec, ranks, programs[name].attention, sizes.training
        )
        states[name] = programs[name].init(config.run.seed)
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "cost": [], "idle": [], "ticks": [], "plan_ms": []} for name in plans
    }
    for number in range(WARM_UP + steps):
        examples = batch_examples(
            inputs.order, config.data.batch_size, len(inputs.samples) + number
        )
        for name in plans if number % 2 else plans[::-1]:
            host = fillers[name](number, examples)
            batch: Any = programs[name].put(host)
            jax.block_until_ready(batch.runs)
            multihost_utils.sync_global_devices(f"{number} {name}")
            began = time.perf_counter()
            states[name], metrics = programs[name].train(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            took = time.perf_counter() - began
            if number >= WARM_UP:
                told = host.statistics
                row = [
                    took,
                    *(told[f"pipeline/{key}"] for key in ("cost", "idle_share", "ticks")),
                    told["plan_ms"],
                ]
                for values, value in zip(found[name].values(), row, strict=True):
                    values.append(value)
    return found


def summarise(measured: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """One record a plan: quartiles of its seconds and of the yardstick's over its own, and what was predicted."""
    first = next(iter(measured.values()))
    return [
        {
            "plan": name,
            "seconds": quartiles(of["seconds"]),
            "ratio": quartiles((np.array(first["seconds"]) / np.array(of["seconds"])).tolist()),
            "predicted_ratio": sum(first["cost"]) / sum(of["cost"]),
            "idle_share": statistics.fmean(of["idle"]),
            "ticks": statistics.fmean(of["ticks"]),
            "plan_ms": statistics.median(of["plan_ms"]),
        }
        for name, of in measured.items()
    ]


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument("--stages", type=int, default=2, help="and processes")
    parser.add_argument("--batch", type=int, default=16, help="examples of a step")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each plan")
    parser.add_argument(
        "--plans", nargs="+", choices=PLANS, default=[*PLANS], help="the first is the yardstick"
    )
    options = parse(parser, command)
    if options.stages < 2 or min(options.batch, options.steps) < 1:
        parser.error("--stages must be at least 2, --batch and --steps positive")
    if PROCESS_ID not in os.environ:
        own = sys.argv[1:] if command is None else command
        return run_local(
            [sys.executable, "-m", "benchmarks.pipeline_step", *own], options.stages, 1
        )

    pin_to_core(int(os.environ[PROCESS_ID]))
    reserve_cpu_threads()
    initialize_distributed()
    seed = [] if options.seed is None else [f"run.seed={options.seed}"]
    shape = [f"pipeline.stages={options.stages}", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"]
    try:
        config = load_config(
            options.config, [*shape, f"data.batch_size={options.batch}", *seed, *options.overrides]
        )
        measured = measure(config, options.plans, options.steps)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if jax.process_index() == 0:
        rows = summarise(measured)
        show(rows, f"{options.config}: {options.stages} stages x {options.batch} examples")
        settings = {
            "config": options.config,
            "set": options.overrides,
            "steps": options.steps,
            "stages": options.stages,
        }
        write_json(
            options.json,
            "pipeline_step",
            config.run.seed,
            GENERATOR,
            **settings,
            rows=rows,
            measured=measured,
        )
    return 0


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    columns = [
        "plan",
        "step [s]",
        "ratio",
        "quarter below",
        "quarter above",
        "predicted",
        "idle",
        "ticks",
        "plan [ms]",
    ]
    print_table(
        title,
        columns,
        [
            [
                row["plan"],
                row["seconds"]["median"],
                *row["ratio"].values(),
                row["predicted_ratio"],
                row["idle_share"],
                row["ticks"],
                row["plan_ms"],
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
