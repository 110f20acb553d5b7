"""Draw what balancing does: load of every rank and padding of every row, before and after, in each phase.

    python -m jaxmllm.tools.balance_report --config X [--generated] [--ranks R] [--per-rank b] [--out DIR]
        [key=value ...]
    python -m jaxmllm.tools.balance_report --generated [--ranks R] [--per-rank b]

With a config the batch is one that its run would draw, or (`--generated`) one of jaxmllm/tools/workload.py on the
config's model, layouts and rows. Without, the generator's own model is planned. Row sizes are chosen for each mode,
from other batches. Nothing is decoded, compiled or run. Writes balance.png and balance.html, and prints their table.

    gap to floor    costliest rank / max(mean rank, costliest item): 1 where no placement could do better
    max/mean        costliest rank / mean rank
    synchronised    sum over microbatches of the costliest row / sum of means: ranks meet at every microbatch
    rows            of a rank, each one microbatch
    real tokens     share of row slots that hold data
    idle            predicted share of rank time spent waiting: 1 - 1 / synchronised

And of the exchange of encoder outputs: MB routed, the share that changes rank and node, the latter also over that of
ranks dealt at random, and the slots that move from rank to rank, padding included, over the tokens that have to.
"""

from __future__ import annotations

import argparse
import base64
import html
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import get_args

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from jaxmllm.balance.records import BatchItems, Mode, PhaseItems, PhasePlan, PhaseSpec, PlanSpec, StepPlan
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.step_plan import phase_statistics, plan_step
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import ModelConfig
from jaxmllm.tools.workload import MODEL, describe, generate, longest, make_spec, mix_for

AFTER: Mode = "phases"
RANKS, PER_RANK = 64, 32  # of generated batches, unless the config or the caller says otherwise
NODE = 8  # ranks of a node of generated batches
SAMPLED_EXAMPLES = 8192  # generated to choose the sizes from ...
SAMPLED_BATCHES = (2, 16)  # ... in as many batches as that makes, within these bounds
BARS = 32  # more ranks are drawn without gaps between them ...
IN_ORDER = 128  # ... and even more are sorted by load

USED, WASTED, INK, FAINT = "#0072B2", "#F0B04A", "#222222", "#8A8A8A"  # after Okabe and Ito: told apart by everybody
DASHES = (0, (4, 3))
COLUMNS: Mapping[str, str] = {  # and the names of their statistics
    "gap to floor": "gap_to_floor",
    "max/mean": "max_over_mean",
    "synchronised": "synchronised",
    "rows": "microbatches",
    "real tokens": "real_token_fraction",
    "idle": "idle_share",
}
MODE_WORDS: Mapping[str, str] = {
    "none": "examples stay where sampling put them",
    "tokens": "examples dealt by their tokens, media with them",
    "language": "language phase balanced, media with their examples",
    "phases": "every phase balanced",
}


ROUTE_COLUMNS = ("MB routed", "change rank", "change node", "node, of random", "slots / moved")
ROUTE_STATISTICS = ("tokens", "moved_tokens", "slots_moved", "node_tokens", "node_tokens_over_arbitrary")


@dataclass(frozen=True)
class Comparison:
    """One batch planned twice. The specs differ in their mode and in the sizes that suit it."""

    title: str  # where the lengths come from
    items: BatchItems
    before: PlanSpec
    after: PlanSpec
    token_bytes: int = 2 * MODEL.language.width  # of an encoder output


@dataclass(frozen=True)
class PhaseView:
    """One phase of one plan, as it is drawn."""

    load: NDArray[np.float64]  # [M, R] cost of the items of every row: FLOPs, or femtoseconds
    real: NDArray[np.int64]  # [M, R] slots that hold data
    capacity: NDArray[np.int64]  # [M]
    figures: dict[str, float]  # by column; none where the phase has no items
    calibrated: bool = False  # costs are femtoseconds

    @property
    def time(self) -> float:
        """Cost of the phase when ranks meet at every microbatch."""
        return float(self.load.max(axis=1, initial=0).sum())


