"""Dealing the blocks of a row to parts: against dense masks, brute force, and the
simple ways to do it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxmllm.attention.mask import TokenIds, causal_ids, item_ids
from jaxmllm.attention.parts import (
    Search,
    assign_blocks,
    block_work,
    contiguous,
    longest_first,
    span_work,
    zigzag,
)
from jaxmllm.balance.records import RowClass
from jaxmllm.balance.sizes.inputs import Alignment


def dense_work(document, group, position, block, window=1 << 20):
    """Work of every query block in half tiles, from the dense mask: a tile on the diagonal with
    nothing above it counts half."""
    slots = np.arange(len(document))
    distance = position[:, None] - position
    visible = (group[:, None] == group) & (group > 0) | (distance >= 0) & (distance < window)
    visible &= (document[:, None] == document) & (document > 0)
    tiles = (len(document) // block, block)
    touched = visible.reshape(tiles + tiles).any(axis=(1, 3))
    above_diagonal = (visible & (slots[:, None] < slots)).reshape(tiles + tiles).any(axis=(1, 3))
    return 2 * touched.sum(axis=1) - (touched & ~above_diagonal).diagonal()


def heaviest(work, owner):
    """Work of the busiest rank."""
    return max(
        sum(w for w, o in zip(work, owner, strict=True) if o == rank)
        for rank in set(owner.tolist())
    )


def least_possible(work, ranks):
    """Work of the busiest rank in the best of all ways to deal out equally many blocks."""
    blocks_per_rank = len(work) // ranks

    def rest(blocks):
        """The same for the blocks that are left, where the first block
        decides which rank is next."""
        if not blocks:
            return 0
        first_block, *other_blocks = blocks
        shares = (
            set(companions) | {first_block}
            for companions in combinations(other_blocks, blocks_per_rank - 1)
        )
        return min(
            max(sum(work[b] for b in share), rest([b for b in other_blocks if b not in share]))
            for share in shares
        )

    return rest(list(range(len(work))))


@st.composite
def packed_ids(draw):
    """Ids of documents one after the other, with images in them and padding
    between, and the block size."""
    block = draw(st.sampled_from([1, 2, 4, 7]))
    pieces = draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 12)), min_size=1, max_size=12
        )
    )
    document = []
    group = []
    current = 1
    for index, (kind, image, length) in enumerate(pieces):
        current += kind == 0
        document += [0 if kind == 1 else current] * length
        group += [index + 1 if image else 0] * length
        current += kind == 1
    tokens = -(-len(document) // block) * block
    padding = [0] * (tokens - len(document))
    return np.array([document + padding, group + padding, range(tokens)], np.int32), block


@st.composite
def any_ids(draw):
    """Ids of documents and groups in pieces, with repeated positions in any
    order, and the block size."""
    block = draw(st.sampled_from([1, 2, 4]))
    blocks = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    columns = [
        random.integers(0, high, blocks * block).astype(np.int32)
        for high in (4, 3, draw(st.integers(1, 40)))
    ]
    if draw(st.booleans()):
        columns[0].sort()
    if draw(st.booleans()):
        columns[2].sort()
    return columns, block


@given(packed_ids())
def test_work_of_packed_rows_is_that_of_the_dense_mask(drawn):
    ids, block = drawn
    np.testing.assert_array_equal(block_work(TokenIds(*ids), block), dense_work(*ids, block))


@given(any_ids())
def test_work_of_any_row_is_that_of_the_dense_mask(drawn):
    ids, block = drawn
    np.testing.assert_array_equal(block_work(TokenIds(*ids), block), dense_work(*ids, block))


@given(st.one_of(packed_ids(), any_ids()), st.sampled_from([1, 2, 5, 30]))
def test_work_in_windows_is_that_of_the_dense_mask(drawn, window):
    ids, block = drawn
    narrow = TokenIds(*ids).within(window)
    np.testing.assert_array_equal(block_work(narrow, block), dense_work(*ids, block, window))


def test_an_encoder_row_is_seen_in_both_directions():
    """Every item is one group, and positions are all alike."""
    segments = np.repeat([1, 2, 0], [10, 14, 8]).astype(np.int32)
    work = block_work(item_ids(segments), 8)
    assert work.tolist() == [4, 6, 4, 0]  # blocks 0 and 2 see two blocks, block 1 sees three


def test_work_of_a_causal_document():
    tokens = np.arange(32, dtype=np.int32)
    assert block_work(causal_ids(np.ones_like(tokens)), 8).tolist() == [1, 3, 5, 7]
    assert span_work(np.zeros_like(tokens), tokens + 1, 8).tolist() == [1, 3, 5, 7]


def test_a_row_of_padding_is_no_work():
    padding = np.zeros(32, np.int32)
    assert block_work(item_ids(padding), 8).tolist() == [0] * 4


works = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=64),
    st.lists(st.sampled_from([1, 7, 255]), min_size=1, max_size=64),
    st.integers(1, 64).map(lambda n: list(range(1, 2 * n, 2))),
    st.lists(st.integers(0, 10**14), min_size=1, max_size=32),
)


@given(works, st.integers(1, 9))
def test_ranks_hold_equally_many_blocks_and_no_simple_way_is_better(work, ranks):
    blocks_per_rank = len(work) // ranks
    assume(blocks_per_rank)
    work = work[: blocks_per_rank * ranks]
    owner = assign_blocks(work, ranks)
    assert owner.dtype == np.int32
    assert np.bincount(owner, minlength=ranks).tolist() == [blocks_per_rank] * ranks
    largest_load = heaviest(work, owner)
    assert largest_load <= heaviest(work, contiguous(len(work), ranks))
    assert largest_load <= heaviest(work, longest_first(np.array(work), ranks, blocks_per_rank))
    if blocks_per_rank % 2 == 0:
        assert largest_load <= heaviest(work, zigzag(len(work), ranks))
    assert owner.tolist() == assign_blocks(np.array(work), ranks).tolist()


@given(st.lists(st.integers(0, 20), min_size=8, max_size=8), st.sampled_from([2, 4]))
def test_few_blocks_are_shared_out_nearly_as_well_as_can_be(work, ranks):
    """Eight blocks can still be dealt by brute force; the search may be 10 % worse."""
    assert heaviest(work, assign_blocks(work, ranks)) <= least_possible(work, ranks) * 1.1 + 1e-9


@pytest.mark.parametrize(
    ("work", "ranks"), [(range(1, 65), 8), ([2 * i + 1 for i in range(256)], 32), ([3] * 12, 4)]
)
def test_even_work_is_shared_out_evenly(work, ranks):
    total = sum(work)
    assert heaviest(list(work), assign_blocks(list(work), ranks)) == total // ranks


def test_two_blocks_at_a_time_are_swapped_where_one_does_not_help():
    """Without swaps of pairs the search ends at 20."""
    work = [5, 7, 1, 5, 4, 10, 1, 5]
    assert heaviest(work, assign_blocks(work, 2)) == least_possible(work, 2) == 19
    assert heaviest(work, assign_blocks(work, 2, Search(pairs=0))) == 20


def test_the_least_load_knows_what_parity_and_the_largest_block_demand():
    odd_work = [1, 1, 1, 3, 3, 3, 5, 5]  # sums of four odd numbers are even
    assert heaviest(odd_work, assign_blocks(odd_work, 2)) == least_possible(odd_work, 2) == 12
    with_large_block = [100, 1, 2, 3]
    assert heaviest(with_large_block, assign_blocks(with_large_block, 2)) == 101


def test_ties_go_to_the_lower_block_and_rank():
    assert assign_blocks([5] * 8, 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert longest_first(np.array([2, 9, 2, 9]), 2).tolist() == [0, 0, 1, 1]


def test_the_simple_ways():
    assert contiguous(8, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert zigzag(8, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    unlimited = longest_first(np.array([9, 1, 1, 1]), 2)
    assert unlimited.tolist() == [0, 1, 1, 1]
    assert longest_first(np.array([9, 1, 1, 1]), 2, limit=2).tolist() == [0, 1, 1, 0]


def test_the_parts_of_a_packed_row_do_equal_work():
    """Two documents with images, dealt to four parts within half a percent."""
    tokens = np.arange(4096, dtype=np.int32)
    ids = TokenIds(
        1 + tokens // 2500,
        np.where(tokens % 900 < 300, 1 + tokens // 900, 0).astype(np.int32),
        tokens,
    )
    work = dense_work(*ids[:3], 128)
    owner = assign_blocks(block_work(ids, 128), 4)
    load = np.bincount(owner, work, 4)
    assert load.max() <= 1.005 * load.mean()
    np.testing.assert_array_equal(owner, assign_blocks(work, 4))


def test_one_clip_among_short_documents_is_shared_out_evenly():
    """The blocks of the clip are the heaviest by far, and each of 32 ranks would hold only three or
    four of 128 slots; blocks of 64 level the load."""
    tokens = 65_536
    load_ratios = {}
    small_block = Alignment(128, small=64).attention_block(RowClass(tokens // 32, 32))
    for block in (128, small_block):
        random = np.random.default_rng(0)
        for clip in (13_500, 14_600, 15_700, 16_384):
            lengths = [clip, *random.integers(50, 1200, tokens // 300)]
            document = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[:tokens]
            work = block_work(item_ids(document), block)
            load = np.bincount(assign_blocks(work, 32), work, 32)
            load_ratios[block, clip] = load.max() / load.mean()
    assert load_ratios[128, 13_500] > 1.05
    assert max(ratio for (block, _), ratio in load_ratios.items() if block == 64) < 1.02


@pytest.mark.parametrize(
    ("work", "ranks", "message"),
    [
        ([1] * 10, 4, "10 blocks .* 4 ranks"),
        ([], 4, "0 blocks .* 4 ranks"),
        ([1], 0, "1 blocks .* 0 ranks"),
        ([1, -1], 2, "-1 at least"),
        ([2**59, 2**59], 2, r"2\*\*60 / 2"),
        ([1.0, 2.0], 2, "float64"),
        ([[1, 2]], 1, r"shape \(1, 2\)"),
    ],
)
def test_work_that_cannot_be_shared_is_refused(work, ranks, message):
    with pytest.raises(ValueError, match=message):
        assign_blocks(np.array(work, np.int64) if work == [] else work, ranks)


def test_work_of_a_row_that_is_no_whole_number_of_blocks_is_refused():
    ones = np.ones(10, np.int32)
    with pytest.raises(ValueError, match=r"10 tokens .* blocks of 4"):
        block_work(TokenIds(ones, ones, ones), 4)
