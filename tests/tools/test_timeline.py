"""The timeline of a pipeline: its bars against the schedule's operations, and its files."""

from __future__ import annotations

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
import yaml
from PIL import Image

from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.config.read import load_config
from jaxmllm.setup.planning_mesh import staged_mesh
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import pipeline_sizes
from jaxmllm.tools import timeline, timeline_drawing
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.tools.timeline import of_schedules, of_table
from jaxmllm.training.history import segment_of, write_history
from jaxmllm.training.run_folder import write_config
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Kind, Workload
from sharding.pipeline.ring import Chain, Ring
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import lockstep
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_file import load_tables, save_tables
from sharding.pipeline.table_spec import TableSpec
from tests.support import tiny_config

PFLOP = 10**6  # in units of the durations, 10**9 FLOPs


@pytest.fixture(scope="module")
def schedule():
    """Two ranks with a chunk of each component; the encoder has three rows, the decoder two."""
    ring = Ring(2, (Chain("vision", (0, 1), (1, 1)), Chain("language", (0, 1), (2, 2))))

    def work(forward: int, count: int) -> ChainWork:
        durations = np.full((2, count), forward * PFLOP, np.int64)
        return ChainWork(durations, durations, durations, durations)

    workload = Workload((work(1, 3), work(2, 2)), (((0, 0), (0, 1)), ((0, 1), (0, 2))))
    return greedy(build_graph(ring, workload, split=True))


