"""Pictures of one coloured shape: what they show, the pixels, and the words for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Floats
from jaxmllm.tools.sample_media import COLOURS

SHAPES: Final = ("circle", "square", "triangle")
PLACES: Final = ("top-left", "top-right", "bottom-left", "bottom-right")  # quarters of the picture
SIDES: Final = (24, 64)  # fewest and most pixels of a side
STEP: Final = 8  # sides are multiples of it
SUBPIXELS: Final = 4  # along each side of a pixel, which is the mean of them
MIDDLE = 0.3  # of a side: how far from the nearer edges a shape stands ...
DRIFT = 0.02  # ... within this
SMALLEST, LARGEST = 0.16, 0.22  # of the shorter side: the radius of a shape

SHAPE_WORDS: Final = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
}
CAPTIONS: Final = (
    "a {colour} {shape} at the {place}",
    "{shape}, {colour}, {place}",
    "draw a {colour} {shape} in the {place} corner",
    "at the {place} there is a {shape} which is {colour}",
    "please paint one {colour} {shape} {place}",
    "the {place} of the picture has a {colour} {shape}",
)
PLACE_WORDS: Final = {"top": ("top", "upper"), "bottom": ("bottom", "lower")}


@dataclass(frozen=True, order=True)
class Scene:
    """What a picture shows."""

    colour: str  # of `COLOURS`
    shape: str  # of `SHAPES`
    place: str  # of `PLACES`

    @property
    def unseen(self) -> bool:
        """Whether training has no picture of it: one in six, of every colour two."""
        colour = list(COLOURS).index(self.colour)
        kind = SHAPES.index(self.shape), PLACES.index(self.place)
        return kind in (
            (colour % len(SHAPES), colour % len(PLACES)),
            ((colour + 1) % len(SHAPES), (colour + 2) % len(PLACES)),
        )


SCENES: Final = tuple(itertools.starmap(Scene, itertools.product(COLOURS, SHAPES, PLACES)))


def caption(random: np.random.Generator, scene: Scene) -> str:
    """One of many ways to say what a picture shows."""
    height, width = scene.place.split("-")
    words = PLACE_WORDS[height]
    form = CAPTIONS[random.integers(len(CAPTIONS))]
    shapes = SHAPE_WORDS[scene.shape]
    return form.format(
        colour=scene.colour,
        shape=shapes[random.integers(len(shapes))],
        place=f"{words[random.integers(len(words))]} {width}",
    )


def size(random: np.random.Generator) -> tuple[int, int]:
    """Height and width of a picture, in pixels."""
    fewest, most = (side // STEP for side in SIDES)
    height, width = (STEP * random.integers(fewest, most + 1, 2)).tolist()
    return height, width


def paint(random: np.random.Generator, scene: Scene, height: int, width: int) -> NDArray[np.uint8]:
    """A shape of about a colour in a quarter of a light ground: [height, width, 3]."""
    row, column = divmod(PLACES.index(scene.place), 2)
    drift = random.uniform(-DRIFT, DRIFT, 2)
    y = (abs(row - MIDDLE) + drift[0]) * height
    x = (abs(column - MIDDLE) + drift[1]) * width
    radius = random.uniform(SMALLEST, LARGEST) * min(height, width)
    cover = coverage(scene.shape, height, width, y, x, radius)[..., None]
    colour = np.array(COLOURS[scene.colour]) + random.uniform(-12, 12, 3)
    ground = random.uniform(225, 250)
    return np.rint(ground + cover * (colour - ground)).clip(0, 255).astype(np.uint8)


def coverage(shape: str, height: int, width: int, y: float, x: float, radius: float) -> Floats:
    """How much of each pixel a shape covers, from 0 to 1: [height, width].

    Args:
      y, x: the middle of its bounding box, in pixels from the upper left corner of the picture.
      radius: of a circle; the others have the same area.
    """
    down = (np.arange(SUBPIXELS * height) + 0.5)[:, None] / SUBPIXELS - y
    right = (np.arange(SUBPIXELS * width) + 0.5)[None, :] / SUBPIXELS - x
    if shape == "circle":
        inside = down**2 + right**2 < radius**2
    elif shape == "square":
        inside = np.maximum(abs(down), abs(right)) < np.sqrt(np.pi) / 2 * radius
    else:
        side = np.sqrt(4 * np.pi / np.sqrt(3)) * radius
        half = np.sqrt(3) / 4 * side  # of its height
        inside = (down < half) & (np.sqrt(3) * abs(right) < down + half)
    parts = inside.reshape(height, SUBPIXELS, width, SUBPIXELS)
    covered: Floats = parts.mean(axis=(1, 3))
    return covered
