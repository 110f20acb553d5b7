"""The fixed-shape rows as the device sees them: pytrees of arrays [R, ...], one row on every rank.

The host fills dictionaries with these very names (jaxmllm/data/rows/fill.py says what each holds).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Shaped
from numpy.typing import DTypeLike

from jaxmllm.attention.tiles import list_bound
from jaxmllm.row_format import RowFormat
from sharding.rules import Layout


class RowTiles(NamedTuple):
    """Which blocks attend to which, for each part of a row (attention/tiles.py). A row has X parts of n blocks each."""

    query_spans: Int[Array, "R X n 3"]  # of the part's own blocks of queries, into `query_blocks`
    query_blocks: Int[Array, "R X L"]
    key_spans: Int[Array, "R X n*X 3"]  # of the row's blocks of keys, into `key_blocks`
    key_blocks: Int[Array, "R X L"]


def _tile_tables(row: dict[str, Any]) -> dict[str, RowTiles]:
    """The tile lists of a row of the host, by field."""
    return {name: RowTiles(**row[name]) for name in ("tiles", "window_tiles") if name in row}


class EncoderRows(NamedTuple):
    """One microbatch of an encoder phase; g slots become one language token."""

    features: Shaped[Array, "R C F"]
    segments: Int[Array, "R C"]  # item number in the row, 0 for padding
    positions: Int[Array, "R C P"]
    # Tokens that come from data which could be decoded, in the order of the pool
    valid: Bool[Array, "R C/g"]
    failed: Int[Array, " R"]  # items that could not
    places: Int[Array, "R C/g"]  # where in the row the tokens of the pool are, in its order
    tiles: RowTiles
    # Window number in the row, for towers that attend in windows
    windows: Int[Array, "R C"] | None = None
    window_tiles: RowTiles | None = None  # of these windows

    @classmethod
    def of(cls, row: dict[str, Any]) -> EncoderRows:
        """From the host's dictionary."""
        return cls(**row | _tile_tables(row))

    def shardings(self, layout: Layout) -> EncoderRows:
        """How the arrays lie on the mesh."""
        rows: Any = layout.rows
        by_slots: EncoderRows = jax.tree.map(lambda _: layout.sharding(("batch", "sequence")), self)
        return by_slots._replace(valid=rows, failed=rows, places=rows)


class LanguageRows(NamedTuple):
    """One microbatch of the language phase."""

    tokens: Int[Array, "R C"]
    targets: Int[Array, "R C"]  # the next token where it carries loss, else -1
    segments: Int[Array, "R C"]
    positions: Int[Array, "R C 3"]
    media: Int[Array, "R C"]  # pool slot of an encoder's token, else -1
    sources: Int[Array, "R S"]  # source number of each segment, else -1
    groups: Int[Array, "R C"]  # > 0: media of one item, which see one another in both directions
    order: Int[Array, "R C"]  # place of each slot in the packed row, before parts were dealt
    tiles: RowTiles
    window_tiles: RowTiles | None = None  # where layers attend in windows

    @classmethod
    def of(cls, row: dict[str, Any]) -> LanguageRows:
        """From the host's dictionary."""
        return cls(**row | _tile_tables(row))

    def shardings(self, layout: Layout) -> LanguageRows:
        """How the arrays lie on the mesh."""
        rows: Any = layout.rows
        by_slots: LanguageRows = jax.tree.map(
            lambda _: layout.sharding(("batch", "sequence")), self
        )
        return by_slots._replace(sources=rows)


class TokenPool(NamedTuple):
    """Language tokens made by encoders, on their way to the language rows."""

    tokens: Float[Array, "R W D"]
    valid: Int[Array, "R W"]  # 1 where the token comes from data that could be decoded


def abstract_encoder_rows(
    layout: Layout, capacity: int, row_format: RowFormat, block: int, windows: bool = False
) -> EncoderRows:
    """Shapes, types and shardings of the rows of one capacity C.

    Args:
      windows: whether some layers attend in windows.
    """
    tokens = capacity // row_format.slots_per_token
    shapes = EncoderRows(
        features=_shape((capacity, row_format.features), row_format.dtype),
        segments=_shape((capacity,)),
        positions=_shape((capacity, len(row_format.axes))),
        valid=_shape((tokens,), np.bool_),
        failed=_shape(()),
        places=_shape((tokens,)),
        tiles=_tiles(layout, capacity // row_format.stride // block),
    )
    if windows:
        shapes = shapes._replace(windows=shapes.segments, window_tiles=shapes.tiles)
    return _on_ranks(layout, shapes)


def abstract_language_rows(
    layout: Layout, capacity: int, max_segments: int, block: int, windows: bool = False
) -> LanguageRows:
    """Shapes, types and shardings of the rows of one capacity C with at most S segments.

    Args:
      windows: whether some layers attend in windows.
    """
    slots = _shape((capacity,))
    shapes = LanguageRows(
        tokens=slots,
        targets=slots,
        segments=slots,
        positions=_shape((capacity, 3)),
        media=slots,
        sources=_shape((max_segments,)),
        groups=slots,
        order=slots,
        tiles=_tiles(layout, capacity // block),
    )
    if windows:
        shapes = shapes._replace(window_tiles=shapes.tiles)
    return _on_ranks(layout, shapes)


def abstract_pool(layout: Layout, slots: int, width: int, dtype: DTypeLike) -> TokenPool:
    """Shapes, types and shardings of a pool of W slots on every rank of a layout."""
    shapes = TokenPool(tokens=_shape((slots, width), dtype), valid=_shape((slots,)))
    return TokenPool(*(_on_rank(layout, leaf, layout.rows) for leaf in shapes))


def _tiles(layout: Layout, blocks: int) -> RowTiles:
    parts, own = layout.parts, blocks // layout.parts
    lists = _shape((parts, list_bound(own, blocks)))
    return RowTiles(_shape((parts, own, 3)), lists, _shape((parts, blocks, 3)), lists)


def _shape(shape: tuple[int, ...], dtype: DTypeLike = np.int32) -> Any:
    """Of one rank."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _on_ranks(layout: Layout, rows: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: _on_rank(layout, leaf, sharding), rows, rows.shardings(layout)
    )


def _on_rank(layout: Layout, leaf: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct((layout.groups, *leaf.shape), leaf.dtype, sharding=sharding)
