"""The files of one checkpoint: written with checksums, and used only after these were compared.

    arrays --SealedSave--> files, then checksums.json: size and CRC-32 of each
    files --check_files--> as written, or `DamagedError` --saved_specs, read_arrays--> shapes, arrays

Processes share both: each makes the checksums of the files that it wrote, and compares files dealt
to it by size. Errors of orbax, tensorstore or the disk become one line.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmllm.runtime import hosts
from jaxmllm.runtime.agreement import agreed_problem

CHECKSUMS_FILE = "checksums.json"
UNSEALED = (
    "_CHECKPOINT_METADATA",
    CHECKSUMS_FILE,
)  # orbax rewrites the first one after the checksums are made; nothing reads it
WRITER_PREFIX = "ocdbt.process_"  # of the folder in which orbax writes the arrays of one process
LONGEST_REASON = 300  # most characters quoted of another library's message
REPLICA_SLICE_BYTES = 64 << 20  # smaller arrays are written whole, by one process
READ_BYTES = 4 << 20  # read of a file at a time for its checksum
READ_THREADS = 8  # they run in parallel, because CRC-32 releases the interpreter lock

ArrayPath = tuple[str, ...]  # of an array in a state
ArraySpec = tuple[tuple[int, ...], str]  # shape, dtype


class CheckpointError(RuntimeError):
    """A run cannot continue from a checkpoint or run folder; the message says why, and a remedy."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was written."""


# ---------------------------------------------------------------------------- writing


class SealedHandler(ocp.StandardCheckpointHandler):
    """Writes the checksums of a checkpoint as its last file, before orbax renames the folder."""

    sound = True

    async def async_save(self, directory: Any, *values: Any, **options: Any) -> Any:
        futures = await super().async_save(directory, *values, **options)
        run = hosts.current()
        return futures if run is None else [*(futures or ()), _OwnChecksums(run, directory)]

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        _seal(Path(directory), self.sound)


class _OwnChecksums:
    """The checksums of the files that this process writes in a save, left for process 0.

    This is the last of the futures of a save. Orbax asks for their results in order, on the thread
    of the save, so these files are complete then, and many are still in the memory of this host.
    All processes meet afterwards and before `finalize`, so process 0 need not wait for the texts.
    """

    def __init__(self, run: hosts.Hosts, directory: Any) -> None:
        self._run = run
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        """Make the checksums. Raises `OSError`; orbax checks its time limit when they are made."""
        folder = Path(self._directory)
        names = _file_names(folder, folder / f"{WRITER_PREFIX}{self._run.process}")
        text = json.dumps({"draft": folder.name, "files": _checksums(folder, names)})
        self._run.leave_for_main(CHECKSUMS_FILE, text)

    def cancel(self) -> None:
        """Do nothing, because nothing runs before the result is asked for."""


def _seal(folder: Path, sound: bool) -> None:
    """Write the list of checksums. Those that the writers have not made are made here: of files
    that processes share, and with one process of all."""
    run = hosts.current()
    texts = {} if run is None else run.left_for_main(CHECKSUMS_FILE)
    told = [json.loads(text) for text in texts.values()]
    made = {
        name: size_and_sum
        for part in told
        if part["draft"] == folder.name
        for name, size_and_sum in part["files"].items()
    }
    names = _file_names(folder, folder)
    made |= _checksums(folder, [name for name in names if name not in made])
    content = {"sound": sound, "files": {name: made[name] for name in names}}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(content, indent=0), encoding="utf-8")


def _file_names(folder: Path, part: Path) -> list[str]:
    """Names, relative to a checkpoint's folder, of the files in a part of it that are sealed."""
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(part.rglob("*"))
        if path.is_file() and path.name not in UNSEALED
    ]


