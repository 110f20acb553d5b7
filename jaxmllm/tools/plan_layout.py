"""Choose mesh, layouts, remat and rows of a config for devices of a cluster, from the batches that it will train on.

    jaxmllm plan --config configs/quickstart.yaml --devices 8 --cluster h100 [--generated] [--out DIR] [key=value ...]

What the config or the command fixes stays; what they leave open is chosen: axes of `mesh` that are not named or -1
(`mesh={}` opens all), layouts of encoders, `remat` of each tower and of the decoder, rows, `kept_residuals`. Model and
batch are never changed. No device is needed, and without --check nothing is compiled.

    --generated     lengths of the generator in jaxmllm/tools/workload.py instead of the config's data
    --top N         layouts in the table
    --check N       compile the programs of the first N layouts for devices of the cluster, which need not be there:
                    their bytes take the place of estimates, and what does not fit is struck out
    --simulate      this config alone, as it stands, under every balance mode
    --profile       how large a batch must be for phases to share devices alike, and what it costs if not
    --from-run DIR  fit the cluster's efficiency to the steps of a run, and print what was predicted beside them
    --out DIR       plan.yaml (trains unedited), plan.json, plan.png and plan.html; of a run, cluster.yaml with its
                    efficiency

    table
    step s          predicted; low and high: within the uncertainty of the cluster's efficiency
    MFU             FLOPs of real tokens over what the devices could do, as a run logs it; HFU: of all that they compute
    GB              of a device at the peak, estimated unless compiled, and the share of it that a run may take

Exit code 1 where nothing can be planned, 2 where the cluster is unknown.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from jaxmllm.balance.costs.calibration import load_calibration
from jaxmllm.balance.records import Mode
from jaxmllm.cluster.clusters import CLUSTERS, Cluster, ClusterError, cluster_of
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.search.chosen_config import chosen_config
from jaxmllm.cluster.search.cluster_mesh import cluster_mesh, with_nodes
from jaxmllm.cluster.search.layouts import Found, LengthsOf, PlannedLayout
from jaxmllm.cluster.search.mesh_choices import AXES, MeshChoice
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config import strict_yaml
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.read import config_tree, dump_config, parse_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.text.tokenizers import load_tokenizer
from jaxmllm.families.resolved import load_run_config
from jaxmllm.models.mllm import build_model
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.setup.prepare import vocabulary
from jaxmllm.setup.sizing import model_flops
from jaxmllm.tools import plan_batches, plan_check, plan_drawing, plan_figures, plan_run
from jaxmllm.tools.check import only_compile
from jaxmllm.tools.output import measuring_parser, print_table, write_json
from jaxmllm.tools.plan_lengths import DataLengths, MadeUpLengths, planned_steps
from jaxmllm.training.run import USER_ERRORS
from sharding.mesh import mesh_shape

PLAN_ERRORS: Final = (*USER_ERRORS, CheckpointError)
DATA = "batches of the config's data, as a run draws them"
GENERATED = "lengths of jaxmllm/tools/workload.py, data.batch_size examples a step"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parse(parser, arguments)
    if options.devices is not None and options.devices < 1:
        parser.error("--devices must be positive")
    if sum(map(bool, (options.simulate, options.profile, options.from_run))) > 1:
        parser.error(
            "--simulate, --profile and --from-run are different questions: ask one at a time"
        )
    if options.check and (options.simulate or options.profile or options.from_run):
        parser.error("--check compiles layouts that were searched: leave out other questions")
    if options.check < 0:
        parser.error("--check must not be negative")
    if options.from_run is None:
        if options.config is None or options.devices is None:
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
            return _simulated(options, cluster)
        return _profiled(options, cluster) if options.profile else _planned(options, cluster)
    except PLAN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, "jaxmllm plan")
    add_config(parser, required=False)
    parser.add_argument("--devices", type=int, help="of the cluster")
    parser.add_argument(
        "--cluster", default="h100", help=f"one of {', '.join(CLUSTERS)}, or a .yaml file"
    )
    parser.add_argument(
        "--generated", action="store_true", help="generated lengths instead of the config's data"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts in the table")
    parser.add_argument(
        "--check", type=int, default=0, metavar="N", help="layouts that are compiled"
    )
    parser.add_argument("--simulate", action="store_true", help="this config under every mode")
    parser.add_argument("--profile", action="store_true", help="how large batches must be")
    parser.add_argument("--from-run", type=Path, metavar="DIR", help="a run, beside its prediction")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of plan.yaml and others")
    return parser


def _planned(options: argparse.Namespace, cluster: Cluster) -> int:
    if options.check:
        only_compile()
    config = load_run_config(options.config, options.overrides)
    planner = make_planner(
        config, cluster, options.devices, options.seed if options.generated else None
    )
    for note in notes(planner):
        print(f"note: {note}", file=sys.stderr)
    found = planner.search(options.devices)
    checked = plan_check.check(found, planner, options.check) if options.check else None
    title = f"{options.config} on {options.devices} {cluster.name}"
    show(title, found, planner, options.top)
    figures = plan_figures.records(found, planner)
    if checked is not None:
        print(checked.line)
        figures["checked"] = vars(checked)
    if options.out is not None:
        write_plan(options, found.ranked[0])
        print(f"wrote {options.out / 'plan.yaml'} and plan.json beside it")
        notes_below = [] if checked is None else [checked.line]
        print(plan_drawing.write(title, found, planner, options.out, options.top, notes_below))
    _write_record(options, config, **figures)
    return 0


def _write_record(options: argparse.Namespace, config: Config, **figures: Any) -> None:
    for path in (options.json, options.out and options.out / "plan.json"):
        write_json(
            path,
            "plan",
            options.seed if options.generated else config.run.seed,
            GENERATED if options.generated else DATA,
            config=options.config,
            overrides=options.overrides,
            cluster=options.cluster,
            devices=options.devices,
            **figures,
        )


# ---------------------------------------------------------------------------- other questions


def _simulated(options: argparse.Namespace, cluster: Cluster) -> int:
    """This config alone, under every balance mode."""
    config = load_run_config(options.config, options.overrides)
    lines, records = [], []
    for mode in get_args(Mode):
        settled, choice = settle(config, options.devices, mode)
        planner = make_planner(settled, cluster, options.devices, _seed(options))
        layout = planner.alone(choice)
        record = {"mode": mode} | plan_figures.record(layout, layout, planner)
        lines.append([mode, *plan_figures.speed(layout, planner), plan_figures.waits(layout)])
        records.append(record)
    title = f"{options.config} on {options.devices} {cluster.name}: {choice.words}"
    print_table(title, ["balance.mode", *plan_figures.SPEED, "ranks wait"], lines, left_aligned=1)
    parts = list(records[0]["parts"])
    rows = [[part, *(record["parts"][part] for record in records)] for part in parts]
    print_table("seconds", ["part", *(record["mode"] for record in records)], rows, left_aligned=1)
    _write_record(options, config, modes=records)
    return 0


def settle(config: Config, devices: int, mode: Mode) -> tuple[Config, MeshChoice]:
    """The config with nothing left open but rows, and its mesh.

    Raises:
      MeshError: it has another number of devices.
    """
    sizes = config.mesh.model_dump()
    tree = config_tree(config)
    tree["mesh"] = dict(zip(sizes, mesh_shape(sizes, devices), strict=True))
    tree["balance"]["mode"] = mode
    settled = parse_config(tree, "--simulate")
    return settled, MeshChoice(**tree["mesh"])


def _profiled(options: argparse.Namespace, cluster: Cluster) -> int:
    """How large batches must be."""
    config = load_run_config(options.config, options.overrides)
    planner = make_planner(config, cluster, options.devices, _seed(options))
    flops = model_flops(planner.config, planner.model)
    loads = plan_batches.example_loads(planner.sampled.samples, flops)
    found = plan_batches.profiles(loads, options.devices, options.seed)
    for line in plan_batches.conclusions(found, [*flops], config.data.batch_size):
        print(line)
    _write_record(
        options,
        config,
        phases=[*flops],
        profiles=[{"settled": one.settled} | vars(one) for one in found],
    )
    return 0


def _compared(options: argparse.Namespace, cluster: Cluster) -> int:
    """A run beside its prediction, at the efficiency that it shows."""
    run = plan_run.logged_run(options.from_run)
    sizes = run.config.mesh_sizes
    if options.devices is None and -1 in sizes.values():
        raise ConfigError(
            "--from-run: the run's mesh took the devices that were there; say --devices"
        )
    devices = options.devices or math.prod(sizes.values())
    config, choice = settle(run.config, devices, run.config.balance.mode)
    planner = replace(make_planner(config, cluster, devices, None, run.batches), as_run=True)
    layout = planner.alone(choice)
    batches = planner.sampled.steps
    before = layout.seconds
    device, times = plan_run.fitted(layout, batches, planner.device, run.seconds)
    lines = plan_run.comparison(layout, run, times)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    print_table(
        f"{options.from_run} on {devices} {cluster.name}",
        columns,
        [[line.get(column) for column in columns] for line in lines],
        left_aligned=1,
    )
    print(
        f"a step took {run.seconds:.4g} s, the median of {len(run.records)}; predicted with an efficiency of "
        f"{planner.device.efficiency:.3g}: {before:.4g} s, with the fitted {device.efficiency:.3g}: "
        f"{lines[-1]['predicted_s']:.4g} s"
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        like = options.cluster if options.cluster in CLUSTERS else cluster.name
        spread = plan_run.spread(run, times)
        text = strict_yaml.write_text(
            {"like": like, "efficiency": {"share": device.efficiency, "uncertainty": spread}}
        )
        (options.out / "cluster.yaml").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / 'cluster.yaml'}: name it as --cluster")
    _write_record(options, config, run=lines, efficiency=device.efficiency)
    return 0


def _seed(options: argparse.Namespace) -> int | None:
    return options.seed if options.generated else None


# ---------------------------------------------------------------------------- before the search


def make_planner(
    config: Config,
    cluster: Cluster,
    devices: int,
    seed: int | None,
    steps: Sequence[int] | None = None,
) -> Planner:
    """A planner on a config's data, or (with a seed) on generated lengths.

    Args:
      steps: numbers of the batches of the data that are planned; none: the first few.

    Raises:
      ConfigError: the config cannot be planned.
    """
    if config.pipeline.stages > 1:
        raise ConfigError(
            f"pipeline.stages ({config.pipeline.stages}): layouts with stages are not searched; set pipeline.stages=1"
        )
    if config.model.generators:
        raise ConfigError(
            "model.diffusion: seconds and bytes of a model that draws are not known yet; plan it without, and leave "
            "room for what it adds"
        )
    config = with_nodes(config, cluster, devices)
    tokenizer = load_tokenizer(config.data.tokenizer)
    sizes = dict.fromkeys(AXES, 1) | {"data": devices}
    mesh = cluster_mesh(config, sizes, cluster)
    open_config = config.model_copy(update={"components": _without_layouts(config)})
    model = build_model(config.model, vocabulary(config, tokenizer), open_config.components, mesh)
    if not model.trainable.components:
        raise ConfigError(
            "every component is frozen: set components.<name>.freeze: false for what shall be trained"
        )
    device = Device(cluster, cluster.efficiency.share, dtype=_dtype(config))
    lengths: LengthsOf = (
        DataLengths(tokenizer, steps or range(planned_steps(config.data.batch_size)))
        if seed is None
        else MadeUpLengths(seed)
    )
    planner = Planner(config, model, device, lengths)
    _check_calibration(planner, devices)
    return planner


def _without_layouts(config: Config) -> Any:
    """Components as the mesh of data alone, on which shapes are made, can lay them out."""
    towers = {
        name: getattr(config.components, name).model_copy(update={"layout": {}})
        for name in config.model.phases
    }
    return config.components.model_copy(update=towers)


def _dtype(config: Config) -> str:
    """Of the decoder's products."""
    return str(config.components.language.compute_dtype)


