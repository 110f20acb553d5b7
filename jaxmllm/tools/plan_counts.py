"""Time and cost of a step over numbers of devices: one config and batch, planned for each."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmllm.cluster.search.layouts import PlannedLayout
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config.schema import ConfigError
from jaxmllm.tools.output import (
    FAINT,
    INK,
    Page,
    html_table,
    new_figure,
    print_table,
    write_picture,
)
from jaxmllm.tools.plan_figures import SPEED, record, speed
from sharding.mesh import MeshError

NAME: Final = "counts"  # of the files of the picture and the page
STEPS: Final = 1000  # steps that device hours and prices are for
COLUMNS: Final = ["devices", "mesh", "why not", *SPEED, "examples/s", "device h"]
HEIGHT: Final = 5.2  # inches of the picture
COLOUR: Final = "#0072B2"


@dataclass(frozen=True)
class Count:
    """The best layout for a number of devices, or why there is none."""

    devices: int
    planner: Planner | None
    best: PlannedLayout | None
    why_none: str = ""

    @property
    def device_hours(self) -> float | None:
        """Device hours of `STEPS` steps; None without a layout."""
        return None if self.best is None else STEPS * self.best.seconds * self.devices / 3600

    @property
    def price(self) -> float | None:
        """Price of `STEPS` steps; None without a layout, or a price in the cluster's record."""
        hourly = None if self.planner is None else self.planner.cluster.price_per_hour
        return None if hourly is None or self.device_hours is None else hourly * self.device_hours


def count_up(devices: Sequence[int], planner_of: Callable[[int], Planner]) -> list[Count]:
    """The best layout for each number of devices, in rising order.

    Raises:
      ConfigError: no number of devices has a layout; the message has the reason for each.
    """
    counts = [_search_count(device_count, planner_of) for device_count in sorted(set(devices))]
    if all(count.best is None for count in counts):
        raise ConfigError("; ".join(f"{count.devices}: {count.why_none}" for count in counts))
    return counts


def _search_count(devices: int, planner_of: Callable[[int], Planner]) -> Count:
    try:
        planner = planner_of(devices)
        return Count(devices, planner, planner.search(devices).ranked[0])
    except (ConfigError, MeshError) as error:
        return Count(devices, None, None, str(error))


# ---------------------------------------------------------------------------- what is shown


def columns(counts: Sequence[Count]) -> list[str]:
    """Columns of the table, with a price if any count has one."""
    priced = any(count.price is not None for count in counts)
    return [*COLUMNS, *(["price"] if priced else [])]


def table(counts: Sequence[Count]) -> list[list[Any]]:
    """Rows of the table, one for each number of devices."""
    # The price, last in a line, is cut off where the table has no column for it
    return [_count_cells(count)[: len(columns(counts))] for count in counts]


def _count_cells(count: Count) -> list[Any]:
    best = count.best
    planner = count.planner
    if best is None or planner is None:
        nothing = [None] * (len(SPEED) + 3)
        return [count.devices, None, count.why_none, *nothing]
    per_second = best.config.data.batch_size / best.seconds
    figures = [*speed(best, planner), per_second, count.device_hours, count.price]
    return [count.devices, best.choice.words, "", *figures]


def conclusion(counts: Sequence[Count]) -> str:
    """One line: the cheapest and the fastest number of devices, and what more speed costs."""
    hours = {count.devices: count.device_hours for count in counts if count.device_hours}
    cheapest = min(hours, key=lambda devices: hours[devices])
    fastest = min(hours, key=lambda devices: hours[devices] / devices)
    if fastest == cheapest:
        return f"{cheapest} devices are the cheapest and the fastest"
    hours_ratio = hours[fastest] / hours[cheapest]
    return (
        f"{cheapest} devices are the cheapest; {fastest} are {fastest / cheapest / hours_ratio:.2f} times as fast for "
        f"{100 * (hours_ratio - 1):.0f} % more device hours"
    )


def show(title: str, counts: Sequence[Count]) -> None:
    """Print the table and its conclusion."""
    print_table(title, columns(counts), table(counts), left_aligned=3)
    print(f"device h: of {STEPS} steps. {conclusion(counts)}")


def records(counts: Sequence[Count]) -> dict[str, Any]:
    """The counts and their conclusion, for JSON."""
    return {"counts": [_count_record(count) for count in counts], "conclusion": conclusion(counts)}


def _count_record(count: Count) -> dict[str, Any]:
    if count.best is None or count.planner is None:
        return {"devices": count.devices, "why_not": count.why_none}
    layout = record(count.best, count.best, count.planner)
    cost = {"device_hours": count.device_hours, "price": count.price}
    return {"devices": count.devices} | cost | layout


# ---------------------------------------------------------------------------- the picture


def write(title: str, counts: Sequence[Count], folder: Path) -> str:
    """Write counts.png and counts.html into `folder`; return a line that says so."""
    body = html_table(columns(counts), table(counts), left_aligned=3)
    page = Page(
        title=title,
        heading="Numbers of devices",
        introduction=f"<p>{html.escape(title)}. {html.escape(conclusion(counts))}.</p>",
        picture="Seconds of a step and device hours of a thousand steps over numbers of devices",
        body=body,
    )
    return write_picture(folder, NAME, draw(title, counts), page)


def draw(title: str, counts: Sequence[Count]) -> Figure:
    """Draw seconds of a step with their interval on the left, device hours on the right."""
    figure = new_figure(HEIGHT, head=0.6, wspace=0.06)
    seconds, hours = figure.subplots(1, 2)
    points = [
        (
            count.devices,
            count.best,
            count.planner.device.interval(count.best.seconds),
            count.device_hours,
        )
        for count in counts
        if count.best is not None and count.planner is not None
    ]
    numbers = [devices for devices, *_ in points]
    seconds.plot(numbers, [best.seconds for _, best, *_ in points], marker="o", color=COLOUR)
    low, high = zip(*(between for *_, between, _ in points), strict=True)
    seconds.fill_between(numbers, low, high, color=COLOUR, alpha=0.15, linewidth=0)
    hours.plot(numbers, [of_steps for *_, of_steps in points], marker="o", color=COLOUR)
    _label(seconds, numbers, "seconds of a step, and the interval of a time without calibration")
    _label(hours, numbers, f"device hours of {STEPS} steps")
    top = 1 - 0.14 / HEIGHT
    figure.text(0.008, top, title, fontsize=15, fontweight="bold", color=INK, va="top")
    return figure


def _label(axes: Axes, numbers: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(devices) for devices in numbers])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.tick_params(labelsize=9, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
