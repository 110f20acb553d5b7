"""Tables: padding, and schedules that a table has no room for."""

import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec
from tests.sharding.pipeline.models import padded_table_of, ring_of, workload_of

RING = ring_of("segments", 4)
GRAPH = build_graph(RING, workload_of(RING, 6, seed=1), split=True)


def test_a_table_ends_with_idle_ticks():
    table = padded_table_of(GRAPH)
    assert len(table.rows) == table.spec.ticks == table.count + 3
    assert (table.rows[table.count :, :, table.spec.columns["action"]] == 0).all()
    assert not table.wire_active[table.count :].any()


def test_tables_that_do_not_fit():
    schedule = greedy(GRAPH)
    slots = slots_needed([schedule])
    with pytest.raises(
        PipelineError, match=f"{len(schedule.ticks)} ticks for tables of 7; raise the ticks"
    ):
        make_table(schedule, TableSpec(RING, slots, 7, (4,)))
    with pytest.raises(PipelineError, match="rows of vision, tables have room for 0"):
        make_table(schedule, TableSpec(RING, slots, 500, (0,)))
    two_classes = greedy(build_graph(RING, workload_of(RING, 6, seed=1, classes=True)))
    with pytest.raises(PipelineError, match="row of vision of class 1, the tables have 1 classes"):
        make_table(two_classes, TableSpec(RING, slots, 500, (4,)))
    with pytest.raises(PipelineError, match="another ring"):
        make_table(schedule, TableSpec(ring_of("chain", 4), slots, 500, (4,)))
