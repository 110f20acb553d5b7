"""Measure how long rows take on the devices at hand, to balance items by time instead of FLOPs.

    jaxmllm calibrate --config X [--out PATH] [--repeats N] [key=value ...]

Builds the programs of the config's run and times those of every phase on made-up rows, the same on
all ranks: full, half full and a quarter full, with 1, 2, 4, .. equal items. If several ranks hold a
row, each has an equal part of the items. Fits, without negative coefficients,

    seconds of a row of C slots = row + slot * C + linear * sum of l + quadratic * sum of squares

for items of l slots, prints the fit next to the ratio of the FLOPs, and writes the file that
`balance.calibration` names.

Shapes are fixed, so much of a row's time (`slot`) is spent on all of its slots, whatever they hold.
The rows of a microbatch have one capacity, so this part never makes a rank wait. It is charged to
items nevertheless: the planner's linear coefficient is slot + linear. Nearly all rows are full, so
this adds the same to each; without it the planner would take attention for the whole time, and give
up slots for a balance that saves little. `row` is for jaxmllm/balance/sizes/choose.py, which weighs
few large rows against many small ones; only two capacities tell it from `slot`, so it is 0 where a
phase has one.

With pipeline.stages > 1 the command instead measures the time of a tick without its operations,
prints it as a value for `pipeline.flops_per_tick`, and writes no file (tick_times.py).
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jaxmllm.balance.costs.calibration import Calibration, Coefficients, Fill, PhaseCalibration
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import RowClass
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.families.resolved import load_run_config
from jaxmllm.tools.arguments import command_parser, new_file, positive_int
from jaxmllm.tools.made_up_rows import made_up_rows
from jaxmllm.tools.output import print_table
from jaxmllm.training.programs.phased import PhaseBuffers, PhasedPrograms
from jaxmllm.training.run import Run
from sharding.mesh import axis_sizes

FRACTIONS = (1, 2, 4)  # rows are full, half full and a quarter full
MAX_ITEMS = 64  # of a row: the squares of more items are negligible
REPEATS = 5
TIMED_STEPS = 2  # steps of a pipeline that are timed
POOR_RESIDUAL = 0.15  # a fit with a larger relative error is reported as poor
DIGITS = 6  # significant digits of a coefficient in the file


# ---------------------------------------------------------------------------- the fit


def fills(row_class: RowClass, unit: int, max_segments: int) -> list[Fill]:
    """Rows of one class to be timed; lengths are multiples of `unit` slots."""
    distinct: dict[Fill, None] = {}  # a set that keeps its order
    for fraction in FRACTIONS:
        items = 1
        while items <= min(max_segments, MAX_ITEMS):
            length = row_class.slots // (fraction * items * unit) * unit
            if length:
                distinct[Fill(row_class.capacity, items, length, row_class.span)] = None
            items *= 2
    return list(distinct)


def fit(timed: Mapping[Fill, float], flops: ItemCost) -> Coefficients:
    """Fit non-negative coefficients to the seconds of fills, by least squares of relative errors.

    Args:
      flops: FLOPs of an item, which determine its square.
    """
    terms = np.array([(1, fill.capacity, *fill.used(flops)) for fill in timed], float)
    if len({fill.capacity for fill in timed}) == 1:
        terms[:, 0] = 0  # with one capacity, `row` cannot be told from `slot`
    # Divided by the seconds every target is 1, and errors are relative; `scale` conditions the fit
    relative = terms / np.array(list(timed.values()))[:, None]
    scale = np.maximum(relative.max(axis=0), np.finfo(float).tiny)
    coefficients = nnls(relative / scale, np.ones(len(relative)))[0] / scale
    residual = np.sqrt(np.mean((relative @ coefficients - 1) ** 2))
    row, slot, linear, quadratic, residual = (
        float(f"{x:.{DIGITS}g}") for x in (*coefficients, residual)
    )
    return Coefficients(row=row, slot=slot, linear=linear, quadratic=quadratic, residual=residual)


# ---------------------------------------------------------------------------- measuring


def measure(run: Run, repeats: int) -> Calibration:
    """Time the programs of a run and fit every phase."""
    import jax
    import jaxlib

    from jaxmllm.setup.sizing import model_flops

    programs = run.programs
    config = run.config
    assert isinstance(programs, PhasedPrograms), "refused with stages"
    params = programs.init(config.run.seed).params
    flops = model_flops(config, programs.functions.model)
    phases = {}
    for phase, spec in programs.spec.phases.items():
        timed = time_phase(run, programs, phase, params, repeats)
        forward_seconds = {fill: forward for fill, (forward, _) in timed.items()}
        training_seconds = {fill: training for fill, (_, training) in timed.items()}
        phases[phase] = PhaseCalibration(
            dtype=getattr(config.components, phase).compute_dtype,
            capacities=spec.capacities,
            flops=flops[phase],
            forward=fit(forward_seconds, flops[phase]),
            training=fit(training_seconds, flops[phase]),
        )
    device = programs.mesh.devices.flat[0]
    return Calibration(
        package=_package_version(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        platform=device.platform,
        device=device.device_kind,
        mesh=axis_sizes(programs.mesh),
        date=datetime.date.today().isoformat(),
        phases=phases,
    )


def time_phase(
    run: Run, programs: PhasedPrograms, phase: str, params: Any, repeats: int
) -> dict[Fill, tuple[float, float]]:
    """Median seconds of every fill of a phase's rows: forward, and forward with backward.

    Every round runs each fill once, so that a slow moment of the machine affects all of them; the
    first round does not count.
    """
    spec = programs.spec.phases[phase]
    row_format = run.corpus.formats.get(phase)
    # Media items are whole tokens of the language model, aligned as their rows require.
    unit = (
        1
        if row_format is None
        else math.lcm(row_format.alignment, spec.slots_per_token, row_format.stride)
    )
    chosen = [
        fill for row_class in spec.classes for fill in fills(row_class, unit, spec.max_segments)
    ]
    rows = {fill: made_up_rows(run, phase, fill) for fill in chosen}
    timer = MicrobatchTimer(programs, phase, params)
    rounds = [
        {fill: timer(RowClass(fill.capacity, fill.span), host) for fill, host in rows.items()}
        for _ in range(repeats + 1)
    ]
    counted_rounds = rounds[1:]
    medians = {}
    for fill in chosen:
        seconds = [round_seconds[fill] for round_seconds in counted_rounds]
        forward = statistics.median(forward for forward, _ in seconds)
        training = statistics.median(training for _, training in seconds)
        medians[fill] = (forward, training)
    return medians


class MicrobatchTimer:
    """Times the programs of one phase; each call gets the buffers that the call before it
    returned."""

    def __init__(self, programs: PhasedPrograms, phase: str, params: Any):
        self._programs = programs
        self._phase = phase
        self._functions = programs.functions_of(phase)
        self._params = params
        self._buffers = programs.buffers(phase)

    def __call__(self, row_class: RowClass, host: HostStep) -> tuple[float, float]:
        """Seconds of a microbatch: forward, and forward with backward (the same if nothing
        trains)."""
        rows = self._programs.put(host).rows[self._phase][0]
        forward = self._seconds(self._programs.forward, rows, row_class)
        if not self._functions.backward:
            return forward, forward
        backward = self._seconds(self._programs.backward, rows, row_class)
        # A loss and its gradients are one program, which includes the forward pass
        return forward, (forward + backward if self._functions.forward else backward)

    def _seconds(self, run: Callable[..., PhaseBuffers], rows: Any, row_class: RowClass) -> float:
        import jax

        jax.block_until_ready((self._params, rows, self._buffers))
        began = time.perf_counter()
        self._buffers = jax.block_until_ready(
            run(self._phase, self._params, rows, row_class, self._buffers)
        )
        return time.perf_counter() - began


def _package_version() -> str:
    try:
        return version("jaxmllm")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


# ---------------------------------------------------------------------------- the command


COLUMNS = (
    "phase",
    "pass",
    "row us",
    "slot ns",
    "linear ns",
    "quadratic ps",
    "error",
    "equal at",
    "by FLOPs",
)


def table(calibration: Calibration) -> list[list[str]]:
    """Cells of `COLUMNS`, a line for each phase and pass. `equal at` is the length whose quadratic
    part equals its linear one."""
    lines = []
    for phase, measured in calibration.phases.items():
        flops = measured.flops
        for name, fitted in (("forward", measured.forward), ("training", measured.training)):
            numbers = (
                fitted.row * 1e6,
                fitted.slot * 1e9,
                fitted.linear * 1e9,
                fitted.quadratic * 1e12,
            )
            equal_at = _ratio(fitted.slot + fitted.linear, fitted.quadratic)
            by_flops = _ratio(flops.linear, flops.quadratic) if name == "training" else ""
            error = f"{100 * fitted.residual:.1f} %"
            lines.append([phase, name, *(f"{x:.4g}" for x in numbers), error, equal_at, by_flops])
    return lines


def _ratio(linear: float, quadratic: float) -> str:
    return f"{linear / quadratic:.0f}" if quadratic else "never"


def show(calibration: Calibration, title: str) -> None:
    """Print the fit, and say where it is poor."""
    print_table(title, COLUMNS, table(calibration), left_aligned=2)
    print(
        "equal at: slots of an item whose quadratic part takes as long as slot and linear; by FLOPs: the same count"
    )
    poor = [
        name
        for name, phase in calibration.phases.items()
        if phase.training.residual > POOR_RESIDUAL
    ]
    if poor:
        print(
            f"the fit of {', '.join(poor)} is poor: repeat on a machine without other work, or with more --repeats"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm calibrate")
    add_config(parser)
    parser.add_argument(
        "--out",
        type=new_file,
        default=Path("calibration.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=REPEATS,
        help="timed rounds, of which the median is used (default: %(default)s)",
    )
    options = parse(parser, arguments)
    try:
        config = load_run_config(options.config, options.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxmllm.runtime.distributed import LaunchError, start_jax

    try:
        start_jax(config)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxmllm.runtime.files import write_atomically
    from jaxmllm.setup.build import build_run
    from jaxmllm.training.run import USER_ERRORS

    try:
        run = build_run(_uncalibrated_config(config))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if config.pipeline.stages > 1:
        _calibrate_ticks(run, options.repeats)
        return 0
    # All processes measure, since they run the programs together; one of them writes.
    calibration = measure(run, options.repeats)
    if run.is_main:
        write_atomically(options.out, calibration.model_dump_json(indent=1) + "\n")
        show(
            calibration,
            f"{Path(options.config).name} on {calibration.device}, {options.repeats} rounds",
        )
        print(f"wrote {options.out}; balance by it with balance.calibration={options.out}")
    return 0


def _calibrate_ticks(run: Run, repeats: int) -> None:
    """Measure and print how long a tick of pipeline stages takes."""
    from jax.experimental.multihost_utils import sync_global_devices

    from jaxmllm.tools.tick_times import measure_ticks
    from jaxmllm.training.programs.staged import StagedPrograms

    programs = run.programs
    assert isinstance(programs, StagedPrograms), "the config has stages"
    params = programs.init(run.config.run.seed).params
    steps = [run.batches[number] for number in range(TIMED_STEPS)]
    together = partial(sync_global_devices, "calibrate")
    times = measure_ticks(programs, params, steps, repeats, together)
    columns = ("start ms", "tick us", "TFLOP/s of a stage", "flops_per_tick")
    per_second = 1e-12 / times.flop if times.flop else math.inf
    numbers = (1e3 * times.start, 1e6 * times.tick, per_second, times.flops_per_tick)
    if run.is_main:
        print_table(
            f"{run.config.pipeline.stages} stages, {repeats} rounds of {TIMED_STEPS} steps",
            columns,
            [[f"{number:.4g}" for number in numbers]],
            left_aligned=0,
        )
        print(f"plan with it: pipeline.flops_per_tick={times.flops_per_tick:.3g}")


def _uncalibrated_config(config: Config) -> Config:
    """The config without measured costs: sizes follow the FLOPs, because the figures that are about
    to be replaced must decide nothing."""
    return config.model_copy(
        update={
            "balance": config.balance.model_copy(update={"calibration": None}),
            "pipeline": config.pipeline.model_copy(update={"flops_per_tick": 0.0}),
        }
    )