Views = Mapping[str, Mapping[str, PhaseView]]  # by mode, before first; then by phase


def view(plan: StepPlan, items: BatchItems, spec: PlanSpec) -> dict[str, PhaseView]:
    """See every phase of a plan."""
    return {name: _view(plan.phases[name], items.phases[name], phase) for name, phase in spec.phases.items()}


def route_figures(plan: StepPlan, token_bytes: int) -> dict[str, float]:
    """What the exchanges of a plan move, all encoder phases together, by column; without those that have no meaning."""

    carried = {key.split("/")[1] for key in plan.statistics if key.startswith("route/")}
    each = [
        {name: plan.statistics.get(f"route/{phase}/{name}", 0.0) for name in ROUTE_STATISTICS}
        for phase in sorted(carried)
    ]
    tokens, moved, slots, between, placed = (
        sum(statistics[name] * (statistics["tokens"] if name == ROUTE_STATISTICS[-1] else 1) for statistics in each)
        for name in ROUTE_STATISTICS
    )
    figures: dict[str, float] = {"MB routed": tokens * token_bytes / 1e6}
    if moved:
        figures |= {"change rank": moved / tokens, "slots / moved": slots / moved}
    if placed:
        figures |= {"change node": between / tokens, "node, of random": placed / tokens}
    return figures


def _view(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec) -> PhaseView:
    where = (plan.microbatch, plan.rank)
    load, real = np.zeros((plan.microbatches, spec.ranks)), np.zeros((plan.microbatches, spec.ranks), np.int64)
    length = items.length.astype(float)
    np.add.at(load, where, spec.linear * length + spec.quadratic * length**2)
    np.add.at(real, where, items.real)
    statistics = phase_statistics(plan, items, spec)
    figures = {
        column: statistics[f"{spec.name}/{name}"]
        for column, name in COLUMNS.items()
        if plan.microbatches and f"{spec.name}/{name}" in statistics
    }
    return PhaseView(load, real, plan.capacity.astype(np.int64), figures, spec.model_flops is not None)


def idle_share(views: Mapping[str, PhaseView]) -> float:
    """Predicted share of rank time spent waiting, over all phases."""
    needed = sum(view.load.sum() / view.load.shape[1] for view in views.values())
    return 1 - float(needed / sum(view.time for view in views.values()))


def step_time(views: Mapping[str, PhaseView]) -> float:
    """Cost of the costliest rows, over all phases and microbatches."""
    return sum(view.time for view in views.values())


def table(views: Views) -> list[list[str]]:
    """Rows of the table, phase by phase."""
    modes = list(views)
    rows = []
    for phase in views[modes[0]]:
        for mode in modes:
            figures = views[mode][phase].figures
            rows.append([phase, mode, *(_text(name, figures.get(name)) for name in COLUMNS)])
    return [
        *rows,
        *(["all", mode, *[""] * (len(COLUMNS) - 1), _text("idle", idle_share(views[mode]))] for mode in modes),
    ]


