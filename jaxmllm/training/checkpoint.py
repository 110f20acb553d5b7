"""Checkpoints of a run: complete or absent, and readable on any mesh.

    state (pytree of sharded arrays) --save--> checkpoints/<step>  --restore(abstract state)--> state on this mesh

Arrays are stored whole, whatever their sharding, so the devices, mesh and processes that read a checkpoint need
not be those that wrote it. A checkpoint is written under a temporary name and renamed when its last byte is on
disk: a process killed at any time leaves complete ones behind, and a draft that the next one's first save sweeps
away. All processes call every function here, except `write_config`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmllm.config import Config, dump_config, load_config
from jaxmllm.training.files import write_atomically

CONFIG_FILE = "config.yaml"
SHOWN = 5  # differences listed in an error before "and n more"

# Batches and losses are a function of (config without these keys, step): what may change on resume. Each pattern
# covers the key it matches and everything below it.
FREE_KEYS = (
    "run.directory",
    "run.steps",
    "model.language.loss_chunk",
    "components.*.remat",
    "components.*.attention",
    "components.*.layout",
    "data.root",
    "data.evaluation",
    "data.index_cache",
    "data.workers",
    "data.prefetch",
    "data.max_rejected",
    "data.max_failed_media",
    "optimizer.max_skipped",
    "phases",
    "balance",
    "mesh",
    "pipeline",
    "evaluation",
    "checkpoint",
    "logging",
    "profile",
)

REPLICA_SLICE_BYTES = 64 << 20

ArraySpec = tuple[tuple[int, ...], str]


class CheckpointError(RuntimeError):
    """A checkpoint or run folder that cannot be continued from; the message says what differs and what to do."""


class Checkpoints:
    """The checkpoints in one folder, the `keep` latest of them.

    Saving is asynchronous: `save` returns once the arrays are copied to the host, so the caller may donate them.
    An error while writing is raised by the next `save`, `wait` or `close`.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        _write_small_arrays_whole()
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest_step(self) -> int | None:
        """The last checkpoint's step, be it one that is still being written here; none in a new folder."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> bool:
        """Begin to write `state`, a pytree of arrays, as checkpoint `step`; False if that one exists already."""
        if step in self._manager.all_steps():
            return False
        return bool(self._manager.save(step, args=ocp.args.StandardSave(state), force=True))

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Read checkpoint `step` (default: the latest) into the structure of `abstract_state`.

        Its leaves are `jax.ShapeDtypeStruct`s with the shardings that the arrays shall have, or arrays. Raises
        `CheckpointError` if there is no such checkpoint or if paths, shapes or dtypes differ from those saved.
        """
        self.wait()
        steps = self.steps
        step = self.latest_step if step is None else step
        if step not in steps:
            wanted = "a checkpoint" if step is None else f"checkpoint {step}"
            raise CheckpointError(
                f"{self.directory} does not hold {wanted} (steps there: {steps or 'none'}); "
                "check run.directory, or start without --resume"
            )
        location = self.directory / str(step)
        try:
            saved = self._manager.item_metadata(step)
            if saved is None:
                raise ValueError("its metadata is missing")
            differences = list(_differences(_array_specs(saved.tree), _array_specs(abstract_state)))
            if differences:
                raise CheckpointError(_mismatch(location, differences))
            target = jax.tree.map(_abstract, abstract_state)
            return self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except (OSError, ValueError, KeyError) as error:
            earlier = [number for number in steps if number < step]
            fallback = f"step {earlier[-1]}" if earlier else "the beginning"
            raise CheckpointError(
                f"checkpoint {location} cannot be read: {error}; delete that folder to resume from {fallback}"
            ) from error

    def wait(self) -> None:
        """Block until every save that was begun is complete on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, then release threads."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------------------- does the checkpoint fit the model


def _write_small_arrays_whole() -> None:
    """Replicas share the writing of an array by slicing it, which compiles a program for every shape and device:
    worth it for large arrays alone."""
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES)
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns of any handler that replaces its own
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    absl.logging.set_verbosity(verbosity)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _array_specs(tree: Any) -> dict[str, ArraySpec]:
    """Shape and dtype by dotted path; a namedtuple's field and a dict's key read alike, as they are stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(map(_key_name, path)): (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves}


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a state may hold dicts, tuples, lists and namedtuples, not {key!r}")


def _differences(saved: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec]) -> Iterator[str]:
    for path in sorted(saved.keys() | expected.keys()):
        left, right = saved.get(path), expected.get(path)
        if left != right:
            yield f"{path}: saved {_spec_text(left)}, this model has {_spec_text(right)}"


def _spec_text(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{list(spec[0])}"


def _mismatch(location: Path, differences: list[str]) -> str:
    count = f"{len(differences)} array{'s differ' if len(differences) > 1 else ' differs'}"
    return (
        f"checkpoint {location} does not fit the model of this config ({count}):\n{_listed(differences)}\n"
        "Resume with the model, components and optimizer sections that the run began with, or set run.directory "
        "to a new folder to begin a new run."
    )


def _listed(lines: list[str]) -> str:
    rest = len(lines) - SHOWN
    shown = lines[:SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
    return "\n".join(f"  {line}" for line in shown)


# ---------------------------------------------------------------------------- does the config fit the run


def write_config(run_directory: str | Path, config: Config) -> None:
    """Store the resolved config as config.yaml of the run folder; one process calls this."""
    write_atomically(Path(run_directory) / CONFIG_FILE, dump_config(config))


def read_config(run_directory: str | Path) -> Config | None:
    """The config that the run in this folder began with; None if nothing began there. Raises `ConfigError`."""
    path = Path(run_directory) / CONFIG_FILE
    return load_config(path) if path.exists() else None


def check_compatible(saved: Config, current: Config) -> None:
    """Raise `CheckpointError` unless a run begun with `saved` may go on with `current`.

    Everything that batches and losses depend on must be equal; `FREE_KEYS` may differ.
    """
    left, right = dict(_dotted(saved.model_dump(mode="json"))), dict(_dotted(current.model_dump(mode="json")))
    differences = [
        f"{key}: {_value_text(left, key)} in the run, {_value_text(right, key)} now"
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key) and not _is_free(key)
    ]
    if differences:
        raise CheckpointError(
            f"the run in {current.run.directory} cannot be resumed with this config, its steps would differ:\n"
            f"{_listed(differences)}\n"
            "Set these keys back, or set run.directory to a new folder to begin a new run. If the change is meant "
            f"(data that has moved, say), make it in {Path(current.run.directory) / CONFIG_FILE} too."
        )


def _is_free(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*") for pattern in FREE_KEYS)


def _value_text(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def _dotted(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts and lists by dotted key; an empty container is a leaf."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from _dotted(child, f"{prefix}.{name}" if prefix else str(name))
    if not isinstance(node, dict | list) or not node:
        yield prefix, node
