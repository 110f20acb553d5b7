"""The folder of a run: which process may write into it, and what it records of its run.

run.directory/
  run.lock         the process that writes here: runtime/lock.py
  config.yaml      resolved config; a folder without it holds no run
  history.json     batch size and weights by step: training/history.py
  checkpoints/     runtime/checkpoint.py
  data.json, data.npz, rejected.jsonl          training/data_stamps.py
  metrics.jsonl, summary.json, tensorboard/    runtime/metrics.py
  schedule.npz     with stages, what the last step did in which tick: sharding/pipeline/table_file.py
"""

from __future__ import annotations

import errno
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax

from jaxmllm.config.read import dump_config, load_config
from jaxmllm.config.schema import Config, ConfigError, RenamedKeyError
from jaxmllm.data.corpus import RejectedError
from jaxmllm.data.sources.source import DataError
from jaxmllm.families.weight_files import FolderError
from jaxmllm.runtime import hosts
from jaxmllm.runtime.agreement import agreed_problem
from jaxmllm.runtime.checkpoint import saved_steps, sweep
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.files import write_atomically
from jaxmllm.runtime.lock import LOCK_FILE, RunLock, shows_lock
from jaxmllm.runtime.resume import begun_config, check_compatible, resumed_config
from jaxmllm.training.data_stamps import REJECTED_FILE, write_rejected
from jaxmllm.training.initial import CHECKPOINTS, check_sources

CONFIG_FILE = "config.yaml"
SCHEDULE_FILE = "schedule.npz"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full disk, full quota, read-only disk
# Files and folders by which a run is recognized if its config is missing
OWN = (
    CHECKPOINTS,
    "data.json",
    "data.npz",
    "history.json",
    "metrics.jsonl",
    SCHEDULE_FILE,
    "summary.json",
)


def write_config(run_directory: str | Path, config: Config) -> None:
    """Store the resolved config as config.yaml of the run folder; one process calls this."""
    write_atomically(Path(run_directory) / CONFIG_FILE, dump_config(config))


def read_config(run_directory: str | Path) -> Config | None:
    """The config that the run in this folder began with; None if nothing began there. Raises
    `CheckpointError`."""
    path = Path(run_directory) / CONFIG_FILE
    try:
        return load_config(path) if path.exists() else None
    except RenamedKeyError as error:
        raise CheckpointError(
            f"the run in {run_directory} began when keys had other names: {error}; rename them in that file, keeping "
            "their values, to continue the run"
        ) from error
    except (ConfigError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is damaged: {reason}; restore it (checkpoints do not say what the run was), or move it away and "
            f"begin another run with its parameters: a new run.directory and model.from={run_directory}"
        ) from error


def named_config(option: str, folder: Path) -> Config:
    """`read_config` of the folder that an option names. Raises `ConfigError` if it holds no run."""
    config = read_config(folder)
    if config is None:
        raise ConfigError(
            f"{option} {folder}: the folder holds no run: there is no {CONFIG_FILE}; name the folder of a run"
        )
    return config


def config_of(source: str | Path) -> Config | None:
    """The config of a run, from its folder or a checkpoint in it; None if there is none. Raises
    `CheckpointError`."""
    path = Path(source).absolute()
    config = read_config(path)  # first, because a run may be in a folder of that name
    return (
        read_config(path.parent.parent)
        if not config and path.parent.name == CHECKPOINTS
        else config
    )


@contextmanager
def open_folder(config: Config, resume: bool | str) -> Iterator[Config]:
    """Lock `run.directory` for this run and yield the config of the steps to come, as
    `check_folder` returns it.

    The main process holds the lock for all. Raises `CheckpointError` in every process if another
    run holds it, if this run may not continue in the folder, or if a process sees another folder
    there than the main one does; and in place of the error of a full disk inside the context. If
    data are refused inside, all refusals are written to rejected.jsonl of the folder, and
    `DataError` names it.
    """
    with ExitStack() as stack:
        problem = None
        token = ""  # of the lock, which the main process takes
        checked = config
        try:
            check_writable(Path(config.run.directory))  # before the lock, which is a file there
            if jax.process_index() == 0:
                token = stack.enter_context(RunLock(Path(config.run.directory))).token
            checked = check_folder(config, resume)
            if token:  # now: the room that a checkpoint takes is checked before the first one
                with suppress(OSError):
                    sweep(Path(config.run.directory) / CHECKPOINTS)
        except (CheckpointError, FolderError) as error:
            problem = str(error)
        if problem := agreed_problem(problem):
            raise CheckpointError(problem)
        token = hosts.tell_all(token)[0]
        if problem := agreed_problem(_sharing_problem(Path(config.run.directory), token)):
            raise CheckpointError(problem)
        try:
            with _refusals_saved(Path(config.run.directory)):
                yield checked
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            where = error.filename or config.run.directory
            raise CheckpointError(
                f"{where} cannot be written ({error.strerror}): make room, then --resume continues from the latest "
                "checkpoint"
            ) from error


