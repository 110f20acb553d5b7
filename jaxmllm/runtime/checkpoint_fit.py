"""Whether a checkpoint fits the model: differences by array, and the optimizer states and averages
that can be taken over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmllm.runtime.checkpoint_files import ArrayPath, ArraySpec, CheckpointError, array_specs

SHOWN = 5  # most differences listed in an error, before "and n more"


class Changing(NamedTuple):
    """Words for messages about a field of a state, in which components may appear or disappear."""

    what: str
    begins: str
    dropped: str


# By name of a field of the state
BY_COMPONENT = {
    "optimizer": Changing("optimizer state", "at zero", "the components are frozen"),
    "averages": Changing("running average", "at the parameters", "the components have no ema"),
}
Components = dict[str, list[str]]  # names of components, by field of `BY_COMPONENT`


def with_trained_components(
    fields: dict[str, Any], saved: Mapping[ArrayPath, ArraySpec], location: Path
) -> tuple[dict[str, Any], Components, Components]:
    """Compare a state with a saved one: (fields to read from the checkpoint, components that are
    not in it, components that only it has), the last two by field.

    Raises `CheckpointError` if any other arrays differ.
    """
    fresh: Components = {}
    unused: Components = {}
    target = {name: value for name, value in fields.items() if value is not None}
    for field in BY_COMPONENT.keys() & fields.keys():
        abstract_fields = {} if fields[field] is None else fields[field]
        # Without components there is nothing to leave out; the arrays are compared below.
        if not isinstance(abstract_fields, dict):
            continue
        saved_names = {path[1] for path in saved if path[0] == field and len(path) > 1}
        fresh[field] = sorted(abstract_fields.keys() - saved_names)
        unused[field] = sorted(saved_names - abstract_fields.keys())
        target[field] = {
            name: abstract_fields[name] for name in abstract_fields if name in saved_names
        }
        if not target[field]:
            del target[field]
    # All other arrays, parameters included, must be the same on both sides.
    left_out = {
        (field, name)
        for of_field in (fresh, unused)
        for field, names in of_field.items()
        for name in names
    }

    def comparable(specs: Mapping[ArrayPath, ArraySpec]) -> dict[ArrayPath, ArraySpec]:
        return {path: spec for path, spec in specs.items() if path[:2] not in left_out}

    if unequal := list(differences(comparable(saved), comparable(array_specs(fields)))):
        raise CheckpointError(_mismatch_text(location, unequal))
    return target, fresh, unused


def differences(
    saved: Mapping[ArrayPath, ArraySpec], expected: Mapping[ArrayPath, ArraySpec]
) -> Iterator[str]:
    """Yield a line for each array that one side lacks or has with another shape or dtype."""
    for path in sorted(saved.keys() | expected.keys()):
        saved_spec = saved.get(path)
        model_spec = expected.get(path)
        if saved_spec != model_spec:
            yield f"{'.'.join(path)}: saved {_spec_text(saved_spec)}, this model has {_spec_text(model_spec)}"


def _spec_text(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{list(spec[0])}"


def _mismatch_text(location: Path, unequal: list[str]) -> str:
    difference = f"{len(unequal)} array{'s differ' if len(unequal) > 1 else ' differs'}"
    return (
        f"checkpoint {location} does not fit the model of this config ({difference}):\n{listed(unequal)}\n"
        "Resume with the model and components sections that the run began with, or set run.directory to a new folder "
        "to begin a new run."
    )


def listed(lines: list[str]) -> str:
    """The first lines, indented, and a count of those that are not shown."""
    unshown = len(lines) - SHOWN
    shown = lines[:SHOWN] + ([f"... and {unshown} more"] if unshown > 0 else [])
    return "\n".join(f"  {line}" for line in shown)
