"""Folders of Gemma 3 in old and new spellings, alone and beside a vision tower.

Pixels are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.reference import File
from jaxmllm.families.by_type import family_of
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import INDEX, ModelFolder, write_folder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from tests.families.test_model_folder import (
    GOLDENS,
    add_tensor,
    change_config,
    change_header,
    copy_in_one_file,
    shapes_of,
)
from tests.support import tiny_config

# The config of the published 1B model, and the text section of the 4B model.
SMALL = {
    "attn_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
SPARSE = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def config_of(folder: Path, place: Path, images: dict | None = None, **model) -> Config:
    """The config of a run with a folder's model, with changed keys of `model` and `data.images` if
    given."""
    tree = tiny_config(place, data__tokenizer="none.json")
    tree["model"] = {"from": str(folder)} | model
    del tree["data"]["images"], tree["data"]["audio"]
    tree["data"] |= {"images": images} if images else {}
    return parse_config(resolved(tree))


def check_squares(folder: Path, config: Config, place: Path) -> None:
    """Checks the pixels of pictures against the processor's, square for square."""
    reader = modalities(config.model, config.data)["vision"]
    vision = config.model.vision
    assert vision is not None and isinstance(reader, Images)
    processed = np.load(folder / "processed.npz")
    expected = processed["pixels"].transpose(0, 2, 3, 1) * vision.pixel_std + vision.pixel_mean
    for i in range(len(processed.files) - 1):
        Image.fromarray(processed[f"image_{i}"]).save(place / f"{i}.png")
        shape = reader.measure(File(place / f"{i}.png"))
        squares, expected = np.split(expected, [shape[0]])
        # The processor's pixels are whole color levels, scaled, up to rounding.
        levels = 255 * squares.reshape(-1, squares.shape[2], 3)
        assert np.abs(levels - levels.round()).max() < 1e-3
        colors = reader.patches(levels.round().astype(np.uint8), shape)
        np.testing.assert_array_equal(reader.load(File(place / f"{i}.png"), shape), colors)
    assert not len(expected)


def language(**values) -> dict:
    config = FolderConfig(Path("config.json"), values)
    return family_of(config).section(config)


@pytest.fixture
def tower(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "gemma3-tower", tmp_path / "copy"))


def test_a_file_of_the_old_spelling():
    section = language(**SMALL)
    assert (section["heads"], section["kv_heads"], section["head_size"]) == (4, 1, 256)
    assert section["full_layers"] == [5, 11, 17, 23] and section["window"] == 512
    assert (section["rope_theta"], section["window_rope_theta"]) == (1e6, 1e4)
    assert section["attention_scale"] == 1 / 16 and section["tie_embeddings"]


def test_a_file_that_leaves_out_what_is_usual():
    section = language(model_type="gemma3", text_config=SPARSE)
    sizes = (section["vocab_size"], section["heads"], section["kv_heads"], section["head_size"])
    assert sizes == (262_208, 8, 4, 256)
    assert section["rope_scaling"] == {"kind": "linear", "factor": 8.0}
    assert len(section["full_layers"]) == 5


def test_both_spellings_are_one():
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
    records = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in thetas.items()}
    layer_cycle = ["sliding_attention"] * 5 + ["full_attention"]
    old_keys = {"rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"}
    common = {key: value for key, value in SMALL.items() if key not in old_keys}
    new_values = common | {"rope_parameters": records, "layer_types": (layer_cycle * 5)[:26]}
    assert language(**new_values) == language(**SMALL)


