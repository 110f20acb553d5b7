"""Slots are assigned like registers: never more of them than values that live at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import Kind, Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.orders import interleaved
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec
from tests.sharding.pipeline.models import ring_of, workload_of

RING = ring_of("segments", 4)


@given(st.integers(0, 1000), st.booleans())
def test_no_more_slots_than_values_that_live_at_once(seed, split):
    """An input lives from the tick after its producer to the backward that reads it last. One slot
    fewer makes no table."""
    graph = build_graph(RING, workload_of(RING, 5, seed=seed), split=split)
    schedule = interleaved(graph)
    tick_of = {int(n): t for t, row in enumerate(schedule.ticks) for n in row if n >= 0}
    needed = slots_needed([schedule])
    for c, depths in ((0, 4), (1, 8)):
        peaks = []
        for rank in range(4):
            live = np.zeros(len(schedule.ticks) + 1, int)
            for d in range(1, depths):
                for m in range(graph.workload.chains[c].shape[1]):
                    if RING.chains[c].stages[d] == rank:
                        producer = graph.number[Kind.FORWARD, c, d - 1, m]
                        kind = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
                        live[tick_of[producer] + 1 : tick_of[graph.number[kind, c, d, m]] + 1] += 1
            peaks.append(live.max())
        assert needed[Pool.INPUT, c] == max(peaks)
    with pytest.raises(PipelineError, match=r"needs more than .* input slots of language"):
        slots = needed | {(Pool.INPUT, 1): needed[Pool.INPUT, 1] - 1}
        make_table(schedule, TableSpec(RING, slots, 500, (4,)))
