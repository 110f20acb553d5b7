"""Draw a pipeline's schedule: every rank's operations over time, coloured by component and kind.

    jaxmllm timeline --generated [--layout L] [--schedule S] [--split] [--stages N] [--microbatches M]
    jaxmllm timeline --table FILE

The first plans a batch of jaxmllm/tools/workload.py on its model; operations are as wide as their FLOPs, a tick as
its longest operation. The second draws a saved table, which knows no times: ticks are equally wide. Writes
pipeline.png and pipeline.html, and prints their table. Nothing is compiled or run.

    busy         share of the step that a rank computes
    efficiency   work of the busiest rank / step
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.stages.microbatches import PhaseLoad, plan_microbatches
from jaxmllm.balance.stages.run_rows import pack_rows
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.output import FAINT, INK, Page, command_parser, html_table, new_figure, print_table, write_picture
from jaxmllm.tools.workload import MODEL, PHASES, generate
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.cuts import partition
from sharding.pipeline.graph import Kind, Workload
from sharding.pipeline.layer_costs import Layer, chain_work, layer_costs
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import SCHEDULES
from sharding.pipeline.schedules.schedule import Schedule, asynchronous, durations, lockstep
from sharding.pipeline.schedules.search import ROLLOUTS
from sharding.pipeline.table_file import load_tables
from sharding.pipeline.table_spec import operation_of

NAME = "pipeline"  # of the picture and the page
HUES: Final = {"vision": "#0072B2", "audio": "#009E73", "language": "#D55E00"}  # after Okabe and Ito
OTHER_HUES: Final = ("#CC79A7", "#56B4E9", "#E69F00")
SHADES: Final[Mapping[Kind, float]] = {  # towards white, or below 0 towards black
    Kind.FORWARD: 0.55,
    Kind.BACKWARD: 0.0,
    Kind.INPUT_GRADIENT: 0.2,
    Kind.WEIGHT_GRADIENT: -0.35,
}
KIND_WORDS: Final[Mapping[Kind, str]] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
NARROW = 0.012  # of the picture: too narrow for a number
ROWS: Final = {"vision": 16_384, "audio": 16_384, "language": 8192}  # slots of generated rows
EXAMPLES = 9  # of a generated microbatch
UNIT = 10**9  # FLOPs


@dataclass(frozen=True)
class Bar:
    """One operation."""

    rank: int
    start: float
    length: float
    component: str
    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """A schedule as it is drawn."""

    title: str
    ranks: int
    bars: tuple[Bar, ...]
    ticks: tuple[float, ...]  # where ticks begin, and where the last one ends
    unit: str
    note: str = ""

    @property
    def components(self) -> list[str]:
        return list(dict.fromkeys(bar.component for bar in sorted(self.bars, key=lambda bar: bar.start)))

    def busy(self, component: str | None = None) -> list[float]:
        """Share of the step that each rank computes, of one component or all."""
        work = [0.0] * self.ranks
        for bar in self.bars:
            if component in (None, bar.component):
                work[bar.rank] += bar.length
        return [each / (self.ticks[-1] or 1.0) for each in work]


def of_schedule(schedule: Schedule, title: str) -> Timeline:
    """Operations at the times that the executor gives them: a tick ends with its longest operation."""
    graph = schedule.graph
    cost = [each / (10**15 / UNIT) for each in durations(schedule)]
    bars, edges = [], [0.0]
    for row in schedule.ticks.tolist():
        for rank, n in enumerate(row):
            if n >= 0:
                name, kind = graph.ring.chains[graph.chain[n]].name, Kind(graph.kind[n])
                bars.append(Bar(rank, edges[-1], cost[n], name, kind, graph.depth[n], graph.microbatch[n]))
        edges.append(edges[-1] + max((cost[n] for n in row if n >= 0), default=0.0))
    free = asynchronous(schedule) / lockstep(schedule)
    note = f"ranks that waited for nothing but what they need would take {100 * free:.1f} % of it"
    return Timeline(title, graph.ring.stages, tuple(bars), tuple(edges), "PFLOP", note)


def of_table(path: Path) -> Timeline:
    """Tables that a run, or this command, saved; the runs of a step one after another.

    Raises:
      PipelineError: the file holds no tables.
    """
    tables = load_tables(path)
    rows = np.concatenate(tables.rows)
    columns = tables.columns
    bars = []
    for tick, rank in zip(*np.nonzero(rows[..., columns["action"]] > 0), strict=True):
        row = rows[tick, rank]
        component, kind = operation_of(int(row[columns["action"]]))
        bars.append(
            Bar(
                rank=int(rank),
                start=float(tick),
                length=1.0,
                component=tables.components[component],
                kind=Kind(kind),
                chunk=int(row[columns["chunk"]]),
                microbatch=int(row[columns["microbatch"]]),
            )
        )
    edges = tuple(float(tick) for tick in range(len(rows) + 1))
    return Timeline(f"{path.name}, {len(rows)} ticks", rows.shape[1], tuple(bars), edges, "ticks")


# ---------------------------------------------------------------------------- drawing


def draw(timeline: Timeline) -> Figure:
    """One line a rank, time to the right."""
    height = 2.1 + 0.62 * timeline.ranks
    figure = new_figure(height, head=1.15)
    axes = figure.add_subplot()
    _bars(axes, timeline)
    busy = timeline.busy()
    figures = f"{len(timeline.ticks) - 1} ticks   ·   busiest rank {100 * max(busy, default=0):.1f} %"
    figure.text(0.008, 1 - 0.14 / height, timeline.title, fontsize=15, fontweight="bold", color=INK, va="top")
    figure.text(
        0.008, 1 - 0.52 / height, f"{figures}   ·   {timeline.note}".rstrip(" ·"), fontsize=10, color=INK, va="top"
    )
    kinds = {(bar.component, bar.kind) for bar in timeline.bars}
    handles = [
        Patch(color=_color(component, kind), label=f"{component} {KIND_WORDS[kind]}")
        for component in timeline.components
        for kind in Kind
        if (component, kind) in kinds
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.004, 1 - 0.74 / height),
        frameon=False,
        ncols=max(1, len(handles)),
        fontsize=9,
        handlelength=1.1,
        columnspacing=1.2,
    )
    return figure


def _bars(axes: Axes, timeline: Timeline) -> None:
    end = timeline.ticks[-1] or 1.0
    thin = 0.6 if len(timeline.ticks) < 150 else 0.15
    for edge in timeline.ticks:
        axes.axvline(edge, color="#E6E6E6", linewidth=0.5, zorder=0)
    for bar in timeline.bars:
        color = _color(bar.component, bar.kind)
        corner = (bar.start, bar.rank - 0.42)
        axes.add_patch(Rectangle(corner, bar.length, 0.84, facecolor=color, edgecolor="white", linewidth=thin))
        if bar.length / end >= NARROW:
            ink = INK if sum(to_rgb(color)) > 1.7 else "white"
            text = str(bar.microbatch)
            axes.text(bar.start + bar.length / 2, bar.rank, text, ha="center", va="center", fontsize=7.5, color=ink)
    for rank, share in enumerate(timeline.busy()):
        axes.text(end * 1.006, rank, f"{100 * share:.0f} %", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, end * 1.035)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{timeline.unit}, numbers are microbatches", color=INK, fontsize=10)


def _color(component: str, kind: Kind) -> tuple[float, float, float]:
    hue = HUES.get(component) or OTHER_HUES[sum(component.encode()) % len(OTHER_HUES)]
    shade = SHADES[kind]
    red, green, blue = (channel + shade * (1 - channel if shade > 0 else channel) for channel in to_rgb(hue))
    return red, green, blue


# ---------------------------------------------------------------------------- writing


def table(timeline: Timeline) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what each rank does, in shares of the step."""
    names = timeline.components
    shares = [timeline.busy(name) for name in names]
    columns = ["rank", "operations", *names, "busy", "waits"]
    rows = []
    for rank, busy in enumerate(timeline.busy()):
        count = sum(bar.rank == rank for bar in timeline.bars)
        parts = [_percent(share[rank]) for share in shares]
        rows.append([str(rank), str(count), *parts, _percent(busy), _percent(1 - busy)])
    return columns, rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write(timeline: Timeline, directory: Path) -> str:
    """Draw into `directory`: pipeline.png and pipeline.html; returns the line that says so."""
    columns, rows = table(timeline)
    words = html.escape(f"{len(timeline.ticks) - 1} ticks. {timeline.note}")
    explanation = "Shares of the step. A tick ends with its longest operation; what a rank does not compute, it waits."
    page = Page(
        title=timeline.title,
        heading=timeline.title,
        introduction=f"<p>{words}</p>",
        picture="Operations of every rank over time",
        body=f"{html_table(columns, rows)}\n<p>{explanation}</p>",
    )
    return write_picture(directory, NAME, draw(timeline), page)


