"""Which blocks of a packed row must meet in attention, as lists for the loops of the kernels.

    TokenIds --visible_tiles--> Tiles --dealt_tiles--> TileMap of each part of the row

A row of C tokens is cut into blocks of b, and attention/mask.py says who sees whom. A tile is a
pair of a query block and a key block. Tiles without a visible pair are not listed; those in which
every pair is visible are listed separately, because they need no mask.

    keys     0 1 2 3       documents 1 1 1 2 | 2 2 2 2 | 2 2 2 2 | 2 3 3 0     no groups
    query 0  p             p: partial, f: full; block 1 holds nothing of document 1, so only token 3 of block 0
    query 1  p p           makes tile (1, 0) visible
    query 2  p f p         spans of the queries: (0, 1, 0) (1, 2, 0) (3, 2, 1) (6, 4, 0)
    query 3  p p p p       blocks of the queries: 0 | 0 1 | 0 2, 1 | 0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Bools, Ints, Longs
from jaxmllm.attention.mask import TileLists, TokenIds, cut_documents, seen_spans

LARGEST_LIST = 2**20  # tiles that the lists of one row have room for, at most
PAIRS_AT_ONCE = 2**22  # pairs of pieces of an irregular row that are compared at one time


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
    full: Bools

    def __len__(self) -> int:
        return len(self.query)


def list_bound(query_blocks: int, key_blocks: int) -> int:
    """L: room for every tile of a row, up to `LARGEST_LIST`."""
    return min(query_blocks * key_blocks, LARGEST_LIST)


def tile_lists(
    tiles: Tiles, query_blocks: int, key_blocks: int, bound: int | None = None
) -> TileMap:
    """Lists of both sides from the visible tiles.

    Args:
      bound: L, the length of the lists; None: as `list_bound` says.
    """
    bound = list_bound(query_blocks, key_blocks) if bound is None else bound
    return TileMap(
        queries=_lists_of_side(tiles.query, tiles.key, tiles.full, query_blocks, bound),
        keys=_lists_of_side(tiles.key, tiles.query, tiles.full, key_blocks, bound),
    )


def dealt_tiles(tiles: Tiles, places: Ints, parts: int, bound: int | None = None) -> list[TileMap]:
    """Lists for each of the X parts to which the blocks of a row were dealt: between the part's own
    query blocks and all key blocks.

    Args:
      tiles: visible tiles of the row before dealing.
      places: [N] new place of each block; part x has the places from x * N / X on.
      bound: L, the length of the lists; None: as `list_bound` says.
    """
    blocks = len(places)
    blocks_per_part = blocks // parts
    # Keys are those of all parts, numbered as dealt; queries are numbered within their part.
    key = places[tiles.key].astype(np.int64)
    part, query = np.divmod(places[tiles.query].astype(np.int64), blocks_per_part)
    members = (np.flatnonzero(part == index) for index in range(parts))
    return [
        tile_lists(Tiles(query[m], key[m], tiles.full[m]), blocks_per_part, blocks, bound)
        for m in members
    ]


def visible_tiles(ids: TokenIds, block: int) -> Tiles:
    """All tiles of a row with a visible pair. Raises `ValueError` if `block` does not divide its
    length.

    Rows as the planner packs them take time linear in the number of tiles; others are compared
    piece by piece.
    """
    if len(ids.document) % block:
        raise ValueError(
            f"a row of {len(ids.document)} tokens is not a whole number of attention blocks of {block}; "
            "make phases.<phase>.capacities multiples of phases.<phase>.block"
        )
    spans = seen_spans(ids)
    return _tiles_of_pieces(ids, block) if spans is None else _tiles_of_spans(*spans, block)


def crossed_tiles(queries: Ints, keys: Ints, block: int) -> Tiles:
    """All tiles with a visible pair, for a row in which each query sees all keys of its document. A
    slot may be a query of one document and a key of another.

    Args:
      queries: [C] document of each slot as a query; 0: none.
      keys: [C] document of each slot as a key; 0: none.
      block: slots of a block; divides C.
    """
    blocks = len(queries) // block
    query_document, query_block, query_size = _documents_by_block(queries, block)
    key_document, key_block, key_size = _documents_by_block(keys, block)
    # Each piece of queries meets all pieces of keys of its document: `key` has the ranges of these,
    # begin .. begin + met - 1 of every piece of queries, end to end.
    begin = np.searchsorted(key_document, query_document, side="left")
    met = np.searchsorted(key_document, query_document, side="right") - begin
    query = np.repeat(np.arange(len(met)), met)
    key = np.arange(len(query)) + np.repeat(begin - (np.cumsum(met) - met), met)
    tiles, tile_of_pair = np.unique(
        query_block[query] * blocks + key_block[key], return_inverse=True
    )
    # A tile may hold pieces of several documents; it is full if their visible pairs are all b * b.
    pairs = np.zeros(len(tiles), np.int64)
    np.add.at(pairs, tile_of_pair, query_size[query] * key_size[key])
    return Tiles(tiles // blocks, tiles % blocks, pairs == block * block)


def _documents_by_block(documents: Ints, block: int) -> tuple[Longs, Longs, Longs]:
    """(document, block, slots) of each document's part in each block, ordered by document."""
    slots = np.flatnonzero(documents > 0)
    blocks = len(documents) // block
    held, sizes = np.unique(
        documents[slots].astype(np.int64) * blocks + slots // block, return_counts=True
    )
    return held // blocks, held % blocks, sizes


