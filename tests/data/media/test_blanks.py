"""Pictures that are to be drawn: their sizes, and patches put side by side."""

import numpy as np
import pytest
from PIL import Image

from jaxmllm.data.media.blanks import Blank, BlankImages
from jaxmllm.data.media.images import GeneratedImages
from jaxmllm.data.media.reference import File, MediaError

LEARNED = GeneratedImages(patch_size=4, merge=1, min_pixels=16, max_pixels=1024)
BLANKS = BlankImages.like(LEARNED)


def test_a_picture_is_what_its_patches_are_of(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    file = File(tmp_path / "a.png")
    shape = LEARNED.measure(file)
    assert BLANKS.measure(Blank(8, 12)) == shape == (1, 2, 3)
    np.testing.assert_array_equal(BLANKS.picture(LEARNED.load(file, shape), shape), pixels)


def test_each_lies_twice():
    shape = BLANKS.measure(Blank(8, 12))
    assert BLANKS.length(shape) == BLANKS.real(shape) == 2 * LEARNED.length(shape) == 12
    positions = BLANKS.positions(shape).reshape(2, 6, 3)
    assert (positions == LEARNED.positions(shape)).all()
    assert BLANKS.load(Blank(8, 12), shape).shape == (12, 48)
    assert Blank.at(Blank(8, 12).address) == Blank(8, 12)


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (Blank(8, 10), "size 8x10: both sides must be multiples of model.diffusion.patch_size"),
        (Blank(32, 36), "1152 pixels are more than data.generated.max_pixels"),
        (File("a.png"), "a.png is an image of the assistant"),
    ],
)
def test_what_cannot_be_drawn_is_refused(media, words):
    with pytest.raises(MediaError, match=words):
        BLANKS.measure(media)
