"""Tile lists and other attention inputs of a filled row, and the dealing of its slots to parts. A
row has several parts where several devices hold it: the ranks of its group, and with context
parallelism the devices of each rank.

    segments, groups --visible_tiles--> tiles --assign_blocks--> the part of each stretch of blocks
    row --dealt--> the same row, its slots in the order of the parts, with tile lists for each part

Where a tower uses windowed attention, the slots of each item are first put in the order of its
windows, so that a window is a run of slots (`window_order`). In all other rows with one part no
slot moves.

Letters: r ranks, C slots of a row, T language tokens of a row, N blocks of a row, X parts.
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

Row = dict[str, Any]  # arrays by name; "tiles" and its like hold the tables of `RowTiles` by name


@dataclass(frozen=True)
class AttentionSpec:
    """How rows are cut for attention, by phase."""

    blocks: Mapping[str, int]  # attention tokens of a block
    # Parts of a rank's share of a row; a phase that is missing has one
    parts: Mapping[str, int] = field(default_factory=dict)
    bidirectional: tuple[str, ...] = ()  # media phases whose language tokens see their whole item
    # Windows of the phases that have layers with windowed attention
    windows: Mapping[str, LayerWindows] = field(default_factory=dict)
    # Phases whose patches see conditions by cross-attention -> least number of conditions that a
    # patch sees: those that an item lacks are zeros
    crossed: Mapping[str, int] = field(default_factory=dict)
    # Phases whose attention kernel reads runs of documents -> most runs of a row
    runs: Mapping[str, int] = field(default_factory=dict)
    # Attention tokens of a block, by phase and row class, where blocks are smaller than `blocks`
    smaller_blocks: Mapping[tuple[str, RowClass], int] = field(default_factory=dict)

    def block(self, phase: str, row_class: RowClass) -> int:
        """Attention tokens of a block in rows of this phase and class."""
        return self.smaller_blocks.get((phase, row_class), self.blocks[phase])

    def of(self, phase: str, slots: int, span: int) -> tuple[int, int]:
        """(attention tokens of a block, parts) of a row of `slots` slots that `span` ranks hold
        together. The share of each rank has the usual number of parts."""
        block = self.block(phase, RowClass(slots // span, span))
        return block, span * self.parts.get(phase, 1)


def finish_encoder_row(
    row: Row, attention: AttentionSpec, phase: str, row_format: RowFormat, span: int = 1
) -> None:
    """Finish an encoder row, whose items see themselves in both directions: add `tiles` and
    `places`, add `runs` where the kernel reads them, and deal the slots to the parts. For towers
    with windowed attention, also order the slots by windows, and add `windows` and `window_tiles`.

    A part has whole language tokens. If the row has several parts and the tower reads slots beyond
    a block, add `margins`.

    Args:
      span: ranks that hold the row together.
    """
    block, parts = attention.of(phase, row["segments"].shape[1], span)
    slots_per_token = row_format.slots_per_token
    stride = row_format.stride
    block_slots = block * stride
    # order[rank, place] is the language token, by its number in the plan, that is at `place` of the
    # row. Every move of slots updates it; its inverse is `places`.
    order = np.tile(np.arange(row["valid"].shape[1], dtype=np.int32), (len(row["valid"]), 1))
    slot_columns = ["features", "segments", "positions"]
    window = attention.windows[phase].window if phase in attention.windows else None
    if window is not None:
        order = window_order(
            row["segments"], row["positions"], window, slots_per_token, block_slots
        )
        _reorder(row, slot_columns, _expand(order, slots_per_token))
        row["windows"] = window_numbers(row["segments"], row["positions"], window)
        slot_columns.append("windows")
    ids = [item_ids(of_rank) for of_rank in row["segments"][:, ::stride]]
    # Blocks are dealt in stretches, so that no part cuts a language token or a group of slots that
    # the tower takes as a whole.
    stretch_slots = math.lcm(block_slots, row_format.alignment) if parts > 1 else block_slots
    stretch = stretch_slots // block_slots
    tokens = row["segments"].shape[1] // stride
    stretches = deal_blocks([(1, ids)], tokens, block, parts, stretch=stretch)
    blocks = _expand(stretches, stretch)
    # Tiles are found in the row before it is dealt; `blocks` [r, N] is the block at each place of
    # the dealt row.
    row["tiles"] = tile_tables(ids, blocks, block, parts)
    if window is not None:
        ids = [item_ids(of_rank) for of_rank in row["windows"][:, ::stride]]
        row["window_tiles"] = tile_tables(ids, blocks, block, parts)
    if parts > 1:
        # Before the slots move: afterwards a block has other neighbours.
        if row_format.margin:
            row["margins"] = block_margins(row, blocks, block_slots, row_format.margin)
        _reorder(row, slot_columns, _expand(stretches, stretch_slots))
        order = np.take_along_axis(order, _expand(stretches, stretch_slots // slots_per_token), 1)
    row["places"] = np.argsort(order, axis=1).astype(np.int32)
    if phase in attention.runs:
        row["runs"] = document_runs(row["segments"][:, ::stride], attention.runs[phase])


def block_margins(row: Row, blocks: Ints, size: int, margin: int) -> Row:
    """The `margin` slots before and the `margin` slots after each block of a packed row, by the
    field names of `BlockMargins`: [r, N * 2 * margin, ...]; zeros beyond the ends of the row.

    Args:
      blocks: [r, N] block at each place of the dealt row.
      size: slots of a block.
    """
    # Zeros in front put slot s of the row at s + margin, so the slots before block b begin at
    # b * size, and those after it at (b + 1) * size + margin.
    offsets = np.concatenate([np.arange(margin), np.arange(size, size + margin) + margin])
    slots = (blocks[:, :, None] * size + offsets).reshape(len(blocks), -1)
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
    """Finish a language row, which is causal except inside its groups: add `tiles` and `order`, add
    `runs` where the kernel reads them and `window_tiles` where layers use windowed attention, and
    deal the slots to the parts.

    Args:
      span: ranks that hold the row together.
    """
    block, parts = attention.of(LANGUAGE, row["segments"].shape[1], span)
    rank_ids = zip(row["segments"], row["groups"], strict=True)
    ids = [causal_ids(segments, groups) for segments, groups in rank_ids]
    layers = {"tiles": (1, ids)}
    if LANGUAGE in attention.windows:
        windows = attention.windows[LANGUAGE]
        window_ids = [of_rank.within(windows.window) for of_rank in ids]
        windowed = sum(windows.windowed)
        layers = {"tiles": (windows.layers - windowed, ids), "window_tiles": (windowed, window_ids)}
    # All layers share one assignment of blocks to parts, so blocks are dealt by their total work in
    # full and in windowed layers.
    blocks = deal_blocks(list(layers.values()), row["segments"].shape[1], block, parts)
    row |= {name: tile_tables(ids, blocks, block, parts) for name, (_, ids) in layers.items()}
    row["order"] = _expand(blocks, block)
    if LANGUAGE in attention.runs:
        row["runs"] = document_runs(row["segments"], attention.runs[LANGUAGE])
    if parts > 1:
        slot_columns = ["tokens", "targets", "segments", "positions", "media", "groups"]
        _reorder(row, [*slot_columns, "states"] if "states" in row else slot_columns, row["order"])


def finish_generator_row(row: Row, attention: AttentionSpec, phase: str, span: int = 1) -> None:
    """Finish a generator row, whose items see themselves and their conditions: add `tiles` and
    `order`, and deal the slots to the parts. Where patches see conditions by cross-attention, also
    add `cross_tiles` and `padded`, the number of conditions of zeros that each patch also sees.

    Args:
      span: ranks that hold the row together.
    """
    seen = row["segments"]
    block, parts = attention.of(phase, seen.shape[1], span)
    crossed: list[Tiles] = []
    slot_columns = ["features", "segments", "positions", "owners", "patches", "conditions"]
    if phase in attention.crossed:
        rank_segments = zip(seen, row["readers"], strict=True)
        crossed = [crossed_tiles(*of_rank, block) for of_rank in rank_segments]
        row["padded"] = lacking(seen, row["readers"], attention.crossed[phase])
        slot_columns += ["readers", "padded"]
    ids = [item_ids(of_rank) for of_rank in seen]
    block_count = seen.shape[1] // block
    cross_work = [TILE * np.bincount(tiles.query, minlength=block_count) for tiles in crossed]
    blocks = deal_blocks([(1, ids)], seen.shape[1], block, parts, cross_work)
    row["tiles"] = tile_tables(ids, blocks, block, parts)
    if phase in attention.crossed:
        row["cross_tiles"] = dealt_tables(crossed, blocks, parts)
    row["order"] = _expand(blocks, block)
    if parts > 1:
        if "partners" in row:
            slot_columns.append("partners")
            # A partner is named by its slot, so first the numbers change, then they are dealt.
            new_slots = np.argsort(row["order"], axis=1).astype(np.int32)
            row["partners"] = np.take_along_axis(new_slots, row["partners"], axis=1)
        _reorder(row, slot_columns, row["order"])


def lacking(patches: Ints, conditions: Ints, min_conditions: int) -> Ints:
    """Number of conditions that each patch lacks of `min_conditions`; 0 in other slots: [r, C].

    Args:
      patches: [r, C] segment of each patch; 0 in other slots.
      conditions: [r, C] segment of each condition that is seen; 0 in other slots.
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
    """The language token to put at each place of a row, so that the slots of a window are
    neighbours: [r, T]. Tokens move inside their item, and each item keeps its slots.

    A token belongs to the window of its first slot. Where windows are no multiple of the slots of a
    token, its other slots may be in other windows; masks use each slot's own (`window_numbers`).

    Windows that fill whole blocks come first in an item. The slots of the item before its first
    block boundary take the item's last tokens, so that these windows begin at block boundaries.

    Args:
      segments: [r, C] item of each slot; the slots of an item are a run.
      positions: [r, C, 2] (row, column) inside the item.
      side: side of a window, in patches.
      block: slots of a block of attention.
    """
    document = segments[:, ::slots_per_token]
    # Row and column of the token's window in its item; 0 for padding, which forms one window.
    corner = positions[:, ::slots_per_token] // side * (document > 0)[:, :, None]
    order = np.empty_like(document)
    for rank, (items, (rows, columns)) in enumerate(
        zip(document, corner.transpose(0, 2, 1), strict=True)
    ):
        starts = np.flatnonzero(np.append(True, items[1:] != items[:-1]))
        item = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(items)))
        # [T] keys: two tokens have the same key exactly if they are in the same window of the same
        # item. From these come the number of each token's window, and the slots of that window.
        key = (item * (rows.max() + 1) + rows) * (columns.max() + 1) + columns
        window, tokens = np.unique(key, return_inverse=True, return_counts=True)[1:]
        slots = tokens[window] * slots_per_token
        # lexsort sorts by its last key first: by item, windows that fill whole blocks before
        # others, larger windows before smaller ones. It is stable, so a window keeps the order of
        # its tokens.
        of_row = np.lexsort((window, -slots, slots % block != 0, item)).astype(np.int32)
        # Tokens from the first one of each item to the next block boundary.
        before = -starts * slots_per_token % block // slots_per_token
        ends = np.append(starts[1:], len(items))
        for start, end, shift in zip(starts, ends, before, strict=True):
            # Windows that fill blocks come first. Rolling the item by `shift` puts its last tokens
            # before the block boundary, and the first window begins at the boundary.
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
    """The stretch of blocks at each place of a dealt row, the stretches of a part together:
    [r, N / stretch].

    Args:
      layers: (number of layers, ids of each row) for each kind of layer.
      tokens: attention tokens of a row.
      apart: cross-attention work [N] of the blocks of each row, in the units of `block_work`; empty
        without cross-attention.
      stretch: number of neighbouring blocks that stay together.
    """
    ranks = len(layers[0][1])
    order = np.tile(np.arange(tokens // (stretch * block), dtype=np.int32), (ranks, 1))
    if parts > 1:
        for rank in range(ranks):
            work = [layer_count * block_work(ids[rank], block) for layer_count, ids in layers]
            if apart:
                work.append(apart[rank])
            of_stretches = np.sum(work, axis=0).reshape(-1, stretch).sum(axis=1)
            # A stable sort by owner leaves the blocks of a part in the order of the row.
            order[rank] = np.argsort(assign_blocks(of_stretches, parts), kind="stable")
    return order


def tile_tables(ids: list[TokenIds], order: Ints, block: int, parts: int) -> dict[str, Ints]:
    """The tables of `RowTiles` by name, for rows whose blocks are dealt in this order.

    Args:
      ids: ids of each row, before dealing.
      order: [r, N] block at each place of the dealt row.
    """
    return dealt_tables([visible_tiles(of_rank, block) for of_rank in ids], order, parts)


def dealt_tables(tiles: list[Tiles], order: Ints, parts: int) -> dict[str, Ints]:
    """The tables of `RowTiles` by name, from the visible tiles of each row; see `tile_tables`."""
    blocks = order.shape[1]
    bound = list_bound(blocks // parts, blocks)
    tables = {
        "query_spans": np.zeros((len(tiles), parts, blocks // parts, 3), np.int32),
        "query_blocks": np.zeros((len(tiles), parts, bound), np.int32),
        "key_spans": np.zeros((len(tiles), parts, blocks, 3), np.int32),
        "key_blocks": np.zeros((len(tiles), parts, bound), np.int32),
    }
    for rank, of_rank in enumerate(tiles):
        # argsort inverts the permutation: the place of each block after dealing.
        new_blocks = np.argsort(order[rank]).astype(np.int32)
        for part, lists in enumerate(dealt_tiles(of_rank, new_blocks, parts, bound)):
            values = lists.queries.spans, lists.queries.blocks, lists.keys.spans, lists.keys.blocks
            for table, value in zip(tables.values(), values, strict=True):
                table[rank, part] = value
    return tables


def _reorder(row: Row, names: Iterable[str], order: Ints) -> None:
    # In place: slot s of the result is slot order[rank, s] of before.
    for name in names:
        for of_rank, slots in zip(row[name], order, strict=True):
            # Indexing with an array copies, so every slot is read before any is written.
            of_rank[:] = of_rank[slots]


def _expand(blocks: NDArray[Any], size: int) -> Ints:
    """Numbers of blocks [r, N] -> numbers of their slots [r, N * size], for blocks of `size`
    slots."""
    slots = blocks[:, :, None] * size + np.arange(size)
    return slots.reshape(len(blocks), blocks.shape[1] * size).astype(np.int32)