def route_table(routes: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Rows of the table of the exchange, by mode."""
    return [[mode, *(_text(name, figures.get(name)) for name in ROUTE_COLUMNS)] for mode, figures in routes.items()]


def _text(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column == "rows":
        return f"{value:.0f}"
    if column == "MB routed":
        return f"{value:.1f}"
    shares = ("idle", "real tokens", "change rank", "change node")
    return f"{100 * value:.1f} %" if column in shares else f"{value:.3f}"


# ---------------------------------------------------------------------------- drawing


def draw(views: Views, title: str, routes: Mapping[str, Mapping[str, float]] | None = None) -> Figure:
    """Two modes beside each other, one line of panels a phase: on the left load, on the right rows. The exchanges of
    the modes are told in the head."""
    (before, first), (after, second) = views.items()
    phases = [phase for phase in first if first[phase].figures]
    height = 2.0 + 2.6 * len(phases)
    figure = Figure(figsize=(15.5, height), layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.004, 0.004, 0.992, 1 - 1.2 / height), hspace=0.06, wspace=0.02)  # type: ignore[call-arg]
    ratio = step_time(first) / step_time(second)
    words = (
        f"{before}: {MODE_WORDS[before]}; {after}: {MODE_WORDS[after]}{_exchange_words((routes or {}).get(after, {}))}"
    )
    _head(figure, f"{title}. A step takes {ratio:.2f} times as long before as after (predicted).\n{words}", height)
    grid = figure.add_gridspec(max(len(phases), 1), 5, width_ratios=(1, 1, 0.06, 1, 1))
    for line, phase in enumerate(phases):
        pair = (before, first[phase]), (after, second[phase])
        scale, unit = _unit(max(shown.time for _, shown in pair), first[phase].calibrated)
        load = rows = None
        for column, (mode, shown) in enumerate(pair):
            load = figure.add_subplot(grid[line, column], sharey=load)
            rows = figure.add_subplot(grid[line, column + 3], sharey=rows)
            order = _order(shown)
            _draw_load(load, shown, order, scale)
            _draw_rows(rows, shown, order)
            for axes in (load, rows):
                _tidy(axes, shown.load.shape[1], last=line == len(phases) - 1, first=column == 0)
                if line == 0:
                    what = "Load" if axes is load else "Rows"
                    heading = f"{what} {'after' if column else 'before'} (mode {mode})"
                    axes.set_title(heading, loc="left", fontsize=10.5, pad=24, color=INK, fontweight="bold")
        assert load is not None and rows is not None
        for axes, what in ((figure.axes[-4], f"load [{unit}]"), (figure.axes[-3], "slots [thousands]")):
            axes.set_ylabel(f"$\\bf{{{phase}}}$\n{what}", color=INK, fontsize=10.5)
    return figure


def _exchange_words(figures: Mapping[str, float]) -> str:
    if "change rank" not in figures:
        return ""
    moves = (
        f"{figures['MB routed']:.0f} MB of encoder outputs routed, {100 * figures['change rank']:.0f} % to another rank"
    )
    node = f", {100 * figures['change node']:.0f} % to another node" if "change node" in figures else ""
    return f" ({moves}{node})"


def _head(figure: Figure, line: str, height: float) -> None:
    top = "Load and padding of every rank, before and after balancing"
    figure.text(0.008, 1 - 0.14 / height, top, fontsize=17, fontweight="bold", color=INK, va="top")
    figure.text(0.008, 1 - 0.53 / height, line, fontsize=10.5, color=INK, va="top", linespacing=1.5)
    handles: list[Artist] = [
        Patch(color=USED, label="load: work   rows: data"),
        Patch(color=WASTED, label="load: waiting   rows: padding"),
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="mean load"))
    place = (0.996, 1 - 0.08 / height)
    figure.legend(handles=handles, loc="upper right", bbox_to_anchor=place, frameon=False, ncols=3, fontsize=10.5)


def _order(shown: PhaseView) -> NDArray[np.int64]:
    """Ranks as they stand, or costliest first where they are too many to tell apart."""
    ranks = shown.load.shape[1]
    return np.arange(ranks) if ranks <= IN_ORDER else np.argsort(-shown.load.sum(axis=0), kind="stable")


def _draw_load(axes: Axes, shown: PhaseView, order: NDArray[np.int64], scale: float) -> None:
    """What every rank computes, and on top how long it waits until the slowest rows are done."""
    load = shown.load.sum(axis=0)[order] / scale
    time = shown.time / scale
    _columns(axes, np.zeros_like(load), load, USED)
    _columns(axes, load, np.full_like(load, time), WASTED)
    axes.axhline(load.mean(), color=INK, linewidth=1, linestyle=DASHES)
    figures = shown.figures
    shares = (
        f"max/mean {figures['max/mean']:.2f}",
        f"gap {figures['gap to floor']:.2f}",
        f"idle {100 * figures['idle']:.1f} %",
    )
    _caption(axes, "   ·   ".join(shares))


def _draw_rows(axes: Axes, shown: PhaseView, order: NDArray[np.int64]) -> None:
    """The rows of every rank, one on the other, each filled as far as it holds data."""
    bottom = np.zeros(len(order))
    for capacity, real in zip(shown.capacity / 1e3, shown.real[:, order] / 1e3, strict=True):
        _columns(axes, bottom, bottom + real, USED)
        _columns(axes, bottom + real, bottom + capacity, WASTED)
        bottom = bottom + capacity
    for edge in np.cumsum(shown.capacity / 1e3):
        axes.axhline(edge, color="white", linewidth=1.6)
    figures = shown.figures
    many = f"{figures['rows']:.0f} row{'s' if figures['rows'] > 1 else ''} a rank"
    _caption(axes, f"{many}   ·   {100 * figures['real tokens']:.1f} % real")


def _columns(axes: Axes, low: NDArray[np.float64], high: NDArray[np.float64], color: str) -> None:
    ranks = len(low)
    if ranks <= BARS:
        axes.bar(np.arange(ranks), high - low, 0.82, low, color=color, linewidth=0)
    else:
        axes.stairs(high, np.arange(ranks + 1) - 0.5, baseline=low, fill=True, color=color, linewidth=0)


def _caption(axes: Axes, text: str) -> None:
    axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=9.5, color=INK, va="bottom")


def _tidy(axes: Axes, ranks: int, last: bool, first: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=3, labelleft=first)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if last:
        axes.set_xlabel("rank" if ranks <= IN_ORDER else "ranks, costliest first", color=INK, fontsize=10)


def _unit(cost: float, calibrated: bool) -> tuple[float, str]:
    flops = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
    times = ((1e15, "s"), (1e12, "ms"), (1e9, "µs"), (1.0, "fs"))
    scales = times if calibrated else flops
    return next((each for each in scales if cost >= each[0]), scales[-1])


# ---------------------------------------------------------------------------- writing


PICTURE, PAGE_FILE = "balance.png", "balance.html"
LENGTHS = ("items", "mean", "CV", "max/mean", "inner padding")
STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
img { width: 100%; height: auto; margin: 1.2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
h2 {{ font-size: 1.1rem; margin-top: 2.2rem; }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
dt {{ font-weight: 600; }} dd {{ margin: 0 0 .4rem 1.2rem; }}
</style>
</head>
<body>
<h1>Load and padding of every rank</h1>
<p>{title}. Predicted: a step takes <b>{ratio:.2f}</b> times as long before ({before}) as after ({after}).</p>
<img alt="Load of every rank and fill of its rows, by phase, before and after" src="data:image/png;base64,{image}">
<h2>Figures</h2>
<div class="wide">{figures}</div>
<dl>{glossary}</dl>
<h2>Exchange of encoder outputs</h2>
<div class="wide">{routes}</div>
<h2>Lengths of this batch</h2>
<div class="wide">{workload}</div>
<p>{correlations}</p>
</body>
</html>
"""
GLOSSARY = {
    "gap to floor": "costliest rank / max(mean rank, costliest item); 1 where no placement could do better",
    "max/mean": "costliest rank / mean rank",
    "synchronised": "sum over microbatches of the costliest row / sum of means, because ranks meet at every microbatch",
    "rows": "rows of a rank; each is one microbatch",
    "real tokens": "share of row slots that hold data",
    "MB routed": "encoder outputs that the language phase needs; then the share of them that changes rank or node, the "
    "latter also over what it is with ranks dealt at random, and slots sent between ranks over those that had to be",
    "idle": "predicted share of rank time spent waiting: 1 - 1 / synchronised; over all phases weighted by their cost",
}


@dataclass(frozen=True)
class Report:
    """A comparison in words and numbers."""

    title: str
    views: Views
    routes: Mapping[str, Mapping[str, float]]  # by mode, see `route_figures`
    lengths: dict[str, float]  # see `describe`

    @property
    def ratio(self) -> float:
        """Times as long as a step takes before."""
        before, after = map(step_time, self.views.values())
        return before / after

    def show(self) -> None:
        """Print the tables."""
        before, after = self.views
        print_table(f"{self.title}: lengths", ("phase", *LENGTHS), lengths_table(self.lengths, self.views[after]))
        print(correlations(self.lengths) + "\n")
        print_table("Balance", ("phase", "mode", *COLUMNS), table(self.views))
        print_table("Exchange of encoder outputs", ("mode", *ROUTE_COLUMNS), route_table(self.routes))
        print(f"predicted: a step takes {self.ratio:.2f} times as long with mode {before} as with {after}")

    def page(self, image: bytes) -> str:
        """HTML in one piece, with the picture inside."""
        before, after = self.views
        return PAGE.format(
            style=STYLE,
            title=html.escape(self.title),
            ratio=self.ratio,
            before=MODE_WORDS[before],
            after=MODE_WORDS[after],
            image=base64.b64encode(image).decode(),
            figures=html_table(("phase", "mode", *COLUMNS), table(self.views)),
            glossary="".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in GLOSSARY.items()),
            routes=html_table(("mode", *ROUTE_COLUMNS), route_table(self.routes)),
            workload=html_table(("phase", *LENGTHS), lengths_table(self.lengths, self.views[after])),
            correlations=html.escape(correlations(self.lengths)),
        )


