"""A published model folder: config.json, tensors in safetensors files, and other files, which are
only copied.

FOLDER --open--> ModelFolder: family, headers --check(shapes)--> `Fit`, or every key that is wrong
Fit --part(path, slice)--> numbers, read from the files that hold them
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxmllm.families.by_type import family_of
from jaxmllm.families.family import Family, Shapes
from jaxmllm.families.folder_config import CONFIG_JSON, FolderConfig
from jaxmllm.families.lines import Index, Line, full_index
from jaxmllm.families.weight_files import DTYPES, FolderError, StoredTensor, WeightFile

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
OF_GENERATORS = "diffusion_pytorch_model.safetensors"
# Endings of files with weights. Those that are not read are not copied either: next to new
# safetensors they would hold the weights of another model.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
BAND = 8 << 20  # numbers of a file that are in memory at once while it is read
LISTED = 5  # wrong keys in an error before "and n more"


def is_model_folder(path: str | Path) -> bool:
    """Whether a folder is that of a published model, not of a run or a checkpoint."""
    return (Path(path) / CONFIG_JSON).is_file()


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose headers have been read, seen as holding one of its components."""

    path: Path
    config: FolderConfig
    family: Family
    files: tuple[WeightFile, ...]

    @classmethod
    def open(cls, path: str | Path, component: str = "language") -> ModelFolder:
        """Read config.json, the index and all headers. Raises `FolderError`."""
        folder = Path(path)
        config = FolderConfig.read(folder)
        family = family_of(config, component)
        files = tuple(_open_weight_files(folder))
        return cls(folder, config, family, files).of(component)

    def of(self, component: str) -> ModelFolder:
        """This folder, for another of its components. Raises `FolderError`."""
        shapes = {key: tensor.shape for key, tensor in self.tensors.items()}
        family = family_of(self.config, component).of_folder(self.config, shapes)
        return replace(self, family=family)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by key."""
        return {key: tensor for file in self.files for key, tensor in file.tensors.items()}

    def check(self, shapes: Shapes) -> Fit:
        """Match the tensors with the parameters of the component, given by shape.

        Raises:
          FolderError: keys that are missing, of another shape or type, or that no line names.
        """
        tensors = self.tensors
        fit = Fit(self, shapes, self._present_copies(shapes, tensors))
        problems = []
        expected: dict[str, tuple[int, ...]] = {}
        for path, line in fit.lines():
            shape = line.tensor_shape(shapes[path])
            # Parameters that are joined in one tensor name the same key.
            expected |= {key: shape for key in line.keys(shapes[path])}
        for key, shape in expected.items():
            if key not in tensors:
                problems.append(f"{key} is missing: {list(shape)}")
            elif tensors[key].shape != shape:
                problems.append(f"{key} has {list(tensors[key].shape)}, not {list(shape)}")
            elif tensors[key].dtype not in DTYPES:
                problems.append(f"{key} is {tensors[key].dtype}, none of {', '.join(DTYPES)}")
        # Any other tensor must be known as one of another component, or as one that nobody reads.
        for key in tensors.keys() - expected.keys():
            if not any(fnmatchcase(key, pattern) for pattern in self.family.carried):
                problems.append(f"{key} {list(tensors[key].shape)} belongs to no parameter")
        if problems:
            shown = "; ".join(sorted(problems)[:LISTED])
            unlisted = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise FolderError(
                f"the tensors of {self.path} are not those of its {CONFIG_JSON} "
                f"({self.family.name}): {shown}{unlisted}; copy the folder again, or correct {CONFIG_JSON}"
            )
        return fit

    def _present_copies(
        self, shapes: Shapes, tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Line]:
        """Lines of the second tensors that this folder has for some parameters, by path."""
        used_keys = {self.family.lines[path].key for path in shapes if path in self.family.lines}
        return {
            path: line
            for path, line in self.family.copy_lines.items()
            if path in shapes and line.key in tensors and line.key not in used_keys
        }


@dataclass(frozen=True)
class Fit:
    """A folder and the parameters of a component, all of which its tensors hold."""

    folder: ModelFolder
    shapes: Shapes
    copies: Mapping[str, Line]

    def lines(self) -> Iterator[tuple[str, Line]]:
        """(path, line) of every parameter, and again of those with a copy. Raises `FolderError`."""
        known = self.folder.family.lines
        if unknown := sorted(self.shapes.keys() - known.keys()):
            raise FolderError(
                f"{self.folder.family.name} has no tensor for {', '.join(unknown)}; leave these choices of "
                f"model.{self.folder.family.component} as the folder has them"
            )
        yield from ((path, line) for path in self.shapes for line in self._lines_of(path))

    def fill(
        self, tensors: Mapping[str, StoredTensor], values: Callable[[str], NDArray[Any]]
    ) -> set[str]:
        """Write the parameters into `tensors`, which are like those of the folder; returns the keys
        of the tensors that were written.

        Args:
          values: returns a whole parameter, by path; called for one after another.
        """
        filled = set()
        for path, shape in self.shapes.items():
            parameter = values(path)
            for line in self._lines_of(path):
                for key, place, index in line.pieces(shape, full_index(shape)):
                    view = line.view(tensors[key].array("r+"), shape, index)
                    view[...] = parameter[place].reshape(view.shape)
                    filled.add(key)
        return filled

    def _lines_of(self, path: str) -> list[Line]:
        lines = [self.folder.family.lines[path]]
        return [*lines, self.copies[path]] if path in self.copies else lines

    def part(self, path: str, index: Index, dtype: Any) -> NDArray[Any]:
        """A slice of a parameter. Raises `FolderError` if a copy of it differs."""
        values = self._read_slice(self.folder.family.lines[path], path, index, dtype)
        copy = self.copies.get(path)
        if copy is not None and not np.array_equal(
            values, self._read_slice(copy, path, index, dtype), equal_nan=True
        ):
            raise FolderError(
                f"{copy.key} of {self.folder.path} is not {self.folder.family.lines[path].key}, "
                f"though {CONFIG_JSON} ties them; set tie_word_embeddings: false there"
            )
        return values

    def whole(self, path: str, dtype: Any) -> NDArray[Any]:
        """All of a parameter. Raises `FolderError` if a copy of it differs."""
        return self.part(path, full_index(self.shapes[path]), dtype)

    def _read_slice(self, line: Line, path: str, index: Index, dtype: Any) -> NDArray[Any]:
        shape = self.shapes[path]
        tensors = self.folder.tensors
        sizes = [
            len(range(*extent.indices(size))) for extent, size in zip(index, shape, strict=True)
        ]
        values = np.empty(sizes, dtype)
        for key, place, of_tensor in line.pieces(shape, index):
            piece = values[place]
            for band, of_band in line.bands(shape, of_tensor, BAND):
                # Mapped again for each band, so that no more than one of them stays in memory
                piece[band] = line.read(tensors[key].array(), shape, of_band)
        return values


def write_folder(
    parts: Sequence[tuple[Fit, Callable[[str], NDArray[Any]]]], folder: Path
) -> tuple[str, ...]:
    """Write a copy of a folder with new tensors for some of its components; returns the names of
    files that are left out.

    Every file with tensors has the keys, types and places that it has in the folder that the
    components fit. All other tensors are copied, and so are files without weights.

    Args:
      parts: for each component its fit, and a function that returns a whole parameter by path.
      folder: new folder for the files.
    """
    source = parts[0][0].folder
    folder.mkdir(parents=True)
    left_out = _copy_other_files(source, folder)
    tensors = _create_weight_files(source, folder)
    filled: set[str] = set()
    for fit, values in parts:
        filled |= fit.fill(tensors, values)
    for key in tensors.keys() - filled:
        tensors[key].copy_from(source.tensors[key])
    return left_out


def _copy_other_files(source: ModelFolder, folder: Path) -> tuple[str, ...]:
    """Copy the files that hold no weights; returns the names of the others, except `source.files`,
    whose tensors are written anyway."""
    tensor_files = {file.path.name for file in source.files}
    paths = [path for path in sorted(source.path.iterdir()) if path.name not in tensor_files]
    unread = INDEX if SINGLE in tensor_files else None  # it names files that are left out
    weights = [
        path
        for path in paths
        if path.suffix in WEIGHTS or path.name == unread or not path.is_file()
    ]
    for path in paths:
        if path not in weights:
            shutil.copyfile(path, folder / path.name)
    return tuple(path.name for path in weights)


def _create_weight_files(source: ModelFolder, folder: Path) -> dict[str, StoredTensor]:
    """Make files with the headers of a folder's files; returns their tensors, not yet written."""
    for file in source.files:
        target = folder / file.path.name
        with target.open("w+b") as stream:
            stream.write(file.head)
            stream.flush()
            _reserve_space(stream, file.size)
    return {
        key: replace(tensor, file=folder / tensor.file.name)
        for key, tensor in source.tensors.items()
    }


