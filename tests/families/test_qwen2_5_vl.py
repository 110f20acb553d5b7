"""Qwen2.5-VL: what its folders say in all spellings, its pictures, and what is refused.

Pictures are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import (
    ComponentsConfig,
    Config,
    ConfigError,
    ModelConfig,
    VideoDataConfig,
)
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.reference import File
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.qwen2_5_vl import QWEN2_5_VL
from jaxmllm.families.qwen3_vl import QWEN3_VL
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from sharding.mesh import make_mesh
from tests.support import tiny_config

GOLDENS = Path(__file__).parent / "goldens"
FOLDER = GOLDENS / "qwen2_5_vl"
FLAT = GOLDENS / "qwen2_5_vl-flat"
SIGLIP = Path(__file__).parent / "tower_goldens" / "siglip2"


def config_of(folder: Path, place: Path, **model) -> Config:
    """The config of a run with a folder's model, with changed keys of `model` if given."""
    tree = tiny_config(place, data__tokenizer="none.json")
    tree["model"] = {"from": str(folder)} | model
    del tree["data"]["images"], tree["data"]["audio"]
    return parse_config(resolved(tree))


def reader_of(config: Config) -> Images:
    reader = modalities(config.model, config.data)["vision"]
    assert isinstance(reader, Images)
    return reader


def videos_of(config: Config) -> VideoDataConfig:
    """How videos are read, by a reader that supports them."""
    assert reader_of(config).parts == ("image", "video")
    return config.data.videos


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def change(path: Path, part: str | None = None, **values) -> None:
    """Changes values of a JSON object, or of a section of it. None removes a key."""
    content = json.loads(path.read_text())
    section = content if part is None else content[part]
    section.update(values)
    for key in [key for key, value in section.items() if value is None]:
        del section[key]
    path.write_text(json.dumps(content))


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(FOLDER, tmp_path)
    language = config.model.language
    vision = config.model.vision
    images = config.data.images
    assert vision is not None
    assert language.tie_embeddings and language.rope_sections == (1, 1, 1)
    assert language.rope_theta == 1e6 and language.norm_epsilon == 1e-5 and language.qkv_bias
    assert language.bidirectional == (), "media are seen causally"
    assert (vision.window, vision.full_layers, vision.patch_frames) == (4, (1,), 2)
    assert vision.gated_mlp and not vision.patch_bias and vision.merge == 2
    assert (vision.projector.mlp_width, vision.projector.gelu) == (4 * 16, "exact")
    assert (images.resize, images.min_pixels, images.max_pixels) == ("smart", 64, 768)
    # The run folder keeps the config with all values filled in. Reading it again changes nothing.
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


def test_videos_are_read_as_the_folder_says(copy, tmp_path):
    """Videos are read as the file for pictures says, or a file of their own."""
    assert reader_of(config_of(copy, tmp_path)).parts == ("image",)
    with_videos = {"videos": True}
    videos = videos_of(config_of(copy, tmp_path, vision=with_videos))
    assert (videos.fps, videos.min_pixels, videos.max_pixels) == (None, 64, 768)
    assert (videos.times, videos.positions_per_second) == ("positions", 4.0)
    change(copy / "config.json", "vision_config", tokens_per_second=2)
    processor = json.loads((copy / "preprocessor_config.json").read_text())
    processor |= {"size": {"shortest_edge": 128, "longest_edge": 1024}, "max_frames": 16, "fps": 2}
    file = copy / "video_preprocessor_config.json"
    file.write_text(json.dumps(processor | {"do_sample_frames": True, "min_frames": 6}))
    config = config_of(copy, tmp_path, vision=with_videos)
    videos = videos_of(config)
    assert (videos.fps, videos.sampling, videos.min_frames) == (2.0, "steps", 6)
    assert (videos.max_frames, videos.min_pixels, videos.max_pixels) == (16, 128, 1024)
    assert videos.positions_per_second == 2.0
    # The run folder's config is read again without a change. With all frames there is no sampling.
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config
    data = {"tokenizer": "none.json", "videos": {"fps": None}}
    tree = {"model": {"from": str(copy), "vision": with_videos}, "data": data}
    assert "min_frames" not in resolved(tree)["data"]["videos"]
    for values, words in (
        ({"image_mean": [0.5, 0.5, 0.5]}, r"has image_mean \[0.5, 0.5, 0.5\]; \[0.48145466"),
        ({"num_frames": 8}, "has num_frames 8; videos are sampled by fps alone"),
        ({"cap_pixels_per_frame": True}, "has cap_pixels_per_frame True; False alone is supp"),
    ):
        file.write_text(json.dumps(processor | values))
        with pytest.raises(FolderError, match=words):
            config_of(copy, tmp_path, vision=with_videos)