def write(compared: Comparison, directory: Path) -> Report:
    """Draw a comparison into `directory`: balance.png and balance.html."""
    views: dict[str, dict[str, PhaseView]] = {}
    routes: dict[str, dict[str, float]] = {}
    for spec in (compared.before, compared.after):
        plan = plan_step(compared.items, spec)
        views[spec.mode] = view(plan, compared.items, spec)
        routes[spec.mode] = route_figures(plan, compared.token_bytes)
    report = Report(compared.title, views, routes, describe(compared.items))
    image = png(draw(views, compared.title, routes))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PICTURE).write_bytes(image)
    (directory / PAGE_FILE).write_text(report.page(image), encoding="utf-8")
    return report


def png(figure: Figure) -> bytes:
    """In 64 colours, a third of the bytes."""
    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def lengths_table(lengths: Mapping[str, float], phases: Iterable[str]) -> list[list[str]]:
    """How ragged the items of each phase are."""
    rows = []
    for phase in phases:
        of = {
            name: lengths.get(f"{phase}/{name}") for name in ("items", "mean", "cv", "max_over_mean", "inner_padding")
        }
        numbers = [of["mean"], of["cv"], of["max_over_mean"]]
        shown = [*("-" if x is None else f"{x:.{digits}f}" for x, digits in zip(numbers, (0, 2, 2), strict=True))]
        padding = "-" if of["inner_padding"] is None else f"{100 * of['inner_padding']:.1f} %"
        rows.append([phase, f"{of['items']:.0f}", *shown, padding])
    return rows


