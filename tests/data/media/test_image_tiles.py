"""Tiles of images with a class token each: lengths, patches, and positions of tokens."""

import numpy as np
import pytest

from jaxmllm.data.media.image_tiles import ClassedTiles

TILES = ClassedTiles(
    patch_size=4, merge=2, min_pixels=24**2, max_pixels=24**2, resize="tiles", tiles=(1, 4)
)


@pytest.mark.parametrize(("height", "width", "count"), [(30, 30, 1), (30, 60, 3), (90, 30, 4)])
def test_all_arrays_of_an_item_are_as_long_as_it_is(height: int, width: int, count: int) -> None:
    shape = TILES.shape_of(height, width)
    assert shape == (count, 6, 6)
    slots = TILES.length(shape)
    real = TILES.real(shape)
    pixels = np.zeros((count * 24, 24, 3), np.uint8)
    for array in (TILES.patches(pixels, shape), TILES.positions(shape), TILES.apart(shape)):
        assert array is not None and len(array) == slots
    # A tile has 6 x 6 patches and a class token; 2 x 2 patches make one language token.
    assert (TILES.real_slots(shape).sum(), real) == (count * 37, count * 37)
    assert len(TILES.token_positions(shape, 5)[0]) == TILES.tokens(shape) == count * 9


def test_tokens_of_tiles_have_times_one_after_another() -> None:
    positions, following = TILES.token_positions((4, 6, 6), 5)
    assert positions.reshape(4, 3, 3, 3)[2, 1].tolist() == [[7, 6, 5], [7, 6, 6], [7, 6, 7]]
    assert (positions.max(0).tolist(), following) == ([8, 7, 7], 9)