def _checksums(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(size in bytes, CRC-32) of files, by name."""
    with ThreadPoolExecutor(READ_THREADS) as threads:
        sums = threads.map(lambda name: _checksum(folder / name), names)
        return dict(zip(names, sums, strict=True))


@ocp.args.register_with_handler(SealedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class SealedSave(ocp.args.StandardSave):
    """Arguments of a save that make orbax use `SealedHandler`."""


def write_small_arrays_whole() -> None:
    """Make one process write each small array. By default replicas share the writing of an array by
    slicing it, which compiles a program for each shape and device: worth it for large arrays."""
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES
    )
    verbosity = absl.logging.get_verbosity()
    # Orbax warns about any handler that replaces its own
    absl.logging.set_verbosity(absl.logging.ERROR)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    absl.logging.set_verbosity(verbosity)


# ---------------------------------------------------------------------------- checking


def check_files(location: Path) -> None:
    """Raise `DamagedError` unless every file of a checkpoint is what was written. Processes share
    the work."""
    if problem := agreed_problem(_first_damage(location, jax.process_index(), jax.process_count())):
        raise DamagedError(f"checkpoint {location} is damaged: {problem}")


def is_sound(location: Path) -> bool | None:
    """Whether a checkpoint was saved as a sound one; None if its files do not say."""
    try:
        return bool(_read_checksums(location)["sound"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _first_damage(location: Path, process: int, processes: int) -> str | None:
    """The first problem found in the files that are dealt to a process; None if there is none."""
    try:
        files = dict(_read_checksums(location)["files"])
        sizes = {name: int(size) for name, (size, _) in files.items()}
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS_FILE} cannot be read ({one_line(error)})"
    names = sorted(_dealt(sizes, processes)[process])
    with ThreadPoolExecutor(READ_THREADS) as threads:
        problems = threads.map(lambda name: _file_damage(location, name, files[name]), names)
        return next((problem for problem in problems if problem), None)


def _dealt(sizes: Mapping[str, int], processes: int) -> list[list[str]]:
    """Names of the files that each process reads: the largest first, each to the process with the
    fewest bytes so far, because all wait for the process with the most."""
    hands: list[list[str]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, process = loads[0]
        hands[process].append(name)
        heapq.heapreplace(loads, (load + sizes[name], process))
    return hands


def _file_damage(location: Path, name: str, expected: Sequence[int]) -> str | None:
    try:
        size, checksum = _checksum(location / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read ({one_line(error)})"
    if [size, checksum] == list(expected):
        return None
    if size != expected[0]:
        return f"{name} has {size} bytes, {expected[0]} were written"
    return f"{name} does not hold what was written (checksum {checksum:08x}, not {expected[1]:08x})"


def _read_checksums(location: Path) -> dict[str, Any]:
    content = json.loads((location / CHECKSUMS_FILE).read_text(encoding="utf-8"))
    return dict(content)


def _checksum(path: Path) -> tuple[int, int]:
    """(size in bytes, CRC-32) of a file."""
    size = checksum = 0
    block = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            size = size + count
            checksum = zlib.crc32(block[:count], checksum)
    return size, checksum


# ---------------------------------------------------------------------------- reading


def read_arrays(location: Path, abstract: Any) -> Any:
    """The arrays of a checkpoint that `abstract` names, with the shardings given there.

    Raises `DamagedError`, with a message of one line, if they cannot be read.
    """
    target = jax.tree.map(_shape_of, abstract)
    problem = None
    arrays = None
    try:
        with quiet():
            arguments = ocp.checkpoint_utils.construct_restore_args(target)
            arguments = ocp.args.PyTreeRestore(
                item=target, restore_args=arguments, partial_restore=True
            )
            arrays = ocp.PyTreeCheckpointHandler().restore(location.absolute(), args=arguments)
    except Exception as error:  # damage can raise anything, in orbax, tensorstore and JSON
        problem = one_line(error)
    if problem := agreed_problem(problem):
        raise DamagedError(f"checkpoint {location} cannot be read: {problem}")
    return arrays


def saved_specs(location: Path) -> dict[ArrayPath, ArraySpec]:
    """Shape and dtype of every array of a checkpoint, by path. Raises `DamagedError`."""
    problem = None
    specs = {}
    try:
        with quiet():
            metadata = ocp.PyTreeCheckpointHandler().metadata(location.absolute())
        specs = array_specs(metadata.tree)
    except Exception as error:  # as in `read_arrays`
        problem = one_line(error)
    if problem := agreed_problem(problem):
        raise DamagedError(f"checkpoint {location} cannot be read: {problem}")
    return specs


def array_specs(tree: Any) -> dict[ArrayPath, ArraySpec]:
    """Shape and dtype of every array of a tree, by path. Fields of namedtuples and keys of dicts
    are written the same way, as they are stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        tuple(map(_key_name, path)): (tuple(leaf.shape), np.dtype(leaf.dtype).name)
        for path, leaf in leaves
    }


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a state may hold dicts, tuples, lists and namedtuples, not {key!r}")


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


@contextmanager
def quiet() -> Iterator[None]:
    """Context without log records: orbax and asyncio log an error of the disk in hundreds of lines
    in addition to raising it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def hush_writers(on: bool) -> None:
    """Begin (`on`) or cease to keep error records of the threads of orbax and asyncio out of the
    log: `quiet` covers only the time in which the main thread waits for them."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        (logger.addFilter if on else logger.removeFilter)(_is_below_error)


def _is_below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def one_line(error: BaseException) -> str:
    """One line that describes an exception: the first that comes from the disk in its chain and in
    the groups there, else the exception itself, or the first in it if it is a group.

    The middle of a long text is left out: tensorstore names a file twice before it says what the
    disk said.
    """
    described = _disk_error(error) or error
    while isinstance(described, BaseExceptionGroup):
        described = described.exceptions[0]
    text = " ".join(str(described).split()) or type(described).__name__
    half = LONGEST_REASON // 2
    return text if len(text) <= LONGEST_REASON else f"{text[:half]} ... {text[-half:]}"


def _disk_error(error: BaseException | None) -> OSError | None:
    """The first error of the disk in a chain of exceptions and in the groups there."""
    cause = error
    while cause is not None and not isinstance(cause, OSError):
        members = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        for disk_error in filter(None, map(_disk_error, members)):
            return disk_error
        cause = cause.__cause__ or cause.__context__
    return cause
