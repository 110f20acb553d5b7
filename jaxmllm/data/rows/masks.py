"""What attention needs of a filled row, and its slots dealt to parts where several devices hold it:
the ranks of its group, and the devices of each of these with context parallelism.

    segments, groups --visible_tiles--> tiles --assign_blocks--> which part each block, or stretch of blocks, goes to
    row --dealt--> the same row, its slots in the order of the parts, with tile lists for each part

Where a tower attends in windows, the slots of each item are first put in the order of its windows,
so that a window is a run of slots (`window_order`). In all other rows of one part nothing moves.

Letters: r ranks, C slots of a row, T language tokens of it, A attention tokens of it, N blocks, X parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.attention.mask import TokenIds, causal_ids, document_runs, item_ids
from jaxmllm.attention.parts import TILE, assign_blocks, block_work
from jaxmllm.attention.tiles import Tiles, crossed_tiles, dealt_tiles, list_bound, visible_tiles
from jaxmllm.balance.records import RowClass
from jaxmllm.config.schema import LayerWindows
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat

Row = dict[str, Any]  # arrays, and the tables of `RowTiles` by name under "tiles"


@dataclass(frozen=True)
class AttentionSpec:
    """How rows are cut for attention, by phase."""

    blocks: Mapping[str, int]  # attention tokens of a block
    # Parts that a rank's share of a row is split into, where these are several
    parts: Mapping[str, int] = field(default_factory=dict)
    bidirectional: tuple[str, ...] = ()  # media whose language tokens see their whole item
    # Of phases with layers that attend in them
    windows: Mapping[str, LayerWindows] = field(default_factory=dict)
    # Of phases whose patches see conditions in an attention apart: how many they see at least, zeros with them
    crossed: Mapping[str, int] = field(default_factory=dict)
    # Of phases whose kernel reads runs of documents: how many a row has at most
    runs: Mapping[str, int] = field(default_factory=dict)
    # Of phases and classes of rows whose blocks are smaller: their tokens
    smaller_blocks: Mapping[tuple[str, RowClass], int] = field(default_factory=dict)

    def block(self, phase: str, row_class: RowClass) -> int:
        """Attention tokens of a block of such rows."""
        return self.smaller_blocks.get((phase, row_class), self.blocks[phase])

    def of(self, phase: str, slots: int, span: int) -> tuple[int, int]:
        """(block, parts) of a row of so many slots that `span` ranks hold together; each has the usual parts."""
        block = self.block(phase, RowClass(slots // span, span))
        return block, span * self.parts.get(phase, 1)


def finish_encoder_row(
    row: Row, attention: AttentionSpec, phase: str, row_format: RowFormat, span: int = 1
) -> None:
    """Add `tiles`, `places`, `runs` where the kernel reads them, and for towers that attend in windows `windows` and
    `window_tiles` to a row of both directions, put its slots in the order of windows, and deal them to the parts. A
    part has whole language tokens, and its blocks have `margins` where the tower reads what lies beyond them.

    Args:
      span: ranks that hold the row together.
    """
    block, parts = attention.of(phase, row["segments"].shape[1], span)
    slots_per_token = row_format.slots_per_token
    stride = row_format.stride
    block_slots = block * stride
    # order[rank, place] is the language token of the plan that stands there. It is kept up to date
    # with all that moves; its inverse is `places`.
    order = np.tile(np.arange(row["valid"].shape[1], dtype=np.int32), (len(row["valid"]), 1))
    moved = ["features", "segments", "positions"]
    window = attention.windows[phase].window if phase in attention.windows else None
    if window is not None:
        order = window_order(
            row["segments"], row["positions"], window, slots_per_token, block_slots
        )
        _reorder(row, moved, _expand(order, slots_per_token))
        row["windows"] = window_numbers(row["segments"], row["positions"], window)
        moved.append("windows")
    ids = [item_ids(of_rank) for of_rank in row["segments"][:, ::stride]]
    # Blocks are dealt in stretches, so that a part has whole language tokens and whole groups of
    # slots that the tower takes together.
    stretch_slots = math.lcm(block_slots, row_format.alignment) if parts > 1 else block_slots
    stretch = stretch_slots // block_slots
    tokens = row["segments"].shape[1] // stride
    stretches = deal_blocks([(1, ids)], tokens, block, parts, stretch=stretch)
    blocks = _expand(stretches, stretch)
    # Tiles are found in the row before it is dealt; `blocks` [r, N] says which block goes where.
    row["tiles"] = tile_tables(ids, blocks, block, parts)
    if window is not None:
        ids = [item_ids(of_rank) for of_rank in row["windows"][:, ::stride]]
        row["window_tiles"] = tile_tables(ids, blocks, block, parts)
    if parts > 1:
        # Taken first, for afterwards a block has other neighbours.
        if row_format.margin:
            row["margins"] = block_margins(row, blocks, block_slots, row_format.margin)
        _reorder(row, moved, _expand(stretches, stretch_slots))
        order = np.take_along_axis(order, _expand(stretches, stretch_slots // slots_per_token), 1)
    row["places"] = np.argsort(order, axis=1).astype(np.int32)
    if phase in attention.runs:
        row["runs"] = document_runs(row["segments"][:, ::stride], attention.runs[phase])


def block_margins(row: Row, blocks: Ints, size: int, margin: int) -> Row:
    """The slots of a packed row before and after each block, `margin` of either, as `BlockMargins` has them.

    Args:
      blocks: [r, N] which block stands at each place.
      size: slots of a block.
    """
    # Zeros in front put slot s of the row at s + margin, so the slots before block b begin at
    # b * size, and those after it at (b + 1) * size + margin.
    beside = np.concatenate([np.arange(margin), np.arange(size, size + margin) + margin])
    slots = (blocks[:, :, None] * size + beside).reshape(len(blocks), -1)
    margins = {}
    for name in ("features", "segments", "positions"):
        widths = ((margin, margin), *((0, 0),) * (row[name].ndim - 2))
        margins[name] = np.stack(
            [
                np.pad(of_rank, widths)[rank_slots]
                for of_rank, rank_slots in zip(row[name], slots, strict=True)
            ]
        )
    return margins


def finish_language_row(row: Row, attention: AttentionSpec, span: int = 1) -> None:
    """Add `tiles`, `order`, `runs` where the kernel reads them, and where layers attend in windows `window_tiles` to a
    causal row with groups, and deal its slots to the parts.

    Args:
      span: ranks that hold the row together.
    """
    block, parts = attention.of(LANGUAGE, row["segments"].shape[1], span)
    rank_ids = zip(row["segments"], row["groups"], strict=True)
    ids = [causal_ids(segments, groups) for segments, groups in rank_ids]
    layers = {"tiles": (1, ids)}
    if LANGUAGE in attention.windows:
        windows = attention.windows[LANGUAGE]
        narrow = [of_rank.within(windows.window) for of_rank in ids]
        windowed = sum(windows.windowed)
        layers = {"tiles": (windows.layers - windowed, ids), "window_tiles": (windowed, narrow)}
    # All layers have the same parts: blocks are dealt by their work in full layers and in windowed
    # ones together.
    blocks = deal_blocks(list(layers.values()), row["segments"].shape[1], block, parts)
    row |= {name: tile_tables(ids, blocks, block, parts) for name, (_, ids) in layers.items()}
    row["order"] = _expand(blocks, block)
    if LANGUAGE in attention.runs:
        row["runs"] = document_runs(row["segments"], attention.runs[LANGUAGE])
    if parts > 1:
        moved = ["tokens", "targets", "segments", "positions", "media", "groups"]
        _reorder(row, [*moved, "states"] if "states" in row else moved, row["order"])


def finish_generator_row(row: Row, attention: AttentionSpec, phase: str, span: int = 1) -> None:
    """Add `tiles` and `order` to a row of a generator, whose items see themselves and what they are made
    from, and deal its slots to the parts. Where the latter is an attention apart, also add `cross_tiles`
    and `padded`: the conditions of zeros that each patch sees.

    Args:
      span: ranks that hold the row together.
    """
    seen = row["segments"]
    block, parts = attention.of(phase, seen.shape[1], span)
    crossed: list[Tiles] = []
    moved = ["features", "segments", "positions", "owners", "patches", "conditions"]
    if phase in attention.crossed:
        rank_segments = zip(seen, row["readers"], strict=True)
        crossed = [crossed_tiles(*of_rank, block) for of_rank in rank_segments]
        row["padded"] = lacking(seen, row["readers"], attention.crossed[phase])
        moved += ["readers", "padded"]
    ids = [item_ids(of_rank) for of_rank in seen]
    block_count = seen.shape[1] // block
    apart = [TILE * np.bincount(tiles.query, minlength=block_count) for tiles in crossed]
    blocks = deal_blocks([(1, ids)], seen.shape[1], block, parts, apart)
    row["tiles"] = tile_tables(ids, blocks, block, parts)
    if phase in attention.crossed:
        row["cross_tiles"] = dealt_tables(crossed, blocks, parts)
    row["order"] = _expand(blocks, block)
    if parts > 1:
        if "partners" in row:
            moved.append("partners")
            # Partners are named by their slots: the numbers change with the order, and then move.
            new_slots = np.argsort(row["order"], axis=1).astype(np.int32)
            row["partners"] = np.take_along_axis(new_slots, row["partners"], axis=1)
        _reorder(row, moved, row["order"])


def lacking(patches: Ints, conditions: Ints, min_conditions: int) -> Ints:
    """How many conditions each patch lacks that is to have so many at least; 0 elsewhere: [r, C].

    Args:
      patches: [r, C] segment of each patch, 0 of other slots.
      conditions: [r, C] likewise of conditions that are seen.
    """
    lacks = np.zeros_like(patches)
    for of_rank, patch_segments, condition_segments in zip(lacks, patches, conditions, strict=True):
        counts = np.bincount(condition_segments, minlength=int(patch_segments.max()) + 1)
        of_rank[:] = np.where(
            patch_segments > 0, (min_conditions - counts[patch_segments]).clip(0), 0
        )
    return lacks


def window_order(
    segments: Ints, positions: Ints, side: int, slots_per_token: int, block: int
) -> Ints:
    """Which language token of each row stands at each place, so that the slots of a window are
    neighbours: [r, T]. Each item keeps the slots that it has.

    A token goes with the window of its first slot. Where windows are no multiple of what becomes a
    token, its other slots may belong to other windows; masks go by the number of each slot's.

    Windows that fill blocks come first, and what lies before the first block's edge is filled with
    the end of the item, so that these windows begin where blocks do.

    Args:
      segments: [r, C] item of each slot, those of an item in a run.
      positions: [r, C, 2] (row, column) inside the item.
      block: slots of a block of attention.
    """
    document = segments[:, ::slots_per_token]
    # Row and column of the token's window in its item; 0 for padding, which is one window.
    corner = positions[:, ::slots_per_token] // side * (document > 0)[:, :, None]
    order = np.empty_like(document)
    for rank, (items, (rows, columns)) in enumerate(
        zip(document, corner.transpose(0, 2, 1), strict=True)
    ):
        starts = np.flatnonzero(np.append(True, items[1:] != items[:-1]))
        item = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(items)))
        # A key is the same for the tokens of one window of one item alone: [T]. Of each token then
        # the number of its window, and how many slots go with that.
        key = (item * (rows.max() + 1) + rows) * (columns.max() + 1) + columns
        window, tokens = np.unique(key, return_inverse=True, return_counts=True)[1:]
        slots = tokens[window] * slots_per_token
        # By the last key first; equal ones stay in their order
        of_row = np.lexsort((window, -slots, slots % block != 0, item)).astype(np.int32)
        # Tokens from the item's first one to the next edge of a block.
        before = -starts * slots_per_token % block // slots_per_token
        ends = np.append(starts[1:], len(items))
        for start, end, shift in zip(starts, ends, before, strict=True):
            # Windows that fill blocks stand first. Turned by `shift`, the item has its last tokens
            # before the edge, and the first window begins at it.
            if items[start] and 0 < shift < end - start:
                of_row[start:end] = np.roll(of_row[start:end], shift)
        order[rank] = of_row
    return order


def window_numbers(segments: Ints, positions: Ints, side: int) -> Ints:
    """Number of each slot's window in its row, from 1; 0 at padding: [r, C].

    Args:
      segments: [r, C] item of each slot.
      positions: [r, C, 2] (row, column) inside the item.
    """
    rows, columns = np.moveaxis(positions.astype(np.int64) // side, 2, 0)
    key = (segments * (rows.max() + 1) + rows) * (columns.max() + 1) + columns
    numbers = np.zeros_like(segments)
    for rank, real in enumerate(segments > 0):
        numbers[rank, real] = np.unique(key[rank, real], return_inverse=True)[1] + 1
    return numbers


def deal_blocks(
    layers: list[tuple[int, list[TokenIds]]],
    tokens: int,
    block: int,
    parts: int,
    apart: Sequence[NDArray[Any]] = (),
    stretch: int = 1,
) -> Ints:
    """Which stretch of blocks of each row stands at each place, those of a part together: [r, N / stretch].

    Args:
      layers: of each kind, how many there are, and the ids of each row in them.
      tokens: attention tokens of a row.
      apart: of each row the work [N] of its blocks in another attention, as of `block_work`; none: there is none.
      stretch: blocks that are not parted.
    """
    ranks = len(layers[0][1])
    order = np.tile(np.arange(tokens // (stretch * block), dtype=np.int32), (ranks, 1))
    if parts > 1:
        for rank in range(ranks):
            work = [layer_count * block_work(ids[rank], block) for layer_count, ids in layers]
            if apart:
                work.append(apart[rank])
            of_stretches = np.sum(work, axis=0).reshape(-1, stretch).sum(axis=1)
            # By owner; a stable sort leaves the blocks of a part in the order of the row.
            order[rank] = np.argsort(assign_blocks(of_stretches, parts), kind="stable")
    return order


def tile_tables(ids: list[TokenIds], order: Ints, block: int, parts: int) -> dict[str, Ints]:
    """The tables of `RowTiles` for rows whose blocks stand in this order."""
    return dealt_tables([visible_tiles(of_rank, block) for of_rank in ids], order, parts)


def dealt_tables(tiles: list[Tiles], order: Ints, parts: int) -> dict[str, Ints]:
    """The same from the tiles of each row."""
    blocks = order.shape[1]
    bound = list_bound(blocks // parts, blocks)
    tables = {
        "query_spans": np.zeros((len(tiles), parts, blocks // parts, 3), np.int32),
        "query_blocks": np.zeros((len(tiles), parts, bound), np.int32),
        "key_spans": np.zeros((len(tiles), parts, blocks, 3), np.int32),
        "key_blocks": np.zeros((len(tiles), parts, bound), np.int32),
    }
    for rank, of_rank in enumerate(tiles):
        new_blocks = np.argsort(order[rank]).astype(np.int32)
        for part, lists in enumerate(dealt_tiles(of_rank, new_blocks, parts, bound)):
            values = lists.queries.spans, lists.queries.blocks, lists.keys.spans, lists.keys.blocks
            for table, value in zip(tables.values(), values, strict=True):
                table[rank, part] = value
    return tables


def _reorder(row: Row, names: Iterable[str], order: Ints) -> None:
    for name in names:
        for of_rank, slots in zip(row[name], order, strict=True):
            # Indexing with an array copies, so every slot is read before one is written.
            of_rank[:] = of_rank[slots]


def _expand(blocks: NDArray[Any], size: int) -> Ints:
    """Numbers of blocks [r, N] -> numbers of their slots [r, N * size]."""
    slots = blocks[:, :, None] * size + np.arange(size)
    return slots.reshape(len(blocks), blocks.shape[1] * size).astype(np.int32)
