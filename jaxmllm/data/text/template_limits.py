"""Limits of rendering one conversation: passes of loops, characters, digits, time.

Where a small template can ask for a large value, its size is checked before the value is made.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateRuntimeError

WIDTH = 9_999  # largest number for the width of a field, an indent or a batch
# A width above that, or given by an argument, in a format string
_WIDE_FIELD = re.compile(r"\d{5}|\*")


@dataclass(frozen=True)
class Limits:
    """The limits of one rendering. Published templates take a few steps per message."""

    steps: int = 1_000_000  # passes of loops and calls of macros
    characters: int = 1 << 25  # of the output, and of each intermediate value
    bits: int = 1 << 16  # of a whole number
    seconds: float = 60.0


class LimitError(TemplateRuntimeError):
    """A template that exceeds one of the `Limits`; the message says which."""


class Budget:
    """The steps and time that one rendering has used so far. `marked`: whether it marks the text of
    the model."""

    def __init__(self, limits: Limits, marked: bool = False):
        self.limits = limits
        self.marked = marked
        self.steps = 0
        self.deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.limits.steps:
            raise LimitError(f"takes more than {self.limits.steps} passes of its loops")
        if time.monotonic() > self.deadline:
            raise LimitError(f"takes more than {self.limits.seconds:g} s")


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("budget", default=None)


@contextmanager
def limited(limits: Limits, marked: bool) -> Iterator[Budget]:
    """Give the rendering inside the context a budget of its own, in this thread alone."""
    budget = Budget(limits, marked)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def current_budget() -> Budget:
    """The budget of the current rendering. Outside of one, while jinja2 computes constants, an
    unused budget."""
    return _budget.get() or Budget(Limits())


def check_size(value: Any) -> Any:
    """Return `value`. Raises `LimitError` if it is too large."""
    if isinstance(value, str | list | tuple):
        check_length(len(value))
    if isinstance(value, int):
        _check_bits(value.bit_length())
    return value


def check_length(length: int) -> None:
    """Raise `LimitError` for more characters or list entries than a value may have."""
    if length > (limit := current_budget().limits.characters):
        raise LimitError(f"writes more than {limit} characters")


def check_product(operator: str, left: Any, right: Any) -> None:
    """Raise `LimitError` if `left * right` or `left ** right` would be too large."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            check_length(len(sequence) * times)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def check_format(text: Any) -> None:
    """Raise `LimitError` if a format string has too wide fields; called before it is used."""
    if isinstance(text, str) and _WIDE_FIELD.search(text):
        raise LimitError(f"formats fields of more than {WIDTH} characters")


def check_growth(name: str, arguments: tuple[Any, ...]) -> None:
    """Raise `LimitError` if a text function that repeats one of its arguments would write too much;
    called before it runs.

    Args:
      name: name of the function, a method of text or a filter.
      arguments: its arguments; the first is the text or list that it is applied to.
    """
    match name, arguments:
        case "replace", (str() as text, str() as old, str() as new, *_):
            check_length(len(text) + text.count(old) * len(new))
        case "join", (list() | tuple() | str() as first, list() | tuple() | str() as second, *_):
            check_length(len(first) * len(second))
        case "indent", (str() as text, int() | str() as width, *_):
            size = width if isinstance(width, int) else len(width)
            check_length(len(text) + (text.count("\n") + 1) * size)


def _check_bits(bits: int) -> None:
    if bits > (limit := current_budget().limits.bits):
        raise LimitError(f"counts beyond {limit} bits")