# ---------------------------------------------------------------------------- what is drawn


def plan_generated(layout: str, schedule: str, stages: int, microbatches: int, seed: int, split: bool) -> Timeline:
    """A generated batch on the generator's own model, everything trained."""
    batch = generate(seed, EXAMPLES * microbatches)
    plan, rows = _rows(batch, microbatches)
    average = {name: _layers(name, ROWS[name] * ROWS[name] // 8) for name in PHASES}
    per_microbatch = {name: len(rows[name]) / microbatches for name in PHASES}
    ring = partition(average, stages, layout, per_microbatch)  # type: ignore[arg-type]
    work = []
    for chain in ring.chains:
        costs = [
            layer_costs(average | {chain.name: _layers(chain.name, squares)})[chain.name]
            for squares in rows[chain.name]
        ]
        work.append(chain_work(chain, costs))
    graph = build_graph(ring, Workload(tuple(work), plan), split=split)
    what = f"{schedule} with split backward" if split else schedule
    title = f"{what}, layout {layout}, {stages} ranks, {len(plan)} microbatches"
    return of_schedule(SCHEDULES[schedule].make(graph, None, ROLLOUTS), title)


def _layers(phase: str, squares: int) -> list[Layer]:
    return [
        Layer(
            component=layer.component,
            linear=layer.linear(ROWS[phase]) // UNIT,
            attention=layer.attention(ROWS[phase], (squares,)) // UNIT,
            parameters=layer.parameters,
        )
        for layer in phase_layers(MODEL, phase)
    ]


def _rows(batch: BatchItems, microbatches: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], dict[str, list[int]]]:
    """Which encoder rows every language microbatch reads, and squared lengths of the items of all rows."""
    examples = len(batch.examples)
    loads = {}
    for name, items in batch.phases.items():
        flops = sum(layer.linear(1) for layer in phase_layers(MODEL, name))
        slots = sums_by(items.example, items.length, examples)
        loads[name] = PhaseLoad(slots * flops, slots, ROWS[name] if PHASES[name].has_loss else None)
    language = loads.pop(LANGUAGE)
    plan = plan_microbatches(loads, language, replicas=1, microbatches=microbatches)
    inputs: list[set[tuple[int, int]]] = [set() for _ in range(plan.microbatches)]
    squares: dict[str, list[int]] = {}
    for number, name in enumerate(loads):
        items = batch.phases[name]
        microbatch = plan.encoder[items.example]
        row, _ = pack_rows(microbatch, items.length, ROWS[name])
        place, of_item = np.unique(np.stack([microbatch, row]), axis=1, return_inverse=True)
        squares[name] = _squares(of_item.reshape(-1), items.length, place.shape[1])
        for example, sub in zip(items.example.tolist(), of_item.reshape(-1).tolist(), strict=True):
            inputs[plan.language[example]].add((number, sub))
    texts = batch.phases[LANGUAGE]
    squares[LANGUAGE] = _squares(plan.language[texts.example], texts.length, plan.microbatches)
    return tuple(tuple(sorted(each)) for each in inputs), squares


def _squares(row: Ints | Longs, length: Longs, rows: int) -> list[int]:
    return sums_by(row, length**2, rows).tolist()


def main(command: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm timeline")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--generated", action="store_true", help="plan a generated batch")
    source.add_argument("--table", type=Path, help="a saved table")
    parser.add_argument("--layout", choices=("chain", "segments", "parallel"), default="segments")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="greedy")
    parser.add_argument("--split", action="store_true", help="split backward into input and weight gradients")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of generated lengths")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of pipeline.png and pipeline.html")
    options = parser.parse_args(command)
    try:
        if options.generated:
            timeline = plan_generated(
                options.layout, options.schedule, options.stages, options.microbatches, options.seed, options.split
            )
        else:
            timeline = of_table(options.table)
    except (PipelineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wrote = write(timeline, options.out)
    columns, rows = table(timeline)
    print_table(timeline.title, columns, rows)
    print(wrote)
    return 0
