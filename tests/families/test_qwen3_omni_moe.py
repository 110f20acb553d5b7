"""Qwen3-Omni's thinker: what its folder says beside a talker, its clips, and the times of videos.

Clips are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ComponentsConfig, ConfigError, ModelConfig
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.modality import ClipShape
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from sharding.mesh import make_mesh
from tests.families.test_qwen2_audio import check_clips, config_of, reader_of
from tests.support import needs

FOLDER = Path(__file__).parent / "goldens" / "qwen3_omni_moe"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(FOLDER, tmp_path, vision={"videos": True})
    language = config.model.language
    vision = config.model.vision
    audio = config.model.audio
    assert vision is not None and audio is not None and language.experts is not None
    assert language.rope_interleaved and language.rope_sections == (2, 1, 1)
    assert (language.mlp_width, language.experts.count, language.qk_norm) == (8, 8, True)
    assert language.experts.renormalise and language.bidirectional == ()
    assert (vision.deepstack_layers, vision.positions) == ((0,), "rotary_and_resampled")
    assert (audio.chunk_frames, audio.chunk_slots, audio.window_chunks) == (100, 104, 2)
    assert (audio.stem_channels, audio.silence, audio.pool, audio.merge) == (8, "cut", 1, 1)
    assert (audio.projector.mlp_width, audio.projector.gelu, audio.key_bias) == (16, "exact", True)
    videos = config.data.videos
    assert (videos.fps, videos.times, videos.positions_per_second) == (1.0, "fractions", 13.0)
    assert (videos.min_pixels, videos.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert config.data.audio.max_seconds == 2400, "40 minutes, whatever its chunk_length"
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


def test_clips_are_the_processors(tmp_path):
    """The clip lies beside a longer one, so its frames hear silence after it.

    Four empty slots follow each whole chunk."""
    reader = reader_of(config_of(FOLDER, tmp_path))
    check_clips(reader, FOLDER, tmp_path)
    shapes = [(frames, 1, 1) for frames in (1, 8, 97, 100, 101, 250)]
    assert [reader.length(shape) for shape in shapes] == [8, 8, 104, 104, 112, 264]
    assert [reader.tokens(shape) for shape in shapes] == [1, 1, 13, 13, 14, 33]
    assert reader.apart(shapes[-1]).tolist() == [0] * 208 + [1] * 56


@pytest.mark.slow
@needs("torch", "transformers")
def test_the_reference_hears_a_last_chunk_as_long_as_its_batch_does():
    """The reference hears a clip of less than a chunk in another way depending on the clips beside
    it.

    This no longer changes once one of them has a whole chunk. Our reader always hears clips as if
    one had, and the goldens are made from batches with whole chunks."""
    import torch
    import transformers

    tower = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).get_submodule("model.audio_tower")
    random = np.random.default_rng(0)
    clip, whole_clip, long_clip = (
        random.standard_normal((10, frames)) for frames in (50, 100, 230)
    )

    def heard(*clips: np.ndarray) -> np.ndarray:
        features = torch.tensor(np.concatenate(clips, axis=1), dtype=torch.float32)
        lengths = torch.tensor([clip.shape[1] for clip in clips])
        tokens = tower(features, feature_lens=lengths).last_hidden_state
        return tokens[:7].detach().numpy()

    beside_whole = heard(clip, whole_clip)
    np.testing.assert_allclose(heard(clip, long_clip), beside_whole, atol=1e-6)
    assert np.abs(heard(clip) - beside_whole).max() > 1e-3


def test_times_of_videos_are_not_rounded(tmp_path):
    """What follows a video goes on at its maximum + 1, which may lie between whole numbers, too."""
    config = config_of(FOLDER, tmp_path, vision={"videos": True})
    reader = modalities(config.model, config.data)["vision"]
    assert isinstance(reader, ImagesAndVideos)
    reader = replace(reader, videos=reader.videos.model_copy(update={"fps": 4.0}))
    positions, following = reader.token_positions(ClipShape((3, 2, 4), 6, 1.0), 7.5)
    assert positions.tolist() == [
        [7.5 + 6.5 * group, 7.5, 7.5 + column] for group in range(3) for column in range(2)
    ]
    assert following == 21.5


PUBLISHED = {
    "audio_config": {"output_dim": 2048},
    "vision_config": {"out_hidden_size": 2048},
    "text_config": {
        "vocab_size": 152_064,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default", "type": "default"},
    },
    "position_id_per_seconds": 13,
}


def test_the_published_model_has_its_number_of_parameters(copy):
    """31.7 billion parameters with a vocabulary of 152,064. Keys that are left out mean the
    reference's defaults."""
    (copy / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": PUBLISHED})
    )
    (copy / "preprocessor_config.json").write_text(
        json.dumps({"feature_size": 128, "chunk_length": 300, "patch_size": 16})
    )
    tree = resolved({"model": {"from": str(copy)}})
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
    layer_size = 4 * (1280**2 + 1280) + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280
    stem_size = 9 * 480 * (1 + 2 * 480) + 3 * 480 + 480 * 16 * 1280
    assert sizes["audio"] == 32 * layer_size + stem_size + 2 * 1280
    assert sizes["projector.audio"] == 1280**2 + 1280 + 1280 * 2048 + 2048
    attention_size = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128 + 2 * 2048
    experts_size = 128 * (3 * 2048 * 768 + 2048)
    assert sizes["language"] == 48 * (attention_size + experts_size) + 2 * 152_064 * 2048 + 2048
    assert sizes["projector.vision"] == 4 * (4608**2 + 4608 + 4608 * 2048 + 2048) + 3 * 2 * 4608


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("audio_config", {"n_window": 40}, "has n_window 40; chunks have 10 tokens then, and the"),
        ("audio_config", {"n_window_infer": 99}, "has n_window_infer 99; a chunk has 100 frames"),
        ("audio_config", {"output_dim": 8}, "has output_dim 8; the decoder is 16 wide"),
        ("text_config", {"mlp_only_layers": [0]}, r"has mlp_only_layers \[0\]; \[\] alone is"),
        (None, {"vision_config": None}, "has vision_config None; it must be a JSON object"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    config = json.loads((copy / "config.json").read_text())
    thinker = config["thinker_config"]
    (thinker if part is None else thinker[part]).update(values)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


def test_a_tower_of_it_alone_wants_whole_chunks_of_tokens(tmp_path):
    """A chunk has 13 tokens, a prime number, so no merge divides it."""
    with pytest.raises(ConfigError, match=r"chunk_frames \(100\) must be a multiple of 8 \* pool"):
        config_of(FOLDER, tmp_path, audio={"from": str(FOLDER), "merge": 5})


def test_all_tensors_belong_to_one_component_or_are_carried():
    """Besides the components, the folder holds the talker."""
    component_keys: list[str] = []
    tensors = ModelFolder.open(FOLDER).tensors
    model_type = FolderConfig.read(FOLDER).get("model_type")
    for family in QWEN3_OMNI_MOE:
        if family.model_type == model_type:
            lines = ModelFolder.open(FOLDER, family.component).family.lines.values()
            patterns = {line.key.split("{layer}")[0] for line in lines}
            component_keys += [key for key in tensors if key.startswith(tuple(patterns))]
    other_keys = tensors.keys() - {*component_keys}
    assert other_keys and all(key.startswith(("talker.", "code2wav.")) for key in other_keys)
