"""Published model folders in and out: parameters of a run as such a folder, and a folder compared with a reference.

    jaxmllm convert to-orbax FOLDER OUT               a checkpoint of the folder's decoder, for model.from
    jaxmllm convert to-hf RUN OUT [--source FOLDER]   the folder that RUN began from, with RUN's parameters: its keys,
                                                      types and split into files; all other files as they are;
                                                      adapters are merged into the matrices
    jaxmllm convert to-hf RUN OUT --adapters          RUN's adapters alone, as the peft library reads them
    jaxmllm convert verify FOLDER INPUTS.npz [--reference R.npz] [--gradients G.npz]
                                                      one JSON object: how far loss, logits and gradients are off

`model.from: FOLDER` in a run's config reads a folder without any of this. RUN is a run folder (its latest
checkpoint) or a checkpoint. docs/models.md has the families.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from numpy.typing import NDArray

from jaxmllm.config.schema import (
    ADAPTER,
    AdapterConfig,
    ComponentsConfig,
    ConfigError,
    LanguageConfig,
    ModelConfig,
)
from jaxmllm.families.adapter_files import write_adapter
from jaxmllm.families.model_folder import Fit, ModelFolder, is_model_folder
from jaxmllm.models.adapters import merged
from jaxmllm.models.mllm import build_model
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.checkpoint_files import (
    ArrayPath,
    ArraySpec,
    CheckpointError,
    check_files,
    read_arrays,
    saved_specs,
)
from jaxmllm.tools.output import command_parser
from jaxmllm.tools.prepared_inputs import PreparedRun, differences
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.initial import CHECKPOINTS, source_checkpoints
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.run_folder import config_of, read_config
from sharding.mesh import make_mesh


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        match options.action:
            case "to-orbax":
                to_orbax(options.folder, options.out, options.dtype)
            case "to-hf":
                write = to_adapters if options.adapters else to_folder
                write(options.run, options.out, options.source)
            case "verify":
                started = time.monotonic()
                run = PreparedRun.of(options.folder, options.inputs)
                found = differences(run, options.reference, options.gradients)
                print(json.dumps(found | {"seconds": round(time.monotonic() - started, 1)}))
    except (*USER_ERRORS, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def to_orbax(source: Path, out: Path, dtype: str) -> None:
    """Write the decoder of a folder as checkpoint 0 of OUT. Raises `ConfigError`, `CheckpointError`."""
    _check_new(out)
    folder = ModelFolder.open(source)
    shapes = folder.family.language(folder.config)
    config = ModelConfig(language=LanguageConfig.model_validate_json(json.dumps(shapes)))
    mesh = make_mesh({"data": 1, "fsdp": -1})
    model = build_model(config, shapes["vocab_size"], ComponentsConfig(), mesh)
    params = {LANGUAGE: read_folder(str(source), model.abstract(dtype)[LANGUAGE])}
    with Checkpoints(out / CHECKPOINTS, 1) as checkpoints:
        checkpoints.save(0, {"params": params})
    print(f"{folder.family.name}: {source} -> {out / CHECKPOINTS / '0'}")


def to_folder(run: Path, out: Path, source: Path | None = None) -> None:
    """Write the decoder of a run as the published folder that it began from, adapters merged into it.

    Raises `ConfigError`, `CheckpointError`.
    """
    _check_new(out)
    decoder = _SavedDecoder.of(run, source)
    draft = out.with_name(f"{out.name}.partial")
    left_out = decoder.fit.write(decoder.merged, draft)
    draft.rename(out)
    folder, location = decoder.fit.folder, decoder.location
    print(f"{folder.family.name}: {' + '.join(decoder.components)} of {location} -> {out}")
    if others := sorted({path[0] for path in decoder.saved} - {*decoder.components}):
        print(f"{', '.join(others)} of {location}: left out, {folder.path} has none")
    if left_out:
        print(
            f"{', '.join(left_out)} of {folder.path}: left out, they may hold the weights as they were"
        )


def to_adapters(run: Path, out: Path, source: Path | None = None) -> None:
    """Write the adapters of a run's decoder in the layout of the peft library.

    Raises:
      CheckpointError: the checkpoint is damaged.
      ConfigError: the run has none, or has changed more than they hold.
    """
    _check_new(out)
    decoder = _SavedDecoder.of(run, source)
    fit, adapter = decoder.fit, decoder.adapter
    if adapter is None:
        raise ConfigError(
            f"{run} has no {ADAPTER}{LANGUAGE} to write; leave out --adapters, or add model.adapters.language"
        )
    for path, shape in fit.shapes.items():
        own = decoder.values(LANGUAGE, path)
        whole = tuple(slice(0, size) for size in shape)
        if not np.array_equal(own, fit.part(path, whole, own.dtype), equal_nan=True):
            raise ConfigError(
                f"{LANGUAGE}.{path} of {decoder.location} is not what {fit.folder.path} has, and a folder of adapters "
                "holds nothing else; write the folder whole, without --adapters"
            )
    draft = out.with_name(f"{out.name}.partial")
    write_adapter(fit.folder, adapter, decoder.adapted, decoder.factors, draft)
    draft.rename(out)
    print(f"{fit.folder.family.name}: {ADAPTER}{LANGUAGE} of {decoder.location} -> {out}")


@dataclass(frozen=True)
class _SavedDecoder:
    """The decoder of a checkpoint, of which one parameter at a time is in memory."""

    location: Path  # of the checkpoint
    saved: Mapping[ArrayPath, ArraySpec]  # its parameters
    fit: Fit
    adapter: AdapterConfig | None

    @classmethod
    def of(cls, run: Path, source: Path | None) -> _SavedDecoder:
        """The latest one of a run. Raises `ConfigError`, `CheckpointError`."""
        folder = ModelFolder.open(source or _origin(run))
        location = source_checkpoints(str(run))[0]
        check_files(location)
        specs = saved_specs(location).items()
        saved = {path[1:]: spec for path, spec in specs if path[0] == "params"}
        shapes = {
            ".".join(path[1:]): shape for path, (shape, _) in saved.items() if path[0] == LANGUAGE
        }
        there = any(path[0] == f"{ADAPTER}{LANGUAGE}" for path in saved)
        adapter = _adapter_of(run) if there else None
        return cls(location, saved, folder.check(shapes), adapter)

    @property
    def components(self) -> tuple[str, ...]:
        """Those that the published decoder is made of."""
        return (LANGUAGE,) if self.adapter is None else (LANGUAGE, f"{ADAPTER}{LANGUAGE}")

    @cached_property
    def adapted(self) -> tuple[str, ...]:
        """Paths of the parameters that have an adapter."""
        paths = (path for path in self.saved if path[0] == f"{ADAPTER}{LANGUAGE}")
        return tuple(dict.fromkeys(".".join(path[1:-1]) for path in paths))

    def values(self, component: str, path: str) -> NDArray[Any]:
        """One parameter."""
        spec = self.saved[(component, *path.split("."))]
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        leaf = jax.ShapeDtypeStruct(*spec, sharding=sharding)
        wanted = {"params": {component: unflatten_dict({path: leaf}, sep=".")}}
        return np.asarray(jax.tree.leaves(read_arrays(self.location, wanted))[0])

    def factors(self, path: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Those of an adapted parameter."""
        component = f"{ADAPTER}{LANGUAGE}"
        return self.values(component, f"{path}.a"), self.values(component, f"{path}.b")

    def merged(self, path: str) -> NDArray[Any]:
        """One parameter, with its adapter added to it."""
        own = self.values(LANGUAGE, path)
        if self.adapter is None or path not in self.adapted:
            return own
        return merged(own, *self.factors(path), self.adapter.scale)


