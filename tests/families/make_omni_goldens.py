"""Makes the goldens of Qwen3-Omni: random tiny checkpoints and what the reference makes of texts with pictures, clips
and videos. make_goldens.py calls it.

FOLDER/NAME/inputs.npz     input_ids, attention_mask, labels [B, T], input_features [clips, M, F],
                           feature_attention_mask [clips, F], pixel_values and pixel_values_videos [patches, numbers],
                           image_grid_thw and video_grid_thw [media, 3], video_second_per_grid [videos]
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the next tokens that are learned)
FOLDER/NAME/gradients.npz  of the loss, by key of the tensor, but for biases of keys of the audio tower
FOLDER/NAME/processed.npz  of some: sound_I [N] 16 bits; of the processor mel_I [F, M] and the number tokens_I, of clips
                           that lie beside a longer one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import write_numbers
from tests.families.make_heard_goldens import (
    CLIP,
    HEARD_ALL,
    HEARS,
    PICTURE,
    SEEN,
    SEES,
    VIDEO,
    random_sound,
)

ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "rope_parameters": ROTARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "depth": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_mel_bins": 10,
    "downsample_hidden_size": 8,
    "output_dim": 16,
    "n_window_infer": 200,  # two chunks of a second
}
# What speaks, and is carried through
TALKER_TEXT = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
TALKER = {
    "text_config": TALKER_TEXT
    | {"moe_intermediate_size": 4, "num_experts": 2, "num_experts_per_tok": 1}
    | {"shared_expert_intermediate_size": 4},
    "code_predictor_config": TALKER_TEXT | {"num_code_groups": 2},
    "num_code_groups": 2,
    "thinker_hidden_size": 16,
    "spatial_merge_size": 2,
}
WAVES = {
    "codebook_size": 8,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_quantizers": 2,
    "upsample_rates": [2],
    "upsampling_ratios": [2],
    "decoder_dim": 4,
}
# name -> (model_type, sizes of text, of vision, of audio, whether it has one matrix for embedding and head, dtype)
Sizes = dict[str, Any]
OMNI: dict[str, tuple[str, Sizes, Sizes, Sizes, bool, str]] = {
    "qwen3_omni_moe": ("qwen3_omni_moe", TEXT, VISION, AUDIO, False, "bfloat16"),
}
# Of other sizes, tied and without a talker: compared live alone
LIVE = {
    "qwen3_omni_moe-thinker": (
        "qwen3_omni_moe_thinker",
        TEXT
        | {"hidden_size": 24, "num_experts": 6, "attention_bias": True, "head_dim": 16}
        | {"rope_parameters": ROTARY | {"mrope_section": [4, 2, 2]}},
        VISION | {"out_hidden_size": 24, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        AUDIO | {"output_dim": 24, "num_mel_bins": 17, "n_window_infer": 300},
        True,
        "bfloat16",
    )
}
# Other kernels ask for sizes that are no test's
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
POSITIONS_PER_SECOND = 13
# Of clips at 16 kHz: of three chunks, the last of which is cut, of less than one, and of less than a token
SAMPLES = {"long": 35_111, "whole": 16_000, "odd": 7_777, "short": 481}
PROCESSED = ("short",)  # of which processed.npz is made
CELLS = {"tall": (3, 2), "small": (1, 1), "wide": (1, 4)}  # rows and columns of merged cells
CLIPS = {"quick": (3, 2, 1), "slow": (2, 1, 2)}  # of videos groups of frames, too
SECONDS = {"quick": 0.3, "slow": 1.7}  # from one of these to the next
# Counts of tokens, and media: of one kind each, and all
TEXTS = (
    (9,),
    (2, "tall", 4),
    (3, "small", 1, "wide", 3),
    (2, "odd", 5),
    (2, "quick", 4),
    (1, "short", 3, "slow", 2, "small", 1, "long", 2, "quick", 3, "whole", 4),
)


def make_omni(
    folder: Path,
    kind: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    audio: dict[str, Any],
    tied: bool,
    dtype: str,
    seed: int,
) -> None:
    """One random checkpoint, and what the reference computes of it in float32."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    model = _model(kind, text, vision, audio, tied)
    for parameter in model.parameters():
        scale = parameter.ndim == 1 and parameter.mean() > 0.5  # of a norm
        torch.nn.init.normal_(parameter, float(scale), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="30KB")
    thinker = t.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, **EAGER
    )
    random = np.random.default_rng(seed)
    extractor = t.WhisperFeatureExtractor(feature_size=audio["num_mel_bins"], chunk_length=300)
    sounds = {name: random_sound(random, count) for name, count in SAMPLES.items()}
    inputs = _texts(random, text["vocab_size"], extractor, sounds, folder)
    output = thinker(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients: dict[str, np.ndarray] = {}
    for key, parameter in thinker.named_parameters():
        if "audio_tower" in key and key.endswith("k_proj.bias"):
            continue  # 0: softmax does not see what all keys share
        gradients |= _as_stored(kind, key, parameter.grad.numpy())
    write_numbers(folder, inputs, logits, loss, gradients)
    if folder.name in OMNI:
        few = [sounds[name] for name in PROCESSED]
        np.savez_compressed(folder / "processed.npz", **_processed(extractor, few))


def _model(
    kind: str, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any], tied: bool
) -> Any:
    import transformers as t

    thinker = {
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "audio_start_token_id": HEARS,
        "audio_end_token_id": HEARD_ALL,
        "audio_token_id": CLIP,
        "vision_start_token_id": SEES,
        "vision_end_token_id": SEEN,
        "image_token_id": PICTURE,
        "video_token_id": VIDEO,
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3_omni_moe_thinker":
        config = t.Qwen3OmniMoeThinkerConfig(**thinker)
        return t.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    config = t.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=TALKER, code2wav_config=WAVES
    )
    return t.Qwen3OmniMoeForConditionalGeneration(config)