@contextmanager
def _refusals_saved(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except RejectedError as error:
        if jax.process_index() != 0:
            raise
        path = write_rejected(run_directory, error.rejected)
        raise DataError(f"{error}\nAll refusals are in {path}.") from error


def _sharing_problem(folder: Path, token: str) -> str | None:
    """The problem if this process does not see the lock that the main one holds: every process
    writes its part of a checkpoint, and parts in another folder would be lost."""
    if shows_lock(folder, token):
        return None
    return (
        f"run.directory: {folder.absolute()} on {socket.gethostname()} (process {jax.process_index()}) is not the "
        "folder that process 0 holds: set run.directory to one that all hosts share, by its absolute path"
    )


def check_folder(config: Config, resume: bool | str) -> Config:
    """The config of the steps to come: `config` with what the run in `run.directory` has chosen.

    Raises `CheckpointError` if the folder holds a run, unless `resume` is set and the run may
    continue with `config`; if it holds files of a run without its config; and, with `resume` True,
    if it holds only other files, in which a run begins with `resume` "auto" or False.
    """
    folder = Path(config.run.directory)
    saved = read_config(folder)
    if saved is not None:
        if not resume:
            raise CheckpointError(
                f"{folder} already holds a run; pass --resume to continue it, or choose another run.directory"
            )
        check_compatible(saved, config, bool(saved_steps(folder / CHECKPOINTS)))
        return resumed_config(saved, config)
    entries = folder.iterdir() if folder.exists() else ()
    # A run that never began because data were refused leaves its refusals; the next one begins as
    # in an empty folder.
    no_run = (LOCK_FILE, REJECTED_FILE, ".")
    present = sorted(entry.name for entry in entries if not entry.name.startswith(no_run))
    if left_behind := [name for name in present if name in OWN]:
        raise CheckpointError(
            f"{folder} holds {', '.join(left_behind)} but no {CONFIG_FILE}, so it cannot be said which "
            f"run that was: restore {CONFIG_FILE}, or choose another run.directory (model.from={folder} "
            "takes its parameters along)"
        )
    if resume is True and present:
        raise CheckpointError(
            f"{folder} holds no run to resume: there is no {CONFIG_FILE} beside {', '.join(present[:3])}; check "
            "run.directory, or start without --resume (--resume=auto begins a run here)"
        )
    check_sources(config.model)
    if config.model.from_ is not None:
        _check_adapters(config, config.model.from_)
    return begun_config(config)


def _check_adapters(config: Config, source: str) -> None:
    """Raise `CheckpointError` unless components of another run have the same adapters as there."""
    begun = config_of(source)
    trained_adapters = {} if begun is None else begun.model.adapters.by_component
    for name, adapter in trained_adapters.items():
        configured = config.model.adapters.by_component.get(name)
        if name in config.model.phases and configured != adapter:
            said = "none" if configured is None else str(configured)
            raise CheckpointError(
                f"model.adapters.{name}: {name} of {source} was trained with an adapter of {adapter}, this model has "
                f"{said}; say the same here, or begin from a folder that they are merged into (jaxmllm convert to-hf)"
            )


def check_writable(folder: Path, key: str = "run.directory") -> None:
    """Raise `CheckpointError` unless files can be created in `folder`, the value of config key
    `key`; create it if missing."""
    # Several processes may try the same folder at once, each with its own file.
    probe = folder / f".{uuid.uuid4().hex}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as stream:
            stream.write(b"0")
            stream.flush()
            # A buffered write may succeed on a full disk; this does not.
            os.fsync(stream.fileno())
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise CheckpointError(
            f"{key}: {folder} cannot be written ({error.strerror}); fix the folder, or choose another"
        ) from error
