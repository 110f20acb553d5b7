"""Qwen2-Audio: what its folders say, its clips, and what is refused.

Clips are compared with the processed.npz that the reference's processor made."""

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.reference import File, MediaError
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.families.model_folder import Fit, ModelFolder
from jaxmllm.families.qwen2_audio import QWEN2_AUDIO
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from tests.families.test_model_folder import copy_in_one_file
from tests.families.test_qwen2_5_vl import change, config_of
from tests.support import tiny_config

FOLDER = Path(__file__).parent / "goldens" / "qwen2_audio"


def reader_of(config: Config) -> Sounds:
    reader = modalities(config.model, config.data)["audio"]
    assert isinstance(reader, Sounds)
    return reader


def check_clips(reader: Sounds, folder: Path, place: Path) -> None:
    """Checks frames to the last one, and numbers of tokens, against the processor's."""
    processed = dict(np.load(folder / "processed.npz"))
    for i in range(sum(name.startswith("sound") for name in processed)):
        path = place / f"{i}.wav"
        soundfile.write(path, processed[f"sound_{i}"], 16_000, subtype="PCM_16")
        shape = reader.measure(File(path))
        expected = processed[f"mel_{i}"]
        assert shape == (len(expected), 1, 1)
        assert reader.tokens(shape) == processed[f"tokens_{i}"]
        slots = reader.load(File(path), shape)
        assert len(slots) == reader.length(shape)
        np.testing.assert_allclose(slots[: len(expected)], expected, rtol=0, atol=1e-5)
        assert (reader.real_slots(shape) == (np.arange(len(slots)) < len(expected))).all()


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def test_what_the_folder_says_stands_in_the_config(tmp_path):
    config = config_of(FOLDER, tmp_path)
    language = config.model.language
    audio = config.model.audio
    data = config.data.audio
    assert audio is not None
    assert language.bidirectional == () and language.rope_sections is None and language.qkv_bias
    assert (audio.chunk_frames, audio.stem_strides, audio.pool, audio.merge) == (100, (1, 2), 2, 1)
    assert (audio.positions, audio.silence, audio.attention) == ("table", "stem", "clip")
    assert audio.projector.linear and audio.gelu == "exact" and not audio.key_bias
    assert (data.max_seconds, data.window_length, data.hop_length) == (1.0, 400, 160)
    dumped = config.model_dump(mode="json", by_alias=True)
    assert parse_config(resolved(dumped)) == config


def test_keys_as_in_memory_are_read(copy, tmp_path):
    """All keys are read, whatever they begin with. Tensors of other components are carried through."""

    def in_memory(key: str) -> str:
        if key == "language_model.lm_head.weight":
            return "lm_head.weight"
        return f"model.{key.replace('language_model.model.', 'language_model.')}"

    renamed = copy_in_one_file(
        copy,
        tmp_path / "turned",
        lambda arrays: {in_memory(key): array for key, array in arrays.items()},
    )
    shapes = {"embedding": (40, 16), "head": (16, 40), "norm.scale": (16,)}
    for path in shapes:
        head_values, expected = (
            Fit(ModelFolder.open(folder), shapes, {}).whole(path, np.float32)
            for folder in (renamed, copy)
        )
        np.testing.assert_array_equal(head_values, expected)
    for component in ("audio", "projector.audio"):
        folder = ModelFolder.open(renamed, component)
        prefixes = {line.key.partition("{layer}")[0] for line in folder.family.lines.values()}
        assert all(any(key.startswith(prefix) for key in folder.tensors) for prefix in prefixes)
        other_keys = [key for key in folder.tensors if not key.startswith(tuple(prefixes))]
        assert other_keys and all(
            any(fnmatchcase(key, pattern) for pattern in folder.family.carried)
            for key in other_keys
        )


