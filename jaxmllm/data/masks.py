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
from jaxmllm.balance.tiles import TokenIds, dealt_tiles, segment_ids, visible_tiles

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
    slots = _add_tiles(row, [segment_ids(ids, causal=False) for ids in segments], block, parts)
    token_places = np.argsort(slots, axis=1) if parts > 1 else slots
    row["places"] = _expand(token_places, block * stride // slots_per_token)
    _reorder(row, ("features", "segments", "positions"), _expand(slots, block * stride), parts)


def finish_language_row(row: Row, block: int, parts: int) -> None:
    """Add `tiles` and `order` to a causal row with groups, and deal its slots to the parts."""
    both = zip(row["segments"], row["groups"], strict=True)
    blocks = _add_tiles(row, [segment_ids(ids, causal=True, groups=groups) for ids, groups in both], block, parts)
    row["order"] = _expand(blocks, block)
    _reorder(row, ("tokens", "targets", "segments", "positions", "media", "groups"), row["order"], parts)


def _add_tiles(row: Row, ids: list[TokenIds], block: int, parts: int) -> Ints:
    """Add the tables of `RowTiles`; returns which block of each row stands at each place: [r, N]."""
    order, tables = [], []
    for of_rank in ids:
        tiles = visible_tiles(of_rank, block)
        blocks = len(of_rank.document) // block
        places = np.arange(blocks, dtype=np.int32)
        if parts > 1:
            owner = assign_blocks(block_work(of_rank.document, of_rank.group, of_rank.position, block), parts)
            places[np.argsort(owner, kind="stable")] = np.arange(blocks)
        dealt = dealt_tiles(tiles, places, parts)
        tables.append([(m.queries.spans, m.queries.blocks, m.keys.spans, m.keys.blocks) for m in dealt])
        order.append(np.argsort(places).astype(np.int32))
    names = ("query_spans", "query_blocks", "key_spans", "key_blocks")
    row["tiles"] = {
        name: np.stack([np.stack([part[column] for part in of_rank]) for of_rank in tables])
        for column, name in enumerate(names)
    }
    return np.stack(order)


def _reorder(row: Row, names: tuple[str, ...], order: Ints, parts: int) -> None:
    if parts > 1:
        for name in names:
            row[name] = np.stack([of_rank[slots] for of_rank, slots in zip(row[name], order, strict=True)])


def _expand(blocks: NDArray[Any], size: int) -> Ints:
    """Numbers of blocks [r, N] -> numbers of their slots [r, N * size]."""
    slots = blocks[:, :, None] * size + np.arange(size)
    return slots.reshape(len(blocks), -1).astype(np.int32)
