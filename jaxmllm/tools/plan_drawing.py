"""The picture of planned layouts and its page: a bar for each layout with the parts of its step,
and one with its memory against the budget."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmllm.cluster.clusters import GB
from jaxmllm.cluster.search.layouts import PlannedLayout, SearchResult
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.tools.output import FAINT, INK, Page, html_table, new_figure, write_picture
from jaxmllm.tools.plan_figures import CHOSEN, COLUMNS, chosen_table, table

NAME: Final = "plan"  # of the files of the picture and the page
COLOURS: Final = (  # after Okabe and Ito, then lighter
    "#0072B2",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#F0E442",
    "#999999",
    "#7FB8D8",
    "#7FCEB9",
    "#EAAE7F",
    "#E5BCD3",
    "#555555",
)
SMALL: Final = 0.002  # share of the longest bar: parts that are never larger are left out


def draw(title: str, layouts: Sequence[PlannedLayout], budget: float) -> Figure:
    """Draw a line for each layout, the first on top: seconds on the left, memory on the right."""
    height = 2.6 + 0.42 * len(layouts)
    figure = new_figure(height, head=0.6, wspace=0.04)
    seconds, memory = figure.subplots(1, 2, sharey=True)
    _draw_bars(seconds, [layout.parts for layout in layouts])
    seconds.set_xlabel("seconds of a step")
    held = [{part: size / GB for part, size in layout.peak.parts.items()} for layout in layouts]
    _draw_bars(memory, held)
    memory.axvline(budget / GB, color=INK, linewidth=1.4, linestyle="--")
    memory.set_xlim(0, 1.05 * max(budget / GB, *(sum(sizes.values()) for sizes in held)))
    memory.set_xlabel("GB of a device at the peak; dashed: what a run may take")
    seconds.set_yticks(range(len(layouts)), [layout.choice.words for layout in layouts])
    # The axis is shared, so this turns both charts.
    seconds.invert_yaxis()
    figure.text(
        0.008, 1 - 0.14 / height, title, fontsize=15, fontweight="bold", color=INK, va="top"
    )
    return figure


def _draw_bars(axes: Axes, layouts: Sequence[Mapping[str, float]]) -> None:
    """Draw a bar of stacked parts for each layout, and the parts' names below."""
    longest = max(sum(parts.values()) for parts in layouts)
    all_names = dict.fromkeys(name for parts in layouts for name in parts)
    # Parts too small to be seen in any bar are left out, so bars are slightly too short.
    names = [
        name
        for name in all_names
        if max(parts.get(name, 0.0) for parts in layouts) > SMALL * longest
    ]
    starts = [0.0] * len(layouts)
    for index, name in enumerate(names):
        widths = [parts.get(name, 0.0) for parts in layouts]
        color = COLOURS[index % len(COLOURS)]
        axes.barh(
            range(len(layouts)),
            widths,
            left=starts,
            height=0.7,
            color=color,
            label=name.replace("_", " "),
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.tick_params(labelsize=9, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / (0.42 * len(layouts) + 0.8)),
        frameon=False,
        ncols=4,
        fontsize=9,
        handlelength=1.1,
    )


def page(title: str, result: SearchResult, planner: Planner, notes: Sequence[str]) -> Page:
    """The page around the picture."""
    reasons = "".join(
        f"<li>{rejections} rejected: {html.escape(reason)}</li>"
        for reason, rejections in result.rejected.most_common()
    )
    best = result.ranked[0]
    sections = (
        "<h2>Layouts that were planned whole</h2>",
        html_table(COLUMNS, table(result, planner), left_aligned=2),
        html_table(CHOSEN, chosen_table(result), left_aligned=3),
        f"<p>{result.considered} layouts on {result.meshes} meshes were considered.</p><ul>{reasons}</ul>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
    )
    return Page(
        title=title,
        heading="Planned layouts",
        introduction=f"<p>{html.escape(title)}. Chosen: <b>{html.escape(best.choice.words)}</b>, a step of "
        f"{best.seconds:.3g} s predicted.</p>",
        picture="Seconds of a step by part and bytes of a device, a bar per layout",
        body="\n".join(sections),
    )


def write(
    title: str, result: SearchResult, planner: Planner, folder: Path, top: int, notes: Sequence[str]
) -> str:
    """Write plan.png with the layouts of the table, and plan.html; return a line that says so."""
    struck = [layout for layout, _ in result.struck]
    figure = draw(title, [*result.ranked, *struck][: max(top, 1)], planner.budget)
    return write_picture(folder, NAME, figure, page(title, result, planner, notes))
