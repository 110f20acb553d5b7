"""Images of any size and mode -> patches at (nearly) native resolution.

    file --header--> pixels (h, w) --grid--> patches (grid_h, grid_w)   measured once, for the index
    file --decode--> RGB, upright, on white --resize--> [grid_h * p, grid_w * p, 3]
         --patches--> [slots, p * p * 3]

Patches are group-major: the merge x merge patches that become one language token are neighbours.

Memory: reading a header takes a few megabytes, plus the metadata before the pixels, which is at
most the whole file (MAX_FILE_BYTES). Decoding takes up to 12 bytes per source pixel, 20 for WebP,
whatever the mode and the depth: about 1 and 1.8 GB for the largest image that is accepted
(MAX_SOURCE_PIXELS).
"""

from __future__ import annotations

import math
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.config.schema import SQUARES, ConfigError, ResizeKernel, ResizeRule
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import MediaError, MediaReference, Stream, size_of
from jaxmllm.row_format import RowFormat

MAX_ASPECT_RATIO = 200
# A header may claim more pixels than memory can hold; Pillow warns above this number
MAX_SOURCE_PIXELS = 89_478_485
# Enough for a BMP of that many pixels. Bounded because metadata are read whole
MAX_FILE_BYTES = 4 * MAX_SOURCE_PIXELS + 2**20
# Scans of a JPEG: each takes a few bytes but a pass over all pixels. Encoders write 10, damage adds
# a few
MAX_SCANS = 200
# The search for the scale at which an image fills max_pixels: its final step, and the largest scale
# it tries
FILL_STEP = 1e-5
FILL_MAX_SCALE = 100.0
_BAND_PIXELS = 1 << 20  # pixels converted to RGB at once

# Images of that size are refused below, so Pillow's warning adds nothing.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# TIFF files with damaged metadata
warnings.filterwarnings("ignore", category=UserWarning, module="PIL.TiffImagePlugin")

