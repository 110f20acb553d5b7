"""The validator names whatever is wrong with a table: a valid table is changed
in one cell at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import Kind
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.table import Table
from sharding.pipeline.table_spec import action_of
from sharding.pipeline.validator import validate
from tests.sharding.pipeline.models import padded_table_of, ring_of, workload_of

RING = ring_of("segments", 4)
GRAPH = build_graph(RING, workload_of(RING, 6, seed=1, classes=True), split=True)


TABLE = padded_table_of(GRAPH)


def changed(table: Table, tick: int, rank: int, column: str, value: int) -> Table:
    """The table with one cell replaced."""
    rows = table.rows.copy()
    rows[tick, rank, table.spec.columns[column]] = value
    return dataclasses.replace(table, rows=rows)


def find(table: Table, wanted: dict[str, int | None]) -> tuple[int, int]:
    """Tick and rank of the first row whose columns have the wanted values, where
    None stands for any slot."""
    match = np.ones(table.rows.shape[:2], bool)
    match[table.count :] = False
    for column, value in wanted.items():
        cells = table.rows[..., table.spec.columns[column]]
        match &= cells >= 0 if value is None else cells == value
    tick, rank = np.argwhere(match)[0]
    return int(tick), int(rank)


def test_a_good_table_is_good():
    validate(TABLE, GRAPH)
    assert (TABLE.rows[TABLE.count :, :, 0] == 0).all()


# Each case: values that find a row, the column that is changed there, its new value, and the
# message.
FORWARD, BACK, WEIGHT = (
    action_of(1, kind) for kind in (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
)
TOWER = action_of(0, Kind.FORWARD)
TOWER_BACK = action_of(0, Kind.INPUT_GRADIENT)
IS_FIRST = "grad_is_first.0.0"
WRONG = {
    "operation left out": ({"action": WEIGHT}, "action", 0, "leaves out weight gradient"),
    "operation of another component": (
        {"action": FORWARD},
        "action",
        TOWER,
        "forward of vision .* was done before",
    ),
    "no such action": ({"action": FORWARD}, "action", 99, "action 99, which does not exist"),
    "no such chunk": (
        {"action": FORWARD},
        "chunk",
        7,
        "chunk 7 of language, which it does not hold",
    ),
    "no such microbatch": ({"action": FORWARD}, "microbatch", 40, "not in this batch"),
    "done twice": ({"action": FORWARD, "microbatch": 1}, "microbatch", 0, "was done before"),
    "class of another row": (
        {"action": FORWARD, "row_class": 1},
        "row_class",
        0,
        "row_class 0 instead of 1",
    ),
    "row of another microbatch": ({"action": FORWARD, "row": 1}, "row", 0, "row 0 instead of 1"),
    "layers": ({"action": FORWARD}, "layers", 9, "layers 9 instead of"),
    "first": ({"action": FORWARD, "first": 1}, "first", 0, "first 0 instead of 1"),
    "last": ({"action": TOWER, "last": 1}, "last", 0, "last 0 instead of 1"),
    "loss counted twice": (
        {"action": FORWARD, "first": 0},
        "count_loss",
        1,
        "count_loss 1 instead of 0",
    ),
    "loss not counted": ({"action": BACK, "last": 1}, "count_loss", 0, "count_loss 0 instead of 1"),
    "input from a wrong slot": (
        {"action": FORWARD, "input": 1},
        "input",
        0,
        "needs the input of language",
    ),
    "slot that does not exist": (
        {"action": FORWARD, "input": 0},
        "input",
        99,
        "input slot 99 of language",
    ),
    "gradient from a wrong slot": (
        {"action": BACK, "gradient": 0},
        "gradient",
        1,
        "needs the gradient of language",
    ),
    "tokens from a wrong slot": (
        {"action": FORWARD, "tokens.0.0": 0},
        "tokens.0.0",
        1,
        "needs the tokens of vision",
    ),
    "tokens of nobody": (
        {"action": FORWARD, "first": 1, "tokens.0.3": -1},
        "tokens.0.3",
        0,
        "which this microbatch",
    ),
    "share of a wrong slot": (
        {"action": BACK, IS_FIRST: 0},
        "grad_slot.0.0",
        99,
        "slot 99 of vision",
    ),
    "share added to nothing": (
        {"action": BACK, IS_FIRST: 1},
        IS_FIRST,
        0,
        "adds to token gradient slot",
    ),
    "share that replaces another": (
        {"action": BACK, IS_FIRST: 0},
        IS_FIRST,
        1,
        "from language microbatches",
    ),
    "residuals of another": (
        {"action": BACK, "read_residual": None},
        "read_residual",
        5,
        "slot 5 of language, of which there are 2",
    ),
    "residuals not kept": (
        {"action": FORWARD, "write_residual": None},
        "write_residual",
        -1,
        "needs the residual of language",
    ),
    "pending of another": (
        {"action": WEIGHT, "pending": 0},
        "pending",
        1,
        "needs the pending of language",
    ),
    "nothing received": (
        {"receive.input.1": None},
        "receive.input.1",
        -1,
        "needs the input of language",
    ),
    "received, not sent": (
        {"action": 0, "receive.gradient.1": -1},
        "receive.gradient.1",
        0,
        "sends nothing",
    ),
    "result stays": ({"action": TOWER, "last": 0}, "output", 0, "sends nothing"),
    "gradient not sent": (
        {"send.token_gradient.0": None},
        "send.token_gradient.0",
        -1,
        "sends nothing",
    ),
}


@pytest.mark.parametrize(("where", "column", "value", "message"), WRONG.values(), ids=WRONG)
def test_the_validator_names_what_is_wrong(where, column, value, message):
    tick, rank = find(TABLE, where)
    with pytest.raises(PipelineError, match=message):
        validate(changed(TABLE, tick, rank, column, value), GRAPH)


def test_a_wire_that_does_not_move():
    moves = TABLE.wire_active.copy()
    tick, wire = np.argwhere(moves)[0]
    moves[tick, wire] = 0
    with pytest.raises(PipelineError, match=f"tick {tick}, rank .* sends nothing on it"):
        validate(dataclasses.replace(TABLE, wire_active=moves), GRAPH)


def test_a_wire_that_moves_smaller_rows_alone():
    moves = TABLE.wire_active.copy()
    tick, wire = np.argwhere(moves == 1)[0]
    moves[tick, wire] = 2
    with pytest.raises(PipelineError, match=r"of a row of class 0, but .* carries rows of class 1"):
        validate(dataclasses.replace(TABLE, wire_active=moves), GRAPH)


def test_a_table_cut_short():
    with pytest.raises(PipelineError, match="leaves out"):
        validate(dataclasses.replace(TABLE, count=TABLE.count - 1), GRAPH)
    with pytest.raises(PipelineError, match="room is for"):
        validate(dataclasses.replace(TABLE, count=TABLE.spec.ticks + 1), GRAPH)


def test_a_table_of_another_batch():
    other_graph = build_graph(RING, workload_of(RING, 6, seed=2), split=True)
    with pytest.raises(PipelineError, match=r"has row_class \d instead of \d"):
        validate(TABLE, other_graph)
    with pytest.raises(PipelineError, match="another ring"):
        validate(TABLE, build_graph(ring_of("chain", 4), workload_of(ring_of("chain", 4), 2)))


@given(st.integers(0, 10_000))
def test_ticks_change_places_only_if_nothing_waits(seed):
    """With two ticks exchanged, the table may be accepted only if no operation then runs before
    one that it waits for."""
    random = np.random.default_rng(seed)
    earlier, later = sorted(random.choice(TABLE.count, 2, replace=False).tolist())
    order = np.arange(TABLE.spec.ticks)
    order[[earlier, later]] = later, earlier
    swapped = dataclasses.replace(
        TABLE, rows=TABLE.rows[order], wire_active=TABLE.wire_active[order]
    )
    tick = {}
    for t in range(TABLE.count):
        for rank in range(4):
            row = dict(zip(TABLE.spec.columns, swapped.rows[t, rank].tolist(), strict=True))
            if row["action"]:
                c, kind = divmod(row["action"] - 1, len(Kind))
                chain = RING.chains[c]
                depth = next(
                    d
                    for d in range(chain.depth)
                    if (chain.stages[d], chain.local(d)) == (rank, row["chunk"])
                )
                tick[GRAPH.number[kind, c, depth, row["microbatch"]]] = t
    too_late = any(
        tick[n] + ticks > tick[successor]
        for n in range(GRAPH.size)
        for successor, ticks in GRAPH.successors[n]
    ) or any(
        tick[n] >= tick[successor] for n in range(GRAPH.size) for *_, successor in GRAPH.returns[n]
    )
    try:
        validate(swapped, GRAPH)
    except PipelineError:
        return
    assert not too_late