def test_what_a_config_leaves_out_is_as_the_reference_has_it(copy):
    folder_config = {"model_type": "qwen2_audio", "text_config": {}, "audio_config": {}}
    (copy / "config.json").write_text(json.dumps(folder_config))
    config = ModelFolder.open(copy).config
    language, audio = (family.section(config) for family in QWEN2_AUDIO[:2])
    assert (language["width"], language["layers"], language["kv_heads"]) == (4096, 32, 32)
    assert (audio["width"], audio["layers"], audio["chunk_frames"]) == (1280, 32, 3000)
    placeholder = QWEN2_AUDIO[1].placeholder
    assert placeholder is not None and placeholder(config) == 151_646


@pytest.mark.parametrize("size", [7, None])
def test_windows_whose_size_is_null_are_none(size):
    config = ModelFolder.open(FOLDER).config
    windows = {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 0}
    text = config.values["text_config"] | windows | {"layer_types": None}
    assert QWEN2_AUDIO[0].section(config.updated(text_config=text)).get("window") == size


def test_clips_are_the_processors(tmp_path):
    """Silence follows a clip as far as the convolutions reach. A clip of one chunk ends with its
    chunk."""
    reader = reader_of(config_of(FOLDER, tmp_path))
    check_clips(reader, FOLDER, tmp_path)
    lengths = [reader.length((frames, 1, 1)) for frames in (1, 2, 3, 4, 47, 48, 99, 100)]
    assert lengths == [4, 4, 8, 8, 52, 52, 100, 100]
    silence = reader.load(File(tmp_path / "3.wav"), (20, 1, 1))[22:]
    assert (silence == silence.min()).all() and silence.min() != 0


def test_a_clip_without_tokens_and_one_beyond_the_limit(tmp_path):
    reader = reader_of(config_of(FOLDER, tmp_path))
    for samples, reason, words in (
        (320, "audio_too_short", "lasts 0.020 s, which is too short for a token of 0.04 s"),
        (16_001, "audio_too_long", "more than data.audio.max_seconds = 1"),
    ):
        path = tmp_path / "clip.wav"
        soundfile.write(path, np.zeros(samples, np.int16), 16_000, subtype="PCM_16")
        with pytest.raises(MediaError, match=words) as caught:
            reader.measure(File(path))
        assert caught.value.reason == reason
    with pytest.raises(ConfigError, match=r"max_seconds \(2\): .* a clip is one chunk of 1 s"):
        tree = config_of(FOLDER, tmp_path).model_dump(mode="json", by_alias=True)
        tree["data"]["audio"]["max_seconds"] = 2
        parse_config(tree)


def test_a_run_may_take_the_tower_alone(tmp_path):
    """The tower may run under another decoder, with a fresh projector, and the decoder without the
    tower."""
    assert config_of(FOLDER, tmp_path, audio=None).model.audio is None
    tower_tree = tiny_config(tmp_path)
    tower_tree["model"]["audio"] = {"from": str(FOLDER), "merge": 5}
    del tower_tree["data"]["audio"]
    audio = parse_config(resolved(tower_tree)).model.audio
    assert audio is not None and audio.merge == 5 and not audio.projector.linear


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("audio_config", {"activation_function": "relu"}, "has activation_function 'relu'; 'gelu'"),
        ("audio_config", {"encoder_layerdrop": 0.1}, "has encoder_layerdrop 0.1; 0.0 alone is"),
        ("audio_config", {"scale_embedding": True}, "has scale_embedding True; False alone is"),
        ("text_config", {"model_type": "llama"}, "has model_type 'llama'; 'qwen2' alone is"),
        ("text_config", {"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'silu' alone is suppor"),
        (None, {"audio_config": None}, "has audio_config None; it must be a JSON object"),
    ],
)
def test_a_folder_that_cannot_be(copy, tmp_path, part, values, words):
    change(copy / "config.json", part, **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"feature_size": 80}, "has feature_size 80; 12 alone is supported"),
        ({"chunk_length": 30}, "has chunk_length 30; the tower hears 100 frames at once"),
        ({"do_normalize": True}, "has do_normalize True; False alone is supported"),
    ],
)
def test_a_processor_that_cannot_be(copy, tmp_path, values, words):
    change(copy / "preprocessor_config.json", **values)
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)
