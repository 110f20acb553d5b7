"""Does a checkpoint fit the model? Differences by array, and what of an optimizer's state can be taken over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmllm.runtime.checkpoint_files import ArrayPath, ArraySpec, CheckpointError, array_specs

SHOWN = 5  # differences listed in an error before "and n more"


def with_trained_components(
    fields: dict[str, Any], saved: Mapping[ArrayPath, ArraySpec], location: Path
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(what to read of a checkpoint, components whose optimizer state is not in it, those it has besides)."""
    optimizer = fields.get("optimizer")
    if not isinstance(optimizer, dict):
        optimizer = {}
    there = (
        {path[1] for path in saved if path[0] == "optimizer" and len(path) > 1}
        if optimizer
        else set()
    )
    fresh = sorted(optimizer.keys() - there)
    unused = sorted(there - optimizer.keys())
    left_out = {("optimizer", name) for name in (*fresh, *unused)}

    def comparable(specs: Mapping[ArrayPath, ArraySpec]) -> dict[ArrayPath, ArraySpec]:
        return {path: spec for path, spec in specs.items() if path[:2] not in left_out}

    if unequal := list(differences(comparable(saved), comparable(array_specs(fields)))):
        raise CheckpointError(_mismatch(location, unequal))
    if not left_out:
        return fields, [], []
    kept = {name: state for name, state in optimizer.items() if name not in fresh}
    remaining = {name: value for name, value in fields.items() if name != "optimizer"}
    return remaining | ({"optimizer": kept} if kept else {}), fresh, unused


def differences(
    saved: Mapping[ArrayPath, ArraySpec], expected: Mapping[ArrayPath, ArraySpec]
) -> Iterator[str]:
    """A line for each array that one side lacks, or has in another shape or dtype."""
    for path in sorted(saved.keys() | expected.keys()):
        left = saved.get(path)
        right = expected.get(path)
        if left != right:
            yield f"{'.'.join(path)}: saved {_spec_text(left)}, this model has {_spec_text(right)}"


def _spec_text(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{list(spec[0])}"


def _mismatch(location: Path, unequal: list[str]) -> str:
    count = f"{len(unequal)} array{'s differ' if len(unequal) > 1 else ' differs'}"
    return (
        f"checkpoint {location} does not fit the model of this config ({count}):\n{listed(unequal)}\n"
        "Resume with the model and components sections that the run began with, or set run.directory to a new folder "
        "to begin a new run."
    )


def listed(lines: list[str]) -> str:
    """Some lines, indented, with a count of those that are not shown."""
    rest = len(lines) - SHOWN
    shown = lines[:SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
    return "\n".join(f"  {line}" for line in shown)
