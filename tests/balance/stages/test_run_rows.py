"""Packing the items of microbatches into rows."""

import numpy as np
import pytest

from jaxmllm.balance.stages.run_rows import pack_rows, rows_in_turn


def test_rows_hold_items_side_by_side():
    microbatch = np.array([0, 1, 0, 0, 1, 0])
    slots = np.array([5, 7, 4, 6, 3, 5])
    row, offset = pack_rows(microbatch, slots, 10)
    assert {index: row[microbatch == index].max() + 1 for index in (0, 1)} == {0: 2, 1: 1}
    used_slots = {
        (m, r, s)
        for m, r, o, n in zip(microbatch, row, offset, slots, strict=True)
        for s in range(o, o + n)
    }
    assert len(used_slots) == slots.sum() and max(s for _, _, s in used_slots) < 10


def test_an_item_that_no_row_holds_is_named():
    with pytest.raises(ValueError, match="item 0 has 12 slots, but rows have 10"):
        pack_rows(np.zeros(1, np.int64), np.array([12]), 10)


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_rows_filled_in_turn_hold_what_they_can_and_join_neighbours_alone(reach):
    """Microbatches of 12 slots in rows of 10 need two rows each by themselves, but 1.25 rows when
    rows are filled in turn and shared by neighbours."""
    random = np.random.default_rng(0)
    microbatch = np.repeat(np.arange(16), 6)
    replica = np.tile([0, 1], 48)
    slots = random.integers(1, 8, 96)
    row, row_count = rows_in_turn(microbatch, replica, slots, (10,), 2, reach)
    assert row.max() + 1 == row_count
    for replica_number in (0, 1):
        in_replica = replica == replica_number
        filled = np.bincount(row[in_replica], slots[in_replica], row_count)
        assert filled.max() <= 10
        assert filled.sum() / (10 * (row[in_replica].max() + 1)) > 0.8
        for row_number in range(row_count):
            microbatches = microbatch[in_replica & (row == row_number)]
            assert len(microbatches) == 0 or microbatches.max() - microbatches.min() <= reach


def test_rows_that_take_items_for_longer_are_fewer():
    """Microbatches of 4, 4, 4, 4 and 1 slots in rows of 9: the last finds room only in a row that
    was begun before the one before it."""
    microbatch = np.arange(5)
    slots = np.array([4, 4, 4, 4, 1])
    row, row_count = rows_in_turn(microbatch, np.zeros(5, np.int64), slots, (9,), 1)
    assert row.tolist() == [0, 0, 1, 1, 2] and row_count == 3
    row, row_count = rows_in_turn(microbatch, np.zeros(5, np.int64), slots, (9,), 1, reach=4)
    assert row.tolist() == [0, 0, 1, 1, 0] and row_count == 2


def test_rows_begun_for_short_items_are_small():
    """Rows of one capacity are numbered together over replicas, and long rows take short items
    where they have room."""
    microbatch = np.zeros(6, np.int64)
    replica = np.array([0, 0, 0, 0, 1, 1])
    slots = np.array([9, 3, 3, 3, 2, 1])
    row, row_count = rows_in_turn(microbatch, replica, slots, (12, 6), 2)
    assert row.tolist() == [0, 0, 1, 1, 1, 1] and row_count == 2
