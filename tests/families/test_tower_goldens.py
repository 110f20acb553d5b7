"""Published towers against the reference, through reader, rows and model.

The reference is transformers: its features and gradients are in tower_goldens/. Folders are also
written back as they were."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.reference import File
from jaxmllm.families.model_folder import Fit, ModelFolder, write_folder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from jaxmllm.trainable import leaves_by_path
from jaxmllm.training.folder_parameters import read_folder
from sharding.mesh import make_mesh
from tests.models.test_towers import encoder_rows
from tests.support import EXHAUSTIVE, needs, slow_cases, tiny_config

GOLDENS = Path(__file__).parent / "tower_goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
SOUNDS = [name for name in NAMES if name.startswith("whisper")]
PICTURES = [name for name in NAMES if name not in SOUNDS]
MESHED = ("siglip", "siglip2", "whisper")
# Gradients smaller than this are noise. Those of key biases are nothing but rounding, because
# softmax does not see a bias that all keys share.
ROUNDING = 0.1


def component_of(folder: Path) -> str:
    return "audio" if folder.name in SOUNDS else "vision"


def config_of(folder: Path, place: Path, **tower) -> Config:
    """The config of a run with this tower and no other."""
    tree = tiny_config(place)
    component = component_of(folder)
    language = tree["model"]["language"]
    tree["model"] = {"language": language, component: {"from": str(folder)} | tower}
    del tree["data"]["images"], tree["data"]["audio"]
    return parse_config(resolved(tree))


def reader_of(config: Config):
    ((_, reader),) = modalities(config.model, config.data).items()
    return reader


def save(item: np.ndarray, path: Path) -> File:
    """Writes a picture or a clip to a file."""
    if item.ndim == 1:
        soundfile.write(path.with_suffix(".wav"), item, 16_000, subtype="PCM_16")
        return File(path.with_suffix(".wav"))
    Image.fromarray(item).save(path)
    return File(path)


def by_key(fit: Fit, gradients) -> dict[str, np.ndarray]:
    """Gradients by the keys and in the shapes of the tensors in files."""
    key_gradients = {}
    for path, leaf in leaves_by_path(gradients):
        line = fit.folder.family.lines[path]
        shape = leaf.shape
        for key, source, index in line.pieces(shape, tuple(slice(0, n) for n in shape)):
            key_gradients[key] = np.empty(line.tensor_shape(shape), leaf.dtype)
            view = line.view(key_gradients[key], shape, index)
            view[...] = leaf[source].reshape(view.shape)
    return key_gradients


@pytest.mark.parametrize(
    "name",
    ["siglip2", *slow_cases({name: (name,) for name in NAMES if name != "siglip2"}, ["siglip"])],
)
def test_features_and_gradients_are_the_references(name, tmp_path):
    """All images lie packed in one row."""
    check_golden(GOLDENS / name, tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=EXHAUSTIVE) for name in MESHED])
def test_the_mesh_changes_nothing(name, tmp_path):
    check_golden(GOLDENS / name, tmp_path, {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.slow
@pytest.mark.exhaustive
@needs("torch", "transformers")
def test_towers_that_are_drawn_anew(tmp_path):
    """Compares with the reference live, with another seed."""
    from tests.families.make_tower_goldens import main as make

    make(tmp_path, seed=3)
    for name in NAMES:
        check_golden(tmp_path / name, tmp_path)


def check_golden(
    folder: Path, place: Path, sizes: Mapping[str, int] | None = None
) -> tuple[float, float]:
    """Checks a golden, and returns the largest differences of features and of gradients.

    Differences of a gradient are relative to its largest entry. Gradients that are noise do not
    count in what is returned."""
    config = config_of(folder, place)
    phase = component_of(folder)
    reader = reader_of(config)
    kind = "sound" if phase == "audio" else "image"
    stride = reader.format.stride
    sizes = sizes or {"data": 1, "fsdp": 1}
    mesh = make_mesh(dict(sizes), jax.devices()[: math.prod(sizes.values())])
    model = build_model(config.model, 8, config.components, mesh)
    ranks = model.layout(phase).ranks  # All ranks have the same row, and only the last one a loss.
    inputs, reference, gradients = (
        dict(np.load(folder / f"{file}.npz")) for file in ("inputs", "reference", "gradients")
    )
    items = len(reference)
    media = [save(inputs[f"{kind}_{i}"], place / f"{i}.png") for i in range(items)]
    shapes = [reader.measure(item) for item in media]
    positions = [reader.positions(shape)[:, reader.format.axes] for shape in shapes]
    slots = -(-sum(map(reader.length, shapes)) // (32 * stride)) * 32 * stride
    features = np.zeros((ranks, slots, reader.format.features), reader.format.dtype)
    token_positions = np.zeros((ranks, slots, len(reader.format.axes)), np.int32)
    segments = np.zeros((ranks, slots), np.int32)
    width = getattr(config.model, phase).width
    direction = np.zeros((ranks, slots // stride, width), np.float32)
    item_features = []
    start = 0
    for i, (item, shape, item_positions) in enumerate(zip(media, shapes, positions, strict=True)):
        item_slots = slice(start, start + reader.length(shape))
        # Goldens have features row by row, while slots follow the merged cells of the reader.
        patch_numbers = (
            item_positions[:, 0] * shape[2] + item_positions[:, 1]
            if phase == "vision"
            else item_positions[::stride, 0]
        )
        features[:, item_slots], token_positions[:, item_slots] = (
            reader.load(item, shape),
            item_positions,
        )
        segments[:, item_slots] = i + 1
        feature_slots = slice(item_slots.start // stride, item_slots.stop // stride)
        direction[-1, feature_slots] = inputs[f"direction_{i}"][patch_numbers]
        item_features.append((feature_slots, patch_numbers))
        start = item_slots.stop
    rows = encoder_rows(
        features, token_positions, segments, reader.format.slots_per_token, stride, 32
    )
    params = {phase: read_folder(str(folder), model.abstract("float32")[phase], phase)}

    def product(params):
        features = model.features(params, phase, rows)
        return (features * direction).sum(), features

    (_, row_features), grads = jax.jit(jax.value_and_grad(product, has_aux=True))(params)
    max_difference = 0.0
    for i, (item_slots, patch_numbers) in enumerate(item_features):
        expected = reference[f"features_{i}"][patch_numbers]
        max_difference = max(
            max_difference, float(np.abs(np.asarray(row_features)[:, item_slots] - expected).max())
        )
    assert max_difference <= 1e-4
    opened = ModelFolder.open(folder, phase)
    shapes_of = {path: leaf.shape for path, leaf in leaves_by_path(params[phase])}
    tensors = by_key(opened.check(shapes_of), jax.device_get(grads[phase]))
    assert gradients.keys() <= tensors.keys()
    # A golden that repeats another one under other keys has no gradients of matrices.
    assert all(tensors[key].ndim > 1 for key in tensors.keys() - gradients.keys())
    relative_differences = {
        key: float(np.abs(tensors[key] - expected).max() / max(np.abs(expected).max(), ROUNDING))
        for key, expected in gradients.items()
    }
    assert max(relative_differences.values()) <= 1e-4, relative_differences
    significant = [
        relative_differences[key]
        for key, expected in gradients.items()
        if np.abs(expected).max() > ROUNDING
    ]
    return max_difference, max(significant)


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_the_processors(name, tmp_path):
    """The images need resizing, so sizes, kernels and colors are compared."""
    config = config_of(GOLDENS / name, tmp_path, merge=1)
    reader = reader_of(config)
    vision = config.model.vision
    processed = dict(np.load(GOLDENS / name / "processed.npz"))
    for i in range(len(processed) // 3):
        media = save(processed[f"image_{i}"], tmp_path / f"{i}.png")
        shape = reader.measure(media)
        assert shape[1:] == tuple(processed[f"grid_{i}"])
        colors = reader.load(media, shape).reshape(-1, 3) / 255
        pixels = (colors - vision.pixel_mean) / vision.pixel_std
        expected = processed[f"pixels_{i}"].reshape(-1, 3)
        np.testing.assert_allclose(pixels, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SOUNDS)
def test_mels_are_the_extractors(name, tmp_path):
    """Mels are compared on every frame: silence is appended before the ends are mirrored.

    The decoder hears none of the silence."""
    config = config_of(GOLDENS / name, tmp_path)
    reader = reader_of(config)
    inputs, processed = (
        dict(np.load(GOLDENS / name / f"{file}.npz")) for file in ("inputs", "processed")
    )
    for i in range(len(processed)):
        sound = inputs[f"sound_{i}"]
        media = save(sound, tmp_path / str(i))
        shape = reader.measure(media)
        assert reader.length(shape) == reader.real(shape) == 100 and reader.real_slots(shape).all()
        assert reader.tokens(shape) == -(-len(sound) // (160 * 2 * config.model.audio.merge))
        mel = reader.load(media, shape)
        np.testing.assert_allclose(mel, processed[f"mel_{i}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_written_as_it_was(name, tmp_path):
    config = config_of(GOLDENS / name, tmp_path)
    mesh = make_mesh({"data": 1, "fsdp": 8})
    phase = component_of(GOLDENS / name)
    abstract = build_model(config.model, 8, config.components, mesh).abstract("float32")[phase]
    folder = ModelFolder.open(GOLDENS / name, phase)
    fit = folder.check({path: leaf.shape for path, leaf in leaves_by_path(abstract)})
    params = dict(leaves_by_path(read_folder(str(folder.path), abstract, phase)))
    assert write_folder([(fit, lambda path: np.asarray(params[path]))], tmp_path / "out") == ()
    for file in folder.path.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(GOLDENS / "siglip-tower", tmp_path)
    assert config.data.images.resize == "square" and config.data.images.max_pixels == 900
    assert config.model.vision.pixel_std == (0.5, 0.25, 0.2) and config.model.vision.gelu == "exact"
    assert config.model.tower_sources == {"vision": str(GOLDENS / "siglip-tower")}


def test_what_a_folder_of_sounds_says(tmp_path):
    config = config_of(GOLDENS / "whisper", tmp_path, merge=5)
    audio = config.model.audio
    data = config.data.audio
    assert (audio.chunk_frames, audio.stem_stride, audio.key_bias) == (100, 2, False)
    assert (data.max_seconds, data.window_length, data.hop_length) == (1.0, 400, 160)
    tree = config.model_dump(mode="json", by_alias=True)
    tree["data"]["audio"]["max_seconds"] = 2
    with pytest.raises(
        ConfigError, match=r"max_seconds \(2\): .* a clip is one chunk of 1 s at mo"
    ):
        parse_config(tree)
    # This takes less work for short clips, but it is not how the model was published.
    assert (
        reader_of(config_of(GOLDENS / "whisper", tmp_path, silence="unseen")).length((7, 1, 1)) == 8
    )


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "siglip2", tmp_path / "copy"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model_type": "clip"},
            "has model_type 'clip'; there are gemma3, siglip, siglip_vision_model",
        ),
        ({"model_type": "qwen3"}, "'qwen3' and so no vision; name the folder in model.from, or"),
        ({"vision_config": {"hidden_act": "relu"}}, "has hidden_act 'relu'; there are gelu_pyt"),
        ({"vision_config": {"num_patches": 17}}, "has num_patches 17; it must be the square"),
        ({"vision_config": 1}, "has vision_config 1; it must be a JSON object"),
        ({"quantization_config": {"quant_method": "awq"}}, r"a quantization_config \(awq\)"),
    ],
)
def test_a_config_that_cannot_be(copy, tmp_path, values, words):
    change(copy / "config.json", **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_normalize": False}, "has do_normalize False; True alone is supported"),
        ({"resample": 0}, "has resample 0; there are"),
        ({"patch_size": 16}, "has patch_size 16; 7 alone is supported"),
    ],
)
def test_a_processor_that_cannot_be(copy, tmp_path, values, words):
    change(copy / "preprocessor_config.json", **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


def test_a_processor_may_be_a_part_of_a_file(copy, tmp_path):
    """New folders have the processor in a section of one file. The config may differ from it."""
    old_file = copy / "preprocessor_config.json"
    values = json.loads(old_file.read_text()) | {"resample": 1}
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    old_file.unlink()
    tree = tiny_config(tmp_path)
    tree["model"]["vision"] = {"from": str(copy)}
    tree["data"]["images"] = {"min_pixels": 28**2 * 4, "max_pixels": 28**2 * 4}
    images = parse_config(resolved(tree)).data.images
    assert (images.kernel, images.resize, images.max_pixels) == ("lanczos", "fill", 28**2 * 4)


def test_configs_that_say_otherwise_are_refused(copy, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.vision\.width is 32, but .* says 16; leave it"):
        config_of(copy, tmp_path, width=32)
    with pytest.raises(ConfigError, match=r"model\.vision\.from: .*nowhere has no config\.json"):
        config_of(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ConfigError, match=r"merge \(3\) must divide position_grid \(4\)"):
        config_of(GOLDENS / "siglip", tmp_path, merge=3)
    with pytest.raises(ConfigError, match=r"model\.vision\.window is 3, but .* says None; leave"):
        config_of(copy, tmp_path, window=3)
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(FolderError, match=r"preprocessor_config\.json cannot be read"):
        config_of(copy, tmp_path)
    with pytest.raises(FolderError, match=r"and so no language; name the folder in model\.vision"):
        resolved({"model": {"from": str(copy)}})
