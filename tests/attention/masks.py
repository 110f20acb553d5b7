"""Masks of small rows from the ids of their tokens, and the rule of masks in words."""

import jax
import numpy as np

from jaxmllm.attention.mask import Mask
from jaxmllm.attention.tiles import tile_lists, visible_tiles


def tile_map(ids, block, bound=None):
    """The tile lists of one row that is not dealt to parts."""
    blocks = len(ids.document) // block
    return tile_lists(visible_tiles(ids, block), blocks, blocks, bound)


def stacked(rows):
    """Records of arrays, one per row -> one record of arrays [rows, ...]."""
    return jax.tree.map(lambda *columns: np.stack(columns), *rows)


def mask_of(ids, block, bound=None):
    """The mask of rows with these `TokenIds`."""
    maps = [tile_map(row, block, bound) for row in ids]
    return Mask(
        stacked(ids),
        stacked(ids),
        stacked([m.queries for m in maps]),
        stacked([m.keys for m in maps]),
    )


def visible_pairs(queries, keys):
    """[.., C, T] bool: the rule in words, apart from the code under test.

    Only tokens of one document see each other. There a token sees itself, earlier tokens within its
    window, and all tokens of its own image or clip.
    """
    q = [None if column is None else np.asarray(column)[..., :, None] for column in queries]
    k = [None if column is None else np.asarray(column)[..., None, :] for column in keys]
    one_item = (q[1] == k[1]) & (k[1] > 0)
    earlier = q[2] >= k[2]
    if q[3] is not None:
        earlier &= k[2] >= q[3]
    return (q[0] == k[0]) & (k[0] > 0) & (one_item | earlier)
