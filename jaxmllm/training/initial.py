"""The first parameters of a run, by component: drawn at random, or taken from elsewhere.

model.from: RUN, CHECKPOINT or published FOLDER --parameters alone--> this run's shardings
model.vision.from: published FOLDER ------------- those of the tower -->

The optimizer's state and the step are not taken: they start as in any new run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

from jaxmllm.config.schema import PROJECTOR, Config, ModelConfig
from jaxmllm.families.by_type import components_of
from jaxmllm.families.folder_config import CONFIG_JSON, FolderConfig
from jaxmllm.families.model_folder import ModelFolder, is_model_folder
from jaxmllm.runtime.agreement import agreed_numbers
from jaxmllm.runtime.checkpoint import begun_averages, saved_steps
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
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.programs.base import Programs
from jaxmllm.training.step_functions import TrainState

CHECKPOINTS = "checkpoints"  # name of the folder of checkpoints in a run folder


def initial_state(
    config: Config, programs: Programs, say: Callable[[str], None] = print
) -> TrainState:
    """The state before the first step. Raises `CheckpointError` or `FolderError` if a source
    (`model.from`, `model.vision.from`, ..) does not fit this model."""
    state = programs.init(config.run.seed)
    abstract = programs.saved_state.params
    parameters = _read_sources(config.model, abstract, say)
    _warn_of_frozen(config, abstract.keys() - parameters.keys(), say)
    if not parameters:
        return state
    saved = programs.to_saved(state)
    saved = saved._replace(params=saved.params | parameters)
    if saved.averages is not None:
        # The averages in `state` are copies of parameters that were drawn at random.
        averages = begun_averages(saved.params, programs.saved_state.averages)
        saved = saved._replace(averages=averages)
    return programs.from_saved(saved)


def _read_sources(
    model: ModelConfig, abstract: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Parameters of the components for which `model.from` and the like name a source."""
    towers = model.tower_sources
    parameters = {}
    for name, folder in towers.items():
        parameters[name] = read_folder(folder, abstract[name], name)
        say(f"{_source_key(name, model)}: {name} from {folder}")
    if model.from_ is not None:
        parameters |= read_parameters(model.from_, abstract, say, towers)
    return parameters


def _warn_of_frozen(config: Config, drawn: Set[str], say: Callable[[str], None]) -> None:
    """Name the components whose parameters were drawn at random and stay as they are."""
    if frozen := sorted(name for name in drawn if config.components.of(name).freeze):
        say(
            f"warning: {', '.join(frozen)}: frozen, with parameters drawn at random; name a source in model.from or "
            "the like, or leave freeze out"
        )


def _source_key(name: str, model: ModelConfig) -> str:
    """The config key that says where a component is read from."""
    if name.startswith(PROJECTOR):
        return f"model.{model.generators[0]}.projector"
    return f"model.{name}.from"


def check_sources(model: ModelConfig) -> None:
    """Raise `CheckpointError` or `FolderError` unless `model.from` and the like name something to
    take parameters from."""
    for name, folder in model.tower_sources.items():
        ModelFolder.open(folder, name)
    source = model.from_
    if source is None:
        return
    if is_model_folder(source):
        ModelFolder.open(source)
    else:
        source_checkpoints(source)


def source_checkpoints(source: str) -> list[Path]:
    """Checkpoints that `model.from` may mean, the latest first. Raises `CheckpointError` if there
    are none."""
    folder = Path(source)
    if (folder / CHECKSUMS_FILE).exists():
        return [folder]
    inside = folder / CHECKPOINTS
    if locations := [inside / str(step) for step in reversed(saved_steps(inside))]:
        return locations
    raise CheckpointError(
        f"model.from: {source} is neither a run folder with a checkpoint nor a checkpoint (a folder with "
        f"{CHECKSUMS_FILE}) nor a published model (a folder with {CONFIG_JSON}); check the path"
    )


