"""Checkpoints of a run: complete or absent, checked before they are believed, readable on any mesh.

    state (pytree of sharded arrays) --save--> checkpoints/<step>  --restore(abstract state)--> state on this mesh

Arrays are stored whole, whatever their sharding, so the devices, mesh and processes that read a checkpoint need
not be those that wrote it. A checkpoint is written under a temporary name and renamed when its last byte is on
disk: a process killed at any time leaves complete ones behind, and a draft that the next one's first save sweeps
away. The last thing written before the renaming is `checksums.json`, size and CRC-32 of every file; a checkpoint is
read only after all of them were found to be as written. All processes call every function here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxmllm.runtime.agreement import agreed_numbers, agreed_problem

CHECKSUMS_FILE = "checksums.json"
UNSEALED = ("_CHECKPOINT_METADATA", CHECKSUMS_FILE)  # orbax stamps the former once more at the end; nothing reads it
DRAFT = "orbax-checkpoint-tmp"  # in the name of a folder that is being written
DELETED = ".deleted"  # end of the name of a folder that is being deleted
DAMAGED = ".damaged"  # end of the name of a folder that was found damaged and put aside
SHOWN = 5  # differences listed in an error before "and n more"
LONGEST_REASON = 300  # characters of another library's message that are quoted
REPLICA_SLICE_BYTES = 64 << 20
READ_BYTES = 16 << 20  # of a file that are summed at a time
READ_THREADS = 8  # CRC-32 releases the interpreter lock

ArrayPath = tuple[str, ...]  # of an array in a state
ArraySpec = tuple[tuple[int, ...], str]


class CheckpointError(RuntimeError):
    """A checkpoint or run folder that cannot be continued from; the message says what differs and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written."""


class Checkpoints:
    """The checkpoints in one folder, the `keep` latest sound ones.

    A checkpoint is sound unless `save` was told otherwise. One that is not is kept beside the sound ones as long as it
    is the newest, and never counts for `keep`. Saving is asynchronous: `save` returns once the arrays are copied to
    the host, so the caller may donate them. An error while writing is raised by the next `save`, `wait` or `close`.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        _write_small_arrays_whole()
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._handler = _SealedHandler()
        self._writer = ocp.AsyncCheckpointer(self._handler)
        # Asked of the disk once: processes that look at a network file system later may see different things.
        self._taken = set(self.steps)
        self._writing: int | None = None
        self._swept = False

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return saved_steps(self.directory)

    @property
    def latest_step(self) -> int | None:
        """The last checkpoint's step, be it one that is still being written here; none in a new folder."""
        return max(self._taken, default=None)

    def save(self, step: int, state: Any, sound: bool = True) -> bool:
        """Begin to write `state`, a pytree of arrays, as checkpoint `step`; False if that one exists already."""
        if step in self._taken:
            return False
        self.wait()
        self._taken.add(step)
        self._writing = step
        self._handler.sound = sound  # read when this save is complete, which the next one waits for
        with self._explained():
            if _is_main():
                self._sweep()
            self._writer.save(self.directory / str(step), args=_SealedSave(state))
        return True

    def restore(self, abstract_state: Any, step: int | None = None, say: Callable[[str], None] = print) -> Any:
        """Read checkpoint `step` (default: the latest) into the structure of `abstract_state`.

        Its leaves are `jax.ShapeDtypeStruct`s with the shardings that the arrays shall have, or arrays. Where the
        optimizer holds other components than when the checkpoint was written, those that are new begin at zero, and
        the others' states are left out. Raises `DamagedError` if its files are not what was written, and
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
        check_files(location)
        fields = _fields(abstract_state)
        target, fresh, unused = _with_trained_components(fields, saved_specs(location), location)
        if fresh:
            say(f"optimizer state of {', '.join(fresh)}: begins at zero from step {step}")
        if unused:
            say(f"optimizer state of {', '.join(unused)}: dropped from step {step}, the components are frozen")
        state = read_arrays(location, target)
        if fresh:
            begun = _zeros({name: fields["optimizer"][name] for name in fresh})
            state["optimizer"] = dict(sorted((state.get("optimizer", {}) | begun).items()))
        return state if isinstance(abstract_state, dict) else type(abstract_state)(**state)

    def restore_latest(self, abstract_state: Any, say: Callable[[str], None] = print) -> tuple[Any, int] | None:
        """(state, step) of the latest usable checkpoint; none in a new folder.

        Damaged ones before it are named in a line each and put aside, as `<step>.damaged`, so that their steps can be
        saved anew. Raises `DamagedError` if there are checkpoints and none is usable.
        """
        self.wait()
        damaged: list[tuple[int, str]] = []
        for step in reversed(agreed_numbers(self.steps)):
            try:
                state = self.restore(abstract_state, step, say)
            except DamagedError as error:
                damaged.append((step, str(error)))
                continue
            for number, problem in damaged:
                say(f"{problem}; put aside as {number}{DAMAGED}, continuing from checkpoint {step}")
                self._put_aside(number)
            return state, step
        if damaged:
            raise DamagedError(
                f"none of the {len(damaged)} checkpoints in {self.directory} is usable: {damaged[0][1]}; restore that "
                "folder from a copy, or set run.directory to a new folder to begin anew"
            )
        return None

    def wait(self) -> None:
        """Block until every save that was begun is complete on disk. Raises `CheckpointError` if one is not."""
        with self._explained():
            self._writer.wait_until_finished()
            self._writing = None
            if _is_main():
                self._prune()

    def close(self) -> None:
        """Wait, then release threads."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            print(f"error: {late}")  # besides the error that ends the run, and not in its place

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever the writer raises becomes one line: full disks and vanished folders come as many exceptions."""
        try:
            with _quiet():
                yield
        except CheckpointError:
            raise
        except Exception as error:
            step, self._writing = self._writing, None
            complete = [number for number in self.steps if number != step]
            latest = f"the latest complete one is {complete[-1]}" if complete else "there is no complete one"
            raise CheckpointError(
                f"checkpoint {step} cannot be written to {self.directory}: {_reason(error)}; {latest}: make room or "
                "mend the folder, then --resume"
            ) from error

    def _sweep(self) -> None:
        """Remove what killed processes left half written or half deleted."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            for entry in self.directory.iterdir():
                if DRAFT in entry.name or entry.name.endswith(DELETED):
                    shutil.rmtree(entry)
        self._swept = True

    def _prune(self) -> None:
        """Delete checkpoints that need not be kept, each absent before its first file is."""
        steps = self.steps
        sound = [step for step in steps if is_sound(self.directory / str(step))]
        for step in set(steps) - {*sound[-self.keep :], *steps[-1:]}:
            doomed = self.directory / f"{step}{DELETED}"
            (self.directory / str(step)).rename(doomed)
            shutil.rmtree(doomed)

    def _put_aside(self, step: int) -> None:
        self._taken.discard(step)
        if _is_main():
            aside = self.directory / f"{step}{DAMAGED}"
            shutil.rmtree(aside, ignore_errors=True)
            (self.directory / str(step)).rename(aside)


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; none where there is no folder."""
    try:
        return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())
    except FileNotFoundError:
        return []


def state_bytes(abstract_state: Any) -> int:
    """Bytes of all arrays of a state."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(abstract_state))


