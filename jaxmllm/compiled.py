"""Loops compiled by numba: plain Python over arrays, as fast as C.

A function is compiled when it is first called with arrays of certain types, which takes seconds,
and kept on disk next to its module or in the user's cache directory. It is compiled again only when
that module changes, not when an imported one does. So compiled functions call only functions of
their own module, or the module holds a digest of what they use from another
(attention/kernel_cpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from numba import cfunc, njit

F = TypeVar("F", bound=Callable[..., object])

# Floats may be added in any order, so that loops become vector instructions; NaN and infinity keep
# their meaning.
ANY_ORDER = {"contract", "reassoc", "nsz", "arcp"}


def compiled(function: F) -> F:
    """Compile `function` with numba. It may use numbers, arrays and tuples of them, and call other
    compiled functions."""
    return _compile(njit, function)


def compiled_leaf(function: F) -> F:
    """Compile a function that makes no arrays and is called many times in a loop.

    It does not count references to its array arguments (`_nrt`, an undocumented option of numba):
    counting is atomic, and takes longer than a short function.
    """
    return _compile(njit, function, _nrt=False)


def compiled_sums(function: F) -> F:
    """Compile a function that may add floats in any order, though in the same one in every call."""
    return _compile(njit, function, fastmath=ANY_ORDER, error_model="numpy")


def compiled_callback(signature: Any, function: Callable[..., Any]) -> int:
    """Address of `function` compiled as a C function, with a signature in numba's types. It is
    never freed."""
    callback: Any = _compile(partial(cfunc, signature), function)
    _callbacks.append(callback)
    address: int = callback.address
    return address


_callbacks: list[Any] = []


def _compile(compiler: Callable[..., Any], function: F, **options: Any) -> F:
    try:
        return cast(F, compiler(cache=True, **options)(function))
    except RuntimeError:  # numba found no folder for its cache
        return cast(F, compiler(**options)(function))
