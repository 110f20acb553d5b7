"""Draw a pipeline's schedule: every rank's operations over time, coloured by component and kind.

    jaxmllm timeline --config FILE [--step K] [--save TABLE] [key=value ...]
    jaxmllm timeline --run FOLDER [--step K] [--save TABLE]
    jaxmllm timeline --table TABLE
    jaxmllm timeline --generated [--layout L] [--schedule S] [--split] [--stages N] [--microbatches M]

The first form plans a step of a config's run as the run does, from its data. The plan is exact if
the run has as many devices as are assumed (printed where the mesh has an open axis, -1) and, with
kept_residuals: auto, 80 GiB on each. The second form does the same for the run in a folder, with
the batch sizes and weights that its steps had; without --step it draws the tables that the run kept
of its last step. The third draws the tables of a step that a run saved while it was profiled
(profile.steps), or that --save wrote. The fourth plans a batch of jaxmllm/tools/workload.py on its
model. An operation is as wide as its FLOPs and a tick as its longest operation; saved tables do not
hold FLOPs, so their ticks are equally wide. If a step has several runs, they follow one another.
Writes pipeline.png and pipeline.html, and prints their table. Nothing is compiled or run.

    busy         share of the step in which a rank computes
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import numpy as np

from jaxmllm.balance.stages.plan import PlannedRun, plan_runs
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import Segment, continued_examples
from jaxmllm.families.resolved import load_run_config
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.planning_mesh import check_staged, staged_mesh
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import pipeline_sizes
from jaxmllm.tools.arguments import command_parser, new_file, new_folder, positive_int, seed_int
from jaxmllm.tools.output import print_table
from jaxmllm.tools.timeline_drawing import Bar, Timeline, table, write
from jaxmllm.tools.timeline_generated import UNIT, generated_schedule
from jaxmllm.training.history import read_history, segment_of
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.run_folder import SCHEDULE_FILE, named_config
from sharding.mesh import axis_sizes
from sharding.pipeline.cuts import LayoutName
from sharding.pipeline.graph import Kind
from sharding.pipeline.schedules.by_name import SCHEDULES
from sharding.pipeline.schedules.schedule import Schedule, asynchronous, durations, lockstep
from sharding.pipeline.table_file import load_tables, save_tables
from sharding.pipeline.table_spec import operation_of

PFLOP = 10**15
# Defaults of the options of --generated
GENERATED: Final = {
    "layout": "segments",
    "schedule": "greedy",
    "split": False,
    "stages": 4,
    "microbatches": 12,
    "seed": 0,
}

# ---------------------------------------------------------------------------- timelines


def of_schedules(schedules: Sequence[Schedule], title: str, unit: int = 1) -> Timeline:
    """Timeline of a step as the executor runs it: a tick ends with its longest operation.

    Args:
      schedules: one for each run of the step, in order.
      unit: FLOPs that a duration of 1 stands for.
    """
    bars = []
    edges = [0.0]
    for schedule in schedules:
        graph = schedule.graph
        lengths = [duration * unit / PFLOP for duration in durations(schedule)]
        # Runs follow one another, so their ticks continue the same edges.
        for row in schedule.ticks.tolist():
            for rank, n in enumerate(row):
                # -1: the rank waits in this tick.
                if n >= 0:
                    bars.append(
                        Bar(
                            rank=rank,
                            start=edges[-1],
                            length=lengths[n],
                            component=graph.ring.chains[graph.chain[n]].name,
                            kind=Kind(graph.kind[n]),
                            chunk=graph.depth[n],
                            microbatch=graph.microbatch[n],
                        ),
                    )
            edges.append(edges[-1] + max((lengths[n] for n in row if n >= 0), default=0.0))
    without_ticks = sum(map(asynchronous, schedules)) / sum(map(lockstep, schedules))
    note = f"ranks that waited for nothing but what they need would take {100 * without_ticks:.1f} % of it"
    return Timeline(title, schedules[0].graph.ring.stages, tuple(bars), tuple(edges), "PFLOP", note)


def of_table(path: Path) -> Timeline:
    """Timeline of saved tables, the runs of the step one after another. Raises `PipelineError` if
    the file holds no tables."""
    tables = load_tables(path)
    rows = np.concatenate(tables.rows)
    actions = rows[..., tables.columns["action"]]
    bars = []
    for tick, rank in zip(*np.nonzero(actions > 0), strict=True):
        component, kind = operation_of(int(actions[tick, rank]))
        bars.append(
            Bar(
                rank=int(rank),
                start=float(tick),
                length=1.0,
                component=tables.components[component],
                kind=Kind(kind),
                chunk=int(rows[tick, rank, tables.columns["chunk"]]),
                microbatch=int(rows[tick, rank, tables.columns["microbatch"]]),
            ),
        )
    edges = tuple(float(tick) for tick in range(len(rows) + 1))
    return Timeline(f"{path.name}, {len(rows)} ticks", rows.shape[1], tuple(bars), edges, "ticks")


# ---------------------------------------------------------------------------- a step of a run


def plan_step_of(
    config: Config, step: int, history: Sequence[Segment] = ()
) -> tuple[list[PlannedRun], PipelineSizes]:
    """The runs of a step, planned as training plans them, and the sizes that they were planned
    with.

    Args:
      step: number of the step, counted from 1 as in metrics.jsonl.
      history: batch sizes and weights of the run's steps; empty: always those of the config.

    Raises:
      ConfigError: the config has no stages, or its data have no such step.
    """
    if step < 1:
        raise ConfigError(f"--step {step}: steps are counted from 1")
    # Segments count steps from 0: step n, counted from 1, is in one that begins before n.
    past = [segment for segment in history if segment.step < step] or [segment_of(config)]
    data = config.data.model_copy(update={"batch_size": past[-1].batch_size})
    config = config.model_copy(update={"data": data})
    inputs = prepare(config, staged_mesh(config))
    sizes = pipeline_sizes(config, inputs)
    try:
        examples = continued_examples(inputs.corpus.members, config.run.seed, past, step - 1)
    except IndexError as error:
        raise ConfigError(f"--step {step}: {error}") from error
    return plan_runs(inputs.corpus.gather(examples), sizes.spec, sizes.training), sizes


def _config_timeline(options: Namespace) -> Timeline:
    config = load_run_config(options.config, options.overrides)
    step = 1 if options.step is None else options.step
    return _step_timeline(config, options.config, step, options.save)


def _run_timeline(options: Namespace) -> Timeline:
    config = named_config("--run", options.run)
    if options.step is None:
        check_staged(config)
        return of_table(options.run / SCHEDULE_FILE)
    return _step_timeline(
        config, options.run, options.step, options.save, read_history(options.run)
    )


def _step_timeline(
    config: Config, name: object, step: int, save: Path | None, history: Sequence[Segment] = ()
) -> Timeline:
    """Timeline of a step that is planned here; its tables are also written to `save`, if given."""
    runs, sizes = plan_step_of(config, step, history)
    assumed = axis_sizes(staged_mesh(config))
    for axis, size in config.mesh_sizes.items():
        if size == -1:
            print(
                f"mesh.{axis} is -1: planned for {assumed[axis]}; a run on other devices has other steps"
            )
    if save:
        rows, wire_active = zip(*(run.table.used for run in runs), strict=True)
        save_tables(save, sizes.training.tables, rows, wire_active)
    microbatches = sum(run.rows.phases[LANGUAGE].count for run in runs)
    chosen = sizes.training.config
    settings = _schedule_words(chosen.schedule, chosen.split_backward is True)
    if any(run.fallback for run in runs):
        settings += ", greedy where that does not fit"
    title = (
        f"step {step} of {name}: {settings}, layout {chosen.layout}, "
        f"{config.pipeline.stages} ranks, {microbatches} microbatches"
    )
    return of_schedules([run.schedule for run in runs], title)


def _generated_timeline(options: Namespace) -> Timeline:
    schedule = generated_schedule(
        layout=options.layout,
        schedule=options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        seed=options.seed,
        split=options.split,
    )
    microbatches = len(schedule.graph.workload.inputs)
    settings = _schedule_words(options.schedule, options.split)
    title = (
        f"{settings}, layout {options.layout}, {options.stages} ranks, {microbatches} microbatches"
    )
    return of_schedules([schedule], title, UNIT)


TIMELINES: Final = {  # by option: what makes the timeline
    "config": _config_timeline,
    "run": _run_timeline,
    "table": lambda options: of_table(options.table),
    "generated": _generated_timeline,
}


def _schedule_words(schedule: str, split: bool) -> str:
    return f"{schedule} with split backward" if split else schedule


# ---------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options, source = _parse(arguments)
    try:
        timeline = TIMELINES[source](options)
    except (*USER_ERRORS, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wrote = write(timeline, options.out)
    columns, rows = table(timeline)
    print_table(timeline.title, columns, rows)
    print(wrote if options.save is None else f"{wrote}, and the tables {options.save}")
    return 0


def _parser() -> ArgumentParser:
    parser = command_parser(__doc__, "jaxmllm timeline")
    add_config(parser, required=False)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="folder of a run")
    parser.add_argument("--step", type=int, help="number of the step, counted from 1")
    parser.add_argument(
        "--save",
        type=new_file,
        metavar="TABLE",
        help="also write the step's tables to this file (.npz)",
    )
    parser.add_argument("--table", type=Path, help="file of saved tables (.npz)")
    parser.add_argument("--generated", action="store_true", help="plan a generated batch")
    parser.add_argument(
        "--layout",
        choices=get_args(LayoutName),
        help="layout of a generated batch (default: segments)",
    )
    parser.add_argument(
        "--schedule",
        choices=tuple(SCHEDULES),
        help="schedule of a generated batch (default: greedy)",
    )
    parser.add_argument(
        "--split",
        action="store_true",
        default=None,
        help="split backward passes of a generated batch",
    )
    parser.add_argument(
        "--stages", type=positive_int, help="stages of a generated batch (default: 4)"
    )
    parser.add_argument(
        "--microbatches", type=positive_int, help="microbatches of a generated batch (default: 12)"
    )
    parser.add_argument("--seed", type=seed_int, help="seed of the generated lengths")
    parser.add_argument(
        "--out",
        type=new_folder,
        default=Path(),
        help="folder to write pipeline.png and pipeline.html into",
    )
    return parser


def _parse(arguments: Sequence[str] | None) -> tuple[Namespace, str]:
    """The options, and the one of `TIMELINES` that they name; options of another one are refused."""
    parser = _parser()
    options = parse(parser, arguments)
    # An option that was not given is None, or False if it is a flag.
    chosen = [name for name in TIMELINES if getattr(options, name) not in (None, False)]
    if len(chosen) != 1:
        parser.error("one of --config, --run, --table and --generated is required")
    source = chosen[0]
    if source != "config" and options.overrides:
        parser.error("key=value belongs to --config")
    if options.step is None and source == "run" and options.save:
        parser.error(f"--save needs --step: the last step's tables are {SCHEDULE_FILE} already")
    if source in ("table", "generated") and (options.save or options.step is not None):
        parser.error("--save and --step belong to --config or --run")
    # These options default to None, so that one given without --generated can be refused; their
    # defaults are put in afterwards.
    generated_options = {name for name in GENERATED if getattr(options, name) is not None}
    if source != "generated" and generated_options:
        parser.error(
            f"{', '.join(f'--{name}' for name in GENERATED if name in generated_options)}: only with --generated"
        )
    for name, value in GENERATED.items():
        if name not in generated_options:
            setattr(options, name, value)
    return options, source


if __name__ == "__main__":
    sys.exit(main())
