"""Loops of the planner, compiled: plain Python over integer arrays, as fast as C.

A function is compiled when it is first called with arrays of some types, which takes seconds, and
kept on disk next to its module or in the user's cache directory. It is compiled again only when
that module changes, not when one that it imports does: so compiled functions call only those of
their own module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function` compiled by numba: it may use numbers, arrays and tuples of them, and call others
    like it."""
    return _compile(function)


def compiled_leaf(function: F) -> F:
    """The same of a function that makes no array, for those that run many times in a loop.

    It does not count references to the arrays it is given (`_nrt`, an option of numba that its
    documentation leaves out): counting is atomic, and takes longer than a short function does.
    """
    return _compile(function, _nrt=False)


def _compile(function: F, **options: Any) -> F:
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # no directory to keep it in
        return cast(F, njit(**options)(function))
