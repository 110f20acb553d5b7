"""The drawn example of docs/pipelines.md is exactly what the code makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Kind, Workload
from sharding.pipeline.ring import Chain, Ring
from sharding.pipeline.schedules.orders import one_f_one_b
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec

DOCUMENT = Path(__file__).parents[3] / "docs" / "pipelines.md"
SHOWN = {
    "action": "action",
    "microbatch": "microbatch",
    "input": "input",
    "gradient": "gradient",
    "output": "output",
    "tokens": "tokens.0.0",
    "grad_slot": "grad_slot.0.0",
    "receive input": "receive.input.1",
    "receive gradient": "receive.gradient.1",
}
LETTER = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


def example():
    """Two ranks, with the encoder on the first and the language model on both, and two microbatches
    with one row of images each."""
    ring = Ring(2, (Chain("vision", (0,), (2,)), Chain("language", (0, 1), (2, 2))))
    work = [ChainWork(*[np.ones((depth, 2), np.int64)] * 4) for depth in (1, 2)]
    graph = build_graph(ring, Workload(tuple(work), (((0, 0),), ((0, 1),))))
    schedule = one_f_one_b(graph)
    spec = TableSpec(ring, slots_needed([schedule]), len(schedule.ticks), (1,))
    return schedule, make_table(schedule, spec)


def drawing() -> list[str]:
    """The lines of the drawing: the schedule of both ranks, then the columns of
    their table that are used."""
    schedule, table = example()
    graph = schedule.graph
    lines = ["tick    " + "".join(f"{tick:<8}" for tick in range(table.count))]
    for rank in range(2):
        cells = []
        for n in schedule.ticks[:, rank].tolist():
            name = (
                ""
                if n < 0
                else "VL"[graph.chain[n]] + (str(graph.depth[n]) if graph.chain[n] else " ")
            )
            cells.append(
                "." if n < 0 else f"{name} {LETTER[Kind(graph.kind[n])]} {graph.microbatch[n]}"
            )
        lines.append(f"rank {rank}  " + "".join(f"{cell:<8}" for cell in cells))
    for rank in range(2):
        lines += ["", f"rows of rank {rank}"]
        for name, column in SHOWN.items():
            values = table.rows[: table.count, rank, table.spec.columns[column]].tolist()
            if any(value >= 0 for value in values):
                cells = "".join(f"{'.' if value < 0 else value:<4}" for value in values)
                lines.append(f"  {name:<18}{cells}")
    return [line.rstrip() for line in lines]


def test_the_drawing_is_up_to_date():
    assert "\n".join(drawing()) in DOCUMENT.read_text(encoding="utf-8")
