"""Checkpoints of a run: complete or absent, checked before they are used, readable on any mesh.

    state (pytree of sharded arrays) --save--> checkpoints/<step>  --restore(abstract state)--> state on this mesh

Arrays are stored whole, whatever their sharding, so the devices, mesh and processes that read a
checkpoint need not be those that wrote it. A checkpoint is written under a temporary name and
renamed when its last byte is on disk: a process killed at any time leaves complete checkpoints
behind, and a draft that is removed when the run is resumed. The last file written before the
renaming is `checksums.json`, with size and CRC-32 of the other files; a checkpoint is read only
after these were found to match it. All processes must call every function here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxmllm.runtime.agreement import agreed_numbers
from jaxmllm.runtime.checkpoint_files import (
    CheckpointError,
    DamagedError,
    SealedHandler,
    SealedSave,
    check_files,
    hush_writers,
    is_sound,
    one_line,
    quiet,
    read_arrays,
    saved_specs,
    write_small_arrays_whole,
)
from jaxmllm.runtime.checkpoint_fit import BY_COMPONENT, with_trained_components

DRAFT = "orbax-checkpoint-tmp"  # in the name of a folder that is being written
DELETED = ".deleted"  # suffix of a folder that is being deleted
DAMAGED = ".damaged"  # suffix of a folder that was found damaged and put aside
# Time limit of one save: a fixed part, and the time of a slow disk, where writing and reading back
# for the checksums together reach this rate
SAVE_SECONDS = 1200
SLOW_BYTES_PER_SECOND = 50e6


class Checkpoints:
    """The checkpoints in one folder, the `keep` latest sound ones.

    A checkpoint is sound unless `save` was called with `sound=False`. An unsound one is kept only
    as long as it is the newest, and never counts towards `keep`. Saving is asynchronous: `save`
    returns once the arrays are copied to the host, so the caller may donate them. An error while
    writing is raised by the next `look`, `save`, `wait` or `close`.
    """

    def __init__(self, directory: str | Path, keep: int, expected_bytes: int = 0) -> None:
        """Open a folder of checkpoints. The more `expected_bytes` one has, the longer a save may
        take before it is an error. Where they are not free, a save waits for deletions."""
        write_small_arrays_whole()
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._expected_bytes = expected_bytes
        self._handler = SealedHandler()
        self._timeout = SAVE_SECONDS + int(expected_bytes / SLOW_BYTES_PER_SECOND)
        self._writer = ocp.AsyncCheckpointer(self._handler, timeout_secs=self._timeout)
        # Read from disk only once: processes that look later may see different states of a network
        # file system.
        self._known_steps = set(self.steps)
        self._writing_step: int | None = None
        self._pruned = True  # whether deletions have begun since the last `save`
        self._swept = False
        # Deletion takes a second for every few GB, and all processes would wait for it in `save`.
        self._deleter = ThreadPoolExecutor(1)
        self._deletion: Future[None] | None = None

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return saved_steps(self.directory)

    @property
    def latest_step(self) -> int | None:
        """Step of the last checkpoint, which may still be written here; None in a new folder."""
        return max(self._known_steps, default=None)

    def save(self, step: int, state: Any, sound: bool = True) -> bool:
        """Begin to write `state`, a pytree of arrays, as checkpoint `step`; return False if that
        one exists already."""
        if step in self._known_steps:
            return False
        self.wait()
        self._known_steps.add(step)
        self._writing_step = step
        self._pruned = False
        hush_writers(True)
        self._handler.sound = sound  # read when this save is finalized; the next one waits for that
        with self._explain_errors():
            if _is_main():
                self._sweep()
                # The new checkpoint needs the room of those that are being deleted
                if shutil.disk_usage(self.directory).free < self._expected_bytes:
                    self._await_deletion()
            # Empty fields are left out, as in checkpoints from before these fields existed
            fields = {name: value for name, value in _fields(state).items() if value is not None}
            self._writer.save(self.directory / str(step), args=SealedSave(fields))
        return True

    def restore(
        self, abstract_state: Any, step: int | None = None, say: Callable[[str], None] = print
    ) -> Any:
        """Read checkpoint `step` (default: the latest) into the structure of `abstract_state`.

        The leaves of `abstract_state` are arrays, or `jax.ShapeDtypeStruct`s with the shardings
        that the arrays shall have. The optimizer or the averages may hold other components than
        when the checkpoint was written: new ones begin at zero or at the parameters, and those no
        longer there are left out. Raises `DamagedError` if the files are not what was written, and
        `CheckpointError` if there is no such checkpoint or if paths, shapes or dtypes differ from
        those saved.
        """
        # A save that is still running counts among the steps once it is complete.
        self.wait()
        steps = self.steps
        step = self.latest_step if step is None else step
        if step not in steps:
            sought = "a checkpoint" if step is None else f"checkpoint {step}"
            raise CheckpointError(
                f"{self.directory} does not hold {sought} (steps there: {steps or 'none'}); "
                "check run.directory, or start without --resume"
            )
        location = self.directory / str(step)
        check_files(location)
        fields = _fields(abstract_state)
        target, fresh, unused = with_trained_components(fields, saved_specs(location), location)
        state = read_arrays(location, target)
        for field, words in BY_COMPONENT.items():
            if names := fresh.get(field):
                say(f"{words.what} of {', '.join(names)}: begins {words.begins} from step {step}")
                abstract = {name: fields[field][name] for name in names}
                # Averages begin at the parameters just read, not at those that the state had.
                averages = field == "averages"
                begun = begun_averages(state["params"], abstract) if averages else _zeros(abstract)
                state[field] = dict(sorted((state.get(field, {}) | begun).items()))
            if names := unused.get(field):
                say(
                    f"{words.what} of {', '.join(names)}: dropped from step {step}, {words.dropped}"
                )
        return state if isinstance(abstract_state, dict) else type(abstract_state)(**state)

    def restore_latest(
        self, abstract_state: Any, say: Callable[[str], None] = print
    ) -> tuple[Any, int] | None:
        """(state, step) of the latest usable checkpoint; none in a new folder.

        Later ones that are damaged are each named in a line and put aside as `<step>.damaged`, so
        that their steps can be saved again. Raises `DamagedError` if there are checkpoints and none
        is usable.
        """
        self.wait()
        damaged: list[tuple[int, str]] = []
        # All processes try the same steps: damage of a checkpoint is found by all or by none.
        for step in reversed(agreed_numbers(self.steps)):
            try:
                state = self.restore(abstract_state, step, say)
            except DamagedError as error:
                damaged.append((step, str(error)))
                continue
            # Put aside only now: if no checkpoint is usable, all stay where they are.
            for damaged_step, problem in damaged:
                say(
                    f"{problem}; put aside as {damaged_step}{DAMAGED}, continuing from checkpoint {step}"
                )
                self._put_aside(damaged_step)
            return state, step
        if damaged:
            raise DamagedError(
                f"none of the {len(damaged)} checkpoints in {self.directory} is usable: {damaged[0][1]}; restore that "
                "folder from a copy, or set run.directory to a new folder to begin anew"
            )
        return None

    def look(self) -> None:
        """Begin the deletions that a save makes possible as soon as it is complete, without waiting
        for it, so that the next one finds their room: a quota, unlike a full disk, shows only when
        it is exceeded. Raises `CheckpointError` if the save has failed."""
        with self._explain_errors():
            self._writer.check_for_errors()
            complete = self.directory / str(self._writing_step)
            if _is_main() and not self._pruned and complete.exists():
                self._prune()

    def wait(self) -> None:
        """Block until every save that was begun is complete on disk. Raises `CheckpointError` if
        one fails."""
        with self._explain_errors():
            self._writer.wait_until_finished()
            self._writing_step = None
            if _is_main():
                self._prune()
        # Not after an error: its abandoned tasks are logged later, when they are garbage collected.
        hush_writers(False)

    def close(self) -> None:
        """Wait as `wait` does and for deletions, then release the threads."""
        self.wait()
        with self._explain_errors():
            self._await_deletion()
        self._deleter.shutdown()
        self._writer.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            print(f"error: {late}")  # in addition to the error that ends the run, not in its place

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn any exception of the writer into a `CheckpointError` of one line: full disks and
        vanished folders raise many kinds."""
        try:
            with quiet():
                yield
        except CheckpointError:
            raise
        except Exception as error:
            step = self._writing_step
            self._writing_step = None
            latest = self._latest_text(failed=step)
            # A timeout of waiting for the save; those of the disk itself have an errno.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise CheckpointError(
                    f"checkpoint {step} was not complete in {self.directory} within {self._timeout} s; {latest}: see "
                    "what slows its disk or network down, then --resume"
                ) from error
            raise CheckpointError(
                f"checkpoint {step} cannot be written to {self.directory}: {one_line(error)}; {latest}: make room or "
                "fix the folder, then --resume"
            ) from error

    def _latest_text(self, failed: int | None = None) -> str:
        """Which checkpoint the run can be resumed from when the save of step `failed` has failed."""
        complete = [step for step in self.steps if step != failed]
        if not complete:
            return "there is no complete one"
        return f"the latest complete one is {complete[-1]}"

    def _sweep(self) -> None:
        """Make the folder and, the first time, remove what killed processes left there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            self._await_deletion()
            sweep(self.directory)
        self._swept = True

    def _prune(self) -> None:
        """Begin to delete checkpoints that need not be kept. Each is renamed first, so that none is
        partial.

        One whose soundness cannot be read does not count towards `keep`, but may be readable later:
        it is deleted when `keep` sound ones are newer.
        """
        self._pruned = True
        soundness = {step: is_sound(self.directory / str(step)) for step in self.steps}
        sound = [step for step in soundness if soundness[step]]
        oldest = sound[-self.keep] if len(sound) >= self.keep else 0
        doomed = []
        for step in list(soundness)[:-1]:
            if step >= oldest and soundness[step] is not False:
                continue
            doomed.append(self.directory / f"{step}{DELETED}")
            (self.directory / str(step)).rename(doomed[-1])
        if doomed:
            self._await_deletion()
            self._deletion = self._deleter.submit(_delete, doomed)

    def _await_deletion(self) -> None:
        """Wait for deletions that were begun. Raises `CheckpointError` if one failed."""
        deletion = self._deletion
        self._deletion = None
        try:
            if deletion is not None:
                deletion.result()
        except OSError as error:
            raise CheckpointError(
                f"an old checkpoint cannot be deleted from {self.directory}: {one_line(error)}; "
                f"{self._latest_text()}: fix the folder, then --resume"
            ) from error

    def _put_aside(self, step: int) -> None:
        self._known_steps.discard(step)
        if _is_main():
            aside = self.directory / f"{step}{DAMAGED}"
            shutil.rmtree(aside, ignore_errors=True)
            (self.directory / str(step)).rename(aside)


def sweep(directory: Path) -> None:
    """Remove checkpoints that killed processes left half written or half deleted.

    Only the process that holds the run folder may call it.

    Raises `OSError`.
    """
    for entry in directory.iterdir():
        if DRAFT in entry.name or entry.name.endswith(DELETED):
            shutil.rmtree(entry)


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; empty if there is no folder."""
    try:
        return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())
    except FileNotFoundError:
        return []