def _as_stored(kind: str, key: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A gradient by the keys in files of a parameter that has this name in memory."""
    key = key.replace("model.language_model.", "model.")
    for tower in ("model.audio_tower.", "model.visual."):
        key = key.replace(tower, tower.removeprefix("model."))
    of_experts = experts_as_stored(key, values)
    prefix = "thinker." if kind == "qwen3_omni_moe" else ""
    return {f"{prefix}{name}": value for name, value in of_experts.items()}


def experts_as_stored(key: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """By key of the tensors in files, which are apart where the reference joins experts, and two of their matrices."""
    experts, joined, name = key.partition(".experts.")
    if not joined:
        return {key: values}
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    return {
        f"{experts}.experts.{expert}.{part}.weight": matrix
        for expert, of_expert in enumerate(values)
        for part, matrix in zip(names, np.split(of_expert, len(names)), strict=True)
    }


def _texts(
    random: np.random.Generator,
    vocabulary: int,
    extractor: Any,
    sounds: Mapping[str, np.ndarray],
    folder: Path,
) -> dict[str, np.ndarray]:
    """Texts, in each of which media alternate with tokens; nothing is learned of media."""
    rows, clips, images, videos, seconds = [], [], [], [], []
    for text in TEXTS:
        ids: list[int] = []
        for part in text:
            if isinstance(part, int):
                ids += random.integers(VIDEO + 1, vocabulary, part).tolist()
            elif part in SAMPLES:
                clips.append(sounds[part])
                ids += [HEARS, *[CLIP] * tokens_of(len(sounds[part])), HEARD_ALL]
            elif part in CELLS:
                height, width = CELLS[part]
                images.append(random.integers(0, 256, (8 * height, 8 * width, 3)).astype(np.uint8))
                ids += [SEES, *[PICTURE] * height * width, SEEN]
            else:
                frames, height, width = CLIPS[part]
                shape = (2 * frames, 8 * height, 8 * width, 3)
                videos.append(random.integers(0, 256, shape).astype(np.uint8))
                seconds.append(SECONDS[part])
                ids += [SEES, *[VIDEO] * frames * height * width, SEEN]
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    heard = extractor(
        [clip / 32768 for clip in clips],
        sampling_rate=16_000,
        return_attention_mask=True,
        padding=True,
        truncation=False,
        return_tensors="np",
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(mask & ~np.isin(ids, (CLIP, PICTURE, VIDEO)), ids, -100),
        "input_features": heard["input_features"],
        "feature_attention_mask": heard["attention_mask"].astype(np.int64),
        "video_second_per_grid": np.array(seconds, np.float32),
    }
    return inputs | _patches(folder, extractor, images, videos)


def _patches(
    folder: Path, extractor: Any, images: list[np.ndarray], videos: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Write the file that says how media are read; returns the inputs of pictures and videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=8 * 8 * 12)
    values = extractor.to_dict() | processor.to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=2))
    made = processor(images=images, return_tensors="np")
    patches, grids = [], []
    for video in videos:
        # Each frame as a picture, which is the same twice
        frames = processor(images=[*video], return_tensors="np")
        twice = frames["pixel_values"].reshape(len(video) // 2, 2, -1, 3, 2, 16)
        both = np.stack([twice[:, 0, :, :, 0], twice[:, 1, :, :, 0]], axis=3)
        patches.append(both.reshape(-1, 3 * 2 * 16))
        grids.append([len(video) // 2, *frames["image_grid_thw"][0, 1:]])
    return {
        "pixel_values": made["pixel_values"],
        "image_grid_thw": made["image_grid_thw"],
        "pixel_values_videos": np.concatenate(patches),
        "video_grid_thw": np.array(grids),
    }


def _processed(extractor: Any, sounds: list[np.ndarray]) -> dict[str, Any]:
    """What the processor makes of each clip beside one that is a second longer: frames of it and of no silence."""
    found: dict[str, Any] = {}
    for i, sound in enumerate(sounds):
        longer = np.zeros(len(sound) + 16_000)
        heard = extractor(
            [sound / 32768, longer],
            sampling_rate=16_000,
            return_attention_mask=True,
            padding=True,
            truncation=False,
        )
        frames = int(np.sum(heard["attention_mask"][0]))
        mel = np.asarray(heard["input_features"][0])[:, :frames].T
        found |= {f"sound_{i}": sound, f"mel_{i}": mel, f"tokens_{i}": tokens_of(len(sound))}
    return found


def tokens_of(samples: int) -> int:
    """Tokens of a clip, as the reference counts them."""
    chunks, rest = divmod(-(-samples // 160), 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return 13 * chunks + rest
