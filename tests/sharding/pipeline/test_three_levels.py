"""Chains that name their readers: encoders feed a language model, which feeds a generator and
may have a loss itself."""

import dataclasses

import numpy as np
import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Graph, Kind, Workload
from sharding.pipeline.layer_costs import Layer, layer_costs
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table import Table, make_table
from sharding.pipeline.table_spec import TableSpec, action_of
from sharding.pipeline.validator import validate

VISION, LANGUAGE, DIFFUSION = range(3)
# Vision has rows 0 to 2, language 0 to 3, diffusion 0 to 2. Nothing reads row 2 of language, and
# only that row reads row 2 of vision. READ is by language row, INPUTS by diffusion row: (chain,
# row) each.
READ = {LANGUAGE: (((0, 0),), ((0, 0), (0, 1)), ((0, 2),), ())}
INPUTS = (((1, 0),), ((1, 0), (1, 1)), ((1, 3),))
PLACES = {
    "chain": ((0,), (0, 1), (1, 2, 3)),
    "parallel": ((0,), (1,), (2, 3)),
    "segments": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3)),
}


def ring_of(layout: str, has_loss: bool) -> Ring:
    """A ring of three chains in one of the layouts of `PLACES`, with one layer per chunk."""
    vision, language, diffusion = PLACES[layout]
    return Ring(
        4,
        (
            Chain("vision", vision, (1,) * len(vision), reader="language"),
            Chain("language", language, (1,) * len(language), has_loss=has_loss, optional=True),
            Chain("diffusion", diffusion, (1,) * len(diffusion)),
        ),
    )


def workload_of(ring: Ring) -> Workload:
    def work(depth: int, rows: int) -> ChainWork:
        ones = np.ones((depth, rows), np.int64)
        return ChainWork(2 * ones, 2 * ones, 2 * ones, 3 * ones)

    works = (work(chain.depth, rows) for chain, rows in zip(ring.chains, (3, 4, 3), strict=True))
    return Workload(tuple(works), INPUTS, READ)


def table_of(graph: Graph, schedule: str) -> Table:
    """The table of a named schedule, with as many slots as it needs."""
    slots = dict.fromkeys(((pool, c) for pool, c in slots_of_all(graph)), graph.size)
    ordered = scheduler_of(schedule).make(graph, slots, 4)
    spec = TableSpec(graph.ring, slots_needed([ordered]), len(ordered.ticks), (2, 2))
    return make_table(ordered, spec)


def slots_of_all(graph: Graph):
    return {buffer.pool_key for buffer in graph.buffers}


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "layout, schedule",
    [
        *((layout, schedule) for layout in PLACES for schedule in ("gpipe", "greedy", "search")),
        ("chain", "1f1b"),
        ("parallel", "1f1b"),
        ("segments", "interleaved"),
    ],
)
def test_every_schedule_is_proven(layout, schedule, split, has_loss):
    ring = ring_of(layout, has_loss)
    graph = build_graph(ring, workload_of(ring), split=split)
    table = table_of(graph, schedule)
    validate(table, graph)
    # Each row with a loss counts it once: all rows of the generator, and all rows of the language
    # model where it has a loss.
    column = table.spec.columns
    counts = table.rows[table.rows[..., column["count_loss"]] == 1]
    chains = (counts[:, column["action"]] - 1) // len(Kind)
    assert np.bincount(chains, minlength=3).tolist() == [0, 4 if has_loss else 0, 3]


def backwards(graph: Graph, chain: int) -> set[int]:
    """Rows of a chain that have a backward operation."""
    return {m for kind, c, _, m in graph.number if c == chain and kind == Kind.BACKWARD}


def test_what_no_gradient_reaches_has_no_backward():
    """Without a loss of its own, language row 2 has no gradient, and neither has the vision
    row that it alone reads."""
    for has_loss, language, vision in ((True, {0, 1, 2, 3}, {0, 1, 2}), (False, {0, 1, 3}, {0, 1})):
        ring = ring_of("chain", has_loss)
        graph = build_graph(ring, workload_of(ring))
        assert backwards(graph, LANGUAGE) == language
        assert backwards(graph, VISION) == vision


def test_a_row_that_nothing_reads_is_a_group_of_its_own():
    ring = ring_of("chain", True)
    graph = build_graph(ring, workload_of(ring))
    assert graph.groups == 4
    forward = {
        (c, m): graph.group[n]
        for (kind, c, d, m), n in graph.number.items()
        if kind == Kind.FORWARD and d == 0
    }
    # Generator rows 0 and 1, then the language row that nothing reads, then generator row 2.
    assert [forward[DIFFUSION, m] for m in range(3)] == [0, 1, 3]
    assert [forward[LANGUAGE, m] for m in range(4)] == [0, 1, 2, 3]
    assert [forward[VISION, m] for m in range(3)] == [0, 1, 2]
    state_group = graph.group[graph.number[Kind.BACKWARD, LANGUAGE, 0, 0]]
    assert state_group == 1, "its states are read twice"


def test_a_wrong_gradient_is_named():
    """The table lets the backward operation of a row that nothing reads look for a gradient."""
    ring = ring_of("chain", True)
    graph = build_graph(ring, workload_of(ring))
    table = table_of(graph, "greedy")
    columns = table.spec.columns
    last_depth = ring.chains[LANGUAGE].depth - 1
    chunk = ring.chains[LANGUAGE].local(last_depth)
    cells = {"action": action_of(LANGUAGE, Kind.BACKWARD), "chunk": chunk, "microbatch": 2}
    match = np.ones(table.rows.shape[:2], bool)
    for name, value in (cells | {"last": 1}).items():
        match &= table.rows[..., columns[name]] == value
    tick, rank = np.argwhere(match)[0]
    rows = table.rows.copy()
    assert rows[tick, rank, columns["gradient"]] == -1
    rows[tick, rank, columns["gradient"]] = 0
    with pytest.raises(PipelineError, match="reads gradient slot 0, but nothing returns one"):
        validate(dataclasses.replace(table, rows=rows), graph)


def test_a_reader_comes_after_those_that_it_reads():
    with pytest.raises(PipelineError, match="language is read by 'vision', which is none of"):
        Ring(1, (Chain("vision", (0,), (1,)), Chain("language", (0,), (1,), reader="vision")))


def test_gradients_flow_to_whatever_is_trained_above():
    """A chain has a backward pass if it or any chain that feeds it is trained."""

    def layers(trainable: bool) -> list[Layer]:
        return [Layer("any", 1, trainable=trainable) for _ in range(3)]

    readers = {"vision": "language", "language": "diffusion"}
    for trained, expected in (
        ({"vision"}, (True, True, True)),
        ({"language"}, (False, True, True)),
        ({"diffusion"}, (False, False, True)),
    ):
        chains = {name: layers(name in trained) for name in ("vision", "language", "diffusion")}
        costs = layer_costs(chains, readers)
        assert tuple(any(cost.backward for cost in costs[name]) for name in chains) == expected
