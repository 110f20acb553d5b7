"""Tables as files: saved tables are read back unchanged, and files that hold
no table are refused."""

import json

import numpy as np
import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.table_file import load_tables, save_tables
from tests.sharding.pipeline.models import padded_table_of, ring_of, workload_of

RING = ring_of("segments", 4)
TABLE = padded_table_of(build_graph(RING, workload_of(RING, 6, seed=1), split=True))
RUNS = (TABLE.count, 5)  # ticks of the runs of a step


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step.npz"
    rows = [TABLE.rows[:ticks] for ticks in RUNS]
    save_tables(path, TABLE.spec, rows, [TABLE.wire_active[:ticks] for ticks in RUNS])
    return path


def test_what_is_saved_is_read_again(path):
    tables = load_tables(path)
    assert tables.components == ("vision", "language")
    assert tables.columns == TABLE.spec.columns
    assert tables.wires == tuple(wire.name for wire in TABLE.spec.wires)
    for run, ticks in enumerate(RUNS):
        np.testing.assert_array_equal(tables.rows[run], TABLE.rows[:ticks])
        np.testing.assert_array_equal(tables.wire_active[run], TABLE.wire_active[:ticks])


def test_a_file_that_holds_no_tables(tmp_path):
    path = tmp_path / "other.npz"
    path.write_text("steps: 3")
    with pytest.raises(PipelineError, match="is not a schedule table"):
        load_tables(path)
    np.savez(path, rows=np.zeros(3))
    with pytest.raises(PipelineError, match="is not a schedule table"):
        load_tables(path)
    with pytest.raises(PipelineError, match="is not a schedule table"):
        load_tables(tmp_path / "none.npz")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 0}, "format 0, this version reads 1; save them again"),
        ({"columns": ["action"]}, "do not fit its description"),
        ({"ticks": [3]}, "do not fit its description"),
        ({"columns": None}, "is not a schedule table"),
    ],
)
def test_a_description_that_does_not_fit(path, change, message):
    with np.load(path) as file:
        arrays = dict(file)
    description = json.loads(str(arrays["description"])) | change
    np.savez(path, **(arrays | {"description": np.array(json.dumps(description))}))
    with pytest.raises(PipelineError, match=message):
        load_tables(path)


def test_no_pickled_objects(path):
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"rows": np.array([{}], object)}))
    with pytest.raises(PipelineError, match="is not a schedule table"):
        load_tables(path)
