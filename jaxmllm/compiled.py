"""Loops compiled by numba: plain Python over arrays, as fast as C.

A function is compiled when it is first called with arrays of some types, which takes seconds, and
kept on disk next to its module or in the user's cache directory. It is compiled again only when
that module changes, not when one that it imports does: so compiled functions call only those of
their own module, or the module has a mark of what they take from another (attention/kernel_cpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from numba import cfunc, njit

F = TypeVar("F", bound=Callable[..., object])

# Floats are added in any order, so that loops become vector instructions; NaN and infinity keep their meaning.
ANY_ORDER = {"contract", "reassoc", "nsz", "arcp"}


def compiled(function: F) -> F:
    """`function` compiled by numba: it may use numbers, arrays and tuples of them, and call others
    like it."""
    return _compile(njit, function)


def compiled_leaf(function: F) -> F:
    """The same of a function that makes no array, for those that run many times in a loop.

    It does not count references to the arrays it is given (`_nrt`, an option of numba that its
    documentation leaves out): counting is atomic, and takes longer than a short function does.
    """
    return _compile(njit, function, _nrt=False)


def compiled_sums(function: F) -> F:
    """The same as `compiled` of a function over floats, which it may add in any order, always the same."""
    return _compile(njit, function, fastmath=ANY_ORDER, error_model="numpy")


def compiled_callback(signature: Any, function: Callable[..., Any]) -> int:
    """The address of `function` as one of C, of a signature in numba's types; it stays for good."""
    callback: Any = _compile(partial(cfunc, signature), function)
    _callbacks.append(callback)
    address: int = callback.address
    return address


_callbacks: list[Any] = []


def _compile(compiler: Callable[..., Any], function: F, **options: Any) -> F:
    try:
        return cast(F, compiler(cache=True, **options)(function))
    except RuntimeError:  # no directory to keep it in
        return cast(F, compiler(**options)(function))
