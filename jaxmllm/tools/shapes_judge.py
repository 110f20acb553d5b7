"""What pictures of coloured shapes show, told by rule: no model is asked.

    ground      the median of the picture's edge
    colour      the one nearest to the mean of the pixels that differ from the ground most
    place       the quarter that the centroid of what differs lies in
    shape       the one whose outline, of the same area and near the same place, covers the same pixels best

A picture that differs from its ground nowhere, or whose shape fits no outline, has none of what is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.arrays import Floats
from jaxmllm.tools.sample_media import COLOURS
from jaxmllm.tools.shapes_scenes import PLACES, SCENES, SHAPES, Scene, coverage

LEAST_CONTRAST = 40.0  # levels between ground and shape, over the three channels
MOST_COLOUR_ERROR = 90.0  # levels from a colour, likewise
CORE = 0.7  # of the largest difference: pixels that a shape covers whole
LEAST_OVERLAP = 0.6  # of shape and outline: intersection over union
SHIFTS: Final = (-0.75, 0.0, 0.75)  # pixels that an outline is tried beside the shape's middle
SCALES: Final = (0.92, 1.0, 1.08)  # of its radius
MARGIN = 3  # pixels
ASPECTS = ("colour", "shape", "place")


def look(pixels: NDArray[np.uint8]) -> dict[str, str | None]:
    """Colour, shape and place that a picture [height, width, 3] shows; None where it shows none."""
    nothing = dict.fromkeys(ASPECTS)
    image = pixels.astype(float)
    edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ground = np.median(edge, axis=0)
    difference = np.linalg.norm(image - ground, axis=2)
    # The largest of few pixels may be an outlier
    most = float(np.sort(difference.ravel())[-3:].mean())
    if most < LEAST_CONTRAST:
        return nothing
    core = image[difference > CORE * most].mean(axis=0)
    if np.linalg.norm(core - ground) < LEAST_CONTRAST:  # colours on all sides of the ground
        return nothing
    error = {name: float(np.linalg.norm(core - value)) for name, value in COLOURS.items()}
    colour = min(error, key=lambda name: error[name])
    cover = _cover(image, ground, core)
    y, x = (
        float((cover.sum(axis=1 - axis) @ (np.arange(cover.shape[axis]) + 0.5)) / cover.sum())
        for axis in (0, 1)
    )
    height, width = cover.shape
    return {
        "colour": colour if error[colour] < MOST_COLOUR_ERROR else None,
        "shape": _shape(cover),
        "place": PLACES[2 * (y > height / 2) + (x > width / 2)],
    }


def _cover(image: Floats, ground: Floats, core: Floats) -> Floats:
    """How far each pixel is from the ground to the colour, from 0 to 1; faint ones are ground."""
    way = core - ground
    cover: Floats = ((image - ground) @ way / (way @ way)).clip(0, 1)
    return np.where(cover < 0.15, 0, cover)


def _shape(cover: Floats) -> str | None:
    """The shape whose outline overlaps best with what is covered."""
    radius = np.sqrt(cover.sum() / np.pi)
    rows, columns = (np.flatnonzero((cover > 0.5).any(axis=axis)) for axis in (1, 0))
    y, x = (rows[0] + rows[-1] + 1) / 2, (columns[0] + columns[-1] + 1) / 2
    # No outline that is tried reaches further beyond the pixels that are covered at all
    top, left = (max(0, int(np.flatnonzero(cover.any(axis=axis))[0]) - MARGIN) for axis in (1, 0))
    bottom, right = (int(np.flatnonzero(cover.any(axis=axis))[-1]) + MARGIN for axis in (1, 0))
    cover = cover[top : bottom + 1, left : right + 1]
    height, width = cover.shape
    y, x = y - top, x - left
    overlaps = {}
    for shape in SHAPES:
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


def judge(folder: Path) -> dict[str, float | None]:
    """Shares of a folder's PNG files that show what their names say (`file_name`).

    Returns:
      `files`, how many; `colour`, `shape`, `place` and `all` of them: shares of all files; `unseen_all`: of those
      that training has no picture of, None where the folder has none.

    Raises:
      ValueError: there is no file, or one has another name.
    """
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise ValueError(f"{folder} has no PNG files")
    right: dict[str, list[bool]] = {aspect: [] for aspect in (*ASPECTS, "all", "unseen_all")}
    for path in paths:
        scene = scene_of(path)
        with Image.open(path) as image:
            shown = look(np.asarray(image.convert("RGB")))
        correct = {aspect: shown[aspect] == getattr(scene, aspect) for aspect in ASPECTS}
        for aspect, value in correct.items():
            right[aspect].append(value)
        right["all"].append(all(correct.values()))
        if scene.unseen:
            right["unseen_all"].append(all(correct.values()))
    shares = {name: float(np.mean(values)) if values else None for name, values in right.items()}
    return {"files": len(paths)} | shares


def file_name(scene: Scene, number: int) -> str:
    """The name, without ending, of a picture of a scene."""
    return f"{scene.colour}-{scene.shape}-{scene.place}-{number}"


def scene_of(path: Path) -> Scene:
    """The scene that a file's name says. Raises `ValueError` for other names."""
    for scene in SCENES:
        if path.stem.startswith(file_name(scene, 0)[:-1]):
            return scene
    raise ValueError(f"{path}: its name is none of a scene, as red-circle-top-left-0 is")


def table(scores: Mapping[str, Any]) -> list[str]:
    """Names and shares as they are printed."""
    return [
        f"{name} {value if isinstance(value, int) else f'{value:.3f}'}"
        for name, value in scores.items()
        if value is not None
    ]
