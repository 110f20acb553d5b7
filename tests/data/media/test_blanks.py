"""Pictures that are to be drawn: their sizes, and patches put side by side."""

import numpy as np
import pytest
from PIL import Image

from jaxmllm.data.media.blanks import Blank, Blanks
from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.reference import Clip, File, MediaError

LEARNED = GeneratedPixels(
    patch_size=4, merge=1, min_pixels=16, max_pixels=1024, patch_frames=2, max_frames=6
)
BLANKS = Blanks(LEARNED)


def test_a_picture_is_what_its_patches_are_of(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    file = File(tmp_path / "a.png")
    shape = LEARNED.measure(file)
    assert BLANKS.measure(Blank(8, 12)) == shape == (1, 2, 3)
    (drawn,) = BLANKS.frames(LEARNED.load(file, shape), shape, Blank(8, 12))
    np.testing.assert_array_equal(drawn, pixels)


def test_a_clip_is_what_its_patches_are_of(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 12, 3)).astype(np.uint8)
    first, *others = map(Image.fromarray, frames)
    first.save(tmp_path / "a.png", save_all=True, append_images=others)
    clip, blank = Clip(File(tmp_path / "a.png")), Blank(8, 12, 3)
    shape = LEARNED.measure(clip)
    assert BLANKS.measure(Clip(blank)) == shape == (2, 2, 3)
    drawn = BLANKS.frames(LEARNED.load(clip, shape), shape, blank)
    np.testing.assert_array_equal(drawn, frames)


def test_latents_are_what_their_patches_are_of(tmp_path):
    latents = np.random.default_rng(0).normal(size=(3, 4, 8, 12)).astype(np.float32)
    np.save(tmp_path / "a.npy", latents)
    learned = GeneratedLatents(3, 2, 4, (1.0, 2.0, 3.0), (2.0,), 8, shorten=False)
    clip, blank = Clip(File(tmp_path / "a.npy")), Blank(8, 12, 4)
    shape = learned.measure(clip)
    assert Blanks(learned).measure(blank) == shape == (2, 2, 3)
    drawn = Blanks(learned).frames(learned.load(clip, shape), shape, blank)
    np.testing.assert_allclose(np.moveaxis(drawn, -1, 0), latents, rtol=1e-5, atol=1e-6)
    with pytest.raises(MediaError, match="frames must be a multiple"):
        Blanks(learned).measure(Blank(8, 12, 3))


def test_each_lies_twice():
    shape = BLANKS.measure(Blank(8, 12))
    assert BLANKS.length(shape) == BLANKS.real(shape) == 2 * LEARNED.length(shape) == 12
    positions = BLANKS.positions(shape).reshape(2, 6, 3)
    assert (positions == LEARNED.positions(shape)).all()
    assert BLANKS.load(Blank(8, 12), shape).shape == (12, 96)
    for blank in (Blank(8, 12), Blank(8, 12, 3)):
        assert Blank.at(blank.address) == blank


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (Blank(8, 10), "size 8x10: both sides must be multiples of model.diffusion.patch_size"),
        (Blank(32, 36), "1152 pixels are more than data.generated.max_pixels"),
        (Clip(Blank(8, 8, 7)), "7 frames are more than data.generated.max_frames"),
        (File("a.png"), "a.png is an image of the assistant"),
    ],
)
def test_what_cannot_be_drawn_is_refused(media, words):
    with pytest.raises(MediaError, match=words):
        BLANKS.measure(media)
