"""Assigning the blocks of a row to the devices that hold it together, for equal work on all.

    ids of the tokens [T] --block_work--> work [N] --assign_blocks--> owner [N]

Every device gathers all keys and values, so any of them may compute any query block. Blocks cost
unevenly in attention (the last one of a document sees all of it) but equally elsewhere. So every
rank holds exactly N / R blocks, and among all such shares one is sought whose heaviest rank has as
little attention work as can be.

    ranks 2, work 1 2 3 4 | 1 2 3 4         owner 0 1 1 0 | 1 0 0 1         10 on each

Letters: T tokens of a row, N blocks of it, R ranks, n = N / R blocks per rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxmllm.arrays import Ints, Longs, ceil_divide
from jaxmllm.attention.mask import TokenIds, seen_spans, visible
from jaxmllm.attention.tiles import visible_tiles

TILE = 2  # work of a tile; the tile of a causal block with itself is half visible, and counts half


# ---------------------------------------------------------------------------- work


def block_work(ids: TokenIds, block: int) -> Longs:
    """Attention work of every query block of a row, in half tiles: [N].

    A tile (query block, key block) counts 2 if any pair in it is visible, however few, because
    attention computes whole tiles; but a block's tile with itself counts 1 if none of its tokens
    sees a later one, as in causal text.

    Rows as the planner packs them (`seen_spans`) take O(T). Others are counted just as exactly, but
    slowly.

    Raises:
      ValueError: `block` does not divide T.
    """
    spans = None if len(ids.document) % block else seen_spans(ids)
    if spans is not None:
        return span_work(*spans, block)
    # If the block does not divide T, `spans` is None, and this raises the error.
    tiles = visible_tiles(ids, block)
    blocks = ids.map(lambda column: column.reshape(-1, block))
    looks_ahead = np.zeros(len(blocks.document), np.bool_)
    # Whether any token of a block sees a later one: all pairs at one distance at a time.
    for distance in range(1, block):
        earlier = blocks.at(np.s_[:, :-distance])
        later = blocks.at(np.s_[:, distance:])
        looks_ahead |= visible(earlier, later).any(axis=1)
    # Blocks of padding have no tile with themselves that could count half.
    held = blocks.document.max(axis=1) > 0
    return TILE * np.bincount(tiles.query, minlength=len(held)) - (held & ~looks_ahead)


def span_work(start: Ints, stop: Ints, block: int) -> Longs:
    """As `block_work`, where token t sees the tokens [start[t], stop[t]): [N].

    Args:
      start, stop: [T]; a token is in its own span, which begins and ends with a token that is seen;
        padding has stop[t] <= start[t].
      block: tokens of a block; divides T.
    """
    # Every token is in its own span, so spans of neighbours touch: except for padding, what a block
    # sees is one interval.
    real = (stop > start).reshape(-1, block)
    held = real.any(axis=1)
    # [N + 1], so that a difference is the number of blocks in an interval that hold tokens.
    held_before = np.concatenate([[0], np.cumsum(held)])
    low = np.where(real, start.reshape(-1, block), len(start)).min(axis=1)
    high = np.where(real, stop.reshape(-1, block), 0).max(axis=1)
    tiles = held_before[-(-high // block)] - held_before[low // block]
    token = np.arange(len(stop), dtype=np.int32).reshape(-1, block)
    # All real tokens in a span are seen, and one ends it. So a token whose span continues after it
    # sees the next real one, which is in the same block unless the token is the last one there.
    last_real = np.where(real, token, -1).max(axis=1)
    looks_ahead = (real & (stop.reshape(-1, block) > token + 1) & (token < last_real[:, None])).any(
        axis=1
    )
    return np.where(held, TILE * tiles - ~looks_ahead, 0)


# ---------------------------------------------------------------------------- assignment


@dataclass(frozen=True)
class Search:
    """Constants of the search for parts of equal work."""

    # Stop when the heaviest rank is at most 1/4096 above its lower bound
    near_bound: int = 4096
    swaps_per_rank: int = 8  # most swaps, on average over the ranks
    # Swaps of two blocks for two look at this many pairs of blocks of the lightest ranks. A rank
    # with more pairs holds so many blocks that swaps of one suffice.
    pairs: int = 1 << 11


DEFAULT_SEARCH = Search()


def assign_blocks(work: ArrayLike, ranks: int, search: Search = DEFAULT_SEARCH) -> Ints:
    """Assign equally many blocks to every rank, and as little work to the heaviest as can be found.

    By descending work, each block is assigned to the lightest rank that has room; then the heaviest
    rank swaps one or two blocks with another rank, while that helps. If this does not come near the
    lower bound (`Search.near_bound`), swaps start from zigzag, too. The heaviest rank never has
    more work than with contiguous shares, with zigzag, or with longest-first under the same limit.
    Ties favour the lower block and rank.

    Args:
      work: [N] integers, at least 0, with a sum below 2**60 / R.
      ranks: R.

    Returns:
      [N] int32 rank of each block; N / R blocks on each.

    Raises:
      ValueError: N is no multiple of R, or the work is not as above.
    """
    amounts = np.asarray(work)
    _check_blocks(amounts, ranks)
    amounts = amounts.astype(np.int64)
    blocks = len(amounts)
    blocks_per_rank = blocks // ranks
    bound = _load_bound(amounts, ranks)
    enough = bound + bound // search.near_bound
    best, max_load = _swapped_owners(
        amounts, longest_first(amounts, ranks, blocks_per_rank), ranks, enough, search
    )
    starts = [(contiguous(blocks, ranks), False)]
    if blocks_per_rank % 2 == 0:
        starts.append((zigzag(blocks, ranks), max_load > enough))
    # Swaps never raise the heaviest load. To end no higher than a start, it is enough to try it
    # where it is lower as it stands.
    for start, promising in starts:
        if promising or _rank_loads(amounts, start, ranks).max() < max_load:
            owner, load = _swapped_owners(amounts, start, ranks, enough, search)
            if load < max_load:
                best = owner
                max_load = load
    return best


def _load_bound(work: Longs, ranks: int) -> int:
    """Lower bound on the work of the heaviest rank.

    It is at least the mean, and at least the largest block together with the smallest ones. And all
    sums of N / R blocks are equal modulo the common divisor of the differences between blocks, so
    it is rounded up to such a sum.
    """
    blocks_per_rank = len(work) // ranks
    ascending = np.sort(work)
    largest_with_smallest = int(ascending[: blocks_per_rank - 1].sum() + ascending[-1])
    bound = max(ceil_divide(int(work.sum()), ranks), largest_with_smallest)
    divisor = int(np.gcd.reduce(ascending - ascending[0]))
    return bound + (blocks_per_rank * int(ascending[0]) - bound) % divisor if divisor else bound


def _check_blocks(work: NDArray[np.integer], ranks: int) -> None:
    if work.ndim != 1 or not np.issubdtype(work.dtype, np.integer):
        raise ValueError(
            f"work must be one integer per block, not {work.dtype} of shape {work.shape}"
        )
    if ranks < 1 or not len(work) or len(work) % ranks:
        raise ValueError(f"{len(work)} blocks cannot be shared out evenly over {ranks} ranks")
    smallest = int(work.min())
    total = sum(work.tolist())
    if smallest < 0 or total * ranks >= 1 << 60:
        raise ValueError(
            f"work must be at least 0 and sum to less than 2**60 / {ranks}, "
            f"but is {smallest} at least and sums to {total}"
        )


def contiguous(blocks: int, ranks: int) -> Ints:
    """[N] owner: rank r holds the r-th of R equal stretches."""
    return (np.arange(blocks) * ranks // blocks).astype(np.int32)


def zigzag(blocks: int, ranks: int) -> Ints:
    """[N] owner: of 2 R equal stretches rank r holds the r-th from either end, which is even in
    causal text. Ranks hold equally many blocks if 2 R divides the number of blocks."""
    stretch = contiguous(blocks, 2 * ranks)
    return np.minimum(stretch, 2 * ranks - 1 - stretch)


def longest_first(work: Longs, ranks: int, limit: int | None = None) -> Ints:
    """[N] owner: by descending work, each block is assigned to the lightest of the ranks with fewer
    than `limit` blocks."""
    amounts = work.tolist()
    limit = len(work) if limit is None else limit
    owner = np.empty(len(amounts), np.int32)
    room = [limit] * ranks
    # A heap of (load, rank) for ranks with room; ascending ranks with load 0 already form one.
    lightest = [(0, rank) for rank in range(ranks)]
    for block in np.argsort(-work, kind="stable").tolist():
        load, rank = lightest[0]
        owner[block] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(lightest, (load + amounts[block], rank))
        else:
            heapq.heappop(lightest)
    return owner


# (other rank, indices of the blocks given to it, indices of the blocks taken from it)
Swap: TypeAlias = tuple[int, list[int], list[int]]


def _swapped_owners(
    work: Longs, owner: Ints, ranks: int, enough: int, search: Search
) -> tuple[Ints, int]:
    """[N] owner after swaps that relieve the heaviest rank, and the work that it has then. Swaps
    end when it has at most `enough` work, when none helps, or at their limit."""
    members = _blocks_of_ranks(work, owner, ranks)
    load = work[members].sum(axis=1)
    for _ in range(search.swaps_per_rank * ranks):
        heavy = int(load.argmax())
        if load[heavy] <= enough:
            break
        amounts = work[members]
        gap = load[heavy] - load
        swap = _single_swap(amounts, gap, heavy) or _double_swap(amounts, gap, heavy, search.pairs)
        if swap is None:
            break
        light, passed, returned = swap
        # Indexing by lists copies the right side, so each gets what the other had.
        members[heavy, passed], members[light, returned] = (
            members[light, returned],
            members[heavy, passed],
        )
        # Rows of `members` stay ascending: `_best_pair` looks amounts up by bisection.
        for rank in (heavy, light):
            members[rank] = members[rank][np.argsort(work[members[rank]], kind="stable")]
            load[rank] = work[members[rank]].sum()
    owner = np.empty(len(work), np.int32)
    owner[members] = np.arange(ranks, dtype=np.int32)[:, None]
    return owner, int(load.max())


def _rank_loads(work: Longs, owner: Ints, ranks: int) -> Longs:
    return work[_blocks_of_ranks(work, owner, ranks)].sum(axis=1)


def _blocks_of_ranks(work: Longs, owner: Ints, ranks: int) -> Longs:
    """[R, n] the blocks of each rank, lightest first."""
    ascending = np.argsort(work, kind="stable")
    return ascending[np.argsort(owner[ascending], kind="stable")].reshape(ranks, -1)


def _single_swap(amounts: Longs, gap: Longs, heavy: int) -> Swap | None:
    """The swap of one block for one that most lowers the load of the heavier of the two ranks; None
    if none lowers it.

    Args:
      amounts: [R, n] work of the blocks of each rank, ascending.
      gap: [R] how much more work the heaviest rank has than each rank.
      heavy: the heaviest rank.
    """
    swap = _best_pair(amounts[heavy], amounts, gap)
    return swap and (swap[0], [swap[1]], [swap[2]])


def _double_swap(amounts: Longs, gap: Longs, heavy: int, max_pairs: int) -> Swap | None:
    """The same with two blocks from each rank, and with the lightest ranks only."""
    first, second = np.triu_indices(amounts.shape[1], 1)
    if not 0 < len(first) <= max_pairs:
        return None
    # As many ranks, largest gaps first, as have at most `max_pairs` pairs together.
    light = np.argsort(-gap, kind="stable")[: max_pairs // len(first)]
    pairs = amounts[:, first] + amounts[:, second]
    # `_best_pair` looks amounts up by bisection; `ascending` leads back to the pairs.
    ascending = np.argsort(pairs[light], axis=1, kind="stable")
    swap = _best_pair(pairs[heavy], np.take_along_axis(pairs[light], ascending, axis=1), gap[light])
    if swap is None:
        return None
    row, heavy_pair, rising = swap
    light_pair = ascending[row, rising]
    return (
        int(light[row]),
        [int(first[heavy_pair]), int(second[heavy_pair])],
        [int(first[light_pair]), int(second[light_pair])],
    )


def _best_pair(heavy: Longs, lighter: Longs, gap: Longs) -> tuple[int, int, int] | None:
    """(row of `lighter`, index in `heavy`, index in that row) of the two amounts whose exchange
    most lowers the higher of two loads; None if none lowers it.

    Args:
      heavy: [a] amounts of the heaviest rank.
      lighter: [rows, b] amounts, ascending in each row.
      gap: [rows] how much higher the load of the heaviest rank is than the row's.
    """
    rows, width = lighter.shape
    reach = int(max(heavy.max(), lighter.max())) + 1
    row = np.arange(rows)[:, None]
    # The best amount to take back is half the gap below the one passed on. One bisection looks it
    # up in all rows: adding row * reach puts the amounts of each row in a range of their own.
    wished = np.clip(heavy - gap[:, None] // 2, 0, reach - 1)
    right = np.searchsorted((lighter + row * reach).ravel(), wished + row * reach) - row * width
    candidates = np.clip(np.stack([right - 1, right]), 0, width - 1)
    passed = heavy - lighter[row, candidates]
    # Loads L and L - gap become L - passed and L - gap + passed; the gain is how far the higher one
    # falls. In the heaviest rank's own row, with a gap of 0, it cannot fall.
    gain = np.minimum(passed, gap[:, None] - passed)
    side, chosen, heavy_index = np.unravel_index(int(gain.argmax()), gain.shape)
    if gain[side, chosen, heavy_index] <= 0:
        return None
    return int(chosen), int(heavy_index), int(candidates[side, chosen, heavy_index])
