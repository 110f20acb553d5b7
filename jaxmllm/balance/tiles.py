"""Which blocks of a packed row must meet in attention: ranges for the loops of models/attention.py.

A row of C slots is cut into C / block blocks. A query sees the keys of its own segment (and, if causal, none after
it). Segments are runs in ascending order, so what one block needs is an interval of blocks: two integers.

    keys    0 1 2 3        row of 4 blocks, segments  1 1 1 2 | 2 2 2 2 | 2 3 3 3 | 0 0 0 0
    query 0 x              bidirectional: query block 0 holds segments 1 and 2, so it needs
    query 1 x x            blocks [0, 3); query block 3 holds padding alone, so it needs [0, 0).
    query 2 x x x          (the picture is the causal form)
    query 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.balance.plan import Ints


@dataclass(frozen=True)
class TileRanges:
    """Half-open block ranges [lo, hi) of one row; a block without a visible pair has [0, 0).

    `queries[i]` bounds the key blocks that hold something query block i sees, `keys[j]` the query blocks that
    see something in key block j. Both are tight: first and last block of a range hold a visible pair.
    """

    queries: Ints  # [C / block, 2]
    keys: Ints  # [C / block, 2]


def tile_ranges(segments: Ints, block: int, causal: bool) -> TileRanges:
    """Block ranges of one packed row.

    Args:
      segments: [C] segment of each slot; 0 is padding, segments >= 1 ascend along the row.
      block: slots in a block; divides C.
      causal: whether a query sees only keys at or before its own slot.

    Raises `ValueError` if `block` does not divide C or the segments do not ascend.
    """
    if len(segments) % block:
        raise ValueError(
            f"a row of {len(segments)} slots is not a whole number of attention blocks of {block}; "
            "make phases.<phase>.capacities multiples of phases.<phase>.block"
        )
    slots = np.flatnonzero(segments)
    ids = segments[slots]
    if (ids[1:] < ids[:-1]).any():
        place = slots[1:][ids[1:] < ids[:-1]][0]
        raise ValueError(f"segments of a row must ascend, but slot {place} falls back to segment {segments[place]}")

    edges = np.arange(0, len(segments) + 1, block)
    bounds = np.searchsorted(slots, edges)  # slots[bounds[i]:bounds[i + 1]] are the real slots of block i
    full = bounds[:-1] < bounds[1:]
    first, last = bounds[:-1][full], bounds[1:][full] - 1
    own = np.flatnonzero(full)
    start = slots[np.searchsorted(ids, ids[first], side="left")] // block
    stop = slots[np.searchsorted(ids, ids[last], side="right") - 1] // block + 1

    def ranges(low: np.ndarray, high: np.ndarray) -> Ints:
        table = np.zeros((len(full), 2), np.int32)
        table[full] = np.stack([low, high], axis=1)
        return table

    return TileRanges(
        queries=ranges(start, own + 1 if causal else stop),
        keys=ranges(own if causal else start, stop),
    )
