"""Blanks, the items to be drawn: their sizes, and their patches put side by side."""

import numpy as np
import pytest
from PIL import Image

from jaxmllm.data.media.blanks import Blank, Blanks
from jaxmllm.data.media.generated import GeneratedPixels, patches_of
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.reference import Clip, File, MediaError

PIXELS = GeneratedPixels(
    patch_size=4, merge=1, min_pixels=16, max_pixels=1024, patch_frames=2, max_frames=6
)
LATENTS = GeneratedLatents(
    channels=2,
    patch_frames=2,
    patch_size=2,
    mean=(1.0, -3.0),
    std=(2.0, 0.5),
    max_frames=6,
    shorten=False,
)


def test_a_picture_is_what_its_patches_are_of(tmp_path):
    """The second frame of a patch of two frames is a copy."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    file = File(tmp_path / "a.png")
    shape = PIXELS.measure(file)
    assert Blanks(PIXELS).measure(Blank(1, 8, 12)) == shape == (1, 2, 3)
    frames = Blanks(PIXELS).frames(PIXELS.load(file, shape), Blank(1, 8, 12))
    np.testing.assert_array_equal(frames, pixels[None])


def test_clips_of_latents_come_back_with_their_mean_and_deviation(tmp_path):
    latents = np.random.default_rng(0).normal(size=(2, 4, 6, 8)).astype(np.float32)
    np.save(tmp_path / "a.npy", latents)
    file = Clip(File(tmp_path / "a.npy"))
    shape = LATENTS.measure(file)
    assert Blanks(LATENTS).measure(Clip(Blank(4, 6, 8))) == shape == (2, 3, 4)
    frames = Blanks(LATENTS).frames(LATENTS.load(file, shape), Blank(4, 6, 8))
    np.testing.assert_allclose(np.moveaxis(frames, -1, 0), latents, atol=1e-5)


def test_odd_numbers_of_frames_fill_patches():
    blank = Blank(5, 4, 8)
    assert Blanks(PIXELS).measure(Clip(blank)) == (3, 1, 2)
    frames = np.random.default_rng(0).normal(size=(6, 4, 8, 3))
    drawn_frames = Blanks(PIXELS).frames(patches_of(frames, 2, 4), blank)
    np.testing.assert_array_equal(drawn_frames, frames[:5])


def test_each_lies_twice():
    """Guided drawing computes each item with its conditions and without, so a blank has two copies."""
    blanks = Blanks(PIXELS)
    blank = Blank(4, 8, 12)
    shape = blanks.measure(blank)
    assert blanks.length(shape) == blanks.real(shape) == 2 * PIXELS.length(shape) == 24
    positions = blanks.positions(shape).reshape(2, 12, 3)
    assert (positions == PIXELS.positions(shape)).all()
    assert blanks.load(blank, shape).shape == (24, 96)
    assert Blank.at(blank.address) == blank


@pytest.mark.parametrize(
    ("learned", "media", "words"),
    [
        (PIXELS, Blank(1, 8, 10), "size 8x10: both sides must be multiples of model.diffusion"),
        (PIXELS, Blank(1, 32, 36), "1152 pixels are more than data.generated.max_pixels"),
        (PIXELS, Clip(Blank(8, 4, 4)), "size 4x4 of 8 frames: the run has learned to draw at most"),
        (LATENTS, Clip(Blank(3, 4, 4)), "multiple of model.diffusion.patch_frames"),
        (PIXELS, File("a.png"), "a.png is what the assistant answers"),
    ],
)
def test_what_cannot_be_drawn_is_refused(learned, media, words):
    with pytest.raises(MediaError, match=words):
        Blanks(learned).measure(media)
