"""The planner's predictions next to what was measured.

    python -m benchmarks.planner --json planner.json               published runs and batches, a minute
    python -m benchmarks.planner --kinds configuration             stages of components, seconds
    python -m benchmarks.planner --kinds measured                  eight CPU devices of this machine, ten minutes
    python -m benchmarks.planner --kinds scale                     84B searched on 2,560 and 512 devices, minutes
    python -m benchmarks.planner --kinds optimum                   all layouts of 8 and 16 devices, half an hour
    python -m benchmarks.planner --kinds simulated                 84B on 2,560 devices, minutes
    python -m benchmarks.planner --kinds memory                    compiled for H100s that are not there, an hour
    python -m benchmarks.planner --rows runs.jsonl                 other runs, predicted from the published ones

The runs are those of benchmarks/published_runs.jsonl, one JSON object per line with its source.
`--rows` reads other runs of the same form: they are predicted, never fitted to. The JSON's `rows`:

    kind published         a run, predicted with constants fitted to all runs, and the efficiency of
                           its system on its chip
    kind unknown_system    a run, predicted as if nothing were known of its system: constants are
                           fitted without that system, and its efficiency is the one that others on
                           the chip suggest (`Fit.expected`); `low_s` and `high_s` are the interval
                           that is printed

Both have `system`, `chip`, `model`, `devices`, `mesh`, `measured_s`, `predicted_s`, `error`
(predicted over measured, less 1), `overlapped_s` and `serial_s` (seconds if everything overlaps,
and if nothing does), `efficiency`, `parts` (seconds by what takes them), `trend` (true for ZeRO-3
of 2021, to which no constant is fitted and whose errors are not counted: it only has to show that
more devices take more device-seconds).

Other kinds are made by files of their own, which explain them:

    kinds memory, collectives      of programs, next to those of a compiler for H100s
                                   (planner_ahead.py)
    kind bmin              how large batches must be (planner_batches.py): `loads`, `samples`,
                           `splits` (those that 59 batches ask for), `settled`, `worst_regret`,
                           `enough` (the first size from which on regret stays small), `bad_splits`
                           (time of splits of 8 devices over that of the best)
    kind configuration     stages of components (planner_configuration.py): `method`, `time` over
                           that of the best method
    kind measured          a step of `setting` on this machine (planner_measured.py): `predicted_s`,
                           `measured_s` (seconds of all cores), `spread` (between quartiles, as a
                           share), `wall_s`, `calibrates`
    kind scale             the search of `jaxmllm plan` for 84B (planner_search.py): `devices`,
                           `considered`, `cpu_seconds`, `peak_rss`
    kind optimum           the chosen layout next to the best of all (planner_optimum.py):
                           `devices`, `mix`, `layouts`, `over_best`
    kind simulated         a step of 84B on 2,560 devices (planner_simulated.py): `mode`, `step_s`,
                           `low_s` and `high_s` (the interval that is printed), `mfu`, `parts`; and
                           except for the chain `resident_bytes`, `peak_bytes`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import (
    planner_ahead,
    planner_batches,
    planner_configuration,
    planner_measured,
    planner_optimum,
    planner_search,
    planner_simulated,
)
from benchmarks.published_fit import Fit, Published, difference, fit
from jaxmllm.cluster.clusters import ClusterError, cluster_of
from jaxmllm.cluster.device_seconds import RATES
from jaxmllm.cluster.text_run import TextRunError
from jaxmllm.config.schema import ConfigError
from jaxmllm.data.sources.source import DataError
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.output import print_table, write_json

RUNS: Final = Path(__file__).with_name("published_runs.jsonl")
# Not fitted: its steps took up to three times what its links explain, the more so on more devices
TREND: Final = ("zero3",)
PUBLISHED = "published"
UNKNOWN_SYSTEM = "unknown_system"
AXES: Final = ("data", "fsdp", "context", "tensor", "stages", "interleave")
COLUMNS: Final = [
    "system",
    "chip",
    "model",
    "mesh",
    "devices",
    "measured s",
    "predicted s",
    "error",
]
OTHERS: Final[Mapping[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    planner_ahead.MEMORY: lambda options: planner_ahead.ahead_rows(
        options.seed, compiled=options.compiled
    ),
    planner_batches.BMIN: lambda options: planner_batches.batch_rows(options.seed, options.data),
    planner_configuration.CONFIGURATION: lambda options: planner_configuration.configuration_rows(
        options.seed
    ),
    planner_measured.MEASURED: lambda options: planner_measured.measured_rows(
        options.turns, seed=options.seed
    ),
    planner_optimum.OPTIMUM: lambda options: planner_optimum.optimum_rows(options.seed),
    planner_search.SCALE: lambda options: planner_search.scale_rows(options.seed),
    planner_simulated.SIMULATED: lambda options: planner_simulated.simulated_rows(options.seed),
}
SAME: Final = 0.02  # stored constants may differ from fitted ones by this share


def read_runs(path: Path) -> list[Published]:
    """The runs of a JSONL file.

    Raises:
      TextRunError: a line is not a run; the message names file and line.
    """
    runs = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            runs.append(Published.of(json.loads(line)))
            runs[-1].predicted(RATES, efficiency=1.0)
        except KeyError as error:
            raise TextRunError(f"{path}, line {line_number}: no key {error}") from error
        except (ValueError, TypeError) as error:  # errors of JSON, runs and clusters are among them
            raise TextRunError(f"{path}, line {line_number}: {error}") from error
    return runs


def published_rows(runs: Sequence[Published], known: Fit) -> list[dict[str, Any]]:
    """Rows of runs, predicted with the efficiency of their system on their chip, or with the
    expected one if that system has no fitted run there."""
    return [
        _row(PUBLISHED, run, known, known.efficiencies.get(run.owner, known.expected(run.chip)))
        for run in runs
    ]


def unknown_rows(runs: Sequence[Published], fitted: Sequence[Published]) -> list[dict[str, Any]]:
    """Rows of the runs of every system that shares its chip with another system, predicted from a
    fit to `fitted` without that system."""
    rows = []
    for owner in sorted({run.owner for run in runs}):
        other_runs = [run for run in fitted if run.owner != owner]
        if all(run.chip != owner[1] for run in other_runs):
            continue
        fit_result = fit(other_runs)
        efficiency = fit_result.expected(owner[1])
        uncertainty = cluster_of(owner[1]).efficiency.uncertainty
        for run in runs:
            if run.owner == owner:
                row = _row(UNKNOWN_SYSTEM, run, fit_result, efficiency)
                seconds = row["predicted_s"]
                row |= {"low_s": seconds * (1 - uncertainty), "high_s": seconds * (1 + uncertainty)}
                rows.append(row)
    return rows


def _row(kind: str, run: Published, known: Fit, efficiency: float) -> dict[str, Any]:
    """The row of one run, predicted with the constants of a fit and with an efficiency."""
    step = run.predicted(known.rates, efficiency)
    return {
        "kind": kind,
        "system": run.system,
        "chip": run.chip,
        "model": run.model,
        "devices": run.run.devices,
        "mesh": {axis: getattr(run.run, axis) for axis in AXES if getattr(run.run, axis) > 1},
        "measured_s": run.seconds,
        "predicted_s": step.seconds,
        "error": step.seconds / run.seconds - 1,
        "efficiency": efficiency,
        "overlapped_s": step.low,
        "serial_s": step.high,
        "parts": step.parts,
        "trend": run.system in TREND,
    }


# ---------------------------------------------------------------------------- output


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Statistics of the errors by kind, without the runs whose trend alone counts."""
    rows_by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["trend"]:
            rows_by_kind.setdefault(row["kind"], []).append(row)
    result = {}
    for kind, kind_rows in rows_by_kind.items():
        errors = [abs(row["error"]) for row in kind_rows]
        result[kind] = {
            "runs": len(errors),
            "median": statistics.median(errors),
            "p90": float(np.percentile(errors, 90)),
            "worst": max(errors),
        }
        if kind == UNKNOWN_SYSTEM:
            in_interval = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in kind_rows]
            result[kind]["in_interval"] = statistics.mean(in_interval)
    return result


