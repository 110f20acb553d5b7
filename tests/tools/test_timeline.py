"""The timeline: bars stand where the schedule's operations do, and both files are written."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from jaxmllm.tools import timeline
from jaxmllm.tools.timeline import of_schedule, of_table
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Kind, Workload
from sharding.pipeline.ring import Chain, Ring
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import lockstep
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_file import save_tables
from sharding.pipeline.table_spec import TableSpec

PFLOP = 10**6  # in units of the durations, 10**9 FLOPs


@pytest.fixture(scope="module")
def schedule():
    """Two ranks with a chunk of both components each, three rows of the encoder, two of language."""
    ring = Ring(2, (Chain("vision", (0, 1), (1, 1)), Chain("language", (0, 1), (2, 2))))

    def work(forward: int, count: int) -> ChainWork:
        each = np.full((2, count), forward * PFLOP, np.int64)
        return ChainWork(each, each, each, each)

    workload = Workload((work(1, 3), work(2, 2)), (((0, 0), (0, 1)), ((0, 1), (0, 2))))
    return greedy(build_graph(ring, workload, split=True))


def test_bars_stand_where_operations_run(schedule):
    shown = of_schedule(schedule, "title")
    graph = schedule.graph
    expected, start = set(), 0
    for row in schedule.ticks.tolist():
        for rank, n in enumerate(row):
            if n >= 0:
                name = graph.ring.chains[graph.chain[n]].name
                key = (graph.kind[n], graph.depth[n], graph.microbatch[n])
                expected.add((rank, start, graph.duration[n] // PFLOP, name, *key))
        start += max(graph.duration[n] for n in row if n >= 0) // PFLOP
    found = {(b.rank, b.start, b.length, b.component, int(b.kind), b.chunk, b.microbatch) for b in shown.bars}
    assert found == expected and len(shown.bars) == graph.size
    assert shown.ticks[-1] == start == lockstep(schedule) // PFLOP
    assert shown.busy() == pytest.approx([work / PFLOP / start for work in graph.rank_work])


def test_a_saved_table_shows_the_same_operations(schedule, tmp_path):
    spec = TableSpec(schedule.graph.ring, slots_needed([schedule]), len(schedule.ticks) + 3, (2,))
    path = tmp_path / "table.npz"
    table = make_table(schedule, spec)
    save_tables(path, spec, [table.rows[: table.count]], [table.wire_active[: table.count]])
    shown, drawn = of_table(path), of_schedule(schedule, "")
    assert len(shown.ticks) == len(schedule.ticks) + 1

    def operations(one) -> list:
        return sorted(
            (b.rank, np.searchsorted(one.ticks, b.start), b.component, b.kind, b.microbatch) for b in one.bars
        )

    assert operations(shown) == operations(drawn)


@pytest.mark.parametrize(
    "choice",
    [
        ["--layout", "segments", "--split"],
        ["--layout", "chain", "--schedule", "1f1b"],
        ["--layout", "parallel", "--schedule", "gpipe"],
        ["--layout", "segments", "--schedule", "search"],
    ],
)
def test_a_generated_batch_is_drawn(choice, tmp_path, capsys):
    assert timeline.main(["--generated", "--microbatches", "2", *choice, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "pipeline.html").read_text()
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(image) == (tmp_path / "pipeline.png").read_bytes()
    assert Image.open(io.BytesIO(base64.b64decode(image))).width > 1000
    assert page.count("<tr>") == 1 + 4, "a line for every rank"
    assert "rank" in capsys.readouterr().out


def test_components_and_kinds_look_different():
    colors = {timeline._color(name, kind) for name in ("vision", "audio", "language") for kind in Kind}
    assert len(colors) == 12 and all(0 <= channel <= 1 for color in colors for channel in color)


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    (tmp_path / "none.npz").write_bytes(b"nothing")
    assert timeline.main(["--table", str(tmp_path / "none.npz")]) == 1
    assert "is not a schedule table" in capsys.readouterr().err
    assert timeline.main(["--generated", "--stages", "40", "--microbatches", "2"]) == 1
    assert "pipeline.stages = 40, but 'vision' has 32 layers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        timeline.main([])
