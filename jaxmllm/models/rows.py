"""Rows of fixed shape as the device sees them: pytrees of arrays [R / g, ...], one row per g ranks.

g is the span of the rows, and C the slots of one rank. Most arrays are in dealt order, the parts of
a row one after the other; others are in packed order, that of the plan's offsets. With one part
(span 1, no context parallelism) both orders are the same, except in towers that attend in windows,
whose slots are in the order of the windows. The host fills dictionaries with the same names:
encoder_rows.py, language_rows.py and generator_rows.py in jaxmllm/data/rows describe each array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Shaped
from numpy.typing import DTypeLike

from jaxmllm.attention.tiles import list_bound
from jaxmllm.row_format import RowFormat
from sharding.rules import Layout

TILE_TABLES = ("tiles", "window_tiles", "cross_tiles")  # fields of rows that hold them


class RowTiles(NamedTuple):
    """Which blocks attend to which, for each part of a row (attention/tiles.py). A row has P parts
    of n blocks each."""

    query_spans: Int[Array, "R/g P n 3"]  # for the part's own query blocks, into `query_blocks`
    query_blocks: Int[Array, "R/g P L"]
    key_spans: Int[Array, "R/g P n*P 3"]  # for the row's key blocks, into `key_blocks`
    key_blocks: Int[Array, "R/g P L"]


class BlockMargins(NamedTuple):
    """The slots of the packed row just before and just after each block of attention, for towers
    that read beyond the edges of a block. A row has N blocks, in dealt order, and a margin has m
    slots; beyond the ends of the row there are zeros."""

    features: Shaped[Array, "R/g N*2*m F"]
    segments: Int[Array, "R/g N*2*m"]
    positions: Int[Array, "R/g N*2*m A"]


def _table_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Tile lists and margins in a host's dictionary of rows, by field."""
    tables: dict[str, Any] = {name: RowTiles(**row[name]) for name in TILE_TABLES if name in row}
    if "margins" in row:
        tables["margins"] = BlockMargins(**row["margins"])
    return tables


def _row_shardings(rows: Any, layout: Layout, *by_row: str) -> Any:
    """Shardings of the arrays of rows: the fields `by_row` are split by rows alone, the others by
    slots, too."""
    by_slots = jax.tree.map(lambda _: layout.sharding(("batch", "sequence")), rows)
    return by_slots._replace(**dict.fromkeys(by_row, layout.rows))


class EncoderRows(NamedTuple):
    """One microbatch of an encoder phase; t slots become one language token."""

    features: Shaped[Array, "R/g g*C F"]
    # Number in the row of the slot's item, or of its part that sees only itself; 0: padding
    segments: Int[Array, "R/g g*C"]
    positions: Int[Array, "R/g g*C A"]
    # Whether each token comes from data that could be decoded, in packed order
    valid: Bool[Array, "R/g g*C/t"]
    failed: Int[Array, " R/g"]  # items that could not be decoded
    places: Int[Array, "R/g g*C/t"]  # where in the row each token is, in packed order
    tiles: RowTiles
    # Window number in the row, for towers that attend in windows
    windows: Int[Array, "R/g g*C"] | None = None
    window_tiles: RowTiles | None = None  # tiles of attention in these windows
    # First slot and slot count of each item, in attention tokens, for kernels that read them
    runs: Int[Array, "R/g S 2"] | None = None
    margins: BlockMargins | None = None  # where rows are dealt to parts, for towers that read them

    @classmethod
    def of(cls, row: dict[str, Any]) -> EncoderRows:
        """Make rows from the host's dictionary."""
        return cls(**row | _table_fields(row))

    def shardings(self, layout: Layout) -> EncoderRows:
        """Shardings of the arrays on the mesh."""
        if layout.span > 1:  # split by tokens, so that each rank holds its own
            return _row_shardings(self, layout, "failed")
        return _row_shardings(self, layout, "valid", "failed", "places", *self._fields_by_row)

    @property
    def _fields_by_row(self) -> tuple[str, ...]:
        return () if self.runs is None else ("runs",)


