"""The latest parameters of a run: those of its latest usable checkpoint, with running averages in
place of those that are averaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxmllm.runtime.checkpoint import saved_steps
from jaxmllm.runtime.checkpoint_files import (
    CheckpointError,
    DamagedError,
    check_files,
    read_arrays,
    saved_specs,
)
from jaxmllm.trainable import Params, Trainable, join
from jaxmllm.training.initial import CHECKPOINTS


def saved_parameters(
    run: Path, abstract: Params, say: Callable[[str], None] = print
) -> tuple[Params, int]:
    """Parameters of the shapes, types and shardings of `abstract`, and the steps after which they
    were saved.

    Instead of a damaged checkpoint the one before it is read, and a line says so. Raises
    `CheckpointError` if none is usable.
    """
    folder = (run / CHECKPOINTS).absolute()
    steps = saved_steps(folder)
    if not steps:
        raise CheckpointError(
            f"{run} holds no checkpoint: train it further, or set checkpoint.every so that some are saved on the way"
        )
    problem = ""
    for step in reversed(steps):
        try:
            return _read_checkpoint(folder / str(step), abstract, say), step
        except DamagedError as error:
            # If several checkpoints are damaged, the error names the problem of the latest.
            problem = problem or str(error)
            say(f"{error}; trying the one before")
    raise CheckpointError(f"no checkpoint of {run} is usable: {problem}")


def _read_checkpoint(location: Path, abstract: Params, say: Callable[[str], None]) -> Params:
    check_files(location)
    paths = [path[1:] for path in saved_specs(location) if path[0] == "averages"]
    averaged = Trainable(frozenset(".".join(path) for path in paths), {})
    averages, unaveraged = averaged.split(abstract)
    names = ", ".join(sorted(averages))
    say(f"weights of {location}{f', averaged: {names}' if names else ''}")
    abstract_by_field = {"params": unaveraged, "averages": averages}
    arrays = read_arrays(location, {name: tree for name, tree in abstract_by_field.items() if tree})
    return join(arrays.get("averages", {}), arrays.get("params", {}))
