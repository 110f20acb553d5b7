"""What a planned pipeline is worth in seconds: whole training steps in two stages on two processes,
on this machine.

    python -m benchmarks.pipeline_step --config configs/quickstart.yaml [--stages 2] [--steps 20] [key=value ...]

Every process has one CPU device and, if the system allows it, one core of its own: one stage. The
plans, of which the first is the yardstick, train on the same batches and take turns step by step,
so that a slow moment of the machine affects all. Rows and tables are on the devices before the
clock starts. `by FLOPs` is the ratio of the FLOPs of the schedules: the sum over ticks of the FLOPs
of the slowest stage, padding of rows included. `idle` is the share of the stages' time in which the
schedule lets them wait, also predicted.

Before any plan runs, another one (`CALIBRATION`) is timed on other batches, as `jaxmllm calibrate`
does: the start of a run, a tick (without its operations), a FLOP, and what a step takes in addition
to its gradients. `predicted [s]` are the seconds that follow from these and from the FLOPs and
ticks of a plan; `predicted` is their ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.balance_step import pin_to_core, quartiles
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.distributed import PROCESS_ID, initialize_distributed, reserve_cpu_threads
from jaxmllm.setup.build import make_programs
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.spans import node_spans
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.tick_times import TickTimes, call_seconds, measure_ticks
from jaxmllm.training.programs.staged import StagedPrograms
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
# The calibrated plan differs from all compared plans, also in its schedule
CALIBRATION: dict[str, Any] = {"layout": "chain", "schedule": "gpipe", "deferral": False}
CALIBRATED_STEPS = 2  # batches on which the calibration is timed
WARM_UP = 2  # first steps, not counted
GENERATOR = "the batches of the run after those that its sizes were chosen from"
Measured = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Planned:
    """The programs of a plan, and the filler of the rows that they run."""

    programs: StagedPrograms
    filler: StepFiller

    @staticmethod
    def make(config: Config, inputs: RunInputs, plan: dict[str, Any]) -> Planned:
        """Build them as a run with the keys `plan` of `pipeline` would."""
        pipeline = config.pipeline.model_copy(update=plan)
        programs, sizes = make_programs(config.model_copy(update={"pipeline": pipeline}), inputs)
        assert sizes is not None, "a pipeline has at least two stages"
        assert isinstance(programs, StagedPrograms)
        attention = programs.attention
        ranks = programs.local_share
        filler = StepFiller(inputs.corpus, programs.spec, ranks, attention, sizes.training)
        return Planned(programs, filler)


@dataclass(frozen=True)
class StepTimes:
    """Calibrated times of a step: the terms of its gradients, and the seconds of all else it
    does."""

    gradients: TickTimes
    rest: float

    def seconds(self, statistics_: Mapping[str, float]) -> float:
        """Predicted seconds of a step with these statistics."""
        names = ("cost", "ticks", "runs")
        return self.rest + self.gradients.seconds(*(statistics_[f"pipeline/{n}"] for n in names))


def calibrate(config: Config, inputs: RunInputs, repeats: int) -> StepTimes:
    """Time a plan that is not compared, on batches that no plan is measured on."""
    planned = Planned.make(config, inputs, CALIBRATION)
    programs = planned.programs
    first_step = len(inputs.samples)
    steps = [
        planned.filler(
            step, batch_examples(inputs.order, config.data.batch_size, first_step + step)
        )
        for step in range(CALIBRATED_STEPS)
    ]
    barrier = partial(multihost_utils.sync_global_devices, "calibrate")
    state = programs.init(config.run.seed)
    terms = measure_ticks(programs, state.params, steps, repeats, barrier)
    rest_seconds = []
    for host in [steps[0], *steps * repeats]:  # the first step compiles, and does not count
        batch = programs.put(host)
        jax.block_until_ready(batch.runs)
        gradient_seconds = call_seconds(partial(programs.gradients, state.params, batch), barrier)
        train_seconds = call_seconds(partial(programs.train, state, batch), barrier)
        # The step donates its state. Wait for the new one, or the time to make it would count as
        # gradients
        state = jax.block_until_ready(programs.init(config.run.seed))
        rest_seconds.append(train_seconds - gradient_seconds)
    return StepTimes(terms, max(0.0, statistics.median(rest_seconds[1:])))


def measure(config: Config, plans: Sequence[str], steps: int, repeats: int) -> Measured:
    """For every plan and step: seconds, predicted seconds, predicted cost, idle share and ticks,
    and milliseconds of planning.

    Args:
      repeats: rounds of the calibration from which seconds are predicted.
    """
    inputs = prepare(
        config, make_mesh(config.mesh_sizes, spans=node_spans(config, config.mesh_sizes))
    )
    times = calibrate(config, inputs, repeats)
    planned = {name: Planned.make(config, inputs, PLANS[name]) for name in plans}
    states = {name: prepared.programs.init(config.run.seed) for name, prepared in planned.items()}
    names = ("seconds", "predicted", "cost", "idle", "ticks", "plan_ms")
    values_by_plan: Measured = {plan: {name: [] for name in names} for plan in plans}
    first_step = len(inputs.samples) + CALIBRATED_STEPS
    for step in range(WARM_UP + steps):
        examples = batch_examples(inputs.order, config.data.batch_size, first_step + step)
        for name in plans if step % 2 else plans[::-1]:
            programs = planned[name].programs
            host = planned[name].filler(step, examples)
            batch = programs.put(host)
            jax.block_until_ready(batch.runs)
            multihost_utils.sync_global_devices(f"{step} {name}")
            start = time.perf_counter()
            states[name], metrics = programs.train(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            step_seconds = time.perf_counter() - start
            if step >= WARM_UP:
                host_statistics = host.statistics
                row = [
                    step_seconds,
                    times.seconds(host_statistics),
                    *(
                        host_statistics[f"pipeline/{key}"]
                        for key in ("cost", "idle_share", "ticks")
                    ),
                    host_statistics["plan_ms"],
                ]
                for values, value in zip(values_by_plan[name].values(), row, strict=True):
                    values.append(value)
    return values_by_plan


def summarise(measured: Measured) -> list[dict[str, Any]]:
    """One record per plan: quartiles of its seconds and of the yardstick's seconds over its own,
    and the predictions."""
    reference = next(iter(measured.values()))
    return [
        {
            "plan": name,
            "seconds": quartiles(figures["seconds"]),
            "ratio": quartiles(
                (np.array(reference["seconds"]) / np.array(figures["seconds"])).tolist()
            ),
            "predicted_seconds": statistics.median(figures["predicted"]),
            "predicted_ratio": sum(reference["predicted"]) / sum(figures["predicted"]),
            "ratio_by_flops": sum(reference["cost"]) / sum(figures["cost"]),
            "idle_share": statistics.fmean(figures["idle"]),
            "ticks": statistics.fmean(figures["ticks"]),
            "plan_ms": statistics.median(figures["plan_ms"]),
        }
        for name, figures in measured.items()
    ]


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.set_defaults(seed=None)
    add_config(parser)
    parser.add_argument(
        "--stages", type=int, default=2, help="stages, each a process (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="examples per step (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="measured steps per plan (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds of the calibration (default: %(default)s)"
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=PLANS,
        default=[*PLANS],
        help="plans to compare with the first of them",
    )
    options = parse(parser, command)
    if options.stages < 2 or min(options.batch, options.steps, options.repeats) < 1:
        parser.error("--stages must be at least 2, --batch, --steps and --repeats positive")
    if PROCESS_ID not in os.environ:
        arguments = sys.argv[1:] if command is None else command
        return run_local(
            [sys.executable, "-m", "benchmarks.pipeline_step", *arguments], options.stages, 1
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
        if config.pipeline.flops_per_tick:
            raise ConfigError(
                "pipeline.flops_per_tick must be 0: what a tick takes is measured here"
            )
        measurements = measure(config, options.plans, options.steps, options.repeats)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if jax.process_index() == 0:
        rows = summarise(measurements)
        show(rows, f"{options.config}: {options.stages} stages x {options.batch} examples")
        settings = {
            "config": options.config,
            "set": options.overrides,
            "steps": options.steps,
            "stages": options.stages,
            "batch": options.batch,
            "repeats": options.repeats,
        }
        write_json(
            options.json,
            "pipeline_step",
            config.run.seed,
            GENERATOR,
            **settings,
            rows=rows,
            measured=measurements,
        )
    return 0


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print one line per plan."""
    columns = [
        "plan",
        "step [s]",
        "predicted [s]",
        "ratio",
        "quarter below",
        "quarter above",
        "predicted",
        "by FLOPs",
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
                row["predicted_seconds"],
                *row["ratio"].values(),
                row["predicted_ratio"],
                row["ratio_by_flops"],
                row["idle_share"],
                row["ticks"],
                row["plan_ms"],
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