class LanguageRows(NamedTuple):
    """One microbatch of the language phase."""

    tokens: Int[Array, "R/g g*C"]
    targets: Int[Array, "R/g g*C"]  # the next token where it carries loss, else -1
    segments: Int[Array, "R/g g*C"]
    positions: Float[Array, "R/g g*C 3"]  # float32, because times of videos may be fractions
    # Slot of the encoder's token that belongs here, in the pool of the rank that holds this slot in
    # packed order; else -1
    media: Int[Array, "R/g g*C"]
    sources: Int[Array, "R/g S"]  # source number of each segment, else -1
    groups: Int[
        Array, "R/g g*C"
    ]  # > 0: media of one item, which see one another in both directions
    order: Int[Array, "R/g g*C"]  # place of each slot in the packed row, before parts were dealt
    tiles: RowTiles
    window_tiles: RowTiles | None = None  # where layers attend in windows
    arrived: Int[Array, "R/g g*C"] | None = None  # `media` in packed order, where ranks share rows
    # With a generator: slot of the pool from which this token's state is sent to it, else -1
    states: Int[Array, "R/g g*C"] | None = None
    leaving: Int[Array, "R/g g*C"] | None = None  # `states` in packed order, where ranks share rows
    # First slot and slot count of each segment, for attention kernels that read them
    runs: Int[Array, "R/g S 2"] | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> LanguageRows:
        """Make rows from the host's dictionary."""
        return cls(**row | _table_fields(row))

    def shardings(self, layout: Layout) -> LanguageRows:
        """Shardings of the arrays on the mesh."""
        return _row_shardings(
            self, layout, *(("sources",) if self.runs is None else ("sources", "runs"))
        )


class GeneratorRows(NamedTuple):
    """One microbatch of a generator. An item is a segment of conditions and, after them, patches;
    with `conditioning: cross` both begin in the first slot."""

    features: Shaped[Array, "R/g g*C F"]
    owners: Int[Array, "R/g g*C"]  # segment of the slot's item, 0 for padding
    segments: Int[Array, "R/g g*C"]  # the same for attention: 0 also where conditions are hidden
    positions: Int[Array, "R/g g*C 3"]
    patches: Int[Array, "R/g g*C"]  # number of the patch in its item; -1: none, or not decoded
    # Slot in the rank's part of the pool at which the state that is this slot's condition arrives;
    # else -1
    conditions: Int[Array, "R/g g*C"]
    noise: Shaped[Array, "R/g S 2"]  # key of each segment, uint32
    times: Float[Array, "R/g S"]  # 0: the image, 1: noise; for guided items the shift of times
    sources: Int[Array, "R/g S"]  # source number of each segment, else -1
    failed: Int[Array, " R/g"]  # items that could not be decoded
    order: Int[Array, "R/g g*C"]  # place of each slot in the packed row, before parts were dealt
    tiles: RowTiles
    arrived: Int[Array, "R/g g*C"] | None = None  # `conditions` in packed order, in shared rows
    # Where rows hold items with and without conditions: slot of the same patch in the other half
    partners: Int[Array, "R/g g*C"] | None = None
    # With `conditioning: cross`: `segments` of the conditions, which share slots with patches;
    # tiles of the attention to conditions; and how many conditions of zeros each patch also sees
    readers: Int[Array, "R/g g*C"] | None = None
    cross_tiles: RowTiles | None = None
    padded: Int[Array, "R/g g*C"] | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> GeneratorRows:
        """Make rows from the host's dictionary."""
        return cls(**row | _table_fields(row))

    @property
    def seen_conditions(self) -> Int[Array, "R/g g*C"]:
        """Segment of each slot's condition; 0: there is none, or it is hidden from its item."""
        if self.readers is not None:
            return self.readers
        return jnp.where(self.conditions >= 0, self.segments, 0)

    @property
    def owners_of_patches(self) -> Int[Array, "R/g g*C"]:
        """Segment of the item of each slot that holds a patch, else 0."""
        is_patch = self.conditions < 0 if self.readers is None else self.segments > 0
        return jnp.where(is_patch, self.owners, 0)

    def shardings(self, layout: Layout) -> GeneratorRows:
        """Shardings of the arrays on the mesh."""
        return _row_shardings(self, layout, "noise", "times", "sources", "failed")


class TokenPool(NamedTuple):
    """Language tokens made by encoders, on their way to the language rows."""

    tokens: Float[Array, "R W D"]
    valid: Int[Array, "R W"]  # 1 where the token comes from data that could be decoded