def test_configs_of_first_folders_are_flat(tmp_path):
    config = config_of(FLAT, tmp_path)
    assert config.model.language.rope_sections == (1, 1, 2)
    assert not config.model.language.tie_embeddings
    assert config.model.vision is not None and config.model.vision.full_layers == (0,)


def test_what_a_config_leaves_out_is_as_the_reference_has_it(copy):
    """The reference writes configs without default values. Here all shapes are defaults, and make
    the largest published model."""
    (copy / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", "text_config": {}, "vision_config": {}})
    )
    config = ModelFolder.open(copy).config
    language, vision = (family.section(config) for family in QWEN2_5_VL[:2])
    assert (language["width"], language["layers"], language["kv_heads"]) == (8192, 80, 8)
    assert language["rope_sections"] == [16, 24, 24] and language["rope_theta"] == 1e6
    assert vision["window"] == 8 and vision["full_layers"] == [7, 15, 23, 31]
    with pytest.raises(FolderError, match=r"has out_hidden_size 3584; the decoder is 8192 wide"):
        QWEN2_5_VL[2].section(config)


def test_null_key_value_heads_are_as_many_as_heads():
    config = ModelFolder.open(FOLDER).config
    text = config.values["text_config"] | {"num_key_value_heads": None}
    assert QWEN2_5_VL[0].section(config.updated(text_config=text))["kv_heads"] == 4


@pytest.mark.parametrize("family", [QWEN2_5_VL[1], QWEN3_VL[1]], ids=["2.5", "3"])
def test_rotary_positions_of_towers_in_older_files(family):
    config = ModelFolder.open(GOLDENS / family.model_type).config
    for said, theta in (
        ({}, 10_000.0),
        ({"rope_theta": 77}, 77.0),
        ({"rope_parameters": {"rope_type": "default"}}, 10_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77}}, 77.0),
    ):
        vision = config.values["vision_config"] | {"rope_parameters": None} | said
        assert family.section(config.updated(vision_config=vision))["rope_theta"] == theta


PUBLISHED_TOWER = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
PUBLISHED_TEXT = {
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window": 32_768,
    "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "attention_dropout": 0.0,
}