KERNELS: dict[ResizeKernel, Image.Resampling] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
_ORIENTATION_TAG = 0x0112
_TILE_WIDTH = 322
_TILE_LENGTH = 323
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Images:
    """The vision modality. A shape is (1, grid_h, grid_w) in patches, both multiples of `merge`;
    every slot is real.

    A slot holds one patch as uint8 [patch_size, patch_size, 3] flattened (row, column, channel).
    """

    patch_size: int
    merge: int
    min_pixels: int
    max_pixels: int
    resize: ResizeRule = "area"
    kernel: ResizeKernel = "bicubic"
    # Rows also hold, with each patch, the height and width of its image's grid
    with_grids: bool = False
    # Tokens have consecutive positions, like text. No length depends on it, so `repr` leaves it out
    in_line: bool = field(default=False, repr=False)

    name = "vision"
    parts: ClassVar[tuple[str, ...]] = ("image",)
    generated = False
    section = "images"  # of the config's `data`
    cell = "merged cell (model.vision.patch_size * merge)"
    # Pillow's names. Of several frames or pages the first is read
    formats = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

    def __post_init__(self) -> None:
        key = f"data.{self.section}"
        if self.max_pixels < self.cell_size**2:
            raise ConfigError(
                f"{key}.max_pixels ({self.max_pixels}) is less than one {self.cell} of {self.cell_size} x "
                f"{self.cell_size} pixels"
            )
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"{key}.min_pixels ({self.min_pixels}) is more than {key}.max_pixels ({self.max_pixels})"
            )
        if self.resize in ("fill", *SQUARES) and self.min_pixels != self.max_pixels:
            raise ConfigError(
                f"{key}.min_pixels ({self.min_pixels}): with resize ({self.resize}) every image has about max_pixels "
                f"({self.max_pixels}); set it to the same"
            )
        if self.resize in SQUARES and (
            self.side**2 != self.max_pixels or self.side // self.patch_size % self.merge
        ):
            raise ConfigError(
                f"{key}.max_pixels ({self.max_pixels}): with resize ({self.resize}) it must be the square of a side "
                f"whose patches of {self.patch_size} pixels are a multiple of merge ({self.merge}); set merge, or the "
                "size"
            )

    @property
    def side(self) -> int:
        """Side, in pixels, of the square with max_pixels."""
        return math.isqrt(self.max_pixels)

    @property
    def cell_size(self) -> int:
        """Side, in pixels, of the square that becomes one language token."""
        return self.patch_size * self.merge

    @cached_property
    def format(self) -> RowFormat:
        slots = self.merge**2
        return RowFormat(
            features=self.patch_size**2 * 3,
            dtype=np.dtype(np.uint8),
            slots_per_token=slots,
            stride=1,
            alignment=slots,
            axes=(1, 2, 3, 4) if self.with_grids else (1, 2),
        )

    def measure(self, media: MediaReference) -> Shape:
        """Patch grid from the header. Raises `MediaError`: missing_file, broken_image_header,
        image_too_large, extreme_aspect_ratio, unsupported_image."""
        with media.open() as file, closing(opened(file, media)) as image:
            return self._shape(image, media)

    def captions(self, shape: Shape) -> tuple[str, ...]:
        return ()

    def length(self, shape: Shape) -> int:
        return math.prod(shape)

    def real(self, shape: Shape) -> int:
        return math.prod(shape)

    def tokens(self, shape: Shape) -> int:
        return math.prod(shape) // self.merge**2

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Patches of the image: uint8 [length, features]. Raises `MediaError`: those of `measure`,
        shape_changed, undecodable_image."""
        return self.patches(self.pixels(media, shape), shape)

    def pixels(self, media: MediaReference, shape: Shape) -> NDArray[np.uint8]:
        """The resized image, with the errors of `load`:
        [grid_h * patch_size, grid_w * patch_size, 3]."""
        with media.open() as file, closing(opened(file, media)) as image:
            if (shape_now := self._shape(image, media)) != shape:
                raise MediaError(
                    "shape_changed",
                    f"{media} was indexed as {shape[1:]} patches but is {shape_now[1:]} now",
                )
            if image.format in ("JPEG", "MPO"):  # MPO: a JPEG with a second picture, from cameras
                _check_scans(file, media)
            return self.decoded(image, shape, media, "undecodable_image")

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """(0, row, column) of each patch in the grid: [length, 3]. With `with_grids`, followed by
        the rows and columns of the grid: [length, 5]."""
        _, height, width = shape
        merge = self.merge
        grid = np.zeros((height, width, 3), np.int32)
        grid[..., 1] = np.arange(height)[:, None]
        grid[..., 2] = np.arange(width)
        # Group-major: the merge x merge patches of a language token become neighbours
        groups = grid.reshape(height // merge, merge, width // merge, merge, 3).swapaxes(1, 2)
        positions = groups.reshape(-1, 3)
        if not self.with_grids:
            return positions
        grids = np.tile(np.array([height, width], np.int32), (len(positions), 1))
        return np.concatenate([positions, grids], axis=1)

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        return np.ones(self.length(shape), np.bool_)

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        return None

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        """Positions of the tokens of an image: [tokens, 3]. Time is constant, or counts the tiles;
        height and width count merged cells. With `in_line`, all three axes advance by one from
        token to token."""
        if self.in_line:
            line = start + np.arange(self.tokens(shape))
            return np.repeat(line[:, None], 3, axis=1), start + len(line)
        cells = (shape[0], *(side // self.merge for side in shape[1:]))
        positions = start + np.indices(cells).reshape(3, -1).T
        return positions, start + max(cells)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patch grid of an image of `height` x `width` pixels.

        With `resize: area`, the aspect ratio is kept up to rounding each side to whole cells (at
        least one). The area is at most max_pixels, and at least min_pixels unless rounding to cells
        would then exceed max_pixels. All in integers, so that every host finds the same grid. Other
        values of `resize` have other rules.
        """
        if self.resize in SQUARES:
            return (self.side // self.patch_size,) * 2
        cell = self.cell_size
        if self.resize == "fill":
            rows, columns = _filling_cells(height, width, cell, self.max_pixels // cell**2)
            return rows * self.merge, columns * self.merge
        if self.resize == "smart":
            rows, columns = smart_cells(height, width, cell, self.min_pixels, self.max_pixels)
            return rows * self.merge, columns * self.merge
        max_cells = self.max_pixels // cell**2
        rows = max(1, round(height / cell))
        columns = max(1, round(width / cell))
        if rows * columns > max_cells:
            rows = max(1, math.isqrt(self.max_pixels * height // (width * cell**2)))
            columns = max(1, math.isqrt(self.max_pixels * width // (height * cell**2)))
        elif rows * columns * cell**2 < self.min_pixels:
            rows = 1 + math.isqrt((self.min_pixels * height - 1) // (width * cell**2))
            columns = 1 + math.isqrt((self.min_pixels * width - 1) // (height * cell**2))
        # With a side that was raised to one cell, or with tight bounds, the area may still be too
        # large: then the longer side is shortened.
        short = min(rows, columns, math.isqrt(max_cells))
        long = min(max(rows, columns), max_cells // short)
        rows, columns = (short, long) if height <= width else (long, short)
        return rows * self.merge, columns * self.merge

    def _shape(self, image: Image.Image, media: MediaReference) -> Shape:
        return self.shape_of(*self.size(image, media))

    def size(self, image: Image.Image, media: MediaReference) -> tuple[int, int]:
        """Height and width of the upright image. Raises `MediaError` for an image that is too
        large, too thin, or holds no colors."""
        width, height = image.size
        if width * height > MAX_SOURCE_PIXELS:
            raise _too_many_pixels(media)
        if image.format == "TIFF":
            _check_tiff(image, media)
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise MediaError(
                "extreme_aspect_ratio",
                f"{media} is {width} x {height} pixels: its long side is over {MAX_ASPECT_RATIO} times the short one",
            )
        return upright_size(image)

    def shape_of(self, height: int, width: int) -> Shape:
        """Shape of an image of `height` x `width` pixels."""
        return 1, *self.grid(height, width)

    def decoded(
        self, image: Image.Image, shape: Shape, media: MediaReference, reason: str, frame: int = 0
    ) -> NDArray[np.uint8]:
        """The pixels of a frame, upright and resized to the grid of `shape`. Raises `MediaError`
        with this reason."""
        try:
            if frame:
                image.seek(frame)
            return self._resized_pixels(image, shape)
        except MemoryError:  # the machine's fault, not the file's
            raise
        # Broken bodies surface as OSError, SyntaxError, struct.error, ...
        except Exception as error:
            raise MediaError(reason, f"{media} does not decode: {error}") from error

    def _resized_pixels(self, image: Image.Image, shape: Shape) -> NDArray[np.uint8]:
        """The pixels of an image's current frame, resized to the grid. Raises Pillow's errors."""
        _, height, width = (size * self.patch_size for size in shape)
        full_size = (self.side, self.side) if self.resize == "square" else (height, width)
        # Rules other than `area` are published ones, which resize from all pixels
        pixels = resized(image, *full_size, KERNELS[self.kernel], self.resize == "area")
        return pixels[:height, :width]

    def patches(self, pixels: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """Colors [grid_h * patch_size, grid_w * patch_size, 3] -> patches [length, features], in
        the order of rows."""
        _, height, width = shape
        merge = self.merge
        size = self.patch_size
        # Axes (group row, row in it, pixel row, group column, column in it, pixel column, color),
        # which become group-major as in `positions`
        tiles = pixels.reshape(height // merge, merge, size, width // merge, merge, size, 3)
        patches = np.ascontiguousarray(tiles.transpose(0, 3, 1, 4, 2, 5, 6))
        return patches.reshape(height * width, -1)


def opened(file: Stream, media: MediaReference) -> Image.Image:
    """An image whose header alone has been read. Raises `MediaError`: image_too_large,
    broken_image_header."""
    size = size_of(file)
    if size > MAX_FILE_BYTES:
        raise MediaError(
            "image_too_large",
            f"{media} has {size} bytes, and at most {MAX_FILE_BYTES} are safe to open; scale the image down",
        )
    try:
        return Image.open(cast(IO[bytes], file), formats=Images.formats)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(media) from error
    except MemoryError:
        raise
    except Exception as error:  # the exception for a broken header depends on the format
        formats = ", ".join(Images.formats)
        raise MediaError(
            "broken_image_header", f"{media} has no readable {formats} header: {error}"
        ) from error


def _too_many_pixels(media: MediaReference) -> MediaError:
    return MediaError(
        "image_too_large",
        f"{media} has more than {MAX_SOURCE_PIXELS} pixels, and these are not safe to decode; scale the image down",
    )


def _check_tiff(image: Image.Image, media: MediaReference) -> None:
    """Refuse faults that only TIFF files have: oversized tiles, and numbers without a range."""
    tags = getattr(image, "tag_v2", {})
    # A tile is decoded as a whole, so its size needs the same bound
    if tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0) > MAX_SOURCE_PIXELS:
        raise _too_many_pixels(media)
    if image.mode in ("I", "F"):
        raise MediaError(
            "unsupported_image",
            f"{media} holds numbers of 32 bits or with a sign, and nothing says which are black and white; save it "
            "with 8 or 16 bits per channel",
        )


def _check_scans(file: Stream, media: MediaReference) -> None:
    """Raise `MediaError` for a JPEG file that would take hours to decode."""
    position = file.tell()
    file.seek(0)
    scans = 0
    last_byte = b""
    while block := file.read(1 << 20):
        # FF DA marks a scan. Inside pixel data a byte of 255 is followed by a zero, so it cannot
        # occur there. The last byte of the block before is kept, so that a mark across two blocks
        # is found
        scans += (last_byte + block).count(b"\xff\xda")
        last_byte = block[-1:]
    file.seek(position)
    if scans > MAX_SCANS:
        raise MediaError(
            "undecodable_image",
            f"{media} draws its pixels in {scans} passes, and at most {MAX_SCANS} are taken; save it again",
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8, from the metadata before the pixels: `image.getexif()` may decode a
    whole PNG.

    The orientation of a TIFF file is not EXIF: Pillow turns the image upright itself, and the size
    in its header is already the upright one.
    """
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        orientation = exif.get(_ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata do not make the pixels unusable
        return 1
    return orientation if orientation in _TURNS else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of an image after the rotation that its metadata ask for."""
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _filling_cells(height: int, width: int, cell: int, max_cells: int) -> tuple[int, int]:
    """Rows and columns, in cells, of the largest scaled image with at most `max_cells` cells; sides
    are rounded up.

    Uses the floating-point numbers and search steps of the published rule, because these decide
    where a side is near a whole number of cells.
    """

    def cells(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(size * scale / cell)) for size in (height, width))
        return rows, columns

    # `low` always fits: it begins at a scale that leaves a single cell.
    low = FILL_STEP / 10
    high = FILL_MAX_SCALE
    while high - low >= FILL_STEP:
        scale = (low + high) / 2
        if math.prod(cells(scale)) <= max_cells:
            low = scale
        else:
            high = scale
    return cells(low)


def smart_cells(
    height: int,
    width: int,
    cell: int,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    patched_frames: int = 1,
) -> tuple[int, int]:
    """Rows and columns, in cells: each side rounded to whole cells, or scaled so that the pixels
    are within bounds.

    Uses the floating-point numbers of the published rule, because these decide where a side is near
    a whole number of cells.

    Args:
      frames: number of frames whose pixels together must be within the bounds.
      patched_frames: `frames`, rounded to whole patches in time.
    """
    rows, columns = (round(size / cell) for size in (height, width))
    if patched_frames * rows * columns * cell**2 > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(size / scale / cell)) for size in (height, width))
    elif patched_frames * rows * columns * cell**2 < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(size * scale / cell) for size in (height, width))
    return rows, columns


def resized(
    image: Image.Image, height: int, width: int, kernel: Image.Resampling, reduced: bool
) -> NDArray[np.uint8]:
    """Decode an image, resize it and turn it upright: [height, width, 3]. With `reduced`, fewer
    pixels may be decoded."""
    orientation = _orientation(image)
    size = (height, width) if orientation >= 5 else (width, height)  # before turning
    if reduced:
        # JPEG can decode at 1/2, 1/4 or 1/8 of its size; never below what is needed
        image.draft(None, size)
    image.load()
    rgb = _to_rgb(image).resize(size, kernel)
    # Turned after resizing: a turned copy of the source would take as much memory as the source.
    return np.asarray(rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb)


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode -> RGB; transparent pixels become white. Converted in bands, because
    each intermediate image is a full copy."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        rgb.paste(_band_to_rgb(image.crop(box)), box)
    return rgb


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow would clip 16 bits, not scale them
        values = np.asarray(image)
        eight_bit = (values.clip(0, 65535) // 257).astype(np.uint8)
        if "transparency" in image.info:  # the value that is transparent
            eight_bit[values == image.info["transparency"]] = 255
        return Image.fromarray(eight_bit).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
