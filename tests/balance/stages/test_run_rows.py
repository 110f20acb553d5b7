"""Rows of the items of a microbatch."""

import numpy as np
import pytest

from jaxmllm.balance.stages.run_rows import pack_rows


def test_rows_hold_items_side_by_side():
    microbatch, slots = np.array([0, 1, 0, 0, 1, 0]), np.array([5, 7, 4, 6, 3, 5])
    row, offset = pack_rows(microbatch, slots, 10)
    assert {number: row[microbatch == number].max() + 1 for number in (0, 1)} == {0: 2, 1: 1}
    used = {
        (m, r, s)
        for m, r, o, n in zip(microbatch, row, offset, slots, strict=True)
        for s in range(o, o + n)
    }
    assert len(used) == slots.sum() and max(s for _, _, s in used) < 10


def test_an_item_that_no_row_holds_is_named():
    with pytest.raises(ValueError, match="item 0 has 12 slots, but rows have 10"):
        pack_rows(np.zeros(1, np.int64), np.array([12]), 10)
