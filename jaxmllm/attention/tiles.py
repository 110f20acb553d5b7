"""Which blocks of a packed row must meet in attention, as lists for the loops of attention/attention.py.

Three ids say what a token sees: query q sees key k of the same document if k does not come after q, or if both are of
the same group (an image or a clip, seen in both directions). A row of C tokens is cut into blocks of b. Of the tiles
that query blocks and key blocks form, those without a visible pair are not listed, and those in which every pair is
visible are listed apart, because they need no mask.

    keys     0 1 2 3       documents 1 1 1 2 | 2 2 2 2 | 2 2 2 2 | 2 3 3 0     no groups
    query 0  p             p: partial, f: full; block 1 holds nothing of document 1, so only token 3 of block 0
    query 1  p p           makes tile (1, 0) visible
    query 2  p f p         spans of the queries: (0, 1, 0) (1, 2, 0) (3, 2, 1) (6, 4, 0)
    query 3  p p p p       blocks of the queries: 0 | 0 1 | 0 2, 1 | 0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints, Longs

LARGEST_LIST = 2**20  # tiles that the lists of one row have room for, at most
PAIRS_AT_ONCE = 2**22  # of pieces of an irregular row


@dataclass(frozen=True)
class TokenIds:
    """What decides who sees whom: int32 [C] each."""

    document: Ints  # 0: padding, which sees nothing and is not seen
    group: Ints  # > 0: image or clip, unique in its document; 0: seen only from later on
    position: Ints  # order inside the document


@dataclass(frozen=True)
class TileLists:
    """For each block of one side the blocks of the other that it meets.

    Block i meets `blocks[first : first + partial]`, of which only some pairs are visible, and then the next `full`,
    of which all are, with (first, partial, full) = spans[i]. Both parts ascend. If first is negative, the list was
    too short for the row, and block i meets `partial` consecutive blocks from -1 - first on, some perhaps empty.
    """

    spans: Ints  # [C / b, 3]
    blocks: Ints  # [L]


@dataclass(frozen=True)
class TileMap:
    """The visible tiles of one row, by query block and by key block."""

    queries: TileLists
    keys: TileLists


@dataclass(frozen=True)
class Tiles:
    """The visible tiles of one row, in any order: [n] each."""

    query: Longs
    key: Longs
    full: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.query)


def segment_ids(segments: Ints, causal: bool, groups: Ints | None = None) -> TokenIds:
    """Ids of a packed row: [C].

    Args:
      segments: [C] number of the item in the row, 0 for padding.
      causal: whether a token sees only what is not after it, or its whole segment.
      groups: [C] images and clips of a causal row that are seen in both directions.
    """
    if not causal:
        return TokenIds(segments, segments, np.zeros_like(segments))
    groups = np.zeros_like(segments) if groups is None else groups
    return TokenIds(segments, groups, np.arange(len(segments), dtype=np.int32))


def list_bound(query_blocks: int, key_blocks: int) -> int:
    """L: room for every tile of a row, unless that were too much."""
    return min(query_blocks * key_blocks, LARGEST_LIST)


def tile_map(ids: TokenIds, block: int, bound: int | None = None) -> TileMap:
    """The tiles of one row, exact for any ids.

    Args:
      ids: of the row's tokens.
      block: tokens in a block; divides C.
      bound: L, the length of the lists; room for every tile if none.

    Raises `ValueError` if `block` does not divide C.
    """
    blocks = len(ids.document) // block
    return tile_lists(visible_tiles(ids, block), blocks, blocks, bound)


def tile_lists(tiles: Tiles, query_blocks: int, key_blocks: int, bound: int | None = None) -> TileMap:
    """Lists of both sides from the visible tiles."""
    bound = list_bound(query_blocks, key_blocks) if bound is None else bound
    return TileMap(
        queries=_lists(tiles.query, tiles.key, tiles.full, query_blocks, bound),
        keys=_lists(tiles.key, tiles.query, tiles.full, key_blocks, bound),
    )


def dealt_tiles(tiles: Tiles, places: Ints, parts: int, bound: int | None = None) -> list[TileMap]:
    """Lists for each part of a row whose blocks were dealt to X parts: its own blocks of queries, all blocks of keys.

    Args:
      tiles: of the row before dealing.
      places: [N] where each block went; part x has the places from x * N / X on.
      bound: L, the length of the lists; room for every tile of a part if none.
    """
    count = len(places)
    own = count // parts
    query, key = (places[blocks].astype(np.int64) for blocks in (tiles.query, tiles.key))
    part_of, query = np.divmod(query, own)
    of_parts = (np.flatnonzero(part_of == part) for part in range(parts))
    return [tile_lists(Tiles(query[mine], key[mine], tiles.full[mine]), own, count, bound) for mine in of_parts]


def visible_tiles(ids: TokenIds, block: int) -> Tiles:
    """All tiles of a row with a visible pair. Raises `ValueError` if `block` does not divide its length.

    Rows as the pipeline packs them (documents and groups without gaps, positions ascending) take time linear in the
    number of tiles; others are compared piece by piece, where a piece is a run of like tokens within a block.
    """
    if len(ids.document) % block:
        raise ValueError(
            f"a row of {len(ids.document)} tokens is not a whole number of attention blocks of {block}; "
            "make phases.<phase>.capacities multiples of phases.<phase>.block"
        )
    return _tiles_of_runs(ids, block) if _is_regular(ids) else _tiles_of_pieces(ids, block)


def _is_regular(ids: TokenIds) -> bool:
    """Whether documents ascend, positions ascend in each of them, and groups are runs; padding may lie anywhere."""
    real = ids.document > 0
    document, group, position = ids.document[real], ids.group[real], ids.position[real]
    same = document[1:] == document[:-1]
    together = (group[1:] == group[:-1]) & (group[1:] > 0)
    rises = (position[1:] > position[:-1]) | (together & (position[1:] == position[:-1]))
    if (document[1:] < document[:-1]).any() or (same & ~rises).any():
        return False
    begins = np.flatnonzero((group > 0) & np.append(True, ~(same & together))[: len(group)])
    runs = document[begins].astype(np.int64) << 32 | group[begins]
    return len(np.unique(runs)) == len(runs)


def _tiles_of_runs(ids: TokenIds, block: int) -> Tiles:
    """The tiles of a regular row: those of one query block are an interval, but for key blocks of padding alone."""
    slots = np.flatnonzero(ids.document)
    document, group = ids.document[slots], ids.group[slots]
    count = len(ids.document) // block
    bounds = np.searchsorted(slots, np.arange(count + 1) * block)  # real tokens of block i: bounds[i] : bounds[i + 1]
    own = np.flatnonzero(bounds[:-1] < bounds[1:])
    first, last = bounds[own], bounds[own + 1] - 1

    new_document = np.append(True, document[1:] != document[:-1])[: len(slots)]
    new_run = new_document | np.append(True, group[1:] != group[:-1])[: len(slots)]
    run = np.cumsum(new_run) - 1
    run_end = np.append(np.flatnonzero(new_run)[1:], len(slots)) - 1
    starts = np.flatnonzero(new_document)[(np.cumsum(new_document) - 1)[first]]
    low = slots[starts] // block
    high = np.where(group[last] > 0, slots[run_end[run[last]]] // block, own) + 1

    query = np.repeat(own, high - low)
    key = (
        np.arange(len(query)) - np.repeat(np.cumsum(high - low) - (high - low), high - low) + np.repeat(low, high - low)
    )
    whole = np.zeros(count, np.bool_)
    whole[own] = last - first + 1 == block
    of_document, of_group = np.full((2, count), -1)
    alike = own[(document[first] == document[last]) & whole[own]]
    of_document[alike] = ids.document[alike * block]
    grouped = own[(run[first] == run[last]) & (group[first] > 0) & whole[own]]
    of_group[grouped] = run[bounds[grouped]]
    side = np.where(key < query, of_document[query], of_group[query])
    full = (side == np.where(key < query, of_document[key], of_group[key])) & (side >= 0)
    met = bounds[key] < bounds[key + 1]
    return Tiles(query[met], key[met], full[met])


def _tiles_of_pieces(ids: TokenIds, block: int) -> Tiles:
    """The tiles of any row, from all pairs of pieces of a document."""
    count = len(ids.document) // block
    stacked = np.stack([np.arange(len(ids.document)) // block, ids.document, ids.group])
    cuts = np.flatnonzero(np.append(True, (stacked[:, 1:] != stacked[:, :-1]).any(axis=0)))
    size = np.diff(np.append(cuts, len(ids.document)))
    earliest, latest = np.minimum.reduceat(ids.position, cuts), np.maximum.reduceat(ids.position, cuts)
    order = np.argsort(ids.document[cuts], kind="stable")
    order = order[ids.document[cuts][order] > 0]
    document, group = ids.document[cuts][order], ids.group[cuts][order]
    size, earliest, latest, place = size[order], earliest[order], latest[order], cuts[order] // block

    begin = np.searchsorted(document, document, side="left")
    partners = np.searchsorted(document, document, side="right") - begin
    seen = np.zeros(count * count, np.bool_)
    visible = np.zeros(count * count, np.int64)  # pairs of tokens in wholly visible pairs of pieces
    edges = np.searchsorted(np.cumsum(partners), np.arange(0, partners.sum(), PAIRS_AT_ONCE), side="right")
    for low, high in zip(edges, np.append(edges[1:], len(order)), strict=True):
        many = partners[low:high]
        one = np.repeat(np.arange(low, high), many)
        two = np.arange(len(one)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(begin[low:high], many)
        together = (group[one] == group[two]) & (group[one] > 0)
        tile = place[one] * count + place[two]
        seen[tile[together | (latest[one] >= earliest[two])]] = True
        whole = together | (earliest[one] >= latest[two])
        visible += np.bincount(tile[whole], (size[one] * size[two])[whole], len(visible)).astype(np.int64)
    tiles = np.flatnonzero(seen)
    return Tiles(tiles // count, tiles % count, visible[tiles] == block * block)


def _lists(own: Longs, other: Longs, full: NDArray[np.bool_], count: int, bound: int) -> TileLists:
    order = np.lexsort((other, full, own))
    other = other[order]
    fulls = np.bincount(own[full], minlength=count)
    tiles = np.bincount(own, minlength=count)
    ends = np.cumsum(tiles)
    spans = np.stack([ends - tiles, tiles - fulls, fulls], axis=1).astype(np.int32)
    blocks = np.zeros(bound, np.int32)
    blocks[: min(len(other), bound)] = other[:bound]
    for i in np.flatnonzero(ends > bound):
        met = other[ends[i] - tiles[i] : ends[i]]
        if len(met):
            spans[i] = -1 - met.min(), met.max() - met.min() + 1, 0
    return TileLists(spans, blocks)
