"""The greedy scheduler never uses more slots than it is given."""

import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate
from tests.sharding.pipeline.models import ring_of, workload_of


def test_greedy_keeps_its_slots():
    """With about a third of the slots that it would use, it makes a legal schedule or an error that
    names the slots; never a table that does not fit."""
    ring = ring_of("segments", 4, ("vision", "audio"))
    fitting = 0
    for seed in range(12):
        graph = build_graph(ring, workload_of(ring, 6, seed=seed), split=bool(seed % 2))
        slots = {
            pool_key: 1 + (slot_count + seed % 3) // 3
            for pool_key, slot_count in slots_needed([greedy(graph)]).items()
        }
        try:
            schedule = greedy(graph, slots)
        except PipelineError as error:
            assert "slot for" in str(error) and "raise the slots" in str(error)
            continue
        fitting += 1
        fan = tuple(
            max(sum(source == encoder for source, _ in inputs) for inputs in graph.workload.inputs)
            for encoder in (0, 1)
        )
        validate(make_table(schedule, TableSpec(ring, slots, len(schedule.ticks), fan)), graph)
    # Otherwise hardly any schedule would have been validated.
    assert fitting > 3


def test_no_schedule_without_slots():
    ring = ring_of("chain", 2)
    graph = build_graph(ring, workload_of(ring, 4, seed=1))
    slots = slots_needed([greedy(graph)]) | {(Pool.TOKENS, 0): 0}
    with pytest.raises(PipelineError, match="no free tokens slot for vision"):
        greedy(graph, slots)