def read_parameters(
    source: str,
    abstract: Mapping[str, Any],
    say: Callable[[str], None] = print,
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Parameters of the components that both `source` (a run, checkpoint or published folder) and
    `abstract` have, except those that are read `elsewhere`.

    Components that only one side has are named, in a line for each side. Instead of a damaged
    checkpoint the one before it is read. Raises `CheckpointError` if shapes or dtypes differ, or if
    nothing usable is there, and `FolderError` if a published folder does not hold what it should.
    """
    abstract = {name: component for name, component in abstract.items() if name not in elsewhere}
    if is_model_folder(source):
        parameters = {
            name: read_folder(source, abstract[name], name)
            for name in _held_components(source, abstract)
        }
        _say_origins(source, parameters.keys(), abstract.keys(), say)
        return parameters
    problems = []
    # All processes go through the same locations, and agree on whether each is damaged.
    for location in _agreed_locations(source_checkpoints(source)):
        try:
            check_files(location)
            return _read_checkpoint(location, abstract, say, elsewhere)
        except DamagedError as error:
            problems.append(str(error))
            say(f"model.from: {error}; trying the one before")
    raise CheckpointError(f"model.from: no checkpoint of {source} is usable: {problems[0]}")


def _held_components(source: str, components: Collection[str]) -> list[str]:
    """The wanted components that a published folder has; a projector only with its tower."""
    held = components_of(FolderConfig.read(Path(source)))
    return [
        name for name in held if name in components and name.removeprefix(PROJECTOR) in components
    ]


def _read_checkpoint(
    location: Path,
    abstract: Mapping[str, Any],
    say: Callable[[str], None],
    elsewhere: Collection[str],
) -> dict[str, Any]:
    """Parameters of the components that a checkpoint and `abstract` both have."""
    # Only `params`: optimizer state, averages and counts are not taken over.
    saved = {path[1:]: spec for path, spec in saved_specs(location).items() if path[0] == "params"}
    saved_components = {path[0] for path in saved}
    if twice := sorted(saved_components & {*elsewhere}):
        raise CheckpointError(
            f"model.from: {location} has {', '.join(twice)}, which model.{twice[0]}.from reads from a published "
            f"folder; leave model.{twice[0]}.from out to go on with what was trained (the section stays)"
        )
    common = sorted(saved_components & abstract.keys())
    if not common:
        raise CheckpointError(
            f"model.from: {location} has the components {', '.join(sorted(saved_components))}, this model has "
            f"{', '.join(sorted(abstract))}: none in common"
        )
    common_specs = {name: abstract[name] for name in common}
    common_saved = {path: spec for path, spec in saved.items() if path[0] in common_specs}
    if unequal := list(differences(common_saved, array_specs(common_specs))):
        raise CheckpointError(
            f"model.from: {len(unequal)} arrays of {location} do not fit this model:\n{listed(unequal)}\n"
            "Give the model section the shapes (and run.param_dtype) of that run, or leave model.from out."
        )
    _say_origins(location, saved_components, abstract.keys(), say)
    if extra := sorted(saved_components - abstract.keys()):
        say(f"model.from: {', '.join(extra)} of {location} not in this model: left out")
    parameters: dict[str, Any] = read_arrays(location, {"params": common_specs})["params"]
    return parameters


def _say_origins(
    source: str | Path, held: Set[str], components: Set[str], say: Callable[[str], None]
) -> None:
    say(f"model.from: {', '.join(sorted(held & components))} from {source}")
    if missing := sorted(components - held):
        say(f"model.from: {', '.join(missing)} not in {source}: initialized at random")


def _agreed_locations(locations: list[Path]) -> list[Path]:
    """The locations that the main process sees: on a network file system, others may see fewer."""
    # A checkpoint that was given by its own path, and whose name is not a step
    if len(locations) == 1 and not locations[0].name.isdecimal():
        return locations
    parent = locations[0].parent
    seen = {int(location.name): location for location in locations}  # a copy may be called 0003
    steps = agreed_numbers(sorted(seen))
    return [seen.get(step, parent / str(step)) for step in reversed(steps)]
