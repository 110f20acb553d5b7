"""Choose mesh, layouts, remat and rows of a config for devices of a cluster, from the batches that
it will train on.

    jaxmllm plan --config configs/quickstart.yaml --devices 8 --cluster h100 [--generated] [--out DIR] [key=value ...]

What the config or the command sets is kept, and the rest is chosen: axes of `mesh` that are not
named, or one that is -1 (`mesh={}` opens all, and pipeline stages unless `pipeline.stages` is
named), layouts of encoders, `remat` of each tower and of the decoder, rows, `kept_residuals`. Model
and batch are never changed. No device is needed, and without --check nothing is compiled.

    --devices N,M   several numbers: find the best layout for each, and what it costs
    --generated     take lengths from the generator in jaxmllm/tools/workload.py, not from the
                    config's data
    --top N         layouts in the table
    --check N       compile the programs of the first N layouts for the cluster's devices, which
                    need not be present: compiled bytes replace estimates, and layouts that do not
                    fit are struck out
    --simulate      predict this config alone, as it is, under every balance mode
    --profile       print how large a batch must be for all batches to split the devices between
                    phases the same way, and what a smaller one costs
    --from-run DIR  fit the cluster's efficiency to the steps of a run, and print them next to
                    predictions
    --out DIR       write plan.yaml (trains unedited), plan.json, plan.png and plan.html; for
                    several numbers of devices plan.json, counts.png and counts.html; for a run
                    plan.json and cluster.yaml with the fitted efficiency

    table
    step s          predicted; low and high: within the uncertainty of the cluster's efficiency
    MFU             FLOPs of real tokens over what the devices could do, as a run logs it; HFU: the
                    same for all FLOPs that they compute
    GB              memory of a device at the peak, estimated unless compiled, of what a run may
                    take

Exit code 1 if nothing can be planned, 2 if the cluster is unknown.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from jaxmllm.balance.records import Mode
from jaxmllm.cluster.clusters import CLUSTERS, Cluster, ClusterError, cluster_of
from jaxmllm.cluster.search.chosen_config import chosen_config
from jaxmllm.cluster.search.layouts import PlannedLayout, SearchResult
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config import strict_yaml
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import dump_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.families.resolved import load_run_config
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.setup.sizing import model_flops
from jaxmllm.tools import (
    plan_batches,
    plan_check,
    plan_counts,
    plan_drawing,
    plan_figures,
    plan_run,
)
from jaxmllm.tools.arguments import measuring_parser, new_folder, positive_int
from jaxmllm.tools.check import only_compile
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.plan_inputs import make_planner, notes, settle
from jaxmllm.training.run import USER_ERRORS

PLAN_ERRORS: Final = (*USER_ERRORS, CheckpointError, ClusterError)
DATA = "batches of the config's data, as a run draws them"
GENERATED = "lengths of jaxmllm/tools/workload.py, data.batch_size examples a step"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parse(parser, arguments)
    if sum(map(bool, (options.simulate, options.profile, options.from_run))) > 1:
        parser.error(
            "--simulate, --profile and --from-run are different questions: ask one at a time"
        )
    if options.check and (options.simulate or options.profile or options.from_run):
        parser.error("--check compiles layouts that were searched: leave out other questions")
    if len(options.devices) > 1 and (options.simulate or options.profile or options.from_run):
        parser.error("--simulate, --profile and --from-run are of one number of --devices")
    if len(options.devices) > 1 and options.check:
        parser.error("--check compiles layouts for one number of --devices")
    if options.check < 0:
        parser.error("--check must not be negative")
    if options.from_run is None:
        if options.config is None or not options.devices:
            parser.error("say --config FILE and how many --devices there are")
    elif options.config is not None or options.overrides or options.generated:
        parser.error(
            "--from-run takes config and data of the run: leave out --config, keys and --generated"
        )
    try:
        cluster = cluster_of(options.cluster)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if options.from_run is not None:
            return _compared(options, cluster)
        if options.simulate:
            return _simulate_config(options, cluster)
        if options.profile:
            return _profile_batches(options, cluster)
        several = len(options.devices) > 1
        return _plan_each_count(options, cluster) if several else _planned(options, cluster)
    except PLAN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, "jaxmllm plan")
    add_config(parser, required=False)
    parser.add_argument(
        "--devices",
        type=_device_counts,
        default=(),
        metavar="N[,N ...]",
        help="number of devices, or several numbers to compare",
    )
    parser.add_argument(
        "--cluster",
        default="h100",
        help=f"{', '.join(CLUSTERS)}, or a .yaml file (default: %(default)s)",
    )
    parser.add_argument(
        "--generated",
        action="store_true",
        help="use generated lengths instead of the config's data",
    )
    parser.add_argument(
        "--top",
        type=positive_int,
        default=10,
        metavar="N",
        help="layouts to print (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="compile the programs of the first N layouts",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate this config as it is, under every balance.mode",
    )
    parser.add_argument("--profile", action="store_true", help="find how large batches must be")
    parser.add_argument(
        "--from-run", type=Path, metavar="DIR", help="compare a run with its prediction"
    )
    parser.add_argument(
        "--out",
        type=new_folder,
        metavar="DIR",
        help="folder to write plan.yaml, plan.json and pictures into",
    )
    return parser


def _device_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices, separated by commas."""
    return tuple(map(positive_int, text.split(",")))


