"""The picture of a pipeline's schedule, its page and its table."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxmllm.tools.output import FAINT, INK, Page, html_table, new_figure, write_picture
from sharding.pipeline.graph import Kind

NAME = "pipeline"  # of the files of the picture and the page
HUES: Final = {
    "vision": "#0072B2",
    "audio": "#009E73",
    "language": "#D55E00",
}  # after Okabe and Ito
OTHER_HUES: Final = ("#CC79A7", "#56B4E9", "#E69F00")
SHADES: Final[Mapping[Kind, float]] = {  # share of the way to white, or below 0 to black
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
NARROW = 0.012  # share of the picture's width: a narrower bar has no room for a number


@dataclass(frozen=True)
class Bar:
    """One operation, on one rank."""

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
        """Components in the order in which they begin."""
        return list(
            dict.fromkeys(bar.component for bar in sorted(self.bars, key=lambda bar: bar.start)),
        )

    def busy(self, component: str | None = None) -> list[float]:
        """Share of the step in which each rank computes, for one component or all."""
        work = [0.0] * self.ranks
        for bar in self.bars:
            if component in (None, bar.component):
                work[bar.rank] += bar.length
        return [length / (self.ticks[-1] or 1.0) for length in work]


# ---------------------------------------------------------------------------- drawing


def draw(timeline: Timeline) -> Figure:
    """Draw a line for each rank, with time to the right."""
    height = 2.1 + 0.62 * timeline.ranks
    figure = new_figure(height, head=1.15)
    axes = figure.add_subplot()
    _draw_bars(axes, timeline)
    busy = timeline.busy()
    figures = (
        f"{len(timeline.ticks) - 1} ticks   ·   busiest rank {100 * max(busy, default=0):.1f} %"
    )
    figure.text(
        0.008,
        1 - 0.14 / height,
        timeline.title,
        fontsize=15,
        fontweight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.008,
        1 - 0.52 / height,
        f"{figures}   ·   {timeline.note}".rstrip(" ·"),
        fontsize=10,
        color=INK,
        va="top",
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


def _draw_bars(axes: Axes, timeline: Timeline) -> None:
    """Draw operations with their microbatches, ticks as lines, and each rank's busy share."""
    end = timeline.ticks[-1] or 1.0
    thin = 0.6 if len(timeline.ticks) < 150 else 0.15
    for edge in timeline.ticks:
        axes.axvline(edge, color="#E6E6E6", linewidth=0.5, zorder=0)
    for bar in timeline.bars:
        color = _color(bar.component, bar.kind)
        corner = (bar.start, bar.rank - 0.42)
        axes.add_patch(
            Rectangle(corner, bar.length, 0.84, facecolor=color, edgecolor="white", linewidth=thin),
        )
        if bar.length / end >= NARROW:
            # The sum of red, green and blue is 3 for white: light bars have dark numbers.
            ink = INK if sum(to_rgb(color)) > 1.7 else "white"
            text = str(bar.microbatch)
            axes.text(
                bar.start + bar.length / 2,
                bar.rank,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color=ink,
            )
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
    goal = 1 if shade > 0 else 0  # white or black
    red, green, blue = (channel + abs(shade) * (goal - channel) for channel in to_rgb(hue))
    return red, green, blue


# ---------------------------------------------------------------------------- writing


def table(timeline: Timeline) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table: what each rank does, in shares of the step."""
    names = timeline.components
    shares = [timeline.busy(name) for name in names]
    columns = ["rank", "operations", *names, "busy", "waits"]
    rows = []
    for rank, busy in enumerate(timeline.busy()):
        operations = sum(bar.rank == rank for bar in timeline.bars)
        component_shares = [_percent(share[rank]) for share in shares]
        rows.append(
            [str(rank), str(operations), *component_shares, _percent(busy), _percent(1 - busy)],
        )
    return columns, rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write(timeline: Timeline, directory: Path) -> str:
    """Write pipeline.png and pipeline.html into `directory`; return a line that says so."""
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
