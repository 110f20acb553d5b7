"""Draw what balancing does: load of every rank and padding of every row, before and after, in each
phase.

    jaxmllm report --config X [--generated] [--ranks R] [--per-rank b] [--out DIR] [key=value ...]
    jaxmllm report --generated [--ranks R] [--per-rank b] [--out DIR]

With a config the batch is one that its run would draw, or (`--generated`) one of
jaxmllm/tools/workload.py on the config's model, layouts and rows. Without a config, the generator's
own model is planned. Row sizes are chosen for each mode, from other batches. Nothing is decoded,
compiled or run. Writes balance.png and balance.html, and prints their tables.

    over ideal      FLOPs of the slowest rows with their padding / an equal share of the FLOPs of
                    the data
    gap to floor    costliest rank / max(mean rank, costliest item): 1 where no placement could do
                    better
    max/mean        costliest rank / mean rank
    synchronised    sum over microbatches of the costliest row / sum of means: ranks meet at every
                    microbatch
    rows            rows of a rank, each one microbatch
    real tokens     share of row slots that hold data
    idle            predicted share of rank time spent waiting: 1 - 1 / synchronised
    rows by span    rows of a rank, by how many ranks hold a row together
    gathered MB     keys and values that all ranks receive for shared rows in a forward pass

And for the exchange of encoder outputs: MB routed, the shares that change rank and node, the latter
also relative to ranks assigned at random, and the slots sent from rank to rank, padding included,
relative to the tokens that have to move.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from jaxmllm.balance.records import Mode
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.command_line import add_config, parse
from jaxmllm.families.resolved import load_run_config
from jaxmllm.tools.arguments import command_parser, new_folder, positive_int, seed_int
from jaxmllm.tools.balance_comparison import (
    AFTER,
    PER_RANK,
    RANKS,
    Comparison,
    compare_generated,
    compare_on_data,
    compare_on_generated,
)
from jaxmllm.tools.balance_drawing import MODE_WORDS, draw
from jaxmllm.tools.balance_figures import (
    COLUMNS,
    LENGTH_COLUMNS,
    ROUTE_COLUMNS,
    PhaseView,
    Views,
    correlations,
    lengths_table,
    route_figures,
    route_table,
    step_time,
    table,
    view,
)
from jaxmllm.tools.output import Page, html_table, print_table, write_picture
from jaxmllm.tools.workload import describe

NAME = "balance"  # of the files of the picture and the page
GLOSSARY = {
    "over ideal": "FLOPs of the slowest rows with their padding / an equal share of the FLOPs of the data: the time "
    "that a step takes over what it could",
    "gap to floor": "costliest rank / max(mean rank, costliest item); 1 where no placement could do better",
    "max/mean": "costliest rank / mean rank",
    "synchronised": "sum over microbatches of the costliest row / sum of means, because ranks meet at every microbatch",
    "rows": "rows per rank; each is one microbatch",
    "rows by span": "the same by how many ranks hold a row together: 2 of 8 are two rows that 8 ranks share",
    "gathered MB": "keys and values of all layers that all ranks receive for shared rows in a forward pass",
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
        """Predicted time of a step before balancing, over its time after."""
        before, after = map(step_time, self.views.values())
        return before / after

    def show(self) -> None:
        """Print the tables."""
        before, after = self.views
        lengths = lengths_table(self.lengths, self.views[after])
        print_table(f"{self.title}: lengths", LENGTH_COLUMNS, lengths, left_aligned=1)
        print(correlations(self.lengths) + "\n")
        print_table("Balance", COLUMNS, table(self.views), left_aligned=2)
        print_table(
            "Exchange of encoder outputs", ROUTE_COLUMNS, route_table(self.routes), left_aligned=1
        )
        print(
            f"predicted: a step takes {self.ratio:.2f} times as long with mode {before} as with {after}"
        )

    def page(self) -> Page:
        """The page around the picture."""
        before, after = self.views
        glossary = "".join(
            f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in GLOSSARY.items()
        )
        sections = (
            "<h2>Figures</h2>",
            html_table(COLUMNS, table(self.views), left_aligned=2),
            f"<dl>{glossary}</dl>",
            "<h2>Exchange of encoder outputs</h2>",
            html_table(ROUTE_COLUMNS, route_table(self.routes), left_aligned=1),
            "<h2>Lengths of this batch</h2>",
            html_table(
                LENGTH_COLUMNS, lengths_table(self.lengths, self.views[after]), left_aligned=1
            ),
            f"<p>{html.escape(correlations(self.lengths))}</p>",
        )
        return Page(
            title=self.title,
            heading="Load and padding of every rank",
            introduction=f"<p>{html.escape(self.title)}. Predicted: a step takes <b>{self.ratio:.2f}</b> times as long "
            f"before ({MODE_WORDS[before]}) as after ({MODE_WORDS[after]}).</p>",
            picture="Load of every rank and fill of its rows, by phase, before and after",
            body="\n".join(sections),
        )


def make_report(compared: Comparison) -> Report:
    """Plan the batch in both modes, and collect the figures of both plans."""
    views: dict[str, dict[str, PhaseView]] = {}
    routes: dict[str, dict[str, float]] = {}
    for spec in (compared.before, compared.after):
        plan = plan_step(compared.items, spec)
        views[spec.mode] = view(plan, compared.items, spec, compared.key_value_bytes)
        routes[spec.mode] = route_figures(plan, compared.token_bytes)
    return Report(compared.title, views, routes, describe(compared.items))


def write(report: Report, folder: Path) -> str:
    """Write balance.png and balance.html into a folder; return a line that says so."""
    return write_picture(
        folder, NAME, draw(report.views, report.title, report.routes), report.page()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm report")
    add_config(parser, required=False)
    parser.add_argument(
        "--generated",
        action="store_true",
        help="use generated lengths instead of the config's data",
    )
    parser.add_argument(
        "--ranks",
        type=positive_int,
        help=f"number of data ranks (default: as in the config, else {RANKS})",
    )
    parser.add_argument(
        "--per-rank",
        type=positive_int,
        help=f"examples per rank (default: as in the config, else {PER_RANK})",
    )
    parser.add_argument(
        "--before",
        choices=get_args(Mode),
        default="none",
        help="balance.mode to compare with (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed_int, default=0, help="seed of the generated lengths")
    parser.add_argument(
        "--out",
        type=new_folder,
        default=Path(),
        help="folder to write balance.png and balance.html into",
    )
    options = parse(parser, arguments)
    if options.config is None and (not options.generated or options.overrides):
        parser.error("name a --config, or ask for --generated lengths without overrides")
    if options.before == AFTER:
        parser.error(f"--before {AFTER} is what is drawn on the other side")

    from jaxmllm.training.run import USER_ERRORS

    try:
        report = make_report(_compare(options))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wrote = write(report, options.out)
    report.show()
    print(wrote)
    return 0


def _compare(options: argparse.Namespace) -> Comparison:
    if options.config is None:
        return compare_generated(
            options.ranks or RANKS, options.per_rank or PER_RANK, options.seed, options.before
        )
    config = load_run_config(options.config, options.overrides)
    name = Path(options.config).name
    if options.generated:
        return compare_on_generated(
            config, name, options.ranks, options.per_rank, options.seed, options.before
        )
    return compare_on_data(config, name, options.ranks, options.per_rank, options.before)
