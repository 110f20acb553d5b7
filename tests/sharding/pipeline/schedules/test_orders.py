"""Fixed orders: legal in every layout, of costs that can be told by hand,
and within their slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Kind, Pool, Workload
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.orders import gpipe, interleaved, one_f_one_b
from sharding.pipeline.schedules.schedule import Schedule, asynchronous, durations, lockstep
from sharding.pipeline.slots import keep_residuals, slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate
from tests.sharding.pipeline.models import ring_of, workload_of


def plain(stages: int, microbatches: int, chunks: int = 1, forward: int = 1, backward: int = 3):
    """A language model alone, where all forward operations take equally long, and all
    backward operations do."""
    ones = np.ones((stages * chunks, microbatches), np.int64)
    works = ChainWork(ones * forward, ones * 0, ones * 0, ones * backward)
    ring = Ring(stages, (Chain("language", tuple(range(stages)) * chunks, (1,) * stages * chunks),))
    return build_graph(ring, Workload((works,), ((),) * microbatches), fused=False)


def prove(schedule: Schedule) -> None:
    """The validator accepts a table with exactly the slots that the schedule needs."""
    ring = schedule.graph.ring
    fan = tuple(
        max(
            [
                sum(source == encoder for source, _ in inputs)
                for inputs in schedule.graph.workload.inputs
            ],
            default=0,
        )
        for encoder in range(len(ring.encoders))
    )
    spec = TableSpec(ring, slots_needed([schedule]), len(schedule.ticks), fan)
    validate(make_table(schedule, spec), schedule.graph)


@given(
    st.sampled_from(["chain", "segments", "parallel"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(), ("vision",), ("vision", "audio")]),
    st.integers(1, 9),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_every_schedule_is_legal(layout, stages, encoders, microbatches, seed, split, fused):
    if layout != "segments" and stages < 2 + (layout == "parallel") * (len(encoders) - 1):
        layout = "segments"
    ring = ring_of(layout, stages, encoders)
    graph = build_graph(ring, workload_of(ring, microbatches, seed=seed), split=split, fused=fused)
    for planner in (gpipe, interleaved, greedy, *([one_f_one_b] if layout != "segments" else [])):
        schedule = planner(graph)
        prove(schedule)
        assert lockstep(schedule) >= asynchronous(schedule) >= max(graph.rank_work)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 5), (4, 4), (4, 9)])
def test_costs_that_can_be_told_by_hand(stages, microbatches):
    """A pipeline of S stages runs M microbatches in M + S - 1 ticks per direction."""
    graph = plain(stages, microbatches)
    ticks = microbatches + stages - 1
    assert lockstep(gpipe(graph)) == ticks * 1 + ticks * 3
    assert asynchronous(gpipe(graph)) == ticks * 4
    assert asynchronous(one_f_one_b(graph)) == ticks * 4
    assert len(one_f_one_b(graph).ticks) == 2 * ticks
    assert max(graph.rank_work) / lockstep(gpipe(graph)) == pytest.approx(microbatches / ticks)


def test_interleaving_shortens_the_bubble():
    """With v chunks per rank the bubble is 1 / v as long; here v = 2, and
    chunks take half the time."""
    one_chunk = plain(4, 8, 1, 2, 2)
    two_chunks = plain(4, 8, 2, 1, 1)
    assert max(one_chunk.rank_work) == max(two_chunks.rank_work) == 32
    assert asynchronous(one_f_one_b(one_chunk)) - 32 == 2 * (
        asynchronous(interleaved(two_chunks)) - 32
    )


def test_one_f_one_b_holds_few_microbatches():
    """A rank holds as many microbatches as there are stages from it to the end; GPipe holds all."""
    graph = plain(4, 12)
    for rank, order in enumerate(one_f_one_b(graph).orders):
        live = np.cumsum([1 if graph.kind[n] == Kind.FORWARD else -1 for n in order])
        assert live.max() == 4 - rank
    assert slots_needed([one_f_one_b(graph)])[Pool.INPUT, 0] <= 4
    assert slots_needed([gpipe(graph)])[Pool.INPUT, 0] == 12


def test_gpipe_goes_back_last():
    for order in gpipe(plain(4, 6)).orders:
        kinds = [plain(4, 6).kind[n] for n in order]
        assert kinds == sorted(kinds)


def test_gpipe_does_not_go_back_among_forwards():
    """The backward of the last chunk includes its forward, but it waits until the forwards of the
    other ranks are done: it would make their ticks longer. At most one tick is lost."""
    ring = Ring(4, (Chain("language", (0, 1, 2, 3), (1, 1, 1, 1)),))
    ones = np.ones((4, 12), np.int64)
    graph = build_graph(ring, Workload((ChainWork(ones, ones, ones, ones),), ((),) * 12))
    kinds = [{graph.kind[n] for n in row if n >= 0} for row in gpipe(graph).ticks.tolist()]
    assert all(len(of_tick) == 1 for of_tick in kinds)
    forward = 12 + 3 - 1
    backward = 12 + 4 - 1
    assert lockstep(gpipe(graph)) == forward * 1 + backward * 3


def test_one_f_one_b_does_not_go_round_the_ring():
    ring = ring_of("segments", 4)
    with pytest.raises(PipelineError, match="wait for each other"):
        one_f_one_b(build_graph(ring, workload_of(ring, 6)))


def test_kept_residuals_save_the_recompute():
    """Every forward operation that keeps its residuals spares its backward the recomputation, and
    nothing else changes."""
    ring = ring_of("segments", 4)
    schedule = greedy(build_graph(ring, workload_of(ring, 6, seed=2)))
    with_residuals = keep_residuals(schedule, {(Pool.RESIDUAL, 0): 1, (Pool.RESIDUAL, 1): 3})
    prove(with_residuals)
    needed = slots_needed([with_residuals])
    assert 0 < needed[Pool.RESIDUAL, 0] <= 1 and 0 < needed[Pool.RESIDUAL, 1] <= 3
    saved_work = sum(schedule.graph.duration) - sum(durations(with_residuals))
    works = schedule.graph.workload.chains
    graph = schedule.graph
    expected = sum(
        int(works[graph.chain[n]].recompute[graph.depth[n], graph.microbatch[n]])
        for n in with_residuals.keepers
    )
    assert saved_work == expected > 0
    assert lockstep(with_residuals) <= lockstep(schedule)
