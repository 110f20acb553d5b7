"""What commands print and write: tables, pictures, HTML pages and JSON records."""

from __future__ import annotations

import base64
import html
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Characters of a line of a table that is not printed on a terminal: a file has no width to fit into
WIDTH_OF_FILES = 160
COLOURS = 64  # of a picture: it takes a third of the bytes that all colours take

# ---------------------------------------------------------------------------- tables


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], left_aligned: int = 0
) -> None:
    """Print rows under their columns, the first `left_aligned` columns to the left, the others to
    the right."""
    # As text: in markup, [attention] would be a style
    table = Table(title=Text(title), title_justify="left")
    for index, column in enumerate(columns):
        words = index < left_aligned  # words may take several lines; numbers are never broken
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*(Text(_text(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], left_aligned: int = 0) -> str:
    """The table of `print_table` in HTML."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table class="left-{left_aligned}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _text(cell: Any) -> str:
    """Text of a cell: floats have three significant digits, None is a dash."""
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


# ---------------------------------------------------------------------------- pictures and pages

INK = "#222222"
FAINT = "#8A8A8A"
FIGURE_WIDTH = 15.5  # inches, at 100 dots each


def new_figure(height: float, head: float, **spacing: float) -> Figure:
    """A white figure of `height` inches whose topmost `head` inches are left free for words.

    `spacing`: `hspace` and `wspace` between panels.
    """
    figure = Figure(figsize=(FIGURE_WIDTH, height), layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.004, 0.004, 0.992, 1 - head / height), **spacing)  # type: ignore[call-arg]
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file of few colours."""
    drawn = BytesIO()
    small = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    image = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


@dataclass(frozen=True)
class Page:
    """An HTML page around a picture. `introduction` and `body` are HTML, the others are text."""

    title: str
    heading: str
    introduction: str
    picture: str  # text for those who do not see the picture
    body: str

    def html(self, image: bytes) -> str:
        """The page as one file, with the picture inside."""
        return PAGE.format(
            style=STYLE,
            title=html.escape(self.title),
            heading=html.escape(self.heading),
            introduction=self.introduction,
            picture=html.escape(self.picture),
            image=base64.b64encode(image).decode(),
            body=self.body,
        )


STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
img { width: 100%; height: auto; margin: 1.2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
.left-1 :is(th, td):nth-child(-n+1), .left-2 :is(th, td):nth-child(-n+2) { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; }"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{heading}</h1>
{introduction}
<div class="wide"><img alt="{picture}" src="data:image/png;base64,{image}"></div>
{body}
</body>
</html>
"""


def write_picture(folder: Path, name: str, figure: Figure, page: Page) -> str:
    """Write NAME.png and NAME.html into a folder; return a line that says so."""
    image = png(figure)
    picture = folder / f"{name}.png"
    document = folder / f"{name}.html"
    folder.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(image)
    document.write_text(page.html(image), encoding="utf-8")
    return f"wrote {picture} and {document}"


# ---------------------------------------------------------------------------- records


def write_json(
    path: Path | None, benchmark: str, seed: int, generator: str, **results: Any
) -> None:
    """Write one object with the results, the origin of the data, and the device and versions of the
    measurement.

    `generator` says in words how the data follow from the seed. Without a path nothing is written.
    """
    if path is None:
        return
    import jax

    versions = {"python": platform.python_version()} | {
        name: version(name) for name in ("jax", "jaxlib", "numpy")
    }
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
