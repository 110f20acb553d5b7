"""InternVL: what its folders say in both spellings, its tiles, and what is refused.

Tiles are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.config.schema import ConfigError
from jaxmllm.families.model_folder import INDEX, ModelFolder
from jaxmllm.families.weight_files import FolderError
from tests.families.test_gemma3 import check_squares, config_of
from tests.families.test_model_folder import (
    GOLDENS,
    change_header,
    copy_in_one_file,
    shapes_of,
)

FOLDER = GOLDENS / "internvl"
NORMED = GOLDENS / "internvl-normed"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(FOLDER, tmp_path)
    language = config.model.language
    vision = config.model.vision
    images = config.data.images
    assert vision is not None and vision.class_token and vision.layer_scale and not vision.last_norm
    assert vision.qkv_bias and not vision.qk_norm and vision.gelu == "exact"
    assert (vision.position_grid, vision.merge, vision.projector.norm) == (4, 2, "layer")
    assert vision.projector.norm_epsilon == 1e-5 and vision.projector.gelu == "exact"
    assert language.qkv_bias and not language.tie_embeddings
    assert (language.bidirectional, language.media_positions) == ((), "line")
    assert (images.resize, images.min_tiles, images.max_tiles) == ("tiles", 1, 4)
    normed_config = config_of(NORMED, tmp_path)
    assert normed_config.model.language.qk_norm and normed_config.model.language.tie_embeddings
    tower = normed_config.model.vision
    assert tower is not None and tower.qk_norm and not tower.qkv_bias and tower.norm == "rms"


def test_pixels_are_the_processors(tmp_path):
    """The squares are single tiles, several tiles, and the whole pictures beside them."""
    check_squares(FOLDER, config_of(FOLDER, tmp_path), tmp_path)


def test_colors_that_the_processor_does_not_say_are_those_of_clip(copy, tmp_path):
    path = copy / "preprocessor_config.json"
    preprocessor = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {key: preprocessor[key] for key in preprocessor.keys() - {"image_mean", "image_std"}}
        )
    )
    vision = config_of(copy, tmp_path).model.vision
    assert vision is not None
    np.testing.assert_allclose(vision.pixel_mean, (0.481, 0.458, 0.408), atol=1e-3)
    np.testing.assert_allclose(vision.pixel_std, (0.269, 0.261, 0.276), atol=1e-3)


def test_keys_as_in_memory_are_read(copy):
    def in_memory(key: str) -> str:
        if key == "language_model.lm_head.weight":
            return "lm_head.weight"
        return f"model.{key.replace('language_model.model.', 'language_model.')}"

    original = ModelFolder.open(copy)
    shapes = shapes_of(original)
    expected = original.check(shapes).whole("head", np.float32)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"] = {in_memory(key): name for key, name in index["weight_map"].items()}
    (copy / INDEX).write_text(json.dumps(index))

    def change(header: dict) -> None:
        for key in [key for key in header if key != "__metadata__"]:
            header[in_memory(key)] = header.pop(key)

    for file in original.files:
        change_header(file.path, change)
    head = ModelFolder.open(copy).check(shapes).whole("head", np.float32)
    np.testing.assert_array_equal(head, expected)


@pytest.mark.parametrize("said", [None, False, True])
def test_files_of_transformers_4_say_in_the_part_for_text_whether_the_head_is_tied(
    copy, tmp_path, said
):
    folder_config = json.loads((copy / "config.json").read_text())
    del folder_config["tie_word_embeddings"], folder_config["text_config"]["tie_word_embeddings"]
    folder_config["text_config"] |= {} if said is None else {"tie_word_embeddings": said}
    (copy / "config.json").write_text(json.dumps(folder_config))
    assert config_of(copy, tmp_path).model.language.tie_embeddings is (said is not False)


@pytest.mark.parametrize("key", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_tied_head_may_have_a_second_tensor(key, tmp_path):
    """The second tensor may have either key, but must equal the embedding."""
    embedding = "language_model.model.embed_tokens.weight"
    for difference in (0, 1):
        folder = copy_in_one_file(
            NORMED,
            tmp_path / str(difference),
            lambda arrays, added=difference: arrays | {key: arrays[embedding] + added},
        )
        opened = ModelFolder.open(folder)
        fit = opened.check(shapes_of(opened))
        if difference:
            with pytest.raises(FolderError, match=f"{key} of .* set tie_word_embeddings: false"):
                fit.whole("embedding", np.float32)
        else:
            assert fit.whole("embedding", np.float32).shape == (40, 24)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("text_config", {"model_type": "gpt_oss"}, "has model_type 'gpt_oss'; there are qwen2, qw"),
        ("vision_config", {"image_size": [16, 8]}, r"has image_size \[16, 8\]; squares are under"),
        ("vision_config", {"hidden_act": "silu"}, "has hidden_act 'silu'; there are"),
        (
            "vision_config",
            {"norm_type": "batch"},
            "has norm_type 'batch'; there are layer_norm, rm",
        ),
        ("vision_config", {"use_absolute_position_embeddings": False}, "True alone is supported"),
        (
            "vision_config",
            {"hidden_dropout_prob": 0.1},
            "has hidden_dropout_prob 0.1; 0.0 alone is",
        ),
        ("vision_config", {"use_qk_norm": True, "layer_norm_eps": 1e-5}, "are normed with 1e-6"),
        (
            "vision_config",
            {"norm_type": "rms_norm", "use_mean_pooling": False},
            "use_mean_pooling False; its last norm is another one",
        ),
        (None, {"vision_feature_layer": -2}, "has vision_feature_layer -2; -1 alone is supported"),
        (None, {"downsample_ratio": 0.3}, "has downsample_ratio 0.3; one over a whole number"),
        (None, {"projector_hidden_act": "relu"}, "has projector_hidden_act 'relu'"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    folder_config = json.loads((copy / "config.json").read_text())
    (folder_config if part is None else folder_config[part]).update(values)
    (copy / "config.json").write_text(json.dumps(folder_config))
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


def test_a_tower_with_a_class_token_sees_squares_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"every image has 4 x 4 patches; set resize: square"):
        config_of(FOLDER, tmp_path, images={"resize": "fill", "min_tiles": 1, "max_tiles": 12})
