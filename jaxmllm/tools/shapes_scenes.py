"""Pictures and clips of one coloured shape: what they show, the pixels, and the words for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Floats
from jaxmllm.tools.sample_media import COLOURS

SHAPES: Final = ("circle", "square", "triangle")
PLACES: Final = ("top-left", "top-right", "bottom-left", "bottom-right")  # quarters of a picture
MOTIONS: Final = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # of clips
SIDES: Final = (24, 64)  # fewest and most pixels of a picture's side
CLIP_SIDES: Final = (24, 40)
FRAMES: Final = (4, 12)  # fewest and most of a clip
STEP: Final = 8  # pixels; sides are multiples of it
SUBPIXELS: Final = 4  # samples along each side of a pixel, whose value is their mean
# Share of a side between the middle of a shape, or both ends of its way, and the nearer edges
MIDDLE = 0.3
DRIFT = 0.02  # share of a side: the middle is off by up to this
SMALLEST, LARGEST = 0.19, 0.25  # half the width of a shape, as a share of the shorter side
# Area of a shape over that of a square whose side is half its width. All shapes have the same
# widths, so their corners tell them apart.
AREAS: Final = {"circle": np.pi, "square": 4.0, "triangle": np.sqrt(3)}

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
CLIP_CAPTIONS: Final = (
    "a {colour} {shape} moves {motion}",
    "{shape}, {colour}, going {motion}",
    "a clip of a {colour} {shape} which goes {motion}",
    "{motion} moves one {colour} {shape}",
)
EDITS: Final = ("the same in {colour}", "now make it {colour}", "draw this again but {colour}")
QUESTIONS: Final = {
    "colour": ("what colour is it", "which colour has the shape"),
    "shape": ("what shape is it", "which shape is in the picture"),
    "place": ("where is the shape", "at which place is it"),
}
PLACE_WORDS: Final = {"top": ("top", "upper"), "bottom": ("bottom", "lower")}


@dataclass(frozen=True)
class Scene:
    """What a picture shows, or a clip, whose scene has a motion instead of a place."""

    colour: str  # of `COLOURS`
    shape: str  # of `SHAPES`
    place: str | None = None  # of `PLACES`
    motion: str | None = None  # of `MOTIONS`

    @property
    def unseen(self) -> bool:
        """Whether training has no picture or clip of the scene: one scene in six, two of every
        colour."""
        colour = list(COLOURS).index(self.colour)
        where = PLACES.index(self.place) if self.place else list(MOTIONS).index(self.motion or "")
        kind = SHAPES.index(self.shape), where
        return kind in (
            (colour % len(SHAPES), colour % len(PLACES)),
            ((colour + 1) % len(SHAPES), (colour + 2) % len(PLACES)),
        )


def _clip_scenes() -> Iterator[Scene]:
    """Yield scenes of clips in an order in which every 24 pair each colour with each motion."""
    for later, (n, colour), (m, motion) in itertools.product(
        range(len(SHAPES)), enumerate(COLOURS), enumerate(MOTIONS)
    ):
        yield Scene(colour, SHAPES[(later + n + m) % len(SHAPES)], motion=motion)


SCENES: Final = tuple(itertools.starmap(Scene, itertools.product(COLOURS, SHAPES, PLACES)))
CLIP_SCENES: Final = tuple(_clip_scenes())


def caption(random: np.random.Generator, scene: Scene) -> str:
    """One of many ways to say what a picture or clip shows."""
    forms = CLIP_CAPTIONS if scene.place is None else CAPTIONS
    form = forms[random.integers(len(forms))]
    shapes = SHAPE_WORDS[scene.shape]
    shape = shapes[random.integers(len(shapes))]
    place = _place_words(random, scene.place) if scene.place else None
    return form.format(colour=scene.colour, shape=shape, place=place, motion=scene.motion)


def _place_words(random: np.random.Generator, place: str) -> str:
    height, width = place.split("-")
    words = PLACE_WORDS[height]
    return f"{words[random.integers(len(words))]} {width}"


def edit(random: np.random.Generator, colour: str) -> str:
    """One of several ways to ask for the shown picture in another colour."""
    return EDITS[random.integers(len(EDITS))].format(colour=colour)


def question(random: np.random.Generator, scene: Scene, aspect: str) -> tuple[str, str]:
    """A question about the `aspect` (of `QUESTIONS`) of a shown picture, and its answer."""
    forms = QUESTIONS[aspect]
    return forms[random.integers(len(forms))], str(getattr(scene, aspect)).replace("-", " ")


def size(random: np.random.Generator, sides: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a picture, in pixels."""
    fewest, most = (side // STEP for side in sides)
    height, width = (STEP * random.integers(fewest, most + 1, 2)).tolist()
    return height, width


@dataclass(frozen=True)
class Figure:
    """A shape with a colour near one of `COLOURS` on a light ground, before it is painted."""

    shape: str
    height: int  # of the picture, in pixels
    width: int
    middles: tuple[tuple[float, float], ...]  # (y, x) of the shape, in pixels, by frame
    radius: float
    colour: tuple[float, ...]
    ground: float

    @classmethod
    def of(
        cls, random: np.random.Generator, scene: Scene, height: int, width: int, frames: int = 1
    ) -> Figure:
        """A figure of a scene with random size and shades, near its place or along its way."""
        drift = random.uniform(-DRIFT, DRIFT, 2)
        if scene.place is None:
            # Offsets from the middle of the picture, from one end of the way to the other.
            way = np.linspace(MIDDLE - 0.5, 0.5 - MIDDLE, frames)
            middles = 0.5 + np.outer(way, MOTIONS[scene.motion or ""])
        else:
            row, column = divmod(PLACES.index(scene.place), 2)
            # 0 becomes `MIDDLE`, and 1 the same distance from the far edge.
            middles = np.array([(abs(row - MIDDLE), abs(column - MIDDLE))])
        middles = (middles + drift) * (height, width)
        radius = random.uniform(SMALLEST, LARGEST) * min(height, width)
        colour = _varied_colour(random, scene.colour)
        ground = random.uniform(225, 250)
        return cls(
            scene.shape, height, width, (*map(tuple, middles.tolist()),), radius, colour, ground
        )

    def coloured(self, random: np.random.Generator, colour: str) -> Figure:
        """The same figure in another colour."""
        return replace(self, colour=_varied_colour(random, colour))

    def frames(self) -> NDArray[np.uint8]:
        """Pixels [frames, height, width, 3]."""
        colour = np.array(self.colour)
        cover = np.stack(
            [
                coverage(self.shape, self.height, self.width, y, x, self.radius)
                for y, x in self.middles
            ]
        )[..., None]
        painted = self.ground + cover * (colour - self.ground)
        return np.rint(painted).clip(0, 255).astype(np.uint8)


def _varied_colour(random: np.random.Generator, colour: str) -> tuple[float, ...]:
    return tuple((np.array(COLOURS[colour]) + random.uniform(-12, 12, 3)).tolist())


def coverage(shape: str, height: int, width: int, y: float, x: float, radius: float) -> Floats:
    """How much of each pixel a shape covers, from 0 to 1: [height, width].

    Args:
      y, x: the middle of its bounding box, in pixels from the upper left corner of the picture.
      radius: half the width of the shape.
    """
    down = (np.arange(SUBPIXELS * height) + 0.5)[:, None] / SUBPIXELS - y
    right = (np.arange(SUBPIXELS * width) + 0.5)[None, :] / SUBPIXELS - x
    if shape == "circle":
        inside = down**2 + right**2 < radius**2
    elif shape == "square":
        inside = np.maximum(abs(down), abs(right)) < radius
    else:
        half = np.sqrt(3) / 2 * radius  # half the height of the triangle
        inside = (down < half) & (np.sqrt(3) * abs(right) < down + half)
    subpixels = inside.reshape(height, SUBPIXELS, width, SUBPIXELS)
    covered: Floats = subpixels.mean(axis=(1, 3))
    return covered
