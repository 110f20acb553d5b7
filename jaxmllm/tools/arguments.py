"""Parsers of commands, and types of arguments, which refuse at once what would otherwise fail at
the end."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

MOST = 1 << 20  # the largest count of anything, as of data.batch_size


def command_parser(description: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help shows a docstring as it is written; `name` is what users type."""
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring_parser(description: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """A `command_parser` for commands that measure, which also knows `--json` and `--seed`."""
    parser = command_parser(description, name)
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="PATH",
        help="also write the results to this file, as one JSON object",
    )
    parser.add_argument("--seed", type=seed_int, default=0)
    return parser


def positive_int(text: str) -> int:
    """Parse a count of something: 1 or more."""
    return _whole_number(text, 1, MOST)


def seed_int(text: str) -> int:
    """Parse a seed of random numbers, within the bounds of `run.seed`."""
    return _whole_number(text, 0, (1 << 63) - 1)


def _whole_number(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def new_folder(text: str) -> Path:
    """Parse a folder to write into. Neither it nor those above it need exist, and it is not made
    yet, unlike by `check_writable` of training/run_folder.py, which makes it to try it out."""
    path = Path(text)
    above = path
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{above} is not a folder; name another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{above} may not be written into; name another path")
    return path


def new_file(text: str) -> Path:
    """Parse a file to write or overwrite, which may be like a file only, such as /dev/stdout.
    Folders above it need not exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.exists():
        new_folder(str(path.parent))
    elif not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} may not be written; name another path")
    return path
