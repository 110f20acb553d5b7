"""Folders of Gemma 3 in old spellings and new ones, alone and beside a vision tower."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
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
    shapes_of,
)
from tests.support import tiny_config

# As the published 1B model and the text of the 4B model have them
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


def language(**values) -> dict:
    config = FolderConfig(Path("config.json"), values)
    return family_of(config).section(config)


@pytest.fixture
def tower(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "gemma3-tower", tmp_path / "copy"))


def test_a_file_of_the_old_spelling():
    found = language(**SMALL)
    assert (found["heads"], found["kv_heads"], found["head_size"]) == (4, 1, 256)
    assert found["full_layers"] == [5, 11, 17, 23] and found["window"] == 512
    assert (found["rope_theta"], found["window_rope_theta"]) == (1e6, 1e4)
    assert found["attention_scale"] == 1 / 16 and found["tie_embeddings"]


def test_a_file_that_leaves_out_what_is_usual():
    found = language(model_type="gemma3", text_config=SPARSE)
    sizes = (found["vocab_size"], found["heads"], found["kv_heads"], found["head_size"])
    assert sizes == (262_208, 8, 4, 256)
    assert found["rope_scaling"] == {"kind": "linear", "factor": 8.0}
    assert len(found["full_layers"]) == 5


def test_both_spellings_are_one():
    theta = {"full_attention": 1e6, "sliding_attention": 1e4}
    records = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()}
    every = ["sliding_attention"] * 5 + ["full_attention"]
    old = {"rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"}
    kept = {key: value for key, value in SMALL.items() if key not in old}
    new = kept | {"rope_parameters": records, "layer_types": (every * 5)[:26]}
    assert language(**new) == language(**SMALL)


def test_without_windows_there_is_one_theta():
    found = language(**SMALL, layer_types=["full_attention"] * 26)
    assert found["window_rope_theta"] is None and "window" not in found


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


def test_the_decoder_beside_a_tower_is_read(tower, tmp_path):
    (tower / "tokenizer.json").write_text("{}")
    tree = tiny_config(tmp_path)
    tree["model"] = {"from": str(tower)}
    config = parse_config(resolved(tree))
    assert config.model.language.post_norms and config.model.encoders == ()


def test_an_own_head_beside_a_tower_is_refused(tower):
    change_config(tower, tie_word_embeddings=False)
    with pytest.raises(FolderError, match="tie_word_embeddings False; True alone is supported"):
        ModelFolder.open(tower).family.section(FolderConfig.read(tower))


def test_keys_of_both_prefixes_are_read(tower):
    """What is trained changes, and the tower is carried through."""
    before = ModelFolder.open(tower)
    values = {
        key: np.array(tensor.array())
        for key, tensor in before.tensors.items()
        if not key.startswith("language_model.")
    }
    renamed = {}
    for key in before.tensors:
        ours = key.startswith("language_model.")
        renamed[key] = (
            key.replace("language_model.model.", "model.language_model.")
            if ours
            else f"model.{key}"
        )
    index = json.loads((tower / INDEX).read_text())
    index["weight_map"] = {renamed[key]: name for key, name in index["weight_map"].items()}
    (tower / INDEX).write_text(json.dumps(index))
    for file in before.files:

        def change(header):
            for key in [key for key in header if key in renamed]:
                header[renamed[key]] = header.pop(key)

        change_header(file.path, change)
    folder = ModelFolder.open(tower)
    fit = folder.check(shapes_of(folder))
    zeros = {path: np.zeros(shape, np.float32) for path, shape in fit.shapes.items()}
    write_folder([(fit, zeros.__getitem__)], tower.parent / "out")
    written = ModelFolder.open(tower.parent / "out").tensors
    for key, value in values.items():
        np.testing.assert_array_equal(written[f"model.{key}"].array(), value)
    assert not written["model.language_model.norm.weight"].array().any()


def test_a_tensor_of_no_part_is_named(tower):
    embedding = ModelFolder.open(tower).tensors["language_model.model.embed_tokens.weight"]
    add_tensor(embedding.file, "language_model.other", np.zeros(2, np.float32))
    index = json.loads((tower / INDEX).read_text())
    index["weight_map"]["language_model.other"] = embedding.file.name
    (tower / INDEX).write_text(json.dumps(index))
    folder = ModelFolder.open(tower)
    with pytest.raises(FolderError, match=r"language_model\.other \[2\] belongs to no parameter"):
        folder.check(shapes_of(folder))