def test_without_windows_there_is_one_theta():
    section = language(**SMALL, layer_types=["full_attention"] * 26)
    assert section["window_rope_theta"] is None and "window" not in section


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_activation": "silu"}, "'gelu_pytorch_tanh' alone is supported"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping 30.0; None alone"),
        ({"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, "has use_bidirectional_attention True"),
        ({"sliding_window": None}, "has no sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "26 of full_attention or sliding_attention"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "those of full_attention and sliding_att"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "has rope_type 'linear' of sliding_attention",
        ),
        ({"rope_parameters": {"full_attention": 3}}, "has rotary parameters 3"),
        ({"rope_scaling": "linear"}, "has rotary parameters 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "has rope_type 'yarn' of full_at"),
        ({"sliding_window_pattern": 0}, "has sliding_window_pattern 0; it must be greater than 0"),
        ({"query_pre_attn_scalar": -1}, "has query_pre_attn_scalar -1; it must be greater than 0"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "has rope_type 'longrope'"),
    ],
)
def test_what_is_not_supported_is_told_by_name(values, words):
    with pytest.raises(FolderError, match=words):
        language(**SMALL | values)


# ---------------------------------------------------------------------------- beside a tower


def test_what_a_folder_with_a_tower_says_stands_in_the_config(tower, tmp_path):
    config = config_of(tower, tmp_path)
    language = config.model.language
    vision = config.model.vision
    images = config.data.images
    assert vision is not None
    assert language.post_norms and language.media_positions == "line"
    assert "vision" in language.bidirectional
    assert (vision.positions, vision.position_grid, vision.merge) == ("table", 4, 2)
    projector = vision.projector
    assert projector.linear and not projector.bias and projector.grouping == "mean"
    assert (projector.norm, projector.norm_epsilon) == ("zero_centred_rms", 1e-6)
    assert (images.resize, images.kernel, images.max_pixels) == ("square", "bilinear", 16**2)
    # The run folder keeps the config with all values filled in. Reading it again changes nothing.
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


def test_a_run_may_leave_the_tower_out_or_take_it_alone(tower, tmp_path):
    assert config_of(tower, tmp_path, vision=None).model.encoders == ()
    (tower / "preprocessor_config.json").rename(tower / "other.json")
    assert config_of(tower, tmp_path, vision=None).model.encoders == (), "nor is its processor read"
    (tower / "other.json").rename(tower / "preprocessor_config.json")
    tower_tree = tiny_config(tmp_path)
    tower_tree["model"]["vision"] = {"from": str(tower), "merge": 4}
    del tower_tree["data"]["images"]
    vision = parse_config(resolved(tower_tree)).model.vision
    assert vision is not None and not vision.projector.linear


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("config", {"mm_tokens_per_image": 5}, "has mm_tokens_per_image 5; squares of 4 patches"),
        ("config", {"mm_tokens_per_image": 9}, "has mm_tokens_per_image 9; squares of 4 patches"),
        ("config", {"mm_tokens_per_image": 16}, "16 and sliding_window 5; a picture must fit"),
        ("config", {"vision_config": {"model_type": "other"}}, "has model_type 'other'; 'siglip_"),
        ("preprocessor_config", {"do_pan_and_scan": True}, "has do_pan_and_scan True; False alone"),
        ("preprocessor_config", {"size": {"height": 8, "width": 8}}, "squares of 4 patches a side"),
    ],
)
def test_a_folder_with_a_tower_that_cannot_be(tower, tmp_path, file, values, words):
    path = tower / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(FolderError, match=words):
        config_of(tower, tmp_path)


def test_pixels_are_the_processors(tower, tmp_path):
    check_squares(tower, config_of(tower, tmp_path), tmp_path)


def test_an_own_head_beside_a_tower_is_refused(tower):
    change_config(tower, tie_word_embeddings=False)
    with pytest.raises(FolderError, match="tie_word_embeddings False; True alone is supported"):
        ModelFolder.open(tower).family.section(FolderConfig.read(tower))


@pytest.mark.parametrize("key", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_tied_head_may_have_a_second_tensor(key, tmp_path):
    """The second tensor may have either key, but must equal the embedding."""
    embedding = "language_model.model.embed_tokens.weight"
    for difference in (0, 1):
        folder = copy_in_one_file(
            GOLDENS / "gemma3-tower",
            tmp_path / str(difference),
            lambda arrays, added=difference: arrays | {key: arrays[embedding] + added},
        )
        opened = ModelFolder.open(folder)
        fit = opened.check(shapes_of(opened))
        if difference:
            with pytest.raises(FolderError, match=f"{key} of .* is not {embedding}"):
                fit.whole("embedding", np.float32)
        else:
            assert fit.whole("embedding", np.float32).any()


def test_keys_of_both_prefixes_are_read(tower):
    """Trained tensors change, and the tower is carried through."""
    original = ModelFolder.open(tower)
    values = {
        key: np.array(tensor.array())
        for key, tensor in original.tensors.items()
        if not key.startswith("language_model.")
    }
    renamed = {}
    for key in original.tensors:
        is_language = key.startswith("language_model.")
        renamed[key] = (
            key.replace("language_model.model.", "model.language_model.")
            if is_language
            else f"model.{key}"
        )
    index = json.loads((tower / INDEX).read_text())
    index["weight_map"] = {renamed[key]: name for key, name in index["weight_map"].items()}
    (tower / INDEX).write_text(json.dumps(index))
    for file in original.files:

        def change(header):
            for key in [key for key in header if key in renamed]:
                header[renamed[key]] = header.pop(key)

        change_header(file.path, change)
    folder = ModelFolder.open(tower)
    fit = folder.check(shapes_of(folder))
    zeros = {path: np.zeros(shape, np.float32) for path, shape in fit.shapes.items()}
    write_folder([(fit, zeros.__getitem__)], tower.parent / "out")
    written_tensors = ModelFolder.open(tower.parent / "out").tensors
    for key, value in values.items():
        np.testing.assert_array_equal(written_tensors[f"model.{key}"].array(), value)
    assert not written_tensors["model.language_model.norm.weight"].array().any()


def test_a_tensor_of_no_part_is_named(tower):
    embedding = ModelFolder.open(tower).tensors["language_model.model.embed_tokens.weight"]
    add_tensor(embedding.file, "language_model.other", np.zeros(2, np.float32))
    index = json.loads((tower / INDEX).read_text())
    index["weight_map"]["language_model.other"] = embedding.file.name
    (tower / INDEX).write_text(json.dumps(index))
    folder = ModelFolder.open(tower)
    with pytest.raises(FolderError, match=r"language_model\.other \[2\] belongs to no parameter"):
        folder.check(shapes_of(folder))
