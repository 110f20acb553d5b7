"""Images as squares of one size, each with a class token: one square for the whole image, or
several tiles of it.

pixels (h, w) --canvas--> rows x columns of tiles; if several, the whole image is one more tile
--> patches of all tiles, then the class tokens of all tiles, then slots that fill up the last group
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.arrays import round_up
from jaxmllm.data.media.images import KERNELS, Images, resized, upright_size
from jaxmllm.data.media.modality import Shape


@dataclass(frozen=True)
class ClassedTiles(Images):
    """The vision modality of towers with a class token. A shape is (tiles, grid_h, grid_w); slots
    see only their own tile and its class token.

    The slot of a class token holds no pixels, and its position is the row after the last one. Class
    tokens become no language tokens: their slots come after those of all patches.
    """

    tiles: tuple[int, int] = (1, 1)  # least and most tiles, not counting the whole image

    @cached_property
    def canvases(self) -> list[tuple[int, int]]:
        """All allowed (rows, columns) of tiles, fewest tiles first."""
        min_tiles, max_tiles = self.tiles
        sides = range(1, max_tiles + 1)
        grids = [(rows, columns) for columns in sides for rows in sides]
        allowed = [grid for grid in grids if min_tiles <= math.prod(grid) <= max_tiles]
        return sorted(allowed, key=math.prod)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tiles for an image: the canvas of the nearest aspect ratio. Of several
        equally near ones, the one with most tiles that has less than twice the pixels of the image,
        else the one with fewest tiles. In floating-point numbers, as published."""
        chosen = (1, 1)
        nearest = float("inf")
        for rows, columns in self.canvases:
            difference = abs(width / height - columns / rows)
            small = height * width > 0.5 * self.side**2 * rows * columns
            if difference < nearest or (difference == nearest and small):
                chosen = (rows, columns)
                nearest = difference
        return chosen

    def shape_of(self, height: int, width: int) -> Shape:
        rows, columns = self.canvas(height, width)
        tile_count = rows * columns
        return tile_count + (tile_count > 1), *self.grid(height, width)

    def length(self, shape: Shape) -> int:
        return super().length(shape) + round_up(shape[0], self.merge**2)

    def real(self, shape: Shape) -> int:
        return super().real(shape) + shape[0]

    def patches(self, pixels: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """Tiles one below the other [tiles * grid_h * patch_size, grid_w * patch_size, 3] ->
        patches [length, features]."""
        tile_count, height, width = shape
        patches = super().patches(pixels, (1, tile_count * height, width))
        return np.pad(patches, ((0, self.length(shape) - len(patches)), (0, 0)))

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """(0, row, column) of each patch in its tile, and (0, grid_h, 0) for class tokens:
        [length, 3]."""
        tile_count, height, _ = shape
        of_tile = super().positions((1, *shape[1:]))
        positions = np.zeros((self.length(shape), 3), np.int32)
        ends = tile_count * len(of_tile)
        positions[:ends] = np.tile(of_tile, (tile_count, 1))
        positions[ends : ends + tile_count, 1] = height
        return positions

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        return np.arange(self.length(shape)) < self.real(shape)

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        tile_count, height, width = shape
        tiles = np.arange(tile_count, dtype=np.int32)
        numbers = np.zeros(self.length(shape), np.int32)
        numbers[: self.real(shape)] = np.append(np.repeat(tiles, height * width), tiles)
        return numbers

    def _resized_pixels(self, image: Image.Image, shape: Shape) -> NDArray[np.uint8]:
        rows, columns = self.canvas(*upright_size(image))
        side = self.side
        kernel = KERNELS[self.kernel]
        canvas = resized(image, rows * side, columns * side, kernel, reduced=False)
        tiles = (
            canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        )
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, resized(image, side, side, kernel, reduced=False)[None]])
        _, height, width = (size * self.patch_size for size in shape)
        drawn: NDArray[Any] = tiles[:, :height, :width].reshape(-1, width, 3)
        return drawn