def _planned(options: argparse.Namespace, cluster: Cluster) -> int:
    """Search layouts for one number of devices; print the result and write it."""
    if options.check:
        # Before anything asks JAX for devices: the check compiles programs and runs none.
        only_compile()
    config = load_run_config(options.config, options.overrides)
    if options.check and config.pipeline.stages > 1:
        raise ConfigError(
            "--check: programs of pipeline stages are compiled by `jaxmllm check`; give it the plan.yaml of --out"
        )
    (devices,) = options.devices
    planner = make_planner(config, cluster, devices, _seed(options))
    for note in notes(planner):
        print(f"note: {note}", file=sys.stderr)
    result = planner.search(devices)
    checked = plan_check.check(result, planner, options.check) if options.check else None
    title = f"{options.config} on {devices} {cluster.name}"
    show(title, result, planner, options.top)
    figures = plan_figures.records(result, planner)
    if checked is not None:
        print(checked.line)
        figures["checked"] = vars(checked)
    if options.out is not None:
        write_plan(options, result.ranked[0])
        print(f"wrote {options.out / 'plan.yaml'} and plan.json beside it")
        notes_below = [] if checked is None else [checked.line]
        print(plan_drawing.write(title, result, planner, options.out, options.top, notes_below))
    _write_record(options, config, **figures)
    return 0


def _plan_each_count(options: argparse.Namespace, cluster: Cluster) -> int:
    """Print the best layout for every number of devices, and write them."""
    config = load_run_config(options.config, options.overrides)
    counts = plan_counts.count_up(
        options.devices, lambda devices: make_planner(config, cluster, devices, _seed(options))
    )
    title = f"{options.config} on {cluster.name}, {config.data.batch_size} examples a step"
    plan_counts.show(title, counts)
    if options.out is not None:
        print(plan_counts.write(title, counts, options.out))
    _write_record(options, config, **plan_counts.records(counts))
    return 0


def _write_record(options: argparse.Namespace, config: Config, **figures: Any) -> None:
    """Write the JSON record to --json and to plan.json in --out, where these are given."""
    if options.generated:
        seed, generator = options.seed, GENERATED
    else:
        seed, generator = config.run.seed, DATA
    devices = options.devices[0] if len(options.devices) == 1 else options.devices
    for path in (options.json, options.out and options.out / "plan.json"):
        write_json(
            path,
            "plan",
            seed,
            generator,
            config=options.config,
            overrides=options.overrides,
            cluster=options.cluster,
            devices=devices,
            **figures,
        )


# ---------------------------------------------------------------------------- other questions


def _simulate_config(options: argparse.Namespace, cluster: Cluster) -> int:
    """Predict this config alone, under every balance mode that it allows."""
    config = load_run_config(options.config, options.overrides)
    (devices,) = options.devices
    # With stages, microbatches are planned in the config's own mode alone
    own_mode = config.balance.mode
    modes = get_args(Mode) if config.pipeline.stages == 1 else (own_mode,)
    lines = []
    records = []
    refused = []
    # The config's own mode comes first, and its errors end the command. Other modes may be refused:
    # they have no rows of several ranks.
    for mode in sorted(modes, key=lambda mode: mode != own_mode):
        try:
            settled, choice = settle(config, devices, mode)
            planner = make_planner(settled, cluster, devices, _seed(options), priced=False)
            layout = planner.alone(choice)
        except ConfigError as error:
            if mode == own_mode:
                raise
            refused.append({"mode": mode, "why_not": str(error)})
            continue
        records.append({"mode": mode} | plan_figures.record(layout, layout, planner))
        lines.append([mode, *plan_figures.speed(layout, planner), plan_figures.waits(layout)])
    records.sort(key=lambda record: modes.index(record["mode"]))
    lines.sort(key=lambda line: modes.index(line[0]))
    title = f"{options.config} on {devices} {cluster.name}: {choice.words}"
    print_table(title, ["balance.mode", *plan_figures.SPEED, "ranks wait"], lines, left_aligned=1)
    part_names = list(records[0]["parts"])
    rows = [[part, *(record["parts"][part] for record in records)] for part in part_names]
    print_table("seconds", ["part", *(record["mode"] for record in records)], rows, left_aligned=1)
    for refusal in refused:
        print(f"balance.mode {refusal['mode']} is not simulated: {refusal['why_not']}")
    _write_record(options, config, modes=[*records, *refused])
    return 0