def state_bytes(abstract_state: Any) -> int:
    """Bytes of all arrays of a state."""
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(abstract_state)
    )


def check_space(directory: Path, needed: int) -> None:
    """Raise `CheckpointError` unless `needed` bytes are free on the disk of `directory`, which need
    not exist yet."""
    folders = (directory.absolute(), *directory.absolute().parents)
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{directory} has {free / 2**30:.2f} GiB free, but a checkpoint of this model takes {needed / 2**30:.2f} "
            "GiB: make room, or set run.directory to a larger disk"
        )


def begun_averages(params: Any, abstract: Any) -> Any:
    """First running averages: copies of the parameters that `abstract` has, with its dtypes and
    shardings."""

    def part(params: Any, like: Any) -> Any:
        if isinstance(like, dict):
            return {name: part(params[name], inside) for name, inside in like.items()}
        return jnp.copy(params).astype(like.dtype)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda params: part(params, abstract), out_shardings=shardings)(params)


def _zeros(abstract: Any) -> Any:
    """Zeros of these shapes, dtypes and shardings: optimizer state before the first update."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=shardings,
    )
    return make()


def _fields(state: Any) -> dict[str, Any]:
    """The top level of a state, which is a dict or a namedtuple, as a dict."""
    return dict(state) if isinstance(state, dict) else state._asdict()


def _is_main() -> bool:
    return jax.process_index() == 0
