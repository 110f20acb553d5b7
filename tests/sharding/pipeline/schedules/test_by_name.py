"""The table of schedules: every name makes a proven schedule, and a new entry
takes part everywhere."""

import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import SCHEDULES, fixed_orders, scheduler_of
from sharding.pipeline.schedules.schedule import lockstep
from sharding.pipeline.schedules.search import search
from sharding.pipeline.slots import slots_needed
from tests.sharding.pipeline.models import ring_of, workload_of
from tests.sharding.pipeline.schedules.test_orders import prove
from tests.sharding.pipeline.schedules.toy import TOY

RING = ring_of("chain", 4, ("vision", "audio"))
GRAPH = build_graph(RING, workload_of(RING, 6, seed=1), split=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_makes_a_proven_schedule(name):
    prove(scheduler_of(name).make(GRAPH, None, 4))


def test_a_wrong_name_is_told_the_names():
    with pytest.raises(
        PipelineError,
        match=r"pipeline\.schedule = 'zigzag'.*choose one of 1f1b, .*greedy, search, or auto",
    ):
        scheduler_of("zigzag")


def test_another_schedule_is_an_entry(monkeypatch):
    """A schedule of a different order is proven as the others are, and a
    search compares with it."""
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    schedule = scheduler_of("toy").make(GRAPH, None, 0)
    prove(schedule)
    other_schedules = [
        scheduler_of(name).make(GRAPH, None, 4) for name in SCHEDULES if name != "toy"
    ]
    assert all(schedule.orders != compared.orders for compared in other_schedules)
    assert lockstep(schedule) > max(map(lockstep, other_schedules)), "nothing overlaps"
    slots = slots_needed([schedule])
    assert len(fixed_orders()) == 4
    assert search(GRAPH, fixed_orders(), slots, rollouts=0).baseline <= lockstep(schedule)
