"""Arguments of commands that read a config: `--config`, and overrides with and without `--set`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

OVERRIDE = "dotted.key=value"


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Give a parser `--config FILE` and overrides, which `parse` reads."""
    parser.add_argument(
        "--config", required=required, help="YAML file of a run; see configs/ for examples"
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Give a parser the overrides alone, for commands that find their config elsewhere."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar=OVERRIDE,
        help="replace values of the file; applied before overrides without --set",
    )
    parser.add_argument("overrides", nargs="*", metavar=OVERRIDE, help="replace values of the file")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a command line of `add_config` or `add_overrides`; `overrides` of the result holds all
    overrides in the order given, those of --set first.

    Overrides may come before, between and after the flags.
    """
    options = parser.parse_intermixed_args(arguments)
    options.overrides = [*options.set, *options.overrides]
    return options
