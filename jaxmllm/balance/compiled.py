"""Loops of the planner, compiled: plain Python over integer arrays, as fast as C.

A function is compiled when it is first called with arrays of some types, which takes seconds, and kept on disk beside
its module or in the user's cache directory. What is kept counts until that module changes, whatever becomes of others:
so compiled functions call those of their own module alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function` compiled by numba. It and what it calls may use numbers, arrays, and tuples of them."""
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # no directory to keep it in
        return cast(F, njit(function))