def check_space(directory: Path, needed: int) -> None:
    """Raise `CheckpointError` unless `needed` bytes are free where `directory` (which may not exist yet) lies."""
    place = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{directory} has {free / 2**30:.2f} GiB free, but a checkpoint of this model takes {needed / 2**30:.2f} "
            "GiB: make room, or set run.directory to a larger disk"
        )


# ---------------------------------------------------------------------------- checksums


class _SealedHandler(ocp.StandardCheckpointHandler):
    """Writes the checksums of a checkpoint as the last of its files, before orbax gives it its name."""

    sound = True

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        folder = Path(directory)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNSEALED]
        with ThreadPoolExecutor(READ_THREADS) as threads:
            sums = list(threads.map(_checksum, files))
        content = {
            "sound": self.sound,
            "files": {path.relative_to(folder).as_posix(): both for path, both in zip(files, sums, strict=True)},
        }
        (folder / CHECKSUMS_FILE).write_text(json.dumps(content, indent=0), encoding="utf-8")


@ocp.args.register_with_handler(_SealedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SealedSave(ocp.args.StandardSave):
    """Says to orbax that `_SealedHandler` writes this."""


def check_files(location: Path) -> None:
    """Raise `DamagedError` unless every file of a checkpoint is what was written; processes share the work."""
    if problem := agreed_problem(_damage(location, jax.process_index(), jax.process_count())):
        raise DamagedError(f"checkpoint {location} is damaged: {problem}")


def is_sound(location: Path) -> bool:
    """Whether a checkpoint was saved as a sound one, as far as its files still tell."""
    try:
        return bool(_checksums(location)["sound"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _damage(location: Path, first: int, step: int) -> str | None:
    """What is wrong with every `step`-th file from the `first` on; none: nothing."""
    try:
        files = dict(_checksums(location)["files"])
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS_FILE} cannot be read ({_reason(error)})"
    names = sorted(files)[first::step]
    with ThreadPoolExecutor(READ_THREADS) as threads:
        problems = threads.map(lambda name: _file_damage(location, name, files[name]), names)
        return next((problem for problem in problems if problem), None)


def _file_damage(location: Path, name: str, expected: Sequence[int]) -> str | None:
    try:
        size, checksum = _checksum(location / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read ({_reason(error)})"
    if [size, checksum] == list(expected):
        return None
    if size != expected[0]:
        return f"{name} has {size} bytes, {expected[0]} were written"
    return f"{name} does not hold what was written (checksum {checksum:08x}, not {expected[1]:08x})"


def _checksums(location: Path) -> dict[str, Any]:
    content = json.loads((location / CHECKSUMS_FILE).read_text(encoding="utf-8"))
    return dict(content)


def _checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum


# ---------------------------------------------------------------------------- reading


def read_arrays(location: Path, abstract: Any) -> Any:
    """The arrays of a checkpoint that `abstract` names, with the shardings given there.

    Raises `DamagedError` if they cannot be read, in one line.
    """
    target = jax.tree.map(_abstract, abstract)
    problem, arrays = None, None
    try:
        with _quiet():
            arguments = ocp.checkpoint_utils.construct_restore_args(target)
            arguments = ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
            arrays = ocp.PyTreeCheckpointHandler().restore(location, args=arguments)
    except Exception as error:  # a damaged file can fail anywhere in orbax, tensorstore and JSON
        problem = _reason(error)
    if problem := agreed_problem(problem):
        raise DamagedError(f"checkpoint {location} cannot be read: {problem}")
    return arrays


def saved_specs(location: Path) -> dict[ArrayPath, ArraySpec]:
    """Shape and dtype of the arrays of a checkpoint by path. Raises `DamagedError`."""
    problem, specs = None, {}
    try:
        with _quiet():
            metadata = ocp.PyTreeCheckpointHandler().metadata(location)
        specs = array_specs(metadata.tree)
    except Exception as error:  # as in `read_arrays`
        problem = _reason(error)
    if problem := agreed_problem(problem):
        raise DamagedError(f"checkpoint {location} cannot be read: {problem}")
    return specs


def _with_trained_components(
    fields: dict[str, Any], saved: Mapping[ArrayPath, ArraySpec], location: Path
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(what to read of a checkpoint, components whose optimizer state is not in it, those it has besides)."""
    optimizer = fields.get("optimizer")
    if not isinstance(optimizer, dict):
        optimizer = {}
    there = {path[1] for path in saved if path[0] == "optimizer" and len(path) > 1} if optimizer else set()
    fresh, unused = sorted(optimizer.keys() - there), sorted(there - optimizer.keys())
    left_out = {("optimizer", name) for name in (*fresh, *unused)}

    def comparable(specs: Mapping[ArrayPath, ArraySpec]) -> dict[ArrayPath, ArraySpec]:
        return {path: spec for path, spec in specs.items() if path[:2] not in left_out}

    if unequal := list(differences(comparable(saved), comparable(array_specs(fields)))):
        raise CheckpointError(_mismatch(location, unequal))
    if not left_out:
        return fields, [], []
    kept = {name: state for name, state in optimizer.items() if name not in fresh}
    others = {name: value for name, value in fields.items() if name != "optimizer"}
    return others | ({"optimizer": kept} if kept else {}), fresh, unused


def _zeros(abstract: Any) -> Any:
    """Arrays of the given shapes, types and shardings: the state of an optimizer before its first update."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )
    return make()


def _fields(state: Any) -> dict[str, Any]:
    """The top level of a state, a dict or a namedtuple."""
    return dict(state) if isinstance(state, dict) else state._asdict()


def _write_small_arrays_whole() -> None:
    """Replicas share the writing of an array by slicing it, which compiles a program for every shape and device:
    worth it for large arrays alone."""
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES)
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns of any handler that replaces its own
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    absl.logging.set_verbosity(verbosity)


@contextmanager
def _quiet() -> Iterator[None]:
    """No records of logging: orbax and asyncio log an error of the disk in hundreds of lines besides raising it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _reason(error: BaseException) -> str:
    """One line of an exception; of a group or chain, the first that says something of the disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(cause or error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."


def _is_main() -> bool:
    return jax.process_index() == 0


# ---------------------------------------------------------------------------- does the checkpoint fit the model


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def array_specs(tree: Any) -> dict[ArrayPath, ArraySpec]:
    """Shape and dtype by path; a namedtuple's field and a dict's key read alike, as they are stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(map(_key_name, path)): (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves}


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a state may hold dicts, tuples, lists and namedtuples, not {key!r}")


def differences(saved: Mapping[ArrayPath, ArraySpec], expected: Mapping[ArrayPath, ArraySpec]) -> Iterator[str]:
    """A line for each array that one side lacks, or has in another shape or dtype."""
    for path in sorted(saved.keys() | expected.keys()):
        left, right = saved.get(path), expected.get(path)
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