def correlations(lengths: Mapping[str, float]) -> str:
    """Correlations of the amounts of an example, in one line."""
    prefix = "correlation/"
    pairs = [f"{name.removeprefix(prefix)} {r:+.2f}" for name, r in lengths.items() if name.startswith(prefix)]
    return "Correlations of the amounts of an example: " + "; ".join(pairs)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(
            column, justify="left" if number < 2 and column in ("phase", "mode") else "right", no_wrap=True
        )
    for row in rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


# ---------------------------------------------------------------------------- what is compared


def compare_generated(ranks: int, per_rank: int, seed: int, before: Mode) -> Comparison:
    """A generated batch on the generator's own model."""
    samples, items = _generated(ranks * per_rank, seed)
    earlier, later = [make_spec(ranks, samples, mode, ranks_per_node=NODE) for mode in (before, AFTER)]
    title = f"Generated lengths, {ranks} ranks, {per_rank} examples a rank, seed {seed}"
    return Comparison(title, items, earlier, later)


def compare_config(
    path: str, overrides: Sequence[str], ranks: int | None, per_rank: int | None, seed: int | None, before: Mode
) -> Comparison:
    """A batch on the model, layouts and rows of a config.

    Args:
      ranks: data ranks, instead of the config's `data` and `fsdp` axes.
      per_rank: examples a rank, instead of `data.batch_size`.
      seed: of generated lengths; none: a batch that the run would draw.

    Raises one of `USER_ERRORS` of training/run.py.
    """
    import jax.numpy as jnp

    from jaxmllm.data.batches import batch_examples
    from jaxmllm.data.media.table import modalities, row_formats
    from jaxmllm.data.text.tokenizers import load_tokenizer
    from jaxmllm.models.mllm import build_model
    from jaxmllm.setup.prepare import lay_groundwork, planning_mesh, vocabulary
    from jaxmllm.setup.sizing import exchange_backend, exchange_grids, plan_spec, rank_places, sizing_inputs

    config = load_config(path, overrides)
    mesh = planning_mesh(config, ranks)
    ranks = mesh.shape["data"] * mesh.shape["fsdp"]
    examples = config.data.batch_size if per_rank is None else ranks * per_rank
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": examples})})
    by_mode = [
        config.model_copy(update={"balance": config.balance.model_copy(update={"mode": mode})})
        for mode in (before, AFTER)
    ]
    token_bytes = config.model.language.width * jnp.dtype(config.components.language.compute_dtype).itemsize
    what = f"{ranks} data ranks, {examples} examples a step"
    if seed is None:
        ground = lay_groundwork(config, mesh)
        items = ground.corpus.gather(batch_examples(ground.order, examples, len(ground.samples)))
        corpora = [ground.corpus, *ground.held_out]
        earlier, later = [plan_spec(each, ground.model, ground.samples, corpora) for each in by_mode]
        return Comparison(f"{Path(path).name}, {what}", items, earlier, later, token_bytes)

    model = build_model(
        config.model, vocabulary(config, load_tokenizer(config.data.tokenizer)), config.components, mesh
    )
    samples, items = _generated(examples, seed, config.model)
    largest = {phase: longest(phase, mix_for(config.model), config.model) for phase in items.phases}
    formats = row_formats(modalities(config.model, config.data, model.split_phases))
    needs = sizing_inputs(config, model, formats, largest)
    grids = exchange_grids(model)
    nodes, backend = rank_places(config, model), exchange_backend(config, model)
    earlier, later = [choose_sizes(samples, needs, grids, each.balance, nodes, backend) for each in by_mode]
    return Comparison(
        f"{Path(path).name} on generated lengths, {what}, seed {seed}", items, earlier, later, token_bytes
    )


