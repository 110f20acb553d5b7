"""Images from files: grids of patches, pixels, formats, orientation, and what is refused.

References are plain loops over pixels, and Pillow."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jaxmllm.config.schema import ImageDataConfig
from jaxmllm.data.media.images import MAX_ASPECT_RATIO, MAX_SOURCE_PIXELS, Images
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import File, FileRange, MediaError

IMAGES = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 30)


def reason(path: Path, shape: Shape | None = None, images: Images = IMAGES) -> str:
    """The reason for which an image file is refused, when measured or when loaded."""
    with pytest.raises(MediaError) as caught:
        if shape is None:
            images.measure(File(path))
        else:
            images.load(File(path), shape)
    assert str(path) in str(caught.value)
    return caught.value.reason


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def flat(image: Image.Image, path: Path) -> list[float]:
    """The mean colour of an image after it is saved and loaded."""
    image.save(path)
    return IMAGES.load(File(path), IMAGES.measure(File(path))).reshape(-1, 3).mean(0).tolist()


@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    least=st.integers(1, 40),
    spare=st.integers(0, 60),
)
def test_grid_bounds(height: int, width: int, least: int, spare: int) -> None:
    max_pixels = (least + spare) * 64
    images = Images(patch_size=4, merge=2, min_pixels=least * 64, max_pixels=max_pixels)
    rows, columns = images.grid(height, width)
    assert rows % 2 == columns % 2 == 0 and rows >= 2 and columns >= 2
    assert rows * columns * 16 <= max_pixels
    # Where the bounds leave room between them and the image is not thin, the lower bound holds,
    # too.
    if spare >= least + 2 * least**0.5 + 2 and max(height, width) <= 4 * min(height, width):
        assert rows * columns * 16 >= least * 64
    if height != width:
        assert images.grid(width, height) == (columns, rows)


@given(height=st.integers(8, 2000), width=st.integers(8, 2000))
def test_grid_is_native_resolution_or_the_same_shape_smaller(height: int, width: int) -> None:
    rows, columns = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 10_000).grid(
        height, width
    )
    area = (640_000 / (height * width)) ** 0.5
    if rows > 2 and columns > 2:  # a side shorter than a cell may not keep its ratio
        fits = [
            abs(rows * 4 - height * scale) <= 8 and abs(columns * 4 - width * scale) <= 8
            for scale in (1, area)
        ]
        assert fits[0] or (fits[1] and area < 1)
        assert fits[0] or height * width > 640_000 * 0.95


@given(height=st.integers(1, 900), width=st.integers(1, 900), cells=st.integers(1, 60))
def test_a_filling_grid_is_the_largest_that_fits(height: int, width: int, cells: int) -> None:
    rows, columns = Images(4, 2, cells * 64, cells * 64, resize="fill").grid(height, width)
    assert rows % 2 == columns % 2 == 0 and rows * columns <= 4 * cells
    grid = rows // 2, columns // 2

    def at(scale: float) -> tuple[int, int]:
        return -int(-height * scale // 8), -int(-width * scale // 8)

    # Each scale at which a side reaches another cell is tried. The grid's own scale lies just below
    # one that is too large.
    scales = np.unique([8 * k / side for side in (height, width) for k in range(1, cells + 2)])
    fitting = [scale for scale in scales if np.prod(at(scale * (1 - 1e-9))) <= cells]
    if max(fitting) < 90 and grid != at(max(fitting) * (1 - 1e-9)):
        assert grid == at(max(fitting) - 2e-5), "within a step of the search"


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        # Both sides lie half-way between cells, and are rounded to even numbers of them.
        ((70, 126), (4, 8)),
        ((10, 900), (2, 28)),  # less than half a cell high, so scaled until min_pixels are reached
        ((1400, 1400), (20, 20)),  # scaled down to max_pixels
        ((20, 3900), (2, 278)),  # still one cell high, and so more than max_pixels
    ],
)
def test_a_smart_grid(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Grids by hand. tests/families/test_qwen2_5_vl.py compares many sizes with the reference."""
    assert Images(14, 2, 2 * 28**2, 100 * 28**2, resize="smart").grid(*size) == grid


