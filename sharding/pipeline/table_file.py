"""The schedule tables of a step as a file, which itself names its components and columns.

rows [T, S, columns], wire_active [T, wires]   int32, the runs of a step one after another
description                                    JSON: format, components, names, ticks of each run
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import Ints
from sharding.pipeline.table_spec import TableSpec

FORMAT = 1
# Columns that every file must have: enough to say which rank does what in which tick
NEEDED_COLUMNS = ("action", "chunk", "microbatch")


@dataclass(frozen=True)
class SavedTables:
    """Tables of the runs of a step: `rows[r]` [T, S, columns] and `wire_active[r]` [T, wires],
    without idle ticks after their end."""

    components: tuple[str, ...]  # encoders in model order, then language
    columns: dict[str, int]
    wires: tuple[str, ...]
    rows: tuple[Ints, ...]
    wire_active: tuple[Ints, ...]


def save_tables(
    path: Path,
    spec: TableSpec,
    rows: Sequence[Ints],
    wire_active: Sequence[Ints],
) -> None:
    """Write the tables of a step's runs as an npz file; its folder must exist. A file that is
    already there is replaced atomically."""
    description = {
        "format": FORMAT,
        "components": [chain.name for chain in spec.ring.chains],
        "columns": list(spec.columns),
        "wires": [wire.name for wire in spec.wires],
        "ticks": [len(table) for table in rows],
    }
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:  # np.savez would append .npz to the name of a path
        np.savez_compressed(
            file,
            rows=np.concatenate(rows),
            wire_active=np.concatenate(wire_active),
            description=np.array(json.dumps(description)),
        )
    partial.replace(path)


def load_tables(path: Path) -> SavedTables:
    """Read saved tables. Raises `PipelineError` for a file without tables or of another format."""
    try:
        with np.load(path, allow_pickle=False) as file:
            rows = file["rows"].astype(np.int32)
            wire_active = file["wire_active"].astype(np.int32)
            description = json.loads(str(file["description"]))
        if description["format"] != FORMAT:
            raise PipelineError(
                f"{path} holds schedule tables of format {description['format']}, this version reads {FORMAT}; "
                "save them again",
            )
        columns = {str(name): column for column, name in enumerate(description["columns"])}
        wires = tuple(map(str, description["wires"]))
        bounds = np.cumsum(np.array(description["ticks"], np.int64))
        expected = ((bounds[-1], rows.shape[1], len(columns)), (bounds[-1], len(wires)))
        if (rows.shape, wire_active.shape) != expected or not set(NEEDED_COLUMNS) <= columns.keys():
            raise ValueError(
                f"its arrays {rows.shape}, {wire_active.shape} do not fit its description",
            )
    except PipelineError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in zip and npy
        raise PipelineError(f"{path} is not a schedule table: {error}") from error
    return SavedTables(
        components=tuple(map(str, description["components"])),
        columns=columns,
        wires=wires,
        rows=tuple(np.split(rows, bounds[:-1])),
        wire_active=tuple(np.split(wire_active, bounds[:-1])),
    )
