"""Findings of one process, shared with all, so that all continue or all end for the same reason."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxmllm.runtime import hosts


def agreed_problem(problem: str | None) -> str | None:
    """The problem of the first process that has one; None if none has. All processes call it."""
    return next((text for text in hosts.tell_all(problem or "") if text), None)


def agreed_numbers(numbers: Sequence[int]) -> list[int]:
    """The main process's numbers, on all processes. All processes call it."""
    answers = hosts.tell_all(json.dumps([int(value) for value in numbers]))
    return [int(value) for value in json.loads(answers[0])]
