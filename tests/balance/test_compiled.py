"""Loops are compiled wherever the package is installed."""

from __future__ import annotations

import numpy as np

from jaxmllm.balance import compiled as module
from jaxmllm.balance.compiled import compiled


def add_up(numbers) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch):
    njit = module.njit

    def no_directory(function=None, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function)

    monkeypatch.setattr(module, "njit", no_directory)
    function = compiled(add_up)
    assert function(np.arange(5)) == 10 and function.signatures
