"""What commands and benchmarks print and write: arguments, tables and the JSON record."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that already knows `--json` and `--seed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Right-aligned table; floats with three significant digits, None as a dash."""

    def text(cell: Any) -> str:
        if cell is None:
            return "-"
        return f"{cell:.3g}" if isinstance(cell, float) else str(cell)

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)  # a file has no width to fit into


def write_json(path: Path | None, benchmark: str, seed: int, generator: str, **results: Any) -> None:
    """Write one object with the results, what the data were made from, and on what they were measured.

    `generator` says in words how the data follow from the seed; without a path nothing is written.
    """
    if path is None:
        return
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    record = {
        "benchmark": benchmark,
        "seed": seed,
        "generator": generator,
        "versions": versions,
        "device": jax.devices()[0].device_kind,
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