def _generated(examples: int, seed: int, model: ModelConfig = MODEL) -> tuple[list[BatchItems], BatchItems]:
    """Batches to choose sizes from, and another one."""
    fewest, most = SAMPLED_BATCHES
    count = min(max(SAMPLED_EXAMPLES // examples, fewest), most)
    batches = [generate([seed, number], examples, mix_for(model), model) for number in range(count + 1)]
    return batches[:-1], batches[-1]


def main(command: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML file of a run; without it, the generator's own model")
    parser.add_argument("--generated", action="store_true", help="generated lengths instead of the config's data")
    parser.add_argument("--ranks", type=_positive, help=f"data ranks (default: those of the config, or {RANKS})")
    parser.add_argument("--per-rank", type=_positive, help=f"examples a rank (default: as the config, or {PER_RANK})")
    parser.add_argument("--before", choices=get_args(Mode), default="none", help="balance.mode to compare with")
    parser.add_argument("--seed", type=int, default=0, help="of generated lengths")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of balance.png and balance.html")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="replaces one value of the config")
    options = parser.parse_intermixed_args(command)
    if options.config is None and (not options.generated or options.overrides):
        parser.error("name a --config, or ask for --generated lengths without overrides")
    if options.before == AFTER:
        parser.error(f"--before {AFTER} is what is drawn on the other side")
    if options.config is None:
        compared = compare_generated(options.ranks or RANKS, options.per_rank or PER_RANK, options.seed, options.before)
    else:
        from jaxmllm.training.run import USER_ERRORS

        seed = options.seed if options.generated else None
        try:
            compared = compare_config(
                options.config, options.overrides, options.ranks, options.per_rank, seed, options.before
            )
        except USER_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report = write(compared, options.out)
    report.show()
    print(f"wrote {options.out / PICTURE} and {options.out / PAGE_FILE}")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
