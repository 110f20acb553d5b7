"""The picture of the balance report: load of ranks and fill of rows, by phase, before and after."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from jaxmllm.tools.balance_figures import PhaseView, Views, step_time
from jaxmllm.tools.output import FAINT, INK, new_figure

SEPARATE_BARS = 32  # more columns than this are drawn without gaps between them
GAP = 0.18  # between columns, in widths of a rank where there are `SEPARATE_BARS` ranks
IN_ORDER = 128  # more ranks than this are sorted by load: they are too many to tell apart
USED = "#0072B2"  # colours of Okabe and Ito, which everybody can tell apart
WASTED = "#F0B04A"
DASHES = (0, (4, 3))
HEADLINE = "Load and padding of every rank, before and after balancing"
MODE_WORDS: Mapping[str, str] = {
    "none": "examples stay where sampling put them",
    "tokens": "examples dealt by their tokens, media with them",
    "language": "language phase balanced, media with their examples",
    "phases": "every phase balanced",
}
FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
FEMTOSECONDS = ((1e15, "s"), (1e12, "ms"), (1e9, "µs"), (1.0, "fs"))


def draw(
    views: Views, title: str, routes: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """Draw two modes next to each other, a line of panels for each phase: load on the left, rows on
    the right.

    Args:
      title: title of the batch.
      routes: what the exchanges move, by mode (see `route_figures`), for the head of the picture.
    """
    (before, views_before), (after, views_after) = views.items()
    phases = [phase for phase in views_before if views_before[phase].figures]
    height = 2.0 + 2.6 * len(phases)
    figure = new_figure(height, head=1.2, hspace=0.06, wspace=0.02)
    ratio = step_time(views_before) / step_time(views_after)
    exchange = _exchange_words((routes or {}).get(after, {}))
    _draw_head(
        figure,
        f"{title}. A step takes {ratio:.2f} times as long before as after (predicted).\n"
        f"{before}: {MODE_WORDS[before]}; {after}: {MODE_WORDS[after]}{exchange}",
        height,
    )
    grid = figure.add_gridspec(max(len(phases), 1), 5, width_ratios=(1, 1, 0.06, 1, 1))
    for line, phase in enumerate(phases):
        pair = (before, views_before[phase]), (after, views_after[phase])
        scale, unit = _cost_unit(max(view.time for _, view in pair), views_before[phase].calibrated)
        load = rows = None
        for column, (mode, view) in enumerate(pair):
            load = figure.add_subplot(grid[line, column], sharey=load)
            rows = figure.add_subplot(grid[line, column + 3], sharey=rows)
            order = _rank_order(view)
            _draw_load(load, view, order, scale)
            _draw_rows(rows, view, order)
            for axes, subject in ((load, "Load"), (rows, "Rows")):
                _style_axes(
                    axes,
                    view.load.shape[1],
                    rank_label=line == len(phases) - 1,
                    tick_labels=column == 0,
                )
                if line == 0:
                    heading = f"{subject} {'after' if column else 'before'} (mode {mode})"
                    axes.set_title(
                        heading, loc="left", fontsize=10.5, pad=24, color=INK, fontweight="bold"
                    )
        # The two panels of `before` carry the labels of their axes.
        for axes, label in (
            (figure.axes[-4], f"load [{unit}]"),
            (figure.axes[-3], "slots [thousands]"),
        ):
            axes.set_ylabel(f"$\\bf{{{phase}}}$\n{label}", color=INK, fontsize=10.5)
    return figure


def _exchange_words(figures: Mapping[str, float]) -> str:
    if "change rank" not in figures:
        return ""
    routed = f"{figures['MB routed']:.0f} MB of encoder outputs routed"
    rank = f"{100 * figures['change rank']:.0f} % to another rank"
    node = (
        f", {100 * figures['change node']:.0f} % to another node"
        if "change node" in figures
        else ""
    )
    return f" ({routed}, {rank}{node})"


def _draw_head(figure: Figure, line: str, height: float) -> None:
    """Draw headline, `line` and legend above the panels."""
    figure.text(
        0.008, 1 - 0.14 / height, HEADLINE, fontsize=17, fontweight="bold", color=INK, va="top"
    )
    figure.text(0.008, 1 - 0.53 / height, line, fontsize=10.5, color=INK, va="top", linespacing=1.5)
    handles: list[Artist] = [
        Patch(color=USED, label="load: work   rows: data"),
        Patch(color=WASTED, label="load: waiting   rows: padding"),
        Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="mean load"),
    ]
    corner = (0.996, 1 - 0.08 / height)
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=corner,
        frameon=False,
        ncols=3,
        fontsize=10.5,
    )


def _rank_order(view: PhaseView) -> NDArray[np.int64]:
    """Ranks in their order, or costliest first where they are too many to tell apart."""
    ranks = view.load.shape[1]
    return (
        np.arange(ranks) if ranks <= IN_ORDER else np.argsort(-view.load.sum(axis=0), kind="stable")
    )


def _draw_load(axes: Axes, view: PhaseView, order: NDArray[np.int64], scale: float) -> None:
    """Draw what every rank computes, and on top its wait until the slowest rows are done."""
    load = view.load.sum(axis=0)[order] / scale
    _draw_columns(axes, np.zeros_like(load), load, USED)
    _draw_columns(axes, load, np.full_like(load, view.time / scale), WASTED)
    axes.axhline(load.mean(), color=INK, linewidth=1, linestyle=DASHES)
    figures = view.figures
    words = (
        f"over ideal {figures['over ideal']:.2f}",
        f"gap {figures['gap to floor']:.2f}",
        f"idle {100 * figures['idle']:.1f} %",
    )
    _draw_caption(axes, "   ·   ".join(words))


def _draw_rows(axes: Axes, view: PhaseView, order: NDArray[np.int64]) -> None:
    """Draw the rows of every rank as a stack, each filled as far as it holds data."""
    bottom = np.zeros(len(order))
    filled = view.real[:, order] / 1e3
    for capacity, span, real in zip(view.capacity / 1e3, view.span, filled, strict=True):
        # A row that several ranks hold is one wide column; ranks out of order cannot be joined.
        joined = int(span) if len(order) <= IN_ORDER else 1
        _draw_columns(axes, bottom, bottom + real, USED, joined)
        _draw_columns(axes, bottom + real, bottom + capacity, WASTED, joined)
        bottom = bottom + capacity
    for edge in np.cumsum(view.capacity / 1e3):
        axes.axhline(edge, color="white", linewidth=1.6)
    rows = view.figures["rows"]
    plural = "s" if rows > 1 else ""
    shared = int((view.span > 1).sum())
    held = f", {shared} shared" if shared else ""
    real = f"{100 * view.figures['real tokens']:.1f} % real"
    _draw_caption(axes, f"{rows:.0f} row{plural}{held}   ·   {real}")


def _draw_columns(
    axes: Axes,
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    color: str,
    joined: int = 1,
) -> None:
    """Draw a column for each rank, or for each group of `joined` neighbours."""
    ranks = len(low)
    if ranks <= SEPARATE_BARS * joined:
        center = np.arange(0, ranks, joined) + (joined - 1) / 2
        width = joined - GAP * max(1, ranks / SEPARATE_BARS)  # the same gap in any picture
        axes.bar(center, (high - low)[::joined], width, low[::joined], color=color, linewidth=0)
    else:
        axes.stairs(
            high, np.arange(ranks + 1) - 0.5, baseline=low, fill=True, color=color, linewidth=0
        )


def _draw_caption(axes: Axes, text: str) -> None:
    axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=9.5, color=INK, va="bottom")


def _style_axes(axes: Axes, ranks: int, rank_label: bool, tick_labels: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=3, labelleft=tick_labels)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if rank_label:
        axes.set_xlabel(
            "rank" if ranks <= IN_ORDER else "ranks, costliest first", color=INK, fontsize=10
        )


def _cost_unit(cost: float, calibrated: bool) -> tuple[float, str]:
    """The largest unit that makes the cost at least 1, as (size, name)."""
    units = FEMTOSECONDS if calibrated else FLOPS
    return next((unit for unit in units if cost >= unit[0]), units[-1])
