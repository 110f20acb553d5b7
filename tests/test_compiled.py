"""Loops are compiled by numba, with or without a folder to keep the result in."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from numba import types

from jaxmllm import compiled as module
from jaxmllm.compiled import compiled, compiled_callback, compiled_leaf, compiled_sums


def add_up(numbers) -> int:
    total = 0
    for value in numbers:
        total += value
    return total


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(module, "njit", no_directory(module.njit))
    for decorator in (compiled, compiled_leaf, compiled_sums):
        function = decorator(add_up)
        assert function(np.arange(5)) == 10 and function.signatures


def test_a_callback_is_a_function_of_c(monkeypatch):
    def doubled(number):
        return 2 * number

    callbacks = len(module._callbacks)
    for _ in range(2):
        address = compiled_callback(types.intp(types.intp), doubled)
        assert ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(address)(21) == 42
        # The second round has no folder to keep the result in
        monkeypatch.setattr(module, "cfunc", no_directory(module.cfunc))
    assert len(module._callbacks) == callbacks + 2


def no_directory(compiler):
    """A compiler that finds no folder for its cache, as in an installation that is read-only."""

    def refuses_to_keep(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiler(*arguments, **options)

    return refuses_to_keep


def test_a_leaf_leaves_the_references_to_its_arrays_alone():
    leaf = compiled_leaf(add_up)

    @compiled
    def add_up_twice(numbers):
        return leaf(numbers) + leaf(numbers[:2])

    numbers = np.arange(5)
    references = sys.getrefcount(numbers)
    assert add_up_twice(numbers) == 11
    assert sys.getrefcount(numbers) == references
