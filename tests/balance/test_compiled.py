"""Loops are compiled wherever the package is installed."""

from __future__ import annotations

import sys

import numpy as np

from jaxmllm.balance import compiled as module
from jaxmllm.balance.compiled import compiled, compiled_leaf


def add_up(numbers) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch):
    njit = module.njit

    def no_directory(function=None, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **options) if function else njit(**options)

    monkeypatch.setattr(module, "njit", no_directory)
    for decorator in (compiled, compiled_leaf):
        function = decorator(add_up)
        assert function(np.arange(5)) == 10 and function.signatures


def test_a_leaf_leaves_the_references_to_its_arrays_alone():
    leaf = compiled_leaf(add_up)

    @compiled
    def add_up_twice(numbers):
        return leaf(numbers) + leaf(numbers[:2])

    numbers = np.arange(5)
    before = sys.getrefcount(numbers)
    assert add_up_twice(numbers) == 11
    assert sys.getrefcount(numbers) == before
