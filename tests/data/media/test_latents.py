"""Latents from files: every type and order is read as it was written, and what is refused."""

import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.reference import Clip, File, MediaError

LATENTS = np.random.default_rng(0).normal(size=(4, 6, 8, 10)).astype(np.float32)
MODALITY = GeneratedLatents(
    channels=4,
    patch_frames=2,
    patch_size=2,
    mean=(0.5, 0.0, -1.0, 2.0),
    std=(2.0,),
    max_frames=6,
    shorten=False,
)
NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}


def tensors(*arrays: NDArray[np.generic]) -> bytes:
    """Writes a safetensors file by hand."""
    header: dict[str, object] = {"__metadata__": {"made": "by hand"}}
    start = 0
    for index, array in enumerate(arrays):
        header[f"latents{index}"] = {
            "dtype": NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays)


def array(values: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def written(folder: Path, content: bytes) -> File:
    path = folder / "latents"  # the first bytes tell what a file holds, whatever its ending
    path.write_bytes(content)
    return File(path)


WHOLE: dict[str, tuple[bytes, float]] = {  # content, rounding
    "float32": (array(LATENTS), 0),
    "big-endian": (array(LATENTS.astype(">f4")), 0),
    "by columns": (array(np.asfortranarray(LATENTS)), 0),
    "float16": (array(LATENTS.astype(np.float16)), 1e-3),
    "tensor of float32": (tensors(LATENTS), 0),
    "tensor of float16": (tensors(LATENTS.astype(np.float16)), 1e-3),
    "tensor of bfloat16": (tensors(LATENTS.astype(ml_dtypes.bfloat16)), 1e-2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_latents_are_loaded_as_they_were_written(name: str, tmp_path: Path) -> None:
    content, rounding = WHOLE[name]
    media = Clip(written(tmp_path, content))
    shape = MODALITY.measure(media)
    assert shape == (3, 4, 5) and MODALITY.length(shape) == 60
    patches = MODALITY.load(media, shape)
    assert patches.dtype == np.float32 and patches.shape == (60, MODALITY.format.features)
    mean = np.array(MODALITY.mean, np.float32)
    # Slots against a loop over patches, normed by hand. The tolerance is the rounding of the file's
    # type.
    for slot, (t, y, x) in enumerate(MODALITY.positions(shape) * 2):
        patch = LATENTS[:, t : t + 2, y : y + 2, x : x + 2]
        expected = (np.moveaxis(patch, 0, -1) - mean) / 2
        np.testing.assert_allclose(patches[slot], expected.reshape(-1), atol=2 * rounding)


def test_an_image_has_one_frame_and_a_long_clip_is_shortened(tmp_path: Path) -> None:
    image_latents = GeneratedLatents(4, 1, 2, (0.0,), (1.0,), 4, shorten=True)
    for values in (LATENTS[:, 0], LATENTS[:, :1]):
        image = written(tmp_path, array(values))
        assert image_latents.measure(image) == image_latents.measure(Clip(image)) == (1, 4, 5)
    clip = Clip(written(tmp_path, array(LATENTS)))
    assert image_latents.measure(clip) == (4, 4, 5)
    short_clip = Clip(written(tmp_path, array(LATENTS[:, :4])))
    np.testing.assert_array_equal(
        image_latents.load(short_clip, (4, 4, 5)),
        image_latents.load(Clip(written(tmp_path, array(LATENTS))), (4, 4, 5)),
    )


REFUSED: dict[str, tuple[bytes, str, str]] = {  # content, reason, what the message holds
    "other channels": (array(LATENTS[:3]), "other_channels", "model.diffusion.channels is 4"),
    "odd rows": (
        array(LATENTS[:, :, :7]),
        "divided_patches",
        "7 rows, no multiple of model.diffusion.patch_size",
    ),
    "odd frames": (array(LATENTS[:, :3]), "divided_patches", "3 frames, no multiple"),
    "one frame": (array(LATENTS[:, 0]), "divided_patches", "model.diffusion.patch_frames = 2"),
    "two axes": (array(LATENTS[0, 0]), "unsupported_latents", "[channels, height, width]"),
    "negative sizes": (
        array(LATENTS).replace(b"(4, 6, 8, 10)", b"(4, 6,-8,-10)"),
        "unsupported_latents",
        "shape [4, 6, -8, -10]",
    ),
    "nothing": (array(LATENTS[:, :0]), "unsupported_latents", "shape [4, 0, 8, 10]"),
    "too long": (
        array(np.concatenate([LATENTS] * 2, 1)),
        "too_many_frames",
        "data.latents.max_frames = 6",
    ),
    "cut": (array(LATENTS)[:-1], "truncated_latents", "copy it again"),
    "cut tensor": (tensors(LATENTS)[:-1], "truncated_latents", "copy it again"),
    "continued": (array(LATENTS) * 2, "wrong_latents_length", "write it again"),
    "doubles": (array(LATENTS.astype(np.float64)), "unsupported_latents", "float64"),
    "double tensor": (tensors(LATENTS.astype(np.float64)), "unsupported_latents", "F64"),
    "integers": (array(LATENTS.astype(np.int16)), "unsupported_latents", "int16"),
    "unnamed bfloat16": (
        array(LATENTS.astype(ml_dtypes.bfloat16)),
        "unsupported_latents",
        ".safetensors",
    ),
    "two tensors": (tensors(LATENTS, LATENTS), "unsupported_latents", "holds 2 tensors"),
    "objects": (array(LATENTS).replace(b"'<f4'", b"'|O' "), "unsupported_latents", "object"),
    "open header": (array(LATENTS).replace(b"}", b" "), "broken_latents_header", "TokenError"),
    "header without a type": (
        array(LATENTS).replace(b"'<f4'", b"()   "),
        "broken_latents_header",
        "IndexError",
    ),
    "deep header": (
        array(LATENTS).replace(b"6", b"\x00"),
        "broken_latents_header",
        "no .npy or .safetensors",
    ),
    "infinite sizes": (
        tensors(LATENTS).replace(b"[4, 6, 8, 10]", b"[4, 6, 1e999]"),
        "broken_latents_header",
        "OverflowError",
    ),
    "cut header": (array(LATENTS)[:40], "broken_latents_header", "no .npy or .safetensors"),
    "no header": (b"P5 12 12 255\n", "broken_latents_header", "no .npy or .safetensors"),
    "header of nothing": (tensors().replace(b"by hand", b'"y han"'), "broken_latents_header", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_are_no_latents_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, reason, words = REFUSED[name]
    media = written(tmp_path, content)
    with pytest.raises(MediaError) as caught:
        MODALITY.measure(Clip(media))
    message = str(caught.value)
    assert (caught.value.reason, words in message) == (reason, True), message
    assert str(media) in message and "\n" not in message


def test_a_clip_that_is_called_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="6 frames, but is called an image"):
        MODALITY.measure(written(tmp_path, array(LATENTS)))


def test_latents_that_changed_are_noticed(tmp_path: Path) -> None:
    media = Clip(written(tmp_path, array(LATENTS)))
    shape = MODALITY.measure(media)
    written(tmp_path, array(LATENTS[:, :4]))
    with pytest.raises(MediaError) as caught:
        MODALITY.load(media, shape)
    assert caught.value.reason == "shape_changed"