def show(rows: Sequence[Mapping[str, Any]], errors: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of each kind, and the statistics of its errors."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines = [
            [
                row["system"],
                row["chip"],
                row["model"],
                ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items()),
                row["devices"],
                row["measured_s"],
                row["predicted_s"],
                f"{100 * row['error']:+.1f} %" + (" (trend)" if row["trend"] else ""),
            ]
            for row in rows
            if row["kind"] == kind
        ]
        print_table(kind, COLUMNS, lines, left_aligned=4)
    for kind, kind_errors in errors.items():
        error_texts = (
            f"{name} {100 * value:.1f} %" for name, value in kind_errors.items() if name != "runs"
        )
        print(f"{kind}: {kind_errors['runs']} runs, |error| {', '.join(error_texts)}")


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="predict the runs of this file instead"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[PUBLISHED, *OTHERS],
        default=[PUBLISHED, planner_batches.BMIN],
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="bmin: folder of files to measure as well"
    )
    parser.add_argument(
        "--turns", type=int, default=5, help="measured: turns per setting (default: %(default)s)"
    )
    parser.add_argument(
        "--compiled",
        type=planner_ahead.compiled_file,
        metavar="PATH",
        help="memory: JSON file written by benchmarks.planner_ahead",
    )
    options = parser.parse_args(command)
    if options.turns < 2:
        parser.error("--turns must be at least 2: spreads are taken from them")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data} is no folder; name one that holds train.jsonl")
    if options.rows is not None:
        options.kinds = [PUBLISHED]
    if planner_measured.MEASURED in options.kinds:
        planner_measured.force_devices()
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    try:
        if PUBLISHED in options.kinds:
            rows, facts = _published(options.rows)
        for kind in options.kinds:
            if kind != PUBLISHED:
                rows += OTHERS[kind](options)
    except (TextRunError, ClusterError, ConfigError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_json(
        options.json,
        "planner",
        options.seed,
        "published runs; log-normal loads of sigma 1.0 and 0.7; jaxmllm.tools.workload; sample-data",
        rows=rows,
        **facts,
    )
    return 0


def _published(file: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the published runs, or of the runs of a file; and the errors and fitted constants."""
    published = read_runs(RUNS)
    runs = published if file is None else read_runs(file)
    fitted = [run for run in published if run.system not in TREND]
    fit_result = fit(fitted)
    rows = [*published_rows(runs, fit_result), *unknown_rows(runs, fitted)]
    errors = summary(rows)
    show(rows, errors)
    print(f"fitted: {fit_result.rates}")
    for (system, chip), share in fit_result.efficiencies.items():
        print(
            f"efficiency of {system} on {chip}: {share:.3f} "
            f"(another's: {fit_result.expected(chip):.3f})"
        )
    drift = difference(fit_result.rates, RATES)
    if drift > SAME:
        print(f"the stored constants differ from these by {100 * drift:.1f} %: store them anew")
    return rows, {"errors": errors, "rates": vars(fit_result.rates)}


if __name__ == "__main__":
    sys.exit(main())