def _check_calibration(planner: Planner, devices: int) -> None:
    """Raise `ConfigError` for a calibration that was made of something else."""
    path = planner.config.balance.calibration
    if path is None:
        return
    flops = model_flops(planner.config, planner.model)
    calibration = load_calibration(path, flops)
    kind = planner.cluster.device_kind or None
    differences = calibration.differences(kind, flops)
    measured = math.prod(calibration.mesh.values())
    if measured != devices:
        differences.append(f"was measured on {measured} devices, but there are {devices}")
    if differences:
        raise ConfigError(
            f"balance.calibration: {path} {' and '.join(differences)}; calibrate there, or set balance.calibration=null"
        )


def notes(planner: Planner) -> list[str]:
    """What of the batches the user should know."""
    empty = [phase for phase, load in planner.loads.items() if not load.slots]
    return [
        f"no {phase} items in the sampled batches: its rows are as small as they may be; sample data that have some, "
        f"or leave model.{phase} out"
        for phase in empty
    ]


# ---------------------------------------------------------------------------- after it


def show(title: str, found: Found, planner: Planner, top: int) -> None:
    """The ranked layouts, and why the others are not there."""
    rows = plan_figures.table(found, planner)[:top]
    print_table(title, plan_figures.COLUMNS, rows, left_aligned=2)
    chosen = plan_figures.chosen_table(found)[:top]
    print_table("chosen", plan_figures.CHOSEN, chosen, left_aligned=3)
    print(
        f"{found.considered} layouts on {found.meshes} meshes considered; {len(found.estimates)} are legal and fit, "
        f"of which {len(found.ranked) + len(found.struck)} were planned whole"
    )
    for reason, count in found.rejected.most_common():
        print(f"  {count} rejected: {reason}")


def write_plan(options: argparse.Namespace, best: PlannedLayout) -> None:
    """plan.yaml: the config with everything that was chosen."""
    options.out.mkdir(parents=True, exist_ok=True)
    head = (
        f"# {options.config} for {options.devices} devices of {options.cluster}, planned by jaxmllm plan:\n"
        f"# {best.choice.words}; a step of {best.seconds:.3g} s predicted\n"
    )
    (options.out / "plan.yaml").write_text(
        head + dump_config(chosen_config(best)), encoding="utf-8"
    )