def _profile_batches(options: argparse.Namespace, cluster: Cluster) -> int:
    """Print how large a batch must be for all batches to split the devices the same way."""
    config = load_run_config(options.config, options.overrides)
    (devices,) = options.devices
    planner = make_planner(config, cluster, devices, _seed(options))
    flops = model_flops(planner.config, planner.model)
    loads = plan_batches.example_loads(planner.sampled.samples, flops)
    profiles = plan_batches.profiles(loads, devices, options.seed)
    for line in plan_batches.conclusions(profiles, [*flops], config.data.batch_size):
        print(line)
    _write_record(
        options,
        config,
        phases=[*flops],
        profiles=[{"settled": profile.settled} | vars(profile) for profile in profiles],
    )
    return 0


def _compared(options: argparse.Namespace, cluster: Cluster) -> int:
    """Print a run next to its prediction, at the efficiency that fits it."""
    run = plan_run.logged_run(options.from_run)
    sizes = run.config.mesh_sizes
    if not options.devices and -1 in sizes.values():
        raise ConfigError(
            "--from-run: the run's mesh took the devices that were there; say --devices"
        )
    devices = options.devices[0] if options.devices else math.prod(sizes.values())
    config, choice = settle(run.config, devices, run.config.balance.mode)
    planner = make_planner(
        config, cluster, devices, None, run.batches, history=run.history, priced=False
    )
    planner = replace(planner, as_run=True)
    layout = planner.alone(choice)
    batches = planner.sampled.steps
    before = layout.seconds
    device, times = plan_run.fitted(layout, batches, planner.device, run.seconds)
    lines = plan_run.comparison(layout, run, times)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    rows = [[line.get(column) for column in columns] for line in lines]
    print_table(f"{options.from_run} on {devices} {cluster.name}", columns, rows, left_aligned=1)
    as_planned = plan_run.plan_conclusion(layout, run)
    print(as_planned)
    print(
        f"a step took {run.seconds:.4g} s, the median of {len(run.records)}; predicted with an efficiency of "
        f"{planner.device.efficiency:.3g}: {before:.4g} s, with the fitted {device.efficiency:.3g}: "
        f"{lines[-1]['predicted_s']:.4g} s"
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        spread = plan_run.spread(run, times)
        # The whole record, so that it can be read without the file of the cluster it started from
        record = cluster.model_dump(exclude={"name"}, exclude_none=True) | {
            "efficiency": {"share": device.efficiency, "uncertainty": spread}
        }
        text = strict_yaml.write_text(record)
        (options.out / "cluster.yaml").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / 'cluster.yaml'}: name it as --cluster")
    _write_record(options, config, run=lines, as_planned=as_planned, efficiency=device.efficiency)
    return 0


def _seed(options: argparse.Namespace) -> int | None:
    return options.seed if options.generated else None


# ---------------------------------------------------------------------------- after it


def show(title: str, result: SearchResult, planner: Planner, top: int) -> None:
    """Print the ranked layouts, and why the others were rejected."""
    rows = plan_figures.table(result, planner)[:top]
    print_table(title, plan_figures.COLUMNS, rows, left_aligned=2)
    chosen = plan_figures.chosen_table(result)[:top]
    print_table("chosen", plan_figures.CHOSEN, chosen, left_aligned=3)
    print(
        f"{result.considered} layouts on {result.meshes} meshes considered; {len(result.estimates)} are legal and fit, "
        f"of which {len(result.ranked) + len(result.struck)} were planned whole"
    )
    for reason, rejections in result.rejected.most_common():
        print(f"  {rejections} rejected: {reason}")


def write_plan(options: argparse.Namespace, best: PlannedLayout) -> None:
    """Write plan.yaml: the config with everything that was chosen."""
    options.out.mkdir(parents=True, exist_ok=True)
    head = (
        f"# {options.config} for {options.devices[0]} devices of {options.cluster}, planned by jaxmllm plan:\n"
        f"# {best.choice.words}; a step of {best.seconds:.3g} s predicted\n"
    )
    (options.out / "plan.yaml").write_text(
        head + dump_config(chosen_config(best)), encoding="utf-8"
    )