def abstract_encoder_rows(
    layout: Layout,
    capacity: int,
    row_format: RowFormat,
    block: int,
    windows: bool = False,
    runs: int | None = None,
) -> EncoderRows:
    """Shapes, types and shardings of the rows of one capacity C.

    Args:
      layout: layout of the rows, with span g.
      capacity: slots of a rank.
      windows: whether some layers attend in windows.
      runs: most items of a row, for attention kernels that read their runs; else none.
    """
    slots = layout.span * capacity
    tokens = slots // row_format.slots_per_token
    shapes = EncoderRows(
        features=_shape((slots, row_format.features), row_format.dtype),
        segments=_shape((slots,)),
        positions=_shape((slots, len(row_format.axes))),
        valid=_shape((tokens,), np.bool_),
        failed=_shape(()),
        places=_shape((tokens,)),
        tiles=_abstract_tiles(layout, slots // row_format.stride // block),
        runs=None if runs is None else _shape((runs, 2)),
    )
    if windows:
        shapes = shapes._replace(windows=shapes.segments, window_tiles=shapes.tiles)
    if row_format.margin and layout.parts > 1:
        shapes = shapes._replace(
            margins=_abstract_margins(slots // (block * row_format.stride), row_format)
        )
    return _abstract_rows(layout, shapes)


def abstract_language_rows(
    layout: Layout,
    capacity: int,
    max_segments: int,
    block: int,
    windows: bool = False,
    generates: bool = False,
    runs: int | None = None,
) -> LanguageRows:
    """Shapes, types and shardings of the rows of one capacity C with at most S segments.

    Args:
      layout: layout of the rows, with span g.
      capacity: slots of a rank.
      windows: whether some layers attend in windows.
      generates: whether a generator reads states of these rows.
      runs: most segments of a row, for attention kernels that read their runs; else none.
    """
    tokens = layout.span * capacity
    slots = _shape((tokens,))
    shapes = LanguageRows(
        tokens=slots,
        targets=slots,
        segments=slots,
        positions=_shape((tokens, 3), np.float32),
        media=slots,
        sources=_shape((max_segments,)),
        groups=slots,
        order=slots,
        tiles=_abstract_tiles(layout, tokens // block),
        arrived=slots if layout.span > 1 else None,
        states=slots if generates else None,
        leaving=slots if generates and layout.span > 1 else None,
        runs=None if runs is None else _shape((runs, 2)),
    )
    if windows:
        shapes = shapes._replace(window_tiles=shapes.tiles)
    return _abstract_rows(layout, shapes)


def abstract_generator_rows(
    layout: Layout,
    capacity: int,
    max_segments: int,
    row_format: RowFormat,
    block: int,
    guided: bool = False,
    crossed: bool = False,
) -> GeneratorRows:
    """Shapes, types and shardings of the rows of one capacity C with at most S segments.

    Args:
      layout: layout of the rows, with span g.
      capacity: slots of a rank.
      guided: whether rows hold each item with and without conditions.
      crossed: whether patches see conditions by a second attention (`conditioning: cross`).
    """
    row_slots = layout.span * capacity
    slots = _shape((row_slots,))
    shapes = GeneratorRows(
        features=_shape((row_slots, row_format.features), row_format.dtype),
        owners=slots,
        segments=slots,
        positions=_shape((row_slots, 3)),
        patches=slots,
        conditions=slots,
        noise=_shape((max_segments, 2), np.uint32),
        times=_shape((max_segments,), np.float32),
        sources=_shape((max_segments,)),
        failed=_shape(()),
        order=slots,
        tiles=_abstract_tiles(layout, row_slots // block),
        arrived=slots if layout.span > 1 else None,
        partners=slots if guided else None,
        readers=slots if crossed else None,
        padded=slots if crossed else None,
    )
    if crossed:
        shapes = shapes._replace(cross_tiles=shapes.tiles)
    return _abstract_rows(layout, shapes)


def abstract_pool(layout: Layout, slots: int, width: int, dtype: DTypeLike) -> TokenPool:
    """Shapes, types and shardings of a pool of W slots on every rank of a layout."""
    shapes = TokenPool(tokens=_shape((slots, width), dtype), valid=_shape((slots,)))
    return TokenPool(*(_stacked_shape(layout.ranks, leaf, layout.rows) for leaf in shapes))


def _abstract_tiles(layout: Layout, blocks: int) -> RowTiles:
    parts = layout.parts
    part_blocks = blocks // layout.parts
    lists = _shape((parts, list_bound(part_blocks, blocks)))
    return RowTiles(_shape((parts, part_blocks, 3)), lists, _shape((parts, blocks, 3)), lists)


def _abstract_margins(blocks: int, row_format: RowFormat) -> BlockMargins:
    slots = blocks * 2 * row_format.margin
    return BlockMargins(
        features=_shape((slots, row_format.features), row_format.dtype),
        segments=_shape((slots,)),
        positions=_shape((slots, len(row_format.axes))),
    )


def _shape(shape: tuple[int, ...], dtype: DTypeLike = np.int32) -> Any:
    """Shape and type of an array of one row, or of one rank."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _abstract_rows(layout: Layout, rows: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: _stacked_shape(layout.groups, leaf, sharding),
        rows,
        rows.shardings(layout),
    )


def _stacked_shape(count: int, leaf: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=sharding)
