"""How well plans balance, on generated batches of any size: nothing is decoded, compiled or run.

    python -m benchmarks.balance --json balance.json              everything of docs/balancing.md, 25 min
    python -m benchmarks.balance --quick
    python -m benchmarks.balance --settings 64x32 [RANKSxEXAMPLES ...] --batches 8
    python -m benchmarks.balance --settings 512x1 --widest 64    rows of up to 64 ranks
    python -m benchmarks.balance --settings 64x4 --data DIR      lengths of real files: DIR holds train.jsonl

Every setting is planned twice: with rows of one rank (`spans` [1]), and with rows that up to
`--widest` (8) neighbouring ranks may hold together (`auto`).

Batches come from jaxmllm/tools/workload.py: six tasks with images, clips and text. Their costs are
the FLOPs of a model of 0.6B vision, 0.6B audio and 8B language parameters. Row capacities and pools
are `auto`, chosen for each mode from batches that are not measured. Figures are means over the
measured batches, times are medians. The JSON's `rows` have one record for every setting, `spans`
and phase, and one with phase `step` for every setting and `spans`.

    over ideal        FLOPs of the slowest rank of every microbatch, padding included / an equal
                      share of the FLOPs of the real data
    gap to floor      costliest rank / max(mean rank, a rank's part of the costliest item)
    max/mean          costliest rank / mean rank
    synchronised      sum over microbatches of the costliest row / sum of means: ranks meet at every
                      microbatch
    real tokens       share of row slots that hold data; for the step, weighted by the FLOPs of a
                      slot
    gathered GB, all  keys and values of all layers that ranks receive from each other in a forward
                      pass, summed over all ranks
    step proxy        FLOPs of the costliest row, summed over microbatches and phases, / the same in
                      mode `phases`; `padded` counts the linear part of a row on all of its slots,
                      as fixed shapes do
    node bytes        tokens that change node (of 8 ranks) when items are placed near their texts /
                      when items are placed at random
    slots / needed    slots that the padded exchange sends from rank to rank, both legs included, /
                      media tokens that the language phase needs
    slots / moved     the same slots / media tokens that are encoded on another rank
    plan ms           time on one core: in the rows of a phase to plan its rows, in those of a step
                      for one whole plan of mode `phases`, with the ragged exchange and with the
                      padded one; `cpu` leaves out the time that other processes took

At up to 32 examples per rank, modes are compared with rows of one rank: `none` leaves examples
where sampling put them, `tokens` balances the total tokens of examples, `language` the language
phase alone, `phases` every phase.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.file_lengths import FILE_ERRORS, FileLengths
from jaxmllm.balance.costs.gather import gathered_bytes
from jaxmllm.balance.records import (
    BatchItems,
    Mode,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    StepPlan,
)
from jaxmllm.balance.rows.assign import assign, item_costs, part_costs
from jaxmllm.balance.sizes.loads import SampleSize
from jaxmllm.balance.statistics import slowest_flops
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import (
    MODEL,
    PHASES,
    describe,
    generate,
    make_spec,
    spans_up_to,
)

Setting = tuple[int, int]  # ranks, examples per rank

SETTINGS: tuple[Setting, ...] = (
    *((ranks, per_rank) for ranks in (8, 64, 512, 2560) for per_rank in (1, 2, 4, 8, 32)),
    *((ranks, 128) for ranks in (8, 64, 512)),
)
QUICK: tuple[Setting, ...] = ((8, 8), (8, 32))
COMPARED = 32  # modes are compared at up to this many examples per rank
PROXIES = ("step_proxy", "step_proxy_padded")
NODE = 8  # ranks per node
STEP = "step"  # stands for the phase in records of all phases together
ALONE = (1,)  # spans: every row is on one rank
MODES: tuple[Mode, ...] = get_args(Mode)
BALANCED: Mode = "phases"
# Batches whose lengths decide the sizes of rows
SAMPLED = SampleSize(1 << 16, fewest=2, most=128)
# Measured batches of a setting: more where batches are small, because small batches differ more
MEASURED = SampleSize(1 << 16, fewest=3, most=16)
# The streams are parts of the seeds, so that samples and measured batches never coincide
SAMPLE_STREAM = 1
HELD_OUT_STREAM = 2
GENERATOR = (
    "jaxmllm.tools.workload.generate([seed, 2, i], ranks * per_rank), i < batches, default mix"
)


def measure(
    setting: Setting,
    batches: int,
    repeats: int,
    seed: int,
    row_classes: int | Literal["auto"],
    widest: int = NODE,
    files: FileLengths | None = None,
) -> list[dict[str, Any]]:
    """Records of one setting, first with rows of one rank, then with rows of up to `widest` ranks:
    one for every phase, then one for the step."""
    ranks, per_rank = setting
    examples = ranks * per_rank
    draw = files.draw if files else generate
    samples = [draw([seed, SAMPLE_STREAM, i], examples) for i in range(SAMPLED.batches(examples))]
    held_out = [draw([seed, HELD_OUT_STREAM, i], examples) for i in range(batches)]
    records = []
    for spans in (ALONE, spans_up_to(widest, ranks)):
        setting_record = {
            "ranks": ranks,
            "per_rank": per_rank,
            "batches": batches,
            "spans": list(spans) if spans == ALONE else "auto",
        }
        proxy: dict[str, dict[str, float]] = {}
        for mode in MODES if per_rank <= COMPARED and spans == ALONE else (BALANCED,):
            spec = make_spec(
                ranks,
                samples,
                mode,
                row_classes,
                ranks_per_node=NODE,
                backend="ragged",
                spans=spans,
                longest_items=files.longest if files else None,
            )
            plans = [plan_step(batch, spec) for batch in held_out]
            figures = [
                step_proxy(plan, batch, spec) for plan, batch in zip(plans, held_out, strict=True)
            ]
            proxy[mode] = _reduce(figures, statistics.fmean)
        # The loop ends with mode BALANCED, so `spec` and `plans` belong to that mode
        phases = phase_records(plans, held_out, spec, repeats)
        records += [setting_record | record for record in phases]
        step = setting_record | step_record(plans, held_out, spec, repeats)
        for name in PROXIES:
            step[name] = {mode: figures[name] for mode, figures in proxy.items()}
            balanced_proxy = proxy[BALANCED][name]
            step[f"{name}_over_{BALANCED}"] = {
                mode: figures[name] / balanced_proxy for mode, figures in proxy.items()
            }
        step["workload"] = describe(held_out[0])
        records.append(step)
    return records


def phase_records(
    plans: Sequence[StepPlan], batches: Sequence[BatchItems], spec: PlanSpec, repeats: int
) -> list[dict[str, Any]]:
    """A record for each phase: its row classes, mean figures, and median times to plan its rows."""
    records = []
    for phase, rows in spec.phases.items():
        figures = [
            phase_figures(plan.phases[phase], batch.phases[phase], rows)
            for plan, batch in zip(plans, batches, strict=True)
        ]
        times = [
            milliseconds(assign, rows, batch.phases[phase])
            for batch in batches
            for _ in range(repeats)
        ]
        classes = {
            "phase": phase,
            "capacities": list(rows.capacities),
            "classes": [list(row_class) for row_class in rows.classes],
        }
        records.append(
            classes | _reduce(figures, statistics.fmean) | _reduce(times, statistics.median)
        )
    return records


def step_record(
    plans: Sequence[StepPlan], batches: Sequence[BatchItems], spec: PlanSpec, repeats: int
) -> dict[str, Any]:
    """The record of a step: figures of all phases together, of the exchange, and of whole plans."""
    ranks = next(iter(spec.phases.values())).ranks
    figures = [step_figures(plan, batch, spec) for plan, batch in zip(plans, batches, strict=True)]
    routes = [route_figures(plan, ranks) for plan in plans]
    times = [milliseconds(plan_step, batch, spec) for batch in batches for _ in range(repeats)]
    padded_spec = replace(
        spec, routes={name: replace(route, backend="padded") for name, route in spec.routes.items()}
    )
    routes += [padded_figures(plan_step(batch, padded_spec)) for batch in batches]
    times += [
        {f"{name}_padded": value for name, value in plan_times.items()}
        for plan_times in (
            milliseconds(plan_step, batch, padded_spec) for batch in batches for _ in range(repeats)
        )
    ]
    return (
        {"phase": STEP}
        | _reduce(figures, statistics.fmean)
        | _reduce(times, statistics.median)
        | _reduce(routes, statistics.fmean)
    )


def phase_figures(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> dict[str, float]:
    """Balance and fill of one phase, computed from the plan's arrays; empty without items."""
    if not len(items.length):
        return {}
    item_cost = item_costs(spec, items)
    cost = part_costs(plan, item_cost, spec.ranks)
    by_rank = cost.sum(axis=0)
    mean = float(item_cost.sum()) / spec.ranks
    span = plan.span.astype(np.int64)
    largest_share = float((item_cost / span[plan.microbatch]).max())
    gathered = (span - 1) * plan.capacity * spec.ranks
    proxy = phase_proxy(plan, items, spec)
    return {
        "over_ideal": proxy["step_proxy_padded"]
        * spec.ranks
        / spec.flops.total(items.real, items.extra),
        "gap_to_floor": float(by_rank.max()) / max(mean, largest_share),
        "max_over_mean": float(by_rank.max()) / mean,
        "floor": max(mean, largest_share) / mean,
        "synchronised": float(cost.max(axis=1).sum()) / mean,
        "real_token_fraction": float(items.real.sum())
        / (float(plan.capacity.sum(dtype=np.int64)) * spec.ranks),
        "inner_padding": 1 - float(items.real.sum()) / float(items.length.sum()),
        "rows": plan.microbatches,
        "shared_rows": float((spec.ranks // span[span > 1]).sum()),
        "gathered_bytes": float(gathered.sum()) * gathered_bytes(MODEL, spec.name),
    }


def step_figures(plan: StepPlan, batch: BatchItems, spec: PlanSpec) -> dict[str, float]:
    """Figures of all phases together, in which each phase counts by its FLOPs."""
    amounts: dict[str, float] = dict.fromkeys(("ideal", "mean", "slowest", "real", "slots"), 0.0)
    gathered = 0.0
    for name, phase in spec.phases.items():
        items = batch.phases[name]
        figures = phase_figures(plan.phases[name], items, phase)
        if figures:
            mean = phase.flops.total(items.length, items.extra) / phase.ranks
            real_flops = phase.flops.linear * float(items.real.sum())
            amounts["ideal"] += phase.flops.total(items.real, items.extra) / phase.ranks
            amounts["mean"] += mean
            amounts["slowest"] += figures["synchronised"] * mean
            amounts["real"] += real_flops
            amounts["slots"] += real_flops / figures["real_token_fraction"]
            gathered += figures["gathered_bytes"]
    return {
        "over_ideal": step_proxy(plan, batch, spec)["step_proxy_padded"] / amounts["ideal"],
        "synchronised": amounts["slowest"] / amounts["mean"],
        "real_token_fraction": amounts["real"] / amounts["slots"],
        "gathered_bytes": gathered,
    }


def step_proxy(plan: StepPlan, batch: BatchItems, spec: PlanSpec) -> dict[str, float]:
    """FLOPs of the costliest rows of all phases, without and with the padding of rows."""
    phases = [
        phase_proxy(plan.phases[name], batch.phases[name], phase)
        for name, phase in spec.phases.items()
    ]
    return _reduce(phases, sum)


def phase_proxy(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> dict[str, float]:
    """FLOPs of the costliest rows of one phase, without and with padding; a row that several ranks
    hold counts with one rank's part."""
    length = items.length.astype(float)
    slots = np.zeros((plan.microbatches, spec.ranks))
    attention = np.zeros((plan.microbatches, spec.ranks))
    slot_share = length / plan.span[plan.microbatch]
    np.add.at(slots, (plan.microbatch, plan.rank), slot_share)
    attention_share = spec.flops.attention(length, items.extra) / plan.span[plan.microbatch]
    np.add.at(attention, (plan.microbatch, plan.rank), attention_share)
    unpadded = spec.flops.linear * slots + attention
    return {
        "step_proxy": float(unpadded.max(axis=1, initial=0).sum()),
        "step_proxy_padded": slowest_flops(plan, items, spec),
    }


def route_figures(plan: StepPlan, ranks: int) -> dict[str, float]:
    """Share of the media tokens of all encoder phases that move to another rank; and the tokens
    that change node, over those that would with items placed at random."""
    tokens = _needed_tokens(plan)
    figures = {"moved_token_fraction": _routed(plan, "moved_tokens") / tokens}
    if ranks > NODE:
        figures["node_bytes_ratio"] = _routed(plan, "node_tokens") / (tokens * (1 - NODE / ranks))
    return figures


def padded_figures(plan: StepPlan) -> dict[str, float]:
    """Hops of the padded exchange of a plan, and the slots that it sends for each token."""
    moved_tokens = _routed(plan, "moved_tokens")
    slots = _routed(plan, "slots_moved")
    figures = {
        "hops": _routed(plan, "hops"),
        "slots_moved_over_needed": slots / _needed_tokens(plan),
    }
    return figures | ({"slots_moved_over_moved": slots / moved_tokens} if moved_tokens else {})


def _needed_tokens(plan: StepPlan) -> float:
    """Media tokens that the language phase needs, at least 1 because callers divide by it."""
    return max(_routed(plan, "tokens"), 1)


def _routed(plan: StepPlan, name: str) -> float:
    """A statistic of the routes, summed over the phases that carry an exchange."""
    return sum(
        value
        for key, value in plan.statistics.items()
        if key.startswith("route/") and key.endswith(f"/{name}")
    )


def milliseconds(plan: Callable[..., object], *arguments: Any) -> dict[str, float]:
    """Wall and CPU time of one plan on one core, in milliseconds."""
    with one_core():
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        plan(*arguments)
        return {
            "plan_ms": 1e3 * (time.perf_counter() - wall_start),
            "plan_cpu_ms": 1e3 * (time.process_time() - cpu_start),
        }


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core, if the system allows that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _reduce(records: Sequence[Mapping[str, float]], reduce: Any) -> dict[str, Any]:
    """Each figure, reduced over the records that have it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: reduce([record[name] for record in records if name in record]) for name in names}


def parse_setting(text: str) -> Setting:
    """The setting that RANKSxEXAMPLES means."""
    ranks, separator, per_rank = text.partition("x")
    if not (
        separator and ranks.isdecimal() and per_rank.isdecimal() and int(ranks) and int(per_rank)
    ):
        raise ArgumentTypeError(f"{text!r} is not of the form RANKSxEXAMPLES, 64x32 for one")
    return int(ranks), int(per_rank)


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--settings",
        nargs="+",
        type=parse_setting,
        metavar="RANKSxEXAMPLES",
        help="ranks x examples per rank (default: all settings)",
    )
    parser.add_argument(
        "--batches", type=positive_int, help="measured batches per setting (default: 3 to 16)"
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=3,
        help="plans timed per batch (default: %(default)s)",
    )
    parser.add_argument(
        "--row-classes", type=positive_int, help="most row classes per phase (default: auto)"
    )
    parser.add_argument(
        "--widest",
        type=positive_int,
        default=NODE,
        help="most ranks that hold a row together (default: 8)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of files whose lengths are planned (default: generated lengths)",
    )
    parser.add_argument("--quick", action="store_true", help="measure one batch of small settings")
    options = parser.parse_args(command)
    settings = options.settings or (QUICK if options.quick else SETTINGS)
    row_classes: int | Literal["auto"] = options.row_classes or "auto"
    try:
        files = FileLengths.of(options.data, tuple(PHASES)) if options.data else None
    except FILE_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for setting in settings:
        start = time.perf_counter()
        default_batches = 1 if options.quick else MEASURED.batches(math.prod(setting))
        batches = options.batches or default_batches
        records = measure(
            setting,
            batches,
            options.repeats,
            options.seed,
            row_classes,
            options.widest,
            files,
        )
        print(
            f"{setting[0]} ranks x {setting[1]} in {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
        rows += records
    show(rows)
    write_json(
        options.json,
        "balance",
        options.seed,
        "examples of train.jsonl, drawn with replacement" if files else GENERATOR,
        settings=[f"{ranks}x{per_rank}" for ranks, per_rank in settings],
        row_classes=row_classes,
        widest=options.widest,
        repeats=options.repeats,
        data=options.data and str(options.data),
        rows=rows,
    )
    return 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables: workload, phases, modes, steps."""
    steps = [row for row in rows if row["phase"] == STEP]
    workload = steps[-1]["workload"]
    names = ("items", "mean", "cv", "max_over_mean", "inner_padding")
    table = [[phase, *(workload.get(f"{phase}/{name}") for name in names)] for phase in PHASES]
    title = f"Workload: first batch of {steps[-1]['ranks']} x {steps[-1]['per_rank']} examples, lengths of items"
    print_table(title, ["phase", "items", "mean", "CV", "max/mean", "inner padding"], table)
    pairs = {
        name.removeprefix("correlation/"): correlation
        for name, correlation in workload.items()
        if name.startswith("correlation/")
    }
    print_table("Correlations of an example's amounts", list(pairs), [list(pairs.values())])

    setting_columns = ["ranks", "per rank", "batches", "spans"]
    figures = {
        "over ideal": "over_ideal",
        "gap to floor": "gap_to_floor",
        "max/mean": "max_over_mean",
        "synchronised": "synchronised",
        "real tokens": "real_token_fraction",
        "rows per rank": "rows",
    }
    columns = [*setting_columns, "phase", *figures, "gathered GB, all", "plan ms"]
    table = [
        [
            *_setting_of(row),
            row["phase"],
            *(_digits(row.get(name)) for name in figures.values()),
            row.get("gathered_bytes", 0) / 1e9,
            row.get("plan_ms"),
        ]
        for row in rows
    ]
    print_table(f"Phases, balance.mode: {BALANCED}", columns, table)

    ratios = [mode for mode in MODES if mode != BALANCED]
    columns = [*setting_columns, *ratios, *(f"{mode} padded" for mode in ratios)]
    table = [
        [
            *_setting_of(row),
            *(row[f"{name}_over_{BALANCED}"][mode] for name in PROXIES for mode in ratios),
        ]
        for row in steps
        if MODES[0] in row[PROXIES[0]]
    ]
    print_table(f"Step proxy / that of mode {BALANCED}", columns, table)
    costs = {
        "plan ms": "plan_ms",
        "cpu": "plan_cpu_ms",
        "padded": "plan_ms_padded",
        "cpu, padded": "plan_cpu_ms_padded",
        "tokens moved": "moved_token_fraction",
        "node bytes": "node_bytes_ratio",
        "hops": "hops",
        "slots / needed": "slots_moved_over_needed",
        "slots / moved": "slots_moved_over_moved",
    }
    table = [[*_setting_of(row), *(row.get(name) for name in costs.values())] for row in steps]
    print_table("Steps", [*setting_columns, *costs], table)


def _setting_of(row: Mapping[str, Any]) -> list[Any]:
    spans = row["spans"] if row["spans"] == "auto" else " ".join(map(str, row["spans"]))
    return [row["ranks"], row["per_rank"], row["batches"], spans]


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