def _reserve_space(stream: BinaryIO, size: int) -> None:
    """Extend a file to `size` bytes. Raises OSError where there is no room: a write through a
    memory map would then kill the process."""
    try:
        os.posix_fallocate(stream.fileno(), 0, size)
    except AttributeError:  # on macOS
        stream.truncate(size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, stream.name) from error
        stream.truncate(
            size
        )  # file systems that reserve nothing, where the C library writes no zeros instead


def _open_weight_files(folder: Path) -> Iterator[WeightFile]:
    # If both exist, transformers reads the single file, and diffusers the files of the index.
    for name in (SINGLE, INDEX, f"{OF_GENERATORS}.index.json", OF_GENERATORS):
        path = folder / name
        if path.is_file():
            yield from (
                [WeightFile.open(path)] if path.suffix in WEIGHTS else _open_indexed_files(path)
            )
            return
    raise FolderError(
        f"{folder} has neither {SINGLE} nor {INDEX}; other formats are not read: save "
        "the model as safetensors"
    )


def _open_indexed_files(index: Path) -> Iterator[WeightFile]:
    """The files that an index names. Raises `FolderError` if they hold other keys than it says."""
    folder = index.parent
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(key): str(name) for key, name in weight_map.items()}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise FolderError(f"{index} has no weight_map ({error}); copy it again") from error
    for name in sorted({*named.values()}):
        path = folder / name
        # An index must not lead out of its folder, so names must not contain folders.
        if Path(name).name != name or not path.is_file():
            raise FolderError(f"{index} names {name}, which is not there; copy the folder again")
        file = WeightFile.open(path)
        keys = {key for key, file_name in named.items() if file_name == name}
        # Both ways: all tensors of a file are used, also those that the index leaves out.
        if unequal := sorted(keys ^ file.tensors.keys()):
            raise FolderError(
                f"{index} and {path} differ in {', '.join(unequal[:LISTED])}; copy the folder again"
            )
        yield file
