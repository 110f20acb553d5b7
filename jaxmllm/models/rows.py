"""The fixed-shape rows as the device sees them: pytrees of arrays [R, ...], one row on every rank.

The host fills dictionaries with these very names (jaxmllm/data/fill.py says what each holds).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped
from numpy.typing import DTypeLike

from jaxmllm.data.modality import Modality
from sharding.rules import Layout


class EncoderRows(NamedTuple):
    """One microbatch of an encoder phase; g slots become one language token."""

    features: Shaped[Array, "R C F"]
    segments: Int[Array, "R C"]  # item number in the row, 0 for padding
    positions: Int[Array, "R C 2"]
    valid: Bool[Array, "R C/g"]  # tokens that come from data which could be decoded
    failed: Int[Array, " R"]  # items that could not
    query_tiles: Int[Array, "R Q 2"]
    key_tiles: Int[Array, "R Q 2"]


class LanguageRows(NamedTuple):
    """One microbatch of the language phase."""

    tokens: Int[Array, "R C"]
    targets: Int[Array, "R C"]  # the next token where it carries loss, else -1
    segments: Int[Array, "R C"]
    positions: Int[Array, "R C 3"]
    media: Int[Array, "R C"]  # pool slot of an encoder's token, else -1
    sources: Int[Array, "R S"]  # source number of each segment, else -1
    query_tiles: Int[Array, "R Q 2"]
    key_tiles: Int[Array, "R Q 2"]


class TokenPool(NamedTuple):
    """Language tokens made by encoders, on their way to the language rows."""

    tokens: Float[Array, "R W D"]
    valid: Int[Array, "R W"]  # 1 where the token comes from data that could be decoded


def abstract_encoder_rows(layout: Layout, capacity: int, modality: Modality, block: int) -> EncoderRows:
    """Shapes, types and shardings of the rows of one capacity C."""
    attention_slots = capacity // modality.attention_stride
    return EncoderRows(
        features=_rows(layout, (capacity, modality.features), modality.dtype),
        segments=_rows(layout, (capacity,)),
        positions=_rows(layout, (capacity, 2)),
        valid=_rows(layout, (capacity // modality.slots_per_token,), np.bool_),
        failed=_rows(layout, ()),
        query_tiles=_rows(layout, (attention_slots // block, 2)),
        key_tiles=_rows(layout, (attention_slots // block, 2)),
    )


def abstract_language_rows(layout: Layout, capacity: int, max_segments: int, block: int) -> LanguageRows:
    """Shapes, types and shardings of the rows of one capacity C with at most S segments."""
    return LanguageRows(
        tokens=_rows(layout, (capacity,)),
        targets=_rows(layout, (capacity,)),
        segments=_rows(layout, (capacity,)),
        positions=_rows(layout, (capacity, 3)),
        media=_rows(layout, (capacity,)),
        sources=_rows(layout, (max_segments,)),
        query_tiles=_rows(layout, (capacity // block, 2)),
        key_tiles=_rows(layout, (capacity // block, 2)),
    )


def abstract_pool(layout: Layout, slots: int, width: int, dtype: DTypeLike) -> TokenPool:
    """Shapes, types and shardings of a pool of W slots on every rank of a layout."""
    return TokenPool(tokens=_rows(layout, (slots, width), dtype), valid=_rows(layout, (slots,)))


def _rows(layout: Layout, shape: tuple[int, ...], dtype: DTypeLike = np.int32) -> Any:
    return jax.ShapeDtypeStruct((layout.ranks, *shape), dtype, sharding=layout.rows)