@pytest.mark.parametrize(
    ("sizes", "tied", "numbers"),
    [
        ((2048, 36, 16, 2, 11_008, 151_936), True, 3_754_622_976),
        ((3584, 28, 28, 4, 18_944, 152_064), False, 8_292_166_656),
    ],
    ids=["3B", "7B"],
)
def test_published_models_have_their_number_of_parameters(copy, sizes, tied, numbers):
    """The index of each published folder has twice as many bytes: two per parameter."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shapes = dict(zip((*names, "intermediate_size", "vocab_size"), sizes, strict=True))
    tower = PUBLISHED_TOWER | {"out_hidden_size": sizes[0]}
    sections = {"model_type": "qwen2_5_vl", "tie_word_embeddings": tied, "vision_config": tower}
    (copy / "config.json").write_text(json.dumps(PUBLISHED_TEXT | shapes | sections))
    change(copy / "preprocessor_config.json", patch_size=14)
    tree = resolved({"model": {"from": str(copy)}})["model"]
    model = build_model(
        ModelConfig.model_validate_json(json.dumps(tree)),
        sizes[-1],
        ComponentsConfig(),
        make_mesh({"data": 1}, jax.devices()[:1]),
    )
    all_shapes = {name: component.shapes for name, component in model.components.items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(all_shapes)) == numbers


def test_a_tower_without_windows(copy, tmp_path):
    change(copy / "config.json", "vision_config", fullatt_block_indexes=[0, 1, 2, 9])
    vision = config_of(copy, tmp_path).model.vision
    assert vision is not None and vision.window is None and vision.full_layers == ()


def test_a_run_may_take_another_tower_or_none(tmp_path):
    assert config_of(FOLDER, tmp_path, vision=None).model.vision is None
    siglip_config = config_of(FOLDER, tmp_path, vision={"from": str(SIGLIP), "merge": 2})
    assert siglip_config.model.vision is not None and siglip_config.model.vision.norm == "layer"
    assert siglip_config.data.images.resize == "fill"
    tower_tree = tiny_config(tmp_path)
    tower_tree["model"]["vision"] = {"from": str(FOLDER), "merge": 1}
    del tower_tree["data"]["images"]
    tower = parse_config(resolved(tower_tree)).model.vision
    assert tower is not None and tower.merge == 1 and tower.projector.mlp_width is None
    tower_tree["model"]["vision"] = {"from": str(FOLDER), "merge": 1, "videos": True}
    assert videos_of(parse_config(resolved(tower_tree))).positions_per_second == 4.0
    tower_tree["model"]["vision"] = {"from": str(SIGLIP), "merge": 1, "videos": True}
    tower_tree["data"]["videos"] = {"fps": 2.0, "min_pixels": 4096, "max_pixels": 4096}
    videos = videos_of(parse_config(resolved(tower_tree)))
    assert (videos.fps, videos.times) == (2.0, "positions"), "of a tower of pictures: as it says"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"vision": {"merge": 1}}, r"model\.vision\.merge is 1, but .* says 2; leave it out"),
        ({"vision": {"projector": {}}}, r"model\.vision\.projector is {}, but .* says {'mlp_wi"),
        ({"language": {"bidirectional": ["vision"]}}, r"bidirectional is \['vision'\], but"),
        ({"audio": {"from": str(FOLDER)}}, "'qwen2_5_vl' and so no audio; name the folder in mod"),
    ],
)
def test_configs_that_say_otherwise_are_refused(tmp_path, model, words):
    with pytest.raises(ConfigError, match=words):
        config_of(FOLDER, tmp_path, **model)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'silu' alone is supp"),
        ("vision_config", {"in_channels": 1}, "has in_channels 1; 3 alone is supported"),
        ("vision_config", {"window_size": 7}, "has window_size 7; a merged cell has 8"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type axial alone is"),
        ("vision_config", {"out_hidden_size": 16}, "has out_hidden_size 16; the decoder is 24 w"),
        ("text_config", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'silu' alone is suppor"),
        (None, {"vision_config": None}, "has vision_config None; it must be a JSON object"),
        (None, {"quantization_config": {"quant_method": "awq"}}, "has a quantization_config"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    change(copy / "config.json", part, **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_normalize": False}, "has do_normalize False; True alone is supported"),
        ({"resample": 2}, "has resample 2; 3 alone is supported"),
        ({"temporal_patch_size": 1}, "has temporal_patch_size 1; 2 alone is supported"),
        ({"merge_size": 1}, "has merge_size 1; 2 alone is supported"),
        ({"size": 7}, "has size 7; it must be a JSON object"),
    ],
)
def test_a_processor_that_cannot_be(copy, tmp_path, values, words):
    change(copy / "preprocessor_config.json", **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


def test_older_processors_name_bounds_by_themselves(copy, tmp_path):
    change(copy / "preprocessor_config.json", size=None, min_pixels=3136, max_pixels=12_845_056)
    images = config_of(copy, tmp_path).data.images
    assert (images.min_pixels, images.max_pixels) == (3136, 12_845_056)


def test_pixels_are_the_processors(tmp_path):
    config = config_of(FOLDER, tmp_path)
    reader = reader_of(config)
    vision = config.model.vision
    assert vision is not None
    processed = dict(np.load(FOLDER / "processed.npz"))
    for i in range(sum(name.startswith("image") for name in processed)):
        path = tmp_path / f"{i}.png"
        Image.fromarray(processed[f"image_{i}"]).save(path)
        shape = reader.measure(File(path))
        assert shape == tuple(processed[f"grid_{i}"])
        colors = reader.load(File(path), shape).reshape(-1, 4, 4, 3) / 255
        pixels = (colors - vision.pixel_mean) / vision.pixel_std
        expected = processed[f"pixels_{i}"].reshape(-1, 3, 2, 4, 4)  # two frames
        # The reference repeats a picture as two frames, whereas our reader keeps one.
        for frame in (0, 1):
            frame_pixels = expected[:, :, frame].transpose(0, 2, 3, 1)
            np.testing.assert_allclose(pixels, frame_pixels, rtol=0, atol=1e-6)


def test_grids_are_those_of_the_reference():
    """The sizes include sides near whole cells, and thin pictures, which may exceed the largest
    number of pixels."""
    processed = np.load(FOLDER / "processed.npz")
    exceeding = 0
    for bounds, resized in zip(processed["bounds"].tolist(), processed["resized"], strict=True):
        reader = Images(14, 2, *bounds, resize="smart")
        grids = [reader.grid(*size) for size in processed["sizes"].tolist()]
        np.testing.assert_array_equal(14 * np.array(grids), resized)
        exceeding += int((resized.prod(axis=1) > bounds[1]).sum())
    assert exceeding
