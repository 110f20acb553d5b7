"""Qwen3-VL and Qwen3-VL-MoE: what their folders say, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ComponentsConfig, ConfigError, ModelConfig
from jaxmllm.families.expert_lines import INPUTS_FIRST, OUTPUTS_FIRST
from jaxmllm.families.lines import full_index
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.qwen3_vl_moe import QWEN3_VL_MOE
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError, WeightFile, write_tensors
from jaxmllm.models.compose import build_model
from sharding.mesh import make_mesh
from tests.families.test_qwen2_5_vl import change, config_of, videos_of
from tests.support import tiny_config

GOLDENS = Path(__file__).parent / "goldens"
FOLDER = GOLDENS / "qwen3_vl"
MIXTURE = GOLDENS / "qwen3_vl_moe"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(FOLDER, tmp_path)
    language = config.model.language
    vision = config.model.vision
    images = config.data.images
    assert vision is not None
    assert language.rope_interleaved and language.rope_sections == (2, 1, 1)
    assert language.tie_embeddings and language.qk_norm and not language.qkv_bias
    assert language.rope_theta == 5e6 and language.bidirectional == ()
    assert (vision.positions, vision.position_grid) == ("rotary_and_resampled", 5)
    assert (vision.patch_frames, vision.norm, vision.gelu) == (2, "layer", "tanh")
    assert (vision.projector.mlp_width, vision.projector.gelu) == (4 * 16, "exact")
    assert vision.deepstack_layers == (0, 2) and config.model.token_width == 3 * 16
    assert (images.resize, images.min_pixels, images.max_pixels) == ("smart", 64, 768)
    # The run folder keeps the config with all values filled in. Reading it again changes nothing.
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


def test_videos_are_read_as_the_folder_says(tmp_path):
    """The file for pictures is read for videos. It says nothing of sampling."""
    videos = videos_of(config_of(FOLDER, tmp_path, vision={"videos": True}))
    assert (videos.fps, videos.sampling, videos.min_frames) == (2.0, "ends", 4)
    assert (videos.bounds, videos.min_pixels, videos.max_pixels) == ("video", 64, 768)
    assert videos.times == "text"


def test_experts(tmp_path):
    language = config_of(MIXTURE, tmp_path).model.language
    assert language.experts is not None and language.experts.renormalise
    assert (language.experts.count, language.experts.per_token, language.mlp_width) == (8, 2, 12)


PUBLISHED_TEXT = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "rope_theta": 5_000_000,
    "vocab_size": 151_936,
}
PUBLISHED_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("sizes", "experts", "numbers"),
    [
        ((4096, 36, 32, 8, 12_288), {}, 8_767_123_696),
        ((2048, 48, 32, 4, 6144), PUBLISHED_EXPERTS, 31_070_754_032),
    ],
    ids=["8B", "30B-A3B"],
)
def test_published_models_have_their_number_of_parameters(copy, sizes, experts, numbers):
    """The index of each published folder has twice as many bytes: two per parameter."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = dict(zip((*names, "intermediate_size"), sizes, strict=True))
    folder_config = {
        "model_type": "qwen3_vl_moe" if experts else "qwen3_vl",
        "text_config": PUBLISHED_TEXT | text | experts,
        # All other values are the reference's defaults.
        "vision_config": {"out_hidden_size": sizes[0]},
        "tie_word_embeddings": False,
    }
    (copy / "config.json").write_text(json.dumps(folder_config))
    change(copy / "preprocessor_config.json", patch_size=16)
    tree = resolved({"model": {"from": str(copy)}})["model"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config = ModelConfig.model_validate_json(json.dumps(tree))
    model = build_model(config, 151_936, ComponentsConfig(), mesh)
    shapes = {name: component.shapes for name, component in model.components.items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == numbers


def test_experts_are_read_in_both_layouts(tmp_path):
    """The published layout has inputs first; transformers 5 writes outputs first."""
    copy = Path(shutil.copytree(MIXTURE, tmp_path / "copy"))
    for path in copy.glob("*.safetensors"):
        arrays = {key: np.array(t.array()) for key, t in WeightFile.open(path).tensors.items()}
        swapped = {k: np.swapaxes(a, 1, 2) if ".experts." in k else a for k, a in arrays.items()}
        write_tensors(path, swapped)
    shapes = {f"layers.mlp.{name}": (2, 8, 16, 12) for name in ("gate", "up")}
    shapes["layers.mlp.down"] = (2, 8, 12, 16)
    published, swapped_folder = (ModelFolder.open(folder) for folder in (MIXTURE, copy))
    for path, shape in shapes.items():
        parameters = []
        for folder in (published, swapped_folder):
            line = folder.family.lines[path]
            values = np.empty(shape, np.float32)
            for key, target, index in line.pieces(shape, full_index(shape)):
                values[target] = line.view(folder.tensors[key].array(), shape, index)
            parameters.append(values)
        np.testing.assert_array_equal(*parameters)
    key = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert published.tensors[key].shape == (8, 16, 24), "in, out"
    assert swapped_folder.tensors[key].shape == (8, 24, 16)


@pytest.mark.parametrize(("width", "mlp_width"), [(16, 12), (16, 16), (16, 8)])
def test_square_matrices_do_not_hide_the_layout_of_experts(width, mlp_width):
    """One of the two tensors of a layer may have the same shape in both orders."""
    family = QWEN3_VL_MOE[0]
    section = {"width": width, "mlp_width": mlp_width, "experts": {"count": 3}}
    keys = [f"layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    published = dict(zip(keys, [(3, width, 2 * mlp_width), (3, mlp_width, width)], strict=True))
    written = {key: (shape[0], *shape[:0:-1]) for key, shape in published.items()}
    fitting = [
        [variant.lines for variant in family.variants if variant.fits(section, shapes)]
        for shapes in (published, written)
    ]
    assert fitting == [[INPUTS_FIRST], [OUTPUTS_FIRST]]


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'gelu_pytorch_tanh' alo"),
        ("vision_config", {"num_position_embeddings": 7}, "it must be the square of a number"),
        ("vision_config", {"out_hidden_size": 8}, "has out_hidden_size 8; the decoder is 16 wide"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type axial alone is"),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, "ascending order, each once"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "must be layers 0 .. 2 in"),
        (
            "text_config",
            {"rope_parameters": {"mrope_interleaved": False}},
            "has mrope_interleaved False; True alone is supported",
        ),
        ("text_config", {"use_sliding_window": True}, "has use_sliding_window True"),
        ("text_config", {"num_hidden_layers": 1}, "2 layers, but the decoder has 1 after which"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    change(copy / "config.json", part, **values)
    with pytest.raises(ConfigError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mlp_only_layers": [0]}, r"has mlp_only_layers \[0\]"),
        ({"norm_topk_prob": False}, "has norm_topk_prob False; True alone is supported"),
    ],
)
def test_experts_that_cannot_be(tmp_path, values, words):
    copy = Path(shutil.copytree(MIXTURE, tmp_path / "copy"))
    change(copy / "config.json", "text_config", **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


def test_deepstack_goes_without_a_generator(tmp_path):
    generator = {"width": 32, "layers": 1, "heads": 2, "mlp_width": 32}
    with pytest.raises(ConfigError, match=r"vision\.deepstack_layers: tokens of a model with mod"):
        config_of(FOLDER, tmp_path, diffusion=generator)


def test_a_tower_with_another_decoder_has_no_deepstack_unless_asked(tmp_path):
    for chosen in ({}, {"deepstack_layers": [1]}):
        tree = tiny_config(tmp_path)
        tree["model"]["vision"] = {"from": str(FOLDER), "merge": 2} | chosen
        del tree["data"]["images"]
        vision = parse_config(resolved(tree)).model.vision
        assert vision is not None and vision.positions == "rotary_and_resampled"
        assert [*vision.deepstack_layers] == chosen.get("deepstack_layers", [])
