"""Tell by rules, without a model, what pictures and clips of coloured shapes show.

    ground      the median of the picture's edge
    colour      the one nearest to the mean of the pixels that differ from the ground most
    place       the quarter that contains the centroid of what differs
    motion      the direction of that centroid from the first frame of a clip to its last
    shape       the one whose outline, of the same area and near the same place, covers the same
                pixels best

A picture that nowhere differs from its ground has none of these, and one whose shape fits no
outline has no shape. Colour and shape of a clip are those of most frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from jaxmllm.arrays import Floats
from jaxmllm.tools.sample_media import COLOURS
from jaxmllm.tools.shapes_scenes import (
    AREAS,
    CLIP_SCENES,
    MOTIONS,
    PLACES,
    SCENES,
    SHAPES,
    Scene,
    coverage,
)

LEAST_CONTRAST = 40.0  # distance of ground and shape in levels, over the three channels
MOST_COLOUR_ERROR = 90.0  # distance from one of `COLOURS`, likewise
CORE = 0.7  # share of the largest difference above which a shape covers a whole pixel
LEAST_OVERLAP = 0.6  # of shape and outline: intersection over union
SHIFTS: Final = (-0.75, 0.0, 0.75)  # pixels by which outlines are moved off the middle
SCALES: Final = (0.92, 1.0, 1.08)  # factors of the radius that are tried
MARGIN = 3  # pixels that outlines are compared in around the shape
LEAST_WAY = 0.1  # share of a side that a moving shape has to cross
ASPECTS = ("colour", "shape", "place")


def look(pixels: NDArray[np.uint8]) -> dict[str, str | None]:
    """Colour, shape and place that a picture [height, width, 3] shows; None where it shows none."""
    figure = _find_figure(pixels)
    if figure is None:
        return dict.fromkeys(ASPECTS)
    colour, cover = figure
    y, x = _centroid(cover)
    return {
        "colour": colour,
        "shape": _best_shape(cover),
        "place": PLACES[2 * (y > 0.5) + (x > 0.5)],
    }


def look_at_clip(frames: Sequence[NDArray[np.uint8]]) -> dict[str, str | None]:
    """Colour, shape and motion that the frames [height, width, 3] of a clip show; None where they
    show none."""
    figures = [_find_figure(frame) for frame in frames]
    # Frames vote, and those that show nothing vote for None.
    colours = Counter(figure[0] if figure else None for figure in figures)
    shapes = Counter(_best_shape(figure[1]) if figure else None for figure in figures)
    motion = None
    start = figures[0]
    end = figures[-1]
    if start is not None and end is not None:
        displacement = np.subtract(_centroid(end[1]), _centroid(start[1]))
        # How far the figure went in each direction; negative if it went the opposite way.
        distances = {name: float(displacement @ np.array(step)) for name, step in MOTIONS.items()}
        best = max(distances, key=lambda name: distances[name])
        motion = best if distances[best] >= LEAST_WAY else None
    return {
        "colour": colours.most_common(1)[0][0],
        "shape": shapes.most_common(1)[0][0],
        "motion": motion,
    }


def _find_figure(pixels: NDArray[np.uint8]) -> tuple[str | None, Floats] | None:
    """The colour of what differs from the ground, and the share of each pixel that it covers,
    [height, width]; None if nothing differs."""
    image = pixels.astype(float)
    edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ground = np.median(edge, axis=0)
    difference = np.linalg.norm(image - ground, axis=2)
    # The mean of three pixels, because the largest alone may be an outlier
    contrast = float(np.sort(difference.ravel())[-3:].mean())
    if contrast < LEAST_CONTRAST:
        return None
    core = image[difference > CORE * contrast].mean(axis=0)
    if np.linalg.norm(core - ground) < LEAST_CONTRAST:  # opposite colours cancel out
        return None
    error = {name: float(np.linalg.norm(core - value)) for name, value in COLOURS.items()}
    colour = min(error, key=lambda name: error[name])
    return colour if error[colour] < MOST_COLOUR_ERROR else None, _pixel_cover(image, ground, core)


def _centroid(cover: Floats) -> tuple[float, float]:
    """Centroid (y, x) of what is covered, in shares of the sides."""
    y, x = (
        float((cover.sum(axis=1 - axis) @ (np.arange(size) + 0.5)) / cover.sum() / size)
        for axis, size in enumerate(cover.shape)
    )
    return y, x


def _pixel_cover(image: Floats, ground: Floats, core: Floats) -> Floats:
    """How far each pixel is on the way from `ground` to `core`, from 0 to 1; faint pixels are 0."""
    way = core - ground
    cover: Floats = ((image - ground) @ way / (way @ way)).clip(0, 1)
    return np.where(cover < 0.15, 0, cover)


def _best_shape(cover: Floats) -> str | None:
    """The shape whose outline overlaps best with what is covered; None if none overlaps enough."""
    area = cover.sum()
    rows, columns = (np.flatnonzero((cover > 0.5).any(axis=axis)) for axis in (1, 0))
    y = (rows[0] + rows[-1] + 1) / 2
    x = (columns[0] + columns[-1] + 1) / 2
    # Crop: no outline that is tried reaches further than MARGIN beyond the covered pixels
    top, left = (max(0, int(np.flatnonzero(cover.any(axis=axis))[0]) - MARGIN) for axis in (1, 0))
    bottom, right = (int(np.flatnonzero(cover.any(axis=axis))[-1]) + MARGIN for axis in (1, 0))
    cover = cover[top : bottom + 1, left : right + 1]
    height, width = cover.shape
    y, x = y - top, x - left
    overlaps = {}
    for shape in SHAPES:
        radius = np.sqrt(area / AREAS[shape])
        outlines = (
            coverage(shape, height, width, y + lower, x + later, scale * radius)
            for lower in SHIFTS
            for later in SHIFTS
            for scale in SCALES
        )
        overlaps[shape] = max(_overlap(cover, outline) for outline in outlines)
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= LEAST_OVERLAP else None


def _overlap(cover: Floats, outline: Floats) -> float:
    return float(np.minimum(cover, outline).sum() / np.maximum(cover, outline).sum())


# ---------------------------------------------------------------------------- folders


def judge(folder: Path) -> dict[str, dict[str, float | None] | None]:
    """Shares of a folder's PNG files that show what their names say (`file_name`).

    Returns:
      For `pictures` and for `clips`, each None if the folder has no such file: `files`, their
      number; `colour`, `shape`, `place` (None for clips), `motion` (None for pictures) and `all` of
      them: the shares of files that show these;
      `unseen_all`: `all` among the scenes that training lacks, None if the folder has none.

    Raises:
      ValueError: there is no file, or one has another name, is damaged, or is no clip though its
        name says so.
    """
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise ValueError(f"{folder} has no PNG files")
    right: dict[bool, list[tuple[Scene, dict[str, bool]]]] = {False: [], True: []}
    for path in paths:
        scene = scene_of(path)
        seen = _seen_aspects(path, scene)
        aspects = {name: value == getattr(scene, name) for name, value in seen.items()}
        right[scene.motion is not None].append((scene, aspects))
    return {"pictures": _scores(right[False]), "clips": _scores(right[True])}


def _seen_aspects(path: Path, scene: Scene) -> dict[str, str | None]:
    """What the file of a scene shows."""
    try:
        with Image.open(path) as image:
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise ValueError(f"{path} is damaged ({error}); draw it again, or remove it") from error
    if scene.motion is None:
        return look(frames[0])
    if len(frames) == 1:
        raise ValueError(f"{path}: its name is that of a clip, but it has one frame")
    return look_at_clip(frames)


def _scores(files: Sequence[tuple[Scene, Mapping[str, bool]]]) -> dict[str, float | None] | None:
    """Shares of files whose aspects are right, as `judge` returns them; None without files."""
    if not files:
        return None
    # All files are pictures or all are clips, so the first has the aspects of all.
    _, judged = files[0]
    shares: dict[str, float | None] = {}
    for name in ("colour", "shape", "place", "motion"):
        if name in judged:
            shares[name] = float(np.mean([aspects[name] for _, aspects in files]))
        else:
            shares[name] = None
    verdicts = [(scene.unseen, all(aspects.values())) for scene, aspects in files]
    unseen = [value for unseen, value in verdicts if unseen]
    shares["all"] = float(np.mean([value for _, value in verdicts]))
    shares["unseen_all"] = float(np.mean(unseen)) if unseen else None
    return {"files": len(files)} | shares


def file_name(scene: Scene, number: int) -> str:
    """The name, without ending, of a picture or clip of a scene."""
    where = scene.place or f"moves-{scene.motion}"
    return f"{scene.colour}-{scene.shape}-{where}-{number}"


def scene_of(path: Path) -> Scene:
    """The scene that a file's name says. Raises `ValueError` if it says none."""
    for scene in (*SCENES, *CLIP_SCENES):
        # The file name of number 0, without the number
        if path.stem.startswith(file_name(scene, 0)[:-1]):
            return scene
    raise ValueError(f"{path}: its name is none of a scene, as red-circle-top-left-0 is")


def table(scores: Mapping[str, Any]) -> list[str]:
    """Names and shares in words, as they are printed; None is left out."""
    lines = []
    for name, value in scores.items():
        if value is not None:
            in_words = value if isinstance(value, int) else f"{value:.3f}"
            lines.append(f"{name} {in_words}")
    return lines
