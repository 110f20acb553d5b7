"""Qwen2.5-Omni's thinker: what its folders say, alone and beside a talker.

Clips are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from pathlib import Path

import jax
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ComponentsConfig, ModelConfig
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.qwen2_5_omni import QWEN2_5_OMNI
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from sharding.mesh import make_mesh
from tests.families.test_qwen2_5_vl import PUBLISHED_TOWER, change
from tests.families.test_qwen2_audio import check_clips, config_of, reader_of

GOLDENS = Path(__file__).parent / "goldens"
WHOLE = GOLDENS / "qwen2_5_omni"
THINKER = GOLDENS / "qwen2_5_omni-thinker"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(THINKER, tmp_path / "copy"))


@pytest.mark.parametrize("folder", [WHOLE, THINKER], ids=["whole", "thinker"])
def test_what_the_folder_says_stands_in_the_config(folder, tmp_path):
    config = config_of(folder, tmp_path)
    language = config.model.language
    vision = config.model.vision
    audio = config.model.audio
    assert vision is not None and audio is not None
    assert language.bidirectional == () and language.rope_sections == (1, 1, 1)
    assert language.tie_embeddings == (folder == THINKER), "whatever its part for text says"
    assert (vision.window, vision.full_layers, vision.projector.gelu) == (4, (1,), "exact")
    assert (audio.chunk_frames, audio.attention, audio.positions) == (20, "chunk", "sinusoidal")
    assert (audio.silence, audio.pool, audio.merge) == ("masked", 2, 1)
    assert audio.projector.linear and audio.gelu == "exact" and not audio.key_bias
    assert (config.data.images.resize, config.data.audio.max_seconds) == ("smart", 2.0)
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


@pytest.mark.parametrize("folder", [WHOLE, THINKER], ids=["whole", "thinker"])
def test_videos_are_read_as_the_reference_reads_them(folder, tmp_path):
    """The bounds of frames are the defaults of its video processor class."""
    videos = config_of(folder, tmp_path, vision={"videos": True}).data.videos
    assert (videos.fps, videos.sampling, videos.bounds) == (2.0, "ends", "frame")
    assert (videos.min_pixels, videos.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    assert (videos.times, videos.positions_per_second) == ("line", 25.0)


def test_clips_are_the_processors(tmp_path):
    """Frames hear silence after the clip, and none of the silence is kept. A clip may have many
    chunks.

    An odd last feature is dropped: 49 frames have 25 features, which make 12 tokens."""
    reader = reader_of(config_of(WHOLE, tmp_path))
    check_clips(reader, WHOLE, tmp_path)
    shapes = [(frames, 1, 1) for frames in (3, 20, 49, 100)]
    assert [reader.length(shape) for shape in shapes] == [4, 20, 52, 100]
    assert [reader.tokens(shape) for shape in shapes] == [1, 5, 12, 25]


def test_clips_advance_positions_by_their_tokens(tmp_path):
    """Positions advance by 25 per second, on all three axes together."""
    reader = reader_of(config_of(WHOLE, tmp_path))
    positions, following = reader.token_positions((100, 1, 1), 7)
    assert positions.tolist() == [[7 + i] * 3 for i in range(25)] and following == 32


PUBLISHED_THINKER = {
    "audio_config": {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    "vision_config": PUBLISHED_TOWER | {"out_hidden_size": 3584},
    "text_config": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
    },
}


def test_the_published_model_has_its_number_of_parameters(copy):
    """8.93 billion parameters with a vocabulary of 152,064.

    The audio tower's are counted by hand. The rest are the numbers of Qwen2.5-VL's tower and of
    Qwen2.5-7B."""
    (copy / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_omni", "thinker_config": PUBLISHED_THINKER})
    )
    (copy / "processor_config.json").write_text("{}")
    (copy / "preprocessor_config.json").write_text(
        json.dumps({"feature_size": 128, "chunk_length": 300, "patch_size": 14})
    )
    tree = resolved({"model": {"from": str(copy)}})
    assert tree["data"]["audio"]["max_seconds"] == 300.0
    model = build_model(
        ModelConfig.model_validate_json(json.dumps(tree["model"])),
        152_064,
        ComponentsConfig(),
        make_mesh({"data": 1}, jax.devices()[:1]),
    )
    sizes = {
        name: sum(leaf.size for leaf in jax.tree.leaves(component.shapes))
        for name, component in model.components.items()
    }
    layer_size = 4 * 1280**2 + 3 * 1280 + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280
    stem_size = 3 * 128 * 1280 + 3 * 1280**2 + 2 * 1280
    assert sizes["audio"] == 32 * layer_size + stem_size + 2 * 1280
    assert sizes["projector.audio"] == 1280 * 3584 + 3584
    assert sizes["vision"] + sizes["projector.vision"] == 676_550_144, "Qwen2.5-VL's"
    assert sizes["language"] == 7_615_616_512, "Qwen2.5-7B's"


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("audio_config", {"n_window": 51}, "has n_window 51; there are 50 positions"),
        ("audio_config", {"n_window": 15}, "has n_window 15; a token would be of features of two"),
        ("audio_config", {"output_dim": 16}, "has output_dim 16; the decoder is 24 wide"),
        ("audio_config", {"activation_function": "relu"}, "has activation_function 'relu'; 'gelu'"),
        ("vision_config", {"out_hidden_size": 16}, "has out_hidden_size 16; the decoder is 24 w"),
        ("text_config", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'silu' alone is suppor"),
        (None, {"vision_config": None}, "has vision_config None; it must be a JSON object"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    change(copy / "config.json", part, **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize("folder", [WHOLE, THINKER], ids=["whole", "thinker"])
def test_all_tensors_belong_to_one_component_or_are_carried(folder):
    """Besides the components, a folder may hold the talker, and an embedding that the reference
    never uses."""
    model_type = FolderConfig.read(folder).get("model_type")
    component_keys: list[str] = []
    tensors = ModelFolder.open(folder).tensors
    for family in QWEN2_5_OMNI:
        if family.model_type == model_type:
            lines = ModelFolder.open(folder, family.component).family.lines.values()
            patterns = {line.key.split("{layer}")[0] for line in lines}
            component_keys += [key for key in tensors if key.startswith(tuple(patterns))]
    other_keys = tensors.keys() - {*component_keys}
    unused = {key for key in other_keys if key.endswith("audio_tower.audio_bos_eos_token.weight")}
    assert len(unused) == 1
    assert all(key.startswith(("talker.", "token2wav.")) for key in other_keys - unused)
    assert (len(other_keys) > 1) == (folder == WHOLE)