def test_bars_stand_where_operations_run(schedule):
    drawing = of_schedules([schedule], "title", 10**15 // PFLOP)
    graph = schedule.graph
    # The reference: in lockstep, a tick lasts as long as its longest operation
    expected = set()
    start = 0
    for row in schedule.ticks.tolist():
        for rank, node in enumerate(row):
            if node >= 0:
                name = graph.ring.chains[graph.chain[node]].name
                key = (graph.kind[node], graph.depth[node], graph.microbatch[node])
                expected.add((rank, start, graph.duration[node] // PFLOP, name, *key))
        start += max(graph.duration[node] for node in row if node >= 0) // PFLOP
    bars = {
        (b.rank, b.start, b.length, b.component, int(b.kind), b.chunk, b.microbatch)
        for b in drawing.bars
    }
    assert bars == expected and len(drawing.bars) == graph.size
    assert drawing.ticks[-1] == start == lockstep(schedule) // PFLOP
    assert drawing.busy() == pytest.approx([work / PFLOP / start for work in graph.rank_work])


def test_a_saved_table_shows_the_same_operations(schedule, tmp_path):
    spec = TableSpec(schedule.graph.ring, slots_needed([schedule]), len(schedule.ticks) + 3, (2,))
    path = tmp_path / "table.npz"
    table = make_table(schedule, spec)
    save_tables(path, spec, [table.rows[: table.count]], [table.wire_active[: table.count]])
    saved = of_table(path)
    planned = of_schedules([schedule], "")
    assert len(saved.ticks) == len(schedule.ticks) + 1

    def operations(one) -> list:
        return sorted(
            (b.rank, np.searchsorted(one.ticks, b.start), b.component, b.kind, b.microbatch)
            for b in one.bars
        )

    assert operations(saved) == operations(planned)


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
    assert (
        timeline.main(["--generated", "--microbatches", "2", *choice, "--out", str(tmp_path)]) == 0
    )
    page = (tmp_path / "pipeline.html").read_text()
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(image) == (tmp_path / "pipeline.png").read_bytes()
    assert Image.open(io.BytesIO(base64.b64decode(image))).width > 1000
    assert page.count("<tr>") == 1 + 4, "a line for every rank"
    assert "rank" in capsys.readouterr().out


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The file of a small run in two stages."""
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, train=64, test=8)
    file = folder / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            tiny_config(folder, mesh={"data": 2}, pipeline={"stages": 2, "layout": "chain"})
        )
    )
    return file


def test_a_step_of_a_config_is_planned_as_the_run_plans_it(config, tmp_path, capsys):
    """Saved tables are compared, and other steps and settings must give other tables."""

    def saved(name: str, *changes: str) -> np.ndarray:
        """The table that the command saves."""
        command = [
            "--config",
            str(config),
            "--save",
            str(tmp_path / name),
            "--out",
            str(tmp_path),
            *changes,
        ]
        assert timeline.main(command) == 0
        assert name in capsys.readouterr().out and (tmp_path / "pipeline.png").exists()
        return np.concatenate(load_tables(tmp_path / name).rows)

    settings = load_config(str(config), [])
    inputs = prepare(settings, staged_mesh(settings))
    sizes = pipeline_sizes(settings, inputs)
    # Step 2 takes the second batch of 16
    items = inputs.corpus.gather(np.array([inputs.order[i] for i in range(16, 32)]))
    plan = plan_pipeline(items, sizes.spec, sizes.training)
    second_step = saved("second.npz", "--step", "2")
    np.testing.assert_array_equal(second_step, np.concatenate([run.table for run in plan.runs]))
    other_tables = [
        saved("first.npz"),
        saved("gpipe.npz", "--step", "2", "pipeline.schedule=gpipe"),
    ]
    assert not any(np.array_equal(second_step, table) for table in other_tables)


def test_a_step_of_a_run_is_planned_with_the_batch_size_that_it_had(config, tmp_path, capsys):
    settings = load_config(str(config), [])
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, settings)
    segment = segment_of(settings)
    write_history(folder, [segment, dataclasses.replace(segment, step=1, batch_size=8)])
    saved = tmp_path / "third.npz"
    command = ["--run", str(folder), "--step", "3", "--save", str(saved), "--out", str(tmp_path)]
    assert timeline.main(command) == 0
    assert "step 3 of" in capsys.readouterr().out

    settings = load_config(str(config), ["data.batch_size=8"])
    inputs = prepare(settings, staged_mesh(settings))
    sizes = pipeline_sizes(settings, inputs)
    # After a step of 16 examples, steps of 8 follow: step 3 takes examples 24 to 31
    items = inputs.corpus.gather(np.array([inputs.order[i] for i in range(24, 32)]))
    plan = plan_pipeline(items, sizes.spec, sizes.training)
    expected = np.concatenate([run.table for run in plan.runs])
    np.testing.assert_array_equal(np.concatenate(load_tables(saved).rows), expected)

    assert timeline.main(["--run", str(tmp_path / "none")]) == 1
    assert "none: the folder holds no run" in capsys.readouterr().err
    assert timeline.main(["--run", str(folder), "--out", str(tmp_path)]) == 1
    assert "schedule.npz is not a schedule table" in capsys.readouterr().err
    write_config(folder, load_config(str(config), ["pipeline.stages=1"]))
    assert timeline.main(["--run", str(folder), "--out", str(tmp_path)]) == 1
    assert "there is no schedule without stages" in capsys.readouterr().err


def test_an_open_axis_is_planned_for_as_many_devices_as_are_told(config, tmp_path, capsys):
    command = ["--config", str(config), "--out", str(tmp_path)]
    assert timeline.main(command) == 0
    assert "planned for" not in capsys.readouterr().out
    assert timeline.main([*command, "mesh.data=-1"]) == 0
    assert "mesh.data is -1: planned for 4; a run on other devices" in capsys.readouterr().out


def test_configs_that_have_no_schedule_to_draw(config, capsys):
    for change, message in (
        ("pipeline.stages=1", "pipeline.stages (1): there is no schedule without stages"),
        (
            "pipeline.schedule=zigzag",
            "pipeline.schedule = 'zigzag': there is no such schedule; choose one of 1f1b",
        ),
    ):
        assert timeline.main(["--config", str(config), change]) == 1
        assert message in capsys.readouterr().err
    assert timeline.main(["--config", str(config), "--step", "0"]) == 1
    assert "--step 0" in capsys.readouterr().err
    for command in (
        ["--table", "x.npz", "--generated"],
        ["--table", "x.npz", "run.seed=1"],
        ["--table", "x.npz", "--step", "1"],
        ["--run", "x", "--save", "x.npz"],
        *(["--table", "x.npz", option, "2"] for option in ("--stages", "--microbatches", "--seed")),
        ["--config", str(config), "--layout", "chain"],
        ["--config", str(config), "--schedule", "gpipe"],
        ["--run", "x", "--split"],
    ):
        with pytest.raises(SystemExit):
            timeline.main(command)


def test_components_and_kinds_look_different():
    colors = {
        timeline_drawing._color(name, kind)
        for name in ("vision", "audio", "language")
        for kind in Kind
    }
    assert len(colors) == 12 and all(0 <= channel <= 1 for color in colors for channel in color)


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    (tmp_path / "none.npz").write_bytes(b"nothing")
    assert timeline.main(["--table", str(tmp_path / "none.npz")]) == 1
    assert "is not a schedule table" in capsys.readouterr().err
    assert timeline.main(["--generated", "--stages", "40", "--microbatches", "2"]) == 1
    assert "pipeline.stages = 40, but 'vision' has 32 layers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        timeline.main([])
