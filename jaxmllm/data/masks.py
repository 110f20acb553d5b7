"""What attention needs of a filled row, and its slots dealt to parts where context parallelism splits rows.

    segments, groups --visible_tiles--> tiles --assign_blocks--> which part each block goes to
    row --dealt--> the same row, its slots in the order of the parts, with tile lists for each part

With one part nothing moves. Letters: r ranks, C slots of a row, A attention tokens of it, N blocks, X parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.balance.context import assign_blocks, block_work
from jaxmllm.balance.plan import Ints
from jaxmllm.balance.tiles import TokenIds, dealt_tiles, list_bound, segment_ids, visible_tiles

Row = dict[str, Any]  # arrays, and the tables of `RowTiles` by name under "tiles"


@dataclass(frozen=True)
class AttentionSpec:
    """How rows are cut for attention, by phase."""

    blocks: Mapping[str, int]  # attention tokens of a block
    parts: Mapping[str, int] = field(default_factory=dict)  # X of each phase whose rows are split
    bidirectional: tuple[str, ...] = ()  # media whose language tokens see their whole item

    def of(self, phase: str) -> tuple[int, int]:
        """(block, parts)"""
        return self.blocks[phase], self.parts.get(phase, 1)


def finish_encoder_row(row: Row, block: int, parts: int, stride: int, slots_per_token: int) -> None:
    """Add `tiles` and `places` to a row of both directions, and deal its slots to the parts.

    Args:
      stride: slots behind one attention token.
      slots_per_token: slots behind one language token; a block of attention tokens holds whole ones.
    """
    segments = row["segments"][:, ::stride]
    ids = [segment_ids(of_rank, causal=False) for of_rank in segments]
    blocks = _add_tiles(row, ids, segments.shape[1], block, parts)
    if parts > 1:
        row["places"] = _expand(np.argsort(blocks, axis=1), block * stride // slots_per_token)
        _reorder(row, ("features", "segments", "positions"), _expand(blocks, block * stride))
    else:
        row["places"] = np.tile(np.arange(row["valid"].shape[1], dtype=np.int32), (len(segments), 1))


def finish_language_row(row: Row, block: int, parts: int) -> None:
    """Add `tiles` and `order` to a causal row with groups, and deal its slots to the parts."""
    both = zip(row["segments"], row["groups"], strict=True)
    ids = [segment_ids(segments, causal=True, groups=groups) for segments, groups in both]
    row["order"] = _expand(_add_tiles(row, ids, row["segments"].shape[1], block, parts), block)
    if parts > 1:
        _reorder(row, ("tokens", "targets", "segments", "positions", "media", "groups"), row["order"])


def _add_tiles(row: Row, ids: list[TokenIds], slots: int, block: int, parts: int) -> Ints:
    """Add the tables of `RowTiles`; returns which block of each row stands at each place: [r, N].

    Args:
      ids: of each row.
      slots: attention tokens of a row.
    """
    blocks = slots // block
    bound = list_bound(blocks // parts, blocks)
    row["tiles"] = {
        "query_spans": np.zeros((len(ids), parts, blocks // parts, 3), np.int32),
        "query_blocks": np.zeros((len(ids), parts, bound), np.int32),
        "key_spans": np.zeros((len(ids), parts, blocks, 3), np.int32),
        "key_blocks": np.zeros((len(ids), parts, bound), np.int32),
    }
    order = np.tile(np.arange(blocks, dtype=np.int32), (len(ids), 1))
    for rank, of_rank in enumerate(ids):
        tiles = visible_tiles(of_rank, block)
        if parts > 1:
            work = block_work(of_rank.document, of_rank.group, of_rank.position, block)
            order[rank] = np.argsort(assign_blocks(work, parts), kind="stable")
        for part, lists in enumerate(dealt_tiles(tiles, np.argsort(order[rank]).astype(np.int32), parts, bound)):
            tables = lists.queries.spans, lists.queries.blocks, lists.keys.spans, lists.keys.blocks
            for table, values in zip(row["tiles"].values(), tables, strict=True):
                table[rank, part] = values
    return order


def _reorder(row: Row, names: tuple[str, ...], order: Ints) -> None:
    for name in names:
        for of_rank, slots in zip(row[name], order, strict=True):
            of_rank[:] = of_rank[slots]


def _expand(blocks: NDArray[Any], size: int) -> Ints:
    """Numbers of blocks [r, N] -> numbers of their slots [r, N * size]."""
    slots = blocks[:, :, None] * size + np.arange(size)
    return slots.reshape(len(blocks), -1).astype(np.int32)
