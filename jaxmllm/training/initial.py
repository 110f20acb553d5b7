"""Where the parameters of a run that begins come from: drawn at random, or taken from another run, by component.

model.from: RUN or CHECKPOINT --parameters alone--> this run's shardings; optimizer and step begin anew
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmllm.config.schema import Config
from jaxmllm.runtime.agreement import agreed_numbers
from jaxmllm.runtime.checkpoint import saved_steps
from jaxmllm.runtime.checkpoint_files import (
    CHECKSUMS_FILE,
    CheckpointError,
    DamagedError,
    array_specs,
    check_files,
    read_arrays,
    saved_specs,
)
from jaxmllm.runtime.checkpoint_fit import differences, listed
from jaxmllm.training.programs.base import Programs
from jaxmllm.training.step_functions import TrainState

CHECKPOINTS = "checkpoints"  # folder of them inside a run folder


def initial_state(
    config: Config, programs: Programs, say: Callable[[str], None] = print
) -> TrainState:
    """The state before the first step. Raises `CheckpointError` if `model.from` does not fit this model."""
    state = programs.init(config.run.seed)
    if config.model.from_ is None:
        return state
    saved = programs.to_saved(state)
    taken = read_parameters(config.model.from_, programs.saved_state.params, say)
    return programs.from_saved(saved._replace(params=saved.params | taken))


def source_checkpoints(source: str) -> list[Path]:
    """Checkpoints that `model.from` may mean, the latest first. Raises `CheckpointError` if there are none."""
    folder = Path(source)
    if (folder / CHECKSUMS_FILE).exists():
        return [folder]
    inside = folder / CHECKPOINTS
    if locations := [inside / str(step) for step in reversed(saved_steps(inside))]:
        return locations
    raise CheckpointError(
        f"model.from: {source} is neither a run folder with a checkpoint nor a checkpoint (a folder with "
        f"{CHECKSUMS_FILE}); check the path"
    )


def read_parameters(
    source: str, abstract: Mapping[str, Any], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Parameters of those components of a run or checkpoint that `abstract` (by component) has, too.

    The others are named, in a line for each side. A damaged checkpoint gives way to the one before
    it. Raises `CheckpointError` if shapes or dtypes differ, or nothing usable is there.
    """
    problems = []
    for location in _agreed(source_checkpoints(source)):
        try:
            check_files(location)
            return _read(location, abstract, say)
        except DamagedError as error:
            problems.append(str(error))
            say(f"model.from: {error}; trying the one before")
    raise CheckpointError(f"model.from: no checkpoint of {source} is usable: {problems[0]}")


def _read(
    location: Path, abstract: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    saved = {path[1:]: spec for path, spec in saved_specs(location).items() if path[0] == "params"}
    there = {path[0] for path in saved}
    common = sorted(there & abstract.keys())
    if not common:
        raise CheckpointError(
            f"model.from: {location} has the components {', '.join(sorted(there))}, this model has "
            f"{', '.join(sorted(abstract))}: none in common"
        )
    wanted = {name: abstract[name] for name in common}
    kept = {path: spec for path, spec in saved.items() if path[0] in wanted}
    if unequal := list(differences(kept, array_specs(wanted))):
        raise CheckpointError(
            f"model.from: {len(unequal)} arrays of {location} do not fit this model:\n{listed(unequal)}\n"
            "Give the model section the shapes (and run.param_dtype) of that run, or leave model.from out."
        )
    say(f"model.from: {', '.join(common)} from {location}")
    if missing := sorted(abstract.keys() - there):
        say(f"model.from: {', '.join(missing)} not in {location}: initialized at random")
    if extra := sorted(there - abstract.keys()):
        say(f"model.from: {', '.join(extra)} of {location} not in this model: left out")
    parameters: dict[str, Any] = read_arrays(location, {"params": wanted})["params"]
    return parameters


def _agreed(locations: list[Path]) -> list[Path]:
    """Those that the main process sees: a network file system need not show all processes the same."""
    if len(locations) == 1 and not locations[0].name.isdecimal():
        return locations
    parent = locations[0].parent
    steps = agreed_numbers(sorted(int(location.name) for location in locations))
    return [parent / str(step) for step in reversed(steps)]