def test_a_square_grid_is_of_one_size(tmp_path: Path) -> None:
    """The grid is the same whatever the image. What is left of whole patches is cut off below and
    right."""
    square = Images(4, 2, 35**2, 35**2, resize="square", kernel="bilinear", with_grids=True)
    image = picture(50, 21)
    image.save(tmp_path / "a.png")
    shape = square.measure(File(tmp_path / "a.png"))
    assert shape == (1, 8, 8) and square.format.axes == (1, 2, 3, 4)
    positions = square.positions(shape)
    assert positions.shape == (64, 5) and (positions[:, 3:] == 8).all()
    resized = np.asarray(image.resize((35, 35), Image.Resampling.BILINEAR))
    patches = square.load(File(tmp_path / "a.png"), shape).reshape(-1, 4, 4, 3)
    for patch, (_, row, column, *_) in zip(patches, positions, strict=True):
        np.testing.assert_array_equal(
            patch, resized[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        )


def test_grid_of_extreme_shapes() -> None:
    assert IMAGES.grid(1, 150) == (2, 38)
    assert IMAGES.grid(1, 30_000) == (2, 60)
    assert IMAGES.grid(30_000, 1) == (60, 2)
    assert IMAGES.grid(1, 1) == (2, 2)


def test_patches_against_a_loop(tmp_path: Path) -> None:
    image = picture(16, 24)
    image.save(tmp_path / "a.png")
    shape = IMAGES.measure(File(tmp_path / "a.png"))
    assert shape == (1, 4, 6)
    patches = IMAGES.load(File(tmp_path / "a.png"), shape)
    positions = IMAGES.positions(shape)
    pixels = np.asarray(image)
    slot = 0
    for group_row in range(2):
        for group_column in range(3):
            for row in (2 * group_row, 2 * group_row + 1):
                for column in (2 * group_column, 2 * group_column + 1):
                    patch = pixels[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
                    np.testing.assert_array_equal(patches[slot], patch.reshape(-1))
                    assert positions[slot].tolist() == [0, row, column]
                    slot += 1
    assert (
        patches.shape == (24, IMAGES.format.features) == (IMAGES.length(shape), 48)
        and patches.dtype == IMAGES.format.dtype
    )
    assert (
        IMAGES.real(shape) == 24
        and IMAGES.real_slots(shape).all()
        and len(IMAGES.real_slots(shape)) == 24
    )


def test_token_positions() -> None:
    positions, following = IMAGES.token_positions((1, 4, 6), 10)
    assert positions.tolist() == [[10, 10 + row, 10 + col] for row in (0, 1) for col in (0, 1, 2)]
    assert following == 13
    assert (
        IMAGES.tokens((1, 4, 6)) == 6 == IMAGES.length((1, 4, 6)) // IMAGES.format.slots_per_token
    )


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.gif", "a.bmp", "a.tif"])
def test_formats(name: str, tmp_path: Path) -> None:
    assert flat(Image.new("RGB", (24, 16), (200, 30, 60)), tmp_path / name) == pytest.approx(
        [200, 30, 60], abs=4
    )


def test_modes(tmp_path: Path) -> None:
    size = (24, 16)
    path = tmp_path / "a.png"
    assert flat(Image.new("L", size, 90), path) == [90, 90, 90]
    assert flat(Image.new("1", size, 1), path) == [255, 255, 255]
    assert flat(Image.new("RGBA", size, (0, 100, 200, 0)), path) == [255, 255, 255]
    assert flat(Image.new("RGBA", size, (0, 100, 200, 51)), path) == pytest.approx(
        [204, 224, 244], abs=1
    )
    assert flat(Image.new("LA", size, (0, 51)), path) == pytest.approx([204, 204, 204], abs=1)
    deep = Image.fromarray(np.full((16, 24), 90 * 257, np.uint16))
    assert flat(deep, path) == [90, 90, 90]
    deep.info["transparency"] = 90 * 257 + 1  # a value that no pixel has
    assert flat(deep, path) == [90, 90, 90]
    deep.info["transparency"] = 90 * 257
    assert flat(deep, path) == [255, 255, 255]
    palette = Image.new("P", size, 1)
    palette.putpalette([1, 2, 3, 10, 20, 30])
    assert flat(palette, path) == [10, 20, 30]
    palette.info["transparency"] = 1
    assert flat(palette, path) == [255, 255, 255]
    assert flat(Image.new("CMYK", size, (0, 255, 255, 0)), tmp_path / "a.jpg") == pytest.approx(
        [255, 0, 0], abs=8
    )


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_that_of_pillow(orientation: int, name: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (24, 16))
    image.paste((255, 0, 0), (0, 0, 8, 8))
    upright = image
    for method in {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.ROTATE_90, Image.Transpose.FLIP_TOP_BOTTOM],
        6: [Image.Transpose.ROTATE_270],
        7: [Image.Transpose.ROTATE_270, Image.Transpose.FLIP_TOP_BOTTOM],
        8: [Image.Transpose.ROTATE_90],
    }.get(orientation, []):
        upright = upright.transpose(method)
    image.save(tmp_path / name, exif=exif, quality=95)
    upright.save(tmp_path / "upright.png")
    shape = IMAGES.measure(File(tmp_path / name))
    assert (
        shape
        == IMAGES.measure(File(tmp_path / "upright.png"))
        == ((1, 6, 4) if orientation >= 5 else (1, 4, 6))
    )
    patches = IMAGES.load(File(tmp_path / name), shape).astype(int)
    assert np.abs(patches - IMAGES.load(File(tmp_path / "upright.png"), shape)).mean() < 5


def test_measure_reads_the_header_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a.png", "a.jpg", "a.webp"):
        picture(16, 24).save(tmp_path / name, exif=exif)
    picture(16, 24).save(tmp_path / "plain.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    shapes = [IMAGES.measure(File(tmp_path / name)) for name in ("a.png", "a.jpg", "plain.png")]
    assert shapes == [(1, 6, 4), (1, 6, 4), (1, 4, 6)]


def test_a_large_jpeg_is_scaled_down(tmp_path: Path) -> None:
    gradient = np.linspace(0, 255, 1600).astype(np.uint8)
    Image.fromarray(np.broadcast_to(gradient, (1200, 1600)).copy()).save(tmp_path / "a.jpg")
    shape = IMAGES.measure(File(tmp_path / "a.jpg"))
    patches = IMAGES.load(File(tmp_path / "a.jpg"), shape)
    columns = (
        patches.reshape(shape[1] // 2, shape[2] // 2, 2, 2, 4, 4, 3).mean((0, 2, 4, 6)).reshape(-1)
    )
    np.testing.assert_allclose(columns, np.linspace(0, 255, len(columns)), atol=6)


def test_missing_file(tmp_path: Path) -> None:
    assert reason(tmp_path / "absent.png") == "missing_file"
    assert reason(tmp_path) == "missing_file"


def test_broken_headers(tmp_path: Path) -> None:
    picture(16, 24).save(tmp_path / "a.png")
    png_bytes = (tmp_path / "a.png").read_bytes()
    for name, content in {
        "empty.png": b"",
        "cut.png": png_bytes[:20],
        "text.jpg": b"hello",
        "film.gif": b"GIF89a",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert reason(tmp_path / name) == "broken_image_header"


def test_a_cut_webp_is_refused_early(tmp_path: Path) -> None:
    picture(160, 160).save(tmp_path / "a.webp")
    content = (tmp_path / "a.webp").read_bytes()
    (tmp_path / "a.webp").write_bytes(content[: len(content) // 2])
    assert reason(tmp_path / "a.webp") == "broken_image_header"


def test_broken_bodies_are_found_when_loading(tmp_path: Path) -> None:
    image = picture(160, 160)
    for name in ("a.png", "a.jpg"):
        image.save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        shape = IMAGES.measure(File(tmp_path / name))
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        assert IMAGES.measure(File(tmp_path / name)) == shape
        assert reason(tmp_path / name, shape) == "undecodable_image"
    image.save(tmp_path / "b.png")
    damaged = bytearray((tmp_path / "b.png").read_bytes())
    damaged[200:240] = bytes(40)
    (tmp_path / "b.png").write_bytes(damaged)
    assert (
        reason(tmp_path / "b.png", IMAGES.measure(File(tmp_path / "b.png"))) == "undecodable_image"
    )


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    picture(16, 24).save(tmp_path / "a.png")
    assert reason(tmp_path / "a.png", (1, 4, 4)) == "shape_changed"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bombs(tmp_path: Path) -> None:
    for name, side in (("bomb.png", 30_000), ("large.png", 10_000)):
        header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
        chunks = (
            struct.pack(">I", 13)
            + header
            + struct.pack(">I", zlib.crc32(header))
            + struct.pack(">I", 4)
            + b"IDAT"
        )
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    assert reason(tmp_path / "bomb.png") == reason(tmp_path / "large.png") == "image_too_large"


def test_extreme_aspect_ratio(tmp_path: Path) -> None:
    Image.new("RGB", (MAX_ASPECT_RATIO, 1)).save(tmp_path / "thin.png")
    Image.new("RGB", (MAX_ASPECT_RATIO + 1, 1)).save(tmp_path / "thinner.png")
    shape = IMAGES.measure(File(tmp_path / "thin.png"))
    assert IMAGES.load(File(tmp_path / "thin.png"), shape).shape == (IMAGES.length(shape), 48)
    assert reason(tmp_path / "thinner.png") == "extreme_aspect_ratio"


def test_memory_that_is_short_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    picture(16, 24).save(tmp_path / "a.png")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("PIL.ImageFile.ImageFile.load", fail)
        IMAGES.load(File(tmp_path / "a.png"), (1, 4, 6))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("PIL.Image.open", fail)
        IMAGES.measure(File(tmp_path / "a.png"))


def test_images_are_not_scaled_up_beyond_what_files_may_have() -> None:
    assert (
        ImageDataConfig(min_pixels=MAX_SOURCE_PIXELS, max_pixels=10**9).min_pixels
        == MAX_SOURCE_PIXELS
    )
    with pytest.raises(ValueError, match="min_pixels"):
        ImageDataConfig(min_pixels=MAX_SOURCE_PIXELS + 1, max_pixels=10**9)


def test_impossible_settings_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"data\.images\.max_pixels \(100\)"):
        Images(14, 2, 1, 100)
    with pytest.raises(ValueError, match=r"data\.images\.min_pixels"):
        Images(4, 2, 5000, 1000)
    with pytest.raises(
        ValueError, match=r"min_pixels \(64\): with resize \(fill\) every image has"
    ):
        Images(4, 2, 64, 1000, resize="fill")
    # No square, and a square of 5 patches per side, which merges of 2 do not divide.
    for pixels in (1000, 20**2):
        with pytest.raises(ValueError, match=rf"max_pixels \({pixels}\): with resize \(square\)"):
            Images(4, 2, pixels, pixels, resize="square")


# ---------------------------------------------------------------------------- TIFF

COMPRESSIONS = [None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tiff_files_are_measured_by_their_header_and_broken_ones_refused(
    compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tif"
    image = picture(64, 96)
    image.save(path, compression=compression)
    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
        shape = IMAGES.measure(File(path))
    image.save(tmp_path / "a.png")
    assert shape == IMAGES.measure(File(tmp_path / "a.png"))
    difference = IMAGES.load(File(path), shape).astype(int) - IMAGES.load(
        File(tmp_path / "a.png"), shape
    )
    assert (
        np.abs(difference).max() <= (0 if compression != "jpeg" else 255)
        and np.abs(difference).mean() < 30
    )
    content = path.read_bytes()
    for share in (0.01, 0.3, 0.6, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        assert reason(path, shape) in ("broken_image_header", "undecodable_image"), share
    if compression in ("tiff_lzw", "tiff_adobe_deflate"):
        damaged = bytearray(content)
        damaged[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
        path.write_bytes(damaged)
        assert reason(path, shape) == "undecodable_image"


def test_tiff_pixels_of_every_kind(tmp_path: Path) -> None:
    size = (24, 16)
    path = tmp_path / "a.tif"
    assert flat(Image.new("L", size, 90), path) == [90, 90, 90]
    assert flat(Image.new("1", size, 1), path) == [255, 255, 255]
    assert flat(Image.new("RGBA", size, (0, 100, 200, 51)), path) == pytest.approx(
        [204, 224, 244], abs=1
    )
    assert flat(Image.fromarray(np.full((16, 24), 90 * 257, np.uint16)), path) == [90, 90, 90]
    assert flat(Image.new("CMYK", size, (0, 255, 255, 0)), path) == pytest.approx(
        [255, 0, 0], abs=8
    )
    for numbers in (np.float32, np.int32):
        Image.fromarray(np.ones((16, 24), numbers)).save(path)
        assert reason(path) == "unsupported_image"


def test_of_several_tiff_pages_the_first_is_taken(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (24, 16), (200, 30, 60)), Image.new("RGB", (80, 80))]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert IMAGES.measure(File(tmp_path / "a.tif")) == (1, 4, 6)


def tiff_header(*tags: tuple[int, int]) -> bytes:
    """A TIFF file without pixels, whose tags have one 32-bit value each."""
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_tiff_bombs(tmp_path: Path) -> None:
    def tags(side: int, tile: int) -> tuple[tuple[int, int], ...]:
        picture = ((256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1))
        return (*picture, (322, tile), (323, tile), (324, 8), (325, 8))

    for name, content in {
        "bomb": tags(30_000, 256),
        "large": tags(10_000, 256),
        "tile": tags(16, 30_000),
    }.items():
        (tmp_path / f"{name}.tif").write_bytes(tiff_header(*content))
        assert reason(tmp_path / f"{name}.tif") == "image_too_large", name


def test_tiff_files_inside_another_file(tmp_path: Path) -> None:
    """Decoders of TIFF read by descriptor where a stream has one. They must not see the file
    around."""
    picture(16, 24).save(tmp_path / "a.tif", compression="tiff_lzw")
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "around").write_bytes(b"x" * 100 + content + b"y" * 100)
    inside = FileRange(tmp_path / "around", 100, len(content), "a.tif")
    shape = IMAGES.measure(inside)
    np.testing.assert_array_equal(
        IMAGES.load(inside, shape), IMAGES.load(File(tmp_path / "a.tif"), shape)
    )