def _tiles_of_spans(start: Ints, stop: Ints, block: int) -> Tiles:
    """The tiles of a row whose tokens see the slots [start, stop).

    A token is in its own span, so the spans of neighbours touch, and a query block meets an
    interval of key blocks, except those that hold only padding.
    """
    real = (stop > start).reshape(-1, block)
    start = start.reshape(-1, block)
    stop = stop.reshape(-1, block)
    held = np.any(real, axis=1)
    queries = np.flatnonzero(held)
    # Padding has start 0, which would pull the minimum to the beginning of the row: C replaces it.
    low = np.where(real, start, start.size)[queries].min(axis=1) // block
    high = -(-stop[queries].max(axis=1) // block)
    met = (high - low).astype(np.int64)
    query = np.repeat(queries, met)
    # Key blocks low .. low + met - 1 of every query block, end to end.
    key = np.arange(len(query)) + np.repeat(low - (np.cumsum(met) - met), met)
    # A tile is full if neither block has padding, and every query's span holds the key block.
    unpadded = np.all(real, axis=1)
    # Key blocks first_for_all .. end_for_all - 1 are in the span of every query of a block.
    first_for_all = -(-start.max(axis=1) // block)
    end_for_all = stop.min(axis=1) // block
    full = (
        unpadded[query] & unpadded[key] & (key >= first_for_all[query]) & (key < end_for_all[query])
    )
    listed = held[key]
    return Tiles(query[listed], key[listed], full[listed])


def _tiles_of_pieces(ids: TokenIds, block: int) -> Tiles:
    """The tiles of any row, from all pairs of pieces of a document."""
    blocks = len(ids.document) // block
    pieces = cut_documents(ids, block)
    document = pieces.first.document
    at_block = pieces.slot // block
    # Pieces are sorted by document: p meets the pieces begin[p] .. begin[p] + partners[p] - 1.
    begin = np.searchsorted(document, document, side="left")
    partners = np.searchsorted(document, document, side="right") - begin
    seen = np.zeros(blocks * blocks, np.bool_)
    pairs = np.zeros(blocks * blocks, np.int64)  # token pairs, in wholly visible pairs of pieces
    # `edges` are the pieces whose pairs include pair number 0, PAIRS_AT_ONCE, 2 * PAIRS_AT_ONCE
    # ...: from each of them up to the next, about PAIRS_AT_ONCE pairs are compared together.
    edges = np.searchsorted(
        np.cumsum(partners), np.arange(0, partners.sum(), PAIRS_AT_ONCE), side="right"
    )
    for low, high in zip(edges, np.append(edges[1:], len(document)), strict=True):
        met = partners[low:high]
        query = np.repeat(np.arange(low, high), met)
        key = np.arange(len(query)) + np.repeat(begin[low:high] - (np.cumsum(met) - met), met)
        tile = at_block[query] * blocks + at_block[key]
        some, every = pieces.see(query, key)
        seen[tile[some]] = True
        pairs += np.bincount(
            tile[every], (pieces.size[query] * pieces.size[key])[every], len(pairs)
        ).astype(np.int64)
    tiles = np.flatnonzero(seen)
    return Tiles(tiles // blocks, tiles % blocks, pairs[tiles] == block * block)


def _lists_of_side(
    side: Longs, partner: Longs, full: Bools, side_blocks: int, bound: int
) -> TileLists:
    # Sorted by block of the side, then partial tiles before full ones, then by partner
    # (`TileLists`). All in one key: sorting by three keys takes several times as long.
    order = np.argsort((2 * side + full) * (partner.max(initial=0) + 1) + partner, kind="stable")
    partner = partner[order]
    fulls = np.bincount(side[full], minlength=side_blocks)
    tiles = np.bincount(side, minlength=side_blocks)
    ends = np.cumsum(tiles)
    spans = np.stack([ends - tiles, tiles - fulls, fulls], axis=1).astype(np.int32)
    blocks = np.zeros(bound, np.int32)
    blocks[: min(len(partner), bound)] = partner[:bound]
    # Where the list has no room, an interval of blocks replaces it, marked by a negative first
    for i in np.flatnonzero(ends > bound):
        met = partner[ends[i] - tiles[i] : ends[i]]
        if len(met):
            spans[i] = -1 - met.min(), met.max() - met.min() + 1, 0
    return TileLists(spans, blocks)
