"""Convert published model folders to checkpoints and runs to such folders, and compare a folder's
model with a reference.

    jaxmllm convert to-orbax FOLDER OUT               write the folder's model as a checkpoint, for
                                                      model.from
    jaxmllm convert to-hf RUN OUT [--source FOLDER]   write the folder that RUN began from, with
                                                      RUN's parameters: same keys, types and split
                                                      into files; files without weights are
                                                      copied; adapters are merged into the matrices
        --component vision                            the same for a tower or generator that RUN
                                                      began from, or for a projector, whose folder
                                                      has a config of its own
        --adapters                                    write only RUN's adapters of the decoder, as
                                                      the peft library reads them
    jaxmllm convert verify FOLDER INPUTS.npz [--reference R.npz] [--gradients G.npz]
                                                      print one JSON object: how far loss, logits
                                                      and gradients are off

A run reads a folder without conversion, by `model.from: FOLDER` in its config. RUN is a run folder
(its latest checkpoint) or a checkpoint. docs/models.md lists the families.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from numpy.typing import NDArray

from jaxmllm.config.schema import (
    ADAPTER,
    PROJECTOR,
    AdapterConfig,
    ComponentsConfig,
    ConfigError,
    ModelConfig,
    ProjectorShapes,
)
from jaxmllm.families.adapter_files import write_adapter
from jaxmllm.families.by_type import components_of
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import ModelFolder, is_model_folder, write_folder
from jaxmllm.families.projector_folder import write_projector
from jaxmllm.families.resolved import GENERATOR, TOWERS, resolved
from jaxmllm.models.adapters import merged
from jaxmllm.models.compose import build_model
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.checkpoint import Checkpoints, state_bytes
from jaxmllm.runtime.checkpoint_files import (
    ArrayPath,
    ArraySpec,
    CheckpointError,
    check_files,
    read_arrays,
    saved_specs,
)
from jaxmllm.tools.arguments import command_parser
from jaxmllm.tools.prepared_inputs import PreparedRun, differences
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.initial import CHECKPOINTS, source_checkpoints
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.run_folder import config_of
from sharding.mesh import make_mesh

PROJECTORS = tuple(f"{PROJECTOR}{phase}" for phase in (*TOWERS, LANGUAGE))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        match options.action:
            case "to-orbax":
                to_orbax(options.folder, options.out, options.dtype)
            case "to-hf":
                _to_hf(options)
            case "verify":
                started = time.monotonic()
                run = PreparedRun.of(options.folder, options.inputs)
                report = differences(run, options.reference, options.gradients)
                print(json.dumps(report | {"seconds": round(time.monotonic() - started, 1)}))
    except (*USER_ERRORS, CheckpointError, OSError) as error:  # OSError: a full disk
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _to_hf(options: argparse.Namespace) -> None:
    run = options.run
    out = options.out
    source = options.source
    component = options.component
    if options.adapters:
        to_adapters(run, out, source, component)
    elif component not in PROJECTORS:
        to_folder(run, out, source, component)
    elif source is not None:
        raise ConfigError("--source: a projector has no published folder; leave it out")
    else:
        projector_folder(run, out, component)


def to_orbax(
    source: Path, out: Path, dtype: str, devices: Sequence[jax.Device] | None = None
) -> None:
    """Write the components of a published folder as checkpoint 0 of `out`.

    Raises `ConfigError`, `CheckpointError`.

    Args:
      devices: devices to split the parameters over while they are read; all, if not given.
    """
    _check_new(out)
    folder = ModelFolder.open(source)
    shapes = resolved({"model": {"from": str(source)}})["model"]
    config = ModelConfig.model_validate_json(json.dumps(shapes))
    mesh = make_mesh({"data": 1, "fsdp": -1}, devices)
    model = build_model(config, shapes[LANGUAGE]["vocab_size"], ComponentsConfig(), mesh)
    with jax.enable_x64(dtype == "float64"):  # otherwise arrays would be float32
        abstract = model.abstract(dtype)
        params = {name: read_folder(str(source), abstract[name], name) for name in abstract}
        with Checkpoints(out / CHECKPOINTS, 1, state_bytes(params)) as checkpoints:
            checkpoints.save(0, {"params": params})
    print(f"{folder.family.name}: {source} -> {out / CHECKPOINTS / '0'}")


def to_folder(run: Path, out: Path, source: Path | None = None, component: str = LANGUAGE) -> None:
    """Write the decoder, a tower or the generator of a run as the published folder that it began
    from, with adapters merged in. Other components that began from a decoder's or generator's
    folder are written with it.

    Raises `ConfigError`, `CheckpointError`.
    """
    _check_new(out)
    folder = ModelFolder.open(source or _origin(run, component), component)
    saved = SavedComponent.of(run, component)
    beside = _beside(run, folder, saved)
    saved_components = [saved, *(saved.other(run, name) for name in beside)]
    fits = [folder.of(written.component).check(written.shapes) for written in saved_components]
    draft = _draft_folder(out)
    left_out = write_folder(
        [(fit, written.merged) for fit, written in zip(fits, saved_components, strict=True)], draft
    )
    draft.rename(out)
    names = [name for written in saved_components for name in written.names]
    print(f"{folder.family.name}: {' + '.join(names)} of {saved.location} -> {out}")
    in_folder = components_of(folder.config)
    for dropped, why in (
        (sorted(saved.components - {*names, *in_folder}), f"{folder.path} has none"),
        (sorted(saved.components & {*in_folder} - {*names}), f"{folder.path} keeps its own"),
    ):
        if dropped:
            print(f"{', '.join(dropped)} of {saved.location}: left out, {why}")
    if left_out:
        print(
            f"{', '.join(left_out)} of {folder.path}: left out, they may hold the weights as they were"
        )


def projector_folder(run: Path, out: Path, component: str) -> None:
    """Write a projector of a run as a folder of config.json and model.safetensors (docs/models.md).

    Raises `ConfigError`, `CheckpointError`.
    """
    _check_new(out)
    config = config_of(run)
    saved = SavedComponent.of(run, component)
    if config is None:
        raise ConfigError(
            f"{run} is no run folder, whose config says what {component} is; name one"
        )
    group, shapes = _projector_shapes(config.model, component.removeprefix(PROJECTOR))
    values = {path: saved.values(path) for path in saved.shapes}
    vision = config.model.vision if component == f"{PROJECTOR}vision" else None
    draft = _draft_folder(out)
    write_projector(draft, values, group, shapes, vision.deepstack_layers if vision else ())
    draft.rename(out)
    print(f"{component} of {saved.location} -> {out}")


def _projector_shapes(model: ModelConfig, phase: str) -> tuple[int, ProjectorShapes]:
    """How many neighbouring features a projector joins into a token, and its `ProjectorShapes`."""
    if phase == LANGUAGE:
        assert model.diffusion is not None
        return 1, model.diffusion.projector_shapes
    tower = getattr(model, phase)
    return tower.merge**2 if phase == "vision" else tower.merge, tower.projector


def to_adapters(
    run: Path, out: Path, source: Path | None = None, component: str = LANGUAGE
) -> None:
    """Write the adapters of a run's decoder in the layout of the peft library.

    Raises:
      CheckpointError: the checkpoint is damaged.
      ConfigError: the run has no adapters, or has changed parameters that they do not hold.
    """
    _check_new(out)
    if component != LANGUAGE:
        raise ConfigError(
            f"--component {component}: the peft library reads adapters of decoders; leave out --adapters, and they "
            "are merged"
        )
    folder = ModelFolder.open(source or _origin(run, component), component)
    saved = SavedComponent.of(run, component)
    if saved.adapter is None:
        raise ConfigError(
            f"{run} has no {ADAPTER}{LANGUAGE} to write; leave out --adapters, or add model.adapters.language"
        )
    for original in (saved, *(saved.other(run, name) for name in _beside(run, folder, saved))):
        _check_unchanged(folder, original)
    draft = _draft_folder(out)
    write_adapter(folder, saved.adapter, saved.adapted, saved.factors, draft)
    draft.rename(out)
    print(f"{folder.family.name}: {ADAPTER}{LANGUAGE} of {saved.location} -> {out}")


def _check_unchanged(folder: ModelFolder, saved: SavedComponent) -> None:
    """Raise `ConfigError` for a component that differs from a published folder by more than
    adapters of the decoder."""
    if saved.adapter is not None and saved.component != LANGUAGE:
        raise ConfigError(
            f"{ADAPTER}{saved.component} of {saved.location}: the peft library reads adapters of decoders; write the "
            "folder whole, without --adapters"
        )
    fit = folder.of(saved.component).check(saved.shapes)
    for path in fit.shapes:
        values = saved.values(path)
        if not np.array_equal(values, fit.whole(path, values.dtype), equal_nan=True):
            raise ConfigError(
                f"{saved.component}.{path} of {saved.location} is not what {folder.path} has, and a folder of adapters "
                "holds nothing else; write the folder whole, without --adapters"
            )


@dataclass(frozen=True)
class SavedComponent:
    """One component of a checkpoint with its adapter, if any; parameters are read one at a time."""

    location: Path
    component: str
    parameters: Mapping[ArrayPath, ArraySpec]  # of all components
    adapter: AdapterConfig | None

    @classmethod
    def of(cls, run: Path, component: str) -> SavedComponent:
        """Find a component in the latest checkpoint of a run, or in a checkpoint.

        Raises `CheckpointError` if there is no checkpoint or it lacks the component, `ConfigError`
        if its adapter's alpha is unknown.
        """
        location = source_checkpoints(str(run))[0]
        check_files(location)
        specs = saved_specs(location).items()
        parameters = {path[1:]: spec for path, spec in specs if path[0] == "params"}
        present = {path[0] for path in parameters}
        if component not in present:
            raise CheckpointError(
                f"{location} has no {component}; it has {', '.join(sorted(present))}"
            )
        adapter = _adapter_of(run, component) if f"{ADAPTER}{component}" in present else None
        return cls(location, component, parameters, adapter)

    def other(self, run: Path, component: str) -> SavedComponent:
        """Another component of the same checkpoint. Raises `ConfigError` if its adapter's alpha is
        unknown."""
        named = f"{ADAPTER}{component}" in self.components
        return replace(
            self, component=component, adapter=_adapter_of(run, component) if named else None
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the component and, if it has one, its adapter."""
        adapter = f"{ADAPTER}{self.component}"
        return (self.component,) if self.adapter is None else (self.component, adapter)

    @property
    def components(self) -> frozenset[str]:
        """Names of all components of the checkpoint."""
        return frozenset(path[0] for path in self.parameters)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the component's parameters by path, without its adapter's."""
        of_component = (item for item in self.parameters.items() if item[0][0] == self.component)
        return {".".join(path[1:]): shape for path, (shape, _) in of_component}

    @cached_property
    def adapted(self) -> tuple[str, ...]:
        """Paths of the parameters that have an adapter."""
        paths = (path for path in self.parameters if path[0] == f"{ADAPTER}{self.component}")
        return tuple(dict.fromkeys(".".join(path[1:-1]) for path in paths))

    def values(self, path: str) -> NDArray[Any]:
        """One parameter, without its adapter."""
        return self._read(self.component, path)

    def factors(self, path: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """The matrices `a` and `b` of the adapter of a parameter."""
        adapter = f"{ADAPTER}{self.component}"
        return self._read(adapter, f"{path}.a"), self._read(adapter, f"{path}.b")

    def merged(self, path: str) -> NDArray[Any]:
        """One parameter, with its adapter added to it."""
        values = self.values(path)
        if self.adapter is None or path not in self.adapted:
            return values
        return merged(values, *self.factors(path), self.adapter.scale)

    def _read(self, component: str, path: str) -> NDArray[Any]:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        spec = self.parameters[(component, *path.split("."))]
        leaf = jax.ShapeDtypeStruct(*spec, sharding=sharding)
        leaves = {"params": {component: unflatten_dict({path: leaf}, sep=".")}}
        with jax.enable_x64(True):  # otherwise float64 is read as float32
            return np.asarray(jax.tree.leaves(read_arrays(self.location, leaves))[0])


def _adapter_of(run: Path, component: str) -> AdapterConfig:
    """The adapter's section of a run's config, which is needed because a checkpoint does not hold
    alpha. Raises `ConfigError` if there is none."""
    config = config_of(run)
    adapter = None if config is None else config.model.adapters.by_component.get(component)
    if adapter is None:
        raise ConfigError(
            f"{run} has {ADAPTER}{component}, but no config.yaml that says its alpha; name the folder of the run"
        )
    return adapter


def _origin(run: Path, component: str) -> Path:
    """The published folder that a component of a run, or of a run before it, began from."""
    for model in _model_configs(run):
        if component in model.tower_sources:
            return Path(model.tower_sources[component])
        if model.from_ and is_model_folder(model.from_) and _has_component(model.from_, component):
            return Path(model.from_)
    raise ConfigError(
        f"{run} (with the runs before it) does not say which published folder its parameters of {component} began "
        "from; name one by --source"
    )


def _model_configs(run: Path) -> Iterator[ModelConfig]:
    """Yield the model configs of a run, or of a checkpoint's run, and of the runs that it began
    from, latest first."""
    seen: list[Path] = []
    while run not in seen and not is_model_folder(run):
        try:
            config = config_of(run)
        except CheckpointError:
            if not seen:
                raise
            return  # --source names what an earlier run cannot say
        if config is None:
            return
        seen.append(run)
        yield config.model
        run = Path(config.model.from_ or run)


def _has_component(folder: str, component: str) -> bool:
    """Whether a published folder has a component."""
    return component in components_of(FolderConfig.read(Path(folder)))


def _beside(run: Path, folder: ModelFolder, saved: SavedComponent) -> list[str]:
    """Other components of a run that are written into the folder of its decoder or generator. A
    projector goes with its tower; the generator's projector is written if it was read from
    there."""
    elsewhere = {name for model in _model_configs(run) for name in model.tower_sources}
    if saved.component == GENERATOR:
        return [name for name in (f"{PROJECTOR}{LANGUAGE}",) if name in elsewhere]
    if saved.component != LANGUAGE:
        return []
    return [
        name
        for name in components_of(folder.config)
        if name != LANGUAGE
        and name in saved.components
        and name.removeprefix(PROJECTOR) not in elsewhere
    ]


def _check_new(out: Path) -> None:
    for path in (out, _draft_folder(out)):
        if path.exists():
            raise ConfigError(f"{path} is there already; name a new folder, or remove it")


def _draft_folder(out: Path) -> Path:
    """The folder that is written first, and renamed once it is complete."""
    return out.parent / f"{out.name}.partial"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__, "jaxmllm convert")
    actions = parser.add_subparsers(dest="action", required=True)
    orbax = actions.add_parser("to-orbax", help="write a published folder as a checkpoint")
    orbax.add_argument("folder", type=Path)
    orbax.add_argument("out", type=Path)
    orbax.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    published = actions.add_parser("to-hf", help="write a run as a published folder")
    published.add_argument("run", type=Path)
    published.add_argument("out", type=Path)
    published.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="published folder that the run began from (default: as in its config)",
    )
    components = (LANGUAGE, *TOWERS, GENERATOR, *PROJECTORS)
    published.add_argument("--component", default=LANGUAGE, choices=components)
    published.add_argument(
        "--adapters",
        action="store_true",
        help="write adapters alone, as the peft library reads them",
    )
    verify = actions.add_parser("verify", help="compare a folder's model with a reference")
    verify.add_argument("folder", type=Path)
    verify.add_argument("inputs", type=Path, metavar="INPUTS.npz")
    verify.add_argument(
        "--reference",
        type=Path,
        metavar="R.npz",
        help="file of reference results: logits, valid, loss",
    )
    verify.add_argument(
        "--gradients",
        type=Path,
        metavar="G.npz",
        help="file of reference gradients of the loss, by key",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