def _adapter_of(run: Path) -> AdapterConfig:
    """What the config of a run says of its decoder's adapter: a checkpoint does not hold alpha."""
    config = config_of(run)
    adapter = None if config is None else config.model.adapters.language
    if adapter is None:
        raise ConfigError(
            f"{run} has {ADAPTER}{LANGUAGE}, but no config.yaml that says its alpha; name the folder of the run"
        )
    return adapter


def _origin(run: Path) -> Path:
    """The published folder that a run, or a run before it, began from."""
    seen = [run]
    while True:
        config = read_config(seen[-1])
        source = config.model.from_ if config else None
        if source is None or Path(source) in seen:
            raise ConfigError(
                f"{seen[-1]} does not say which published folder its parameters began from; name one by --source"
            )
        if is_model_folder(source):
            return Path(source)
        seen.append(Path(source))


def _check_new(out: Path) -> None:
    for path in (out, out.with_name(f"{out.name}.partial")):
        if path.exists():
            raise ConfigError(f"{path} is there already; name a new folder, or remove it")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__, "jaxmllm convert")
    actions = parser.add_subparsers(dest="action", required=True)
    orbax = actions.add_parser("to-orbax", help="a published folder as a checkpoint")
    orbax.add_argument("folder", type=Path)
    orbax.add_argument("out", type=Path)
    orbax.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    published = actions.add_parser("to-hf", help="a run as the published folder it began from")
    published.add_argument("run", type=Path)
    published.add_argument("out", type=Path)
    published.add_argument("--source", type=Path, metavar="FOLDER", help="the published folder")
    published.add_argument(
        "--adapters", action="store_true", help="adapters alone, as the peft library reads them"
    )
    verify = actions.add_parser("verify", help="compare a folder's model with a reference")
    verify.add_argument("folder", type=Path)
    verify.add_argument("inputs", type=Path, metavar="INPUTS.npz")
    verify.add_argument("--reference", type=Path, metavar="R.npz", help="logits, valid, loss")
    verify.add_argument(
        "--gradients", type=Path, metavar="G.npz", help="gradients of the loss, by key"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
